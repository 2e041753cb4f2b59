"""Parquet tables and saved PyG Data: the graph of the arrays, and one line for whatever is no such file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from mggcn.api.load import load_source
from mggcn.errors import GraphError
from mggcn.graph.convert import from_arrays
from mggcn.graph.facts import describe
from mggcn.graph.ids import ids_of
from mggcn.graph.layout import graph_sha256
from mggcn.graph.options import GraphOptions
from mggcn.graph.store_write import write_store
from mggcn.interop.objects import from_object
from tests.graph.small import TRIANGLE_AND_TAIL

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def write(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def test_edges_and_features_of_tables(tmp_path: Path) -> None:
    """Fails if a column is lost, taken for another, or read in another order than the file's."""
    src, dst = TRIANGLE_AND_TAIL
    x = np.random.default_rng(3).standard_normal((5, 3))
    features = write(tmp_path / "x.parquet", a=x[:, 0], b=x[:, 1].astype(np.float32), c=x[:, 2])
    edges = write(tmp_path / "e.parquet", source=src, target=dst.astype(np.int32), type=src % 2, weight=dst + 0.5)
    graph = load_source(edges, features=features)
    expected = from_arrays(edges=TRIANGLE_AND_TAIL, weights=dst + 0.5, edge_types=src % 2, features=x, num_vertices=5)
    assert graph_sha256(graph) == graph_sha256(expected)


