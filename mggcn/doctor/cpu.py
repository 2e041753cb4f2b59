"""Doctor: kernel library and what it measured, OpenMP runtimes, the gloo transport, system, cores and memory."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from mggcn.doctor.findings import Finding
from mggcn.errors import BackendError
from mggcn.host import machine_memory
from mggcn.report.figure import GIB, format_bytes

if TYPE_CHECKING:
    from mggcn.backend.cpu.figures import Figures

KernelLibrary = Callable[[], tuple[str, str]]
"""Loads the CPU kernels; returns the library's path and instruction sets."""

_REINSTALL = "reinstall mggcn where a C++ compiler is present: pip install --force-reinstall --no-deps mggcn"


def native_library() -> tuple[str, str]:
    """Load the library that this installation built."""
    from mggcn import native

    return str(native.path()), native.sets_in_use()


def check_kernels(library: KernelLibrary) -> Finding:
    """Load the CPU kernels."""
    try:
        path, isa = library()
    except (ImportError, OSError, AttributeError, BackendError) as error:
        return Finding("CPU kernels", "broken", str(error), _REINSTALL)
    return Finding("CPU kernels", "ok", f"{isa}, {path}")


@dataclass(frozen=True, slots=True)
class DenseUnits:
    """What multiplies dense matrices: instruction sets, their measured rates, and AMX, which Linux must permit."""

    kernels: tuple[str, ...]
    figures: Figures | None
    amx: bool
    granted: bool
    threads: int = 1
    """Of which the figures are: the most of which any are kept."""


def dense_units() -> DenseUnits:
    """Find what this processor and its operating system offer for dense products."""
    from mggcn.backend.cpu.cores import usable_cores
    from mggcn.backend.cpu.kept_figures import kept_figures
    from mggcn.backend.cpu.machine import amx_granted, dense_kernels, has_amx, this_host

    cores = usable_cores()
    kept = ((threads, kept_figures(this_host(threads))) for threads in range(cores, 0, -1))
    threads, figures = next(((threads, figures) for threads, figures in kept if figures is not None), (cores, None))
    return DenseUnits(dense_kernels(), figures, has_amx(), amx_granted(), threads)


def check_dense(units: Callable[[], DenseUnits] = dense_units) -> Finding:
    """Show which kernel multiplies which type, and whether the processor has AMX."""
    from mggcn.backend.cpu.figures import ASSUMED
    from mggcn.backend.cpu.variants import gemm_kernel, gemm_variant

    here = units()
    if gemm_variant(here.kernels[-1]) == "torch":
        types = "float32, float64 by torch, bfloat16 converted for it: no dense kernels of ours for this processor"
    else:
        figures = here.figures or ASSUMED
        by = {item: gemm_kernel(figures, item, "rows", here.kernels) for item in (4, 2)}
        types = f"float32, float64 by {by[4]}, bfloat16 by {by[2]}"
        sums = gemm_kernel(figures, 2, "sums", here.kernels)
        types += f" (h^T g by {sums})" * (sums != by[2]) + " until it is measured" * (not figures.measured)
    amx = "not shown by the system"
    if here.amx:
        amx = "granted by the system" if here.granted else "refused by the system"
    return Finding("dense products", "ok", f"{types}; AMX {amx}")


def check_rates(units: Callable[[], DenseUnits] = dense_units) -> Finding:
    """Show the measured figures of this machine, by which kernels are chosen."""
    from mggcn.backend.cpu.figures import TYPICAL_ROW

    here = units()
    figures = here.figures
    if figures is None:
        return Finding("measured rates", "ok", "none yet: the first run measures them, in 0.3 s, and keeps them")
    if not figures.measured:
        return Finding("measured rates", "ok", "none yet: other programs had the cores; the next run measures them")
    gathers = [
        f"{TYPICAL_ROW / figures.entry_s(TYPICAL_ROW, size, ahead=True) / 1e9:.0f} from {format_bytes(size)}"
        for size in figures.footprints
    ]
    threads = f"{here.threads} thread{'s' * (here.threads > 1)}"
    dense = [f"{r.dtype} {r.shape} {r.kernel} {r.flop_s / 1e9:.0f}" for r in figures.dense]
    return Finding(
        "measured rates",
        "ok",
        f"{threads}; rows of {TYPICAL_ROW} bytes at random, GB/s: {', '.join(gathers)}; "
        f"passes {figures.copy_rate / 1e9:.0f} GB/s; "
        f"dense products, GFLOP/s: {', '.join(dense) or 'torch alone'}; measure again with mggcn tune",
    )


