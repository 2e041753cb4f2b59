"""Batches whose sparse features stay sparse: losses, gradients and scores are those of dense rows, to rounding."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mggcn.assemble import stack as stacks
from mggcn.assemble.plan import STRATEGIES, plan_graph, plan_shape, resolve
from mggcn.assemble.rank import Rank
from mggcn.blocks.block import Stack
from mggcn.config import Config, RunConfig, SampleConfig
from mggcn.errors import PlanError
from mggcn.graph.csr import CSR, Graph
from mggcn.graph.nonzeros import RowLengths
from mggcn.graph.store_write import write_store
from mggcn.planning.batches import stack_of
from mggcn.planning.record import layer_reasons, plan_from_dict, to_dict
from mggcn.planning.run import RunPlan
from tests.cli.runs import history, run_main
from tests.feed.test_blocks import MODELS
from tests.feed.test_sampled import ALL, DRAWS, grads_of, sampled
from tests.graphs import csr, make_graph, on_ranks, pattern
from tests.reference import dense_features
from tests.shapes import shape_of

N, D = 61, 30
SEED = 8123  # of config_of
EMPTY = 7
"""A vertex without a nonzero feature."""
KINDS: dict[str, dict[str, Any]] = {
    **MODELS,
    "gcn-dropped": {"kind": "gcn", "input_dropout": 0.4},
    "sage-dropped": {"kind": "sage", "aggregator": "mean", "input_dropout": 0.4, "dropout": 0.3},
    "sage-residual": {"kind": "sage", "aggregator": "mean", "residual": "linear", "input_dropout": 0.2},
    "sage-gcn": {"kind": "sage", "aggregator": "gcn", "self_loops": True},
    "gatv2-dropped": {"kind": "gatv2", "heads": 2, "hidden": (8,), "input_dropout": 0.3},
    "sgc": {"kind": "sgc", "hops": 2, "hidden": ()},
    "appnp": {"kind": "appnp", "hops": 2},
    "dense-before": {"kind": "gcn", "dense_before": (9,)},
}


def sparse_graph(*, values: bool = True) -> Graph:
    """A directed graph with sparse features, of which one row has none."""
    adj = pattern("directed", N, 5) + np.roll(np.eye(N, dtype=np.float32), 1, 0)
    graph = make_graph((adj > 0).astype(np.float32), num_features=D, num_classes=4, sparse=True, seed=4)
    x = dense_features(graph)
    x[EMPTY] = 0
    return dataclasses.replace(graph, features=csr(x, values))


def with_features(config: Config, setting: str, **run: Any) -> Config:
    return dataclasses.replace(config, run=dataclasses.replace(config.run, features=setting, **run))


def trained(rank: Rank) -> dict[str, Any]:
    """A loss with its gradients, and losses and scores of two epochs after it."""
    found: dict[str, Any] = {"loss": rank.trainer.gradients(2), "grads": grads_of(rank)}
    found["losses"] = [rank.trainer.step(epoch) for epoch in range(2)]
    rank.trainer.evaluate()
    plan = rank.plan
    return found | {"scores": rank.trainer.logits().clone(), "plan": plan, "sparse": plan.input.sparse}


def compare(config: Config, graph: Graph, scored: float = 1e-9) -> list[dict[str, Any]]:
    """Compare sparse rows with dense ones, scores to `scored`; return what the ranks with sparse ones found."""
    sparse, dense = (on_ranks(with_features(config, setting), graph, trained) for setting in ("sparse", "dense"))
    for one, two in zip(sparse, dense, strict=True):
        assert (one["sparse"], two["sparse"]) == (True, False)
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-12)
        np.testing.assert_allclose(one["losses"], two["losses"], rtol=1e-10)
        np.testing.assert_allclose(one["scores"], two["scores"], rtol=10 * scored, atol=scored)
        for name, gradient in two["grads"].items():
            atol = 1e-10 * (np.abs(gradient).max() or 1)
            np.testing.assert_allclose(one["grads"][name], gradient, atol=atol, err_msg=name)
    return sparse


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.covering(1, rest="slow")
def test_sparse_rows_give_the_gradients_of_dense_ones(name: str, ranks: int) -> None:
    """Fails if a row set's product or weight gradient reads another's rows, a mask differs from that of dense rows, S_c is
    lost, or an evaluation reads X otherwise than it is stored.
    """
    found = compare(sampled(ranks, KINDS[name]), sparse_graph())
    values = found[0]["plan"].values
    own = KINDS[name]["kind"] in ("sage", "gatv2") and KINDS[name].get("aggregator") != "gcn"
    assert len(values.sparse_sets) == 1 + (own or KINDS[name].get("residual") == "linear")
    assert values.input_scaled == (name in ("gcn", "gcn-wide", "gcn-dropped", "sgc"))


@pytest.mark.parametrize("draw", DRAWS)
def test_sparse_rows_of_every_draw(draw: str) -> None:
    """Fails if rows are scaled by the whole graph's degrees where a block's count, or the other way round."""
    compare(sampled(1, {"kind": "gcn", "self_loops": True}, **DRAWS[draw]), sparse_graph())


@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("name", ["gcn-dropped", "sage-dropped"])
@pytest.mark.covering(1)
def test_sparse_rows_are_normalised_as_dense_ones(name: str, values: bool, normalised: bool) -> None:
    """Fails if features without values, or a row without nonzeros, are divided or dropped otherwise than dense rows."""
    config = sampled(1, KINDS[name])
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, row_normalize=normalised))
    # The whole graph's dense rows are normalised in float32.
    compare(config, sparse_graph(values=values), 1e-6 if normalised else 1e-9)


@pytest.mark.parametrize("name", ["gcn", "sage", "gin", "sage-max", "sgc"])
def test_sparse_batches_of_everything_give_the_whole_graphs_gradient(name: str) -> None:
    """Fails if a batch larger than the training set, with all neighbours, is not the whole graph's step."""
    batches = with_features(sampled(1, KINDS[name], batch=1000, fanout=(N, ALL)), "sparse")
    whole = dataclasses.replace(batches, sample=SampleConfig())
    found = [
        on_ranks(config, sparse_graph(), lambda rank: (rank.trainer.gradients(0), grads_of(rank), rank.plan))[0]
        for config in (batches, whole)
    ]
    assert found[0][2].values.sparse_sets
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-12)
    for key, gradient in found[1][1].items():
        atol = 1e-10 * (np.abs(gradient).max() or 1)
        np.testing.assert_allclose(found[0][1][key], gradient, atol=atol, err_msg=key)


