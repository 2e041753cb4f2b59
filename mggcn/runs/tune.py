"""`mggcn tune`: measures what plans predict with, and writes it as a machine's file."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from mggcn.assemble.ladder import in_memory
from mggcn.assemble.plan import plan_shape
from mggcn.assemble.rank import make_backend
from mggcn.backend.base import Epilogue
from mggcn.backend.cpu.figures import ITEMS, DenseShape, Figures
from mggcn.backend.cpu.kept_figures import figures_of
from mggcn.backend.cpu.machine import processor_name, this_host
from mggcn.config import Config, RunConfig
from mggcn.cost.machine import read_machine
from mggcn.errors import ConfigError, PlanError, one_line, printable
from mggcn.files import reason, write_text
from mggcn.memory.pages import DiskRates
from mggcn.memory.units import free_bytes
from mggcn.planning.shape import GraphShape
from mggcn.runs.edge_rates import edge_rates
from mggcn.runs.epoch_rates import epoch_rates
from mggcn.runs.messages import measure_links, measure_nccl
from mggcn.train.disk_rates import measure_disk
from mggcn.version import __version__

if TYPE_CHECKING:
    from torch import Tensor

    from mggcn.backend.base import KernelBackend


@dataclass(frozen=True, slots=True)
class TuneSettings:
    """What to measure: threads of all ranks together, the numbers of ranks, and how long each figure may take."""

    threads: int
    ranks: tuple[int, ...] = (2, 4)
    seconds: float = 0.3

    def __post_init__(self) -> None:
        if self.threads < 1 or not self.ranks or min(self.ranks) < 2:
            raise ConfigError(
                f"mggcn tune needs 1 thread or more and numbers of ranks from 2 on, got {self.threads} and {self.ranks}"
            )
        if not 0 <= self.seconds < math.inf:
            raise ConfigError(f"--seconds must be 0 or more for each figure, got {self.seconds:g}")


PASSES: Final = ((2**20, 64), (2**22, 64), (2**24, 16), (2**25, 8), (2**27, 4))
"""Bytes that are read and written, and how often."""
ROUNDS: Final = 2
"""Over all of them: what holds up a thread for milliseconds would meet all calls of a small pass."""
CALLS: Final = 201
"""Calls that are timed."""
SWEPT: Final = 2**24
"""Bytes that are passed over before a call that begins an op."""
DENSE_ROWS: Final = 2**15
"""Rows of the dense products that are timed: as many as a layer's, so that their beginnings do not count."""
DENSE_WIDTHS: Final = (16, 32, 64, 128, 256)
"""Widths of these, both alike. Wider products are taken to run at the rate of the widest, which nobody has measured."""
DENSE_CALLS: Final = 5


def tune_machine(
    settings: TuneSettings, folder: Path, report: Callable[[str], None], disk: Path | DiskRates | None = None
) -> dict[str, Any]:
    """Measure this machine's cores, memory and transports, and return the content of its file.

    The figures by which kernels are chosen are measured again, too, and cached where runs find them.

    folder: for the ranks' logs and results. report: called with what is measured next. disk: a folder on the disk on which
    runs may have rows, or what is known of it. Cost: under a minute on two cores, half a minute more for a disk, and some
    seconds for each number of GPUs between which NCCL is measured. Raises: CommError if ranks cannot be started;
    ConfigError, PlanError, TrainError if the disk cannot be measured.
    """
    processor = processor_name() or "unknown processor"
    rates = disk_table(disk, report)
    report("gathers, passes and dense products, by which kernels are chosen too")
    figures = figures_of(this_host(settings.threads), free_bytes(), anew=True)
    if not figures.measured:
        report("other programs take the cores: what follows of them is assumed; run this again on a quiet machine")
    content: dict[str, Any] = {
        "name": "tuned",
        "title": f"this machine ({processor}, {settings.threads} core{'s' * (settings.threads > 1)})",
        "origin": "measured" if figures.measured else "assumed",
        "device": device_table(figures, settings.threads),
        "link": measure_links(settings.ranks, settings.threads, settings.seconds, folder, report),
        "nccl": measure_nccl(settings.ranks, folder, report),
        **({"disk": rates} if rates else {}),
    }
    # Of assumed rates what is missing would be their error.
    found = beside_kernels(content, settings.threads, folder, report) if figures.measured else {}
    return content | {"device": {**content["device"], **found}}


