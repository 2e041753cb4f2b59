"""The neighbour sampler beside its twin in Python, and what no batch may depend on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from mggcn import native
from mggcn.blocks import sampler as sampler_module
from mggcn.blocks.block import Capacity
from mggcn.blocks.draws import ALL, Draws, bounds
from mggcn.blocks.sampler import BatchTooLargeError, Drawn, Sampler, edge_keys
from mggcn.blocks.slot import Slot, SlotPlan, Table
from mggcn.errors import ConfigError, GraphError, PlanError
from mggcn.graph.csr import CSR, ArrayRows, most_own_entries, windows
from tests.blocks.sample_twin import Twin

SEED = 3187463021
MODES = {
    "uniform": Draws(fanouts=(3, 2)),
    "one": Draws(fanouts=(1, 1, 1)),
    "many": Draws(fanouts=(4, 70)),
    "replace": Draws(fanouts=(4, 3), replace=True),
    "replace-many": Draws(fanouts=(80, 2), replace=True),
    "all": Draws(fanouts=(ALL, 2)),
    "weight": Draws(fanouts=(3, ALL), by="weight"),
    "labor": Draws(fanouts=(4, 3), by="labor"),
    "labor-one": Draws(fanouts=(4, ALL, 5), by="labor-one"),
    "types": Draws(fanouts=((2, 0, ALL), (1, 3, 1))),
    "types-replace": Draws(fanouts=((2, 3, 0), 2), replace=True),
    "types-weight": Draws(fanouts=((1, 2, ALL), (1, 0, 1)), by="weight"),
    "types-labor": Draws(fanouts=((1, 2, 0), (2, ALL, 1)), by="labor"),
}


def graph(kind: str, n: int = 90) -> CSR:
    """In-edges with weights, some of them 0, and three types; "parallel" repeats columns with other types."""
    rng = np.random.default_rng(7211)
    dense = np.zeros((n, n), np.int64)
    if kind == "star":
        dense[0, 1:] = dense[1:, 0] = 1
    elif kind == "path":
        dense[np.arange(n - 1), np.arange(1, n)] = 1
    elif kind == "loops":
        dense = (rng.random((n, n)) < 0.06).astype(np.int64)
        np.fill_diagonal(dense, rng.random(n) < 0.6)
    elif kind in ("dense-row", "parallel"):
        dense = (rng.random((n, n)) < 0.07).astype(np.int64)
        dense[:, : n // 5] = 0
        dense[n // 5 : n // 3] = 0
        dense[n // 2] = 1
    if kind == "parallel":
        dense *= rng.integers(1, 4, (n, n))
    rows, columns = np.nonzero(dense)
    counts = dense[rows, columns]
    types = np.concatenate([np.sort(rng.choice(3, k, replace=False)) for k in counts] or [np.empty(0)])
    lengths = np.bincount(np.repeat(rows, counts), minlength=n)
    indices = np.repeat(columns, counts).astype(np.int32)
    weights = (rng.random(indices.size) * (rng.random(indices.size) < 0.8)).astype(np.float32)
    return CSR(
        ArrayRows(np.append(0, np.cumsum(lengths)).astype(np.int64)),
        ArrayRows(indices),
        ArrayRows(weights),
        n,
        types=ArrayRows(types.astype(np.uint8)),
    )


def plan_for(adj_t: CSR, draws: Draws, num_seeds: int, self_loops: bool = False, **others: Any) -> SlotPlan:
    size = {"num_vertices": adj_t.num_rows, "num_edges": adj_t.nnz}
    capacities = bounds(num_seeds, draws, own_entries=most_own_entries(adj_t) if self_loops else 0, **size)
    return SlotPlan(draws=draws, capacities=capacities, num_vertices=adj_t.num_rows, **others)


def content(drawn: Drawn) -> list[Any]:
    """A copy of all that a batch has."""
    found: list[Any] = [drawn.sizes, drawn.ids.tolist()]
    for hop in drawn.hops:
        arrays = (hop.indptr, hop.indices, hop.values, hop.places, *(hop.transposed or ()))
        found += [None if array is None else array.tolist() for array in arrays]
    return found


def expected(twin: Twin, seeds: npt.NDArray[np.int64], step: int, left_out: Any = frozenset()) -> list[Any]:
    ids, sizes, hops = twin.draw(seeds, SEED, step, left_out)
    found: list[Any] = [tuple(sizes), ids]
    for hop, sources in zip(hops, sizes[1:], strict=True):
        values = hop.values if twin.draws.has_values else None
        found += [hop.indptr, hop.indices, values, hop.places, *(a.tolist() for a in hop.transposed(sources))]
    return found


@pytest.fixture(params=["baseline", "avx2"])
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name: str = request.param
    if name not in native.isas():
        pytest.skip(f"this processor has no {name}")
    monkeypatch.setattr(sampler_module.native, "kernel", partial(native.kernel, set_=name))
    return name


@pytest.mark.covering(1)
@pytest.mark.parametrize("mode", ["uniform", "replace", "all", "labor", "weight", "types"])
def test_a_draw_says_over_how_many_entries_it_passed(mode: str) -> None:
    """Fails if a row is left out, or counted in a hop that does not have it, or a draw that passes over none has some."""
    adj_t, draws = graph("dense-row"), MODES[mode]
    sampler = Sampler(adj_t, draws)
    drawn = sampler.draw(Slot(plan_for(adj_t, draws, 5)), np.array([45, 3, 30, 61, 88]), SEED, 2)
    degrees = np.diff(adj_t.indptr.array())
    rows = [int(degrees[drawn.ids[:size]].sum()) for size in drawn.sizes[:-1]]
    assert sampler.looked_at(drawn) == (0 if mode in ("uniform", "replace", "all") else sum(rows))
    assert rows[0] >= degrees[45] > 60


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["empty", "star", "path", "loops", "dense-row", "parallel"])
def test_every_mode_equals_its_twin(isa: str, kind: str, mode: str) -> None:
    """Fails if a bit of a batch differs, a draw, an order, number, value, place or the transpose, with either table."""
    adj_t, draws = graph(kind), MODES[mode]
    rng = np.random.default_rng(len(kind) + len(mode))
    for self_loops in (False, True):
        sampler, twin = (of(adj_t, draws, self_loops=self_loops) for of in (Sampler, Twin))
        for step, count in enumerate((1, 13, adj_t.num_rows)):
            seeds = rng.permutation(adj_t.num_rows)[:count]
            want = expected(twin, seeds, step)
            tables: tuple[Table, ...] = ("direct", "hashed")
            for table in tables:
                slot = Slot(plan_for(adj_t, draws, count, self_loops, places=True, table=table))
                assert content(sampler.draw(slot, seeds, SEED, step)) == want


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["loops", "parallel"])
def test_nothing_is_drawn_around_vertices_of_other_ranks(isa: str, kind: str, mode: str) -> None:
    """Fails if a row of another rank has an edge, or a seed, or an own row, draws otherwise than without ranks."""
    adj_t, draws = graph(kind), MODES[mode]
    owner = np.random.default_rng(91).integers(0, 3, adj_t.num_rows).astype(np.uint16)
    targets = np.repeat(np.arange(adj_t.num_rows), np.diff(adj_t.indptr.array()))
    pairs = list(zip(targets.tolist(), adj_t.indices.array().tolist(), strict=True))
    sampler, twin = Sampler(adj_t, draws, owner=owner, rank=2), Twin(adj_t, draws, self_loops=False)
    for step, count in enumerate((1, 13)):
        seeds = np.random.default_rng(step).permutation(adj_t.num_rows)[:count]
        leaves = {pair for pair in pairs if owner[pair[0]] != 2 and pair[0] not in seeds}
        slot = Slot(plan_for(adj_t, draws, count, places=True))
        assert content(sampler.draw(slot, seeds, SEED, step)) == expected(twin, seeds, step, leaves)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["loops", "parallel"])
def test_edges_that_are_left_out_are_never_drawn(isa: str, kind: str, mode: str) -> None:
    """Fails if one is drawn, if a row draws otherwise than from its other edges, or if a key that names none matters."""
    adj_t, draws = graph(kind), MODES[mode]
    rng = np.random.default_rng(91)
    targets = np.repeat(np.arange(adj_t.num_rows), np.diff(adj_t.indptr.array()))
    some = rng.permutation(adj_t.nnz)[: adj_t.nnz // 3]
    pairs = [(int(targets[i]), int(adj_t.indices.array()[i])) for i in some] + [(3, 5), (40, 0), (40, 40), (89, 89)]
    keys = edge_keys(*np.array(pairs).T)
    for self_loops in (False, True):
        sampler, twin = (of(adj_t, draws, self_loops=self_loops) for of in (Sampler, Twin))
        slot = Slot(plan_for(adj_t, draws, 60, self_loops, places=True))
        seeds = rng.permutation(adj_t.num_rows)[:60]
        assert content(sampler.draw(slot, seeds, SEED, 3, keys)) == expected(twin, seeds, 3, frozenset(pairs))


@pytest.mark.parametrize("fanout", [64, 65, 1024, 3000])
@pytest.mark.parametrize("replace_", [False, True])
def test_large_fanouts_equal_the_twin(isa: str, fanout: int, replace_: bool) -> None:
    """Fails if the path of large fan-outs draws otherwise than Floyd's algorithm, or stops being one with the lanes'."""
    n = 2500
    indptr = np.array([0, n] + [n + 70] * (n - 1))
    indices = np.append(np.arange(n), np.arange(0, 2 * 70, 2)).astype(np.int32)
    adj_t = CSR(ArrayRows(indptr), ArrayRows(indices), None, n)
    draws = Draws(fanouts=(fanout,), replace=replace_)
    slot = Slot(plan_for(adj_t, draws, 2, places=True))
    seeds = np.array([1, 0])
    assert content(Sampler(adj_t, draws).draw(slot, seeds, SEED, 1)) == expected(Twin(adj_t, draws), seeds, 1)


def test_one_vertex_and_no_seeds() -> None:
    """Fails if the smallest graph, with a loop or without, or a rank without seeds is a special case."""
    for indices in ([], [0]):
        adj_t = CSR(ArrayRows(np.array([0, len(indices)])), ArrayRows(np.array(indices, np.int32)), None, 1)
        draws = MODES["uniform"]
        slot = Slot(plan_for(adj_t, draws, 1, True, places=True))
        drawn = Sampler(adj_t, draws, self_loops=True).draw(slot, np.array([0]), SEED, 0)
        assert drawn.sizes == (1, 1, 1)
        assert [hop.places.tolist() for hop in drawn.hops if hop.places is not None] == [[len(indices) - 1]] * 2
        nothing = Sampler(adj_t, draws).draw(slot, np.empty(0, np.int64), SEED, 0)
        assert nothing.sizes == (0, 0, 0)
        assert nothing.hops[1].indptr.tolist() == [0]


@pytest.mark.parametrize("table", ["direct", "hashed"])
def test_nothing_is_left_over_from_older_batches(table: Table) -> None:
    """Fails if a batch depends on those before it in its slot, also where the table's base wraps and where one failed."""
    adj_t, draws = graph("loops"), Draws(fanouts=(3, 3))
    sampler, plan = Sampler(adj_t, draws), plan_for(adj_t, draws, 20, table=table)
    rng = np.random.default_rng(5)
    batches = [rng.permutation(90)[:20] for _ in range(12)]
    alone = [content(sampler.draw(Slot(plan), seeds, SEED, step)) for step, seeds in enumerate(batches)]
    slot = Slot(plan)
    slot.frontier.base = 2**32 - 5 * plan.capacities[-1].sources
    bases = list[int]()
    for step, seeds in [*enumerate(batches), (0, batches[0])]:
        with pytest.raises(ConfigError):
            sampler.draw(slot, np.array([8, 9, 8]), SEED, step)
        assert content(sampler.draw(slot, seeds, SEED, step)) == alone[step]
        bases.append(slot.frontier.base)
    assert min(bases) < 1000
    assert max(bases) > 2**31


