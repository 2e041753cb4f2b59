"""Learned rows of vertices: gradients are autograd's, and steps those of torch's optimisers, for every number of ranks."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from mggcn.assemble.plan import plan_graph, resolve
from mggcn.assemble.rank import Rank
from mggcn.config import Config, DataConfig, from_tables
from mggcn.errors import ConfigError, DivergedError, PlanError
from mggcn.graph.csr import Graph
from mggcn.model.kinds.combine import Scaled
from mggcn.model.kinds.ends import Input, LearnedGrad
from mggcn.model.network import make_values
from mggcn.model.values import Adjoint, Value
from mggcn.train.learned import start_rows
from tests.feed.test_blocks import MODELS, config_of, graph_of
from tests.feed.test_sampled import sampled
from tests.graphs import assert_sent_as_planned, make_graph, on_ranks, pattern
from tests.model.dense_stack import EPOCH, DenseStack
from tests.reference import philox
from tests.train.tasks import dense_loss
from tests.train.test_exact import SEED

D = 7
"""Columns of the learned rows; rows in memory are padded to more."""
STEPS = 30
EPOCHS = 10
"""Of three steps each."""


def learning(config: Config, **train: Any) -> Config:
    """The configuration with learned rows instead of features."""
    train = {"optimizer": "adam"} | train
    return dataclasses.replace(
        config, data=DataConfig(inputs=f"learned:{D}"), train=dataclasses.replace(config.train, **train)
    )


def without_features(graph: Graph) -> Graph:
    return dataclasses.replace(graph, features=None)


def rows_of(found: list[tuple[np.ndarray, Any]], num_vertices: int) -> np.ndarray:
    """The rows of all vertices from (ids, rows) of each rank."""
    whole = np.full((num_vertices, D), np.nan)
    for ids, rows in found:
        whole[ids] = rows
    assert not np.isnan(whole).any()
    return whole


def own_rows(rank: Rank) -> tuple[np.ndarray, np.ndarray]:
    runtime = rank.trainer.runtime
    assert runtime.learned is not None
    return runtime.inputs.owned.ids.numpy(), runtime.learned.values.double().numpy().copy()


# ---------------------------------------------------------------- where rows start


def test_rows_start_as_their_names_say() -> None:
    """Fails if a row depends on anything but seed and vertex, leaves +-1 / sqrt(D), or its numbers are alike."""
    ids = np.array([5, 0, 2**31, 2**40 + 3])
    rows = start_rows(917, ids, 10)
    counter = np.zeros((4, 3, 4), np.uint64)
    counter[..., 0] = 0xF0000000 + np.arange(3)
    counter[..., 1], counter[..., 2] = (ids & 0xFFFFFFFF)[:, None], (ids >> 32)[:, None]
    words = philox(counter, (917, 0)).reshape(4, 12)[:, :10].astype(np.float64)
    np.testing.assert_allclose(rows, (2 * (words + 0.5) / 2**32 - 1) / math.sqrt(10), rtol=1e-12)
    many = start_rows(31, np.arange(4000), 16)
    assert np.abs(many).max() <= 0.25
    assert abs(many.mean()) < 3 * 0.25 / math.sqrt(3 * many.size)
    assert many.std() == pytest.approx(0.25 / math.sqrt(3), rel=0.01)
    assert np.unique(many).size > 0.99 * many.size
    assert not np.array_equal(start_rows(918, ids, 10), rows)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("batch", [0, 14])
def test_ranks_start_with_the_same_rows(ranks: int, batch: int) -> None:
    """Fails if the rank of a vertex, or whether runs have batches, changes what its row starts with."""
    config = learning(sampled(ranks, MODELS["gcn"]) if batch else config_of(ranks, MODELS["gcn"]))
    graph = without_features(graph_of())
    whole = rows_of(on_ranks(config, graph, own_rows), graph.num_vertices)
    np.testing.assert_array_equal(whole, start_rows(config.train.seed, np.arange(graph.num_vertices), D))


# ---------------------------------------------------------------- the whole graph

CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "gcn": {"kind": "gcn", "dropout": 0.3, "input_dropout": 0.2},
    "gcn, narrow first": {"kind": "gcn", "hidden": (20,), "norm": "mean"},
    "gcn, one layer": {"kind": "gcn", "hidden": ()},
    "sage": {"kind": "sage", "aggregator": "mean", "input_dropout": 0.3},
    "sage-max": {"kind": "sage", "aggregator": "max"},
    "gin": {"kind": "gin"},
    "gat": {"kind": "gat", "heads": 2, "hidden": (8,), "attention_dropout": 0.3},
    "gatv2": {"kind": "gatv2", "heads": 2, "hidden": (8,)},
    "sgc": {"kind": "sgc", "hops": 2, "hidden": ()},
    "appnp": {"kind": "appnp", "hops": 3},
    "residual": {"kind": "gcn", "residual": "linear", "norm_layer": "batch"},
    "mlp": {"kind": "mlp"},
}
STRATEGIES = ["broadcast", "halo", "slice"]


def whole(name: str, ranks: int, **run: Any) -> Config:
    config = config_of(ranks, CONVOLUTIONS[name])
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, seed=SEED))
    return learning(dataclasses.replace(config, run=dataclasses.replace(config.run, **run)))


def gradient_of(rank: Rank) -> dict[str, Any]:
    loss, runtime = rank.trainer.gradients(EPOCH), rank.trainer.runtime
    assert runtime.learned is not None
    return {
        "loss": loss,
        "ids": runtime.inputs.owned.ids.numpy(),
        "gradient": runtime.learned.gradient.numpy().copy(),
        "rows": runtime.learned.values.numpy().copy(),
        "grads": {name: grad.numpy().copy() for name, grad in runtime.weights.grads.items()},
        "weights": runtime.weights.state_dict(),
    }


@pytest.mark.covering(1)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_gradients_of_rows_equal_autograd(name: str, ranks: int) -> None:
    """Fails if the input has no gradient, or that of another rank's row, of a sum that was computed once, or of no mask."""
    compare_gradients(name, ranks)


