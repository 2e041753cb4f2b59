from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mggcn.errors import GraphError, StoreError
from mggcn.graph import digests, trusted
from mggcn.graph import store as store_module
from mggcn.graph.convert import from_arrays
from mggcn.graph.csr import Graph
from mggcn.graph.digests import BLOCK, BLOCKS_FILE, CheckedFile, Hasher, digests_meta
from mggcn.graph.file_rows import FileRows
from mggcn.graph.layout import graph_arrays
from mggcn.graph.store import open_store
from mggcn.graph.store_write import write_store
from mggcn.graph.trusted import record_of

ROWS = 5_000
WIDTH = 256
"""Floats of a row: the features take five blocks, the last one not whole."""


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7])
def test_a_stream_in_any_pieces_has_the_digests_of_its_blocks(size: int) -> None:
    """Fails if a piece that ends within a block, or spans several, is lost or shifts a block."""
    content = np.random.default_rng(size).bytes(size)
    for step in (1 << 19, 700_001, 4 * BLOCK):
        hasher = Hasher()
        for start in range(0, size, step):
            hasher.update(content[start : start + step])
        found = hasher.finish()
        assert found.sha256 == hashlib.sha256(content).hexdigest()
        blocks = [content[start : start + BLOCK] for start in range(0, size, BLOCK)]
        assert found.blocks == b"".join(hashlib.sha256(block).digest() for block in blocks)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return from_arrays(edges=np.array([[0, 1], [1, 0]]), features=np.random.default_rng(8).random((ROWS, WIDTH), "f4"))


@pytest.fixture
def store(tmp_path: Path, graph: Graph) -> Path:
    write_store(graph, tmp_path / "store")
    return tmp_path / "store"


def features(store: Path) -> FileRows:
    rows = open_store(store).features
    assert isinstance(rows, FileRows)
    return rows


def flip(path: Path, place: int, bit: int = 3) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1 << bit]))


@pytest.mark.parametrize("threaded", [1, 4, 100])
def test_ranges_are_read_as_they_are(store: Path, graph: Graph, monkeypatch: pytest.MonkeyPatch, threaded: int) -> None:
    """Fails if a range that begins or ends within a block, or is read again, has other bytes; with and without threads."""
    monkeypatch.setattr(digests, "THREADED", threaded)
    rows, whole = features(store), graph.features.array()  # type: ignore[union-attr]
    rng = np.random.default_rng(271)
    for start, stop in [(4990, 5000), (0, 1), (1023, 1025), *np.sort(rng.integers(0, ROWS, (20, 2))), (0, ROWS)]:
        np.testing.assert_array_equal(rows.read(int(start), int(stop)), whole[start:stop])
    np.testing.assert_array_equal(rows.array(), whole)


