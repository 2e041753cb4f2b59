from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch_geometric.data import Data

import mggcn
from mggcn.cli.entry import main
from mggcn.errors import ConfigError, GraphError
from mggcn.graph import structure
from mggcn.graph.convert import check_arguments, from_arrays, from_scipy, with_options
from mggcn.graph.csr import CSR
from mggcn.graph.layout import graph_sha256
from mggcn.graph.nonzeros import csr_if_sparse
from mggcn.graph.options import GraphOptions
from mggcn.graph.store import open_store
from mggcn.host import MachineMemory
from mggcn.interop.objects import from_dgl, from_object, from_pyg
from tests.graph.small import TRIANGLE_AND_TAIL, dense, small_graph

DIRECTED = np.array([[0, 0, 1, 3], [1, 2, 2, 3]])
MATRIX = np.zeros((4, 4), np.float32)
MATRIX[DIRECTED[0], DIRECTED[1]] = 1


def test_rows_are_sources() -> None:
    """Fails if adj and its transpose are exchanged anywhere."""
    triple = (np.array([0, 2, 3, 3, 4]), DIRECTED[1])
    for graph in [
        from_arrays(edges=DIRECTED),
        from_arrays(adj=triple),
        from_arrays(adj=(*triple, np.ones(4))),
        from_scipy(sp.csr_array(MATRIX)),
        from_scipy(sp.csc_matrix(MATRIX)),
        from_object(sp.coo_array(MATRIX.astype(bool))),
        from_object(DIRECTED),
        from_object(torch.from_numpy(DIRECTED)),
        from_object(torch.from_numpy(MATRIX).to_sparse_coo()),
        from_pyg(Data(edge_index=torch.from_numpy(DIRECTED), num_nodes=4)),
    ]:
        np.testing.assert_array_equal(dense(graph.adj), MATRIX)
        np.testing.assert_array_equal(dense(graph.adj_t), MATRIX.T)
        assert graph.adj.values is None


def test_number_of_vertices_is_inferred_or_given() -> None:
    assert from_arrays(edges=DIRECTED).num_vertices == 4
    assert from_arrays(edges=DIRECTED, num_vertices=9).num_vertices == 9
    assert from_arrays(edges=DIRECTED, features=np.ones((6, 1))).num_vertices == 6
    assert from_arrays(edges=DIRECTED, labels=[0] * 5).num_vertices == 5
    with pytest.raises(GraphError, match=r"\[0, 3\), since the labels have 3 rows, got 0 to 3; give one row"):
        from_arrays(edges=DIRECTED, labels=[0] * 3)
    with pytest.raises(GraphError, match="ids seem to start at 1: subtract 1"):
        from_arrays(edges=DIRECTED + 1, features=np.ones((4, 1)))
    with pytest.raises(GraphError, match=r"adj has 4 rows.*\(--vertices\)"):
        from_arrays(adj=sp.csr_array(MATRIX), num_vertices=5)


