"""What a plan reckons the CPU's kernels to keep and to work in: never less than they take, and not much more."""

from __future__ import annotations

import itertools
from typing import get_args

import numpy as np
import pytest
import torch

from mggcn import native
from mggcn.backend.cpu import sizes as cpu_sizes
from mggcn.backend.cpu.backend import CpuBackend
from mggcn.backend.cpu.gemm import CpuGemm
from mggcn.backend.cpu.memory import Workspace
from mggcn.backend.cpu.spmm import make_schedule
from mggcn.backend.cpu.variants import GemmVariant, MatrixTraits, candidates, hub_length
from mggcn.backend.team import Team
from tests.machines import tight

LENGTHS: dict[str, list[int]] = {
    "no rows": [],
    "no entries": [0] * 40,
    "short rows": [3] * 1000,
    "one entry more than a hub needs": [8193] * 21,
    "hubs just above two parts": [8193, 0, 8200, 1] * 9,
    "one row": [10**6],
    "hubs among many": [1] * 5000 + [60_000] * 3 + [9000] * 5,
}


@pytest.mark.parametrize("name", LENGTHS)
def test_schedules_take_what_is_planned(name: str) -> None:
    """Fails if a matrix of hubs alone is cut into more parts than its numbers of rows and entries say."""
    lengths = LENGTHS[name]
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    nnz = int(indptr[-1])
    schedule = make_schedule(indptr, np.zeros(nnz, np.int32), 1, native.isa())
    kept = schedule.chunks.nbytes + schedule.parts.nbytes + schedule.hubs.nbytes
    assert kept <= cpu_sizes.schedule_bytes(len(lengths), nnz)
    assert schedule.parts.shape[0] <= cpu_sizes.max_parts(nnz)
    if nnz and nnz == sum(n for n in lengths if n > hub_length(nnz)):
        assert schedule.parts.shape[0] >= 0.6 * cpu_sizes.max_parts(nnz)


def test_no_way_of_a_product_works_in_more_than_is_planned() -> None:
    """Fails if a way that may be chosen, or timed by `mggcn tune`, packs or remembers more than a plan reckons with."""
    figures = tight(2**16)
    for (rows, columns), width, (item, real) in itertools.product(
        ((300, 500), (5000, 700), (40, 3000)), (1, 16, 41, 300), ((4, 4), (8, 8), (2, 4))
    ):
        planned = cpu_sizes.spmm_bytes(rows, columns, 9 * rows, width, item, real, figures)
        for summed in {True, item == real}:
            found = candidates(MatrixTraits(rows, columns, 9 * rows), width, item, figures, summed=summed)
            blocks = [way for way in found.values() if way.blocks > 1]
            assert all(columns * way.panel * item <= planned for way in found.values())
            # Also bfloat16 into float32 runs in blocks: products whose result is of the type of sums.
            assert all(8 * rows <= planned for _ in blocks)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1500, 70, 33), (100, 300, 41), (512, 64, 64), (513, 500, 3), (1, 9, 9), (7, 1, 1)])
def test_dense_products_work_in_what_is_planned(shape: tuple[int, int, int], dtype: torch.dtype, threads: int) -> None:
    """Fails if a product of a layer packs or converts more at a time than its plan says, or the plan says too much."""
    rows, d, e = shape
    real = torch.float64 if dtype == torch.float64 else torch.float32
    torch.manual_seed(8803)
    # Rows of whole cache lines, as buffers have.
    lanes = 64 // dtype.itemsize
    h, g = (torch.randn(rows, -(-cols // lanes) * lanes).to(dtype)[:, :cols] for cols in (d, e))
    w = torch.randn(d, e).to(dtype)
    for way in get_args(GemmVariant):
        planned = cpu_sizes.gemm_bytes(rows, d, e, dtype.itemsize, real.itemsize, threads, way)
        most = 0
        for accumulate, (a, b, kind) in itertools.product(
            (False, True), ((h, w, dtype), (g, w.t(), dtype), (h.t(), g, real))
        ):
            workspace = Workspace()
            out = torch.ones(a.shape[0], b.shape[1], dtype=kind)
            CpuGemm(way, Team(threads), native.dense_isa(), workspace).multiply(a, b, out, accumulate=accumulate)
            expected = a.double() @ b.double() + accumulate
            close = {"rtol": 2.0**-8, "atol": 0.05} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-3}
            torch.testing.assert_close(out.double(), expected, **close)
            assert workspace.nbytes <= planned
            most = max(most, workspace.nbytes)
        assert most == planned


def test_a_work_space_is_shared_and_keeps_its_size() -> None:
    """Fails if a smaller product gives memory back, which the next epoch would ask for again."""
    backend = CpuBackend(torch.bfloat16, 1)
    sizes = []
    for rows in (300, 50, 300):
        a, b = torch.ones(rows, 20, dtype=torch.bfloat16), torch.ones(20, 5, dtype=torch.bfloat16)
        backend.matmul(a, b, torch.empty(rows, 5))
        sizes.append(backend.work_space_bytes)
    assert sizes[0] == sizes[1] == sizes[2] > 0