def test_two_threads_draw_what_one_does() -> None:
    """Fails if batches that are drawn at the same time touch each other."""
    adj_t, draws = graph("loops", 400), Draws(fanouts=(5, 5, 5))
    sampler, plan = Sampler(adj_t, draws, self_loops=True), plan_for(adj_t, draws, 100, True)
    rng = np.random.default_rng(77)
    batches = [rng.permutation(400)[:100] for _ in range(60)]

    def run(first: int, every: int) -> list[Any]:
        slot = Slot(plan)
        steps = range(first, len(batches), every)
        return [content(sampler.draw(slot, batches[step], SEED, step)) for step in steps]

    one = run(0, 1)
    with ThreadPoolExecutor(2) as threads:
        even, odd = threads.map(lambda first: run(first, 2), range(2))
    assert even == one[::2]
    assert odd == one[1::2]


@pytest.mark.parametrize("mode", ["uniform", "many", "replace", "weight", "labor", "types"])
def test_a_vertex_draws_the_same_in_any_batch(mode: str) -> None:
    """Fails if what a vertex draws depends on other seeds or its place, or not on the seed, the step and the hop."""
    adj_t, draws = graph("dense-row"), MODES[mode]
    sampler, slot = Sampler(adj_t, draws), Slot(plan_for(adj_t, draws, 90))

    def neighbours(seeds: list[int], vertex: int, seed: int = SEED, step: int = 4) -> list[int]:
        drawn = sampler.draw(slot, np.array(seeds), seed, step)
        hop, row = drawn.hops[0], seeds.index(vertex)
        return drawn.ids[hop.indices[hop.indptr[row] : hop.indptr[row + 1]]].tolist()

    alone = neighbours([45], 45)
    assert neighbours([*range(40), 45, 88, 81], 45) == alone
    others = [neighbours([45], 45, SEED + 1), neighbours([45], 45, step=5)]
    hops = replace(draws, fanouts=draws.fanouts[:1] * 2)
    again = Sampler(adj_t, hops).draw(Slot(plan_for(adj_t, hops, 90)), np.array([45]), SEED, 4).hops[1]
    others.append(again.indices[: again.indptr[1]].tolist())
    assert all(other != alone for other in others)


