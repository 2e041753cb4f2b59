"""What the CUDA kernels take of a GPU: registers, shared memory and spills of everything the launchers ask for.

Compiled with nvcc for the architectures of CUDA 13, and for the V100 (sm_70) with NVRTC of CUDA 12. Needs no GPU: nothing
here is a measurement of one. Kernels that spill are listed first.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from bench.report import parse, surroundings, table, write_report
from tests.cuda import nvcc, nvrtc
from tests.cuda.nvcc import ARCHITECTURES, Resources
from tests.cuda.units import WIDTHS, Unit, all_units

V100 = 70
PARTITIONS, REGISTERS = 4, 16384
"""Of a multiprocessor, and registers of each; all these architectures alike."""
MOST_WARPS = {70: 64, 75: 32, 80: 64, 90: 64, 100: 64, 120: 48}
EVERY_WIDTH = range(1, 560)


def warps(registers: int, arch: int) -> int:
    """Warps of a multiprocessor for which the registers suffice: 256 of them are given to a warp at a time."""
    per_warp = -(-registers * 32 // 256) * 256
    return min(PARTITIONS * (REGISTERS // per_warp), MOST_WARPS[arch])


def rows(unit: Unit, found: list[Resources]) -> list[list[str | int]]:
    """A line per kernel: registers by architecture, most shared memory, least share of the warps, spilled bytes."""
    lines: list[list[str | int]] = []
    for kernel in sorted({r.kernel for r in found}):
        by_arch = {r.arch: r for r in found if r.kernel == kernel}
        held = [by_arch[arch].registers if arch in by_arch else "-" for arch in (V100, *ARCHITECTURES)]
        share = min(warps(r.registers, r.arch) / MOST_WARPS[r.arch] for r in by_arch.values())
        spilled = max(r.spill_stores + r.spill_loads for r in by_arch.values())
        shared = max(r.shared for r in by_arch.values())
        shape = str(unit).partition(" ")[2]
        lines.append([unit.path.name, kernel, shape, *held, shared, f"{share:.0%}", spilled])
    return lines


def main(arguments: list[str] | None = None) -> None:
    own: dict[str, dict[str, Any]] = {
        "every_width": {"action": "store_true", "help": "1 to 559 instead of the measured ones (4 times longer)"},
        "jobs": {"type": int, "default": len(os.sched_getaffinity(0))},
    }
    args = parse(__doc__, arguments=arguments, **own)
    compiler, library = nvcc.find(), nvrtc.find()
    if compiler is None:
        sys.exit("nvcc is not here: make test-all installs it, or pip install --group compilers")
    units = all_units(EVERY_WIDTH if args.every_width else WIDTHS)
    around = surroundings() | {"hardware": f"nvcc-{nvcc.version(compiler).replace('.', '-')}"}

    def compile_one(unit: Unit) -> list[Resources]:
        old = [] if library is None else nvrtc.compile_unit(library, unit, f"sm_{V100}")
        return [*old, *nvcc.compile_unit(compiler, unit)]

    with ThreadPoolExecutor(args.jobs) as pool:
        results = list(pool.map(compile_one, units))
    lines = [line for unit, found in zip(units, results, strict=True) for line in rows(unit, found)]
    lines.sort(key=lambda line: line[-1] == 0)
    spilling = sum(line[-1] != 0 for line in lines)
    head = [
        "file",
        "kernel",
        "options",
        *(f"sm_{arch}" for arch in (V100, *ARCHITECTURES)),
        "shared B",
        "warps",
        "spills B",
    ]
    old = "not compiled" if library is None else f"by NVRTC {nvrtc.version(library)}"
    body = (
        f"{len(units)} units, {len(lines)} kernels with their shapes, {spilling} of them spill. No GPU was used. sm_* are "
        f"registers per thread (sm_70 {old}); shared memory is the static one per block; warps: for which part of a "
        "multiprocessor's warps the registers suffice, on the architecture where that is least.\n\n"
    )
    record = {
        "surroundings": around,
        "units": [{"unit": str(u), "kernels": [asdict(r) for r in f]} for u, f in zip(units, results, strict=True)],
    }
    write_report(
        "kernel-resources",
        "Registers and shared memory of the CUDA kernels",
        body + table(head, lines),
        record,
        args.out,
    )


if __name__ == "__main__":
    main()
