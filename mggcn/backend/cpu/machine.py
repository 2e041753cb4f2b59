"""The properties of a machine on which the choice of CPU kernels depends: caches, name, units for bfloat16. Needs no
torch.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mggcn.backend.cpu.cores import cores_in

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
CPUINFO = Path("/proc/cpuinfo")
# arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) of Linux on x86-64
_ARCH_PRCTL: Final = 158
_REQUEST_PERMISSION: Final = 0x1023
_TILE_DATA: Final = 18


@dataclass(frozen=True, slots=True)
class Caches:
    """Bytes of cache: each thread's own, and the part of the shared cache that all threads of a rank have together."""

    own_bytes: int
    shared_bytes: int


USUAL = Caches(2**20, 2**24)
"""Assumed for a machine that does not report its caches: a small server's share for two threads."""


def caches_of(threads: int) -> Caches:
    """Return the caches of a rank's threads, as Linux reports them; USUAL where it does not.

    Fewer threads than cores share the last cache with other ranks: their part of it counts. More threads than cores have
    several such caches, each of which then holds the same rows of an operand: the size of one counts.
    """
    found = _levels()
    if 2 not in found:
        return USUAL
    own, _ = found[2]
    size, cores = found.get(3, found[2])
    return Caches(own, max(own, size * min(threads, cores) // cores))


@functools.cache
def _levels() -> dict[int, tuple[int, int]]:
    """Bytes of each level's data cache, and how many cores share it."""
    found = {}
    for index in sorted(CACHES.glob("index*")):
        try:
            if (index / "type").read_text().strip() != "Instruction":
                size = (index / "size").read_text().strip()
                scale = {"K": 2**10, "M": 2**20, "G": 2**30}[size[-1]]
                shared = len(cores_in((index / "shared_cpu_list").read_text()))
                found[int((index / "level").read_text())] = (int(size[:-1]) * scale, shared)
        except (OSError, ValueError, KeyError):
            continue
    return found


@dataclass(frozen=True, slots=True)
class Host:
    """A machine, to which measured variants of products belong."""

    processor: str
    kernels: str
    """The instruction set."""
    threads: int
    """Of one rank."""
    caches: Caches


def processor_name() -> str:
    """Return the processor's name as the kernel gives it, for the record of a run and for what was measured on it."""
    return _field("model name") or _core_design() or platform.processor()


def _core_design() -> str:
    """The numbers by which Linux tells ARM cores from each other: it gives them no name."""
    numbers = [f"{name} {value}" for name in ("implementer", "part", "variant") if (value := _field(f"CPU {name}"))]
    return f"CPU {', '.join(numbers)}" if numbers else ""


def _field(name: str) -> str:
    return next((line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith(name)), "")


def _cpuinfo() -> list[str]:
    try:
        return CPUINFO.read_text().splitlines()
    except OSError:
        return []


def has_slow_pairs() -> bool:
    """Return whether vdpbf16ps, which multiplies pairs of bfloat16, is slower than multiply-adds of float32.

    Measured on a Xeon with AMX: 69 against 137 GFLOP/s a core. On a Zen 4 pairs have twice the rate by design.
    """
    return _field("vendor_id") == "GenuineIntel"


@functools.cache
def has_amx() -> bool:
    """Return whether the processor multiplies tiles of bfloat16 (AMX)."""
    return "amx_bf16" in _flags()


def amx_granted() -> bool:
    """Ask Linux for the tiles of AMX, which a process may use only once it has asked; return whether it gave them."""
    if not has_amx() or platform.machine() != "x86_64" or sys.maxsize < 2**32:
        return False
    return int(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA)) == 0


def _flags() -> set[str]:
    return next((set(line.split()) for line in _cpuinfo() if line.startswith(("flags", "Features"))), set())
