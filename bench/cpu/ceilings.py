"""What this machine's cores and memory do at best: copies and gathers by footprint, dense products; and bounds from them.

Copies and gathers are those of `mggcn tune`, dense products the faster of torch's and NumPy's.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from bench.process import said
from bench.report import MIB, parse, surroundings, table, write_report

SHAPES = ((2048, 2048, 2048), (8192, 512, 512), (8192, 256, 256))
IN_CACHE = (4 * MIB, 16 * MIB)
"""Footprints beyond a core's own cache, within a shared one: the fastest gather there bounds what blocks can reach."""
TRIES = 7


def figures_of(args: Any) -> dict[str, Any]:
    """The figures in the file that args.ceilings names, measured in a process of their own if there are none."""
    if args.ceilings and args.ceilings.exists():
        return json.loads(args.ceilings.read_text())  # type: ignore[no-any-return]
    command = [sys.executable, "-m", "bench.cpu.ceilings", "--json", "--threads", str(args.threads)]
    found: dict[str, Any] = json.loads(said(command).splitlines()[-1])
    if args.ceilings:
        args.ceilings.parent.mkdir(parents=True, exist_ok=True)
        args.ceilings.write_text(json.dumps(found))
    return found


def measure(threads: int) -> dict[str, Any]:
    """Return copy and gather as [bytes of the operand, bytes per second], and gemm as FLOP per second by library, shape."""
    # The libraries read these when they are loaded.
    os.environ |= {name: str(threads) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
    from mggcn import native

    native.limit_spinning()
    from mggcn.backend.cpu.kept_figures import figures_of
    from mggcn.backend.cpu.machine import this_host
    from mggcn.memory.units import free_bytes
    from mggcn.runs.tune import device_table

    print("measuring", file=sys.stderr)
    device = device_table(figures_of(this_host(threads), free_bytes(), anew=True), threads)
    gemm = products(threads) | {f"mggcn tune {name}": rate for name, rate in device["gemm"].items()}
    return {"copy": device["copy"], "gather": device["gather"], "gemm": gemm}


def products(threads: int) -> dict[str, float]:
    """FLOP per second of float32 products at best, of torch and of NumPy."""
    import numpy as np
    import torch

    torch.set_num_threads(threads)
    found = {}
    for rows, inner, cols in SHAPES:
        a, b, out = torch.rand(rows, inner), torch.rand(inner, cols), torch.empty(rows, cols)
        runs: dict[str, Callable[[], Any]] = {
            "torch": functools.partial(torch.mm, a, b, out=out),
            "NumPy": functools.partial(np.matmul, a.numpy(), b.numpy(), out=out.numpy()),
        }
        for name, run in runs.items():
            run()
            found[f"{name} {rows}x{inner}x{cols}"] = 2 * rows * inner * cols / min(timed(run) for _ in range(TRIES))
    return found


def timed(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def rate_at(points: Sequence[Sequence[float]], footprint: float) -> float:
    """Bytes per second of gathers or copies for an operand of `footprint` bytes."""
    from mggcn.cost.machine import RateTable

    return RateTable(tuple((size, rate) for size, rate in points)).at(footprint)


def cached_rate(ceilings: dict[str, Any]) -> float:
    """Bytes per second of gathers from a shared cache."""
    rates = [rate for size, rate in ceilings["gather"] if IN_CACHE[0] <= size <= IN_CACHE[1]]
    return float(max(rates or [max(rate for _, rate in ceilings["gather"])]))


def gathering_s(ceilings: dict[str, Any], gathers: Sequence[Sequence[float]], cached: bool = False) -> float:
    """Seconds to gather [bytes, footprint] pairs, at the rate of each footprint or of the shared cache."""
    rates = [cached_rate(ceilings) if cached else rate_at(ceilings["gather"], place) for _, place in gathers]
    return sum(nbytes / rate for (nbytes, _), rate in zip(gathers, rates, strict=True))


def bounds(ceilings: dict[str, Any], work: dict[str, Any]) -> dict[str, float]:
    """Seconds that an epoch's products need: dense at the peak, sparse at the rate of each operand's footprint.

    `cached`: the same with every gather at the rate of a shared cache, which blocks and panels aim at. Elementwise passes,
    the optimiser and calls are in neither.
    """
    peak = max(rate for name, rate in ceilings["gemm"].items() if "bf16" not in name)
    sparse, cached = (gathering_s(ceilings, work["gathers"], in_cache) for in_cache in (False, True))
    dense = work["flop"] / peak
    return {"dense": dense, "sparse": sparse, "total": dense + sparse, "cached": dense + cached}


def describe(ceilings: dict[str, Any]) -> str:
    rows = [
        [f"{size / MIB:g}", f"{rate_at(ceilings['copy'], size) / 1e9:.1f}", f"{gather / 1e9:.1f}"]
        for size, gather in ceilings["gather"]
    ]
    products = [[name, f"{rate / 1e9:.0f}"] for name, rate in ceilings["gemm"].items()]
    return (
        f"{table(['operand MiB', 'copy GB/s', 'gather GB/s'], rows)}\n{table(['dense product', 'GFLOP/s'], products)}"
    )


def main(arguments: list[str] | None = None) -> None:
    as_json = {"action": "store_true", "help": "print one line of JSON instead of a report"}
    args = parse(__doc__, "threads", arguments=arguments, json=as_json)
    around, found = surroundings(), measure(args.threads)
    if args.json:
        print(json.dumps(found))
        return
    body = f"{args.threads} threads; the best of several tries.\n\n{describe(found)}"
    write_report("ceilings", "What the machine does at best", body, {"surroundings": around} | found, args.out)


if __name__ == "__main__":
    main()