@pytest.mark.parametrize("precision", ["fp32", "fp64", "bf16", "mixed"])
@pytest.mark.parametrize("name", ["gcn-dropped", "sage-dropped", "sgc"])
@pytest.mark.covering(1)
def test_threads_and_batches_ahead_change_no_bit(name: str, precision: str) -> None:
    """Fails if a sum depends on the number of threads, or a batch on its way is written before it was read."""
    found = []
    for threads, ahead in ((1, 0), (2, 2)):
        config = with_features(sampled(1, KINDS[name], ahead=ahead), "sparse", threads=threads, precision=precision)

        def body(rank: Rank) -> Any:
            losses = [rank.trainer.step(epoch) for epoch in range(3)]
            return losses, rank.trainer.runtime.weights.flat.clone(), rank.plan.input.sparse

        found.append(on_ranks(config, sparse_graph(), body)[0])
    assert found[0][2]
    assert found[0][0] == found[1][0]
    assert np.isfinite(found[0][0]).all()
    assert bool((found[0][1] == found[1][1]).all())


@pytest.mark.parametrize("name", ["gcn-dropped", "sage-dropped"])
@pytest.mark.parametrize("set_number", [0, 1])
def test_more_nonzeros_than_planned_halve_a_step(name: str, set_number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a step with more nonzeros than planned, of its input or of the rows of targets, is cut otherwise than one
    with more edges, or its parts do not add up.
    """
    config = with_features(sampled(1, KINDS[name]), "sparse")

    def body(rank: Rank) -> Any:
        parts = sum(1 for epoch in range(2) for _ in rank.feed.epoch(SEED, epoch))
        losses = [rank.trainer.gradients(epoch) for epoch in range(2)]
        return losses, grads_of(rank), parts - 2 * rank.feed.num_steps

    (whole,) = on_ranks(config, sparse_graph(), body)

    def fewer(*given: Any) -> Stack:
        bound = stacks.stack_for(*given)
        assert bound is not None
        nonzeros = list(bound.nonzeros)
        nonzeros[set_number] = int(0.4 * nonzeros[set_number])
        return dataclasses.replace(bound, nonzeros=tuple(nonzeros))

    with monkeypatch.context() as patched:
        patched.setattr("mggcn.assemble.plan.stack_for", fewer)
        (found,) = on_ranks(config, sparse_graph(), body)
    assert whole[2] == 0
    assert (found[2] > 0) == (set_number == 0 or name.startswith("sage"))
    np.testing.assert_allclose(found[0], whole[0], rtol=1e-12)
    for key, gradient in whole[1].items():
        atol = 1e-10 * (np.abs(gradient).max() or 1)
        np.testing.assert_allclose(found[1][key], gradient, atol=atol, err_msg=key)


@pytest.mark.parametrize("plan", ["bound", "run"])
def test_batches_take_no_more_than_was_planned(plan: str) -> None:
    """Fails if the bound of nonzeros is none, or drawn batches are planned without what a single vertex may have."""
    config = with_features(sampled(1, KINDS["sage"], plan=plan), "sparse")

    def body(rank: Rank) -> Any:
        taken = [
            [features.rows.nnz for features in batch.sparse.values()]
            for epoch in range(3)
            for batch in rank.feed.epoch(SEED, epoch)
        ]
        assert rank.feed.stack is not None
        return np.array(taken), rank.feed.stack

    graph = sparse_graph()
    ((taken, stack),) = on_ranks(config, graph, body)
    assert isinstance(graph.features, CSR)
    assert (taken.max(0) <= stack.nonzeros[:2]).all()
    bounds = [RowLengths(graph.features).most(rows) for rows in stack.rows.values()]
    assert stack.nonzeros == tuple(bounds) if plan == "bound" else all(np.array(stack.nonzeros) <= bounds)
    assert taken[:, 0].min() > 0


@pytest.mark.parametrize(("features", "drawn"), [("auto", False), ("dense", True)])
def test_whether_bounds_are_small_is_asked_of_sparse_rows(
    features: str, drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if batches are drawn to plan by because dense rows would take much, where rows are sparse."""
    n, width = 200, 4000
    adj = pattern("directed", n, 5) + np.roll(np.eye(n, dtype=np.float32), 1, 0)
    graph = make_graph((adj > 0).astype(np.float32), num_features=width, num_classes=4, sparse=True, seed=4)
    x = np.zeros((n, width), np.float32)
    x[np.arange(n), np.arange(n)] = 1
    graph = dataclasses.replace(graph, features=csr(x, True))
    config = with_features(sampled(1, KINDS["sage"], plan="auto"), features)
    monkeypatch.setattr(stacks, "LITTLE_BYTES", n * width)  # a quarter of all dense rows
    plan, _ = plan_graph(resolve(config, graph), graph)
    assert plan.stack is not None
    bound = stack_of(plan.config, plan.shape)
    assert bound is not None
    assert (plan.stack.capacities != bound.capacities) == drawn


def test_the_longest_rows() -> None:
    """Fails if rows of equal length, more rows than there are, or rows without an entry are counted otherwise."""
    graph = sparse_graph()
    assert isinstance(graph.features, CSR)
    lengths = np.diff(graph.features.indptr.array())
    found = RowLengths(graph.features)
    for rows in (0, 1, 2, 17, N - 1, N, N + 5):
        assert found.most(rows) == np.sort(lengths)[::-1][:rows].sum()
    ids = np.array([EMPTY, 3, 60, 0])
    assert found.of(ids, [0, 1, 3, 4]) == [0, 0, lengths[[3, 60]].sum(), lengths[ids].sum()]


def reason_of(plan: RunPlan) -> str:
    return layer_reasons(plan)[0]


DENSE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "cooperative": ({}, {"batches": "cooperative"}, "as dense rows: ranks share a batch"),
    "history": ({"halo": "history"}, {}, "as dense rows: rows of other ranks come from a cache"),
    "owners": ({"rows": "owners"}, {}, "as dense rows: rows come from their owners"),
    "full": ({"first": "full"}, {}, "A X is gathered for each batch"),
    "dense": ({}, {"features": "dense"}, "X is gathered for each batch"),
    "a GPU": ({}, {"device": "cuda"}, "as dense rows: on a GPU a batch is filled up to one size"),
}


