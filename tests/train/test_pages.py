"""Page files: what is read is what was written, in order, counted, and nothing is left behind."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import shutil
import signal
import subprocess
import threading
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mggcn.backend.cpu.memory import allocate
from mggcn.errors import PlanError, TrainError
from mggcn.memory.arena import ITEM_BYTES, BufferSpec, Placement
from mggcn.memory.pages import PAGE_BYTES, PagePlan, PageSpec, panel_bytes, plan_pages, window_bytes
from mggcn.train import pages
from mggcn.train.pages import PageFile, mapped_arrays
from mggcn.train.runtime import DTYPES, buffer_view

SHAPES = [(64, 16), (1, 1), (1000, 100), (321, 33), (130, 1)]


@contextlib.contextmanager
def opened(folder: Path, plan: PagePlan) -> Iterator[PageFile]:
    with contextlib.closing(PageFile(folder, plan, allocate(plan.staging_bytes))) as file:
        yield file


def one(rows: int, cols: int, dtype: str = "fp32", panel_cols: int | None = None) -> PagePlan:
    return plan_pages([(PageSpec("h", rows, cols, dtype, panel_cols), 0, 0)])


def matrix(rows: int, cols: int, dtype: str, *, shift: int = 0, ld: int | None = None) -> Tensor:
    """A matrix of the arena, `shift` bytes behind a page, with the stride of buffers or another."""
    if ld is None:
        spec = BufferSpec("h", rows, cols, dtype)
        return buffer_view(allocate(shift + spec.nbytes), Placement(spec, 0, 0, shift))
    memory = allocate(shift + rows * ld * ITEM_BYTES[dtype])[shift:].view(DTYPES[dtype])
    return memory.as_strided((rows, cols), (ld, 1))


def drawn(rows: int, cols: int, dtype: str, seed: int, **where: Any) -> Tensor:
    """A matrix of random bits that are numbers."""
    out = matrix(rows, cols, dtype, **where)
    values = torch.randint(-(2**30), 2**30, (rows, cols), generator=torch.Generator().manual_seed(seed))
    return out.copy_(values)


def slowed(call: Callable[..., int], seconds: float) -> Callable[..., int]:
    def slow(*arguments: Any) -> int:
        time.sleep(seconds)
        return call(*arguments)

    return slow


def refusing_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that lacks O_DIRECT."""
    real = fcntl.fcntl

    def refuse(descriptor: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, "planted")
        return real(descriptor, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", refuse)


def refusing_unnamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that lacks O_TMPFILE."""
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "planted")
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A file system in memory of 1 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    if shutil.which("mount") is None or os.geteuid():
        pytest.skip("mounting a small file system needs root and mount(8)")
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no file system could be mounted: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.parametrize("dtype", ITEM_BYTES)
@pytest.mark.parametrize("panel_cols", [None, 16, 7])
@pytest.mark.parametrize(("rows", "cols"), SHAPES)
@pytest.mark.parametrize("shift", [0, 64])
def test_windows_and_panels_come_back(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    cols: int,
    panel_cols: int | None,
    dtype: str,
    shift: int,
) -> None:
    """Fails if a window or panel is misplaced on disk, or is not the same bits read either way, straight or copied."""
    monkeypatch.setattr("mggcn.memory.pages.PIECE_BYTES", 128 * 64)
    plan = one(rows, cols, dtype, panel_cols)
    spec = plan["h"].spec
    whole = drawn(rows, cols, dtype, 811, shift=shift)
    with opened(tmp_path, plan) as file:
        for first in range(0, rows, 192):
            count = min(192, rows - first)
            file.wait(file.write_rows("h", first, count, whole[first : first + count]))
        assert file.bytes_written == spec.nbytes
        for k in range(spec.panels):
            columns = spec.columns(k)
            panel = matrix(rows, len(columns), dtype, shift=shift)
            file.wait(file.read_panel("h", k, panel))
            assert torch.equal(panel, whole[:, columns.start : columns.stop])
            file.wait(file.write_panel("h", k, panel.neg_()))
        assert file.bytes_read == sum(panel_bytes(spec, k) for k in range(spec.panels)) == file.bytes_written // 2
        for first in range(0, rows, 128):
            count = min(128, rows - first)
            window, before = matrix(count, cols, dtype, shift=shift), file.bytes_read
            file.wait(file.read_rows("h", first, count, window))
            assert torch.equal(window, -whole[first : first + count])
            assert file.bytes_read - before == window_bytes(spec, first, count)
        assert file.waited_s > 0


def test_a_window_of_other_stride_keeps_what_is_beside_it(tmp_path: Path) -> None:
    """Fails if rows that are copied write beyond their columns, or beyond the last row."""
    plan = one(100, 33, "fp32", 16)
    whole = drawn(100, 33, "fp32", 812)
    memory = torch.full((130, 50), 7.0)
    with opened(tmp_path, plan) as file:
        file.wait(file.write_rows("h", 0, 100, whole))
        file.wait(file.read_rows("h", 0, 100, memory[:100, 5:38]))
    assert torch.equal(memory[:100, 5:38], whole)
    memory[:100, 5:38] = 7.0
    assert torch.equal(memory, torch.full((130, 50), 7.0))


def test_a_tensor_that_ends_with_its_last_number(tmp_path: Path) -> None:
    """Fails if the padding of a last row is read into memory behind the tensor's."""
    short = allocate(4 * (64 * 16 - 1)).view(torch.float32).as_strided((64, 15), (16, 1))
    whole = drawn(64, 15, "fp32", 828)
    with opened(tmp_path, one(64, 15)) as file:
        file.wait(file.write_rows("h", 0, 64, whole))
        file.wait(file.read_rows("h", 0, 64, short))
    assert torch.equal(short, whole)


def test_the_last_window_writes_no_row_beyond_the_tensor(tmp_path: Path) -> None:
    """Fails if a tensor at a page, with the stride of the disk, gets the padded rows of the last window."""
    plan, memory = one(100, 16), matrix(192, 16, "fp32").fill_(7.0)
    with opened(tmp_path, plan) as file:
        file.wait(file.write_rows("h", 0, 100, drawn(100, 16, "fp32", 813)))
        file.wait(file.read_rows("h", 0, 100, memory[:100]))
    assert torch.equal(memory[:100], drawn(100, 16, "fp32", 813))
    assert torch.equal(memory[100:], torch.full((92, 16), 7.0))


def test_whole_windows_at_pages_are_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if bytes that could go straight to their place are copied."""
    plan, whole = one(640, 100), drawn(640, 100, "fp32", 814)
    with opened(tmp_path, plan) as file:
        monkeypatch.setattr(pages, "_rows_in", lambda *_: pytest.fail("copied"))
        file.wait(file.write_rows("h", 0, 640, whole))
        out = matrix(640, 100, "fp32")
        file.wait(file.read_panel("h", 0, out))
    assert torch.equal(out, whole)


@pytest.mark.parametrize("panel_cols", [None, 16])
def test_a_read_waits_for_the_write_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, panel_cols: int | None
) -> None:
    """Fails if a read overtakes the write of the same rows, by windows or by panels."""
    monkeypatch.setattr(os, "pwritev", slowed(os.pwritev, 0.05))
    plan, whole = one(256, 33, "fp32", panel_cols), drawn(256, 33, "fp32", 815)
    out, panel = matrix(128, 33, "fp32"), matrix(256, len(plan["h"].spec.columns(0)), "fp32")
    with opened(tmp_path, plan) as file:
        file.write_rows("h", 0, 128, whole[:128])
        file.write_rows("h", 128, 128, whole[128:])
        tickets = file.read_rows("h", 128, 128, out), file.read_panel("h", 0, panel)
        for ticket in tickets:
            file.wait(ticket)
    assert torch.equal(out, whole[128:])
    assert torch.equal(panel, whole[:, : panel.shape[1]])


def test_a_write_waits_for_the_read_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a write destroys what an earlier request still reads."""
    plan, old = one(128, 16), drawn(128, 16, "fp32", 816)
    out = matrix(128, 16, "fp32")
    with opened(tmp_path, plan) as file:
        file.wait(file.write_rows("h", 0, 128, old))
        monkeypatch.setattr(os, "preadv", slowed(os.preadv, 0.05))
        reading = file.read_rows("h", 0, 128, out)
        file.wait(file.write_rows("h", 0, 128, drawn(128, 16, "fp32", 817)))
        file.wait(reading)
    assert torch.equal(out, old)


def test_a_matrix_waits_for_the_one_whose_disk_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a matrix overwrites a region that reads of another one still need."""
    lives = [(PageSpec("a", 128, 16, "fp32"), 0, 1), (PageSpec("b", 64, 32, "fp32"), 2, 3)]
    plan, old = plan_pages(lives), drawn(128, 16, "fp32", 818)
    assert plan["a"].offset == plan["b"].offset
    out = matrix(128, 16, "fp32")
    with opened(tmp_path, plan) as file:
        file.wait(file.write_rows("a", 0, 128, old))
        monkeypatch.setattr(os, "preadv", slowed(os.preadv, 0.05))
        reading = file.read_rows("a", 0, 128, out)
        file.wait(file.write_rows("b", 0, 64, drawn(64, 32, "fp32", 819)))
        file.wait(reading)
    assert torch.equal(out, old)


def test_requests_that_share_no_bytes_do_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if reads queue behind every write, other rows' and panels' too."""
    plan, whole = one(256, 32, "fp32", 16), drawn(256, 32, "fp32", 820)
    go, window, panel = threading.Event(), matrix(128, 32, "fp32"), matrix(256, 16, "fp32")
    with opened(tmp_path, plan) as file:
        file.wait(file.write_rows("h", 0, 256, whole))
        real = os.pwritev
        monkeypatch.setattr(os, "pwritev", lambda *arguments: (go.wait(60), real(*arguments))[1])
        try:
            file.write_rows("h", 128, 128, whole[128:])
            file.wait(file.read_rows("h", 0, 128, window))
            go.set()
            file.wait(file.write_panel("h", 0, whole[:, :16]))
            go.clear()
            file.write_panel("h", 0, whole[:, :16])
            file.wait(file.read_panel("h", 1, panel))
        finally:
            go.set()
    assert torch.equal(window, whole[:128])
    assert torch.equal(panel, whole[:, 16:])


@pytest.mark.parametrize("seed", range(40, 46))
def test_random_requests_are_as_if_done_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Fails if any order of threads shows in what is read: the same requests on matrices in memory give the same bits."""
    monkeypatch.setattr("mggcn.memory.pages.PIECE_BYTES", 64 * 64)
    draw = torch.Generator().manual_seed(seed)
    specs = [PageSpec("a", 300, 40, "fp32", 16), PageSpec("b", 300, 24, "fp32"), PageSpec("c", 300, 40, "bf16", 32)]
    known = {s.name: torch.zeros(s.rows, s.cols, dtype=DTYPES[s.dtype]) for s in specs}
    reads = []
    with opened(tmp_path, plan_pages((s, 0, 0) for s in specs)) as file:
        for spec in specs:
            file.write_rows(spec.name, 0, spec.rows, known[spec.name].clone())
        for step in range(60):
            which, panel, first, writes, rows = (int(torch.randint(n, (), generator=draw)) for n in (3, 9, 5, 2, 2))
            spec = specs[which]
            columns = spec.columns(panel % spec.panels)
            across = slice(0, spec.cols) if rows else slice(columns.start, columns.stop)
            along = slice(64 * first, min(64 * first + 128, spec.rows)) if rows else slice(0, spec.rows)
            place = known[spec.name][along, across]
            if writes:
                place.copy_(drawn(*place.shape, spec.dtype, 1000 * seed + step))
            tensor = place.clone() if writes else matrix(*place.shape, spec.dtype)
            if rows:
                move = file.write_rows if writes else file.read_rows
                ticket = move(spec.name, along.start, place.shape[0], tensor)
            else:
                ticket = (file.write_panel if writes else file.read_panel)(spec.name, panel % spec.panels, tensor)
            reads += [] if writes else [(ticket, tensor, place.clone())]
        for ticket, got, expected in reads:
            file.wait(ticket)
            assert torch.equal(got, expected)


@pytest.mark.parametrize("lacking", [(refusing_direct,), (refusing_unnamed,), (refusing_direct, refusing_unnamed)])
def test_file_systems_that_lack_a_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: Any) -> None:
    """Fails if a file system without O_DIRECT or O_TMPFILE is of no use, or the file has a name."""
    for refuse in lacking:
        refuse(monkeypatch)
    plan, whole, out = one(1000, 33, "fp32", 16), drawn(1000, 33, "fp32", 821), matrix(1000, 33, "fp32")
    with opened(tmp_path, plan) as file:
        assert file.direct is False or refusing_direct not in lacking
        assert [*tmp_path.iterdir()] == []
        file.write_rows("h", 0, 1000, whole)
        file.wait(file.read_rows("h", 0, 1000, out))
    assert torch.equal(out, whole)


def test_the_page_cache_is_left_alone(tmp_path: Path) -> None:
    """Fails if reads and writes go through the page cache where they need not."""
    try:
        os.close(os.open(tmp_path / "probe", os.O_CREAT | os.O_RDWR | os.O_DIRECT))
    except OSError:
        pytest.skip("the file system of temporary files lacks O_DIRECT")
    with opened(tmp_path, one(64, 16)) as file:
        assert file.direct
        assert fcntl.fcntl(file._file.fileno(), fcntl.F_GETFL) & os.O_DIRECT


def test_what_passes_through_the_page_cache_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a byte that was moved without O_DIRECT is never given up."""
    refusing_direct(monkeypatch)
    given_up: set[int] = set()
    monkeypatch.setattr(os, "posix_fadvise", lambda _, at, nbytes, how: given_up.update(range(at, at + nbytes, 4096)))
    plan = one(640, 33, "fp32", 16)
    with opened(tmp_path, plan) as file:
        for move in (file.write_rows, file.read_rows):
            given_up.clear()
            file.wait(move("h", 0, 640, drawn(640, 33, "fp32", 829)))
            assert given_up == {*range(0, plan.nbytes, PAGE_BYTES)}


def test_a_system_that_moves_a_page_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a call that moves less than it was asked for ends a piece."""
    plan, whole, out = one(1000, 33), drawn(1000, 33, "fp32", 822), matrix(1000, 33, "fp32")
    for name in ("preadv", "pwritev"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda fd, views, at, real=real: real(fd, [views[0][:PAGE_BYTES]], at))
    with opened(tmp_path, plan) as file:
        file.write_rows("h", 0, 1000, whole)
        file.wait(file.read_rows("h", 0, 1000, out))
    assert torch.equal(out, whole)


def test_a_read_that_finds_nothing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a file that became shorter is read as what memory held before, or for ever."""
    with opened(tmp_path, one(64, 16)) as file:
        monkeypatch.setattr(os, "preadv", lambda *_: 0)
        ticket = file.read_rows("h", 0, 64, matrix(64, 16, "fp32"))
        with pytest.raises(
            TrainError, match=r"h could not be read from the page file in .*: the file ends early; check"
        ):
            file.wait(ticket)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.ESTALE])