def test_a_planted_fault_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a wrong adjoint of the input passes for the right one."""

    def wrong(self: Input, value: Value, gradient: Value) -> Adjoint:
        return Adjoint((), (Value(LearnedGrad(), (Value(Scaled(1.001), (gradient,), value.cols),)),))

    make_values.cache_clear()
    monkeypatch.setattr(Input, "adjoint", wrong)
    try:
        with pytest.raises(AssertionError):
            compare_gradients("gcn", 2)
    finally:
        make_values.cache_clear()


def compare_gradients(name: str, ranks: int) -> None:
    """Compare loss and gradients of a step over the whole graph, rows' and weights', with autograd of the dense formula."""
    graph = without_features(graph_of())
    strategy = STRATEGIES[(ranks + len(name)) % 3] if name not in ("gat", "gatv2", "sage-max", "residual") else "halo"
    config = whole(name, ranks, strategy=strategy)
    found = on_ranks(config, graph, gradient_of)
    rows = torch.from_numpy(rows_of([(r["ids"], r["rows"]) for r in found], graph.num_vertices)).requires_grad_()
    weights = found[0]["weights"]
    p = {n: w.clone().requires_grad_() for n, w in weights.items() if "running" not in n}
    with torch.enable_grad():
        stack = DenseStack(graph_of(), config.model, p, {}, training=True)
        stack.x = rows
        loss = dense_loss(graph, config.train, stack.logits())
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
    assert found[0]["loss"] == pytest.approx(float(loss.detach()), rel=1e-12)
    expected = rows.grad.numpy()  # type: ignore[union-attr]  # after backward
    got = rows_of([(r["ids"], r["gradient"]) for r in found], graph.num_vertices)
    assert np.abs(expected).max() > 1e-4
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-10 * np.abs(expected).max())
    for key, parameter in p.items():
        wanted = np.zeros(parameter.shape) if parameter.grad is None else parameter.grad.numpy()
        np.testing.assert_allclose(
            found[0]["grads"][key], wanted, rtol=0, atol=max(1e-10 * np.abs(wanted).max(), 1e-14)
        )


def epochs_of(count: int) -> Any:
    """What trains so many epochs on a rank, and returns its losses, its rows and the weights."""

    def body(rank: Rank) -> tuple[list[float], np.ndarray, np.ndarray, dict[str, torch.Tensor]]:
        losses = [rank.trainer.step(epoch) for epoch in range(count)]
        return losses, *own_rows(rank), rank.trainer.runtime.weights.state_dict()

    return body


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adam": {"optimizer": "adam", "weight_decay": 0.01},
    "adamw": {"optimizer": "adamw", "weight_decay": 0.01},
    "sgd": {"optimizer": "sgd", "lr": 0.1},
    "momentum": {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9},
}


@pytest.mark.covering(1, rest="slow")
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_whole_graph_runs_move_all_rows_as_torch_does(name: str, ranks: int) -> None:
    """Fails if rows have another learning rate, decay or moments than the weights, or a rank moves those of another."""
    graph, settings = without_features(graph_of()), {"lr": 0.02} | OPTIMIZERS[name]
    config = whole("sage", ranks)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, input_dropout=0.0))
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, epochs=STEPS, **settings))
    found = on_ranks(config, graph, epochs_of(STEPS))
    start = on_ranks(config, graph, lambda rank: (*own_rows(rank), rank.trainer.runtime.weights.state_dict()))
    rows = torch.from_numpy(rows_of([one[:2] for one in start], graph.num_vertices)).requires_grad_()
    p = {n: w.clone().requires_grad_() for n, w in start[0][2].items()}
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    given = {key: value for key, value in settings.items() if key != "optimizer"}
    optimizer = kinds[settings["optimizer"]]([rows, *p.values()], **{"weight_decay": 0.0} | given)
    losses = list[float]()
    for _ in range(STEPS):
        with torch.enable_grad():
            optimizer.zero_grad()
            stack = DenseStack(graph_of(), config.model, p, {}, training=True)
            stack.x = rows
            loss = dense_loss(graph, config.train, stack.logits())
            loss.backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()
        losses.append(float(loss.detach()))
    np.testing.assert_allclose(found[0][0], losses, rtol=1e-9)
    assert losses[-1] < 0.95 * losses[0]
    got = rows_of([one[1:3] for one in found], graph.num_vertices)
    np.testing.assert_allclose(got, rows.detach().numpy(), rtol=0, atol=1e-9)


# ---------------------------------------------------------------- faults, plans and refusals


@pytest.mark.parametrize("batch", [0, 14])
def test_a_gradient_that_is_not_finite_moves_nothing(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if one rank's rows take a gradient of infinity, or the other ranks go on."""
    graph, run = without_features(graph_of()), LearnedGrad.run

    def broken(self: LearnedGrad, rt: Any, op: Any) -> None:
        if rt.comm.rank == 1 and int(rt.clock[1]) == 2:
            op.tensor(rt, 0)[0, 0] = math.inf
        run(self, rt, op)

    monkeypatch.setattr(LearnedGrad, "run", broken)
    config = learning(sampled(2, MODELS["gcn"]) if batch else config_of(2, MODELS["gcn"]), epochs=4)

    def body(rank: Rank) -> tuple[np.ndarray, np.ndarray]:
        rank.trainer._epoch.start(rank.trainer._seed, 0)
        rank.trainer.advance(0, 2)
        before = own_rows(rank)[1]
        signals = rank.trainer.advance(2, 3)
        assert np.isnan(signals).any()
        return before, own_rows(rank)[1]

    for before, after in on_ranks(config, graph, body):
        np.testing.assert_array_equal(before, after)
    with pytest.raises(DivergedError):
        on_ranks(config, graph, lambda rank: [rank.trainer.step(epoch) for epoch in range(3)])


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("strategy", ["broadcast", "halo"])
def test_whole_graph_runs_send_as_planned(ranks: int, strategy: str) -> None:
    """Fails if rows of the whole graph are sent, or a message that the plan does not know."""
    on_ranks(whole("sage", ranks, strategy=strategy), without_features(graph_of()), assert_sent_as_planned)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_steps_on_batches_send_at_most_what_is_planned(ranks: int) -> None:
    """Fails if ranks send more together than their plans say, other messages, or rows nobody has asked for."""

    def body(rank: Rank) -> tuple[int, int, int, int]:
        rank.comm.bytes_sent = rank.comm.messages = 0
        rank.trainer._epoch.start(rank.trainer._seed, 0)
        rank.trainer.advance(0, 1)
        return (
            rank.comm.bytes_sent,
            rank.plan.bytes_sent(rank.plan.train),
            rank.comm.messages,
            rank.plan.messages(rank.plan.train),
        )

    found = on_ranks(learning(sampled(ranks, MODELS["gcn"])), without_features(graph_of()), body)
    assert sum(one[0] for one in found) <= sum(one[1] for one in found)
    assert all(one[2] == one[3] for one in found)
    assert (found[0][0] > 0) == (ranks > 1)