def test_bad_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if columns that contradict their places, holes, text or damage pass, or are told in more than a line."""
    src, dst = TRIANGLE_AND_TAIL
    good = write(tmp_path / "good.parquet", u=src, v=dst)
    damaged = bytearray(good.read_bytes())
    damaged[len(damaged) // 2 :] = bytes(len(damaged) - len(damaged) // 2)
    (tmp_path / "damaged.parquet").write_bytes(damaged)
    (tmp_path / "text.parquet").write_text("0 1\n")
    cases = {
        write(tmp_path / "swapped.parquet", dst=src, src=dst): "column 1 is named 'dst'",
        write(tmp_path / "index.parquet", index=src, src=src, dst=dst): "column 1 is named 'index'",
        write(tmp_path / "one.parquet", u=src): "1 columns",
        write(tmp_path / "words.parquet", u=["a"] * 8, v=dst): "column 'u' must hold whole numbers",
        write(tmp_path / "floats.parquet", u=src + 0.5, v=dst): "column 'u' must hold whole numbers",
        write(tmp_path / "holes.parquet", u=[None, *range(7)], v=dst): "column 'u' lacks entries",
        tmp_path / "damaged.parquet": "not a valid Parquet file",
        tmp_path / "text.parquet": "not a valid Parquet file",
    }
    for path, message in cases.items():
        with pytest.raises(GraphError, match=message) as caught:
            load_source(path)
        assert "\n" not in str(caught.value)
    with pytest.raises(GraphError, match="column 'u' must hold numbers"):
        load_source(good, features=tmp_path / "words.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(GraphError, match=r"pip install 'mggcn\[parquet\]'"):
        load_source(good)


def test_a_saved_data(tmp_path: Path) -> None:
    """Fails if the file gives another graph than the object, or options and companions are not heeded."""
    data = Data(
        x=torch.arange(10.0).reshape(5, 2),
        edge_index=torch.tensor(TRIANGLE_AND_TAIL),
        y=torch.tensor([0, 1, 1, 0, 1]),
        train_mask=torch.tensor([True, True, False, False, False]),
    )
    torch.save(data, tmp_path / "data.pt")
    assert graph_sha256(load_source(tmp_path / "data.pt")) == graph_sha256(from_object(data))
    options = GraphOptions(self_loops="add")
    np.save(tmp_path / "labels.npy", np.array([1, 1, 0, 0, 1]))
    graph = load_source(tmp_path / "data.pt", options=options, labels=tmp_path / "labels.npy")
    assert graph_sha256(graph) == graph_sha256(from_object(data, options=options, labels=np.array([1, 1, 0, 0, 1])))


def test_a_saved_data_of_odd_parts_is_one_line(tmp_path: Path) -> None:
    """Fails if a Data whose parts are not those of a Data, or that has no edges, ends in a traceback."""
    pytest.importorskip("torch_geometric")
    from torch_geometric.data import Data
    from torch_geometric.data.storage import GlobalStorage

    odd = Data(x=torch.ones(2, 1), edge_index=torch.zeros(2, 1, dtype=torch.int64))
    object.__setattr__(odd, "_store", GlobalStorage({"x": 3}))
    for data, message in ((odd, "Data"), (Data(x=torch.ones(2, 1)), r"no edges: expected edge_index \[2, E\]")):
        torch.save(data, tmp_path / "odd.pt")
        with pytest.raises(GraphError, match=message):
            load_source(tmp_path / "odd.pt")


def test_other_saved_objects_are_not_unpickled(tmp_path: Path) -> None:
    """Fails if a pickle runs code, or damage ends in anything but a line."""

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "executed",)

    torch.save(Bomb(), tmp_path / "bomb.pt")
    torch.save({"x": torch.ones(2)}, tmp_path / "dictionary.pt")
    (tmp_path / "text.pt").write_text("0 1\n")
    (tmp_path / "empty.pt").write_bytes(b"")
    for path in sorted(tmp_path.glob("*.pt")):
        with pytest.raises(GraphError, match="one PyTorch Geometric Data") as caught:
            load_source(path)
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "executed").exists()


EDGES = "0 1\n1 2\n2 0\n"


@pytest.mark.parametrize(
    "name", ["__index_level_0__", "index", "Unnamed: 0", "id", "paper_id", "userId", "vertex", "nid", "idx"]
)
def test_a_column_that_names_rows_is_no_feature(tmp_path: Path, name: str) -> None:
    """Fails if an index or id becomes a feature in silence, or rows in another order pass for those of the vertices."""
    (tmp_path / "e.txt").write_text(EDGES)
    path = write(tmp_path / "x.parquet", **{"f0": [0.5, 1.5, 2.5], name: [0, 1, 2], "f1": [1.0, 2.0, 3.0]})
    graph = load_source(tmp_path / "e.txt", features=path)
    assert graph.features.array().tolist() == [[0.5, 1], [1.5, 2], [2.5, 3]]  # type: ignore[union-attr]
    assert f"x.parquet: column {name!r}, an index, was left out" in describe(graph).remarks()
    write(path, **{"f0": [0.5, 1.5, 2.5], name: [2, 0, 1]})
    with pytest.raises(GraphError, match=r"not those of the vertices in their order .*sort the rows"):
        load_source(tmp_path / "e.txt", features=path)


def test_rows_are_compared_with_the_ids_that_are_given(tmp_path: Path) -> None:
    """Fails if a table in the order of the ids is refused, or one in another order is taken."""
    (tmp_path / "e.csv").write_text("source,target\nann,bob\nbob,eve\n")
    ids = np.array(["eve", "ann", "bob"])
    path = write(tmp_path / "x.parquet", name_id=["eve", "ann", "bob"], f=[1.0, 2.0, 3.0])
    assert load_source(tmp_path / "e.csv", ids=ids, features=path).num_features == 1
    write(path, name_id=["ann", "bob", "eve"], f=[1.0, 2.0, 3.0])
    with pytest.raises(GraphError, match="column 'name_id' is named as an index or id"):
        load_source(tmp_path / "e.csv", ids=ids, features=path)


def test_the_index_that_pandas_names(tmp_path: Path) -> None:
    """Fails if an index with a name of its own becomes a feature, or one behind edges a weight."""
    pandas = pytest.importorskip("pandas")
    (tmp_path / "e.txt").write_text(EDGES)
    frame = pandas.DataFrame({"f": [1.0, 2.0, 3.0]}, index=pandas.Index([0, 1, 2], name="rank"))
    frame.to_parquet(tmp_path / "x.parquet", index=True)
    assert load_source(tmp_path / "e.txt", features=tmp_path / "x.parquet").num_features == 1
    edges = pandas.DataFrame({"src": [0, 1, 2, 9], "dst": [1, 2, 0, 9]})
    edges[edges.src < 9].sort_values("dst").to_parquet(tmp_path / "e.parquet")
    graph = load_source(tmp_path / "e.parquet")
    assert (graph.num_edges, graph.adj.values) == (3, None)
    assert "column '__index_level_0__', an index, was left out" in describe(graph).remarks()


@pytest.mark.parametrize("name", ["label", "Class", "target", "train_mask", "y", "fold", "is_train", "category"])
def test_labels_among_features(tmp_path: Path, name: str) -> None:
    """Fails if what is to be predicted is learnt from, in silence; y beside x is a coordinate."""
    (tmp_path / "e.txt").write_text(EDGES)
    path = write(tmp_path / "x.parquet", **{"f": [1.0, 2.0, 3.0], name: [0, 1, 0]})
    with pytest.raises(GraphError, match="named as a label or a split, which is no feature"):
        load_source(tmp_path / "e.txt", features=path)
    write(path, x=[1.0, 2.0, 3.0], y=[0.5, 1.0, 0.0])
    assert load_source(tmp_path / "e.txt", features=path).num_features == 2


def test_other_columns_keep_their_type(tmp_path: Path) -> None:
    """Fails if labels, ids or types of a table become float32, or two columns one."""
    edges = write(tmp_path / "e.parquet", src=["ann", "bob"], dst=["bob", "eve"])
    names = write(tmp_path / "ids.parquet", id=["eve", "ann", "bob"])
    labels = write(tmp_path / "y.parquet", label=[2**24 + 1, 0, 2], __index_level_0__=[0, 1, 2])
    kinds = write(tmp_path / "t.parquet", type=[1, 0])
    graph = load_source(edges, ids=names, labels=labels, edge_types=kinds, num_classes=2**24 + 2)
    assert ids_of(graph).tolist() == ["eve", "ann", "bob"]
    assert graph.labels is not None
    assert graph.labels.array().tolist() == [2**24 + 1, 0, 2]
    assert graph.num_relations == 2
    with pytest.raises(GraphError, match="has the columns 'a', 'b', expected one"):
        load_source(edges, ids=names, labels=write(tmp_path / "two.parquet", a=[0, 1, 2], b=[0, 1, 2]))


def test_names_in_tables(tmp_path: Path) -> None:
    """Fails if names of a table are refused where ids are names, or an empty one, or numbers beside names, pass."""
    edges = write(tmp_path / "e.parquet", src=["0501", "501"], dst=["501", "7"])
    graph = load_source(edges, ids="edges")
    assert ids_of(graph).tolist() == ["0501", "501", "7"]
    assert graph.num_edges == 2
    packed = write(tmp_path / "d.parquet", src=pa.array(["a", "b", "a"]).dictionary_encode(), dst=["b", "c", "c"])
    assert ids_of(load_source(packed, ids="edges")).tolist() == ["a", "b", "c"]
    with pytest.raises(GraphError, match=r"must hold whole numbers.*--ids edges"):
        load_source(edges)
    for column in (["", "b"], [b"a", b"b"], [1, 2]):
        with pytest.raises(GraphError, match=r"must hold names|must both hold text"):
            load_source(write(tmp_path / "b.parquet", src=column, dst=["b", "c"]), ids="edges")


@pytest.mark.parametrize("name", ["x.pt", "x.pth"])
@pytest.mark.parametrize("part", ["features", "labels", "ids", "train"])
def test_tensors_that_torch_saved(tmp_path: Path, name: str, part: str) -> None:
    """Fails if a tensor's file is taken for data, unpickled, or refused without the way out."""
    (tmp_path / "e.txt").write_text(EDGES)
    torch.save(torch.ones(3, 2), tmp_path / name)
    given: dict[str, Any] = {"splits": {part: tmp_path / name}} if part == "train" else {part: tmp_path / name}
    with pytest.raises(GraphError, match=r"never unpickled.*numpy.save\('x.npy', tensor.numpy\(\)\)"):
        load_source(tmp_path / "e.txt", **given)
    (tmp_path / name).rename(tmp_path / "renamed.npy")
    with pytest.raises(GraphError, match=r"cannot load .*renamed.npy"):
        load_source(tmp_path / "e.txt", labels=tmp_path / "renamed.npy")