def test_merged_edges_are_counted_in_meta() -> None:
    """Fails if the count of merged edges is wrong, also counts what symmetrize adds, or stands there when it is 0."""
    repeated = np.concatenate([DIRECTED, DIRECTED[:, :2], DIRECTED[::-1, :1]], axis=1)
    assert "input" not in from_arrays(edges=DIRECTED).meta
    assert from_arrays(edges=repeated).meta["input"] == {"num_merged": 2}
    told = from_arrays(edges=repeated, options=GraphOptions(symmetrize=True)).meta["input"]
    assert told == {"num_merged": 3, "symmetrized": True}


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, "either edges"),
    "both": ({"edges": DIRECTED, "adj": sp.csr_array(MATRIX)}, "either edges"),
    "rectangular": ({"adj": sp.csr_array(MATRIX[:3])}, "square"),
    "dense": ({"adj": MATRIX}, "square SciPy matrix"),
    "bad triple": ({"adj": ([0, 2], [0, 1])}, "not a CSR matrix"),
    "decreasing triple": ({"adj": ([0, 2, 1], [0, 1])}, "not a CSR matrix"),
    "negative id": ({"edges": -DIRECTED}, "vertex ids must lie"),
    "NaN": ({"edges": DIRECTED, "features": np.full((4, 1), np.nan)}, "NaN"),
    "too large": (
        {"edges": DIRECTED, "features": np.full((4, 1), 1e300)},
        "1e+300, too large for float32".replace("+", r"\+"),
    ),
    "NaN sparse": ({"edges": DIRECTED, "features": sp.csr_array([[np.nan]] * 4)}, "NaN"),
    "label": ({"edges": DIRECTED, "labels": [0, 1, 2, 3], "num_classes": 3}, "vertex 3 has 3"),
    "overlap": ({"edges": DIRECTED, "splits": {"train": [0], "test": [0]}}, "both in train"),
    "empty": ({"edges": np.empty((2, 0), int)}, "1 to 2147483647 vertices"),
    "not arrays": ({"edges": "abc"}, "integers of shape"),
    "weights of a matrix": ({"adj": sp.csr_array(MATRIX), "weights": np.ones(4)}, "adj holds its own"),
    "ragged features": ({"edges": DIRECTED, "features": [[1], [1, 2]]}, "features cannot be read as an array"),
    "ragged labels": ({"edges": DIRECTED, "labels": [[1], [1, 2]]}, "labels cannot be read as an array"),
    "ragged split": ({"edges": DIRECTED, "splits": {"train": [[1], [1, 2]]}}, "split 'train' cannot be read"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused(case: str) -> None:
    arrays, message = BAD[case]
    with pytest.raises(GraphError, match=message):
        from_arrays(**arrays)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_tensors_are_taken_wherever_arrays_are() -> None:
    """Fails if a torch tensor, sparse, half or with a gradient, is refused or read as something else than NumPy's."""
    x, y = np.arange(8.0, dtype=np.float32).reshape(4, 2), np.array([0, 1, 1, 0])
    rest = {"num_vertices": 4, "weights": np.arange(1.0, 5.0), "splits": {"train": [0, 1]}}
    digests = {graph_sha256(from_arrays(edges=DIRECTED, features=sp.csr_array(x), labels=y, **rest))}
    tensors = rest | {"weights": torch.arange(1.0, 5.0)[:, None].requires_grad_(), "labels": torch.from_numpy(y)}
    tensors["splits"] = {"train": torch.tensor([True, True, False, False])}
    for features in (torch.from_numpy(x).to_sparse_coo(), torch.from_numpy(x).to_sparse_csr()):
        digests.add(graph_sha256(from_arrays(edges=torch.from_numpy(DIRECTED), features=features, **tensors)))
    assert len(digests) == 1
    dense_rows = from_arrays(edges=DIRECTED, features=torch.from_numpy(x).bfloat16().requires_grad_()).features
    assert dense_rows is not None
    assert not isinstance(dense_rows, CSR)
    np.testing.assert_array_equal(dense_rows.array(), x)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"edge_weight": [1.0]}, "no argument edge_weight; known are features, labels, splits, weights"),
        ({"feature": [1.0]}, "no argument feature; known are features"),
        ({"edges": DIRECTED}, "no argument edges"),
        ({"options": "sum"}, r"options must be mggcn.GraphOptions\(...\), got str"),
        ({"splits": [0, 1]}, "splits must be a mapping from names"),
        ({"splits": {1: [0]}}, "splits must be a mapping from names"),
        ({"splits": torch.ones(4, dtype=torch.bool)}, "splits must be a mapping from names"),
        ({"num_vertices": "4"}, "num_vertices must be an integer, got '4'"),
        ({"num_classes": 2.5}, "num_classes must be an integer, got 2.5"),
    ],
    ids=str,
)
def test_arguments_beside_a_source_are_checked(arguments: dict[str, Any], message: str) -> None:
    """Fails if a misspelt argument is swallowed or names an inner function, or one of another kind comes through."""
    with pytest.raises(ConfigError, match=message):
        check_arguments(arguments)
    check_arguments(
        {"splits": None, "num_vertices": np.int64(4), "options": GraphOptions(), "verify": True}, ("verify",)
    )


