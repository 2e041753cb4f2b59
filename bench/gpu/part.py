"""Processes of a task of `python -m bench.gpu`, one after the other: each adds rows of JSON to those that it finds."""

from __future__ import annotations

import contextlib
import importlib
import json
import shlex
import subprocess
import sys
import time
import traceback
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

ELSEWHERE = {"variants": ("spmm", "measure_variants"), "compile": ("epoch", "measure_compiled")}
"""Module and function of a part that has no module of its own."""


def device_facts(lab: Any) -> dict[str, Any]:
    """What the report says of the GPU and of the software that only a GPU needs."""
    import torch

    traits = lab.device.traits
    facts = {"name": traits.name, "sm": traits.multiprocessors, "l2_bytes": traits.l2_bytes, "cuda": torch.version.cuda}
    facts["capability"] = ".".join(map(str, traits.capability))
    for package in ("cupy-cuda12x", "cupy-cuda13x", "cupy"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            facts[package] = metadata.version(package)
    query = "driver_version,memory.total,clocks.max.sm,clocks.max.mem,power.limit"
    with contextlib.suppress(OSError):
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "--id=0"]
        facts[query] = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return facts


def run(job: dict[str, Any]) -> int:
    """Go on with a task; a row of the kind "end" says why it ended, if not because it was done.

    Returns 0 if it is done, AGAIN if another process is to go on, otherwise 1.
    """
    from bench.gpu.lab import AgainError, Lab, OutOfTimeError, Settings, shortened
    from bench.gpu.tasks import AGAIN, read_rows
    from bench.report import surroundings, taken_by_others

    part, case, path, digest, data = (job.pop(key) for key in ("part", "case", "file", "digest", "graph"))
    began, stopped = time.monotonic(), ""
    found = read_rows(Path(path))
    with open(path, "a") as log:
        log.write("\n")  # a process that was ended may have left half a line
        lab = Lab(Settings(**job), log, found)
        how = {key: value for key, value in job.items() if key not in ("cache", "data")}  # paths of this machine
        around = surroundings() | {"command": shlex.join(["python", "-m", "bench.gpu.part", part, case])}
        lab.write(kind="start", settings=how, data=data, digest=digest, surroundings=around, device=device_facts(lab))
        try:
            module, function = ELSEWHERE.get(part, (part, "measure"))
            getattr(importlib.import_module(f"bench.gpu.{module}"), function)(lab, case)
        except AgainError:
            return AGAIN
        except OutOfTimeError as error:
            stopped = str(error)
        except Exception as error:  # whatever ends a part, its rows and the reason reach the report
            traceback.print_exc()
            stopped = shortened(error)
        others = taken_by_others(around["began"])
        lab.write(kind="end", seconds=time.monotonic() - began, stopped=stopped, taken_by_others=others)
    return int(bool(stopped))


if __name__ == "__main__":
    warnings.filterwarnings("ignore", "Sparse")
    sys.exit(run(json.loads(sys.argv[1])))
