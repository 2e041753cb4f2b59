"""The gradient of every weight is the whole graph's, whatever the ranks, order, model and features."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import pytest

from mggcn.aggregate.edge_op import PartialSums
from mggcn.assemble.plan import STRATEGIES
from mggcn.backend.cpu.backend import CpuBackend
from mggcn.config import Config, ModelConfig, RunConfig, TrainConfig
from mggcn.graph.csr import Graph
from mggcn.model.kinds.aggregate import Aggregate
from tests.devices import CPU, WHERE, Where, everywhere
from tests.graphs import largest_error, make_graph, on_ranks, one_epoch, pattern
from tests.reference import loss_and_gradients
from tests.train.poisoned import reads_what_it_was_given

TOLERANCE = 1e-10
HIDDEN = {1: (), 2: (7,), 3: (16, 5), 4: (5, 9, 13)}
SEED = 20011


def config_of(ranks: int, order: str = "random", strategy: str = "broadcast", **model: object) -> Config:
    transport = "threads" if ranks > 1 else "single"
    run = {"transport": transport, "precision": "fp64", "order": order, "strategy": strategy}
    return Config(
        model=ModelConfig(**model),  # type: ignore[arg-type]
        train=TrainConfig(seed=SEED),
        run=RunConfig(ranks=ranks, threads=1, **run),  # type: ignore[arg-type]
    )


def relative_error(config: Config, graph: object, where: Where = CPU) -> float:
    """Largest error of loss, weights' gradients and logits, relative to the largest value of each."""
    ranks = one_epoch(where.config(config), graph, device_of=where.device_of)  # type: ignore[arg-type]
    loss, grads, logits = loss_and_gradients(graph, config.model, ranks[0].weights, SEED, 3)  # type: ignore[arg-type]
    plain = dataclasses.replace(config.model, dropout=0.0, input_dropout=0.0)
    if plain != config.model:
        _, _, logits = loss_and_gradients(graph, plain, ranks[0].weights, SEED, 3)  # type: ignore[arg-type]
    return largest_error(ranks, loss, grads, logits)


OUTER = list(itertools.product((1, 2, 3, 5), (1, 2, 3, 4), ("random", "directed", "weighted")))
INNER = list(
    itertools.product(
        ("random", "permute", "none", "locality"),
        ((0.0, 0.0), (0.5, 0.0), (0.3, 0.4)),
        ("symmetric", "mean"),
        (False, True),
    )
)
SAMPLES = 3


def sample(cell: int) -> list[tuple[str, tuple[float, float], str, bool]]:
    """A few of INNER, others for each cell of OUTER; 7 and 48 have no common divisor, so all come in turn."""
    return [INNER[(7 * (SAMPLES * cell + k)) % len(INNER)] for k in range(SAMPLES)]


@functools.cache
def graph_of(kind: str, depth: int, sparse: bool) -> Graph:
    return make_graph(
        pattern(kind, 37, 5 + depth), num_features=11, num_classes=4, sparse=sparse, weighted=kind == "weighted", seed=8
    )


@pytest.mark.covering(1)
@pytest.mark.parametrize(("where", "cell"), everywhere(OUTER, lambda number: number % 5 == 2))
def test_gradients_equal_autograd(where: Where, cell: tuple[int, int, str]) -> None:
    """Fails on a skipped SpMM, a transposed tile, a wrong scale, a lost bias, a mask that depends on the partition."""
    ranks, depth, kind = cell
    for order, (dropout, input_dropout), norm, sparse in sample(OUTER.index(cell)):
        model = {"hidden": HIDDEN[depth], "dropout": dropout, "input_dropout": input_dropout, "norm": norm}
        config = config_of(ranks, order, **model)
        assert relative_error(config, graph_of(kind, depth, sparse), where) < TOLERANCE, config


OTHERS = [name for name in STRATEGIES if name != "broadcast"]
ROW_STRATEGIES = [name for name, strategy in STRATEGIES.items() if strategy.kind == "rows"]
OTHER_CELLS = [(name, cell) for name in OTHERS for cell in OUTER]


