"""Batches that ranks share: gradients are those of batches of their own, and every row is computed once."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Literal

import numpy as np
import pytest

import mggcn.feed.sampled as sampling
import mggcn.train.batches as loading
from mggcn.assemble.plan import plan_graph, plan_recorded, resolve
from mggcn.assemble.rank import Rank
from mggcn.backend.base import KernelBackend, Sparse
from mggcn.blocks.block import Capacity
from mggcn.blocks.shared import Part, Share
from mggcn.config import Config
from mggcn.feed.batch import Batch, BlockEdges
from mggcn.graph.csr import Graph
from mggcn.partition.rows.tiles import Tile
from mggcn.planning.batches import _typed_bytes
from mggcn.planning.record import to_dict
from mggcn.planning.shape import graph_shape
from mggcn.planning.text import render
from tests.devices import Where, everywhere
from tests.feed.test_blocks import MODELS, graph_of
from tests.feed.test_sampled import grads_of, sampled
from tests.graphs import make_graph, on_ranks, pattern
from tests.model.test_rgcn import typed_graph


def shared(config: Config) -> Config:
    return dataclasses.replace(config, run=dataclasses.replace(config.run, batches="cooperative"))


def first_step(config: Config, graph: Graph) -> tuple[float, dict[str, Any]]:
    return on_ranks(config, graph, lambda rank: (rank.trainer.gradients(0), grads_of(rank)))[0]


def compare(found: tuple[float, dict[str, Any]], expected: tuple[float, dict[str, Any]]) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-12)
    # A bias below a batch norm has a gradient of rounding alone.
    largest = max(np.abs(gradient).max() for gradient in expected[1].values())
    for key, gradient in expected[1].items():
        np.testing.assert_allclose(found[1][key], gradient, atol=1e-10 * largest, err_msg=key)


@pytest.mark.covering(1, rest="slow")
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_batches_of_their_own(name: str, ranks: int) -> None:
    """Fails if a row that another rank computes is lost, late or another one, or its gradient is."""
    config = sampled(ranks, MODELS[name])
    compare(first_step(shared(config), graph_of()), first_step(config, graph_of()))


@pytest.mark.full
@pytest.mark.parametrize(("where", "name"), everywhere(["gcn", "gat"]))
def test_gradients_on_every_device(where: Where, name: str) -> None:
    """Fails if what ranks exchange is not on their device in time."""
    config = sampled(2, MODELS[name])
    found = on_ranks(
        where.config(shared(config)),
        graph_of(),
        lambda rank: (rank.trainer.gradients(0), rank.trainer.runtime.weights.grads),
        device_of=where.device_of,
    )[0]
    gradients = {name: gradient.cpu().numpy() for name, gradient in found[1].items()}
    compare((found[0], gradients), first_step(config, graph_of()))


@pytest.mark.parametrize("hidden", [(6,), (6, 5)])
def test_relations(hidden: tuple[int, ...]) -> None:
    """Fails if a relation's weights miss the edges from other ranks' rows."""
    config = sampled(3, {"kind": "rgcn", "bases": 2, "hidden": hidden}, (3,) * (len(hidden) + 1), by_type=True)
    graph = typed_graph("random", 4)
    compare(first_step(shared(config), graph), first_step(config, graph))


def without_order(edges: BlockEdges) -> BlockEdges:
    """The edges as their relations leave them, both ways, for whoever loads them to sort."""
    remote, back = edges.remote, edges.transposed
    return dataclasses.replace(
        edges,
        relations=(),
        remote=None if remote is None else dataclasses.replace(remote, edges=without_order(remote.edges)),
        transposed=None if back is None else without_order(back),
    )


@pytest.mark.parametrize("hidden", [(6,), (6, 5)])
def test_the_threads_that_draw_sort_edges_by_relation(hidden: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a step sorts or transposes edges, or gets others, or in another order, than it would sort them into."""
    config = shared(sampled(3, {"kind": "rgcn", "bases": 2, "hidden": hidden}, (3,) * (len(hidden) + 1), by_type=True))
    graph, sorted_here = typed_graph("random", 4), list[int]()
    upload, part = loading.upload_tile, sampling.part_of

    def noted(backend: KernelBackend, tile: Tile, like: Sparse | None = None) -> Sparse:
        sorted_here.append(tile.indices.size)
        return upload(backend, tile, like)

    def unsorted(*arguments: Any) -> Batch:
        batch = part(*arguments)
        return dataclasses.replace(batch, edges={block: without_order(e) for block, e in batch.edges.items()})

    monkeypatch.setattr(loading, "upload_tile", noted)
    with monkeypatch.context() as once:
        once.setattr(loading, "transposed", None)
        found = first_step(config, graph)
    assert not any(sorted_here)
    monkeypatch.setattr(sampling, "part_of", unsorted)
    expected = first_step(config, graph)
    assert sum(sorted_here) > 0
    assert found[0] == expected[0]
    for name, gradient in expected[1].items():
        np.testing.assert_array_equal(found[1][name], gradient, err_msg=name)


