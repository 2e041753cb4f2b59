"""Scales of some vertices at a time have the bits of those of all, whatever was asked before."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from mggcn.errors import GraphError
from mggcn.feed.norm_scales import NormScales
from mggcn.graph.csr import CSR, ArrayRows, Graph
from mggcn.partition.order import Assignment
from mggcn.partition.rows.tiles import degrees, scales
from tests.graphs import make_graph, pattern

N = 47
KINDS = ["empty", "path", "star", "hub-row", "disconnected", "directed", "weighted"]


def graph_of(kind: str) -> Graph:
    return make_graph(pattern(kind, N, 9), num_features=2, num_classes=2, weighted=kind == "weighted", seed=1)


def expected(graph: Graph, norm: str, loops: bool, real: Any) -> tuple[Any, Any]:
    whole = Assignment(np.zeros(N, np.uint16), np.arange(N, dtype=np.int32), (N,))
    row, col = scales(degrees(graph.adj_t, whole, 0, self_loops=loops, threads=1), norm)
    return row.astype(real), None if col is None else col.astype(real)


@pytest.mark.parametrize("kind", KINDS)
def test_scales_are_those_of_the_whole_graph(kind: str) -> None:
    """Fails if a degree lacks a weight or a self-loop, rounds otherwise, or one that was kept is another vertex's."""
    graph, rng = graph_of(kind), np.random.default_rng(3)
    for norm, loops, real in itertools.product(("mean", "symmetric"), (False, True), (np.float32, np.float64)):
        wanted, found = expected(graph, norm, loops, real), NormScales(graph.adj_t, norm, self_loops=loops, real=real)
        for count in (0, 1, 20, 60, N):
            ids, out = rng.integers(0, N, count), np.full(70, 7.0, real)
            for row, col in (found.of(ids), found.of(ids, out)):
                assert row is not None
                assert row.dtype == real
                np.testing.assert_array_equal(row, wanted[0][ids])
                assert (col is None) == (norm == "mean")
                assert col is None or np.array_equal(col, wanted[1][ids])
            assert (out[count:] == 7).all()


def test_no_norm_has_no_scales() -> None:
    """Fails if sums without a norm are scaled."""
    assert NormScales(graph_of("star").adj_t, "none", self_loops=True, real=np.float32).of(np.arange(3)) == (None, None)


def test_bad_degrees_are_refused() -> None:
    """Fails if a negative degree becomes a scale, or a damaged row pointer is followed."""
    graph = graph_of("weighted")
    assert graph.adj_t.values is not None
    negative = dataclasses.replace(graph.adj_t, values=ArrayRows(-graph.adj_t.values.array()))
    with pytest.raises(GraphError, match=r"in-degrees must be 0 or more, that of vertex \d+ is less"):
        NormScales(negative, "mean", self_loops=False, real=np.float32).of(np.arange(N))
    for pointers in (np.full(N + 1, 10**9), np.arange(N + 1)[::-1].copy()):
        damaged = CSR(ArrayRows(pointers.astype(np.int64)), graph.adj_t.indices, None, N)
        with pytest.raises(GraphError, match="row pointers of vertex 0 are damaged"):
            NormScales(damaged, "mean", self_loops=True, real=np.float32).of(np.arange(1))
