"""What every part of bench.gpu measures with: a device, random operands, a clock that the host does not disturb, a log.

A part is a process of its own. It writes each row as soon as it has it, and leaves out rows that are there: whatever ends
it, the next process goes on. A CUDA graph that is refused ends it, too: nothing is measured in the process that it leaves.
"""

from __future__ import annotations

import gc
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

import torch
from torch import Tensor

from bench.report import spread
from mggcn.backend.cuda.base import Device
from mggcn.backend.cuda.products import float32_products

SEED = 90217
MIN_WINDOW_S = 0.004
"""Shortest stretch that is timed: a hundred times the resolution of a CUDA event and more."""
MAX_S = 0.4
"""Seconds of a measurement of which three rounds must do."""
MAX_BEGUN = 2
"""A row that so many processes have begun and none finished is given up."""
MAX_COPIES = 48
"""Sets of operands through which a measurement rotates, so that no call finds its own in the L2 cache."""

Calls = Sequence[Callable[[], object]]


Row = dict[str, Any]


class OutOfTimeError(Exception):
    """The next row does not fit the time that is left."""


class AgainError(Exception):
    """The next row needs a process of its own."""


@dataclass(frozen=True)
class Settings:
    """What a part is told; `scale` shrinks the generated graphs, `rounds` are timed stretches of each measurement.

    budget_s: seconds that this process has.
    """

    device: str
    scale: float
    rounds: int
    budget_s: float
    cache: str
    data: str
    quick: bool = False


