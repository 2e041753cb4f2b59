"""Doctor: what --device cuda needs: a driver and GPUs, torch built for CUDA, a CuPy of the same major version, kernels that
compute, and NCCL, tried in a process with a time limit.

Torch says what it knows. CuPy is imported only where a GPU and CuPy are both there, and after torch; its own kernels need
CUDA's headers, which runs do without, so none of them is used here.
"""

from __future__ import annotations

import functools
import importlib
import json
import subprocess
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations, groupby
from typing import Any

from mggcn.doctor.findings import Finding
from mggcn.doctor.packages import installed_version
from mggcn.errors import BackendError
from mggcn.host import python
from mggcn.report.figure import format_bytes

CUPY = ("cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x", "cupy")
NCCL = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")
OLDEST = (7, 0)
"""Volta: the oldest architecture that mggcn's kernels are compiled for."""
BF16 = (8, 0)
"""Ampere: the oldest architecture that computes with bfloat16."""
PROBE = "rows.cu"
"""The file of the kernel that is tried."""
LIMIT_S = 90.0
"""Importing torch takes seconds, starting NCCL on eight GPUs some more."""
_TORCH = "install torch for the driver's CUDA, see pytorch.org (for a V100: built for CUDA 12.6), or a newer driver"
_HANGS = (
    "run NCCL_DEBUG=INFO mggcn doctor to see where; NCCL_P2P_DISABLE=1 tries the path over host memory, and containers "
    "need --ipc=host or --shm-size=1g"
)

Run = Callable[[list[str], float], str]
"""Runs a command with a time limit in seconds; returns what it printed."""


@dataclass(frozen=True, slots=True)
class Machine:
    """This machine's GPUs as torch and nvidia-smi report them."""

    driver: str | None
    listed: str
    """What nvidia-smi lists, also where torch is built for the CPU; "" for nothing."""
    gpus: tuple[Any, ...] = ()
    """torch.cuda.get_device_properties of those that torch can use."""
    apart: tuple[tuple[int, int], ...] = ()
    """Pairs of these of which one at least cannot access the other's memory."""
    cuda: str | None = None
    """The version that torch is built for; None for a build for the CPU."""
    warned: str = ""
    """What torch warns of, such as a driver that is too old, or a GPU for which it has no kernels."""

    @property
    def install(self) -> str:
        """The command that installs CuPy."""
        if self.cuda is None:
            return "pip install cupy-cuda12x (driver for CUDA 12) or cupy-cuda13x (CUDA 13)"
        return f"pip install cupy-cuda{self.cuda.partition('.')[0]}x"


def find_machine() -> Machine:
    """Ask torch and nvidia-smi about the GPUs, without computing on any."""
    import torch
    from torch.utils import collect_env

    driver = collect_env.get_nvidia_driver_version(collect_env.run)
    listed = collect_env.get_gpu_info(collect_env.run)
    gpus: tuple[Any, ...] = ()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            if torch.cuda.is_available():
                gpus = tuple(map(torch.cuda.get_device_properties, range(torch.cuda.device_count())))
        except RuntimeError as error:
            warnings.warn(str(error), stacklevel=1)
    reach = torch.cuda.can_device_access_peer
    apart = tuple((a, b) for a, b in combinations(range(len(gpus)), 2) if not (reach(a, b) and reach(b, a)))
    said = " ".join(str(warning.message) for warning in warned)
    return Machine(driver, listed or "", gpus, apart, torch.version.cuda, said)


def check_gpus(machine: Machine) -> Finding:
    """Show driver and GPUs, their memory and their limits."""
    if not machine.gpus:
        shown = f"driver {machine.driver}, {machine.listed}" if machine.driver else "none here; runs use the CPU"
        remedy = "look at nvidia-smi and CUDA_VISIBLE_DEVICES; a container needs --gpus all"
        return Finding("GPUs", "missing", shown, remedy * bool(machine.driver))
    named = [f"{g.name} ({format_bytes(g.total_memory)}, sm_{g.major}{g.minor})" for g in machine.gpus]
    runs = [(name, len(list(same))) for name, same in groupby(named)]
    shown = ", ".join(f"{count} x {name}" if count > 1 else name for name, count in runs)
    shown += f"; driver {machine.driver}" * bool(machine.driver)
    least = min((gpu.major, gpu.minor) for gpu in machine.gpus)
    if least < OLDEST:
        remedy = "mggcn needs sm_70 (V100) or newer: hide older ones by CUDA_VISIBLE_DEVICES"
        return Finding("GPUs", "missing", shown, remedy)
    return Finding("GPUs", "ok", shown + "; --precision bf16 and tf32 need sm_80 or newer" * (least < BF16))


