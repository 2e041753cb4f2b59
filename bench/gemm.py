"""Dense products of a training epoch by torch, by NumPy's BLAS and as mggcn chooses: forward, and both gradients.

H (V, D) and G (V, E) have V rows; forward is H W, input-grad G W^T, weight-grad H^T G. Libraries take turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from common import surroundings, table, write_report

WIDTHS = "16x40,128x16,128x256,128x512,256x256,256x40,512x512,602x256,602x512,512x41"
PRODUCTS = ("forward", "blocked forward", "input-grad", "weight-grad")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="58000,169343")
    parser.add_argument("--widths", default=WIDTHS, help="DxE")
    parser.add_argument("--block", type=int, default=2048, help="rows of a block of the blocked product")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="folder of the report (default: bench/results)")
    return parser.parse_args()


def measure(rows: int, d_in: int, d_out: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds of each product by each library."""
    import torch

    from mggcn.backend.cpu import CpuBackend
    from mggcn.backend.cpu_choice import choose_gemm
    from mggcn.backend.cpu_machine import TORCH_ALONE, Blas, numpy_blas

    generator = torch.Generator().manual_seed(5077)
    h, g, out_h, out_g = (
        torch.randn(rows, -(-cols // 16) * 16, generator=generator)[:, :cols] for cols in (d_in, d_out, d_in, d_out)
    )
    w, out_w = torch.randn(d_in, d_out, generator=generator), torch.empty(d_in, d_out)
    # NumPy everywhere: as on a processor where it always wins.
    backends = {"torch": TORCH_ALONE, "NumPy": Blas("openblas", "AuthenticAMD"), "chosen": numpy_blas()}
    found = []
    for product, sizes, (a, b, out) in (
        ("forward", (rows, d_in, d_out), (h, w, out_g)),
        ("blocked forward", (args.block, d_in, d_out), (h, w, out_g)),
        ("input-grad", (rows, d_out, d_in), (g, w.t(), out_h)),
        ("weight-grad", (d_in, rows, d_out), (h.t(), g, out_w)),
    ):
        step = args.block if product == "blocked forward" else a.shape[0]
        calls: dict[str, Callable[[], None]] = {}
        for name, blas in backends.items():
            backend = CpuBackend(torch.float32, args.threads, blas=blas)
            multiply = backend.matmul if name != "NumPy" else _numpy

            def call(a: Any = a, b: Any = b, out: Any = out, step: int = step, multiply: Any = multiply) -> None:
                for first in range(0, a.shape[0], step):
                    multiply(a[first : first + step], b, out[first : first + step])

            calls[name] = call
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for number in range(args.rounds + 1):
            for name, call in calls.items():
                began = time.perf_counter()
                call()
                if number:
                    seconds[name].append(time.perf_counter() - began)
        found.append(
            {
                "rows": rows,
                "widths": f"{d_in} x {d_out}",
                "product": product,
                "gflop": 2e-9 * rows * d_in * d_out,
                "seconds": seconds,
                "chosen": choose_gemm(*sizes, numpy_blas()),
            }
        )
    return found


def _numpy(a: Any, b: Any, out: Any) -> None:
    import numpy as np

    np.matmul(a.numpy(), b.numpy(), out=out.numpy())


def main() -> None:
    args = parse()
    from mggcn.backend.cpu_threads import set_threads

    set_threads(args.threads)
    results = []
    for rows in args.rows.split(","):
        for widths in args.widths.split(","):
            d_in, d_out = (int(width) for width in widths.split("x"))
            results += measure(int(rows), d_in, d_out, args)
    lines = []
    for result in results:
        rates = {name: result["gflop"] / median(times) for name, times in result["seconds"].items()}
        cells = [f"{rates[name]:.0f}" for name in ("torch", "NumPy", "chosen")]
        best = max(rates["torch"], rates["NumPy"])
        lines.append(
            [
                result["rows"],
                result["widths"],
                result["product"],
                *cells,
                result["chosen"],
                f"{rates['chosen'] / best:.2f}",
            ]
        )
    head = ["V", "D x E", "product", "torch GFLOP/s", "NumPy", "as chosen", "by", "chosen / best"]
    note = f"float32, {args.threads} threads, medians of {args.rounds} rounds.\n\n"
    record = {"surroundings": surroundings(), "results": results}
    write_report("gemm", "Dense products", note + table(head, lines), record, args.out)


if __name__ == "__main__":
    main()
