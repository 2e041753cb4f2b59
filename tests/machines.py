"""Recorded figures of two processors, and how tests and the programs that they start take them instead of measuring."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

from mggcn.backend.cpu.figures import DenseRate, Figures
from mggcn.backend.cpu.machine import Host

MIB = 2**20
FOOTPRINTS = tuple(2**k for k in (18, 20, 22, 23, 24, 25, 26, 28))
WIDTHS = (64, 256, 1024)
Rates = tuple[tuple[float, ...], ...]


def _table(rates: Rates) -> tuple[tuple[float, ...], ...]:
    """Seconds of an entry from GB/s by width and footprint."""
    return tuple(tuple(1e-9 * width / r for r in row) for width, row in zip(WIDTHS, rates, strict=True))


def _dense(rates: dict[tuple[str, str], float]) -> tuple[DenseRate, ...]:
    return tuple(
        DenseRate(dtype, kernel, shape, 1e9 * rate)
        for (dtype, kernel), rate in rates.items()
        for shape in ("rows", "sums")
    )


ZEN3 = Figures(
    footprints=FOOTPRINTS,
    widths=WIDTHS,
    # From the times of every variant in bench/results/blocks_amd-epyc-2cpu_2026-11-22.md.
    plain_s=_table(
        (
            (76.0, 76.0, 76.0, 67.0, 48.0, 20.0, 12.0, 9.0),
            (76.0, 76.0, 73.0, 70.0, 46.0, 26.0, 19.0, 15.0),
            (95.0, 95.0, 95.0, 93.0, 56.0, 31.0, 25.0, 22.0),
        )
    ),
    ahead_s=_table(
        (
            (84.0, 84.0, 84.0, 75.0, 55.0, 25.0, 14.0, 10.0),
            (85.0, 85.0, 83.0, 80.0, 52.0, 30.0, 22.0, 17.0),
            (95.0, 95.0, 95.0, 93.0, 60.0, 34.0, 27.0, 23.0),
        )
    ),
    bf16=(1.6, 1.4, 1.2, 1.1, 1.1, 1.0, 1.0, 1.0),
    row_s=9.5e-9,
    block_s=3e-10,
    pack_s=(1.6e-8, 8e-9),
    copy=((MIB, 9e10), (2**24, 5e10), (2**27, 3.1e10)),
    dense=_dense({("fp32", "avx2"): 150, ("bf16", "avx2"): 145, ("fp64", "avx2"): 75}),
)
"""An AMD EPYC of that generation, two cores, 32 MiB of L3."""
XEON_512 = (80.0, 64.0, 46.0, 34.0, 25.0, 18.0, 14.0, 10.0)
"""GB/s of rows of 512 bytes."""
XEON_RATES: Rates = tuple(tuple(rate / slower for rate in XEON_512) for slower in (2.0, 1.4, 0.8))
XEON = Figures(
    footprints=FOOTPRINTS,
    widths=WIDTHS,
    plain_s=_table(XEON_RATES),
    ahead_s=_table(XEON_RATES),
    bf16=(1.0,) * 8,
    row_s=8e-9,
    block_s=2e-10,
    pack_s=(1.6e-8, 9e-9),
    copy=((MIB, 6e10), (2**24, 2.5e10), (2**27, 1.6e10)),
    dense=_dense(
        {
            ("fp32", "avx2"): 100,
            ("fp32", "avx512"): 140,
            ("bf16", "avx2"): 95,
            ("bf16", "avx512"): 130,
            ("bf16", "avx512_bf16"): 85,
            ("bf16", "amx"): 400,
            ("fp64", "avx2"): 50,
            ("fp64", "avx512"): 70,
        }
    ),
)
"""An Intel Xeon with AMX, two threads; /sys says 105 MB of L3, which others use too."""


def pairs_at(figures: Figures, gflop_s: float) -> Figures:
    """Return a machine that multiplies pairs of bfloat16 at this rate."""
    rate = 1e9 * gflop_s
    dense = tuple(dataclasses.replace(r, flop_s=rate) if r.kernel == "avx512_bf16" else r for r in figures.dense)
    return dataclasses.replace(figures, dense=dense)


def tight(near_bytes: int) -> Figures:
    """Return figures of a machine that gathers fast from so many bytes and slowly from more."""
    sizes = (near_bytes // 2, near_bytes, near_bytes + 64, 2**28)
    table = tuple(tuple(1e-9 * width * slow for slow in (0.01, 0.01, 0.3, 0.3)) for width in WIDTHS)
    return dataclasses.replace(ZEN3, footprints=sizes, plain_s=table, ahead_s=table, bf16=(1.0,) * 4)


def keep_recorded(cache: Path) -> None:
    """Have this process, and those that it starts, find ZEN3 in a cache folder as what was measured here."""
    from mggcn.backend.cpu.kept_figures import figures_path, write_figures

    os.environ.setdefault("MPLCONFIGDIR", str(_cache() / "matplotlib"))
    os.environ["XDG_CACHE_HOME"] = str(cache)
    for host in _hosts():
        write_figures(figures_path(host), host, ZEN3)


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def _hosts() -> Iterator[Host]:
    """This machine with 1 to 16 threads, on all cores or on one of them, as sweeps share them out."""
    from mggcn.backend.cpu.machine import this_host

    whole = this_host(1)
    for cores in (whole.cores, *map(str, sorted(os.sched_getaffinity(0)))):
        yield from (dataclasses.replace(whole, cores=cores, threads=threads) for threads in range(1, 17))
