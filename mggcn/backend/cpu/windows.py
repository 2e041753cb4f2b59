"""The window of rows that a CPU backend's calls are on, and the memory of sums that go on from one to the next."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from mggcn.backend.cpu.sizes import aligned
from mggcn.backend.window import STEP, Window
from mggcn.errors import BackendError


@dataclass(frozen=True, slots=True)
class _Kept:
    """What a call with sums keeps: the call, by its sizes, types and result, and where in memory."""

    call: Hashable
    address: int


@functools.lru_cache(maxsize=256)  # small graphs' epochs count microseconds
def _all(rows: int) -> Window:
    """All rows of a call, where no windows are in use."""
    return Window(0, rows, rows)


class Windows:
    """Windows of one backend: none in use at first. Calls with sums are told apart by their order within a window."""

    def __init__(self) -> None:
        self._window: Window | None = None
        self._memory: Tensor = torch.empty(0, dtype=torch.uint8)
        self._kept: list[_Kept] = []
        self._used = self._calls = 0

    @property
    def in_use(self) -> bool:
        return self._window is not None

    def begin(self, total: int, memory: Tensor) -> None:
        """Implement WindowedBackend.begin_windows."""
        self._window, self._memory = Window(0, 0, total), memory
        self._kept, self._used, self._calls = [], 0, 0

    def move(self, first: int, count: int) -> None:
        """Implement WindowedBackend.window."""
        before = self._window
        if before is None:
            raise BackendError("a window was asked for outside windows; call begin_windows before")
        window = Window(first, count, before.total)
        some = min(1, window.total) <= count <= window.total - first
        if first != before.end or not some or (count % STEP and not window.is_last):
            raise BackendError(
                f"a window must begin at row {before.end} of {before.total} and have a multiple of {STEP} rows, or those "
                f"that are left; got {count} rows from row {first} on; run the windows in order"
            )
        self._check_calls()
        self._window, self._calls = window, 0

    def end(self, *, complete: bool) -> None:
        """Implement WindowedBackend.end_windows."""
        window, self._window, self._memory = self._window, None, torch.empty(0, dtype=torch.uint8)
        if complete and window is not None:
            if not window.is_last:
                raise BackendError(
                    f"windows ended at row {window.end} of {window.total}, so sums lack rows; run the others before"
                )
            self._check_calls()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Implement WindowedBackend.apart."""
        window, self._window = self._window, None
        try:
            yield
        finally:
            self._window = window

    def of(self, rows: int, *, summed: bool = True) -> Window:
        """Return the window that a call on `rows` rows is on: all rows, if no window is in use or nothing is summed.

        Raises: BackendError for sums if the window in use has other rows.
        """
        if self._window is None or not summed:
            return _all(rows)
        if rows != self._window.count:
            raise BackendError(
                f"a sum over rows in a window must be over all of its {self._window.count} rows, got {rows}; "
                "pass the window's rows, or run sums over blocks of them apart"
            )
        return self._window

    def keep(self, call: Hashable, nbytes: int) -> int | None:
        """Return the address of what a call keeps between windows, zero when the first begins; None if none is in use.

        call: says which it is; every window makes the same calls.
        Raises: BackendError for another call than in the first window, or if the memory is too small.
        """
        if self._window is None:
            return None
        if self._window.is_first:
            self._kept.append(_Kept(call, self._room(nbytes)))
        number, self._calls = self._calls, self._calls + 1
        expected = self._kept[number].call if number < len(self._kept) else "none"
        if call != expected:
            raise BackendError(
                f"every window must make the calls of the first; its sum {number + 1} was {expected}, now it is {call}"
            )
        return self._kept[number].address

    def _room(self, nbytes: int) -> int:
        """Zero and return the next part of the memory."""
        offset = self._used
        self._used += aligned(nbytes)
        room = self._memory[offset : self._used].zero_()
        if self._used > self._memory.shape[0]:
            raise BackendError(
                f"sums need at least {self._used} bytes between windows, got {self._memory.shape[0]}; "
                "plan them with window_bytes"
            )
        return int(room.data_ptr())

    def _check_calls(self) -> None:
        if self._calls != len(self._kept):
            raise BackendError(
                f"every window must make the calls of the first, with {len(self._kept)} sums; the last one made "
                f"{self._calls}"
            )