def test_plans_count_rows_moments_and_gradients() -> None:
    """Fails if a plan counts learned rows as features are counted, or a run on batches as one over the whole graph."""
    features = graph_of()
    graph = without_features(features)

    def planned(config: Config, of: Graph = graph) -> Any:
        return plan_graph(resolve(config, of), of)[0].ranks[0]

    name, row = "learned rows, beside themselves", 64  # 7 columns of float64, padded
    everything = planned(whole("gcn", 1))
    assert everything.regions["features"] == graph.num_vertices * row
    saved = 4 * graph.num_vertices * D * 8
    assert everything.regions[name] == graph.num_vertices * row * 4 + saved  # best, two moments, gradient
    assert everything.input.aggregated == 0
    config = sampled(2, MODELS["gcn"])
    batches, gathering = planned(learning(config)), planned(config, features)
    assert batches.learned.messages == 4
    assert batches.regions[name] > 3 * row * batches.sizes.owned
    assert batches.regions["batches on their way"] < gathering.regions["batches on their way"]
    assert batches.regions["features"] == batches.sizes.owned * row
    exact = planned(dataclasses.replace(whole("gcn", 1), train=dataclasses.replace(config.train, optimizer="sgd")))
    assert everything.regions[name] - exact.regions[name] == 2 * graph.num_vertices * (row + D * 8)


