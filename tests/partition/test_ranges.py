"""Ranges of consecutive vertices: where they are cut, against a search over all places, and what kernels make of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mggcn.errors import GraphError
from mggcn.graph.csr import ArrayRows
from mggcn.graph.generate import community
from mggcn.partition.locality.reuse import estimate_reuse
from mggcn.partition.order import Assignment, Owners, Ranges
from mggcn.partition.ranges import RELABELLED, range_bounds
from mggcn.partition.rows.halo import build_halos
from mggcn.partition.rows.required import count_required
from mggcn.partition.rows.shard import ShardOptions
from mggcn.partition.rows.tiles import RowColumnMask, Tile, build_tiles, degrees
from mggcn.partition.statistics import tile_statistics
from tests.partition.cut.test_libra import KINDS, dense_of, graph_of


def in_arrays(ranges: Ranges) -> Assignment:
    """The same in arrays, vertex by vertex."""
    counts = ranges.counts
    owner = np.concatenate([np.full(count, rank, np.uint16) for rank, count in enumerate(counts)])
    return Assignment(owner, np.concatenate([np.arange(count, dtype=np.int32) for count in counts]), counts)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 16])
def test_bounds_are_the_best_of_all_places(ranks: int) -> None:
    """Fails if a measure is left out or weighs wrong, or a better place lies outside of those that are compared."""
    graph = community(700, 4000, 2, 3, seed=4)
    train = np.arange(700)[np.newaxis] < 500
    for splits in (graph.splits, {"train": ArrayRows(train), "val": ArrayRows(~train)}, {}):
        given = replace(graph, splits=splits)
        weights = [np.ones(700), np.diff(graph.adj.indptr.array()) + 1]
        weights += [rows.array()[0] for rows in splits.values()]
        sums = np.array([np.append(0, np.cumsum(weight)) / weight.sum() for weight in weights])
        apart = [np.abs(sums - rank / ranks) for rank in range(1, ranks)]
        worst = [one.max(0) + 0.01 * one.mean(0) for one in apart]
        assert range_bounds(given, ranks).tolist() == [0, *(int(found.argmin()) for found in worst), 700]


def test_kept_bounds_are_those_of_their_parts() -> None:
    """Fails if the parts of a relabelled graph are cut anew, those of other numbers are not, or wrong ones get through."""
    graph = community(300, 1500, 2, 3, seed=4)
    kept = replace(graph, meta={RELABELLED: {"bounds": [0, 7, 300]}})
    assert range_bounds(kept, 2).tolist() == [0, 7, 300]
    assert range_bounds(kept, 3).tolist() == range_bounds(graph, 3).tolist()
    wrong: list[Any] = [
        [0, 7, 299],
        [1, 7, 300],
        [0, 301, 300],
        [0, -1, 300],
        [0, 7.0, 300],
        [0, "7", 300],
        [0, True, 300],
    ]
    for bounds in wrong:
        with pytest.raises(GraphError, match="relabel it again"):
            range_bounds(replace(graph, meta={RELABELLED: {"bounds": bounds}}), 2)
    for other in (None, 3, {"bounds": "no"}, {}):
        assert range_bounds(replace(graph, meta={RELABELLED: other}), 2).tolist() == range_bounds(graph, 2).tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bounds", [[0.0, 1.0], [0.0, 0.3, 1.0], [0.0, 0.0, 0.5, 0.5, 0.9, 1.0]])
def test_kernels_find_the_rank_of_a_vertex(kind: str, bounds: list[float]) -> None:
    """Fails if a kernel that is told bounds takes a vertex for another rank's, or for another row, than with arrays."""
    graph = graph_of(dense_of(kind))
    ranges = Ranges((np.array(bounds) * graph.num_vertices).astype(np.int64))
    arrays = in_arrays(ranges)
    required = np.arange(graph.num_vertices) % 3 == 0
    options = ShardOptions(aggregates=True, norm="mean", self_loops=True, dtype="f8", threads=2)

    def found(owners: Owners, rank: int) -> list[Any]:
        common = {"self_loops": True, "threads": 2}
        tiles = build_tiles(graph.adj_t, owners, rank, dtype="f8", only=RowColumnMask(rows=required), **common)  # type: ignore[arg-type]  # of a dict of both
        parts = [
            *tiles,
            *(tile for halo in build_halos(graph, owners, rank, options) for tile in (halo.own, halo.halo)),
        ]
        return [degrees(graph.adj_t, owners, rank, **common), *(array for tile in parts for array in _arrays(tile))]  # type: ignore[arg-type]  # as above

    for rank in range(ranges.num_ranks):
        for got, expected in zip(found(ranges, rank), found(arrays, rank), strict=True):
            assert np.array_equal(got, expected)
    for one, other in (
        (tile_statistics(graph, ranges, self_loops=True), tile_statistics(graph, arrays, self_loops=True)),
        (
            count_required(graph, ranges, required, self_loops=True, threads=2),
            count_required(graph, arrays, required, self_loops=True, threads=2),
        ),
        (estimate_reuse(graph, ranges, 2), estimate_reuse(graph, arrays, 2)),
    ):
        assert one.to_dict() == other.to_dict()


def _arrays(tile: Tile) -> list[Any]:
    return [array for array in (tile.indptr, tile.indices, tile.values) if array is not None]