@pytest.mark.parametrize("source", ["e.txt", "e.npz", "data.pt", "store"])
def test_a_task_with_every_source(tmp_path: Path, source: str) -> None:
    """Fails if a task is taken for a file, or does not reach the labels of a source."""
    edges, labels = np.array([[0, 1, 2], [1, 2, 0]]), np.array([2, -1, 1])
    np.save(tmp_path / "y.npy", labels)
    (tmp_path / "e.txt").write_text(EDGES)
    np.savez(tmp_path / "e.npz", edge_index=edges)
    torch.save(Data(edge_index=torch.tensor(edges), num_nodes=3), tmp_path / "data.pt")
    second = 5 if source == "store" else -1  # of classes in a store, -1 is unknown, which is no number
    write_store(load_source(tmp_path / "e.txt", labels=np.array([2, 5, 1]), num_classes=6), tmp_path / "store")
    given = {} if source == "store" else {"labels": tmp_path / "y.npy"}
    graph = load_source(tmp_path / source, task="numbers", **given)
    assert graph.labels is not None
    assert graph.task == "numbers"
    np.testing.assert_array_equal(graph.labels.array(), [[2], [second], [1]])
    with pytest.raises(GraphError, match="several labels a vertex must be 0, 1"):
        load_source(tmp_path / source, task="labels", **given)


def test_a_graph_without_labels_has_no_task(tmp_path: Path) -> None:
    """Fails if a task of a store without labels is dropped in silence."""
    write_store(from_arrays(edges=np.array([[0, 1], [1, 0]])), tmp_path / "store")
    with pytest.raises(GraphError, match="has no labels"):
        load_source(tmp_path / "store", task="numbers")
