"""Relations that share launches: which, in which rows, what an epoch launches, and what its plan says of both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mggcn.aggregate import broadcast, halo, relations
from mggcn.aggregate.relations import multiplied_together, upload_tile
from mggcn.assemble.plan import plan_graph, plan_shape
from mggcn.assemble.rank import Rank
from mggcn.backend.base import KernelBackend, Sparse
from mggcn.backend.cpu.backend import CpuBackend
from mggcn.config import Config, ModelConfig, RunConfig, TrainConfig
from mggcn.cost.machine import find_machine
from mggcn.cost.work import Item, Staged, Work, work_seconds
from mggcn.graph.convert import from_arrays
from mggcn.graph.csr import Graph
from mggcn.model.kinds.aggregate import Aggregate
from mggcn.partition.rows.tiles import Tile
from mggcn.planning.op_cost import training_cost
from mggcn.planning.op_work import items_by_op
from tests.backend.emulated import emulated_backend
from tests.emulator import launches
from tests.emulator.device import EmulatedDevice
from tests.emulator.launches import CountingDevice
from tests.graphs import Trained, largest_error, on_ranks, one_epoch
from tests.shapes import shape_of
from tests.train.test_launches import epoch_nodes

VERTICES = 90


def tile_of(num_relations: int, edges: int) -> Tile:
    """A tile with edges of random relations, relation 0 at every vertex."""
    rng = np.random.default_rng(29)
    targets = np.sort(np.append(np.arange(VERTICES), rng.integers(0, VERTICES, edges)))
    types = rng.integers(1, num_relations, targets.size).astype(np.uint8)
    types[np.flatnonzero(np.diff(targets, prepend=-1))] = 0
    indptr = np.searchsorted(targets, np.arange(VERTICES + 1)).astype(np.int64)
    values = rng.random(targets.size).astype(np.float32)
    return Tile(indptr, rng.integers(0, VERTICES, targets.size).astype(np.int32), values, types)


def dense(matrix: Sparse, num_relations: int) -> np.ndarray:
    """The entries by relation, (R, V, V)."""
    found = np.zeros((num_relations, VERTICES, VERTICES))
    for part in matrix.relations:
        of = part.matrix
        assert of.values is not None
        for relation, first, last in part.spans:
            for place in range(first, last):
                entries = slice(int(of.indptr[place]), int(of.indptr[place + 1]))
                np.add.at(
                    found[relation, int(part.rows[place])], of.indices[entries].numpy(), of.values[entries].numpy()
                )
    return found


@pytest.mark.parametrize("block_rows", [1 << 14, 70])
def test_groups_hold_every_entry(block_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if an entry is lost or counts for another relation or row, or a group has no room or a relation twice."""
    monkeypatch.setattr(relations, "BLOCK_ROWS", block_rows)
    monkeypatch.setattr(relations, "GROUPED_ROWS", 60)
    alone, together = (
        upload_tile(backend, tile_of(13, 300))
        for backend in (CpuBackend(torch.float32, 1), emulated_backend(torch.float32, 0))
    )
    assert np.array_equal(dense(alone, 13), dense(together, 13))
    assert all(part.group is None and len(part.spans) == 1 for part in alone.relations)
    assert any(part.group is not None for part in together.relations)
    for part in together.relations:
        names = [relation for relation, _, _ in part.spans]
        assert len(set(names)) == len(names)
        assert part.rows.shape[0] <= min(VERTICES, block_rows)
        assert part.group is None or part.group.longest <= 60
    assert (0 not in (name for part in together.relations if part.group for name, _, _ in part.spans)) == (
        block_rows > VERTICES
    )


def typed(num_relations: int) -> Graph:
    """A graph with one edge from each vertex, of one of many relations."""
    rng, n = np.random.default_rng(3), 200
    return from_arrays(
        edges=np.stack([np.arange(n), rng.permutation(n)]),
        edge_types=np.arange(n) % num_relations,
        num_relations=num_relations,
        num_vertices=n,
        features=rng.normal(size=(n, 5)).astype(np.float32),
        labels=rng.integers(0, 3, n),
        splits={"train": np.ones(n, bool)},
    )


