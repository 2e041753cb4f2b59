"""Training epochs that leave out what nothing reads: the same bits as epochs that compute everything, and as planned."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mggcn.aggregate.broadcast import BroadcastStrategy
from mggcn.aggregate.delayed import DelayedStrategy
from mggcn.assemble import STRATEGIES, Rank, plan_graph, plan_shape, resolve
from mggcn.backend.cpu import CpuBackend
from mggcn.backend.cuda import CudaBackend
from mggcn.config import Config, ModelConfig, RunConfig, TrainConfig
from mggcn.errors import GraphError, PlanError
from mggcn.graph.csr import ArrayRows, Graph
from mggcn.model.choices import LayerChoice
from mggcn.partition.parts import RowFigures
from mggcn.partition.splits import training_rows
from mggcn.partition.wanted import LEAST_SAVED, wanted_sets
from mggcn.plan.description import find_machine
from mggcn.train import prune
from mggcn.train.costtext import cost_dict, cost_lines
from mggcn.train.opwork import epoch_cost
from mggcn.train.planjson import plan_from_dict, to_dict
from mggcn.train.plantext import render
from mggcn.train.prune import choose_rows
from mggcn.train.runtime import Poisoned
from mggcn.train.shape import GraphShape
from tests.devices import CPU, EMULATED, GPU, Where
from tests.graphs import make_graph, on_ranks, one_epoch
from tests.reference import loss_and_gradients
from tests.train.test_trainer import fit

ROWS = [name for name, strategy in STRATEGIES.items() if strategy.kind == "rows"]
SEED = 90007


def graph_of(n: int = 61, degree: int = 2, trained: int = 5, symmetric: bool = False, sparse: bool = False) -> Graph:
    """A graph of few edges of which few vertices train: three layers down, much is still not read."""
    rng = np.random.default_rng(17)
    dense = np.zeros((n, n), np.float32)
    for row in dense:
        row[rng.choice(n, degree, replace=False)] = 1
    np.fill_diagonal(dense, 0)
    dense[4, 4] = 1
    if symmetric:
        dense = np.maximum(dense, dense.T)
    graph = make_graph(dense, num_features=12, num_classes=4, sparse=sparse, weighted=False, seed=8)
    candidates = np.flatnonzero(graph.splits["train"].read(0, 1)[0])
    training = np.zeros((1, n), bool)
    training[0, candidates[:trained]] = True
    return dataclasses.replace(graph, splits=dict(graph.splits) | {"train": ArrayRows(training)})


def config_of(
    name: str = "broadcast", ranks: int = 1, run: dict[str, Any] | None = None, epochs: int = 20, **model: Any
) -> Config:
    settings = {"threads": 1, "transport": "threads" if ranks > 1 else "single"} | (run or {})
    return Config(
        model=ModelConfig(**({"hidden": (6, 9), "dropout": 0.5} | model)),
        train=TrainConfig(seed=SEED, epochs=epochs, lr=0.02, weight_decay=1e-3),
        run=RunConfig(ranks=ranks, strategy=name, **settings),  # type: ignore[arg-type]
    )


def off(config: Config) -> Config:
    return dataclasses.replace(config, run=dataclasses.replace(config.run, prune="off"))


def trained(config: Config, graph: Graph, where: Where = CPU) -> tuple[list[float], list[torch.Tensor], int]:
    """Losses of all epochs, weights and logits after them, and how many layers are pruned."""

    def body(rank: Rank) -> Any:
        losses = [rank.trainer.step(epoch) for epoch in range(config.train.epochs)]
        rank.trainer.evaluate()
        found = [*rank.trainer.runtime.weights.state_dict().values(), rank.trainer.logits().cpu().clone()]
        return losses, found, sum(layer.level is not None for layer in rank.plan.rows)

    ranks = on_ranks(where.config(config), graph, body, device_of=where.device_of)
    return ranks[0][0], [tensor for rank in ranks for tensor in rank[1]], ranks[0][2]


def assert_same_bits(config: Config, graph: Graph, pruned: int, where: Where = CPU) -> None:
    one, other = trained(config, graph, where), trained(off(config), graph, where)
    assert (one[2], other[2]) == (pruned, 0)
    assert one[0] == other[0]
    assert one[0][-1] < one[0][0]
    assert all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("products", ["gemm-first", "aggregate-first"])
def test_the_same_bits_as_without(name: str, ranks: int, products: str) -> None:
    """Fails if a row that is read is left out, or the sum of a row that is computed is made in another order."""
    kind = "gcn" if (ranks % 2 == 0) == (products == "gemm-first") else "sage"
    config = config_of(name, ranks, {"products": products}, kind=kind)
    assert_same_bits(config, graph_of(symmetric=kind == "gcn"), 2)


@pytest.mark.parametrize("name", ROWS)
def test_the_same_bits_with_dropped_and_sparse_input(name: str) -> None:
    """Fails if layer 1, which then aggregates too, leaves out what is read, or masks depend on what is computed."""
    for sparse, loops, order in ((False, True, "none"), (True, False, "permute")):
        config = config_of(name, 3, {"order": order}, epochs=8, input_dropout=0.3, self_loops=loops)
        assert_same_bits(config, graph_of(degree=1, trained=4, sparse=sparse), 3)


@pytest.mark.parametrize("where", [EMULATED, pytest.param(GPU, marks=pytest.mark.cuda)], ids=lambda where: where.name)
def test_the_same_bits_on_a_gpu(where: Where) -> None:
    """Fails if a GPU's schedule of fewer rows adds up in another order, or its kernels read rows that hold nothing."""
    config = config_of("halo", 2, epochs=3)
    assert_same_bits(config, graph_of(), 2, where)


