"""Batches put together from rows that their owners have drawn: those of a sampler that has the whole graph, bit for bit."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from mggcn import native
from mggcn.blocks import drawn_rows
from mggcn.blocks.block import Capacity
from mggcn.blocks.drawn_rows import (
    HopEdges,
    Numbering,
    ReadyEdges,
    RowDraws,
    StepEdges,
    merged,
    read_slots,
    row_slots,
)
from mggcn.blocks.draws import Draws
from mggcn.blocks.sampler import BatchTooLargeError, Sampler, edge_keys
from mggcn.blocks.slot import Slot
from mggcn.errors import GraphError, PlanError
from mggcn.graph.csr import CSR
from tests.blocks.test_sampler import MODES, SEED, content, graph, plan_for

RANKS, STEP = 3, 17


@pytest.fixture(params=["baseline", "avx2"])
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name: str = request.param
    if name not in native.isas():
        pytest.skip(f"this processor has no {name}")
    monkeypatch.setattr(drawn_rows.native, "kernel", partial(native.kernel, set_=name))
    return name


def together(
    adj_t: CSR, draws: Draws, seeds: npt.NDArray[np.int64], *, self_loops: bool = False, left_out: Any = None
) -> StepEdges:
    """The edges of a step, as owners of every third vertex draw them, in the order in which their answers come."""
    owner = np.random.default_rng(4).integers(0, RANKS, adj_t.num_rows)
    sampler = Sampler(adj_t, draws, self_loops=self_loops)
    of_rows = RowDraws(sampler, row_slots(draws, adj_t.num_rows, places=True))
    numbering, edges = Numbering(adj_t.num_rows, adj_t.num_rows), StepEdges(ids=seeds, num_seeds=seeds.size)
    for hop in range(len(draws.fanouts)):
        order = np.argsort(owner[edges.ids], kind="stable")
        found: dict[str, list[Any]] = {name: [] for name in ("counts", "indices", "degrees", "places")}
        for rank in range(RANKS):
            asked = edges.ids[order][owner[edges.ids[order]] == rank]
            for some, drawn in of_rows.pieces(hop, asked, SEED, STEP, left_out):
                assert drawn.degrees.size == some.size == drawn.indptr.size - 1
                found["counts"].append(np.diff(drawn.indptr).astype(np.int32))
                for name in ("indices", "degrees", "places"):
                    found[name].append(getattr(drawn, name).copy())
        counts, indices, degrees, places = (np.concatenate(of) for of in found.values())
        indptr, take = merged(order, counts)
        columns, by_target = indices[take], np.empty_like(degrees)
        by_target[order] = degrees
        edges.ids = numbering.extend(edges.ids, columns)
        edges.hops.append(HopEdges(indptr=indptr, indices=columns, degrees=by_target, values=places[take]))
    return edges


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["empty", "star", "path", "loops", "dense-row", "parallel"])
def test_rows_of_owners_make_the_batch_of_one(isa: str, kind: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a draw depends on who makes it or on what is drawn beside it, an edge or a vertex has another place, or a
    half of the seeds another batch.
    """
    monkeypatch.setattr(drawn_rows, "ROWS_AT_ONCE", 7)
    adj_t, draws = graph(kind), MODES[mode]
    seeds = np.sort(np.random.default_rng(len(kind)).permutation(adj_t.num_rows)[:21])
    for self_loops in (False, True):
        plan = plan_for(adj_t, draws, seeds.size, self_loops, places=True)
        sampler, ready = Sampler(adj_t, draws, self_loops=self_loops), ReadyEdges()
        ready.put(SEED, STEP, together(adj_t, draws, seeds, self_loops=self_loops))
        slot, read = Slot(plan), Slot(read_slots(plan, places=True))
        for some in (seeds, seeds[:10], seeds[10:], seeds[:1], seeds[:0], seeds):
            mine, one = ready.draw(read, some, SEED, STEP), sampler.draw(slot, some, SEED, STEP)
            assert (mine.sizes, mine.ids.tolist()) == (one.sizes, one.ids.tolist())
            for found, hop in zip(mine.hops, one.hops, strict=True):
                assert found.indptr.tolist() == hop.indptr.tolist()
                assert found.indices.tolist() == hop.indices.tolist()
                assert found.degrees.tolist() == hop.degrees.tolist()
                # What was told of an edge follows it.
                assert found.counted is not None
                assert found.counted.tolist() == hop.places.tolist()  # type: ignore[union-attr]  # the plan has them
                for a, b in zip(found.transposed or (), hop.transposed or (), strict=True):
                    assert a.tolist() == b.tolist()


