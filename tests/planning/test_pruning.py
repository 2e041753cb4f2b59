"""Training epochs that leave out what nothing reads: the same bits as epochs that compute everything, and as planned."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mggcn.assemble.plan import STRATEGIES
from mggcn.assemble.rank import Rank
from mggcn.backend.cpu import spmm as cpu_spmm
from mggcn.backend.cpu.backend import CpuBackend
from mggcn.blocks.block import WHOLE
from mggcn.config import Config, ModelConfig, RunConfig, TrainConfig
from mggcn.graph.csr import ArrayRows, Graph
from mggcn.graph.splits import training_rows
from mggcn.partition.rows.required import required_sets
from mggcn.planning import pruning
from tests.devices import CPU, EMULATED, GPU, Where, share_of_plan, taken_on_gpus
from tests.graphs import assert_sent_as_planned, make_graph, on_ranks, one_epoch
from tests.reference import loss_and_gradients
from tests.train.poisoned import reads_what_it_was_given
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
    graph = make_graph(dense, num_features=12, num_classes=4, sparse=sparse, seed=8)
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
        return losses, found, sum(layer.block != WHOLE for layer in rank.plan.rows)

    ranks = on_ranks(where.config(config), graph, body, device_of=where.device_of)
    return ranks[0][0], [tensor for rank in ranks for tensor in rank[1]], ranks[0][2]


def assert_same_bits(config: Config, graph: Graph, pruned: int, where: Where = CPU) -> None:
    one, other = trained(config, graph, where), trained(off(config), graph, where)
    assert (one[2], other[2]) == (pruned, 0)
    assert one[0] == other[0]
    assert one[0][-1] < one[0][0]
    assert all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))


@pytest.mark.covering(1, rest="slow")
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("products", ["gemm-first", "aggregate-first"])
def test_the_same_bits_as_without(name: str, ranks: int, products: str) -> None:
    """Fails if a row that is read is left out, or the sum of a row that is computed is made in another order."""
    kind = "gcn" if (ranks % 2 == 0) == (products == "gemm-first") else "sage"
    config = config_of(name, ranks, {"products": products}, kind=kind)
    assert_same_bits(config, graph_of(symmetric=kind == "gcn"), 2)


@pytest.mark.covering(0)
@pytest.mark.parametrize("name", ROWS)
def test_the_same_bits_with_dropped_and_sparse_input(name: str) -> None:
    """Fails if layer 1, which then aggregates too, leaves out what is read, or masks depend on what is computed."""
    for sparse, loops, order in ((False, True, "none"), (True, False, "permute")):
        config = config_of(name, 3, {"order": order}, epochs=8, input_dropout=0.3, self_loops=loops)
        assert_same_bits(config, graph_of(degree=1, trained=4, sparse=sparse), 3)


@pytest.mark.parametrize("name", ROWS)
def test_rows_that_are_summed_in_parts_differ_by_rounding(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a pruned row that is cut in other parts, since it is shorter, loses an entry or more than rounding."""
    parts: list[int] = []
    original = cpu_spmm._cut

    def counted(indptr: np.ndarray, hub: int) -> Any:
        cut = original(indptr, hub)
        parts.append(cut[0].shape[0])
        return cut

    monkeypatch.setattr(cpu_spmm, "hub_length", lambda nnz: 4)
    monkeypatch.setattr(cpu_spmm, "_cut", counted)
    for ranks in (1, 2):
        parts.clear()
        config, graph = config_of(name, ranks, epochs=3), graph_of(degree=3, trained=3)
        pruned = trained(config, graph)
        of_pruned = sum(parts)
        every = trained(off(config), graph)
        assert (pruned[2], every[2]) == (2, 0)
        # Pruned layers have matrices of their own, and of these rows to cut.
        assert of_pruned > sum(parts) - of_pruned > 0
        np.testing.assert_allclose(pruned[0], every[0], rtol=1e-6)
        for one, other in zip(pruned[1], every[1], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


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
    original = pruning.required_sets

    def fewer(*arguments: Any) -> tuple[np.ndarray, ...]:
        sets = [rows.copy() for rows in original(*arguments)]
        required = sets[0] if fault == "training" else sets[1]
        required[np.flatnonzero(required & ~(sets[0] if fault == "neighbours" else False))[0]] = False
        return tuple(sets)

    config = config_of(epochs=3)
    right = trained(config, graph_of())
    monkeypatch.setattr(pruning, "required_sets", fewer)
    assert trained(config, graph_of())[0] != right[0]


@pytest.mark.parametrize("name", ROWS)
def test_no_op_reads_memory_it_was_not_given(name: str) -> None:
    """Fails if rows that are not computed hold what memory held before: NaN here."""
    for ranks, products in ((1, "gemm-first"), (3, "aggregate-first")):
        config = config_of(name, ranks, {"products": products}, input_dropout=0.5)

        def body(rank: Rank) -> bool:
            assert len(rank.plan.pruned) >= 2
            return reads_what_it_was_given(rank)

        assert all(on_ranks(config, graph_of(), body))


def test_gradients_of_unread_rows_are_zero() -> None:
    """Fails if the buffers of gradients hold anything but zeros where nothing is read."""

    def body(rank: Rank) -> None:
        runtime = rank.trainer.runtime
        runtime.bound = runtime.programs["train"]
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
    seen = {"loss": "aggregate3", "aggregate-grad 3": "aggregate-grad3", "aggregate-grad 2": "aggregate-grad2"}
    sets = dict(zip(seen, required_sets(graph, training, 3, 1), strict=True))
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
        assert_sent_as_planned(rank)
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
    taken = taken_on_gpus(monkeypatch)

    def body(rank: Rank) -> float:
        assert rank.plan.pruned
        return share_of_plan(rank, taken)

    config = EMULATED.config(config_of(epochs=1, hidden=(40,)))
    (share,) = on_ranks(config, graph_of(900, 6, 100), body, device_of=EMULATED.device_of)
    assert 0.9 < share <= 1.0
