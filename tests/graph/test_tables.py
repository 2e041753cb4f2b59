"""Parquet tables and saved PyG Data: the graph of the arrays, and one line for whatever is no such file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from mggcn.errors import GraphError
from mggcn.graph.convert import from_arrays
from mggcn.graph.layout import graph_sha256
from mggcn.graph.objects import from_object
from mggcn.graph.options import GraphOptions
from mggcn.graph.sources import load_source
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
