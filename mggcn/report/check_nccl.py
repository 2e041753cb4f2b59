"""Doctor: one NCCL of the right CUDA major, and whether it sums over all GPUs, tried in a process with a time limit."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from typing import Any, Literal

from mggcn.host import python
from mggcn.report.check_packages import installed_version
from mggcn.report.findings import Finding

WHEELS = {12: "nvidia-nccl-cu12", 13: "nvidia-nccl-cu13"}
LIMIT_S = 90.0
"""Importing torch and CuPy takes seconds, starting NCCL on eight GPUs some more."""
_HANGS = (
    "run NCCL_DEBUG=INFO mggcn doctor to see where; NCCL_P2P_DISABLE=1 tries the path over host memory, and containers "
    "need --ipc=host or --shm-size=1g"
)

Run = Callable[[list[str], float], str]
"""Runs a command with a time limit in seconds; returns what it printed."""


def run_command(command: list[str], limit_s: float) -> str:
    """Run a command. Raises: subprocess.TimeoutExpired; OSError with its last words if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["nothing said"])[-1]
        raise OSError(f"ended with code {done.returncode}: {last}")
    return done.stdout


def check_nccl_packages(cupy: Finding, torch_cuda: tuple[int, ...] | None) -> Finding:
    """Look for NCCL's wheels: two of them overwrite each other's file, and one should be of torch's CUDA."""
    name = "NCCL"
    found = {major: f"{wheel} {version}" for major, wheel in WHEELS.items() if (version := installed_version(wheel))}
    bad: Literal["broken", "missing"] = "broken" if cupy.state == "ok" else "missing"
    major = 12 if torch_cuda is None else torch_cuda[0]
    wheel = WHEELS.get(major, WHEELS[13])
    anew = f"pip uninstall {' '.join(WHEELS.values())}, then pip install --force-reinstall --no-deps {wheel}"
    if len(found) > 1:
        return Finding(name, bad, f"several are installed: {', '.join(found.values())}", f"they share a file: {anew}")
    if found and torch_cuda is not None and major not in found:
        return Finding(name, bad, f"{next(iter(found.values()))}; torch is built for CUDA {major}", anew)
    shown = next(iter(found.values()), "no wheel of it is installed")
    if cupy.state != "ok":
        return Finding(name, "missing", f"{shown}; is used through CuPy, which does not work here", "CPUs need none")
    if not found:
        return Finding(name, "ok", f"{shown}; a system's library is used if there is one")
    return Finding(name, "ok", shown)


def check_nccl(cupy: Finding, num_gpus: int, run: Run = run_command, limit_s: float = LIMIT_S) -> Finding:
    """All-reduce over all GPUs of this machine through CuPy, as `--transport nccl` does."""
    name = "NCCL self-test"
    if cupy.state != "ok":
        return Finding(name, "missing", "not run: CuPy does not work here")
    try:
        said = run([*python("mggcn.report.nccl_selftest"), str(num_gpus)], limit_s)
        answer = json.loads(said.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return Finding(name, "broken", f"no result within {limit_s:.0f} s on {num_gpus} GPUs", _HANGS)
    except (OSError, ValueError, IndexError) as error:
        return Finding(name, "broken", f"it died: {error}", _HANGS)
    return _judged(name, answer, num_gpus)


def _judged(name: str, answer: dict[str, Any], num_gpus: int) -> Finding:
    if "error" in answer:
        install = f"pip install {' or '.join(WHEELS.values())}, the one of torch's CUDA"
        return Finding(name, "broken" if num_gpus > 1 else "missing", answer["error"], f"for several GPUs: {install}")
    if answer["wrong"]:
        return Finding(name, "broken", f"wrong sums on GPUs {answer['wrong']}", _HANGS)
    number, loaded = answer["version"], answer["libraries"]
    shown = f"{number // 10000}.{number // 100 % 100}.{number % 100}, {num_gpus} GPU{'s' * (num_gpus != 1)}"
    if len(loaded) > 1:
        remedy = "torch and CuPy found one each: install torch, CuPy and NCCL by pip into a fresh environment"
        return Finding(name, "broken", f"{shown}, but {len(loaded)} NCCLs in one process: {', '.join(loaded)}", remedy)
    return Finding(name, "ok", ", ".join([shown, *loaded]))