class Lab:
    """A device to measure on, for one part.

    rows: what earlier processes of the part have written.
    """

    def __init__(self, settings: Settings, log: TextIO, rows: Sequence[Row] = ()) -> None:
        self.settings = settings
        self.rows = list(rows)
        self.measured = 0
        """Rows of this process."""
        self.refused = False
        """Whether a CUDA graph was refused in this process."""
        self.emulated = settings.device == "emulated"
        self.device = make_device(settings.device)
        self._log = log
        self._generator = torch.Generator(self.device.torch_device).manual_seed(SEED)
        self._until = time.monotonic() + settings.budget_s
        # What the libraries hold is never garbage: searching it after each measurement would take longer than many.
        gc.freeze()

    def write(self, **row: Any) -> None:
        """Append a row to the part's results, on disk at once, unless it is there."""
        row = json.loads(json.dumps(row))
        if row["kind"] not in ("start", "begun", "end") and row in self.rows:
            return
        self.rows.append(row)
        self._log.write(json.dumps(row) + "\n")
        self._log.flush()

    def find(self, **wanted: Any) -> list[Row]:
        """The rows so far that have these entries."""
        return [row for row in self.rows if wanted.items() <= row.items()]

    def check_time(self) -> None:
        """Raise OutOfTimeError if the time that is left is less than the longest row so far took."""
        longest = max((row["took_s"] for row in self.rows if "took_s" in row), default=0.0)
        if time.monotonic() + longest > self._until:
            raise OutOfTimeError("the next row does not fit the time that is left")

    def random(self, rows: int, cols: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Random normal numbers in rows padded to 64 bytes, as planned buffers are."""
        step = 64 // dtype.itemsize
        padded = torch.empty(rows, -(-cols // step) * step, dtype=dtype, device=self.device.torch_device)
        # By blocks: the whole in float32 beside it could be too much.
        for block in padded.split(1 << 20):
            block.copy_(torch.randn(block.shape, generator=self._generator, device=self.device.torch_device))
        return padded[:, :cols]

    def copies(self, nbytes: int) -> int:
        """How many sets of operands of so many bytes exceed the L2 cache three times."""
        return max(1, min(MAX_COPIES, math.ceil(3 * self.device.traits.l2_bytes / max(nbytes, 1))))

    def time_calls(self, calls: Calls) -> Row:
        """Seconds of one call: median and spread over rounds. `calls` do the same work, each on operands of its own.

        Captured as a CUDA graph if that works, else launched from the host, which short kernels may then wait for;
        `how` says which. The first calls, which compile and load, are not timed.
        """
        repeat, how = self._repeatable(calls)
        per_call = self._stretch(repeat, 1) / len(calls)
        count = max(1, math.ceil(MIN_WINDOW_S / max(per_call * len(calls), 1e-9))) if not self.emulated else 1
        rounds = min(self.settings.rounds, max(3, math.ceil(MAX_S / max(per_call * count * len(calls), 1e-9))))
        seconds = [self._stretch(repeat, count) / (count * len(calls)) for _ in range(rounds)]
        return {**spread(seconds), "calls": count * len(calls), "copies": len(calls), "how": how}

    def _repeatable(self, calls: Calls) -> tuple[Callable[[], None], str]:
        def whole() -> None:
            for call in calls:
                call()

        whole()
        if self.emulated:
            return whole, "emulated"
        repeat = self.device.repeatable(whole)
        for _ in range(4):  # two as they are, one recorded, one repeated
            repeat()
        self.device.synchronize()
        return repeat, self.noted(repeat.state)

    def noted(self, state: str) -> str:
        """How a device gets what is measured, as Repeatable.state has it; "emulated" where nothing is captured."""
        self.refused |= state.startswith("refused")
        return "emulated" if self.emulated else state

    def _stretch(self, repeat: Callable[[], None], count: int) -> float:
        start = self.device.timestamp()
        for _ in range(count):
            repeat()
        end = self.device.timestamp()
        self.device.synchronize()
        return float(end.seconds_since(start))

    def forget(self) -> None:
        """Give back the memory of what is no longer referred to, and start a new peak."""
        gc.collect()
        if not self.emulated:
            self.device.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def memory(self) -> dict[str, int]:
        """Peak bytes of torch's allocator since `forget`, mggcn's arena among them, and what it took from the GPU."""
        if self.emulated:
            return {"allocated": 0, "reserved": 0}
        return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}

    def free_bytes(self) -> int:
        """Bytes that the device has free."""
        return 1 << 34 if self.emulated else torch.cuda.mem_get_info()[0]


def make_device(name: str, *, capture: bool = True) -> Device:
    """The first GPU, or the tests' emulator, which is looked for in the checkout."""
    if name == "emulated":
        from tests.emulator.device import EmulatedDevice

        return EmulatedDevice()
    from mggcn.backend.cuda.device import CudaDevice

    return CudaDevice(0, capture=capture)


@contextmanager
def tf32(allow: bool) -> Iterator[None]:
    """Dense float32 products of the block may use TF32, or may not."""
    with float32_products(tf32=allow):
        yield


def shortened(error: BaseException) -> str:
    """What went wrong, short enough for a table."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:320]}"


def attempt(lab: Lab, what: Row, measure: Callable[..., Row], *args: Any, alone: bool = False) -> None:
    """Write `what` with what `measure(*args)` returns, unless it is there; if that cannot be done, write why and go on.

    alone: it wants a process in which nothing was measured before. A fault that leaves the device unusable ends the part:
    what follows would be wrong. Raises: OutOfTimeError, AgainError.
    """
    if lab.find(**what):
        return
    lab.check_time()
    if not lab.emulated and (lab.refused or (alone and lab.measured)):
        raise AgainError
    if len(lab.find(kind="begun", what=what)) >= MAX_BEGUN:
        lab.write(**what, error=f"begun {MAX_BEGUN} times and never finished: it ended its process or took too long")
        return
    lab.write(kind="begun", what=what)
    lab.measured += 1
    began = time.monotonic()
    try:
        row = measure(*args)
    except Exception as error:  # a compiler's, a library's or a driver's: each has classes of its own
        print(f"{what}: {shortened(error)}", file=sys.stderr)
        row = {"error": shortened(error)}
        lab.device.synchronize()
    lab.write(**what, **row, took_s=time.monotonic() - began)
    lab.forget()
