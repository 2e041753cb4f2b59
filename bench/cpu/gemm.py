"""The dense products of layers on the CPU: those of cpu/gemm.cpp and torch's, in turn, on buffers as a run has them.

Three products per pair of widths: forward h W, input gradient g W^T, weight gradient h^T g. In bf16 torch's are those of
blocks converted to float32. Results are compared.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from bench.cpu.ceilings import timed
from bench.report import parse, spread, surroundings, table, verdict, write_report

WIDTHS = "128x512,512x40,128x256,256x256,256x40,602x512,512x41,128x16,16x40"
"""Input and output of the layers of the networks of bench/peers/epochs.py."""
SUMS_GOAL = 3.0
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
HEAD = ("type", "product", "D x E", "ours GFLOP/s", "IQR", "torch GFLOP/s", "IQR", "ours / torch", "apart")


def measure(rows: int, d: int, e: int, precision: str, rounds: int, threads: int) -> list[dict[str, Any]]:
    """Time the three products of a layer (rows, d) to (rows, e), ours and torch's in turn after one of each."""
    import torch

    from mggcn.assemble.plan import figures_here
    from mggcn.backend.cpu.backend import CpuBackend
    from mggcn.config import Config, RunConfig

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    figures = figures_here(Config(run=RunConfig(threads=threads)))
    backend = CpuBackend(dtype, threads, figures=figures)
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
        seconds: dict[str, list[float]] = {"own": [], "torch": []}
        results = []
        for turn in range(rounds + 1):
            for way, times in seconds.items():
                backend.dense_products.variant = way  # type: ignore[assignment]
                product = functools.partial(backend.matmul, a, b, out)
                if way == "torch" and out.dtype == a.dtype == torch.float32:  # without a run's copies of padded rows
                    product = functools.partial(torch.mm, a, b, out=out)
                taken = timed(product)
                if turn:
                    times.append(taken)
                else:
                    results.append(out.float().clone())
        apart = float((results[0] - results[1]).abs().max() / results[1].abs().max())
        rates = {way: spread([2 * rows * d * e / value for value in values]) for way, values in seconds.items()}
        facts = {"type": precision, "product": name, "shape": f"{d} x {e}", "seconds": seconds, "apart": apart}
        found.append(facts | {"rates": rates, "ratio": rates["own"]["median"] / rates["torch"]["median"]})
    return found


def line(found: dict[str, Any]) -> list[Any]:
    cells = [c for r in found["rates"].values() for c in (f"{r['median'] / 1e9:.0f}", f"{r['iqr_over_median']:.0%}")]
    return [found["type"], found["product"], found["shape"], *cells, f"{found['ratio']:.2f}", f"{found['apart']:.0e}"]


def sums_goals(results: list[dict[str, Any]]) -> str:
    """With AMX: h^T g in bf16, summed in float32, beside our float32, at widths of 128 and more."""
    rates = {
        (found["shape"], found["type"]): found["rates"]["own"]["median"]
        for found in results
        if found["product"] == "h^T g" and min(map(int, found["shape"].split(" x "))) >= 128
    }
    shapes = [shape for shape, precision in rates if precision == "bf16" and (shape, "fp32") in rates]
    return "".join(
        verdict(f"h^T g {shape}, bf16 over fp32", rates[shape, "bf16"] / rates[shape, "fp32"], SUMS_GOAL)
        for shape in shapes
    )


def main(arguments: list[str] | None = None) -> None:
    own: dict[str, dict[str, Any]] = {
        "rows": {"type": int, "default": 169_343, "help": "V, the vertices: as many as arxiv has"},
        "widths": {"default": WIDTHS, "help": "pairs DxE of input and output"},
        "types": {"default": "fp32,bf16"},
    }
    args = parse(__doc__, "threads", "rounds", arguments=arguments, **own)
    from mggcn import native
    from mggcn.backend.cpu.machine import dense_kernels

    native.limit_spinning()
    import torch

    torch.set_num_threads(args.threads)
    record: dict[str, Any] = {"surroundings": surroundings(), "kernels": dense_kernels(), "measured": []}
    for precision in args.types.split(","):
        for pair in args.widths.split(","):
            print(f"{precision} {pair}", file=sys.stderr)
            d, e = map(int, pair.split("x"))
            record["measured"] += measure(args.rows, d, e, precision, args.rounds, args.threads)
    kernels = dense_kernels()
    wins = sum(found["ratio"] >= 1 for found in record["measured"])
    body = (
        f"{args.rows:,} rows, {args.threads} threads, medians of {args.rounds} rounds in turn. Ours "
        f"({', '.join(kernels)}) is the faster one of {wins} of {len(record['measured'])} products.\n\n"
        + (sums_goals(record["measured"]) if "amx" in kernels else "")
        + table(HEAD, [line(found) for found in record["measured"]])
    )
    write_report("gemm", "Dense products of layers", body, record, args.out)
    wrong = [line(found) for found in record["measured"] if not found["apart"] <= TOLERANCE[found["type"]]]
    if wrong:
        sys.exit(f"not the same products: {wrong}")


if __name__ == "__main__":
    main()
