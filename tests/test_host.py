"""The folder in which commands keep what they find out."""

from __future__ import annotations

import importlib.util
import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from mggcn.backend.cpu.backend import CpuBackend
from mggcn.host import PeakMemory, again_and_again, compiles_modules, mapped_bytes, process_bytes, user_cache
from tests.cli.runs import run_main


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"XDG_CACHE_HOME": "/caches", "HOME": "/home/me"}, "/caches/mggcn"),
        ({"XDG_CACHE_HOME": "", "HOME": "/home/me"}, "/home/me/.cache/mggcn"),
        ({"XDG_CACHE_HOME": "caches", "HOME": "/home/me"}, "/home/me/.cache/mggcn"),
    ],
)
def test_the_folder_of_the_user(environment: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the environment is not heard, or a folder depends on where a command runs."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert user_cache() == Path(folder)


@pytest.mark.parametrize("unknown", [True, False])
def test_a_run_without_a_cache_folder(unknown: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a user without a home, or a cache folder that cannot be made, cannot train."""
    if unknown:

        def nobody() -> Path:
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", nobody)
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/caches")
    store = tmp_path / "g"
    assert run_main("generate", "community", store, "--vertices", 120, "--edges", 600, "--classes", 3) == 0
    run = ["--ranks", 2, "--transport", "threads", "--threads", 1, "--strategy", "delayed"]
    assert run_main("train", store, *run, "--epochs", 2, "--out", tmp_path / "run", "--quiet") == 0
    assert run_main("predict", tmp_path / "run") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["g", "run"]


@pytest.mark.parametrize("name", ["VmHWM", "VmRSS"])
@pytest.mark.parametrize("proc", ["none", "no status", "other names", "as it is"])
def test_the_memory_of_this_process_is_known_without_proc(tmp_path: Path, name: str, proc: str) -> None:
    """Fails if a machine or container without /proc, or with another one, ends a run in an error."""
    if proc != "none":
        (tmp_path / "proc" / "self").mkdir(parents=True)
    if proc == "other names":
        (tmp_path / "proc" / "self" / "status").write_text("Name:\tx\n")
    found = process_bytes(name, Path("/") if proc == "as it is" else tmp_path)
    assert 10 << 20 < found < 1 << 40


def test_arrays_mapped_from_files_count_by_their_resident_pages(tmp_path: Path) -> None:
    """Fails if a page of an array does not count, or one that nobody has read does."""
    np.save(tmp_path / "array.npy", np.zeros(1 << 20))
    before = mapped_bytes()
    array = np.load(tmp_path / "array.npy", mmap_mode="r")
    unread = mapped_bytes() - before
    assert float(array.sum()) == 0
    assert mapped_bytes() - before >= 8 << 20 > unread
    assert mapped_bytes(tmp_path) == 0


def test_pages_of_files_are_the_process_s_own_once_they_are_changed(tmp_path: Path) -> None:
    """Fails if a page of a library counts as memory of the process, or one that the loader has changed does not."""
    size, others = 64 << 20, 4 << 20
    (tmp_path / "library.so").write_bytes(bytes(size))
    with (tmp_path / "library.so").open("rb") as file:
        pages = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    before = mapped_bytes()
    assert sum(pages[:: mmap.PAGESIZE]) == 0
    assert mapped_bytes() - before >= size
    pages[: size // 2] = b"1" * (size // 2)
    held = np.ones(size // 8)
    assert abs(mapped_bytes() - before - size // 2) < others, f"{held.nbytes} bytes of no file"


def test_a_peak_is_remembered_when_files_are_read_after_it(tmp_path: Path) -> None:
    """Fails if pages that a run reads after its peak are subtracted from it."""
    size = 256 << 20
    backend, held = CpuBackend(torch.float32, 1), np.ones(size // 8)
    peak = backend.peak_bytes()
    del held
    np.save(tmp_path / "array.npy", np.zeros(size // 8))
    array = np.load(tmp_path / "array.npy", mmap_mode="r")
    assert float(array.sum()) == 0
    assert peak > size
    assert process_bytes("VmHWM") - mapped_bytes() < peak - size // 2
    assert backend.peak_bytes() == peak


COME_AND_GO = """
import mmap, sys, time
import numpy as np
from mggcn.host import PeakMemory, again_and_again, mapped_bytes, process_bytes

size, memory, glances = int(sys.argv[2]), PeakMemory(), []

def glance():
    memory.glance()
    glances.append(0)

def until_glanced():
    after = len(glances) + 2  # the next one may have begun
    while len(glances) < after:
        time.sleep(0.002)

with open(sys.argv[1], "rb") as file:
    pages = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
before = memory.look()
with again_and_again(glance, 0.002):
    for _ in range(4):
        assert not any(pages[::mmap.PAGESIZE])
        until_glanced()
        pages.madvise(mmap.MADV_DONTNEED)  # as the system takes them back
print(process_bytes("VmHWM") - mapped_bytes() - before, memory.look() - before)
with again_and_again(glance, 0.002):
    held = np.ones(size // 16)
    until_glanced()
    del held
print(memory.look() - before)
"""


def test_pages_that_came_and_went_are_no_peak(tmp_path: Path) -> None:
    """Fails if pages of a file that were resident at the peak, and are no more, count as memory of the process, or memory
    that it held below that peak does not.
    """
    size, others = 128 << 20, 16 << 20
    with (tmp_path / "edges").open("wb") as file:
        file.truncate(size)
    command = [sys.executable, "-c", COME_AND_GO, str(tmp_path / "edges"), str(size)]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split()
    highest, without, held = map(int, told)
    assert highest > size - others
    assert without < others
    assert size // 2 - others < held < size // 2 + others


def test_pages_that_come_while_maps_are_read_are_no_peak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if pages of a file that came between the readings of two files of /proc count as memory of the process."""
    status, own, read = tmp_path / "proc/self/status", 50 << 10, list[int]()
    status.parent.mkdir(parents=True)

    def told(files: int) -> None:
        held = own + files
        status.write_text(f"VmHWM:\t{held} kB\nVmRSS:\t{held} kB\nRssFile:\t{files} kB\n")

    def coming(root: Path) -> int:
        read.append(len(read))
        mapped = 1000 * read[-1] << 10
        told(1000 * min(read[-1] + 1, 2))  # two readings long more come
        return mapped

    monkeypatch.setattr("mggcn.host.mapped_bytes", coming)
    told(0)
    assert PeakMemory(tmp_path).look() == own << 10
    assert len(read) == 3


def test_what_is_repeated_ends_with_its_block() -> None:
    """Fails if a thread outlives what it watches, or never runs."""
    calls = list[int]()
    with again_and_again(lambda: calls.append(0), 0.001):
        time.sleep(0.05)
    count = len(calls)
    assert count > 2
    time.sleep(0.01)
    assert len(calls) == count


KEEPS = """
import sys, threading
from mggcn.host import process_bytes, release_freed, settle_malloc
import numpy as np
def transients():
    for size in (24, 20):  # the second one comes from a heap that the first one's size has opened to it
        array = np.ones(size << 20, np.uint8)
        small = bytes(10)
        del array
if "settle" in sys.argv:
    settle_malloc()
before = process_bytes("VmRSS")
thread = threading.Thread(target=transients)
thread.start() if "thread" in sys.argv else transients()
if "thread" in sys.argv:
    thread.join()
if "release" in sys.argv:
    release_freed()
print(process_bytes("VmRSS") - before >> 20)
"""


@pytest.mark.parametrize("how", ["settle", "release", "settle thread"])
def test_malloc_keeps_nothing_of_what_set_up_freed(how: str) -> None:
    """Fails if chunks of some MiB that were freed stay with the process, as glibc has it (mallopt)."""

    def kept(*words: str) -> int:
        # The environment of a test may settle malloc itself.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
        command = [sys.executable, "-c", KEEPS, *words]
        return int(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)

    if kept(*(["thread"] if "thread" in how else [])) < 16:
        pytest.skip("this C library gives freed memory back by itself")
    assert kept(*how.split()) < 4


def test_modules_that_this_process_compiles_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a first start is not told from later ones, by which a plan says what the runtime takes."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "never_compiled.py").write_text("")
    assert compiles_modules("never_compiled")
    cached = Path(importlib.util.cache_from_source(str(tmp_path / "never_compiled.py")))
    cached.parent.mkdir()
    cached.write_bytes(b"")
    assert compiles_modules("never_compiled")
    os.utime(cached, (1e9, 1e9))
    assert not compiles_modules("never_compiled")
    assert not compiles_modules("no_such_module_anywhere")