@pytest.mark.parametrize("name", DENSE)
def test_what_keeps_dense_rows_says_why(name: str) -> None:
    """Fails if a run that cannot have sparse rows is planned with them, or the plan does not say why."""
    sample, run, words = DENSE[name]
    config = sampled(2, {"kind": "gcn", "hidden": (6,)}, **sample)
    given = {"features": "sparse", "precision": "fp32", **run}
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, **given))
    plan, _ = plan_graph(resolve(config, sparse_graph()), sparse_graph())
    assert not plan.ranks[0].input.sparse
    assert words in reason_of(plan)


def test_models_that_read_x_otherwise_keep_dense_rows() -> None:
    """Fails if a residual adds sparse rows, or debug.features sparse is not obeyed in silence."""
    config = sampled(1, {"kind": "gcn", "residual": "identity", "hidden": (D,)})
    plan, _ = plan_graph(resolve(config, sparse_graph()), sparse_graph())
    assert "as dense rows: layers other than dense ones read it" in reason_of(plan)
    with pytest.raises(PlanError, match=r"debug\.features sparse needs a model in which only dense layers read X"):
        plan_graph(resolve(with_features(config, "sparse"), sparse_graph()), sparse_graph())
    dense = make_graph(pattern("directed", N, 5), num_features=D, num_classes=4, seed=4)
    plan, _ = plan_graph(resolve(with_features(sampled(1, KINDS["gcn"]), "sparse"), dense), dense)
    assert "as dense rows: they are stored so" in reason_of(plan)


