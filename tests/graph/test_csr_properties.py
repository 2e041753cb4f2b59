"""Properties of CSR operations, beside SciPy, on graphs that hypothesis makes up and shrinks."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import numpy as np
import scipy.sparse as sp
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from mggcn.api.load import load_source
from mggcn.graph.convert import from_arrays, from_scipy
from mggcn.graph.csr import CSR, Graph, check_csr, probably_symmetric, probably_transposed, windows
from mggcn.graph.digests import CheckedFile, Hasher
from mggcn.graph.export import export
from mggcn.graph.join import join
from mggcn.graph.layout import graph_arrays, graph_sha256
from mggcn.graph.options import GraphOptions
from mggcn.graph.store import open_store
from mggcn.graph.store_write import write_store
from tests.graph.small import dense

# Nothing is kept from run to run, and the same examples come each time: a failure on one machine is one on all.
settings.register_profile("repeatable", derandomize=True, database=None, deadline=None, print_blob=True)
settings.load_profile("repeatable")
few = settings(max_examples=25, suppress_health_check=list(HealthCheck), phases=(Phase.generate, Phase.shrink))


@st.composite
def lists(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    """Edges with repetitions and self-loops, a weight each that float32 holds, and a number of vertices."""
    vertices = draw(st.integers(1, 12))
    ids = st.integers(0, vertices - 1)
    weights = st.integers(-64, 64).map(lambda number: number / 8)
    edges = draw(st.lists(st.tuples(ids, ids, weights), max_size=40))
    columns = np.array(edges, dtype=np.float64).reshape(-1, 3)
    return columns[:, :2].T.astype(np.int64), columns[:, 2].astype(np.float32), vertices


def summed(edges: np.ndarray, weights: np.ndarray, vertices: int) -> np.ndarray:
    array: np.ndarray = sp.coo_array((weights, tuple(edges)), shape=(vertices, vertices)).toarray()
    return array


@few
@given(lists(), st.booleans(), st.sampled_from(["keep", "drop", "add"]))
def test_building_is_scipys_sum(listed: tuple[np.ndarray, np.ndarray, int], mirrored: bool, loops: str) -> None:
    """Fails if repeated edges, reverses or self-loops are lost, doubled or moved, or the transpose is another's."""
    edges, weights, vertices = listed
    expected = summed(edges, weights, vertices)
    present = summed(edges, np.ones_like(weights), vertices) > 0
    if mirrored:
        off = ~np.eye(vertices, dtype=bool)
        expected, present = expected + expected.T * off, present | present.T
    graph = from_arrays(
        edges=edges,
        weights=weights,
        num_vertices=vertices,
        options=GraphOptions(duplicates="sum", symmetrize=mirrored, self_loops=loops),  # type: ignore[arg-type]
    )
    diagonal = np.arange(vertices)
    if loops == "drop":
        expected[diagonal, diagonal], present[diagonal, diagonal] = 0, False
    elif loops == "add":
        fresh = ~present[diagonal, diagonal]
        expected[diagonal[fresh], diagonal[fresh]], present[diagonal, diagonal] = 1, True
    np.testing.assert_array_equal(dense(graph.adj), expected)
    np.testing.assert_array_equal(dense(graph.adj_t), expected.T)
    assert graph.num_edges == present.sum()
    check_csr(graph.adj, "adj")
    check_csr(graph.adj_t, "adj_t")
    assert probably_transposed(graph.adj, graph.adj_t)
    stored = np.where(present, expected, np.nan)
    assert probably_symmetric(graph.adj) == np.array_equal(stored, stored.T, equal_nan=True)


@few
@given(lists(), st.integers(1, 9))
def test_windows_are_scipys_coordinates(listed: tuple[np.ndarray, np.ndarray, int], size: int) -> None:
    """Fails if a window, however small, drops an edge or gives it to another row."""
    edges, weights, vertices = listed
    matrix = sp.csr_array(summed(edges, weights, vertices) != 0).astype(np.float32)
    graph = from_scipy(matrix)
    found = [(int(r), int(c)) for rows, cols, _, _ in windows(graph.adj, size) for r, c in zip(rows, cols, strict=True)]
    coordinates = matrix.tocoo()
    assert found == list(zip(*(part.tolist() for part in coordinates.coords), strict=True))


@few
@given(lists(), lists())
def test_joining_is_scipys_block_diagonal(
    first: tuple[np.ndarray, np.ndarray, int], second: tuple[np.ndarray, np.ndarray, int]
) -> None:
    """Fails if an edge of the second graph stays among the vertices of the first."""
    graphs = [
        from_arrays(edges=edges, weights=weights, num_vertices=n, options=GraphOptions(duplicates="sum"))
        for edges, weights, n in (first, second)
    ]
    joined = join(graphs, ["", ""], name="both")
    expected = sp.block_diag([dense(graph.adj) for graph in graphs]).toarray()
    np.testing.assert_array_equal(dense(joined.adj), expected)
    np.testing.assert_array_equal(dense(joined.adj_t), expected.T)


@few
@given(lists(), st.sampled_from(["e.txt", "e.csv.gz", "e.npz"]))
def test_stores_and_files_give_back_the_graph(listed: tuple[np.ndarray, np.ndarray, int], name: str) -> None:
    """Fails if a graph that was written, read, exported and read again has lost a bit."""
    edges, weights, vertices = listed
    graph: Graph = from_arrays(
        edges=edges, weights=weights, num_vertices=vertices, options=GraphOptions(duplicates="sum")
    )
    with tempfile.TemporaryDirectory() as folder:
        write_store(graph, Path(folder) / "store")
        stored = open_store(Path(folder) / "store", verify=True)
        assert graph_sha256(stored) == graph_sha256(graph)
        if not graph.num_edges:
            return
        export(stored, Path(folder) / name)
        again = load_source(Path(folder) / name, num_vertices=vertices)
        for array, rows in graph_arrays(graph).items():
            np.testing.assert_array_equal(graph_arrays(again)[array].array(), rows.array(), err_msg=array)


@few
@given(st.binary(min_size=1, max_size=400), st.integers(1, 64), st.data())
def test_checked_reads_are_the_bytes_of_the_file(content: bytes, nbytes: int, data: st.DataObject) -> None:
    """Fails if blocks of any size, read in any order, give other bytes, or a changed one passes."""
    blocks = [content[start : start + nbytes] for start in range(0, len(content), nbytes)]
    digests = b""
    for block in blocks:
        hasher = Hasher()
        hasher.update(block)
        digests += bytes.fromhex(hasher.finish().sha256)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        path.write_bytes(content)
        checked = CheckedFile(path, len(content), nbytes, digests)
        for _ in range(4):
            start = data.draw(st.integers(0, len(content)))
            stop = data.draw(st.integers(start, len(content)))
            out = bytearray(stop - start)
            with path.open("rb", buffering=0) as file:
                checked.read_into(file, start, memoryview(out))
            assert out == content[start:stop]


def test_rows_without_weights_count_one_each() -> None:
    """Fails if the helper of these tests loses the entries of an unweighted matrix."""
    graph = from_arrays(edges=np.array([[0, 2], [1, 0]]), num_vertices=3)
    assert isinstance(graph.adj, CSR)
    assert dense(graph.adj).sum() == 2
    assert dataclasses.replace(graph.adj, values=None) == graph.adj