def beside_kernels(
    content: Mapping[str, Any], threads: int, folder: Path, report: Callable[[str], None]
) -> dict[str, float]:
    """Return what `epoch_rates` finds for a machine's file of this content; {} if memory is too short for its runs."""
    report("epochs of generated graphs, for what they take beside their kernels")
    path = folder / "measured.toml"
    write_machine(content, path)
    try:
        found = epoch_rates(read_machine(path), threads, folder)
    except PlanError as error:
        report(f"not measured: {one_line(str(error))}")
        return {}
    return {name: _digits(value) for name, value in found.items()}


def disk_table(disk: Path | DiskRates | None, report: Callable[[str], None]) -> dict[str, float]:
    """Return the [disk] table of what is known of a disk, or of the one under a folder, measured; {} of none.

    Raises: ConfigError if files of the folder are in memory; PlanError, TrainError as `measure_disk`.
    """
    if disk is None:
        return {}
    if isinstance(disk, Path):
        where = printable(disk.absolute())
        if in_memory(disk):
            raise ConfigError(f"--scratch expects a folder on a disk, but files of {where} are in memory; name another")
        report(f"the disk of {where}, on which rows may be, for half a minute, by up to half of what is free there")
        disk = measure_disk(disk)
    return {name: _digits(rate) for name, rate in dataclasses.asdict(disk).items()}


def device_table(figures: Figures, threads: int) -> dict[str, Any]:
    """Return the [device] table of this machine's cores together: the figures as bytes and FLOP per second, and a call.

    A gathered row costs its bytes and `row_s`: rows of two widths from the nearest operand tell them apart.
    """
    near, wide, narrow = figures.footprints[0], figures.widths[-1], figures.widths[0]

    def gathered_s(width: int, size: int) -> float:
        return min(figures.entry_s(width, size, ahead=ahead) for ahead in (False, True))

    by_byte = (gathered_s(wide, near) - gathered_s(narrow, near)) / (wide - narrow)
    row_s = min(max(gathered_s(narrow, near) - narrow * by_byte, 0.0), 0.5 * gathered_s(narrow, near))
    gather = [(float(size), wide / (gathered_s(wide, size) - row_s)) for size in figures.footprints]
    backends = {name: cpu_backend(threads, name) for name in ITEMS.values()}
    probes = {name: _probe(backend, threads) for name, backend in backends.items()}
    least_s = min(seconds for seconds, _ in probes.values())
    dense = {item: figures.slowest_shape(item) for item in ITEMS}
    return {
        "kind": "cpu",
        "count": 1,
        "shared": True,
        "cores": threads,
        "memory_bytes": free_bytes(),
        "copy": copy_rates(backends["fp32"], least_s),
        "in_place": copy_rates(backends["fp32"], least_s, in_place=True),
        "gather": [[size, _digits(rate)] for size, rate in gather],
        "row_s": _digits(row_s),
        "call_s": _digits(call_seconds(backends["fp32"])),
        "op_s": _digits(call_seconds(backends["fp32"], SWEPT)),  # unless epochs say more
        "gemm": {name: _digits(dense[item] or probes[name][1]) for item, name in ITEMS.items()},
        "gemm_rows": {name: dense_rates(backend, threads, "rows") for name, backend in backends.items()},
        "gemm_sums": {name: dense_rates(backend, threads, "sums") for name, backend in backends.items()},
        "edge_s": edge_rates(backends["fp32"], threads),
    }


