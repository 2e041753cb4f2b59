"""Archives and folders whose arrays are larger than the memory that a room allows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from mggcn.api.load import load_source
from mggcn.errors import GraphError, StoreError
from mggcn.graph.build.room import Room
from mggcn.graph.csr import Graph
from mggcn.graph.file_rows import FileRows
from mggcn.graph.options import GraphOptions
from mggcn.graph.sources import archive
from mggcn.graph.sources.archive import large_member
from mggcn.graph.sources.npz import read_npz
from mggcn.graph.sources.ogb import read_ogb
from tests.graph.sources.test_ogb import SPLIT, binary_layout, text_layout, write_table

N = 9
ENDS = np.random.default_rng(61).integers(0, N, (2, 40))
FEATURES = np.random.default_rng(62).random((N, 3), np.float32)
ONCE = np.unique(ENDS, axis=1)
MATRIX = sp.csr_array((1.0 + ONCE.sum(0) % 3, (ONCE[0], ONCE[1])), shape=(N, N))


def edge_layout(path: Path) -> None:
    np.savez_compressed(path, edge_index=ENDS, edge_type=ENDS.sum(0) % 2, x=FEATURES)


def own_layout(path: Path) -> None:
    arrays = {"indptr": MATRIX.indptr, "indices": MATRIX.indices, "values": MATRIX.data.astype(np.float32)}
    np.savez(path, **arrays, features=FEATURES)


LAYOUTS: dict[str, Callable[[Path], object]] = {
    "edges": edge_layout,
    "own": own_layout,
    "scipy": lambda path: sp.save_npz(path, MATRIX),
    "csc": lambda path: sp.save_npz(path, MATRIX.tocsc()),
}


def ogb(folder: Path, write: Callable[[Path], None]) -> Path:
    write(folder)
    for name, ids in SPLIT.items():
        write_table(folder / "split" / "time" / f"{name}.csv.gz", ids)
    return folder


def content(graph: Graph) -> dict[str, Any]:
    rows = {f"adj {name}": getattr(graph.adj, name) for name in ("indptr", "indices", "values", "types")}
    rows |= {"features": graph.features, "labels": graph.labels, **graph.splits}
    return {name: found.array() for name, found in rows.items() if found is not None}


def assert_same(source: Path, room: Room) -> None:
    for options in (GraphOptions(), GraphOptions(symmetrize=True, duplicates="merge")):
        in_memory = content(load_source(source, options=options))
        in_files = content(load_source(source, options=options, room=room))
        assert in_memory.keys() == in_files.keys()
        for name, array in in_memory.items():
            np.testing.assert_array_equal(in_files[name], array, name)


@pytest.fixture
def room(tmp_path: Path) -> Room:
    return Room(tmp_path / "work", 64)


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_archive_in_files_gives_the_same(tmp_path: Path, room: Room, name: str) -> None:
    """Fails if an edge, weight, type or feature is lost on the way through files."""
    LAYOUTS[name](tmp_path / "graph.npz")
    assert_same(tmp_path / "graph.npz", room)


@pytest.mark.parametrize("write", [text_layout, binary_layout])
def test_a_folder_of_ogb_in_files_gives_the_same(
    tmp_path: Path, room: Room, write: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if blocks of rows are mixed up, or features and edges of a large folder are held."""
    monkeypatch.setattr("mggcn.graph.sources.ogb.ROWS_AT_ONCE", 2)
    folder = ogb(tmp_path / "ogb", write)
    assert_same(folder, room)
    assert isinstance(read_ogb(folder, room)["features"], FileRows)
    assert not isinstance(read_ogb(folder, room)["edges"], np.ndarray)


def test_large_arrays_of_an_archive_are_not_held(tmp_path: Path, room: Room) -> None:
    """Fails if unpacking is left out."""
    edge_layout(tmp_path / "edges.npz")
    found = read_npz(tmp_path / "edges.npz", room)
    assert isinstance(found["features"], FileRows)
    assert not isinstance(found["edges"], np.ndarray)
    assert isinstance(read_npz(tmp_path / "edges.npz", Room(tmp_path / "work", 1 << 20))["edges"], np.ndarray)


def test_arrays_that_no_file_can_stand_for(tmp_path: Path, room: Room) -> None:
    """Fails if an array by columns, pickled or of another kind is read by ranges."""
    odd = {"columns": np.asfortranarray(FEATURES), "pickled": np.array([{}] * 40, object), "text": np.array(["a"] * 40)}
    np.savez(tmp_path / "odd.npz", **odd, sound=FEATURES)
    assert all(large_member(tmp_path / "odd.npz", name, room) is None for name in (*odd, "missing"))
    assert large_member(tmp_path / "odd.npz", "sound", room) is not None


def test_damage_and_a_full_disk_are_named(tmp_path: Path, room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a flipped bit is unpacked, or a disk fills without a word of what was needed."""
    path = tmp_path / "graph.npz"
    own_layout(path)
    monkeypatch.setattr(archive, "free_bytes", lambda _: 10)
    with pytest.raises(StoreError, match=r"unpacking indices of .* needs .* GiB are free"):
        load_source(path, room=room)
    monkeypatch.undo()
    damaged = path.read_bytes().replace(FEATURES.tobytes(), b"\1" + FEATURES.tobytes()[1:])
    path.write_bytes(damaged)
    with pytest.raises(GraphError, match="Bad CRC"):
        load_source(path, room=room)
