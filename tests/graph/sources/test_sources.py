from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from mggcn.api.load import load_source
from mggcn.errors import GraphError, StoreError
from mggcn.graph.convert import from_arrays
from mggcn.graph.csr import CSR, Graph
from mggcn.graph.layout import graph_arrays, graph_sha256
from mggcn.graph.options import GraphOptions
from mggcn.graph.store import open_store
from mggcn.graph.store_write import write_store
from tests.graph.small import TRIANGLE_AND_TAIL, dense, edge_list, small_graph


def small_matrix() -> sp.coo_array:
    return sp.coo_array((np.ones(8), (TRIANGLE_AND_TAIL[0], TRIANGLE_AND_TAIL[1])), shape=(5, 5))


def bare() -> Graph:
    return small_graph(features=None, labels=None, splits=None)


def test_store_by_path_and_by_name(tmp_path: Path) -> None:
    write_store(small_graph(), tmp_path / "store")
    for graph in (load_source(tmp_path / "store"), load_source("store", root=tmp_path, verify=True)):
        assert graph_sha256(graph) == graph_sha256(small_graph())
    changed = load_source(tmp_path / "store", options=GraphOptions(row_normalize=True))
    assert graph_sha256(changed) == graph_sha256(small_graph(options=GraphOptions(row_normalize=True)))
    with pytest.raises(GraphError, match="labels cannot be added"):
        load_source(tmp_path / "store", labels="x.npy")


@pytest.mark.parametrize("name", ["cora", "mesh_4elt"])
def test_real_graph_through_an_edge_list(data_root: Path, tmp_path: Path, name: str) -> None:
    """Written as text with companions, loaded again: the digest is the store's own."""
    graph = open_store(data_root / name)
    edges, _ = edge_list(graph.adj)
    pairs = edges[:, edges[0] < edges[1]].T.tolist()
    path = tmp_path / f"{name}.tsv.gz"
    path.write_bytes(gzip.compress("".join(f"{u}\t{v}\n" for u, v in pairs).encode(), compresslevel=1))
    companions: dict[str, Any] = {"splits": {}}
    for stem in graph_arrays(graph):
        if stem in graph.splits:
            companions["splits"][stem] = data_root / name / f"{stem}.npy"
        elif stem == "labels":
            companions["labels"] = str(data_root / name / "labels.npy")
    if isinstance(graph.features, CSR):
        sp.save_npz(tmp_path / "features.npz", sp.csr_array(dense(graph.features)))
        companions["features"] = tmp_path / "features.npz"
    again = load_source(path, num_vertices=graph.num_vertices, options=GraphOptions(symmetrize=True), **companions)
    assert again.name == name
    assert graph_sha256(again) == graph_sha256(graph)


@pytest.mark.parametrize("suffix", [".txt", ".tsv", ".csv", ".edges", ".el", ".edgelist", ".TXT"])
def test_every_suffix_of_edge_lists(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"e{suffix}").write_text("".join(f"{u} {v}\n" for u, v in TRIANGLE_AND_TAIL.T))
    graph = load_source(tmp_path / f"e{suffix}", num_vertices=5)
    assert graph_sha256(graph) == graph_sha256(bare())


def own_arrays() -> dict[str, Any]:
    return {name: rows.array() for name, rows in graph_arrays(small_graph()).items()}


def graph_data() -> dict[str, Any]:
    matrix = small_matrix().tocsr()
    arrays = own_arrays()
    return {
        "adj_data": matrix.data,
        "adj_indices": matrix.indices,
        "adj_indptr": matrix.indptr,
        "adj_shape": matrix.shape,
        "attr_matrix": arrays["features"],
        "labels": arrays["labels"],
        "node_names": np.array(["a", None], dtype=object),
    }


def sparse_features() -> dict[str, Any]:
    matrix = sp.csr_array(own_arrays()["features"])
    return {"data": matrix.data, "indices": matrix.indices, "indptr": matrix.indptr, "shape": matrix.shape}


def yandex() -> dict[str, Any]:
    arrays = own_arrays()
    masks = {f"{part}_masks": arrays[part] for part in ("train", "val", "test")}
    undirected = TRIANGLE_AND_TAIL[:, ::2].T
    return {"edges": undirected, "node_features": arrays["features"], "node_labels": arrays["labels"], **masks}


def test_npz_layouts(tmp_path: Path) -> None:
    """Pickled members that are not needed do not matter; sparse features equal dense ones."""
    np.savez(tmp_path / "own.npz", **own_arrays())
    np.savez(tmp_path / "yandex.npz", **yandex())
    np.savez(tmp_path / "data.npz", **graph_data())
    dense_attributes = graph_data()
    del dense_attributes["attr_matrix"]
    attributes = {f"attr_{key}": value for key, value in sparse_features().items()}
    np.savez(tmp_path / "sparse.npz", **dense_attributes, **attributes)
    sp.save_npz(tmp_path / "scipy.npz", small_matrix())
    reference = graph_sha256(small_graph())
    assert graph_sha256(load_source(tmp_path / "own.npz")) == reference
    assert graph_sha256(load_source(tmp_path / "yandex.npz", options=GraphOptions(symmetrize=True))) == reference
    unsplit = load_source(tmp_path / "data.npz")
    assert graph_sha256(unsplit) == graph_sha256(small_graph(splits=None))
    splits = {"train": [0, 1], "val": [2], "test": [3]}
    assert graph_sha256(load_source(tmp_path / "data.npz", splits=splits)) == reference
    sparse = load_source(tmp_path / "sparse.npz").features
    assert isinstance(sparse, CSR)
    np.testing.assert_array_equal(dense(sparse), own_arrays()["features"])
    assert graph_sha256(load_source(tmp_path / "scipy.npz")) == graph_sha256(bare())