@pytest.mark.parametrize(("nonzeros", "sparse"), [(18_000 * 60, True), (18_000 * 3000, False)])
def test_auto_takes_the_rows_of_less_work(nonzeros: int, sparse: bool) -> None:
    """Fails if rows of a bag of words are dense, or rows that are half full sparse; a bare shape is planned with memory for
    them.
    """
    shape = shape_of(18_000, 160_000, 6_000, 15, feature_nnz=nonzeros, num_training=10_000)
    config = sampled(1, {"kind": "sage", "aggregator": "mean", "hidden": (128,)}, (10, 5), batch=128)
    config = dataclasses.replace(config, run=RunConfig())
    plan = plan_shape(config, shape)
    assert plan.ranks[0].input.sparse == sparse
    assert reason_of(plan).startswith(
        f"input: {'sparse' if sparse else 'dense'} X is gathered for each batch: layer 1 takes"
    )
    dense = plan_shape(with_features(config, "dense"), shape)
    taken, other = (one.ranks[0].regions["batches on their way"] for one in (plan, dense))
    assert taken < other / 10 if sparse else taken == other
    assert (plan.ranks[0].regions["features"] < dense.ranks[0].regions["features"] / 10) == sparse


def test_a_recorded_plan_is_planned_again() -> None:
    """Fails if a run that goes on has other memory, or dense rows, where it began with sparse ones."""
    config = resolve(with_features(sampled(1, KINDS["sage-dropped"], plan="run"), "sparse"), sparse_graph())
    plan, _ = plan_graph(config, sparse_graph())
    again = plan_from_dict(plan.config, to_dict(plan), STRATEGIES[config.run.strategy])
    assert again.stack == plan.stack
    assert again.ranks[0].regions == plan.ranks[0].regions
    assert again.ranks[0].input.sparse


def test_a_run_goes_on_with_the_same_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a resumed run gathers other rows, or takes other variants for products of them."""
    write_store(sparse_graph(), tmp_path / "store")
    words: list[object] = ["--batch", 5, "--fanout", "3,2", "--threads", 1, "--set", "debug.features=sparse"]
    words += ["--set", "model.input_dropout=0.3"]
    words += ["--set", "model.kind=sage", "--set", "model.aggregator=mean", "--set", "model.hidden=8"]
    for out, epochs in (("whole", 4), ("parts", 2)):
        assert run_main("train", tmp_path / "store", *words, "--epochs", epochs, "--out", tmp_path / out) == 0
    assert run_main("train", "--resume", tmp_path / "parts", "--epochs", 4) == 0, capsys.readouterr().err
    losses = [[row["loss"] for row in history(tmp_path / out)] for out in ("whole", "parts")]
    assert losses[0] == losses[1]
    capsys.readouterr()
    assert run_main("plan", tmp_path / "store", *words) == 0
    out = capsys.readouterr().out
    assert "input: sparse X is gathered for each batch: layer 1 takes about" in out
    assert "features are gathered as sparse rows: at most" in out