@pytest.mark.parametrize("mode", ["uniform", "labor", "weight", "types"])
def test_edges_that_are_left_out(mode: str) -> None:
    """Fails if an owner draws an edge that the step leaves out."""
    adj_t, draws = graph("dense-row"), MODES[mode]
    rng = np.random.default_rng(5)
    targets = np.repeat(np.arange(adj_t.num_rows), np.diff(adj_t.indptr.array()))
    chosen = rng.random(targets.size) < 0.4
    keys = edge_keys(targets[chosen], adj_t.indices.array()[chosen])
    seeds, plan, ready = np.arange(0, 90, 4), plan_for(adj_t, draws, 30, places=True), ReadyEdges()
    ready.put(SEED, STEP, together(adj_t, draws, seeds, left_out=keys))
    one = Sampler(adj_t, draws).draw(Slot(plan), seeds, SEED, STEP, keys)
    mine = ready.draw(Slot(read_slots(plan, places=True)), seeds, SEED, STEP)
    assert content(mine)[:4] == content(one)[:4]
    assert mine.ids.tolist() == one.ids.tolist()


def test_a_part_that_is_too_large_is_refused() -> None:
    """Fails if a slot is written behind its end, or says something else than of a batch that is drawn."""
    adj_t, draws, seeds = graph("dense-row"), MODES["uniform"], np.arange(20)
    plan, ready = plan_for(adj_t, draws, 20), ReadyEdges()
    ready.put(SEED, STEP, together(adj_t, draws, seeds))
    small = Capacity(20, 30, 200), Capacity(30, 31, 200)
    for capacities in (small, (Capacity(20, 90, 5), Capacity(90, 90, 500)), (Capacity(5, 90, 90), plan.capacities[1])):
        if capacities[0].sources != capacities[1].targets:
            capacities = capacities[0], Capacity(90, 90, 500)
        of = read_slots(plan, places=False)
        errors = []
        for slots, draw in ((of, ready.draw), (plan, Sampler(adj_t, draws).draw)):
            slot = Slot(dataclasses.replace(slots, capacities=capacities))
            with pytest.raises(BatchTooLargeError) as error:
                draw(slot, seeds, SEED, STEP)
            errors.append(str(error.value))
        assert errors[0] == errors[1]


def test_only_coming_steps_are_kept() -> None:
    """Fails if the edges of a step that is over, or of another seed, stay in memory, or one that is to come is lost."""
    ready, none = ReadyEdges(), StepEdges(ids=np.zeros(0, np.int64), num_seeds=0)
    for seed, step in ((1, 3), (1, 4), (1, 5), (2, 4)):
        ready.put(seed, step, none)
    ready.forget(1, 4)
    assert sorted(ready._steps) == [(1, 4), (1, 5)]


def test_more_vertices_than_planned_are_refused() -> None:
    """Fails if numbers are written behind their room, or an id that another rank's damaged store gives is taken."""
    numbering = Numbering(50, 4)
    assert numbering.extend(np.array([7, 3]), np.array([3, 9, 7, 8], np.int32)).tolist() == [7, 3, 9, 8]
    columns = np.array([9, 9, 3], np.int32)
    assert numbering.extend(np.array([3]), columns).tolist() == [3, 9]
    assert columns.tolist() == [1, 1, 0]
    for targets, ids in (([7, 3], [1, 2, 4]), ([1, 2, 3, 4, 5], [])):
        with pytest.raises(PlanError, match="more than the 4 vertices"):
            numbering.extend(np.array(targets), np.array(ids, np.int32))
    with pytest.raises(GraphError, match=r"must lie in \[0, 50\), one is 50"):
        numbering.extend(np.array([7, 3]), np.array([50], np.int32))


def test_rows_without_a_bound_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a row of more edges than there is room for is cut, or drawn otherwise."""
    monkeypatch.setattr(drawn_rows, "ROWS_AT_ONCE", 2)
    adj_t, draws = graph("dense-row"), MODES["labor-one"]
    plan = row_slots(draws, adj_t.num_rows, places=True)
    hub = int(np.diff(adj_t.indptr.array()).argmax())
    assert np.diff(adj_t.indptr.array())[hub] > plan.capacities[0].edges
    ((_, drawn),) = RowDraws(Sampler(adj_t, draws), plan).pieces(1, np.array([hub]), SEED, STEP, None)
    row = adj_t.indices.array()[adj_t.indptr.array()[hub] :][: drawn.indices.size]
    assert drawn.indices.tolist() == row.tolist()