def test_launches_do_not_grow_with_relations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if relations of few rows have launches of their own: three forwards, five backwards, three where rows need no
    gradient.
    """

    def nodes(count: int) -> Counter[str]:
        model = {"kind": "rgcn", "hidden": (6,), "bases": 2}
        return epoch_nodes(typed(count), CountingDevice(3), "fp32", {}, **model)

    few, many = nodes(4), nodes(40)
    assert few == many
    assert (many["relation_products"], many["relation_gradients"], many["scatter_add_chains"]) == (3, 2, 3)
    monkeypatch.setattr(relations, "GROUPED_ROWS", 0)
    apart = nodes(40)
    # Of two layers: two sums and one gradient of rows; 40 products, sums, and weights' gradients (two nodes) for each.
    assert apart["scatter_add_rows"] == 3 * 40
    assert apart.total() - many.total() > 11 * 39


def equal(num_relations: int, size: int, features: int = 5) -> Graph:
    """A graph whose relations have equally many edges, each from and to vertices that have no other of it."""
    rng, n = np.random.default_rng(3), 200
    sides = [np.concatenate([rng.permutation(n)[:size] for _ in range(num_relations)]) for _ in range(2)]
    return from_arrays(
        edges=np.stack(sides),
        edge_types=np.repeat(np.arange(num_relations), size),
        num_relations=num_relations,
        num_vertices=n,
        features=rng.normal(size=(n, features)).astype(np.float32),
        labels=rng.integers(0, 3, n),
        splits={"train": np.ones(n, bool)},
    )


def config_of(ranks: int, strategy: Any, hidden: int = 6) -> Config:
    transport: Any = "threads" if ranks > 1 else "single"
    return Config(
        model=ModelConfig(kind="rgcn", hidden=(hidden,), bases=2),
        train=TrainConfig(seed=4211, epochs=3, eval_every=0),
        run=RunConfig(ranks=ranks, threads=1, device="cuda", transport=transport, strategy=strategy, prune="off"),
    )


def launched(config: Config, graph: Graph, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """What each aggregation of an epoch launches on each rank."""
    # cuBLAS may split a product of a transposed matrix; plans count products.
    monkeypatch.setattr(launches, "product_nodes", lambda a: 1)
    devices = [CountingDevice(3, work=config.run.ranks > 1) for _ in range(config.run.ranks)]
    found: dict[int, list[int]] = {rank: [] for rank in range(config.run.ranks)}
    original = Aggregate.run

    def run(self: Aggregate, rt: Any, op: Any) -> None:
        device = rt.backend._device
        before = device.nodes.copy()
        original(self, rt, op)
        # Threads copy rows that other transports send.
        found[devices.index(device)].append(sum(n for name, n in (device.nodes - before).items() if name != "copy_"))

    def body(rank: Rank) -> None:
        rank.trainer._epoch.start(4211, 0)
        rank.trainer.runtime.begin_epoch(0)
        devices[rank.comm.rank].count(rank.trainer._epoch._work.step)

    with monkeypatch.context() as patch:
        patch.setattr(Aggregate, "run", run)
        on_ranks(config, graph, body, device_of=lambda _, comm: devices[comm.rank])
    return [found[rank] for rank in range(config.run.ranks)]


def plain(item: Item) -> Iterable[Item]:
    return item.plain() if isinstance(item, Staged) else (item,)


def planned(config: Config, graph: Graph) -> list[list[int]]:
    """The same by the plan."""
    plan, _ = plan_graph(config, graph)
    return [
        [
            sum(one.calls for item in items for one in plain(item) if isinstance(one, Work))
            for label, items in items_by_op(plan, rank, rank.train)
            if label.startswith("aggregate")
        ]
        for rank in plan.ranks
    ]


@pytest.mark.parametrize(
    ("num_relations", "size", "width"),
    [(40, 5, 6), (40, 30, 6), (7, 150, 6), (8, 90, 480)],
    ids=["one group", "seven groups", "groups of one", "wide"],
)
def test_plans_count_launches(num_relations: int, size: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a plan's launches for relations of equal sizes are others than those that run, in groups or alone."""
    graph, config = equal(num_relations, size, width), config_of(1, "broadcast", width)
    assert launched(config, graph, monkeypatch) == planned(config, graph)


