from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mggcn.api.load import load_source
from mggcn.config import DataConfig
from mggcn.errors import GraphError
from mggcn.feed import labels as labels_module
from mggcn.feed.labels import RowLabels, read_labels
from mggcn.graph.csr import ArrayRows, Graph
from mggcn.partition.order import assign
from tests.graphs import make_graph, pattern


def small(**changes: Any) -> Graph:
    graph = make_graph(pattern("directed", 29, 2), num_features=3, num_classes=4, sparse=False, weighted=False, seed=6)
    return dataclasses.replace(graph, **changes)


def whole(graph: Graph, **data: Any) -> RowLabels:
    """Labels of all vertices on one rank."""
    return read_labels(graph, assign(graph.num_vertices, 1, "none", 1), 0, None, DataConfig(**data), "f4")


@pytest.mark.parametrize("order", ["random", "permute", "none"])
def test_every_vertex_keeps_its_label_and_splits(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if labels or masks go to another row, also across ranges of reading, or sizes are not global."""
    monkeypatch.setattr(labels_module, "ROWS", 7)
    graph = small()
    train, val = (graph.splits[s].array()[0] for s in ("train", "val"))
    for rank in range(3):
        owners = assign(29, 3, order, 4)
        ids = owners.owned(rank)
        rows = read_labels(graph, owners, rank, None, DataConfig(), "f4")
        assert np.array_equal(rows.labels, graph.labels.array()[ids])  # type: ignore[union-attr]
        assert np.array_equal(rows.mask, train[ids] + 2 * val[ids])
        assert rows.sizes == (train.sum(), val.sum(), 0)
        copies = read_labels(graph, owners, rank, np.zeros(ids.shape[0], bool), DataConfig(), "f4")
        assert not copies.mask.any()


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
            whole(small(**changes), **options)


def test_unlabelled_vertices_outside_the_splits_are_welcome() -> None:
    """Fails if -1 outside every split is refused."""
    labels = np.full(29, -1)
    labels[:5] = 1
    splits = {"train": ArrayRows((np.arange(29) < 5)[None])}
    assert whole(small(labels=ArrayRows(labels), splits=splits)).labels.tolist() == labels.tolist()


def test_second_family_of_splits(data_root: Path) -> None:
    """Fails if alt splits of a real store are not found, or the chosen index is ignored."""
    graph = load_source(data_root / "cora")
    masks = []
    for splits, split in (("main", 0), ("alt", 0), ("alt", 3)):
        rows = whole(graph, splits=splits, split=split)
        name = "train" if splits == "main" else "alt_train"
        assert np.array_equal(rows.mask & 1, graph.splits[name].array()[split])
        masks.append(rows.mask)
    assert masks[0].astype(bool).sum() == 140 + 500 + 1000
    assert not np.array_equal(masks[1], masks[2])