@pytest.mark.parametrize("table", ["direct", "hashed"])
def test_a_batch_may_fill_its_slot_and_not_pass_it(table: Table) -> None:
    """Fails if a batch that just fits is refused, or one row or edge more is not, by its hop and kind."""
    adj_t, draws = graph("dense-row"), Draws(fanouts=(3, 2))
    sampler, plan = Sampler(adj_t, draws), plan_for(adj_t, draws, 25, table=table)
    seeds = np.random.default_rng(6).permutation(90)[:25]
    drawn = sampler.draw(Slot(plan), seeds, SEED, 9)
    want = content(drawn)
    sizes, edges = drawn.sizes, [hop.indices.size for hop in drawn.hops]
    exact = tuple(Capacity(sizes[h], sizes[h + 1], edges[h]) for h in range(2))
    assert content(sampler.draw(Slot(replace(plan, capacities=exact)), seeds, SEED, 9)) == want
    near, far = exact
    short = {
        (0, "seeds"): (replace(near, targets=24), far),
        (0, "edges"): (replace(near, edges=near.edges - 1), far),
        (0, "sources"): (replace(near, sources=near.sources - 1), replace(far, targets=near.sources - 1)),
        (1, "edges"): (near, replace(far, edges=far.edges - 1)),
        (1, "sources"): (near, replace(far, sources=far.sources - 1)),
    }
    for (hop, what), capacities in short.items():
        slot = Slot(replace(plan, capacities=capacities))
        with pytest.raises(BatchTooLargeError) as refused:
            sampler.draw(slot, seeds, SEED, 9)
        assert (refused.value.hop, refused.value.what) == (hop, what)
        half = sampler.draw(slot, seeds[:2], SEED, 9)
        assert content(half) == content(sampler.draw(Slot(plan), seeds[:2], SEED, 9))


