"""What bench/locality.py makes of a graph and of its figures; what it measures needs minutes."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.bench.conftest import BENCH  # noqa: F401  (puts bench/ on the path)
from tests.graphs import make_graph, pattern

import locality  # isort: skip


def test_relabelling_keeps_the_graph() -> None:
    """Fails if an edge is lost on the way, columns do not ascend, or the ids stay as they are."""
    graph = make_graph(pattern("random", 50, 3), num_features=2, num_classes=2, sparse=False, weighted=False, seed=1)
    other = locality.relabelled(graph)
    degrees = [np.diff(g.adj.indptr.array()) for g in (graph, other)]
    assert sorted(degrees[0]) == sorted(degrees[1])
    rows = [np.repeat(np.arange(50), degree) for degree in degrees]
    edges = [set(zip(r, g.adj.indices.array(), strict=True)) for r, g in zip(rows, (graph, other), strict=True)]
    assert edges[0] != edges[1]
    assert edges[1] == {(v, u) for u, v in edges[1]}
    ends = zip(rows[1][:-1], rows[1][1:], np.diff(other.adj.indices.array()), strict=True)
    assert all(step > 0 for a, b, step in ends if a == b)


def result() -> dict[str, Any]:
    clocks = {
        order: {"wall": [seconds], "cpu": [seconds / 2]} for order, seconds in (("random", 0.3), ("locality", 0.2))
    }
    both = {"random": 2.5, "locality": 1.25}
    return {
        "graph": "some",
        "vertices": 1000,
        "nonzeros": 8_000_000,
        "order": {"wall": [0.4], "cpu": [0.5]},
        "statistics": {"inside_share": 0.75, "gap": 10.0, "gap_before": 300.0},
        "spmm": clocks,
        "epoch": clocks,
        "predicted_sparse": both,
        "path": {"random": 1.0, "locality": 1.5},
        "halo": {"random": 3.0, "locality": 0.5},
    }


def test_the_report() -> None:
    """Fails if figures land in other columns, or a ratio is upside down."""
    text = locality.describe([result()], 128)
    assert "| some | 1,000 | 8,000,000 | 0.40 | 0.50 | 16.0 | 1.3 | 4.0 | 75% | 300 | 10 |" in text
    assert "| some | 300 | 200 | 1.50 | 1.50 | 2.00 | 300 | 200 | 1.50 | 1.50 |" in text
    assert "| some | 1.00 | 1.50 | 3.00 | 0.50 |" in text
    slower = result()
    slower["epoch"] = slower["epoch"] | {"locality": {"wall": [0.31], "cpu": [0.2]}}
    assert "| never |" in locality.describe([slower], 128)
