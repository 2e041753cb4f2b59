"""The product of a graph with a dense matrix: mggcn's kernel, torch.sparse CSR and SciPy (one thread), in turn.

Bytes are what each product must touch if nothing stays in a cache, the same for all: a column id and a row of the dense
operand per nonzero, a pointer and a row of the result per vertex. The edges have no weights; the peers store ones.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import TUNED, WORKLOADS, cache_folder, make_store, spread, surroundings, table, write_report

GB = 1e9


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", choices=[*WORKLOADS, "all"], default="all")
    parser.add_argument("--scale", type=float, default=1.0, help="of vertices and edges")
    parser.add_argument("--widths", default="16,64,128,256,512")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache", type=Path, help="folder that keeps the graphs (default: a temporary one)")
    parser.add_argument("--out", type=Path, help="folder of the report (default: bench/results)")
    return parser.parse_args()


def products(store: Path, width: int, threads: int) -> tuple[dict[str, Callable[[], Any]], int, int]:
    """The contenders on one dense operand, and the numbers of nonzeros and vertices."""
    import numpy as np
    import scipy.sparse as sp
    import torch

    from mggcn.backend.cpu import CpuBackend

    indptr, indices = np.load(store / "indptr.npy"), np.load(store / "indices.npy")
    n, ones = indptr.size - 1, np.ones(indices.size, np.float32)
    dense = torch.randn(n, width, generator=torch.Generator().manual_seed(90217))
    out = torch.empty(n, width)
    backend = CpuBackend(torch.float32, threads)
    own = backend.sparse(indptr, indices, None)
    scipy_csr = sp.csr_matrix((ones, indices, indptr), (n, n))
    parts = (torch.from_numpy(indptr).int(), torch.from_numpy(indices), torch.from_numpy(ones))
    torch_csr = torch.sparse_csr_tensor(*parts, (n, n))

    def run() -> torch.Tensor:
        backend.spmm(own, dense, out, accumulate=False, epilogue=None)
        return out

    contenders = {
        "mggcn": run,
        "torch CSR": lambda: torch_csr @ dense,
        "SciPy": lambda: torch.from_numpy(scipy_csr @ dense.numpy()),
    }
    return contenders, indices.size, n


def measure(store: Path, width: int, args: argparse.Namespace) -> dict[str, Any]:
    """Time every contender `rounds` times after one round of warm-up, which also compares their results."""
    import torch

    contenders, nnz, n = products(store, width, args.threads)
    expected, *others = (function().clone() for function in contenders.values())
    for other in others:
        torch.testing.assert_close(other, expected, rtol=1e-4, atol=1e-3)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(args.rounds):
        for name, function in contenders.items():
            began = time.perf_counter()
            function()
            seconds[name].append(time.perf_counter() - began)
    nbytes = nnz * (4 + 4 * width) + n * (8 + 4 * width)
    return {"width": width, "nnz": nnz, "bytes": nbytes, "flop": 2 * nnz * width, "seconds": seconds}


def rows_of(found: dict[str, Any]) -> list[list[Any]]:
    spreads = {name: spread(values) for name, values in found["seconds"].items()}
    own = spreads["mggcn"]["median"]
    return [
        [
            found["workload"],
            found["width"],
            name,
            f"{1000 * line['median']:.1f}",
            f"{1000 * line['min']:.1f} .. {1000 * line['max']:.1f}",
            f"{found['bytes'] / line['median'] / GB:.1f}",
            f"{found['flop'] / line['median'] / GB:.1f}",
            f"{line['median'] / own:.2f}",
        ]
        for name, line in spreads.items()
    ]


def main() -> None:
    args = parse()
    if any(os.environ.get(name) != value for name, value in TUNED.items()):
        # glibc reads its settings when a process starts.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **TUNED})
    import torch

    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    record: dict[str, Any] = {"surroundings": surroundings(), "measured": []}
    with cache_folder(args.cache) as cache:
        for name in WORKLOADS if args.workload == "all" else [args.workload]:
            store = make_store(WORKLOADS[name].scaled(args.scale), cache)
            for width in (int(w) for w in args.widths.split(",")):
                record["measured"].append({"workload": name, **measure(store, width, args)})
    head = ["graph", "width", "contender", "ms (median)", "min .. max", "GB/s", "GFLOP/s", "time / mggcn"]
    rows = [row for found in record["measured"] for row in rows_of(found)]
    body = f"Scale {args.scale:g}, {args.threads} threads, {args.rounds} rounds, float32, malloc tuned.\n\n"
    write_report("spmm", "Products of a graph with a dense matrix", body + table(head, rows), record, args.out)


if __name__ == "__main__":
    main()
