"""Steps that are larger than was planned: they come in parts, whose gradient is that of the whole step."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np
import pytest

from mggcn import load
from mggcn.assemble import stack as stacks
from mggcn.assemble.plan import plan_graph
from mggcn.assemble.rank import Rank
from mggcn.blocks.block import Capacity, Stack
from mggcn.blocks.capacities import hops_of
from mggcn.config import Config
from mggcn.errors import ConfigError, DivergedError, PlanError
from mggcn.feed.seeds import Seeds
from mggcn.graph.csr import Graph
from mggcn.planning.batches import stack_of
from mggcn.planning.shape import graph_shape
from tests.feed.test_blocks import MODELS, graph_of
from tests.feed.test_sampled import sampled
from tests.graphs import make_graph, on_ranks, pattern

EPOCHS = 2
NORMED = {"norm_layer": "batch"}
SEED = 8123  # of config_of


def planned(monkeypatch: pytest.MonkeyPatch, seeds: int, share: float) -> None:
    """Have steps planned for so many seeds, and a share of the rows and edges that they can have."""

    def smaller(config: Config, graph: Graph, shape: Any, owner: Any) -> Stack:
        found = list[Capacity]()
        targets = seeds
        bound = stacks.stack_for(config, graph, shape, owner)
        assert bound is not None
        for size in reversed(bound.capacities):
            sources = max(int(size.sources * share), targets)
            found.append(Capacity(targets, sources, int(size.edges * share)))
            targets = sources
        return hops_of(found)

    monkeypatch.setattr("mggcn.assemble.plan.stack_for", smaller)


def steps_of(rank: Rank) -> dict[str, Any]:
    """Losses, gradients and the number of parts of every step of two epochs."""
    found: dict[str, Any] = {"losses": [], "grads": [], "parts": []}
    for epoch in range(EPOCHS):
        ends = np.flatnonzero([batch.last for batch in rank.feed.epoch(SEED, epoch)])
        found["parts"].append(np.diff(ends, prepend=-1).tolist())
    for epoch in range(EPOCHS):
        found["losses"].append(rank.trainer.gradients(epoch))
        found["grads"].append({n: g.numpy().copy() for n, g in rank.trainer.runtime.weights.grads.items()})
    return found


def compare(monkeypatch: pytest.MonkeyPatch, config: Config, graph: Graph, seeds: int, share: float) -> list[Any]:
    """Compare whole steps with those in parts; return the numbers of parts on each rank."""
    (whole, *_) = on_ranks(config, graph, steps_of)
    assert all(parts == 1 for epoch in whole["parts"] for parts in epoch)
    with monkeypatch.context() as patched:
        planned(patched, seeds, share)
        found = on_ranks(config, graph, steps_of)
    for rank in found:
        np.testing.assert_allclose(rank["losses"], whole["losses"], rtol=1e-12)
        for mine, other in zip(rank["grads"], whole["grads"], strict=True):
            for name, gradient in other.items():
                atol = 1e-10 * (np.abs(gradient).max() or 1)
                np.testing.assert_allclose(mine[name], gradient, atol=atol, err_msg=name)
    return [rank["parts"] for rank in found]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_parts_of_a_step_add_up_to_it(name: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the gradient or loss of a part is lost, counted twice or scaled by its own seeds, or a draw or a dropout
    mask depends on the part.
    """
    dropped = {} if MODELS[name].get("jumping") else {"dropout": 0.4, "input_dropout": 0.2}
    config = sampled(ranks, MODELS[name] | dropped)
    counts = compare(monkeypatch, config, graph_of(), 14, 0.5)
    assert max(max(epoch) for epoch in counts[0]) > 1