def pyg_data(**changes: Any) -> Data:
    reference = small_graph()
    assert reference.features is not None
    assert not isinstance(reference.features, CSR)
    return Data(
        **{
            "edge_index": torch.from_numpy(TRIANGLE_AND_TAIL),
            "x": torch.from_numpy(reference.features.array()),
            "y": torch.tensor([0, 1, 2, 0, -1]),
            **{f"{name}_mask": torch.from_numpy(rows.array()[0]) for name, rows in reference.splits.items()},
            **changes,
        }
    )


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(
    "change", ["none", "sparse x", "half x", "column y", "two-dimensional masks", "gradient", "adj_t"]
)
def test_pyg_data_gives_the_same_graph(change: str) -> None:
    data = pyg_data()
    if change == "sparse x":
        data.x = data.x.to_sparse_coo()
        reference = graph_sha256(small_graph(features=sp.csr_array(np.arange(10.0).reshape(5, 2))))
        assert graph_sha256(from_object(data)) == reference
        return
    if change == "half x":
        data.x = data.x.bfloat16()
    if change == "column y":
        data.y = data.y[:, None]
    if change == "gradient":
        data.x.requires_grad_()
    if change == "two-dimensional masks":
        for name in ("train_mask", "val_mask", "test_mask"):
            data[name] = data[name][:, None]
    if change == "adj_t":
        pattern = torch.sparse_coo_tensor(torch.from_numpy(TRIANGLE_AND_TAIL[::-1].copy()), torch.ones(8), (5, 5))
        data.adj_t, data.edge_index = pattern, None
    assert graph_sha256(from_object(data)) == graph_sha256(small_graph())


def test_pyg_layout_of_several_splits_and_weights() -> None:
    masks = torch.tensor([[True, False], [False, True], [False, False], [False, False], [False, False]])
    data = pyg_data(train_mask=masks, val_mask=None, test_mask=None, edge_weight=torch.arange(8.0))
    graph = from_pyg(data, name="mine", splits={"train": [1]}, options=GraphOptions(self_loops="add"))
    assert graph.name == "mine"
    assert graph.splits["train"].shape == (1, 5)
    assert from_pyg(data).splits["train"].shape == (2, 5)
    expected = np.eye(5)
    expected[TRIANGLE_AND_TAIL[0], TRIANGLE_AND_TAIL[1]] = np.arange(8)
    np.testing.assert_array_equal(dense(graph.adj), expected)


TWICE = np.array([[0, 0, 1, 0], [1, 1, 2, 2]])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [2, 1, 1]),
        ({"row_normalize": True}, [2, 1, 1]),
        ({"duplicates": "sum"}, [2, 1, 1]),
        ({"duplicates": "merge"}, [1, 1, 1]),
        ({"symmetrize": True}, [1, 1, 1]),
    ],
    ids=str,
)
@pytest.mark.parametrize("source", ["PyG", "DGL"])
def test_repeated_edges_count(source: str, options: dict[str, Any], expected: list[int]) -> None:
    """Fails if edges that PyG and DGL count are merged without being asked to, or are counted in edge lists."""
    parts = torch.from_numpy(TWICE)
    dgl = SimpleNamespace(edges=lambda: tuple(parts), num_nodes=lambda: 3, ndata={}, edata={})
    graph = from_object(
        Data(edge_index=parts, num_nodes=3) if source == "PyG" else dgl, options=GraphOptions(**options)
    )
    assert dense(graph.adj)[[0, 0, 1], [1, 2, 2]].tolist() == expected
    assert graph.meta["options"]["duplicates"] == ("merge" if expected == [1, 1, 1] else "sum")
    assert from_object(TWICE).adj.values is None