def test_plans_count_launches_of_large_relations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a relation of more than GROUPED_ROWS rows, or one that is cut into blocks, is planned as what it is not."""
    monkeypatch.setattr(relations, "GROUPED_ROWS", 40)
    monkeypatch.setattr(relations, "BLOCK_ROWS", 64)
    graph, config = equal(5, 150), config_of(1, "broadcast")
    found = launched(config, graph, monkeypatch)
    assert found == planned(config, graph)
    assert found[0][0] == 3 * (5 * 2 + 3) + 2


@pytest.mark.parametrize("strategy", ["broadcast", "halo"])
def test_plans_count_launches_of_every_tile(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the launches of a rank's tiles are planned once for all of them: four of a broadcast, two of a halo."""
    config, graph = config_of(4, strategy), typed(20)
    tiles = {"broadcast": 4, "halo": 2}[strategy]
    for rank in planned(config, graph):
        assert rank[0] >= 3 * tiles
    assert launched(config, graph, monkeypatch) == planned(config, graph)


@pytest.mark.parametrize("width", [16, 64, 128, 192, 256, 512, 1024])
def test_grouped_relations_are_planned_to_be_no_slower(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if own products of groups take more seconds than the launches that they save, by their own rate."""

    def seconds() -> float:
        shape = shape_of(8192, 90_000, width, 8, symmetric=False, num_relations=90, num_training=100)
        config = config_of(1, "broadcast", width)
        return training_cost(plan_shape(config, shape), find_machine("hgx-h200")).seconds

    together = seconds()
    monkeypatch.setattr(relations, "GROUPED_ROWS", 0)
    assert together < seconds()


def test_products_of_groups_have_a_rate_of_their_own() -> None:
    """Fails if kernels for groups are priced as cuBLAS's, or shared where they take longer than what they save."""
    assert multiplied_together(90_000, 90, 128, 128)
    assert not multiplied_together(90_000, 90, 256, 256)
    assert multiplied_together(9_000, 90, 256, 256)
    shape = shape_of(8192, 90_000, 128, 8, symmetric=False, num_relations=90, num_training=100)
    plan = plan_shape(config_of(1, "broadcast", 128), shape)
    device = find_machine("hgx-h200").device
    works = [
        item for _, items in items_by_op(plan, plan.ranks[0], plan.ranks[0].train, device=device) for item in items
    ]
    grouped = [work for work in works if isinstance(work, Work) and work.grouped]
    assert len(grouped) == 5  # two forwards, three backwards: the input needs no gradient
    work = grouped[0]
    assert work_seconds(work, device, 1)[0] == pytest.approx(2 * 90_000 * 128 * 128 / relations.GROUPED_FLOPS)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("strategy", ["broadcast", "halo"])
def test_groups_take_the_memory_that_is_planned(strategy: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if spans or chains of groups are not among a plan's bytes, or it counts more than a part for each relation."""
    held: list[int] = []

    def bytes_of(matrix: Sparse) -> Iterator[Tensor | None]:
        yield matrix.indptr
        for part in matrix.relations:
            yield from (part.rows, part.matrix.indptr, part.matrix.indices, part.matrix.values)
            if part.group is not None:
                yield from (part.group.spans, part.group.chain)

    def counted(backend: KernelBackend, tile: Tile) -> Sparse:
        matrix = upload_tile(backend, tile)
        held.append(sum(tensor.nbytes for tensor in bytes_of(matrix) if tensor is not None))
        return matrix

    for module in (broadcast, halo):
        monkeypatch.setattr(module, "upload_tile", counted)
    config, graph = config_of(ranks, strategy), equal(40, 30)
    plans = on_ranks(config, graph, lambda rank: rank.plan, device_of=lambda *_: CountingDevice(work=False))
    said = sum(plan.regions["graph"] for plan in plans)
    # At most as many matrices as relations are planned for each tile, each with a row pointer more and a span.
    assert 0 <= said - sum(held) <= len(held) * 40 * 20


@pytest.mark.parametrize("num_relations", [9, 40])
def test_products_together_and_alone_train_the_same(num_relations: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a relation of a group with products of its own meets other rows or another matrix, or is left out."""

    def trained() -> list[Trained]:
        return one_epoch(
            config_of(1, "broadcast"), equal(num_relations, 30), device_of=lambda *_: EmulatedDevice(seed=7)
        )

    found = [trained()]
    monkeypatch.setattr(relations, "GROUPED_FLOPS", 0.0)
    found.append(trained())
    monkeypatch.setattr(relations, "GROUPED_ROWS", 0)
    (alone,) = trained()
    for some in found:
        assert largest_error(some, alone.loss, alone.grads, alone.logits) < 1e-5
