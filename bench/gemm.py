"""The dense products of layers on the CPU: those of cpu/gemm.cpp and torch's, in turn, on buffers as a run has them.

Three products per pair of widths: forward h W, input gradient g W^T, weight gradient h^T g. In bf16 torch's are those of
blocks converted to float32. Results are compared.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from common import spread, surroundings, table, write_report

WIDTHS = ((128, 512), (512, 40), (128, 256), (256, 256), (256, 40), (602, 512), (512, 41), (128, 16), (16, 40))
"""Input and output of the layers of bench/peers_cases.py's networks."""
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
HEAD = ("type", "product", "D x E", "ours GFLOP/s", "IQR", "torch GFLOP/s", "IQR", "ours / torch", "apart")
WAYS: tuple[Literal["own", "torch"], ...] = ("own", "torch")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=169_343, help="V, the vertices: as many as arxiv has")
    parser.add_argument(
        "--widths", default=",".join(f"{d}x{e}" for d, e in WIDTHS), help="pairs DxE of input and output"
    )
    parser.add_argument("--types", default="fp32,bf16")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="folder of the report (default: bench/results)")
    return parser.parse_args()


def measure(rows: int, d: int, e: int, precision: str, rounds: int, threads: int) -> list[dict[str, Any]]:
    """Time the three products of a layer (rows, d) to (rows, e), ours and torch's in turn after one of each."""
    import torch

    from mggcn.backend.cpu.backend import CpuBackend

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    backend = CpuBackend(dtype, threads)
    generator = torch.Generator().manual_seed(7411)

    def buffer(cols: int) -> Any:
        """Random rows of whole cache lines."""
        padded = -(-cols * dtype.itemsize // 64) * 64 // dtype.itemsize
        whole = backend.allocate(rows * padded * dtype.itemsize).view(dtype).view(rows, padded)
        return whole[:, :cols].copy_(torch.randn(rows, cols, generator=generator))

    h, g, forward, back = buffer(d), buffer(e), buffer(e), buffer(d)
    weight, grad = torch.randn(d, e, generator=generator).to(dtype), torch.empty(d, e)
    found = []
    for name, a, b, out in (("h W", h, weight, forward), ("g W^T", g, weight.t(), back), ("h^T g", h.t(), g, grad)):
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        results = []
        for turn in range(rounds + 1):
            for way in WAYS:
                backend.dense_products.way = way
                product = functools.partial(backend.matmul, a, b, out)
                if way == "torch" and out.dtype == a.dtype == torch.float32:  # without a run's copies of padded rows
                    product = functools.partial(torch.mm, a, b, out=out)
                taken = timed(product)
                if turn:
                    seconds[way].append(taken)
                else:
                    results.append(out.float().clone())
        apart = float((results[0] - results[1]).abs().max() / results[1].abs().max())
        flop = 2 * rows * d * e
        rates = {way: spread([flop / value for value in values]) for way, values in seconds.items()}
        found.append(
            {"type": precision, "product": name, "d": d, "e": e, "seconds": seconds, "rates": rates, "apart": apart}
        )
    return found


def timed(run: Callable[[], None]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def faster(found: dict[str, Any]) -> float:
    """Torch's median seconds over ours."""
    ours, torchs = (rate["median"] for rate in found["rates"].values())
    return float(ours / torchs)


def line(found: dict[str, Any]) -> list[Any]:
    cells = []
    for rate in found["rates"].values():
        cells += [f"{rate['median'] / 1e9:.0f}", f"{rate['iqr_over_median']:.0%}"]
    shape = f"{found['d']} x {found['e']}"
    return [found["type"], found["product"], shape, *cells, f"{faster(found):.2f}", f"{found['apart']:.0e}"]


def main() -> None:
    args = parse()
    from mggcn import native

    native.limit_spinning()
    import torch

    torch.set_num_threads(args.threads)
    settings = vars(args) | {"out": None, "kernels": native.sets_in_use()}
    record: dict[str, Any] = {"surroundings": surroundings(), "settings": settings, "measured": []}
    for precision in args.types.split(","):
        for pair in args.widths.split(","):
            d, e = map(int, pair.split("x"))
            print(f"{precision} {pair}", file=sys.stderr)
            record["measured"] += measure(args.rows, d, e, precision, args.rounds, args.threads)
    wins = sum(faster(found) >= 1 for found in record["measured"])
    body = (
        f"{args.rows:,} rows, {args.threads} threads, medians of {args.rounds} rounds in turn. Ours "
        f"({native.sets_in_use()}) is the faster one of {wins} of {len(record['measured'])} products.\n\n"
        + table(HEAD, [line(found) for found in record["measured"]])
    )
    write_report("gemm", "Dense products of layers", body, record, args.out)
    wrong = [line(found) for found in record["measured"] if not found["apart"] <= TOLERANCE[found["type"]]]
    if wrong:
        sys.exit(f"not the same products: {wrong}")


if __name__ == "__main__":
    main()