@pytest.mark.parametrize("name", ROWS)
def test_gradients_equal_autograd(name: str) -> None:
    """Fails if what is left out has a gradient after all: float64 against the dense formula, any order of the rows."""
    for ranks, order, loops in ((1, "locality", True), (3, "permute", False), (2, "random", True)):
        config = config_of(name, ranks, {"precision": "fp64", "order": order}, self_loops=loops, input_dropout=0.2)
        graph = graph_of()
        found = one_epoch(config, graph)
        assert found[0].rank.plan.pruned
        loss, grads, _ = loss_and_gradients(graph, config.model, found[0].weights, SEED, 3)
        assert found[0].loss == pytest.approx(loss, rel=1e-12)
        for key, expected in grads.items():
            np.testing.assert_allclose(found[0].grads[key], expected, atol=1e-10 * (np.abs(expected).max() or 1))


@pytest.mark.parametrize("fault", ["training", "neighbours"])
def test_planted_wrong_rows_are_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above fail if one training vertex, or one neighbour of theirs, is taken to be unread."""
    original = prune.wanted_sets

    def fewer(*arguments: Any) -> tuple[np.ndarray, ...]:
        sets = [rows.copy() for rows in original(*arguments)]
        wanted = sets[0] if fault == "training" else sets[1]
        wanted[np.flatnonzero(wanted & ~(sets[0] if fault == "neighbours" else False))[0]] = False
        return tuple(sets)

    config = config_of(epochs=3)
    right = trained(config, graph_of())
    monkeypatch.setattr(prune, "wanted_sets", fewer)
    assert trained(config, graph_of())[0] != right[0]


@pytest.mark.parametrize("name", ROWS)
def test_no_op_reads_memory_it_was_not_given(name: str) -> None:
    """Fails if rows that are not computed hold what memory held before: NaN here."""
    for ranks, products in ((1, "gemm-first"), (3, "aggregate-first")):
        config = config_of(name, ranks, {"products": products}, input_dropout=0.5)

        def body(rank: Rank) -> bool:
            trainer = rank.trainer
            plain = trainer.gradients(1)
            grads = trainer.runtime.weights.grad.clone()
            runner = Poisoned(trainer.runtime)
            for program in (rank.plan.evaluate, rank.plan.train):
                trainer.runtime.signals.zero_()
                runner.run(program)
            if rank.comm.size > 1:
                rank.comm.all_reduce(trainer.runtime.weights.grad).wait()
                rank.comm.all_reduce(trainer.runtime.signals).wait()
            assert len(rank.plan.pruned) >= 2
            return plain == float(trainer.runtime.signals[0]) and bool((grads == trainer.runtime.weights.grad).all())

        assert all(on_ranks(config, graph_of(), body))


def test_gradients_of_unread_rows_are_zero() -> None:
    """Fails if the buffers of gradients hold anything but zeros where nothing is read."""

    def body(rank: Rank) -> None:
        runtime = rank.trainer.runtime
        runtime.program = "train"
        for op in rank.plan.train.ops:
            op.run(runtime)
            if op.label in seen:
                gradient, read = runtime.buffer(seen[op.label]), torch.from_numpy(sets[op.label])
                assert bool((gradient[~read] == 0).all())
                assert float((gradient[read] != 0).any(1).float().mean()) > 0.5
                done.append(op.label)

    graph, done = graph_of(degree=3), list[str]()
    training = training_rows(graph, "main", 0)
    assert training is not None
    seen = {"loss": "h3", "aggregate-grad 3": "b3", "aggregate-grad 2": "b2"}
    sets = dict(zip(seen, wanted_sets(graph, training, 3, 1), strict=True))
    on_ranks(config_of(run={"products": "gemm-first"}), graph, body)
    assert done == list(seen)


@pytest.mark.parametrize("name", ROWS)
def test_bytes_messages_and_memory_are_as_planned(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a pruned layer sends or holds a byte that its plan does not know."""
    held: list[int] = []
    sparse = CpuBackend.sparse

    def counted(self: CpuBackend, *arrays: Any) -> Any:
        held.extend(array.nbytes for array in arrays if array is not None)
        return sparse(self, *arrays)

    monkeypatch.setattr(CpuBackend, "sparse", counted)

    def body(rank: Rank) -> Any:
        for program, run in (
            (rank.plan.train, lambda: rank.trainer.step(0)),
            (rank.plan.evaluate, rank.trainer.evaluate),
        ):
            rank.comm.bytes_sent = rank.comm.messages = 0
            run()
            assert rank.comm.bytes_sent == rank.plan.bytes_sent(program)
            assert rank.comm.messages == rank.plan.messages(program)
        return rank.plan

    plans = on_ranks(config_of(name, 3, epochs=1), graph_of(), body)
    indices = sum(p.index_bytes for plan in plans for p in (plan.aggregation, *plan.pruned.values()))
    assert sum(held) == sum(plan.regions["graph"] for plan in plans) - indices
    whole = on_ranks(off(config_of(name, 3, epochs=1)), graph_of(), lambda rank: rank.plan)
    for plan, other in zip(plans, whole, strict=True):
        assert plan.regions["graph"] > other.regions["graph"]
        assert plan.setup_bytes >= other.setup_bytes
        assert plan.bytes_sent(plan.evaluate) == other.bytes_sent(other.evaluate)
    sent, all_sent = (sum(plan.bytes_sent(plan.train) for plan in found) for found in (plans, whole))
    assert sent < all_sent if name == "halo" else sent == all_sent


