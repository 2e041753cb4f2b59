from __future__ import annotations

import ctypes
import io
import mmap
import os
import re
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mggcn.errors import StoreError
from mggcn.graph import file_rows
from mggcn.graph.file_rows import FileRows, read_ahead
from mggcn.host import MachineMemory


@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (7, 3), (0, 3), (3, 0)])
@pytest.mark.parametrize("dtype", [np.int64, np.float32, np.bool_])
def test_reads_what_numpy_saved(tmp_path: Path, shape: tuple[int, ...], dtype: type) -> None:
    array = np.random.default_rng(17).integers(0, 2, shape).astype(dtype)
    np.save(tmp_path / "a.npy", array)
    rows = FileRows.open(tmp_path / "a.npy")
    assert (rows.shape, rows.dtype) == (array.shape, array.dtype)
    np.testing.assert_array_equal(rows.array(), array)
    for start, stop in [(0, shape[0]), (1, 3), (2, 2), (5, 99), (4, 2)]:
        part = rows.read(start, stop)
        np.testing.assert_array_equal(part, array[start:stop])
        assert part.flags.writeable
        assert part.flags.c_contiguous


def test_vector_as_one_row(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([True, False, True]))
    rows = FileRows.open(tmp_path / "a.npy", one_row=True)
    assert rows.shape == (1, 3)
    np.testing.assert_array_equal(rows.read(0, 1), [[True, False, True]])
    np.testing.assert_array_equal(rows.array(), [[True, False, True]])


def saved(array: np.ndarray, version: tuple[int, int] | None = None) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version=version)
    return file.getvalue()


def test_second_format_version(tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(saved(np.arange(4), (2, 0)))
    np.testing.assert_array_equal(FileRows.open(tmp_path / "a.npy").read(1, 3), [1, 2])


PLAIN = saved(np.arange(100))


def with_header(descr: str, shape: str) -> bytes:
    """PLAIN with another header of the same length."""
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    return PLAIN[:10] + header.ljust(117) + PLAIN[127:]


HOSTILE = {
    "empty": b"",
    "text": b"0 1\n1 2\n",
    "truncated data": PLAIN[:-1],
    "trailing data": PLAIN + b"\0",
    "truncated header": PLAIN[:40],
    "pickled": saved(np.array([{}], dtype=object)),
    "structured": saved(np.zeros(3, dtype=[("a", "i4")])),
    "by columns": saved(np.asfortranarray(np.ones((3, 2)))),
    "scalar": saved(np.array(3.0)),
    "bomb": with_header("'<i8'", "(1000000000000,)"),
    "overflow": with_header("'<i8'", "(2305843009213694052,)"),
    "power": with_header("'<i8'", "(10**99999999,)"),
    "negative": with_header("'<i8'", "(-100,)"),
    "code": with_header("exit()", "(100,)"),
    "unknown type": with_header("'<q9'", "(100,)"),
    "nested": with_header("'<i8'", "(" * 50 + ")" * 50),
    "third version": PLAIN[:6] + b"\x03" + PLAIN[7:],
}


def test_with_header_changes_nothing_else() -> None:
    assert with_header("'<i8'", "(100,)") == PLAIN


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused(tmp_path: Path, case: str) -> None:
    (tmp_path / "a.npy").write_bytes(HOSTILE[case])
    with pytest.raises(StoreError, match=r"a\.npy"):
        FileRows.open(tmp_path / "a.npy")


def test_missing_and_shrinking_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="No such file"):
        FileRows.open(tmp_path / "a.npy")
    (tmp_path / "a.npy").write_bytes(PLAIN)
    rows = FileRows.open(tmp_path / "a.npy")
    (tmp_path / "a.npy").write_bytes(PLAIN[:-8])
    with pytest.raises(StoreError, match=r"a\.npy was replaced or changed since it was opened"):
        rows.read(0, 100)
    with pytest.raises(StoreError, match="became shorter"):
        replace(rows, opened=None).read(0, 100)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux alone says how a map is read ahead")
@pytest.mark.parametrize("available", [1 << 20, 1 << 30])
def test_what_memory_cannot_hold_is_not_read_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, available: int
) -> None:
    """Fails if a row of a file larger than memory brings the 128 KiB around it, or one that fits is read page by page."""
    np.save(tmp_path / "x.npy", np.arange(1 << 20, dtype=np.int32).reshape(-1, 64))
    monkeypatch.setattr(file_rows, "machine_memory", lambda: MachineMemory(available, available, None))
    rows = FileRows.open(tmp_path / "x.npy").in_place()
    assert rows.take(np.array([5, 3])).tolist() == [list(range(320, 384)), list(range(192, 256))]
    areas = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    (own,) = (area for area in areas if str(tmp_path / "x.npy") in area)
    (flags,) = re.findall(r"^VmFlags: (.*)$", own, re.MULTILINE)
    assert ("rr" in flags.split()) == (available < 4 << 20)


def resident(array: np.ndarray) -> float:
    """Share of an array's pages that are in memory."""
    first = array.ctypes.data - array.ctypes.data % mmap.PAGESIZE
    pages = -(-(array.ctypes.data + array.nbytes - first) // mmap.PAGESIZE)
    states = (ctypes.c_ubyte * pages)()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(first), ctypes.c_size_t(pages * mmap.PAGESIZE), states) == 0
    return float(np.mean(np.frombuffer(states, np.uint8) & 1))


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone says which pages of a file are in memory")
def test_rows_that_are_read_in_order_are_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if what evaluates over a file larger than memory waits for each page, or reads another part of it."""
    np.save(tmp_path / "x.npy", np.zeros((1 << 14, 256), np.float32))
    with (tmp_path / "x.npy").open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    monkeypatch.setattr(file_rows, "machine_memory", lambda: MachineMemory(1 << 20, 1 << 20, None))
    array = FileRows.open(tmp_path / "x.npy").in_place().array()
    if resident(array) > 0.1:
        pytest.skip("this file system keeps files in memory")
    read_ahead(array[1:], 4095, 8191)  # rows 4096 to 8191
    for _ in range(100):
        if resident(array[4096:8192]) == 1:
            break
        time.sleep(0.05)
    assert resident(array[4096:8192]) == 1
    assert resident(array[:4000]) < 0.1
    assert resident(array[9000:]) < 0.1
    read_ahead(array, 5, 5)
    read_ahead(np.zeros((3, 2)), 0, 3)
