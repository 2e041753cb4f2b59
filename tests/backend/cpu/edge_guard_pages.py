"""Passes over edges whose arrays end where memory ends: a read or write behind one kills this process.

    python -m tests.backend.cpu.edge_guard_pages [COUNT]

Run by test_edges.py in a process of its own; COUNT: how many of the checks, drawn at random, if not all.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch

from mggcn.backend.base import KernelBackend
from mggcn.backend.cpu.backend import CpuBackend
from mggcn.backend.edges import OFS, PARTIALS, REDUCERS, EdgeGradient, EdgeRows, Operand, Reduction
from tests.backend.cpu.guard_pages import chosen, guarded
from tests.backend.edges import EDGE_CASES, EdgeCase
from tests.backend.emulated import emulated_backend


def guarded_rows(edges: EdgeRows) -> EdgeRows:
    """The same edges, every array before a guard page."""
    matrix = replace(edges.matrix, indptr=guarded(edges.matrix.indptr), indices=guarded(edges.matrix.indices))
    place, starts, ids = (None if t is None else guarded(t) for t in (edges.place, edges.starts, edges.edge_ids))
    return EdgeRows(matrix, place, starts, ids)


def check(backend: KernelBackend, case: EdgeCase, cols: int) -> None:
    """Every kind of pass; what it computes is other tests' matter."""
    by_destination, by_source = (guarded_rows(r) for r in (case.by_destination(backend), case.by_source(backend)))
    n, dtype = case.num_vertices, backend.dtype
    g, out = (guarded(torch.ones(n, cols, dtype=dtype)) for _ in range(2))
    winners = guarded(torch.zeros(n, cols, dtype=torch.int32))
    for of, width in itertools.product(OFS, {1, cols}):
        rows = case.num_rows(of)
        x = Operand(guarded(torch.ones(rows, width, dtype=dtype)), of)
        full = Operand(guarded(torch.ones(rows, cols, dtype=dtype)), of)
        for reducer in REDUCERS:
            backend.edges.reduce(
                by_destination, Reduction("div", reducer, full, x), out, None if reducer == "sum" else winners
            )
        edges = by_source if of == "source" else by_destination
        grad = guarded(torch.ones(rows, width, dtype=dtype))
        for partial in PARTIALS:
            backend.edges.gradient(edges, EdgeGradient(of, partial, 1.0, x, full), g, winners, grad)


def main() -> None:
    backends: list[KernelBackend] = [CpuBackend(t, 1) for t in (torch.float32, torch.float64)]
    backends += [emulated_backend(t, 5) for t in (torch.float32, torch.bfloat16)]
    for backend, cols, case in chosen(itertools.product(backends, (1, 7, 16, 41), EDGE_CASES[1:3])):
        check(backend, case, cols)


if __name__ == "__main__":
    main()
