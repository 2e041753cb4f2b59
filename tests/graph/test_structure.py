from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from mggcn.errors import ConfigError, GraphError
from mggcn.graph import structure
from mggcn.graph.build import build
from mggcn.graph.build.build import Adjacency
from mggcn.graph.csr import check_csr
from mggcn.graph.options import GraphOptions
from mggcn.graph.structure import build_adjacency, edges_of
from tests.graph.small import dense, edge_list

EDGES = np.array([[0, 0, 1, 2, 2, 0, 3], [1, 1, 0, 0, 2, 0, 1]])
"""0 -> 1 twice and back once, 2 -> 0, 3 -> 1 one way, self-loops at 0 and 2; vertex 4 has none."""


def built(edges: Any, weights: Any, num_vertices: int, options: GraphOptions) -> Adjacency:
    return build_adjacency(edges_of(edges, weights), num_vertices, options)[0]


def reference(edges: np.ndarray, weights: np.ndarray | None, options: GraphOptions) -> np.ndarray:
    """The dense matrix that the options describe, entry by entry."""
    matrix = np.zeros((5, 5))
    for u, v, w in zip(*edges, np.ones(edges.shape[1]) if weights is None else weights, strict=True):
        if u == v and options.self_loops == "drop":
            continue
        ends = {(u, v), (v, u)} if options.symmetrize else {(u, v)}
        for end in ends:
            matrix[end] = matrix[end] + w if options.duplicates == "sum" else w
    if options.self_loops == "add":
        missing = np.diag(matrix) == 0
        matrix[missing, missing] = 1
    return matrix


@pytest.mark.parametrize("weights", [None, [2, 2, 2, 0.5, 4, 1, -1]], ids=["unweighted", "weighted"])
@pytest.mark.parametrize(
    ("symmetrize", "duplicates", "self_loops"),
    list(itertools.product([False, True], ["merge", "sum"], ["keep", "drop", "add"])),
)
def test_options_mean_what_they_say(symmetrize: bool, duplicates: Any, self_loops: Any, weights: Any) -> None:
    options = GraphOptions(symmetrize=symmetrize, duplicates=duplicates, self_loops=self_loops)
    array = None if weights is None else np.array(weights)
    adj, adj_t, _ = built(EDGES, array, 5, options)
    expected = reference(EDGES, array, options)
    np.testing.assert_array_equal(dense(adj), expected)
    np.testing.assert_array_equal(dense(adj_t), expected.T)
    assert (adj_t is adj) == symmetrize
    check_csr(adj, "adjacency")
    check_csr(adj_t, "transpose")


def test_both_directions_listed_is_symmetric() -> None:
    edges = np.array([[0, 1, 1, 2], [1, 0, 2, 1]])
    both = built(edges, None, 3, GraphOptions())
    assert both[0] is both[1]
    weighted = built(edges, np.array([1.0, 1.0, 3.0, 2.0]), 3, GraphOptions())
    assert weighted[0] is not weighted[1]
    again = built(edges, np.array([5.0, 5.0, 3.0, 3.0]), 3, GraphOptions())
    assert again[0] is again[1]


def test_symmetrized_sums_are_symmetric_to_the_last_bit() -> None:
    """Fails if each direction is summed in its own order."""
    rng = np.random.default_rng(3301)
    edges = rng.integers(0, 12, (2, 4000))
    adj, adj_t, _ = built(edges, rng.standard_normal(4000) * 1e3, 12, GraphOptions(symmetrize=True, duplicates="sum"))
    assert adj is adj_t


def test_weights_of_one_need_no_values() -> None:
    adj, _, _ = built(EDGES[:, 1:], np.ones(6), 5, GraphOptions(duplicates="sum"))
    assert adj.values is None
    adj, _, _ = built(EDGES, None, 5, GraphOptions(duplicates="sum"))
    assert adj.values is not None


