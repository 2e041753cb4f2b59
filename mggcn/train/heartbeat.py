"""A rank's sign of life: a small file in the run folder, replaced at most once a second, which `mggcn status` reads."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from mggcn.comm.failure import Interrupted
from mggcn.files import read_object, write_text

EVERY_S: Final = 1.0
FOLDER: Final = "status"
STATES: Final = ("set-up", "training", "complete", "interrupted", "failed")
LARGEST: Final = 1 << 16
"""Bytes of a sign of life, which has some 300."""
LONGEST_S: Final = 1e12
"""Seconds that no clock shows, and no epoch takes."""


@dataclass(kw_only=True, slots=True)
class Pulse:
    """What a rank reports about itself. time_s: wall clock; started: when its process began, in ticks since boot."""

    rank: int
    state: str = "set-up"
    """One of STATES."""
    run: int = 0
    epoch: int = 0
    step: int = 0
    """Steps done of the next epoch."""
    steps: int = 1
    """Steps of an epoch."""
    epochs: int = 0
    repeat: int = 1
    epoch_s: float | None = None
    """Seconds of an epoch, evaluations and checkpoints among them: the mean since the last sign of life."""
    memory_bytes: int = 0
    pid: int = 0
    started: int = 0
    host: str = ""
    boot: str = ""
    time_s: float = 0.0


class Heartbeat:
    """Writes the pulse of one rank until its `with` block ends. Cost: one look at the clock per epoch, and one file of
    300 bytes per second.

    A full or missing disk does not stop the run; the file then becomes outdated.
    """

    def __init__(self, folder: Path | None, rank: int, epochs: int, repeat: int) -> None:
        self._path = None if folder is None else folder / FOLDER / f"rank-{rank}.json"
        self._pulse = Pulse(
            rank=rank, epochs=epochs, repeat=repeat, pid=os.getpid(), host=platform.node(), boot=boot_id()
        )
        self._pulse.started = started_at(os.getpid()) or 0
        self._last_s = time.monotonic()
        self._last_epoch = 0.0
        self._write()

    def begin(self, run: int, epoch: int, step: int = 0, steps: int = 1) -> None:
        """Record that epochs of `steps` steps begin, with this one, at this step of it."""
        self._pulse.state, self._pulse.run, self._pulse.epoch = "training", run, epoch
        self._pulse.step, self._pulse.steps = step, steps
        self._last_s, self._last_epoch = time.monotonic(), epoch + step / steps
        self._write()

    @property
    def due(self) -> bool:
        """Whether a second has passed."""
        return time.monotonic() >= self._last_s + EVERY_S

    def beat(self, run: int, epoch: int, step: int, memory_bytes: int) -> None:
        """Record the progress of the rank: epochs done, and steps of the next one."""
        pulse, now, done = self._pulse, time.monotonic(), epoch + step / self._pulse.steps
        if run == pulse.run and done > self._last_epoch:
            pulse.epoch_s = (now - self._last_s) / (done - self._last_epoch)
        pulse.run, pulse.epoch, pulse.step, pulse.memory_bytes = run, epoch, step, memory_bytes
        self._last_s, self._last_epoch = now, done
        self._write()

    def __enter__(self) -> Heartbeat:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        stopped = isinstance(error, Interrupted | KeyboardInterrupt)
        self._pulse.state = "complete" if error is None else "interrupted" if stopped else "failed"
        self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        self._pulse.time_s = time.time()
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(exist_ok=True)
            # Not flushed to the disk: epochs would wait for it each second, and after a loss of power nobody is alive.
            write_text(self._path, json.dumps(asdict(self._pulse)), durable=False)


def read_pulses(folder: Path, ranks: int) -> list[Pulse]:
    """Return the last pulse of each rank that wrote one; damaged files are ignored."""
    found = []
    for rank in range(ranks):
        with contextlib.suppress(OSError, ValueError, TypeError):
            pulse = Pulse(**read_object(folder / FOLDER / f"rank-{rank}.json", LARGEST))
            _check(pulse, rank)
            found.append(pulse)
    return found


def _check(pulse: Pulse, rank: int) -> None:
    """Refuse what no rank says of itself. Raises: ValueError."""
    steps = pulse.step, pulse.steps
    counts = (pulse.run, pulse.epoch, pulse.epochs, pulse.repeat, pulse.memory_bytes, pulse.pid, pulse.started, *steps)
    seconds = (pulse.time_s, 0.0 if pulse.epoch_s is None else pulse.epoch_s)
    if pulse.rank != rank or pulse.state not in STATES or not all(isinstance(t, str) for t in (pulse.host, pulse.boot)):
        raise ValueError("it belongs to another rank, or its state is unknown")
    if any(type(count) is not int or not 0 <= count < 2**63 for count in counts):
        raise ValueError("its counts are not whole numbers of 64 bits")
    if pulse.step >= pulse.steps:
        raise ValueError("an epoch has more steps than are done of it")
    if any(type(s) not in (int, float) or not 0 <= s < LONGEST_S for s in seconds):
        raise ValueError("its seconds are not numbers")


def boot_id() -> str:
    """Return an id of this boot of this machine; "" where the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def started_at(pid: int) -> int | None:
    """Return when a process began, in ticks since the boot: with its number it is unique. None if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None
