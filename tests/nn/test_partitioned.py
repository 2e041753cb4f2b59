"""A rank's part: its rows of what the graph holds, and what ranks tell each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from mggcn.assemble.plan import STRATEGIES
from mggcn.comm.single import SingleCommunicator
from mggcn.errors import ConfigError, GraphError
from mggcn.graph.csr import ArrayRows, Graph
from mggcn.nn import PartitionedGraph
from mggcn.nn.sharing import Sharing, share
from tests.devices import WHERE, Where
from tests.graphs import make_graph, pattern
from tests.nn.test_aggregate import graph_of, on_ranks
from tests.reference import dense_features


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rows_are_those_of_the_vertices_that_are_held(where: Where, sparse: bool, strategy: str) -> None:
    """Fails if features, labels or splits belong to other vertices, or a vertex has no owner or two."""
    graph = make_graph(pattern("directed", 37, 4), num_features=7, num_classes=3, sparse=sparse, weighted=False, seed=8)
    ours = np.arange(37 * 2).reshape(37, 2)

    def body(part: PartitionedGraph) -> tuple[np.ndarray, ...]:
        assert (part.rank, part.num_ranks, part.num_vertices) == (part.rank, 3, 37)
        assert part.num_rows == part.ids.shape[0]
        assert part.features is part.features
        assert part.features.dtype == part.dtype == torch.float64
        found = (part.ids, part.owned, part.features, part.labels(), part.split("train"), part.take(ours))
        return tuple(t.cpu().numpy() for t in found)

    owners = np.zeros(37, int)
    for ids, owned, features, labels, train, taken in on_ranks(graph, 3, body, where, strategy=strategy):
        owners[ids[owned]] += 1
        assert np.array_equal(features, dense_features(graph)[ids])
        assert np.array_equal(labels, graph.labels.array()[ids])  # type: ignore[union-attr]
        assert np.array_equal(train, graph.splits["train"].array()[0][ids] & owned)
        assert np.array_equal(taken, ours[ids])
    assert (owners == 1).all()


def test_take_keeps_types_and_shapes() -> None:
    """Fails if values of a user's own change their type, or a tensor is read otherwise than an array."""
    graph = graph_of("random")
    for values in (np.arange(37, dtype=np.int32), np.arange(37) > 5, np.ones((37, 2, 3), np.float32), list(range(37))):
        (taken,) = on_ranks(graph, 1, lambda part: part.take(values))  # noqa: B023
        assert np.array_equal(taken.numpy(), np.asarray(values))
        assert taken.numpy().dtype == np.asarray(values).dtype
    (taken,) = on_ranks(graph, 1, lambda part: part.take(torch.arange(37.0)))
    assert torch.equal(taken, torch.arange(37.0))


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("strategy", ["broadcast", "delayed"])
def test_sums_counts_and_gathered_rows(where: Where, strategy: str) -> None:
    """Fails if copies are counted, a number is changed in place, or rows are gathered in another order."""
    graph = graph_of("hub-row")
    values = np.random.default_rng(4).normal(size=(37, 3))

    def body(part: PartitionedGraph) -> None:
        mine = part.take(values)
        before = mine.clone()
        assert torch.equal(part.gather(mine).cpu(), torch.from_numpy(values))
        assert part.count(torch.ones_like(part.owned)) == 37
        assert part.count(part.split("train")) == int(graph.splits["train"].array().sum())
        total = part.total((mine * part.owned[:, None]).sum(0))
        np.testing.assert_allclose(total.cpu().numpy(), values.sum(0), rtol=1e-12)
        assert part.total(part.rank + 1).item() == 6
        assert part.total(torch.tensor(0.5, requires_grad=True)).requires_grad is False
        assert torch.equal(mine, before)

    on_ranks(graph, 3, body, where, strategy=strategy)