def test_a_run_goes_on_with_pruning_or_without(tmp_path: Path) -> None:
    """Fails if a checkpoint depends on what was computed, or the rest of a run differs in a bit."""
    config, graph = config_of("halo", 3, epochs=6), graph_of()
    for folder in ("whole", "there", "back"):
        (tmp_path / folder).mkdir()
    whole = fit(config, graph, tmp_path / "whole")
    for folder, first, second in (("there", config, off(config)), ("back", off(config), config)):
        assert not fit(first, graph, tmp_path / folder, stop_after=3)[0]
        rest = fit(second, graph, tmp_path / folder)
        assert rest[2] == whole[2]
        assert all(torch.equal(rest[1][n], w) for n, w in whole[1].items())


def test_a_gpu_holds_what_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the schedules or work space of pruned matrices are not in a GPU's plan."""
    taken = [0]
    for method in ("allocate", "upload"):
        original = getattr(CudaBackend, method)

        def count(self: CudaBackend, what: Any, _original: Any = original) -> torch.Tensor:
            tensor: torch.Tensor = _original(self, what)
            taken[0] += tensor.nbytes
            return tensor

        monkeypatch.setattr(CudaBackend, method, count)

    def body(rank: Rank) -> float:
        plan = rank.plan
        assert plan.pruned
        # As in test_strategies.py: torch's own best weights and Adam's states; 16 KiB are of fixed size.
        held = taken[0] + 3 * plan.gradient_bytes - 2**14
        return held / (sum(plan.regions.values()) - plan.regions["runtime"])

    config = EMULATED.config(config_of(epochs=1, hidden=(40,)))
    (share,) = on_ranks(config, graph_of(900, 6, 100), body, device_of=EMULATED.device_of)
    assert 0.9 < share <= 1.0


LAYERS = tuple(
    LayerChoice(layer, 8, 8, products, "")
    for layer, products in ((1, "precomputed"), (2, "gemm-first"), (3, "aggregate-first"), (4, "gemm-first"))
)


def rows_of(shares: list[float], **run: Any) -> list[tuple[int, int | None]]:
    """Layer and level for sets with these shares of the nonzeros."""
    figures = RowFigures.expected(1000, 9000, 2, self_loops=True, shares=[(share, share) for share in shares])
    return [(r.layer, r.level) for r in choose_rows(RunConfig(**run), LAYERS, figures, BroadcastStrategy())]