def test_repeated_self_loops_of_pyg_need_a_word() -> None:
    """Fails if they count in one way where GCNConv counts in another, or a way out that is named is none."""
    data = Data(edge_index=torch.tensor([[0, 2, 2], [1, 2, 2]]), num_nodes=3)
    with pytest.raises(GraphError, match=r'self-loop of vertex 2 repeats: .*PyG takes the last.*duplicates="sum"'):
        from_pyg(data)
    assert from_pyg(data, options=GraphOptions(self_loops="drop")).num_edges == 1
    assert dense(from_pyg(data, options=GraphOptions(duplicates="sum")).adj)[2, 2] == 2
    assert dense(from_pyg(Data(edge_index=torch.tensor([[0, 2], [1, 2]]), num_nodes=3)).adj)[2, 2] == 1


@pytest.mark.parametrize("source", ["PyG", "DGL"])
@pytest.mark.parametrize("column", [False, True])
def test_edge_data_that_may_be_weights_needs_a_word(source: str, column: bool) -> None:
    """Fails if one floating number per edge is silently ignored, or other edge data is refused."""
    edges, weights = torch.from_numpy(DIRECTED), torch.arange(1.0, 5.0)[:, None][:, slice(None) if column else 0]

    def graph_with(value: torch.Tensor) -> Any:
        if source == "PyG":
            return Data(edge_index=edges, num_nodes=4, edge_attr=value)
        return SimpleNamespace(edges=lambda: tuple(edges), num_nodes=lambda: 4, ndata={}, edata={"dist": value})

    access = r"weights=data\.edge_attr" if source == "PyG" else r'weights=graph\.edata\["dist"\]'
    with pytest.raises(GraphError, match=rf"one number per edge.*give {access} to weigh.* or weights=None"):
        from_object(graph_with(weights))
    weighted = from_object(graph_with(weights), weights=weights)
    np.testing.assert_array_equal(dense(weighted.adj)[DIRECTED[0], DIRECTED[1]], [1, 2, 3, 4])
    assert from_object(graph_with(weights), weights=None).adj.values is None
    assert from_object(graph_with(torch.arange(4))).adj.values is None
    for several in (torch.ones(4, 8), torch.arange(8).reshape(4, 2)):
        with pytest.raises(GraphError, match=rf"numbers per edge.*{access}\[:, 0\], or weights=None to leave them out"):
            from_object(graph_with(several))
        assert from_object(graph_with(several), weights=None).adj.values is None


@pytest.mark.filterwarnings("ignore:Sparse")
def test_adj_t_is_the_transpose() -> None:
    """With torch's tensor and with the interface of torch_sparse.SparseTensor."""
    transposed = torch.from_numpy(MATRIX.T.copy())
    parts = tuple(torch.from_numpy(part) for part in (DIRECTED[1].copy(), DIRECTED[0].copy()))
    other = SimpleNamespace(coo=lambda: (*parts, None))
    for adj_t in (transposed.to_sparse_csr(), transposed.to_sparse_coo(), other):
        graph = from_object(SimpleNamespace(adj_t=adj_t, num_nodes=4))
        np.testing.assert_array_equal(dense(graph.adj), MATRIX)


