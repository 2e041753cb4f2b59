"""What the disk of a folder does in half a minute, measured as page files use it."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeAlias

import torch
from torch import Tensor

from mggcn.backend.cpu.memory import allocate
from mggcn.memory.pages import PAGE_BYTES, DiskRates, PageSpec, plan_pages
from mggcn.memory.units import MIB
from mggcn.train.pages import PageFile, Ticket

WINDOW_BYTES: Final = 16 * MIB
MATRIX_BYTES: Final = 4096 * MIB
LEAST_BYTES: Final = 128 * MIB
LIMIT_S: Final = 10.0
"""A matrix of so many bytes, of fewer where the disk has little room, is written, read, and read beside another that is
written; by windows, none of which begins after so many seconds. Caches of the machine, and of the host of a rented one,
answer a test of a second."""
Move: TypeAlias = Callable[[str, int, int, Tensor], Ticket]


def measure_disk(folder: Path) -> DiskRates:
    """Measure the disk of a folder by a page file in it.

    Cost: 32 MiB of memory; 8 GiB of disk, or half of what is free; half a minute, and the time of eight windows more where
    the disk is slow. Raises: PlanError as PageFile, TrainError if the disk fails.
    """
    free = shutil.disk_usage(folder).free if folder.is_dir() else 0  # the page file says what is wrong
    nbytes = max(min(MATRIX_BYTES, free // 4), LEAST_BYTES)
    rows, count = nbytes // WINDOW_BYTES * WINDOW_BYTES // PAGE_BYTES, WINDOW_BYTES // PAGE_BYTES
    specs = [PageSpec(name, rows, PAGE_BYTES // 8, "int64") for name in ("first", "second")]
    plan = plan_pages((spec, 0, 0) for spec in specs)
    windows = allocate(2 * WINDOW_BYTES).view(torch.int64).view(2, count, -1)
    windows.random_(generator=torch.Generator())  # some file systems and disks write zeros faster
    with contextlib.closing(PageFile(folder, plan, allocate(plan.staging_bytes))) as file:
        writes, reads = ("first", file.write_rows, windows[0]), ("first", file.read_rows, windows[1])
        written, write = _rate(file, rows, writes)
        _, read = _rate(file, written, reads)
        _, both = _rate(file, written, reads, ("second", file.write_rows, windows[0]))
    return DiskRates(read, write, both)


def _rate(file: PageFile, rows: int, *moves: tuple[str, Move, Tensor]) -> tuple[int, float]:
    """Make moves for one window of `rows` rows after the other; return the rows of all, and bytes a second."""
    begin, first, tickets = time.perf_counter(), 0, deque[Ticket]()
    while first < rows and time.perf_counter() < begin + LIMIT_S:
        for name, move, window in moves:
            tickets.append(move(name, first, window.shape[0], window))
        first += moves[0][2].shape[0]
        while len(tickets) > len(moves):  # one is under way, the next waits
            file.wait(tickets.popleft())
    for ticket in tickets:
        file.wait(ticket)
    return first, len(moves) * first * PAGE_BYTES / (time.perf_counter() - begin)
