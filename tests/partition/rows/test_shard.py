"""What one rank holds: labels, masks, tiles and the refusals."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mggcn.errors import GraphError
from mggcn.graph.csr import ArrayRows, Graph
from mggcn.graph.sources import load_source
from mggcn.partition.order import assign
from mggcn.partition.rows import shard as shard_module
from mggcn.partition.rows.partition import RowPartition
from mggcn.partition.rows.shard import ShardOptions, build_shard, row_tiles
from tests.graphs import make_graph, pattern

OPTIONS = ShardOptions(
    aggregates=True, norm="symmetric", self_loops=True, splits="main", split=0, dtype="f4", threads=1
)

WHOLE = RowPartition(assign(29, 1, "none", 1))


def small(**changes: Any) -> Graph:
    graph = make_graph(pattern("directed", 29, 2), num_features=3, num_classes=4, sparse=False, weighted=False, seed=6)
    return dataclasses.replace(graph, **changes)


@pytest.mark.parametrize("order", ["random", "permute", "none"])
def test_every_vertex_keeps_its_label_and_splits(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if labels or masks go to another row, also across ranges of reading, or sizes are not global."""
    monkeypatch.setattr(shard_module, "ROWS", 7)
    graph = small()
    train, val = (graph.splits[s].array()[0] for s in ("train", "val"))
    for rank in range(3):
        owners = assign(29, 3, order, 4)
        shard = build_shard(graph, RowPartition(owners), rank, OPTIONS)
        ids = shard.global_ids
        assert np.array_equal(ids, owners.owned(rank))
        assert np.array_equal(shard.labels, graph.labels.array()[ids])  # type: ignore[union-attr]
        assert np.array_equal(shard.mask, train[ids] + 2 * val[ids])
        assert shard.split_sizes == (train.sum(), val.sum(), 0)
        assert shard.rows == owners.counts[rank]
        tiles, tiles_t = row_tiles(graph, owners, rank, OPTIONS)
        assert len(tiles) == len(tiles_t) == 3
        assert tiles_t is not tiles
        assert shard.row_scale.dtype == np.float32  # type: ignore[union-attr]


def test_symmetric_graphs_share_tiles_and_models_without_a_graph_have_no_scales() -> None:
    """Fails if A is stored twice, or an MLP pays for degrees."""
    graph = make_graph(pattern("random", 20, 2), num_features=3, num_classes=2, sparse=False, weighted=False, seed=6)
    owners = assign(20, 2, "random", 4)
    shard = build_shard(graph, RowPartition(owners), 1, OPTIONS)
    tiles, tiles_t = row_tiles(graph, owners, 1, OPTIONS)
    assert tiles_t is tiles
    assert shard.col_scale is shard.row_scale
    assert build_shard(graph, RowPartition(owners), 1, dataclasses.replace(OPTIONS, norm="mean")).col_scale is None
    bare = build_shard(graph, RowPartition(owners), 1, dataclasses.replace(OPTIONS, aggregates=False))
    assert bare.row_scale is bare.col_scale is None


def test_wrong_graphs_are_refused() -> None:
    """Fails if training could start without labels, a train split, or with labels that are no class."""
    none = np.zeros((1, 29), bool)
    train = np.arange(29) < 20
    wrong: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"labels": None}, {}, "no labels"),
        ({"splits": {}}, {}, "no split 'train'; it has no splits at all"),
        ({"splits": {"train": ArrayRows(none)}}, {}, "no training vertices"),
        ({"splits": {"train": ArrayRows(train[None])}, "labels": ArrayRows(np.full(29, -1))}, {}, "needs a label"),
        ({"splits": {"train": ArrayRows(train[None])}, "labels": ArrayRows(np.full(29, 4))}, {}, r"0 \.\. 3"),
        ({}, {"split": 1}, "data.split must be below 1"),
        ({}, {"splits": "alt"}, "no split 'alt_train'; it has train, val"),
    ]
    for changes, options, message in wrong:
        with pytest.raises(GraphError, match=message):
            build_shard(
                small(**changes), RowPartition(assign(29, 1, "none", 1)), 0, dataclasses.replace(OPTIONS, **options)
            )


def test_unlabelled_vertices_outside_the_splits_are_welcome() -> None:
    """Fails if -1 outside every split is refused."""
    labels = np.full(29, -1)
    labels[:5] = 1
    splits = {"train": ArrayRows((np.arange(29) < 5)[None])}
    shard = build_shard(
        small(labels=ArrayRows(labels), splits=splits), RowPartition(assign(29, 1, "none", 1)), 0, OPTIONS
    )
    assert shard.labels.tolist() == labels.tolist()


def test_second_family_of_splits(data_root: Path) -> None:
    """Fails if alt splits of a real store are not found, or the chosen index is ignored."""
    graph = load_source(data_root / "cora")
    owners = assign(graph.num_vertices, 1, "none", 1)
    masks = []
    for splits, split in (("main", 0), ("alt", 0), ("alt", 3)):
        options = dataclasses.replace(OPTIONS, aggregates=False, splits=splits, split=split)
        shard = build_shard(graph, RowPartition(owners), 0, options)
        name = "train" if splits == "main" else "alt_train"
        assert np.array_equal(shard.mask & 1, graph.splits[name].array()[split])
        masks.append(shard.mask)
    assert masks[0].astype(bool).sum() == 140 + 500 + 1000
    assert not np.array_equal(masks[1], masks[2])
