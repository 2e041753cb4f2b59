from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mggcn.errors import GraphError
from mggcn.graph.check import check_graph, index_mask
from mggcn.graph.csr import ArrayRows, Graph
from tests.graph.small import csr, small_graph


def mask(*ids: int) -> ArrayRows:
    return ArrayRows(np.isin(np.arange(5), ids)[np.newaxis])


def dressed(**changes: Any) -> Graph:
    return replace(small_graph(), **changes)


def split(**masks: ArrayRows) -> Graph:
    return dressed(splits=masks)


FEATURES = np.zeros((5, 2), np.float32)
ONE_EDGE, REVERSE = csr([0, 1, 1], [1], 2), csr([0, 0, 1], [0], 2)
BROKEN: dict[str, tuple[Graph, str]] = {
    "no vertices": (
        Graph(
            name="empty",
            adj=csr([0], [], 0),
            adj_t=csr([0], [], 0),
            features=None,
            labels=None,
            splits={},
            num_classes=0,
        ),
        "1 to 2147483647 vertices",
    ),
    "not square": (dressed(adj=csr([0, 0], [], 2)), "1 rows and 2 columns"),
    "not symmetric": (
        Graph(name="g", adj=ONE_EDGE, adj_t=ONE_EDGE, features=None, labels=None, splits={}, num_classes=0),
        "counts as symmetric",
    ),
    "wrong transpose": (
        Graph(
            name="g", adj=ONE_EDGE, adj_t=csr([0, 1, 1], [1], 2), features=None, labels=None, splits={}, num_classes=0
        ),
        "not the transpose",
    ),
    "unsorted columns": (
        dressed(adj=csr([0, 2, 2], [1, 0], 2), adj_t=csr([0, 1, 2], [0, 0], 2)),
        r"columns of row 0 are not strictly ascending; .*\(sum_duplicates\(\) of a SciPy matrix does both\), then prepare",
    ),
    "float64 features": (dressed(features=ArrayRows(FEATURES.astype(np.float64))), "must be float32"),
    "no columns": (dressed(features=ArrayRows(FEATURES[:, :0])), "D > 0"),
    "short features": (dressed(features=ArrayRows(FEATURES[:4])), "one row for each of 5"),
    "short sparse features": (dressed(features=csr([0, 0, 0], [], 3)), "one row for each of 5"),
    "NaN features": (dressed(features=ArrayRows(FEATURES + np.nan)), r"entry \(0, 0\) is NaN"),
    "short labels": (dressed(labels=ArrayRows(np.zeros(4, np.int64))), "one row for each of 5"),
    "narrow labels": (dressed(labels=ArrayRows(np.zeros(5, np.int32))), "int64"),
    "label too large": (dressed(labels=ArrayRows(np.array([0, 0, 3, 0, 0]))), "vertex 2 has 3"),
    "label too small": (
        dressed(labels=ArrayRows(np.array([0, 0, 0, 0, -2]))),
        r"vertex 4 has -2; renumber .*task='numbers'",
    ),
    "odd split name": (split(dev=mask(1)), "train, val or test"),
    "split path": (split(**{"../train": mask(1)}), "train, val or test"),
    "one-dimensional split": (split(train=ArrayRows(np.ones(5, bool))), r"bool of shape \[S, 5\]"),
    "integer split": (split(train=ArrayRows(np.ones((1, 5), np.int8))), r"bool of shape \[S, 5\]"),
    "uneven family": (split(train=mask(1), val=ArrayRows(np.zeros((2, 5), bool))), "equally many"),
    "empty train": (split(train=mask()), "expected train vertices"),
    "unlabelled train": (split(alt_train=mask(0, 4)), "alt_.*split 0: 1 train vertices have no label"),
    "train in test": (split(train=mask(0, 1), test=mask(1, 2)), "both in train and in test, the first is 1"),
    "train in val": (split(train=mask(0, 1), val=mask(0)), "both in train and in val"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_check_graph_refuses(case: str) -> None:
    graph, message = BROKEN[case]
    with pytest.raises(GraphError, match=message):
        check_graph(graph)


def test_check_graph_accepts_what_is_odd_but_legal() -> None:
    """A directed graph, masks without labels, overlapping families, unlabelled test vertices."""
    check_graph(Graph(name="g", adj=ONE_EDGE, adj_t=REVERSE, features=None, labels=None, splits={}, num_classes=0))
    check_graph(dressed(labels=None, num_classes=0, splits={"train": mask()}))
    check_graph(split(train=mask(0), alt_train=mask(1), alt_test=mask(0)))
    check_graph(split(train=mask(0), test=mask(3, 4)))


def test_index_mask() -> None:
    np.testing.assert_array_equal(index_mask(np.array([3, 0]), 4, "ids"), [True, False, False, True])
    for ids, message in [([4], "vertex ids"), ([-1], "vertex ids"), ([0, 1, 0], "1 vertex ids repeat")]:
        with pytest.raises(GraphError, match=message):
            index_mask(np.array(ids), 4, "ids")