def check_peers(machine: Machine) -> Finding:
    """Show which GPUs reach each other's memory; between the others NCCL goes through the host's memory."""
    name, count = "peer access", len(machine.gpus)
    if not machine.apart:
        return Finding(name, "ok", f"all {count} GPUs reach each other's memory" if count > 1 else "none needed")
    shown = ", ".join(f"{one}-{other}" for one, other in machine.apart)
    detail = f"{len(machine.apart)} of {count * (count - 1) // 2} pairs of GPUs have none: {shown}"
    remedy = "messages take the slower path over host memory; nvidia-smi topo -m shows how GPUs are connected"
    return Finding(name, "missing", detail, remedy)


def check_torch(machine: Machine, compute: bool) -> Finding:
    """Check whether torch can use the GPUs; without `compute` none of them computes."""
    import torch

    name, built = "torch CUDA", f"built for CUDA {machine.cuda}"
    if machine.cuda is None:
        return Finding(name, "missing", "torch is built for the CPU", _TORCH if machine.listed else "")
    if not machine.gpus and not machine.listed:
        return Finding(name, "missing", f"{built}, no GPU here")
    if not machine.gpus:
        return Finding(name, "broken", f"{built}, but it cannot use the GPU. {machine.warned}".strip(), _TORCH)
    try:
        total = torch.ones(3, device="cuda").sum().item() if compute else 3.0
    except RuntimeError as error:
        return Finding(name, "broken", f"{built}: {error} {machine.warned}".strip(), _TORCH)
    if total != 3.0:
        return Finding(name, "broken", "a sum on the GPU came out wrong", "reinstall torch and look at nvidia-smi")
    return Finding(name, "ok", f"{built}. {machine.warned}" if machine.warned else built, _TORCH * bool(machine.warned))


def installed(names: tuple[str, ...]) -> list[str]:
    """Return the versions of those of the given distributions that are installed."""
    return [f"{name} {version}" for name in names if (version := installed_version(name))]


def check_cupy(machine: Machine, compute: bool) -> Finding:
    """Import CuPy where it can work, compute with it, and compare its CUDA with torch's and the driver's."""
    found = installed(CUPY)
    anew = f"pip uninstall {' '.join(CUPY)}, then {machine.install}"
    if len(found) > 1:
        detail = f"several are installed: {', '.join(found)}"
        return Finding("CuPy", "broken" if machine.gpus else "missing", detail, f"they overwrite each other: {anew}")
    if not found:
        return Finding("CuPy", "missing", "not installed", f"for --device cuda: {machine.install}")
    if not machine.gpus:
        return Finding("CuPy", "missing", f"{found[0]} is installed, no GPU here that torch can use")
    try:
        cupy = importlib.import_module("cupy")
        built, newest = int(cupy.cuda.runtime.runtimeGetVersion()), int(cupy.cuda.runtime.driverGetVersion())
        if compute:
            cupy.cuda.Stream(non_blocking=True).synchronize()
    except Exception as error:  # CuPy raises its own classes, which exist only once it is imported.
        return Finding("CuPy", "broken", f"{found[0]}: {error}", anew)
    major = built // 1000
    shown = f"{found[0]}, CUDA {major}.{built % 1000 // 10}"
    if major > newest // 1000:
        return Finding("CuPy", "broken", f"{shown}; the driver has CUDA {newest // 1000}.{newest % 1000 // 10}", anew)
    if machine.cuda is not None and str(major) != machine.cuda.partition(".")[0]:
        return Finding("CuPy", "broken", f"{shown}; torch is built for CUDA {machine.cuda}", anew)
    return Finding("CuPy", "ok", shown)


