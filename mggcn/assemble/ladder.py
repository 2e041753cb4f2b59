"""The capacity ladder: the first of a run's rungs that fits (run.capacity auto). Needs no torch.

Everything in memory, then products made again backwards, then rows on disk, or of a GPU on the host: each takes less memory
than the one before and more seconds, and gives the same bits.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from mggcn.comm.rank import ranks_here
from mggcn.config import Config
from mggcn.errors import ConfigError, PlanError
from mggcn.files import reason
from mggcn.memory.device import ANY
from mggcn.memory.units import free_bytes
from mggcn.planning.run import Ladder, RunPlan, Space

Planned = Callable[[Config, int], RunPlan]
"""Plans a run whose capacity is not auto, for so many bytes of a rank where rows are on disk."""
HOST: Final = "the host's memory"
RUNS: Final = Path("runs")
"""Where run folders are made that were not named."""


def space_of(config: Config, out: Path | None = None) -> Space:
    """Return the folder in which a run may have rows on disk, and what is free there: run.scratch, or the run folder `out`,
    which need not exist yet; of a run on GPUs the host's memory. Raises: PlanError if run.scratch is no folder.
    """
    if config.last_rung == "host":
        return Space(HOST, free_bytes())
    if config.run.scratch:
        folder = Path(config.run.scratch)
        try:
            free = shutil.disk_usage(f"{folder}/.").free
        except OSError as error:
            raise PlanError(
                f"run.scratch {folder}: {reason(error)}; name a folder that exists, on a fast disk"
            ) from error
        if not os.access(folder, os.W_OK):
            raise PlanError(f"run.scratch {folder} cannot be written; name a folder on a fast disk that can")
        return Space(str(folder), free)
    folder = (out or RUNS).absolute()
    while not folder.is_dir():
        folder = folder.parent
    name = "the run folder" if out is None else str(out)
    if in_memory(folder):
        return Space(f"{name}, whose files are in memory", 0)
    return Space(name, shutil.disk_usage(folder).free)


def with_whole_scratch(config: Config) -> Config:
    """Return the configuration with the whole path of run.scratch: a run goes on from whatever folder it is called in."""
    if not config.run.scratch:
        return config
    scratch = str(Path(config.run.scratch).absolute())
    return dataclasses.replace(config, run=dataclasses.replace(config.run, scratch=scratch))


def in_memory(folder: Path) -> bool:
    """Return whether files of a folder are in memory, where rows would take what they save."""
    try:
        device = folder.stat().st_dev
        mounts = [line.partition(" - ") for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    except OSError:  # not Linux
        return False
    number = f"{os.major(device)}:{os.minor(device)}"
    return any(head.split()[2] == number and tail.split()[0] in ("tmpfs", "ramfs") for head, _, tail in mounts)


def space_elsewhere(config: Config) -> Space:
    """Return the same for a machine that is not at hand: as much as it takes."""
    return Space(HOST if config.last_rung == "host" else config.run.scratch or "the run folder", ANY)


def climb(config: Config, planned: Planned, limit: int, space: Space) -> RunPlan:
    """Return the plan of the first rung that fits into `limit` bytes of a rank, and into `space`; if none does, the first.

    Its configuration is `config`: what was chosen is the plan's alone, and decided anew for every graph and machine.
    Without a ladder if everything fits. Raises: as `planned`.
    """
    if config.run.capacity != "auto":
        plan = planned(config, limit if config.run.capacity == "disk" else 0)
        if plan.on_host and plan.largest.total_bytes > limit:
            plan = planned(config, limit)  # in further steps, whose copies nothing runs beside
        moves = plan.on_disk or plan.on_host
        return dataclasses.replace(plan, ladder=_ladder(limit, (), space, plan)) if moves else plan
    first = dataclasses.replace(planned(config.on_rung("memory"), 0), config=config)
    if first.largest.total_bytes <= limit or not config.climbs:
        return first
    passed = [first]
    if config.run.recompute == "off":
        again = dataclasses.replace(planned(config.on_rung("recompute"), 0), config=config, again=True)
        if again.largest.total_bytes <= limit:
            return dataclasses.replace(again, ladder=_ladder(limit, passed, space))
        if again.largest.total_bytes < first.largest.total_bytes:
            passed.append(again)
    try:
        last = dataclasses.replace(planned(config.on_rung(config.last_rung), limit), config=config)
    except (ConfigError, PlanError) as error:
        missing = str(error).partition(";")[0]
        return dataclasses.replace(first, ladder=_ladder(limit, passed, space, missing=missing))
    ladder = _ladder(limit, passed, space, last)
    fits = last.largest.total_bytes <= limit and ladder.has_space
    return dataclasses.replace(last if fits else first, ladder=ladder)


def _ladder(
    limit: int, passed: Sequence[RunPlan], space: Space, last: RunPlan | None = None, missing: str = ""
) -> Ladder:
    need = 0
    if last is not None:  # this machine has the files, or the pinned memory, of its own ranks
        each = sorted(rank.host_bytes if rank.disk is None else rank.disk.file_bytes for rank in last.ranks)
        need = sum(each[-ranks_here(len(each)) :])
    return Ladder(limit=limit, passed=tuple(passed), space=space, last=last, last_bytes=need, missing=missing)