def test_a_failed_write_fails_those_who_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Fails if an error of a thread is lost: the wait for it and a later read of its rows raise it."""

    def fail(_: int, __: Any, offset: int) -> int:
        raise OSError(number, os.strerror(number)) if offset >= 64 * 64 else OSError(number, "unreachable")

    plan, out = one(128, 16), matrix(64, 16, "fp32")
    todo = {errno.ENOSPC: "free space there", errno.EIO: "check the disk"}.get(number, "name a folder on another disk")
    with opened(tmp_path, plan) as file:
        monkeypatch.setattr(os, "pwritev", fail)
        ticket = file.write_rows("h", 64, 64, drawn(64, 16, "fp32", 823))
        with pytest.raises(
            TrainError, match=f"h could not be written to .*{os.strerror(number)}; {todo}.*, and resume"
        ):
            file.wait(ticket)
        with pytest.raises(TrainError, match=f"h could not be read from .*{os.strerror(number)}"):
            file.wait(file.read_rows("h", 64, 64, out))
        file.wait(file.read_rows("h", 0, 64, out))


def test_too_little_space_is_refused_before(mounted: Path) -> None:
    """Fails if a disk that is too small is noticed only when it is full, or the message lacks what is needed and free."""
    with pytest.raises(PlanError, match=r"need 2\.00 MiB in .*small, 1\.00 MiB are free; free space there, or name"):
        PageFile(mounted, one(8192, 64), allocate(2**22))
    assert [*mounted.iterdir()] == []
    with opened(mounted, one(2048, 64)):
        assert shutil.disk_usage(mounted).free == 2**20 - 2**19  # reserved
    assert shutil.disk_usage(mounted).free == 2**20


def test_space_that_goes_meanwhile_is_an_error(mounted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a disk that fills after the look at it is no error, reserved or, where that cannot be, written."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(2**40, 0, 2**40))  # type: ignore[attr-defined]  # private
    plan = one(8192, 64)
    with pytest.raises(PlanError, match=r"of 2\.00 MiB can be made in .*: No space left on device; free space there"):
        PageFile(mounted, plan, allocate(plan.staging_bytes))
    monkeypatch.setattr(pages, "reserve", lambda descriptor, _: os.ftruncate(descriptor, PAGE_BYTES))
    with opened(mounted, plan) as file:
        ticket = file.write_rows("h", 0, 8192, drawn(8192, 64, "fp32", 824))
        with pytest.raises(TrainError, match="No space left on device; free space there"):
            file.wait(ticket)


def test_a_limit_of_the_size_of_files(tmp_path: Path) -> None:
    """Fails if a process that may not write so large a file is told of anything else."""
    plan, old = one(8192, 64), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, old[1]))
    try:
        with pytest.raises(PlanError, match=r"File too large; raise the limit of the size of files \(ulimit -f\)"):
            PageFile(tmp_path, plan, allocate(plan.staging_bytes))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert [*tmp_path.iterdir()] == []


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    """Fails if a wrong path ends in a traceback."""
    (tmp_path / "file").touch()
    for name, todo in (("missing", "name a folder that exists"), ("file", "name a folder")):
        with pytest.raises(PlanError, match=f"can be made in .*{name}: .*; {todo}$"):
            PageFile(tmp_path / name, one(64, 16), allocate(2**20))


@pytest.mark.parametrize("named", [False, True])
def test_nothing_is_left_of_a_killed_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool) -> None:
    """Fails if a process that is killed while its threads write leaves a file or disk space behind."""
    if named:
        refusing_unnamed(monkeypatch)
    plan, whole = one(65536, 64), drawn(65536, 64, "fp32", 825)
    reads, writes = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of pytest's threads, whose locks the child never asks for
        pid = os.fork()
    if not pid:
        try:
            file = PageFile(tmp_path, plan, allocate(plan.staging_bytes))
            file.wait(file.write_rows("h", 0, 65536, whole))
            os.write(writes, b"1")
            while True:
                file.wait(file.write_rows("h", 0, 65536, whole))
        finally:
            os._exit(1)
    os.close(writes)
    with os.fdopen(reads, "rb") as told:
        assert told.read(1) == b"1"
    time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("reads", [False, True])
def test_closing_drops_what_has_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: bool) -> None:
    """Fails if closing waits for the whole queue, or a thread or the file outlives it."""
    monkeypatch.setattr(os, "pwritev", slowed(os.pwritev, 0.2))
    plan, whole = one(64, 16), drawn(64, 16, "fp32", 826)
    before = {*threading.enumerate()}
    file = PageFile(tmp_path, plan, allocate(plan.staging_bytes))
    for _ in range(100):
        file.write_rows("h", 0, 64, whole)
        if reads:
            file.read_rows("h", 0, 64, whole)
    begin = time.monotonic()
    file.close()
    assert time.monotonic() - begin < 10
    assert {*threading.enumerate()} == before


def test_requests_allocate_nothing_of_note(tmp_path: Path) -> None:
    """Fails if a request takes memory that is not planned: 1 MiB moves through 0.5 MiB of staging that is there."""
    plan, whole, out = one(2048, 130, "fp32", 32), drawn(2048, 130, "fp32", 827), matrix(2048, 130, "fp32")
    with opened(tmp_path, plan) as file:
        file.wait(file.write_rows("h", 0, 2048, whole))
        tracemalloc.start()
        try:
            for _ in range(20):
                file.wait(file.write_rows("h", 0, 2048, whole))
                file.wait(file.read_rows("h", 0, 2048, out))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < 64 * 1024
    assert torch.equal(out, whole)


@pytest.mark.parametrize(
    ("first", "count", "tensor", "said"),
    [
        (32, 64, torch.zeros(64, 16), "move in windows of 64, got rows 32 to 96 of 200"),
        (64, 60, torch.zeros(60, 16), "move in windows of 64, got rows 64 to 124 of 200"),
        (192, 64, torch.zeros(64, 16), "move in windows of 64, got rows 192 to 256 of 200"),
        (64, 64, torch.zeros(64, 17), "expected 64 rows of 16 neighbouring numbers of fp32, got"),
        (64, 64, torch.zeros(64, 16, dtype=torch.float64), "numbers of fp32, got .* of torch.float64"),
        (64, 64, torch.zeros(16, 64).t(), "got .* with strides"),
    ],
)
def test_requests_that_would_destroy_others(tmp_path: Path, first: int, count: int, tensor: Tensor, said: str) -> None:
    """Fails if a window that shares a page with another, or a tensor of another form, is written."""
    with opened(tmp_path, one(200, 16)) as file, pytest.raises(PlanError, match=said):
        file.write_rows("h", first, count, tensor)


def test_mapped_arrays_lie_in_files_without_a_name(tmp_path: Path) -> None:
    make = mapped_arrays(tmp_path)
    one, other, none = make(70_001, np.int32), make(5, np.float64), make(0, np.int32)
    one[:], other[:] = np.arange(70_001), 0.5
    assert one.dtype == np.int32
    assert (one == np.arange(70_001)).all()
    assert (other == 0.5).all()
    assert none.size == 0
    assert not list(tmp_path.iterdir())
    maps = Path("/proc/self/maps").read_text()
    assert maps.count(str(tmp_path)) == 2


def test_mapped_arrays_need_the_space(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"need .* in .*, .* are free; free space there"):
        mapped_arrays(tmp_path)(2**55, np.int32)
    with pytest.raises(PlanError, match="name a folder that exists"):
        mapped_arrays(tmp_path / "none")(1, np.int32)