def test_own_npz_with_sparse_features_and_values(tmp_path: Path) -> None:
    arrays = own_arrays()
    del arrays["features"]
    features = {f"features_{key}": value for key, value in sparse_features().items()}
    np.savez(tmp_path / "own.npz", values=np.arange(8), **arrays, **features)
    graph = load_source(tmp_path / "own.npz")
    assert graph.adj.values is not None
    np.testing.assert_array_equal(graph.adj.values.array(), np.arange(8))
    assert isinstance(graph.features, CSR)
    assert graph.features.num_cols == 2


def npz(path: Path, **arrays: Any) -> None:
    np.savez(path, **arrays)


def test_hostile_archives_are_refused(tmp_path: Path) -> None:
    """A pickle that would create a file when loaded, damage, and archives of something else."""

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "executed",)

    good = own_arrays()
    npz(tmp_path / "pickled.npz", **{**good, "labels": np.array([Bomb()], dtype=object)})
    npz(tmp_path / "other.npz", a=np.ones(3))
    npz(tmp_path / "incomplete.npz", indptr=good["indptr"])
    npz(tmp_path / "range.npz", **{**good, "indices": good["indices"] + 4})
    npz(tmp_path / "offsets.npz", **{**good, "indptr": good["indptr"][::-1].copy()})
    npz(tmp_path / "shapes.npz", **{**graph_data(), "adj_shape": (3, 3)})
    (tmp_path / "cut.npz").write_bytes((tmp_path / "range.npz").read_bytes()[:-30])
    data = bytearray((tmp_path / "range.npz").read_bytes())
    data[data.index(good["features"].tobytes())] ^= 1
    (tmp_path / "flipped.npz").write_bytes(data)
    (tmp_path / "empty.npz").write_bytes(b"")
    np.save(tmp_path / "array.npy", np.ones(3))
    (tmp_path / "array.npy").rename(tmp_path / "array.npz")
    messages = {
        "pickled": "labels is pickled",
        "other": "holds a;",
        "incomplete": "expected the key indices",
        "range": "vertex ids|not a CSR matrix",
        "offsets": "not a CSR matrix",
    }
    for path in sorted(tmp_path.glob("*.npz")):
        with pytest.raises(GraphError, match=messages.get(path.stem, f"{path.stem}.npz is not a valid")):
            load_source(path)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("m.mtx", "", "not a valid MatrixMarket"),
        ("m.mtx.gz", "no gzip", "not a valid MatrixMarket"),
        ("graph.bin", "", "cannot recognise"),
        ("graph", "0 1\n", "cannot recognise"),
        ("e.txt", "0 1\n1 -2\n", "vertex ids must lie"),
        ("e.txt", "0 1\n1 2147483648\n", "vertices"),
        ("e.txt", "", "vertices"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(GraphError, match=message):
        load_source(tmp_path / name)


def test_missing_things_are_named(tmp_path: Path) -> None:
    """Fails if a message does not say what is missing, or speaks of NumPy's options."""
    (tmp_path / "e.txt").write_text("0 1\n")
    (tmp_path / "text.npy").write_text("0 1\n")
    np.save(tmp_path / "pickled.npy", np.array([{}]))
    with pytest.raises(GraphError, match=r"there is no nothing, .*nothing; expected a store, "):
        load_source("nothing", root=tmp_path)
    with pytest.raises(StoreError, match="without a readable meta"):
        load_source(tmp_path)
    for name in ("text.npy", "pickled.npy"):
        with pytest.raises(GraphError, match=r"is text, or holds pickled objects.*as numpy.save writes it") as caught:
            load_source(tmp_path / "e.txt", features=tmp_path / name)
        assert "allow_pickle" not in str(caught.value)
    with pytest.raises(GraphError, match=r"e.txt: arrays are not read from text; numpy.save\('e.npy'"):
        load_source(tmp_path / "e.txt", features=tmp_path / "e.txt")
    for name in ("missing.npy", "text.npy", "pickled.npy", "missing.npz"):
        with pytest.raises(GraphError, match=f"cannot load .*{name}"):
            load_source(tmp_path / "e.txt", labels=tmp_path / name)


def test_provenance_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "e.txt").write_text("0 1\n0 1\n")
    graph = load_source(tmp_path / "e.txt", options=GraphOptions(duplicates="sum"), name="mine")
    assert graph.name == "mine"
    assert graph.meta["source"] == str(tmp_path / "e.txt")
    assert graph.meta["options"]["duplicates"] == "sum"
    assert graph_sha256(graph) == graph_sha256(from_arrays(edges=[[0], [1]], weights=[2.0]))


def test_what_a_file_cannot_tell_later_is_kept(tmp_path: Path) -> None:
    """Fails if a skipped header or merged edges are forgotten on the way into a store and out of it."""
    (tmp_path / "e.csv").write_text("from,to\n0,1\n0,1\n1,0\n")
    write_store(load_source(tmp_path / "e.csv"), tmp_path / "store")
    assert open_store(tmp_path / "store").meta["input"] == {"header": "from,to", "num_merged": 1}