@pytest.mark.parametrize("where", WHERE)
def test_gradients_are_summed_where_there_are_any(where: Where) -> None:
    """Fails if a gradient that only one rank has is lost, one that nobody has appears, or types are mixed."""

    def body(part: PartitionedGraph) -> list[Any]:
        module = torch.nn.ParameterDict(
            {
                "all": torch.ones(3, 2, dtype=torch.float64),
                "one": torch.ones(2),
                "none": torch.ones(4),
                "single": torch.ones((), dtype=torch.float32),
            }
        ).to(part.device)
        module["frozen"] = torch.nn.Parameter(torch.ones(2), requires_grad=False)
        module["all"].grad = torch.full((3, 2), part.rank + 1.0, dtype=torch.float64, device=part.device)
        module["single"].grad = torch.full((), 10.0**part.rank, device=part.device)
        if part.rank == 1:
            module["one"].grad = torch.tensor([3.0, 4.0], device=part.device)
        part.sum_gradients(module)
        return [None if p.grad is None else p.grad.tolist() for _, p in sorted(module.items())]

    for found in on_ranks(graph_of("random"), 3, body, where):
        assert found == [[[6.0, 6.0]] * 3, None, None, [3.0, 4.0], 111.0]


def test_weights_of_rank_0_are_shared() -> None:
    """Fails if ranks keep weights or statistics of their own."""

    def body(part: PartitionedGraph) -> dict[str, torch.Tensor]:
        module = torch.nn.BatchNorm1d(3)
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                tensor.fill_(5 + part.rank)
        part.share_weights(module)
        return module.state_dict()

    for state in on_ranks(graph_of("random"), 3, body):
        assert all((t == 5).all() for t in state.values())
        assert state["num_batches_tracked"].dtype == torch.int64


def test_graphs_without_labels_or_features_can_be_aggregated() -> None:
    """Fails if a module of one's own needs labels, splits or features that it does not use."""
    graph = dataclasses.replace(graph_of("random"), labels=None, features=None, splits={})
    assert (
        on_ranks(graph, 2, lambda part: part.num_rows) == [18, 19]
        or sum(on_ranks(graph, 2, lambda p: p.num_rows)) == 37
    )


def bare(**changes: Any) -> Graph:
    return dataclasses.replace(graph_of("random"), **changes)


@pytest.mark.parametrize(
    ("graph", "ask", "message"),
    [
        (bare(features=None), lambda p: p.features, "has no features"),
        (bare(labels=None), lambda p: p.labels(), "has no labels"),
        (bare(), lambda p: p.split("tset"), "no split 'tset'; it has train, val"),
        (bare(), lambda p: p.split("train", 1), "has numbers 0 to 0, got 1"),
        (bare(), lambda p: p.split("train", -1), "got -1"),
        (bare(), lambda p: p.take(np.ones(36)), r"each of 37 vertices, got shape \(36,\)"),
        (bare(), lambda p: p.take(3.0), r"got shape \(\)"),
    ],
)
def test_what_is_not_there_is_named(graph: Graph, ask: Callable[[PartitionedGraph], Any], message: str) -> None:
    """Fails if a missing part of a graph ends in an error of NumPy's, or in rows of something else."""
    with pytest.raises(GraphError, match=message):
        on_ranks(graph, 1, ask)


def test_variants_of_a_split() -> None:
    """Fails if another variant of a split is read than the one asked for."""
    rng = np.random.default_rng(3)
    masks = rng.random((4, 37)) < 0.5
    graph = bare(splits={"train": ArrayRows(masks)})
    (found,) = on_ranks(graph, 1, lambda part: part.split("train", 2))
    assert np.array_equal(found.numpy(), masks[2])


def test_a_graph_shared_for_other_ranks_is_refused() -> None:
    """Fails if a part is built for a rank that the partition does not know."""
    shared = share(graph_of("random"), Sharing(), 2)
    with pytest.raises(ConfigError, match="shared out to 2 ranks, but 1 are connected"):
        PartitionedGraph(shared, SingleCommunicator())