@pytest.mark.covering(1)
@pytest.mark.parametrize(("where", "case"), everywhere(OTHER_CELLS, lambda number: number % 11 == 7))
def test_gradients_of_other_strategies_equal_autograd(where: Where, case: tuple[str, tuple[int, int, str]]) -> None:
    """Fails if a strategy loses a row, sends it to the wrong place, or multiplies A where A^T is due."""
    name, (ranks, depth, kind) = case
    number = OUTER.index((ranks, depth, kind))
    order, (dropout, input_dropout), norm, sparse = sample(number)[number % SAMPLES]
    model = {"hidden": HIDDEN[depth], "dropout": dropout, "input_dropout": input_dropout, "norm": norm}
    config = config_of(ranks, order, name, **model)
    assert relative_error(config, graph_of(kind, depth, sparse), where) < TOLERANCE, config


def test_the_sample_covers_every_pair() -> None:
    """Fails if some value of one setting is never combined with some value of another, or a combination is left out."""
    taken = [(*cell, *inner) for number, cell in enumerate(OUTER) for inner in sample(number)]
    levels = [sorted({row[i] for row in taken}) for i in range(7)]
    for i, j in itertools.combinations(range(7), 2):
        missing = set(itertools.product(levels[i], levels[j])) - {(row[i], row[j]) for row in taken}
        assert not missing, missing
    assert {row[3:] for row in taken} == set(INNER)


HOSTILE = list(itertools.product((1, 3, 5), ("empty", "path", "star", "hub-row", "disconnected"), (True, False)))


@pytest.mark.covering(1)
@pytest.mark.parametrize(("where", "case"), everywhere(HOSTILE, lambda number: number % 3 == 1))
def test_gradients_on_hostile_graphs(where: Where, case: tuple[int, str, bool]) -> None:
    """Fails where empty rows, one dense row or a rank without edges are special."""
    ranks, kind, loops = case
    graph = make_graph(pattern(kind, 23, 3), num_features=6, num_classes=3, seed=2)
    # Over the three numbers of ranks, every graph meets both norms.
    norm = "mean" if (ranks == 3) == loops else "symmetric"
    config = config_of(ranks, hidden=(8, 4), dropout=0.5, norm=norm, self_loops=loops)
    assert relative_error(config, graph, where) < TOLERANCE


OTHER_HOSTILE = list(itertools.product(OTHERS, (1, 2, 3, 5), ("empty", "path", "star", "hub-row", "disconnected")))


@pytest.mark.covering(1)
@pytest.mark.parametrize(("where", "case"), everywhere(OTHER_HOSTILE, lambda number: number % 7 == 3))
def test_gradients_of_other_strategies_on_hostile_graphs(where: Where, case: tuple[str, int, str]) -> None:
    """Fails where a rank sends or needs nothing, everything, or rows without edges."""
    name, ranks, kind = case
    graph = make_graph(pattern(kind, 23, 3), num_features=6, num_classes=3, seed=2)
    for norm, loops in (("mean", ranks % 2 == 1), ("symmetric", ranks % 2 == 0)):
        config = config_of(ranks, strategy=name, hidden=(8, 4), dropout=0.5, norm=norm, self_loops=loops)
        assert relative_error(config, graph, where) < TOLERANCE


LOCAL = list(itertools.product((1, 2, 3), ("empty", "path", "star", "hub-row", "disconnected"), ROW_STRATEGIES))


@pytest.mark.covering(1)
@pytest.mark.parametrize(("where", "case"), everywhere(LOCAL, lambda number: number % 9 == 4))
def test_gradients_under_an_order_by_locality(where: Where, case: tuple[int, str, str]) -> None:
    """Fails if rows of another order than the vertices', or parts of different sizes, get each other's numbers."""
    ranks, kind, name = case
    graph = make_graph(pattern(kind, 23, 3), num_features=6, num_classes=3, sparse=True, seed=2)
    for norm, loops in (("mean", True), ("symmetric", False)):
        config = config_of(ranks, "locality", name, hidden=(8, 4), dropout=0.5, norm=norm, self_loops=loops)
        assert relative_error(config, graph, where) < TOLERANCE


CHOICES = list(itertools.product(("gemm-first", "aggregate-first"), ("auto", "dense", "sparse"), (True, False)))