def check_openmp(maps: Path = Path("/proc/self/maps")) -> Finding:
    """Count the OpenMP runtimes (libgomp, libomp, libiomp5) in this process, once torch and the kernels are loaded."""
    try:
        lines = [line.split(maxsplit=5) for line in maps.read_text().splitlines()]
    except OSError:
        return Finding("OpenMP", "missing", f"cannot be checked: there is no {maps} here")
    paths = {fields[5].strip().removesuffix(" (deleted)") for fields in lines if len(fields) == 6}
    found = sorted(path for path in paths if re.match(r"lib[gi]?omp\d*(-[0-9a-f]+)?\.so", Path(path).name))
    if len(found) == 1:
        return Finding("OpenMP", "ok", f"one runtime, {found[0]}")
    if not found:
        return Finding("OpenMP", "broken", "no runtime is loaded: torch or the CPU kernels do not load", _REINSTALL)
    remedy = "two thread pools slow each other down: install torch and mggcn by pip into a fresh environment"
    return Finding("OpenMP", "broken", f"{len(found)} runtimes in one process: {', '.join(found)}", remedy)


def check_gloo() -> Finding:
    """All-reduce one number over gloo with a single rank, through a file store."""
    import torch
    from torch import distributed

    if not (distributed.is_available() and distributed.is_gloo_available()):
        remedy = "install a torch build with torch.distributed for --ranks > 1 in processes, or use --transport threads"
        return Finding("gloo", "missing", "this torch was built without it", remedy)
    if distributed.is_initialized():
        return Finding("gloo", "ok", f"a process group ({distributed.get_backend()}) is already at work")
    number = torch.full((3,), 2.5)
    try:
        with tempfile.TemporaryDirectory() as folder:
            store = (Path(folder) / "store").as_uri()
            distributed.init_process_group(
                "gloo", init_method=store, rank=0, world_size=1, timeout=timedelta(seconds=30)
            )
            try:
                distributed.all_reduce(number)
            finally:
                distributed.destroy_process_group()
    except (RuntimeError, OSError, ValueError) as error:
        remedy = "check that the host name resolves (/etc/hosts), or name an interface: GLOO_SOCKET_IFNAME=lo"
        return Finding("gloo", "broken", f"self-test failed: {error}", remedy)
    if number.tolist() != [2.5] * 3:
        return Finding("gloo", "broken", f"self-test gave {number.tolist()}, expected 2.5 thrice", "reinstall torch")
    return Finding("gloo", "ok", "self-test passed")


def check_system() -> Finding:
    """Name the system and processor, as torch's collect_env does, and the cores and threads."""
    import torch
    from torch.utils import collect_env

    from mggcn.backend.cpu.cores import usable_cores

    processor = collect_env.get_cpu_info(collect_env.run)
    parts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in processor.splitlines())}
    nodes, usable, asked = parts.get("NUMA node(s)", "1"), usable_cores(), os.environ.get("OMP_NUM_THREADS", "")
    shown = [
        collect_env.get_os(collect_env.run),
        collect_env.get_libc_version(),
        parts.get("Model name"),
        f"{nodes} NUMA nodes" if nodes != "1" else "",
        f"{usable} of {os.cpu_count()} cores usable",
        f"torch starts {torch.get_num_threads()} threads",
        f"OMP_NUM_THREADS={asked}" if asked else "",
    ]
    crowded = asked.isdigit() and int(asked) > usable
    remedy = f"OMP_NUM_THREADS asks for more threads than cores; {usable} is enough" if crowded else ""
    return Finding("system", "ok", ", ".join(filter(None, shown)), remedy)


def check_memory(root: Path = Path("/")) -> Finding:
    """Show how much memory a run may take."""
    memory = machine_memory(root)
    if memory is None:
        return Finding("memory", "missing", "cannot be read here", "give runs a limit: --memory-limit BYTES")
    limit = "no cgroup limit" if memory.cgroup_limit is None else f"cgroup limit {format_bytes(memory.cgroup_limit)}"
    detail = f"{format_bytes(memory.available)} free of {format_bytes(memory.total)}, {limit}"
    remedy = "little is free; only small graphs will fit" if memory.available < GIB else ""
    return Finding("memory", "ok", detail, remedy)
