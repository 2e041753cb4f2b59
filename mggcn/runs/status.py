"""The state of runs, from the files in their folders: signs of life, checkpoint, history, result. Needs no torch."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mggcn.comm.failure import process_state
from mggcn.errors import RunError, printable
from mggcn.files import open_file, parse_object, read_object, read_text, reason
from mggcn.memory.units import duration, human
from mggcn.runs.folder import is_complete, looks_like_run, read_run
from mggcn.train.heartbeat import Pulse, boot_id, read_pulses, started_at

SILENT_S: Final = 60.0
"""A rank of another machine that was silent for this long, and for ten epochs, may be gone."""
TAIL_BYTES: Final = 4096
LARGEST_MARKER: Final = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStatus:
    """The state of a rank: alive, stopped, gone, silent (on another machine), or how it ended."""

    rank: int
    state: str
    pid: int
    host: str
    heard_s: float
    """Seconds since its last sign of life."""
    memory_bytes: int
    """Its peak so far."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """The state of a run: not begun, set-up, training, stopped, silent, killed, failed, interrupted or complete."""

    folder: Path
    state: str
    run: int
    """Number of the repeat, from 0."""
    repeat: int
    epoch: int
    step: int
    """Steps done of the next epoch."""
    steps: int
    """Steps of an epoch."""
    epochs: int
    epoch_s: float | None
    left_s: float | None
    planned_bytes: int
    checkpoint_epoch: int | None
    checkpoint_step: int | None
    checkpoint_age_s: float | None
    last: dict[str, Any] | None
    """The last row of the history."""
    sampled: bool
    """Whether scores are SAMPLED, over some drawn in-neighbours of each row (train.evaluate), and not exact."""
    ranks: tuple[RankStatus, ...]


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """Return the run folders among some folders and directly inside them, sweeps' too, damaged ones among them.

    A path without a run stands for itself: `status_of` says what it lacks.
    """
    found: list[Path] = []
    for path in paths:
        within = () if looks_like_run(path) else (*path.glob("*"), *path.glob("trials/*"), *path.glob("*/trials/*"))
        found += sorted(folder for folder in within if looks_like_run(folder)) or [path]
    return list(dict.fromkeys(found))


def status_of(folder: Path) -> RunStatus:
    """Return the state of a run. Cost: a few small files. Raises: RunError, ConfigError if it is missing or damaged."""
    if not looks_like_run(folder):
        what = "holds no run" if folder.is_dir() else "is no folder"
        raise RunError(f"{folder} {what}; mggcn train makes one and prints its name")
    config, plan, _ = read_run(folder)
    pulses = read_pulses(folder, config.run.ranks)
    ranks = tuple(_rank_status(pulse) for pulse in pulses)
    checkpoint, within, age = _checkpoint(folder)
    first = pulses[0] if pulses else Pulse(rank=0, state="not begun", epochs=config.train.epochs)
    state = "complete" if is_complete(folder) else _state(first, ranks)
    epochs, repeat = config.train.epochs, config.train.repeat
    last = _last_row(folder)
    epoch = first.epoch if state in ("set-up", "training") or last is None else int(last["epoch"])
    step = first.step if epoch == first.epoch and state != "complete" else 0
    left = epochs * (repeat - first.run) - epoch - step / first.steps
    return RunStatus(
        folder=folder,
        state=state,
        run=first.run,
        repeat=repeat,
        epoch=epoch,
        step=step,
        steps=first.steps,
        epochs=epochs,
        epoch_s=first.epoch_s,
        left_s=left * first.epoch_s if first.epoch_s is not None and state == "training" else None,
        planned_bytes=_planned_bytes(plan, config.run.transport == "threads"),
        checkpoint_epoch=checkpoint,
        checkpoint_step=within,
        checkpoint_age_s=age,
        last=last,
        sampled=config.train.evaluate == "sampled",
        ranks=ranks,
    )


def _planned_bytes(plan: dict[str, Any], threads: bool) -> int:
    """Return the planned peak of a process: the largest rank's, or that of all if they are threads of one."""
    totals = [rank["total_bytes"] for rank in plan["per_rank"]]
    shared = sum(rank["regions"]["runtime"] for rank in plan["per_rank"][1:])
    return int(sum(totals) - shared if threads else max(totals))


