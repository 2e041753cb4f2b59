"""Layer norm and batch norm on the CPU: the kernels of cpu/norms.cpp, torch's and a copy of the rows, in turn, in float32.

Batch norm is three kernels forwards and two backwards, as a run on one rank calls them. Results are compared.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from bench.cpu.ceilings import timed
from bench.report import milliseconds, parse, spread, surroundings, table, write_report

SHAPES = "169343x256,18333x512,10000x64"
"""Rows and columns: of a layer on the arxiv-like graph, on coauthor_cs and on minesweeper."""
EPS = 1e-5
APART = 1e-3
"""Of the largest number of a result; torch sums in float32."""
HEAD = ("pass", "V x D", "ours ms", "range", "torch ms", "range", "torch / ours", "copy ms", "apart")


def measure(rows: int, cols: int, rounds: int, threads: int) -> list[dict[str, Any]]:
    """Time passes over (rows, cols) in turn, after one of each."""
    import torch
    from torch.nn.functional import batch_norm, layer_norm

    from mggcn.backend.cpu.backend import CpuBackend
    from mggcn.backend.norms import BatchTerms

    backend = CpuBackend(torch.float32, threads)
    norms, generator = backend.norms, torch.Generator().manual_seed(9127)
    z, g = (torch.randn(rows, cols, generator=generator) for _ in range(2))
    gain, bias = torch.rand(cols, generator=generator), torch.rand(cols, generator=generator)
    out, once = torch.empty(rows, cols), torch.ones(rows, dtype=torch.float64)
    partials = torch.empty(2, backend.partials, cols, dtype=torch.float64)
    mean, scale = torch.empty(cols, dtype=torch.float64), torch.empty(cols, dtype=torch.float64)
    leaf = z.clone().requires_grad_()

    def forwards() -> None:
        norms.column_moments(z, None, once, partials[0])
        torch.div(partials[0].sum(0), rows, out=mean)
        norms.column_moments(z, mean, once, partials[0])
        torch.rsqrt(partials[0].sum(0) / rows + EPS, out=scale)
        norms.batch_norm(z, mean, gain * scale, bias.double(), out)

    def backwards() -> None:
        norms.column_products(g, z, mean, partials)
        of_bias, of_gain = partials.sum(1) / rows
        norms.batch_norm_grad(g, z, BatchTerms(mean, gain * scale, of_gain * scale * scale, of_bias, once), out)

    def back_of(result: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: torch.autograd.grad(result, leaf, g, retain_graph=True)[0]

    passes: dict[str, tuple[Callable[[], Any], Callable[[], torch.Tensor]]] = {
        "layer norm": (
            lambda: norms.layer_norm(z, gain, bias, EPS, out),
            lambda: layer_norm(z, (cols,), gain, bias, EPS),
        ),
        "its gradient": (
            lambda: norms.layer_norm_grad(g, z, gain, EPS, out, partials),
            back_of(layer_norm(leaf, (cols,), gain, bias, EPS)),
        ),
        "batch norm": (forwards, lambda: batch_norm(z, None, None, gain, bias, True, 0.1, EPS)),
        "its gradient ": (backwards, back_of(batch_norm(leaf, None, None, gain, bias, True, 0.1, EPS))),
    }
    found = []
    for name, (ours, theirs) in passes.items():
        ours()
        expected = theirs()
        apart = float((out - expected).abs().max() / expected.abs().max())
        copied = torch.empty_like(z)
        ways: dict[str, Callable[[], Any]] = {"ours": ours, "torch": theirs, "copy": lambda to=copied: to.copy_(z)}
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way, run in ways.items():
                seconds[way].append(timed(run))
        shape = f"{rows} x {cols}"
        found.append({"pass": name.strip(), "shape": shape, "apart": apart, "seconds": seconds})
    return found


def line(found: dict[str, Any]) -> list[Any]:
    ours, theirs, copy = (spread(found["seconds"][way]) for way in ("ours", "torch", "copy"))
    ratio = f"{theirs['median'] / ours['median']:.2f}"
    cells = [*milliseconds(ours), *milliseconds(theirs), ratio, milliseconds(copy)[0]]
    return [found["pass"], found["shape"], *cells, f"{found['apart']:.0e}"]


def main(arguments: list[str] | None = None) -> None:
    args = parse(
        __doc__, "threads", "rounds", arguments=arguments, shapes={"default": SHAPES, "help": "rows and columns, VxD"}
    )
    from mggcn import native

    native.limit_spinning()
    import torch

    torch.set_num_threads(args.threads)
    record: dict[str, Any] = {"surroundings": surroundings(), "measured": []}
    for shape in args.shapes.split(","):
        print(shape, file=sys.stderr)
        rows, cols = map(int, shape.split("x"))
        record["measured"] += measure(rows, cols, args.rounds, args.threads)
    body = (
        f"{args.threads} threads, medians of {args.rounds} rounds in turn. mggcn sums in float64, torch in float32.\n\n"
    )
    body += table(HEAD, [line(found) for found in record["measured"]])
    write_report("norms", "Norms", body, record, args.out)
    wrong = [line(found) for found in record["measured"] if not found["apart"] <= APART]
    if wrong:
        sys.exit(f"not the same results: {wrong}")


if __name__ == "__main__":
    main()