def test_the_memory_of_relations_is_planned() -> None:
    """Fails if a part's edges by relation, a way or a hop, are not counted, or those of all ranks are."""
    graph = typed_graph("random", 4)
    rgcn = {"kind": "rgcn", "bases": 2, "hidden": (6,)}
    config = resolve(shared(sampled(3, rgcn, (3, 3), by_type=True, ahead=0)), graph)

    def body(rank: Rank) -> tuple[int, int]:
        feed: Any = rank.feed
        (place,) = feed._places
        parts = [
            array.nbytes for orders in place.parts.values() for order in orders for array in order._arrays.values()
        ]
        types = [2 * types.size for types in (*place.types, *place.types_t)]
        counts = [size.edges for size in feed.stack.together] * 2
        planned = _typed_bytes(config, graph_shape(graph, config), counts, place.share.plan)
        return sum(parts) + sum(types) + place.by_type.nbytes, planned

    for taken, planned in on_ranks(config, graph, body):
        assert taken == planned > 0


SETTINGS: dict[str, dict[str, Any]] = {
    "batch norm": {"kind": "sage", "aggregator": "mean", "norm_layer": "batch"},
    "batch norm of the input": {"kind": "gcn", "norm_layer": "batch", "dense_before": (5,)},
    "degrees of blocks": {"kind": "gcn", "self_loops": True},
    "dropout": {
        "kind": "gat",
        "heads": 2,
        "hidden": (8,),
        "dropout": 0.4,
        "attention_dropout": 0.3,
        "input_dropout": 0.2,
    },
    "three layers": {"kind": "gcn", "hidden": (6, 9), "self_loops": True},
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", SETTINGS)
def test_gradients_are_those_of_one_rank(name: str, ranks: int) -> None:
    """Fails if a batch norm counts a vertex twice, degrees are those of one rank's edges, or a mask depends on ranks."""
    model = SETTINGS[name]
    fanout = (3,) * (len(model.get("hidden", (6,))) + 1)
    how = {"weights": "block"} if name == "degrees of blocks" else {}
    alone = first_step(sampled(1, model, fanout, **how), graph_of())
    compare(first_step(shared(sampled(ranks, model, fanout, **how)), graph_of()), alone)


def test_with_batches_of_their_own_ranks_would_give_another_gradient() -> None:
    """The test above fails where a vertex counts once for each rank that drew it."""
    model = SETTINGS["batch norm"]
    with pytest.raises(AssertionError):
        compare(first_step(sampled(3, model), graph_of()), first_step(sampled(1, model), graph_of()))


def test_losses_of_twenty_steps_on_any_number_of_ranks() -> None:
    """Fails if a step keeps rows or numbers of the one before, or weights move otherwise."""
    graph = make_graph(pattern("directed", 200, 3), num_features=5, num_classes=3, seed=2)
    losses = []
    for ranks, ahead in ((1, 0), (2, 2), (3, 1), (4, 0)):
        config = sampled(ranks, {"kind": "gcn", "hidden": (6, 6), "dropout": 0.5}, (4, 3, 2), batch=24, ahead=ahead)
        config = shared(dataclasses.replace(config, train=dataclasses.replace(config.train, epochs=4)))
        losses.append(
            on_ranks(config, graph, lambda rank: (rank.feed.num_steps, [rank.trainer.step(e) for e in range(4)]))[0]
        )
    assert losses[0][0] >= 5
    for found in losses:
        np.testing.assert_allclose(found[1], losses[0][1], rtol=1e-12)


def parts(rank: Rank) -> Any:
    """Ids of the rows of every set in a step's part, and bytes and messages of the step beside those planned."""
    batch = next(rank.feed.epoch(7, 0))
    rows = {name.name: ids.copy() for name, ids in batch.rows.items()}
    rank.comm.bytes_sent = rank.comm.messages = 0
    rank.trainer.gradients(0)
    return rows, rank.comm.messages, rank.comm.bytes_sent, rank.plan, rank.feed.stack


@pytest.mark.parametrize("kind", ["gcn", "gat"])
def test_every_row_is_computed_once(kind: str) -> None:
    """Fails if two ranks compute a row or none does, or a step sends a message or a byte more than was planned."""
    model = {"kind": kind, "hidden": (8, 8)}
    alone = on_ranks(sampled(1, model, (3, 3, 3)), graph_of(), parts)[0][0]
    found = on_ranks(shared(sampled(3, model, (3, 3, 3))), graph_of(), parts)
    # The input's rows are gathered by all that read them, but where weights multiply them first, as in attention.
    inputs = "3 hops from the seeds"
    for name in alone.keys() - ({inputs} if kind == "gcn" else set()):
        together = np.concatenate([rows[name] for rows, *_ in found])
        np.testing.assert_array_equal(np.sort(together), np.sort(alone[name]))
    seeds = [rows["seeds"].size for rows, *_ in found]
    assert max(seeds) - min(seeds) <= 1
    for _, messages, sent, plan, stack in found:
        assert len(stack.exchanged) == (2 if kind == "gcn" else 3)
        assert messages == plan.messages(plan.train)
        assert 0 < sent <= plan.bytes_sent(plan.train)


def test_a_step_that_is_too_large_comes_in_halves_on_every_rank() -> None:
    """Fails if ranks disagree about a step's parts, or the parts' gradients are not those of the step."""
    config = shared(sampled(3, {"kind": "sage", "aggregator": "mean"}, batch=20))

    def body(rank: Rank) -> Any:
        feed: Any = rank.feed
        for place in feed._places:
            place.share.plan = dataclasses.replace(
                place.share.plan, capacities=tuple(map(cut, place.share.plan.capacities))
            )
        count = sum(1 for _ in feed.epoch(1, 0))
        return rank.trainer.gradients(0), grads_of(rank), count / feed.num_steps

    def cut(size: Capacity) -> Capacity:
        return dataclasses.replace(size, edges=size.edges // 2)

    whole, found = first_step(config, graph_of()), on_ranks(config, graph_of(), body)
    assert {count for *_, count in found} == {found[0][2]}
    assert found[0][2] > 1
    compare(found[0][:2], whole)


def test_extents_of_drawn_batches_are_planned() -> None:
    """Fails if extents are those of one rank, or a plan with them gives another gradient than bounds."""
    graph = make_graph(pattern("directed", 200, 3), num_features=5, num_classes=3, seed=2)
    found = {}
    for plan in ("bound", "run"):
        config = shared(sampled(3, {"kind": "gcn", "hidden": (6, 6)}, (4, 3, 2), batch=24, plan=plan))
        found[plan] = on_ranks(
            config, graph, lambda rank: (rank.trainer.gradients(0), grads_of(rank), rank.feed.stack)
        )[0]
    compare(found["run"][:2], found["bound"][:2])
    by_run, by_bound = found["run"][2], found["bound"][2]
    assert by_run.capacities[0].sources < by_bound.capacities[0].sources
    assert by_run.capacities[1].received <= by_bound.capacities[1].received
    assert by_run.overlap == by_bound.overlap > 1.1


@pytest.mark.parametrize("fault", ["another row is sent", "another rank's row is read"])
def test_a_planted_fault_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first test fails if a rank sends or reads other rows than the ones it should."""
    cut = Share.cut

    def wrong(self: Share, *arguments: Any) -> Part:
        part = cut(self, *arguments)
        if fault == "another row is sent":
            return part._replace(sent=part.sent[::-1].copy())
        part.indices[int(part.near[-1]) :] = part.indices[int(part.near[-1]) :][::-1].copy()
        return part

    monkeypatch.setattr(Share, "cut", wrong)
    with pytest.raises(AssertionError):
        test_gradients_are_those_of_batches_of_their_own("gcn-wide", 2)


@pytest.mark.parametrize("name", ["gcn", "sage", "gin"])
def test_a_first_layer_in_full(name: str) -> None:
    """Fails if A X, or X beside it, is of other rows than a rank's own."""
    config = sampled(3, MODELS[name] | {"hidden": (6, 6)}, (3, 3, 3), first="full")
    compare(first_step(shared(config), graph_of()), first_step(config, graph_of()))


@pytest.mark.parametrize("plan", ["bound", "run"])
def test_a_recorded_plan_is_the_same(plan: Literal["bound", "run"]) -> None:
    """Fails if a run that is resumed plans other blocks, or exchanges others, than the one that began."""
    config = resolve(shared(sampled(3, MODELS["gcn"], plan=plan)), graph_of())
    made, _ = plan_graph(config, graph_of())
    again = plan_recorded(config, json.loads(json.dumps(to_dict(made))))
    assert again.stack == made.stack
    assert [rank.total_bytes for rank in again.ranks] == [rank.total_bytes for rank in made.ranks]
    said = render(made)
    assert "ranks share a batch: every row is computed once" in said
    assert made.stack is not None
    assert f"ranks would have {made.stack.overlap:.2f} times as many" in said