class FakeDGLGraph:
    """The part of dgl.DGLGraph that is read; DGL itself is not installed."""

    def __init__(self) -> None:
        masks = {f"{name}_mask": torch.from_numpy(rows.array()[0]) for name, rows in small_graph().splits.items()}
        features = torch.arange(10.0).reshape(5, 2)
        self.ndata = {"feat": features, "label": torch.tensor([0, 1, 2, 0, -1]), **masks}

    def edges(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.from_numpy(TRIANGLE_AND_TAIL[0]), torch.from_numpy(TRIANGLE_AND_TAIL[1])

    def num_nodes(self) -> int:
        return 5


def test_dgl_graph_gives_the_same_graph() -> None:
    assert graph_sha256(from_object(FakeDGLGraph())) == graph_sha256(small_graph())
    assert from_dgl(FakeDGLGraph(), labels=None, splits=None).labels is None


@pytest.mark.parametrize("source", [None, 3, {"edges": 1}, [Data()], Data(), SimpleNamespace(edge_index=None)])
def test_other_objects_are_refused(source: Any) -> None:
    with pytest.raises(GraphError, match="cannot read a graph from"):
        from_object(source)


def test_a_graph_passes_through() -> None:
    graph = small_graph()
    assert from_object(graph) is graph
    assert with_options(graph, GraphOptions(symmetrize=True, self_loops="keep")) is graph
    with pytest.raises(GraphError, match="labels"):
        from_object(graph, labels=[1])


def test_with_options(data_root: Path) -> None:
    """On an opened store: new arrays in memory, no inherited digest, the rest untouched."""
    cora = open_store(data_root / "cora")
    changed = with_options(cora, GraphOptions(row_normalize=True, self_loops="add"))
    assert isinstance(changed.features, CSR)
    sums = dense(changed.features).sum(axis=1)
    np.testing.assert_allclose(sums[sums > 0], 1, rtol=1e-5)
    np.testing.assert_array_equal(dense(changed.adj), dense(cora.adj) + np.eye(2708))
    assert changed.symmetric
    assert changed.labels is cora.labels
    assert changed.meta["licence"] == cora.meta["licence"]
    assert graph_sha256(changed) != graph_sha256(cora)
    directed = from_arrays(edges=DIRECTED)
    both = with_options(directed, GraphOptions(symmetrize=True, self_loops="drop"))
    np.testing.assert_array_equal(dense(both.adj), np.maximum(MATRIX, MATRIX.T) - np.diag([0, 0, 0, 1]))
    assert graph_sha256(replace(both, adj_t=replace(both.adj))) != graph_sha256(both)


@pytest.mark.parametrize("name", ["cora", "minesweeper", "usa_airports"])
def test_real_graphs_survive_conversion(data_root: Path, name: str) -> None:
    """Through SciPy, with shuffled edges: the digest is the store's own."""
    graph = open_store(data_root / name)
    adj = sp.csr_array(dense(graph.adj)).tocoo()
    order = np.random.default_rng(5).permutation(adj.nnz)
    again = from_arrays(
        edges=np.stack([adj.row, adj.col])[:, order],
        num_vertices=graph.num_vertices,
        features=sp.csr_array(dense(graph.features))
        if isinstance(graph.features, CSR)
        else graph.features and graph.features.array(),
        labels=None if graph.labels is None else graph.labels.array(),
        splits={split: rows.array() for split, rows in graph.splits.items()},
    )
    assert again.symmetric
    if not isinstance(graph.features, CSR | None):  # one-hot features come back as a CSR
        graph = replace(graph, features=csr_if_sparse(graph.features))
    assert graph_sha256(again) == graph_sha256(graph)


def test_far_more_vertices_than_edges_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if one huge id takes all memory, or is then called a lack of memory, or a large graph's lack is called ids."""
    few, dense = np.array([[0], [2**28]]), np.array([[0, 1, 0], [1, 0, 0]])
    with monkeypatch.context() as patch:
        patch.setattr(structure, "machine_memory", lambda: MachineMemory(8 << 30, 5 << 30, None))
        with pytest.raises(
            GraphError, match=r"reach few, do not fit the memory: need 6.0 GiB, 5.0 GiB are free; number"
        ):
            from_arrays(edges=few)
        patch.setattr(structure, "machine_memory", lambda: MachineMemory(8 << 30, 47, None))
        with pytest.raises(GraphError, match=r"^2 vertices do not fit the memory: .*free some memory"):
            from_arrays(edges=dense)

    def full(*_: Any) -> Any:
        raise MemoryError("Unable to allocate 2.00 GiB")

    monkeypatch.setattr(structure, "build", full)
    with pytest.raises(GraphError, match=r"268,435,457 vertices, of which 1 edges reach few, .*number them from 0"):
        from_arrays(edges=few)
    with pytest.raises(MemoryError):
        from_arrays(edges=dense)


REPEATED = sp.coo_array(([0.5, 0.5, 2.0, 3.0, -3.0, 1.0], ([0, 0, 1, 2, 2, 3], [1, 1, 2, 0, 0, 3])), shape=(4, 4))


def _unsummed_csr() -> sp.csr_array:
    order = np.argsort(REPEATED.row, kind="stable")
    indptr = np.searchsorted(REPEATED.row[order], np.arange(5))
    return sp.csr_array((REPEATED.data[order], REPEATED.col[order], indptr), shape=(4, 4))


def _as_file(folder: Path, kind: str) -> Path:
    path = folder / kind
    if kind == "coo.npz":
        sp.save_npz(path, REPEATED)
    elif kind == "csr.npz":
        sp.save_npz(path, _unsummed_csr())
    elif kind == "own.npz":
        csr = _unsummed_csr()
        np.savez(path, indptr=csr.indptr, indices=csr.indices, values=csr.data)
    else:
        lines = [f"{u + 1} {v + 1} {w}" for u, v, w in zip(REPEATED.row, REPEATED.col, REPEATED.data, strict=True)]
        path.write_text("%%MatrixMarket matrix coordinate real general\n4 4 6\n" + "\n".join(lines) + "\n")
    return path


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("kind", ["coo", "csr", "triple", "torch", "coo.npz", "csr.npz", "own.npz", "m.mtx"])
def test_repeated_entries_of_a_matrix_add_up(kind: str, tmp_path: Path) -> None:
    """Fails if an entry is one of its parts, is refused as an edge with two weights, or vanishes with a sum of 0."""
    csr = _unsummed_csr()
    sources: dict[str, Any] = {"coo": REPEATED, "csr": csr}
    sources["torch"] = torch.sparse_coo_tensor(np.stack([REPEATED.row, REPEATED.col]), REPEATED.data, (4, 4))
    right = REPEATED.toarray()
    for symmetrize in (False, True):
        options = GraphOptions(symmetrize=symmetrize)
        if kind == "triple":
            graph = from_arrays(adj=(csr.indptr, csr.indices, csr.data), options=options)
        else:
            graph = mggcn.load(sources[kind] if kind in sources else _as_file(tmp_path, kind), options=options)
        expected = np.where(right, right, right.T) if symmetrize else right
        np.testing.assert_array_equal(dense(graph.adj), expected)
        assert graph.num_edges == (7 if symmetrize else 4)
        assert "1 edge of weight 0" in str(mggcn.describe(graph)) or symmetrize
        assert graph.repeats == ""
    with pytest.raises(GraphError, match="expected every edge once"):
        from_scipy(REPEATED, options=GraphOptions(duplicates="error"))
    assert REPEATED.nnz == 6


def test_entries_that_a_pattern_repeats_are_one() -> None:
    """Fails if True and True are 2, or a pattern without values gets weights."""
    pattern = sp.coo_array((np.ones(3, bool), ([0, 0, 1], [1, 1, 2])), shape=(3, 3))
    for graph in (from_scipy(pattern), from_arrays(adj=([0, 2, 3, 3], [1, 1, 2]))):
        assert graph.adj.values is None
        assert graph.num_edges == 2
    both = sp.coo_array(([1.0, 2.0], ([0, 1], [1, 0])), shape=(2, 2))
    with pytest.raises(GraphError, match="listed with different weights"):
        from_scipy(both, options=GraphOptions(symmetrize=True))


def test_prepare_reads_repeats_as_load_does(tmp_path: Path) -> None:
    """Fails if the command merges what `load` adds up or counts, in matrices or in PyG's saved graphs."""
    torch.save(Data(edge_index=torch.from_numpy(TWICE), num_nodes=3), tmp_path / "data.pt")
    for source in (_as_file(tmp_path, "m.mtx"), _as_file(tmp_path, "csr.npz"), tmp_path / "data.pt"):
        store = tmp_path / f"{source.name}.store"
        assert main(["prepare", str(source), str(store)]) == 0
        np.testing.assert_array_equal(dense(mggcn.load(store).adj), dense(mggcn.load(source).adj))
    assert mggcn.load(tmp_path / "data.pt.store").repeats == "counted"