def call_seconds(backend: KernelBackend, swept: int = 0) -> float:
    """Return the seconds of a call with next to no work, the median of CALLS: right behind another one, as within an op, or
    behind a pass over so many bytes.
    """
    a, b, out = (torch.zeros(rows, 16, dtype=backend.dtype) for rows in (1, 16, 1))
    before, found = torch.zeros(swept // 4), list[float]()
    for _ in range(CALLS):
        before.add_(1.0)
        found.append(_called_s(backend, a, b, out))
    return statistics.median(found)


def copy_rates(backend: KernelBackend, call_s: float, *, in_place: bool = False) -> list[tuple[float, float]]:
    """Return bytes per second, read plus written, of a pass between two matrices, or over one, by these bytes, without its
    call.

    A small pass waits for threads to wake as often as not: the least of many calls is that of the memory.
    """
    found = dict[int, float]()
    for size, calls in ROUNDS * PASSES:
        z = torch.zeros(size // 2 // (128 * backend.dtype.itemsize), 128, dtype=backend.dtype)
        out, seconds = z if in_place else torch.zeros_like(z), found.get(size, math.inf)
        for _ in range(calls // ROUNDS):
            began = time.perf_counter()
            backend.finish(z, out, Epilogue(relu=in_place))  # one that does something
            seconds = min(seconds, time.perf_counter() - began)
        found[size] = seconds
    return [(float(size), _digits(size / max(s - call_s, s / 2))) for size, s in found.items()]


def dense_rates(
    backend: KernelBackend, threads: int, shape: DenseShape, rows: int = DENSE_ROWS
) -> list[tuple[float, float]]:
    """Return FLOP per second of a layer's dense products by width, the best of some calls; shape: as of DeviceRates.

    Cost: some tenths of a second for each shape and precision on two cores.
    """
    found = []
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for width in DENSE_WIDTHS:
            a, b = (torch.ones(rows, width, dtype=backend.dtype) for _ in range(2))
            weight = torch.ones(width, width, dtype=backend.dtype)
            sums = torch.zeros(width, width, dtype=torch.promote_types(backend.dtype, torch.float32))
            operands = (a, weight, b) if shape == "rows" else (a.t(), b, sums)
            seconds = min(_called_s(backend, *operands) for _ in range(DENSE_CALLS))
            found.append((float(width), _digits(2.0 * rows * width**2 / seconds)))
    finally:
        torch.set_num_threads(before)
    return found


def _called_s(backend: KernelBackend, a: Tensor, b: Tensor, out: Tensor) -> float:
    began = time.perf_counter()
    backend.matmul(a, b, out)
    return time.perf_counter() - began


def _digits(value: float) -> float:
    return float(f"{value:.3g}")


def _probe(backend: KernelBackend, threads: int) -> tuple[float, float]:
    """Return the seconds of a dense product with next to no work, and FLOP per second of a layer's, torch's where mggcn
    has no kernels of its own: the best of some calls.
    """

    def least_s(rows: int, width: int) -> float:
        a, b, out = (torch.zeros(n, width, dtype=backend.dtype) for n in (rows, width, rows))
        found = math.inf
        for _ in range(5):
            found = min(found, _called_s(backend, a, b, out))
        return found

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return least_s(1, 16), 2.0 * 8192 * 128**2 / least_s(8192, 128)
    finally:
        torch.set_num_threads(before)


def cpu_backend(threads: int, precision: str) -> KernelBackend:
    """Return the CPU's kernels in one precision, for a rank that has all threads."""
    config = Config(run=RunConfig(threads=threads, precision=precision))  # type: ignore[arg-type]
    plan = plan_shape(
        config, GraphShape(name="tune", num_vertices=2, num_edges=2, num_features=1, num_classes=1, symmetric=True)
    )

    def no_gpu() -> Any:
        raise ConfigError("mggcn tune measures the kernels of the CPU, not of a GPU")

    return make_backend(config, plan.ranks[0], no_gpu, figures=plan.figures)


def check_writable(path: Path) -> None:
    """Refuse a path that the machine's file cannot be written to, before a minute is spent. Raises: ConfigError."""
    folder = path.absolute().parent
    while not folder.exists():
        folder = folder.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"the machine's file cannot be written to {path}; name one with --out")


def write_machine(content: Mapping[str, Any], path: Path) -> None:
    """Write a machine's file with a comment on its origin, in one step. Raises: ConfigError if it cannot be written."""
    stamp = time.strftime("%Y-%m-%d %H:%M")
    text = f"# Measured by mggcn {__version__} tune, {stamp}, load average {os.getloadavg()[0]:.1f} at its end.\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text + _toml(content))
    except OSError as error:
        raise ConfigError(
            f"the machine's file cannot be written to {path}: {reason(error)}; name another with --out"
        ) from error


def _toml(content: Mapping[str, Any]) -> str:
    """Return a machine's file, one figure a line, as in the files that come with mggcn; TOML libraries take four lines."""

    def value(plain: Any) -> str:
        if isinstance(plain, dict):
            return "{ " + ", ".join(f"{key} = {value(inner)}" for key, inner in plain.items()) + " }"
        return json.dumps(plain)

    def lines(table: Mapping[str, Any]) -> list[str]:
        return [f"{key} = {value(plain)}" for key, plain in table.items()]

    many = ("link", "nccl")
    one = ("device", "disk")
    top = {key: plain for key, plain in content.items() if key not in (*one, *many)}
    tables = [line for name in many for each in content.get(name, ()) for line in ("", f"[[{name}]]", *lines(each))]
    alone = [line for name in one if name in content for line in ("", f"[{name}]", *lines(content[name]))]
    return "\n".join([*lines(top), *alone, *tables, ""])