def test_a_slot_has_the_bytes_that_are_planned() -> None:
    """Fails if a slot allocates what its plan does not count, or auto does not choose by bytes."""
    adj_t, draws = graph("loops"), Draws(fanouts=(3, 3), replace=True)
    plan = plan_for(adj_t, draws, 20, places=True, transposed=1)
    slot = Slot(plan)
    assert plan.nbytes == sum(array.nbytes for array in slot.arrays.values())
    assert "order0" in slot.arrays
    assert "order1" not in slot.arrays
    drawn = Sampler(adj_t, draws).draw(slot, np.arange(20), SEED, 0)
    assert [hop.transposed is None for hop in drawn.hops] == [False, True]
    assert plan.hash_bits == 0
    assert replace(plan, num_vertices=2**30).hash_bits == 8
    assert replace(plan, table="hashed").nbytes > plan.nbytes


def test_what_cannot_be_drawn_is_refused() -> None:
    """Fails if a setting that cannot be, a seed that is none, or a damaged graph is taken, or ends the process."""
    wrong: list[dict[str, Any]] = [
        {"fanouts": ()},
        {"fanouts": (0,)},
        {"fanouts": (5, -2)},
        {"fanouts": (2**16,)},
        {"fanouts": ((0, 0),)},
        {"fanouts": ((1, 2), (1,))},
        {"fanouts": (5,), "by": "degree"},
        {"fanouts": (5,), "by": "labor", "replace": True},
    ]
    for settings in wrong:
        with pytest.raises(ConfigError):
            Draws(**settings)
    adj_t, draws = graph("loops"), Draws(fanouts=(3, 3))
    plan = plan_for(adj_t, draws, 20)
    near, far = plan.capacities
    for capacities in ((near,), (near, near), (near, replace(far, sources=1)), (near, replace(far, edges=2**31))):
        with pytest.raises(PlanError):
            replace(plan, capacities=capacities)
    for seeds in ([0, 5, 0], [-1], [90]):
        with pytest.raises(ConfigError, match=r"twice|must be vertices"):
            Sampler(adj_t, draws).draw(Slot(plan), np.array(seeds), SEED, 0)
    with pytest.raises(ConfigError, match="edge_keys"):
        Sampler(adj_t, draws).draw(Slot(plan), np.arange(3), SEED, 0, np.array([5, 4]))
    with pytest.raises(ConfigError, match="weights"):
        Sampler(replace(adj_t, values=None), replace(draws, by="weight"))
    with pytest.raises(ConfigError, match="types"):
        Sampler(replace(adj_t, types=None), MODES["types"])