def _rank_status(pulse: Pulse) -> RankStatus:
    heard_s = max(time.time() - pulse.time_s, 0.0)
    if pulse.state not in ("set-up", "training"):
        state = pulse.state
    elif (pulse.host, pulse.boot) != (platform.node(), boot_id()):
        state = "silent" if heard_s > max(SILENT_S, 10 * (pulse.epoch_s or 0)) else "alive"
    elif started_at(pulse.pid) != pulse.started or process_state(pulse.pid) == "Z":
        state = "gone"
    else:
        state = "stopped" if process_state(pulse.pid) in ("T", "t") else "alive"
    return RankStatus(
        rank=pulse.rank,
        state=state,
        pid=pulse.pid,
        host=pulse.host,
        heard_s=heard_s,
        memory_bytes=pulse.memory_bytes,
    )


def _state(first: Pulse, ranks: tuple[RankStatus, ...]) -> str:
    """The state of a run without a result: that of its worst rank, or what rank 0 reports."""
    states = {rank.state for rank in ranks}
    for state, told in (("failed", "failed"), ("interrupted", "interrupted"), ("gone", "killed")):
        if state in states:
            return told
    return next((state for state in ("stopped", "silent") if state in states), first.state)


def _checkpoint(folder: Path) -> tuple[int | None, int | None, float | None]:
    """Return epochs, steps of the next one, and age of the latest checkpoint, None without one that can be read."""
    marker = folder / "checkpoints" / "latest"
    try:
        name = read_text(marker, LARGEST_MARKER).split()[0]
        saved = read_object(marker.parent / name / "progress.json")
        epoch, step = saved["epoch"], saved.get("step", 0)
        if type(epoch) is not int or type(step) is not int:
            raise TypeError("expected whole numbers")
        return epoch, step, max(time.time() - marker.stat().st_mtime, 0.0)
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return None, None, None


def _last_row(folder: Path) -> dict[str, Any] | None:
    """Return the last complete row of the history, None if there is none. Raises: RunError if it is damaged."""
    path = folder / "history.jsonl"
    try:
        with open_file(path) as file:
            file.seek(max(file.seek(0, os.SEEK_END) - TAIL_BYTES, 0))
            lines = [line for line in file.read(TAIL_BYTES).splitlines(keepends=True) if line.endswith(b"\n")]
        row = parse_object(lines[-1]) if lines else None
        if row is not None and (type(row["epoch"]) is not int or type(row["loss"]) not in (int, float)):
            raise ValueError("epoch and loss must be numbers")
        return row
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError) as error:
        raise RunError(f"{path} cannot be read: {reason(error)}; put the file back, or start the run again") from error


def line_of(run: RunStatus) -> str:
    """Describe a run in one line: its state, progress, speed and time left."""
    parts = [f"{printable(run.folder)}: {run.state}"]
    if run.repeat > 1:
        parts.append(f"run {run.run + 1} of {run.repeat}")
    parts.append(f"epoch {run.epoch} of {run.epochs}")
    if run.steps > 1 and run.state != "complete":
        parts.append(f"step {run.step} of {run.steps}")
    if run.epoch_s is not None and run.state == "training":
        parts.append(f"{run.epoch_s:.3g} s per epoch")
    if run.left_s is not None:
        parts.append(f"{duration(run.left_s)} left")
    if run.last is not None:
        parts.append(f"loss {run.last['loss']:.4g}")
    if run.sampled:
        parts.append("scores are SAMPLED")
    return ", ".join(parts)


def details_of(run: RunStatus) -> list[str]:
    """Describe one run in more lines: its checkpoint and its ranks."""
    within = f", step {run.checkpoint_step}" if run.checkpoint_step else ""
    saved = (
        f"last checkpoint: epoch {run.checkpoint_epoch}{within}, {duration(run.checkpoint_age_s)} ago"
        if run.checkpoint_age_s is not None
        else "no checkpoint yet"
    )
    resume = f"; mggcn train --resume {printable(run.folder)}"
    lines = [saved if run.state in ("training", "complete", "set-up") else saved + resume]
    for rank in run.ranks:
        host = printable(rank.host)
        memory = (
            f", memory {human(rank.memory_bytes)} (planned {human(run.planned_bytes)})" if rank.memory_bytes else ""
        )
        lines.append(
            f"rank {rank.rank}: {rank.state}, pid {rank.pid} on {host}, heard of {duration(rank.heard_s)} ago{memory}"
        )
    return lines