def test_duplicates_can_be_refused() -> None:
    options = GraphOptions(duplicates="error", symmetrize=True)
    with pytest.raises(GraphError, match=r"1 repeat, the first is 0 -> 1.*\(--duplicates\)"):
        built(EDGES, None, 5, options)
    adj, _, _ = built(EDGES[:, 1:], None, 5, options)
    np.testing.assert_array_equal(dense(adj), reference(EDGES, None, GraphOptions(symmetrize=True)))


@pytest.mark.parametrize("symmetrize", [False, True])
def test_contradicting_weights_are_refused(symmetrize: bool) -> None:
    """Fails if one of two weights is taken silently, or the message names no option of the command."""
    weights = np.array([2.0, 3.0, 2.0, 1.0, 1.0, 1.0, 1.0])
    with pytest.raises(GraphError, match=r"edge 0 -> 1 is listed with different weights.*\(--duplicates sum\)"):
        built(EDGES, weights, 5, GraphOptions(symmetrize=symmetrize))


BAD: dict[str, tuple[Any, Any, int, str]] = {
    "negative": ([[0], [-1]], None, 5, r"\[0, 5\), got -1 to 0"),
    "too large": ([[0], [5]], None, 5, r"got 0 to 5; check num_vertices \(--vertices\)"),
    "from 1": ([[1], [5]], None, 5, "got 1 to 5; ids seem to start at 1"),
    "floats": ([[0.0], [1.0]], None, 5, "must be integers"),
    "transposed": ([[0, 1], [1, 2], [2, 3]], None, 5, r"shape \(3, 2\)"),
    "no vertices": (
        np.empty((2, 0), int),
        None,
        0,
        r"1 to 2147483647 vertices, got 0; give num_vertices \(--vertices\)",
    ),
    "too many vertices": ([[0], [1]], None, 2**31, "1 to 2147483647 vertices.*without gaps"),
    "few weights": ([[0, 1], [1, 2]], [1.0], 5, "each of 2 edges"),
    "NaN": ([[0], [1]], [np.nan], 5, "1 are NaN"),
    "overflow": ([[0], [1]], [1e39], 5, "overflow float32"),
    "complex": ([[0], [1]], [1j], 5, "real weight"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_edges_are_refused(case: str) -> None:
    edges, weights, num_vertices, message = BAD[case]
    with pytest.raises(GraphError, match=message):
        built(np.asarray(edges), None if weights is None else np.asarray(weights), num_vertices, GraphOptions())


def test_largest_ids_do_not_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys reach 2^63 where reverses are marked; only the row pointers of so many vertices are too large for a test."""
    n = 2**31 - 1
    monkeypatch.setattr(structure, "machine_memory", lambda: None)
    monkeypatch.setattr(build, "_RowCounts", _NoCounts)
    monkeypatch.setattr(build, "_Matrix", _NoMatrix)
    with pytest.raises(GraphError, match=f"1 repeat, the first is {n - 1} -> {n - 2}"):
        built(
            np.array([[n - 1, 0, n - 1], [n - 2, 1, n - 2]]),
            None,
            n,
            GraphOptions(symmetrize=True, duplicates="error"),
        )


class _NoCounts:
    def __init__(self, *_: int) -> None:
        self.total = 0

    def add(self, row: Any) -> None:
        self.total += row.size


class _NoMatrix:
    def __init__(self, *_: Any) -> None: ...

    def write(self, *_: Any) -> None: ...

    def write_pointers(self, *_: Any) -> None: ...


def test_edge_list_gives_the_edges_back() -> None:
    weights = np.array([2, 2, 2, 0.5, 4, 1, -1])
    adj, _, _ = built(EDGES, weights, 5, GraphOptions())
    edges, values = edge_list(adj)
    again, _, _ = built(edges, values, 5, GraphOptions())
    np.testing.assert_array_equal(dense(again), dense(adj))


def test_unknown_option_is_refused() -> None:
    with pytest.raises(ConfigError, match="merge, sum, error"):
        GraphOptions(duplicates="first")  # type: ignore[arg-type]