def test_a_flipped_bit_is_found_by_the_first_read_of_its_block_alone(store: Path) -> None:
    """Fails if a damaged block is read in silence, by rows or as a map, or blocks are read that nobody asked for."""
    rng = np.random.default_rng(3)
    for place in rng.integers(0, 4 * ROWS * WIDTH, 8):
        flip(store / "features.npy", 128 + int(place))
        block, row = (128 + int(place)) // BLOCK, int(place) // (4 * WIDTH)
        if block == 0:  # that of the header, compared when the store opens
            with pytest.raises(StoreError, match=r"features\.npy is damaged: bytes 0 to"):
                open_store(store)
        else:
            with pytest.raises(StoreError, match=f"damaged: bytes {block * BLOCK} to"):
                features(store).read(row, row + 1)
            with pytest.raises(StoreError, match="is damaged"):
                features(store).read(0, ROWS)
            with pytest.raises(StoreError, match="is damaged"):
                features(store).array()
            away = (row + ROWS // 2) % ROWS
            assert features(store).read(away, away + 1).shape == (1, WIDTH)
        flip(store / "features.npy", 128 + int(place))
    assert features(store).read(0, ROWS).shape == (ROWS, WIDTH)


def test_every_byte_of_a_header_is_checked(store: Path) -> None:
    """Fails if a header of a small or of a large file can change in a byte."""
    for name in ("features.npy", "indices.npy"):
        for place in range(128):
            flip(store / name, place)
            with pytest.raises((StoreError, GraphError), match=name.removesuffix(".npy")):
                open_store(store)
            flip(store / name, place)
    open_store(store)


def test_the_digests_of_blocks_are_checked(store: Path) -> None:
    """Fails if `blocks.sha256` can be damaged, cut or missing."""
    path = store / BLOCKS_FILE
    content = path.read_bytes()
    for changed in (content[:-1], content + b"\0", b"\0" * len(content)):
        path.write_bytes(changed)
        with pytest.raises(StoreError, match=r"blocks\.sha256 differs"):
            open_store(store)
    path.unlink()
    with pytest.raises(StoreError, match=r"blocks\.sha256 cannot be read"):
        open_store(store)


def test_stores_of_older_versions_are_compared_as_whole_files(store: Path) -> None:
    """Fails if a store with digests of files alone does not open, or is read where it is damaged."""
    meta = json.loads((store / "meta.json").read_text())
    del meta["blocks"], meta["meta_sha256"]
    (store / "meta.json").write_text(json.dumps(meta))
    (store / BLOCKS_FILE).unlink()
    flip(store / "features.npy", 4 * BLOCK)
    with pytest.raises(StoreError, match="is damaged"):
        features(store).read(0, 1)
    flip(store / "features.npy", 4 * BLOCK)
    assert features(store).read(0, 1).shape == (1, WIDTH)


def compared(store: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Read everything; return the number of blocks that were compared."""
    count = 0
    real = CheckedFile._compare

    def counted(self: CheckedFile, found: Any) -> None:
        nonlocal count
        count += len(found)
        real(self, found)

    with monkeypatch.context() as patch:
        patch.setattr(CheckedFile, "_compare", counted)
        for rows in graph_arrays(open_store(store)).values():
            rows.read(0, rows.shape[0])
    return count


def test_unchanged_files_are_compared_once(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a store is compared at every start, a changed file or record is trusted, or a fresh one is recorded."""
    assert [compared(store, monkeypatch), compared(store, monkeypatch)] == [7, 7]
    monkeypatch.setattr(trusted, "SETTLED_NS", 0)
    assert [compared(store, monkeypatch), compared(store, monkeypatch)] == [7, 0]
    record = record_of(store)
    content = record.read_bytes()
    for place in range(0, len(content), 7):
        flip(record, place, 2)
        assert compared(store, monkeypatch) in (0, 7)
        record.write_bytes(content)
    flip(store / "features.npy", 2 * BLOCK)
    os.utime(store / "features.npy", ns=(10**18, 10**18))
    with pytest.raises(StoreError, match="is damaged"):
        compared(store, monkeypatch)
    flip(store / "features.npy", 2 * BLOCK)
    assert compared(store, monkeypatch) == 5
    record.unlink()
    open_store(store, verify=True)
    assert compared(store, monkeypatch) == 0


def assert_refused(graph: Graph) -> None:
    for rows in graph_arrays(graph).values():
        for read in (lambda rows=rows: rows.read(0, 1), rows.array):
            with pytest.raises(StoreError, match=r"store/\w+\.npy was replaced or changed .* start again"):
                read()


@pytest.mark.parametrize("known", ["seen", "trusted"])
def test_a_store_that_is_replaced_while_it_is_read_is_refused(
    store: Path, graph: Graph, monkeypatch: pytest.MonkeyPatch, known: str
) -> None:
    """Fails if what needs no comparison any more is read from another store of the same name and sizes."""
    if known == "trusted":
        monkeypatch.setattr(trusted, "SETTLED_NS", 0)
        compared(store, monkeypatch)
    before = open_store(store)
    for rows in graph_arrays(before).values():
        rows.read(0, rows.shape[0])
    write_store(graph, store, overwrite=True)
    assert_refused(before)
    after = open_store(store)
    shutil.rmtree(store)
    assert_refused(after)


def test_a_file_that_changes_after_it_was_read_is_refused(store: Path) -> None:
    """Fails if a block that was compared is read again after somebody wrote into it."""
    rows = features(store)
    rows.read(0, ROWS)
    flip(store / "features.npy", 3 * BLOCK)
    os.utime(store / "features.npy", ns=(10**18, 10**18))
    with pytest.raises(StoreError, match=r"features\.npy was replaced or changed .* start again"):
        rows.read(0, 1)


def test_a_store_that_is_replaced_while_it_is_opened_is_refused(
    store: Path, graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if files of one store go with the meta.json, or the verdict, of another."""
    real = store_module._compare_checksums

    def then_replaced(*arguments: Any) -> None:
        real(*arguments)
        write_store(graph, store, overwrite=True)

    monkeypatch.setattr(store_module, "_compare_checksums", then_replaced)
    with pytest.raises(StoreError, match="store was replaced while it was opened; start again"):
        open_store(store, verify=True)


def test_a_store_that_cannot_be_written_is_read(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a cache folder without rights or room for the record is an error, or litter stays."""
    monkeypatch.setattr(trusted, "SETTLED_NS", 0)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", full)
    assert compared(store, monkeypatch) == 7
    assert not list(store.glob(".*"))
    assert not list(record_of(store).parent.glob(f".{record_of(store).name}*"))


def test_records_of_stores_do_not_pile_up(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the record of every store that ever was stays, or the latest goes."""
    monkeypatch.setattr(trusted, "SETTLED_NS", 0)
    monkeypatch.setattr(trusted, "MOST_RECORDS", 3)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for number in range(5):
        shutil.copytree(store, tmp_path / str(number))
        open_store(tmp_path / str(number), verify=True)
    kept = {path.name for path in (tmp_path / "cache" / "mggcn").glob("trusted-*")}
    assert record_of(tmp_path / "4").name in kept
    assert len(kept) == 3


ODD = [{}, {"nbytes": BLOCK}, {"nbytes": 0, "counts": {}}, {"nbytes": "1", "counts": {}}, [], "x", 7]


@pytest.mark.parametrize("blocks", [*ODD, {"nbytes": BLOCK, "counts": {"features.npy": 1}}])
def test_odd_digests_in_meta_json_are_refused(store: Path, blocks: object) -> None:
    """Fails if what somebody wrote into meta.json ends in a traceback."""
    meta = json.loads((store / "meta.json").read_text())
    if isinstance(blocks, dict):
        blocks = blocks | {"sha256": meta["blocks"]["sha256"]}
    meta["blocks"] = blocks
    del meta["meta_sha256"]
    (store / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(StoreError, match="digests"):
        open_store(store)


def test_small_files_need_no_digests_of_blocks() -> None:
    """Fails if a store of small files carries a list that says nothing more."""
    hasher = Hasher()
    hasher.update(b"x" * 100)
    meta, content = digests_meta({"a.npy": hasher.finish()})
    assert "blocks" not in meta
    assert content == b""
