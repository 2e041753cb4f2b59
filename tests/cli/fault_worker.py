"""Runs commands of mggcn in forked processes with a fault planted in each: argv is a file of cases as JSON.

Prints a JSON line for each case: exit status as subprocess has it, and what was said on stderr. torch is loaded once.
A case may be another program instead, such as one that mounts what the next commands fill.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch  # noqa: F401  before any fork
import torch

from mggcn.assemble import rank as assemble_rank  # noqa: F401
from mggcn.backend.cpu.backend import CpuBackend
from mggcn.cli import entry as cli


def counted(function: Callable[..., Any], act: Callable[[], None]) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        act()
        return function(*arguments, **named)

    return call


def plant(case: dict[str, Any]) -> None:
    """kill_at: SIGKILL at so many-th durable write; fsize: bytes that a file may have; allocate: the one that fails."""
    if "kill_at" in case:
        left = [int(case["kill_at"])]

        def strike() -> None:
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)

        os.fsync = counted(os.fsync, strike)
        for name in ("rename", "write_text", "mkdir"):
            setattr(Path, name, counted(getattr(Path, name), strike))
    if "fsize" in case:
        resource.setrlimit(resource.RLIMIT_FSIZE, (case["fsize"], case["fsize"]))
    if "allocate" in case:
        remaining = [int(case["allocate"])]

        def fail() -> None:
            remaining[0] -= 1
            if not remaining[0]:
                raise MemoryError("planted: an allocation of the rank")

        CpuBackend.allocate = counted(CpuBackend.allocate, fail)  # type: ignore[method-assign]


def run(case: dict[str, Any]) -> dict[str, Any]:
    if "program" in case:
        done = subprocess.run(case["program"], capture_output=True, text=True, check=False)
        return {"code": done.returncode, "err": done.stderr}
    reads, writes = os.pipe()  # no file: the size of files may be limited
    pid = os.fork()
    if not pid:
        code = 99
        try:
            os.dup2(writes, 2)
            plant(case)
            code = cli.main(case["command"])
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(writes)
    with os.fdopen(reads, errors="replace") as said:
        err = said.read()
    return {"code": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), "err": err}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for each in json.loads(Path(sys.argv[1]).read_text()):
        print(json.dumps(run(each)), flush=True)