@pytest.mark.covering(1)
@pytest.mark.parametrize(("where", "case"), everywhere(CHOICES, lambda number: number % 3 == 0))
def test_gradients_for_every_choice(where: Where, case: tuple[str, str, bool]) -> None:
    """Fails if a forced order of products or a forced kind of features takes another path wrongly."""
    graph = make_graph(pattern("directed", 29, 1), num_features=9, num_classes=5, sparse=True, seed=4)
    choice, features, bias = case
    cases = [*itertools.product((1, 3), ("gcn",), (0.0, 0.4)), *itertools.product((3,), ("mlp",), (0.0, 0.4))]
    for ranks, kind, input_dropout in cases:
        if kind == "mlp" and choice != "gemm-first":
            continue  # no product with the graph to be ordered
        config = config_of(ranks, hidden=(6, 12), dropout=0.2, input_dropout=input_dropout, bias=bias, kind=kind)
        run = dataclasses.replace(config.run, products=choice, features=features)
        assert relative_error(dataclasses.replace(config, run=run), graph, where) < TOLERANCE


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", STRATEGIES)
def test_more_ranks_than_vertices(where: Where, name: str) -> None:
    """Fails if a rank without rows divides by zero, skips a collective or sends garbage."""
    graph = make_graph(pattern("random", 4, 6), num_features=3, num_classes=2, seed=9)
    config = config_of(6, strategy=name, hidden=(5,), dropout=0.5)
    assert relative_error(config, graph, where) < TOLERANCE


@pytest.mark.covering(2)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("norm", ["symmetric", "mean"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_wide_features_are_aggregated_by_panels(ranks: int, norm: str, name: str) -> None:
    """Fails if a panel of A_hat X overwrites the next one, or ranks cut panels differently and wait for each other."""
    graph = make_graph(pattern("directed", 38, 6), num_features=71, num_classes=4, seed=8)
    config = config_of(ranks, strategy=name, hidden=(8,), dropout=0.5, norm=norm)
    panels = on_ranks(config, graph, lambda rank: [op.label for op in rank.plan.setup.ops])
    assert len(panels[0]) > 2
    assert all(other == panels[0] for other in panels)
    assert relative_error(config, graph) < TOLERANCE


def _error_with(
    monkeypatch: pytest.MonkeyPatch, name: str, value: object, owner: type, strategy: str = "broadcast"
) -> float:
    graph = make_graph(pattern("random", 37, 6), num_features=11, num_classes=4, seed=8)
    monkeypatch.setattr(owner, name, value)
    return relative_error(config_of(3, strategy=strategy, hidden=(16, 5)), graph)


def test_planted_dropped_tile_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exactness test itself fails when one remote tile is left out."""
    original = PartialSums.tile

    def drop(self, matrix, rows, *, last):  # type: ignore[no-untyped-def]
        # The second of three tiles, which neither begins the sums nor ends them.
        if last or not self._begun:
            original(self, matrix, rows, last=last)

    assert _error_with(monkeypatch, "tile", drop, PartialSums) > 1e-6 or pytest.fail("a dropped tile went unnoticed")


def test_planted_row_order_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exactness test itself fails when a rank sends the rows that others need in another order."""
    original = CpuBackend.gather_rows

    def backwards(self, source, index, out):  # type: ignore[no-untyped-def]
        original(self, source, index.flip(0), out)

    assert _error_with(monkeypatch, "gather_rows", backwards, CpuBackend, "halo") > 1e-6


def test_planted_skipped_spmm_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exactness test itself fails when the backward SpMM of a layer is a copy, as in MG-GCN section 4.4."""
    original = Aggregate.run

    def skip(self, rt, op):  # type: ignore[no-untyped-def]
        if self.backward and self.site == 2:
            rt.buffer(op.out).copy_(op.tensor(rt, 0))
        else:
            original(self, rt, op)

    assert _error_with(monkeypatch, "run", skip, Aggregate) > 1e-6


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", STRATEGIES)
def test_no_op_reads_memory_it_was_not_given(name: str) -> None:
    """Fails if live ranges are too short: buffers are NaN before and after their planned life."""
    graph = make_graph(pattern("directed", 37, 6), num_features=11, num_classes=4, seed=8)
    for ranks, hidden, p in itertools.product((1, 3), ((16, 5), (5, 16), ()), (0.0, 0.5)):
        config = config_of(ranks, strategy=name, hidden=hidden, dropout=p, input_dropout=p)
        assert all(on_ranks(config, graph, reads_what_it_was_given))
