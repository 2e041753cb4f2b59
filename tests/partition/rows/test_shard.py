"""What one rank holds: labels, masks, tiles and the refusals."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from mggcn.graph.csr import Graph
from mggcn.partition.order import assign
from mggcn.partition.rows.partition import RowPartition
from mggcn.partition.rows.shard import ShardOptions, build_shard, row_tiles
from tests.graphs import make_graph, pattern

OPTIONS = ShardOptions(aggregates=True, norm="symmetric", self_loops=True, dtype="f4", threads=1)

WHOLE = RowPartition(assign(29, 1, "none", 1))


def small(**changes: Any) -> Graph:
    graph = make_graph(pattern("directed", 29, 2), num_features=3, num_classes=4, seed=6)
    return dataclasses.replace(graph, **changes)


@pytest.mark.parametrize("order", ["random", "permute", "none"])
def test_every_vertex_keeps_its_row(order: str) -> None:
    """Fails if a row goes to another rank, or tiles are shared where they differ."""
    graph = small()
    for rank in range(3):
        owners = assign(29, 3, order, 4)
        shard = build_shard(graph, RowPartition(owners), rank, OPTIONS)
        ids = shard.global_ids
        assert np.array_equal(ids, owners.owned(rank))
        assert shard.rows == owners.counts[rank]
        tiles, tiles_t = row_tiles(graph, owners, rank, OPTIONS)
        assert len(tiles) == len(tiles_t) == 3
        assert tiles_t is not tiles
        assert shard.row_scale.dtype == np.float32  # type: ignore[union-attr]


def test_symmetric_graphs_share_tiles_and_models_without_a_graph_have_no_scales() -> None:
    """Fails if A is stored twice, or an MLP pays for degrees."""
    graph = make_graph(pattern("random", 20, 2), num_features=3, num_classes=2, seed=6)
    owners = assign(20, 2, "random", 4)
    shard = build_shard(graph, RowPartition(owners), 1, OPTIONS)
    tiles, tiles_t = row_tiles(graph, owners, 1, OPTIONS)
    assert tiles_t is tiles
    assert shard.col_scale is shard.row_scale
    assert build_shard(graph, RowPartition(owners), 1, dataclasses.replace(OPTIONS, norm="mean")).col_scale is None
    bare = build_shard(graph, RowPartition(owners), 1, dataclasses.replace(OPTIONS, aggregates=False))
    assert bare.row_scale is bare.col_scale is None
