"""Measures what a machine computes along edges in attention and maxima, by their kernels, on rows in its caches."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from mggcn.aggregate.attention import Attention, AttentionDestinations, AttentionSources, AttentionSpec, Bound
from mggcn.aggregate.edge_op import EdgeOp, Target, single_tile
from mggcn.aggregate.maximum import Maximum, MaximumGrad

if TYPE_CHECKING:
    from torch import Tensor

    from mggcn.backend.base import KernelBackend, Sparse

VERTICES: Final = 128
"""Each has edges to all: rows of at most 2.1 KB, of GATv2's gradient, for each lie in a core's cache of 512 KB."""
SHAPES: Final = ((1, 64), (8, 64), (1, 256))
"""Heads and columns of what is timed, from which what an edge, a head and a column take follow: ordinary ones."""
CALLS: Final = 32
"""A call takes some 0.3 ms: where a thread is held up in one, it is not in another."""


def edge_rates(backend: KernelBackend, threads: int) -> dict[str, list[float]]:
    """Return DeviceRates.edge_s of a CPU's kernels in float32, the best of some calls. Cost: a second on two cores."""
    indptr = np.arange(0, VERTICES**2 + 1, VERTICES, dtype=np.int64)
    matrix = backend.sparse(indptr, np.tile(np.arange(VERTICES, dtype=np.int32), VERTICES), None)
    found: dict[str, list[float]] = {}
    for ops in zip(*(_ops(heads, columns) for heads, columns in SHAPES), strict=True):
        kernel = ops[0][0].arithmetic(ops[0][1])
        assert kernel is not None  # of every op that _ops makes
        one, heads, columns = (_edge_s(backend, matrix, op, width) * threads for op, width in ops)
        head = max(heads - one, 0.0) / (SHAPES[1][0] - SHAPES[0][0]) if kernel.heads else 0.0
        column = max(columns - one, 0.0) / (SHAPES[2][1] - SHAPES[0][1])
        edge = max(one - SHAPES[0][0] * (head if kernel.heads else 0.0) - SHAPES[0][1] * column, 0.0)
        found[kernel.kernel] = [float(f"{seconds:.3g}") for seconds in (edge, head, column)]
    return found


def _ops(heads: int, columns: int) -> Iterator[tuple[EdgeOp, int]]:
    """Yield every op that is timed, and the columns of its result."""
    for dynamic in (False, True):
        a = torch.full((heads, columns // heads), 0.01) if dynamic else None
        spec = AttentionSpec(heads, columns, dynamic, bound=Bound(a, torch.zeros(2, dtype=torch.int64)))
        yield Attention(spec), columns
        yield AttentionSources(spec), spec.travels
        yield AttentionDestinations(spec), spec.scored
    yield Maximum(), columns
    yield MaximumGrad(), columns


def _edge_s(backend: KernelBackend, matrix: Sparse, op: EdgeOp, cols: int) -> float:
    """Return the seconds of an edge, of all threads together."""
    target, rows = Target(_rows(cols), None, _local(op, cols)), _rows(op.columns(cols).operand)
    seconds = math.inf
    for _ in range(CALLS):
        began = time.perf_counter()
        single_tile(op, backend, matrix, rows, target)
        seconds = min(seconds, time.perf_counter() - began)
    return seconds / VERTICES**2


def _local(op: EdgeOp, cols: int) -> list[Tensor]:
    """Return the tensors that an op reads beside its operand, and those that it keeps."""
    ids, kept = torch.arange(VERTICES), [_rows(spec.cols) for spec in op.kept("", VERTICES, cols, "float32")]
    match op:
        case Attention(spec):
            return [_rows(spec.scored), ids, *kept]
        case AttentionSources(spec):
            return [_rows(spec.forwards), ids, *kept]
        case AttentionDestinations(spec):
            return [_rows(spec.backwards), ids, *kept]
        case _:
            return [ids, *kept]


def _rows(cols: int) -> Tensor:
    """Return rows of small numbers, each a multiple of 64 bytes apart, as in the arena."""
    return torch.full((VERTICES, -(-cols // 16) * 16), 0.01)[:, :cols]