def test_a_damaged_graph_is_refused() -> None:
    """Fails if a column, row pointer, weight or type that cannot be is followed or drawn by."""

    def changed(array: npt.NDArray[Any], place: int, value: float) -> ArrayRows:
        array = array.copy()
        array[place] = value
        return ArrayRows(array)

    adj_t = graph("loops")
    assert adj_t.values is not None
    indptr, indices, weights = (rows.array() for rows in (adj_t.indptr, adj_t.indices, adj_t.values))
    damaged = [(replace(adj_t, indices=changed(indices, 7, value)), MODES["all"], "column") for value in (-1, 90, -90)]
    damaged += [(replace(adj_t, indptr=changed(indptr, 7, v)), MODES["all"], "row pointers") for v in (-5, 10**12)]
    damaged += [
        (replace(adj_t, values=changed(weights, 7, v)), draws, "edge 7")
        for v in (-1, np.nan, np.inf)
        for draws in (MODES["weight"], Draws(fanouts=(ALL,), by="weight"))
    ]
    damaged += [(adj_t, Draws(fanouts=((3, 3), (3, 3))), "without a fan-out")]
    for graph_, draws, message in damaged:
        slot = Slot(plan_for(adj_t, draws, 90))
        with pytest.raises(GraphError, match=message):
            Sampler(graph_, draws).draw(slot, np.arange(90), SEED, 0)


def test_own_entries_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if several own entries of a row are one, those of two rows are one row's, or a window's end parts a row's."""
    indptr, indices = np.array([0, 1, 4, 8, 8]), np.array([1, 1, 1, 2, 2, 2, 2, 3], np.int32)
    adj_t = CSR(ArrayRows(indptr), ArrayRows(indices), None, 4, types=ArrayRows(np.array([0, 0, 1, 0, 0, 1, 2, 0])))
    assert [most_own_entries(adj_t), most_own_entries(adj_t.untyped())] == [3, 1]
    for window in range(1, 9):
        monkeypatch.setattr("mggcn.graph.csr.windows", partial(windows, size=window))
        assert most_own_entries(adj_t) == 3
    sizes = {"num_vertices": 100, "num_edges": 50, "own_entries": 3}
    assert [of.edges for of in bounds(4, Draws(fanouts=(2, ALL)), **sizes)] == [20, 62]


def test_more_edges_than_a_hop_can_have_are_bounded() -> None:
    """Fails if a graph of 2^31 edges or more cannot be planned, however small its batches are."""
    draws = Draws(fanouts=(10, ALL), by="uniform")
    capacities = bounds(100, draws, num_vertices=2**27, num_edges=2**32, own_entries=1)
    assert [size.edges for size in capacities] == [1100, 2**31 - 1]
    assert SlotPlan(draws=draws, capacities=capacities, num_vertices=2**27).nbytes > 2**33