def check_sources(cupy: Finding, compute: bool = True, device: str = "cuda") -> Finding:
    """Find the CUDA kernels and, where CuPy works, compile some for the GPU and compute with one."""
    name = "CUDA kernels"
    from mggcn.backend.cuda.kernels import folder

    try:
        sources = folder()
    except BackendError as error:
        remedy = "install mggcn again, see docs/install.md"
        return Finding(name, "broken" if cupy.state == "ok" else "missing", str(error), remedy)
    shown = f"{len(list(sources.glob('*.cu')))} files in {sources}"
    if cupy.state != "ok":
        return Finding(name, "missing", f"{shown}; CuPy, which compiles them, does not work here")
    if not compute:
        return Finding(name, "ok", shown)
    try:
        right = gathers(importlib.import_module("cupy"), device)
    except Exception as error:  # NVRTC's words, in a class of CuPy's
        remedy = "CuPy's NVRTC must load: see docs/install.md"
        return Finding(name, "broken", f"{PROBE} does not compile or run: {error}", remedy)
    if not right:
        return Finding(name, "broken", f"{PROBE} gathers wrong rows", "look at nvidia-smi, and for errors in dmesg")
    return Finding(name, "ok", f"{shown}, {PROBE} compiles and computes")


def gathers(cupy: Any, device: str) -> bool:
    """Gather rows with a kernel; return whether they are correct. Raises: what the compiler or the device raises."""
    import torch

    from mggcn.backend.cuda.compile import load_kernels
    from mggcn.backend.cuda.kernels import Kernels
    from mggcn.backend.cuda.rows import move_rows

    source = torch.arange(96, dtype=torch.float32, device=device).view(12, 8)
    index = torch.tensor([7, 0, 11], dtype=torch.int32, device=device)
    out = torch.zeros(3, 8, device=device)
    move_rows(Kernels(functools.partial(load_kernels, cupy), torch.float32), "gather_rows", source, index, out)
    return torch.equal(out, source[index.long()])


def run_command(command: list[str], limit_s: float) -> str:
    """Run a command. Raises: subprocess.TimeoutExpired; OSError with its last line if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["nothing said"])[-1]
        raise OSError(f"exited with code {done.returncode}: {last}")
    return done.stdout


def check_nccl(machine: Machine, compute: bool, run: Run = run_command, limit_s: float = LIMIT_S) -> Finding:
    """All-reduce over all GPUs of this machine by torch's NCCL; two wheels of NCCL overwrite each other's file."""
    name, count, found = "NCCL", len(machine.gpus), installed(NCCL)
    if len(found) > 1:
        wheel = NCCL[0] if (machine.cuda or "12").startswith("12") else NCCL[1]
        remedy = f"they share a file: pip uninstall {' '.join(NCCL)}, then pip install --force-reinstall {wheel}"
        state: Any = "broken" if machine.gpus else "missing"
        return Finding(name, state, f"several are installed: {', '.join(found)}", remedy)
    if not machine.gpus:
        return Finding(name, "missing", "not needed: no GPU here that torch can use")
    if not compute:
        return Finding(name, "ok", ", ".join(found) or "no wheel of it is installed: torch brings its own")
    try:
        answer = json.loads(run([*python("mggcn.doctor.nccl_selftest"), str(count)], limit_s).splitlines()[-1])
    except subprocess.TimeoutExpired:
        return Finding(name, "broken", f"self-test: no result within {limit_s:.0f} s on {count} GPUs", _HANGS)
    except (OSError, ValueError, IndexError) as error:
        return Finding(name, "broken", f"self-test: it died: {error}", _HANGS)
    if "error" in answer or answer["wrong"]:
        detail = answer.get("error") or f"wrong sums on GPUs {answer['wrong']}"
        return Finding(name, "broken" if count > 1 else "missing", f"self-test: {detail}", _HANGS)
    return Finding(name, "ok", f"{answer['version']}, self-test passed on {count} GPU{'s' * (count != 1)}")
