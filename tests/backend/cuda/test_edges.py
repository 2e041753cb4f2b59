"""Launches of the passes over edges: the same bits for every schedule, rows of every length, 64-bit offsets."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mggcn.backend.base import KernelBackend
from mggcn.backend.cuda.edges import lanes
from mggcn.backend.cuda.spmm import make_schedule
from mggcn.backend.edges import EdgeGradient, EdgeRows, Operand, Reduction
from tests.backend.cases import filled, host, padded, type_name
from tests.backend.cuda.test_rows import far_rows
from tests.backend.edges import EDGE_CASES, EdgeCase
from tests.backend.emulated import emulated_backend
from tests.backend.test_edges import one_pass


@pytest.mark.emulated
@pytest.mark.covering(0)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=type_name)
def test_bits_do_not_depend_on_the_schedule(dtype: torch.dtype) -> None:
    """Fails if lanes, warps or blocks add in the order in which they happen to run."""
    case = EDGE_CASES[2]
    found = []
    for seed in (0, 0, 5, 991):
        backend = emulated_backend(dtype, seed)
        found.append(one_pass(backend, case.by_destination(backend), case.by_source(backend), case))
    for other in found[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.emulated
@pytest.mark.covering(0)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=type_name)
def test_long_rows_and_hubs_by_blocks(dtype: torch.dtype) -> None:
    """Fails if a long row is left out, or its warps' parts are lost: the same graph in rows of every kind."""
    backend = emulated_backend(dtype, 17)
    case = EDGE_CASES[2]
    by_destination, by_source = case.by_destination(backend), case.by_source(backend)
    short = one_pass(backend, by_destination, by_source, case)
    lengths = np.diff(case.starts)
    schedule = make_schedule(case.starts, backend.upload, shortest=1, segment=10)
    assert schedule.num_long(8) > 3
    assert schedule.hubs.shape[0] > 0
    assert (lengths <= schedule.limit(8)).sum() > 3
    blocks = [_with_schedule(edges, backend) for edges in (by_destination, by_source)]
    long = one_pass(backend, blocks[0], blocks[1], case)
    exact = {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 2.0**-7}[dtype]
    kinds = [dtype, torch.int32] * 3 + [dtype] * 3
    for a, b, kind in zip(short, long, kinds, strict=True):
        first, second = (torch.from_numpy(x).view(kind) for x in (a, b))
        if kind == torch.int32:
            assert torch.equal(first, second)
        else:
            np.testing.assert_allclose(host(first), host(second), rtol=exact, atol=40 * exact)


def _with_schedule(edges: EdgeRows, backend: KernelBackend) -> EdgeRows:
    matrix = edges.matrix
    schedule = make_schedule(matrix.indptr.numpy(), backend.upload, shortest=1, segment=10)
    return EdgeRows(
        type(matrix)(matrix.indptr, matrix.indices, None, schedule), edges.place, edges.starts, edges.edge_ids
    )


@pytest.mark.emulated
def test_offsets_are_64_bits_wide() -> None:
    """Fails if row times leading dimension is computed in 32 bits in a kernel of the GPU."""
    backend = emulated_backend(torch.bfloat16, 3)
    case = EdgeCase("ring", 5, np.array([1, 2, 3, 4, 0]), np.arange(5))
    edges, back = case.by_destination(backend), case.by_source(backend)
    near = filled(padded(backend, 5, 9)[0], np.random.default_rng(4).normal(size=(5, 9)))
    far, out = far_rows(torch.bfloat16), padded(backend, 5, 9)[0]
    backend.edges.reduce(edges, Reduction("copy", "max", Operand(near, "source"), None), far, None)
    backend.edges.reduce(edges, Reduction("copy", "sum", Operand(far, "source"), None), out, None)
    assert torch.equal(out, near[[2, 3, 4, 0, 1]])
    for of, rows in (("source", back), ("destination", edges), ("edge", edges)):
        target = far_rows(torch.bfloat16)
        backend.edges.gradient(rows, EdgeGradient(of, "one", 1.0, None, None), far, None, target)  # type: ignore[arg-type]
        assert torch.equal(target, far[[4, 0, 1, 2, 3]] if of == "source" else far)


@pytest.mark.parametrize(("cols", "itemsize", "expected"), [(1, 4, 1), (4, 4, 1), (5, 4, 2), (41, 4, 16), (8, 2, 1)])
def test_lanes_cover_a_row_of_16_byte_pieces(cols: int, itemsize: int, expected: int) -> None:
    """Fails if lanes are no power of two, idle without need, or too few for a narrow row."""
    assert lanes(cols, itemsize) == expected
    assert lanes(10**6, itemsize) == 32
