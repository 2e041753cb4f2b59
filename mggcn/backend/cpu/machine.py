"""The machine as the choice of CPU kernels sees it: its name, and its units for bfloat16. Needs no torch."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mggcn import native
from mggcn.backend.cpu.cores import usable_names

CPUINFO = Path("/proc/cpuinfo")
MACHINE_ID = Path("/etc/machine-id")
# arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) of Linux on x86-64
_ARCH_PRCTL: Final = 158
_REQUEST_PERMISSION: Final = 0x1023
_TILE_DATA: Final = 18
_X86_NUMBERS: Final = {"cpu family": "family", "model": "model", "stepping": "stepping"}


@dataclass(frozen=True, slots=True)
class Host:
    """A machine for which figures and variants of products were measured."""

    processor: str
    kernels: str
    """Instruction sets."""
    threads: int
    """Of one rank."""
    cores: str
    """Those that the process may use, as 0-3,8; "" of a GPU."""


def processor_name() -> str:
    """Return the processor's name and numbers as the kernel gives them, to identify measurements.

    The numbers tell generations apart that a virtual machine gives one name.
    """
    name = _field("model name")
    if not name:
        return _core_design() or platform.processor()
    numbers = [f"{short} {value}" for key, short in _X86_NUMBERS.items() if (value := _field(key))]
    return f"{name} ({', '.join(numbers)})" if numbers else name


def machine_digest() -> str:
    """Return a digest that tells this machine from others of its kind, which may share its home folder."""
    try:
        own = MACHINE_ID.read_text().strip()
    except OSError:
        own = ""
    return hashlib.sha256((own or platform.node()).encode()).hexdigest()[:16]


def _core_design() -> str:
    """The numbers by which Linux tells ARM cores from each other: it gives them no name."""
    numbers = [f"{name} {value}" for name in ("implementer", "part", "variant") if (value := _field(f"CPU {name}"))]
    return f"CPU {', '.join(numbers)}" if numbers else ""


def _field(name: str) -> str:
    fields = (line.partition(":") for line in _cpuinfo())
    return next((value.strip() for key, _, value in fields if key.strip() == name), "")


def _cpuinfo() -> list[str]:
    try:
        return CPUINFO.read_text().splitlines()
    except OSError:
        return []


@functools.cache
def has_amx() -> bool:
    """Return whether the processor multiplies tiles of bfloat16 (AMX)."""
    return "amx_bf16" in next((line.split() for line in _cpuinfo() if line.startswith(("flags", "Features"))), ())


@functools.cache
def amx_granted() -> bool:
    """Ask Linux once for permission to use AMX's tiles, without which they cannot be used; return whether it was given.

    Threads that are started later inherit the permission.
    """
    if not has_amx() or platform.machine() != "x86_64" or sys.maxsize < 2**32:
        return False
    return int(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA)) == 0


def dense_kernels() -> tuple[str, ...]:
    """Return the instruction sets of dense products that may be chosen from, slowest by design first.

    Raises: BackendError without compiled kernels.
    """
    known = native.dense_isas()
    usable = known[: known.index(native.dense_isa()) + 1]
    return (*usable, "amx") if usable[-1] == "avx512_bf16" and amx_granted() else usable


def this_host(threads: int) -> Host:
    """Return this machine as the key of figures of so many threads. Raises: BackendError without compiled kernels."""
    return Host(processor_name(), " ".join((native.isa(), *dense_kernels())), threads, usable_names())