REFUSED: list[tuple[dict[str, dict[str, Any]], str]] = [
    ({"data": {"inputs": "learned:0"}}, "with D of 1 or more"),
    ({"data": {"inputs": "learned:-3"}}, "with D of 1 or more"),
    ({"data": {"inputs": "learned"}}, "with D of 1 or more"),
    ({"data": {"inputs": "learned:8", "row_normalize": True}}, "row_normalize divides features"),
    ({"run": {"device": "cuda"}}, "CPUs alone"),
    ({"run": {"precision": "bf16"}}, "choose mixed"),
    ({"run": {"features": "sparse"}}, "leave debug.features sparse out"),
    ({"run": {"strategy": "delayed", "ranks": 2}}, "choose halo"),
    ({"train": {"clip_norm": 1.0}}, "clip_norm"),
    ({"train": {"repeat": 2}}, "run each train.seed"),
    ({"sample": {"batch": 8, "fanout": (2, 2, 2), "first": "full"}}, "moves X; choose drawn"),
    ({"sample": {"batch": 8, "fanout": (2, 2, 2), "plan": "run"}}, "exchanges rows once; choose auto"),
    ({"train": {"evaluate": "blocks"}, "sample": {"batch": 8, "fanout": (2, 2, 2)}}, "choose whole"),
    ({"sample": {"batch": 8, "fanout": (2, 2, 2), "rows": "owners"}}, "fetches features"),
]


@pytest.mark.parametrize(("tables", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_makes_no_sense_is_refused(tables: dict[str, dict[str, Any]], message: str) -> None:
    """Fails if a setting that learned rows leave without effect, or that breaks them, is taken."""
    with pytest.raises(ConfigError, match=message) as refusal:
        from_tables({"data": {"inputs": "learned:8"}} | tables)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "config", [learning(config_of(1, MODELS["gcn"])), sampled(1, MODELS["gcn"])], ids=["whole", "read"]
)
def test_how_batches_move_rows_needs_both(config: Config) -> None:
    """Fails if a run that has no batches, or reads features, takes an optimiser of rows."""
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, row_optimizer="adagrad"))
    with pytest.raises(ConfigError, match="row_optimizer adagrad moves learned rows"):
        resolve(config, graph_of())


def test_a_step_in_parts_is_refused() -> None:
    """Fails if a feed of one's own gives a step in parts, of which other ranks would not know."""
    graph = without_features(graph_of())
    config = learning(sampled(1, MODELS["gcn"]))

    def body(rank: Rank) -> None:
        inner = rank.feed

        class Halved:
            stack, num_steps = inner.stack, inner.num_steps

            def epoch(self, seed: int, number: int, first: int = 0) -> Any:
                for batch in inner.epoch(seed, number, first):
                    yield dataclasses.replace(batch, last=False)
                    yield batch

        rank.trainer._epoch._feed = Halved()
        rank.trainer.step(0)

    with pytest.raises(PlanError, match="needs the whole step at once"):
        on_ranks(config, graph, body)


def test_a_graph_of_patterns_trains_without_features() -> None:
    """Fails if a vertex without edges, or a rank without training vertices, stops a run."""
    graph = without_features(make_graph(pattern("star", 23, 3), num_features=3, num_classes=2, seed=8))
    for config in (config_of(3, MODELS["gcn"]), sampled(3, MODELS["gcn"])):
        losses = on_ranks(learning(config, epochs=EPOCHS, lr=0.05), graph, epochs_of(EPOCHS))[0][0]
        assert losses[-1] < losses[0]