def test_the_choice_by_hand() -> None:
    """Fails if a layer is pruned that saves too little, is not though a quarter is saved, or takes another's rows."""
    assert rows_of([0.1, 0.3, 0.6]) == [(2, 2), (3, 1), (4, 0)]
    assert rows_of([0.1, 0.9]) == [(2, None), (3, None), (4, 0)]
    # No vertex beyond the second set: it serves all layers below.
    assert rows_of([0.1, 0.3]) == [(2, 1), (3, 1), (4, 0)]
    assert rows_of([1 - LEAST_SAVED]) == [(2, 0), (3, 0), (4, 0)]
    assert rows_of([1 - LEAST_SAVED + 0.01]) == [(2, None), (3, None), (4, None)]
    assert rows_of([0.1], prune="off") == [(2, None), (3, None), (4, None)]
    assert rows_of([]) == [(2, None), (3, None), (4, None)]
    figures = RowFigures.expected(1000, 9000, 2, self_loops=True, shares=[(0.1, 0.1), (0.9, 0.9)])
    found = choose_rows(RunConfig(), LAYERS, figures, BroadcastStrategy())
    assert [(layer.rows, layer.reason.split()[0]) for layer in found] == [(None, "it"), (900, "less"), (100, "the")]
    cut = choose_rows(RunConfig(), LAYERS, RowFigures.expected(9, 9, 1, self_loops=True), DelayedStrategy())
    assert {layer.level for layer in cut} == {None}
    assert "cuts vertices" in cut[0].reason


SHAPE = GraphShape("shape", 100_000, 400_000, 64, 16, True, num_training=2_000)


def test_a_bare_shape_is_estimated() -> None:
    """Fails if the number of training vertices does not matter, or what is saved is not in bytes, seconds and text."""
    config = Config(model=ModelConfig(hidden=(64, 64)), run=RunConfig(ranks=4, strategy="halo"))
    plan, machine = plan_shape(config, SHAPE), find_machine("assumed-cpu")
    whole = plan_shape(config, dataclasses.replace(SHAPE, num_training=None))
    assert [(layer.layer, layer.level) for layer in plan.ranks[0].rows] == [(2, 1), (3, 0)]
    assert not whole.ranks[0].pruned
    for one, other in zip(plan.ranks, whole.ranks, strict=True):
        assert one.bytes_sent(one.train) < 0.5 * other.bytes_sent(other.train)
        assert one.num_spmm == other.num_spmm
        assert one.evaluate_spmm == other.evaluate_spmm
    assert epoch_cost(plan, machine).train.seconds < 0.9 * epoch_cost(whole, machine).train.seconds
    assert epoch_cost(plan, machine).evaluate.seconds == epoch_cost(whole, machine).evaluate.seconds
    text = render(plan)
    assert "expected of random training vertices" in text
    assert re.search(r"layer 3 +2,000 \(2.0%\) +10,\d{3} \(2.0%\) +these rows alone", text)
    assert "it is not known which vertices train" in render(whole)
    seconds = cost_dict(plan, machine)["training_all_rows"]["seconds"]
    assert seconds == pytest.approx(epoch_cost(whole, machine).train.seconds)
    assert any(line.strip().startswith("training, all rows") for line in cost_lines(plan, machine))
    assert "training_all_rows" not in cost_dict(whole, machine)
    with pytest.raises(GraphError, match="100,000 of the vertices can train, got 100,001"):
        plan_shape(config, dataclasses.replace(SHAPE, num_training=100_001))


def test_what_does_not_fit_may_fit_without() -> None:
    """Fails if a run is refused for its second copy of the graph, and the refusal does not say how to do without."""
    config = Config(model=ModelConfig(hidden=(8, 8)), run=RunConfig())
    shape = dataclasses.replace(SHAPE, num_edges=8_000_000, num_training=60_000)
    plan = plan_shape(config, shape)
    need = plan_shape(off(config), shape).largest.total_bytes
    assert need < plan.largest.total_bytes
    with pytest.raises(PlanError, match=r"--set run\.prune=off.* would fit"):
        plan.check(need)
    with pytest.raises(PlanError) as refusal:
        plan.check(need - 1)
    assert "run.prune" not in str(refusal.value)


def test_a_recorded_plan_is_planned_again() -> None:
    """Fails if plan.json loses what a training epoch computes: its ranks would send other messages than each other."""
    config, graph = config_of("halo", 3), graph_of()
    config = resolve(config, graph)
    plan, _ = plan_graph(config, graph)
    content = json.loads(json.dumps(to_dict(plan)))
    assert [row["level"] for row in content["training_rows"]] == [1, 0]
    again = plan_from_dict(config, content, plan.strategy)
    for one, other in zip(plan.ranks, again.ranks, strict=True):
        assert one.rows == other.rows
        assert one.regions == other.regions
        assert one.pruned == other.pruned
        assert one.bytes_sent(one.train) == other.bytes_sent(other.train)
    # Of an older plan, which knows nothing of rows, everything is computed.
    del content["partition"]["wanted"]
    assert not plan_from_dict(config, content, plan.strategy).ranks[0].pruned


def test_a_graph_without_a_split_is_planned() -> None:
    """Fails if a plan needs what only training needs: the vertices that train."""
    graph = dataclasses.replace(graph_of(), splits={})
    plan, _ = plan_graph(resolve(config_of(), graph), graph)
    assert {layer.reason for layer in plan.ranks[0].rows} == {"it is not known which vertices train"}