@pytest.mark.parametrize("draw", ["replace", "labor", "labor-one", "weight"])
def test_parts_of_every_draw(draw: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if what an edge counts, or which ones are drawn, depends on the other seeds of a part."""
    graph = make_graph(pattern("directed", 61, 5), num_features=7, num_classes=4, weighted=True, seed=4)
    config = sampled(2, {"kind": "gcn", "self_loops": True, "dropout": 0.3}, draw=draw)
    counts = compare(monkeypatch, config, graph, 14, 0.3 if "labor" in draw else 0.15)
    assert max(max(epoch) for epoch in counts[0]) > 1


def test_ranks_have_other_numbers_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a rank waits for a part that another does not have."""
    n = 61
    adj = np.zeros((n, n), np.float32)
    adj[:, ::2] = pattern("directed", n, 5)[:, ::2]  # half of the vertices have no in-edges
    graph = make_graph(adj, num_features=7, num_classes=4, seed=4)
    counts = compare(monkeypatch, sampled(2, MODELS["sage"] | {"dropout": 0.4}), graph, 14, 0.3)
    assert counts[0] != counts[1]


def test_a_seed_that_is_too_large_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a step is cut without end, or the refusal does not name the vertex and what to change."""
    planned(monkeypatch, 14, 0.0)
    with pytest.raises(PlanError, match=r"the neighbourhood of vertex \d+ alone is larger .*; set smaller fan-outs or"):
        on_ranks(sampled(1, MODELS["gcn"]), graph_of(), lambda rank: rank.trainer.step(0))


@pytest.mark.parametrize("ranks", [1, 2])
def test_sums_over_ranks_are_of_whole_steps(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a feed gives a batch norm a step in parts, and statistics of one part alone, or a rank waits for the parts
    of another.
    """
    planned(monkeypatch, 14, 0.5)
    config = sampled(ranks, {"kind": "gcn", "norm_layer": "batch"})
    with pytest.raises(PlanError, match="came in parts, and the model needs the whole step at once"):
        on_ranks(config, graph_of(), lambda rank: rank.trainer.step(0))


@pytest.mark.parametrize("batches", ["independent", "cooperative"])
@pytest.mark.parametrize("plan", ["bound", "run"])
def test_several_own_edges_are_planned(plan: str, batches: str) -> None:
    """Fails if the own edges of a vertex, of several types, are planned as one: a batch norm then sees halves, and the
    neighbourhood of a single vertex has no room.
    """
    n, loops = 24, np.tile(np.arange(24), 3)
    edges = np.hstack([np.stack([loops, loops]), np.argwhere(~np.eye(n, dtype=bool)).T])
    types = np.append(np.repeat(np.arange(3), n), np.zeros(n * (n - 1), int))
    x, train = np.random.default_rng(3).normal(size=(n, 7)).astype(np.float32), {"train": np.arange(n)}
    graph = load(edges, edge_types=types, features=x, labels=np.arange(n) % 4, splits=train)
    normed = NORMED if plan == "bound" else {}
    for batch in (2, 12, n):
        config = sampled(2, {"kind": "gcn", "self_loops": True} | normed, (1, 1), batch=batch, plan=plan)
        config = dataclasses.replace(config, run=dataclasses.replace(config.run, batches=batches))  # type: ignore[arg-type]  # of the settings above
        for found in on_ranks(config, graph, steps_of):
            assert all(parts == 1 for epoch in found["parts"] for parts in epoch)


@pytest.mark.parametrize("setting", ["norm_layer", "weights"])
def test_what_reads_the_whole_batch_is_never_cut(setting: str) -> None:
    """Fails if a batch norm, or degrees of what was drawn, may see a part of a step alone."""
    model = {"norm_layer": "batch"} if setting == "norm_layer" else {}
    sample: dict[str, Any] = {"weights": "block"} if setting == "weights" else {}
    with pytest.raises(ConfigError, match="may cut a step into halves"):
        sampled(1, {"kind": "gcn"} | model, plan="run", **sample)


def test_a_single_vertex_always_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a plan by drawn batches leaves no room for a vertex that none of these had: it would end a run."""
    n = 97
    adj = np.zeros((n, n), np.float32)
    adj[0, 1:20] = adj[1:20, 20:60] = 1  # only vertex 0 has neighbours, and these have some
    graph = make_graph(adj.T, num_features=7, num_classes=4, seed=4)
    monkeypatch.setattr(stacks, "DRAWN", 1)
    monkeypatch.setattr("mggcn.feed.seeds.Seeds.of_rank", lambda self, together, rank: np.array([90, 91]))
    config = sampled(1, MODELS["gcn"], (9, 4), batch=2, plan="run")
    found = stacks.stack_for(config, graph, graph_shape(graph, config), np.zeros(n, np.uint16))
    assert found is not None
    assert [size.edges for size in reversed(found.capacities)] == [9, 40]


@pytest.mark.parametrize(
    ("device", "setting", "drawn"), [("cpu", {}, False), ("cuda", {}, True), ("cuda", NORMED, False)]
)
def test_a_gpu_is_not_filled_up_to_bounds(device: Literal["cpu", "cuda"], setting: dict[str, Any], drawn: bool) -> None:
    """Fails if a GPU computes and is sent what no batch has, or a step that must not be cut may be."""
    graph = make_graph(pattern("directed", 3000, 4), num_features=90, num_classes=4, seed=4)
    config = sampled(1, MODELS["gcn"] | setting, (15, 10), batch=200)
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, device=device, precision="fp32"))
    found = stacks.stack_for(config, graph, graph_shape(graph, config), np.zeros(3000, np.uint16))
    assert found is not None
    bound = stack_of(config, graph_shape(graph, config))
    assert bound is not None
    assert (found.capacities != bound.capacities) == drawn


def test_batches_that_are_alike_are_drawn_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a plan draws on where batches are alike, or stops where they are not, or before each rank had one."""
    n, of_rank = 400, Seeds.of_rank
    some, none = np.zeros((n, n), np.float32), np.zeros((n, n), np.float32)
    some[::2, 1:40:2] = 1  # half of the vertices have no edges
    for adj, ranks, most in ((none, 1, stacks.ENOUGH), (none, 12, 12), (some, 1, stacks.DRAWN)):
        graph = make_graph(adj.T, num_features=7, num_classes=4, seed=4)
        config, steps = sampled(ranks, MODELS["gcn"], (5, 5), batch=12, plan="run"), list[int]()

        def counted(seeds: Seeds, step: Any, rank: int, steps: list[int] = steps) -> Any:
            steps.append(rank)
            return of_rank(seeds, step, rank)

        monkeypatch.setattr(Seeds, "of_rank", counted)
        stacks.stack_for(config, graph, graph_shape(graph, config), np.arange(n, dtype=np.uint16) % ranks)
        assert len(steps) == most


@pytest.mark.parametrize("ranks", [1, 2])
def test_batches_are_on_average_as_planned(ranks: int) -> None:
    """Fails if rows or edges of 100 batches are off by more than 10 % from those that a plan says."""
    config, graph = sampled(ranks, MODELS["sage"], (4, 3), plan="run"), graph_of()
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, epochs=100))

    def body(rank: Rank) -> Any:
        number = range(100 // rank.feed.num_steps + 1)
        batches = (batch for epoch in number for batch in rank.feed.epoch(SEED, epoch))
        found = [[(b.rows[k.sources].size, b.edges[k].indices.size) for k in stack.blocks] for b in batches]
        return np.mean(found, 0)

    plan, _ = plan_graph(config, graph)
    assert plan.stack is not None
    stack = plan.stack
    for found in on_ranks(config, graph, body):
        np.testing.assert_allclose(found, stack.mean, rtol=0.1)


def test_what_is_not_finite_is_found_in_any_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if only the last part of a step is searched for where a loss became infinite."""
    graph = graph_of()
    features = graph.features.array()  # type: ignore[union-attr]  # dense ones, in memory
    planned(monkeypatch, 14, 0.5)

    def body(rank: Rank) -> str:
        parts, epoch = list[Any](), rank.feed.epoch(SEED, 0)
        while not parts or not parts[-1][0]:
            batch = next(epoch)
            parts.append((batch.last, {name.name: ids.copy() for name, ids in batch.rows.items()}))
        (_, first), (_, last) = parts[0], parts[-1]
        assert len(parts) > 1
        alone = np.setdiff1d(first["seeds"], last["2 hops from the seeds"])
        features[alone[0]] = np.inf
        with pytest.raises(DivergedError) as caught:
            rank.trainer.step(0)
        return str(caught.value)

    (said,) = on_ranks(sampled(1, MODELS["sage"]), graph, body)
    assert "it began in layer 1" in said
