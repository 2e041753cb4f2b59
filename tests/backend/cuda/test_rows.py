"""Launches of the CUDA row passes: shapes that any GPU takes, the same bits for every schedule, 64-bit offsets."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from mggcn.backend.base import Dropout, Epilogue, Gradient, KernelBackend, LossTarget
from mggcn.backend.cuda import rows as cuda_rows
from tests.backend.cases import RANDOM, clock, filled, numpy_reals, padded, random_dense, real_type, reals, zeros
from tests.backend.emulated import emulated_backend
from tests.backend.test_loss import run
from tests.backend.test_spmm import PARTS, epilogue_of

TYPES = [torch.float32, torch.float64, torch.bfloat16]
ROWS = (1, 15, 16, 17, 2708, 2_449_029, 2**31 - 1)


@pytest.mark.parametrize("cols", [1, 3, 4, 40, 41, 256, 512, 1023, 5000])
@pytest.mark.parametrize("rows", ROWS)
def test_shapes_cover_the_matrix_and_fit_a_gpu(rows: int, cols: int) -> None:
    """Fails if a row or column has no thread, or a launch passes a limit of the kernel or of CUDA."""
    for width, shape in itertools.product((2, 4, 8), (cuda_rows.row_shape, cuda_rows.sum_shape)):
        grid, block = shape(rows, cols, width)
        limit = cuda_rows.ROW_THREADS if shape is cuda_rows.row_shape else cuda_rows.SUM_THREADS
        assert block[0] * block[1] <= limit
        assert grid[1] * block[0] * width >= cols
        assert 1 <= grid[0] <= 2**31 - 1
        assert 1 <= grid[1] <= 65535
        if shape is cuda_rows.row_shape:
            assert grid[0] * block[1] >= rows
        else:
            assert grid[0] == cuda_rows.chunks(rows) <= cuda_rows.PARTIALS


def test_no_rows_is_an_empty_grid() -> None:
    """Fails if a rank without rows, or a slice without columns, would launch something."""
    for shape in (cuda_rows.row_shape, cuda_rows.sum_shape):
        assert shape(0, 7, 4)[0][0] == 0
    assert 0 in cuda_rows.row_shape(7, 0, 4)[0]


@pytest.mark.parametrize("classes", [1, 4, 5, 8, 16, 17, 41, 1000, 7000])
def test_lanes_of_a_row_divide_a_warp(classes: int) -> None:
    lanes = cuda_rows.loss_lanes(classes)
    assert 32 % lanes == 0
    assert lanes >= min(classes, 32)


def everything(backend: KernelBackend) -> list[Any]:
    """What every row pass writes, for inputs that are the same in each call."""
    rows, cols = 170, 41
    rng = np.random.default_rng(60601)
    z = filled(padded(backend, rows, cols)[0], random_dense(rows, cols, 4))
    out = padded(backend, rows, cols)[0]
    backend.finish(z, out, epilogue_of(backend, PARTS, rows, cols))
    sums = zeros(backend, backend.partials, cols, dtype=torch.float64)
    scale = reals(backend, rng.random(rows))
    backend.activation_grad(z, out, Gradient(keep_scale=1.5, h_scale=scale, out_scale=scale, partials=sums))
    bias = zeros(backend, cols, dtype=real_type(backend))
    backend.sum_partials(sums, bias)
    index = backend.upload(rng.permutation(rows)[:77].astype(np.int32))
    some = padded(backend, 77, cols)[0]
    backend.gather_rows(z, index, some)
    backend.scatter_add_rows(some, index, z)
    backend.scatter_rows(some, backend.upload(rng.permutation(rows)[:77].astype(np.int32)), z)
    m = RANDOM.adj
    sparse = backend.sparse(m.indptr.astype(np.int64), m.indices.astype(np.int32), numpy_reals(backend, m.data))
    values = zeros(backend, m.nnz, dtype=real_type(backend))
    ids = backend.upload(rng.integers(0, 2**40, m.shape[0]))
    backend.dropout_values(sparse, values, ids, Dropout(0.3, clock(backend, 5, 6), 7))
    labels, mask = rng.integers(0, cols, rows).astype(np.int32), rng.integers(0, 8, rows).astype(np.uint8)
    counts = zeros(backend, 3, 3, cols, dtype=torch.int64)
    backend.confusion(z, backend.upload(labels), backend.upload(mask), counts)
    loss, gradient, columns = run(backend, random_dense(rows, cols, 5), labels, mask)
    tensors = (out, sums, bias, some, z, values, counts)
    return [np.float64(loss), gradient, columns, *(t.cpu().contiguous().view(torch.uint8).numpy() for t in tensors)]


@pytest.mark.emulated
@pytest.mark.covering(0)
@pytest.mark.parametrize("dtype", TYPES)
def test_bits_do_not_depend_on_the_schedule(dtype: torch.dtype) -> None:
    """Fails if anything is summed in the order in which threads or blocks happen to run."""
    first, *others = (everything(emulated_backend(dtype, seed)) for seed in (0, 0, 5, 17, 991))
    for other in others:
        assert all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def far_rows(dtype: torch.dtype) -> torch.Tensor:
    """Five rows so far apart that the last begins behind element 2^31; only what is touched takes memory."""
    ld = 2**29 + 64
    return torch.empty(4 * ld + 64, dtype=dtype).as_strided((5, 9), (ld, 1)).zero_()


@pytest.mark.emulated
def test_offsets_are_64_bits_wide() -> None:
    """Fails if row times leading dimension is computed in 32 bits anywhere."""
    backend = emulated_backend(torch.bfloat16, 3)
    values = random_dense(5, 9, 14)
    near = filled(padded(backend, 5, 9)[0], values)
    index = torch.arange(5, dtype=torch.int32)
    far, back = far_rows(torch.bfloat16), padded(backend, 5, 9)[0]
    for scatter in (backend.scatter_add_rows, backend.scatter_rows):
        scatter(near, index, far)
        backend.gather_rows(far, index, back)
        assert torch.equal(back, near)
        far.zero_()
        back.zero_()
    backend.scatter_rows(near, index, far)
    backend.finish(far, far, Epilogue(relu=True))
    backend.finish(far, back, Epilogue())
    assert torch.equal(back, near.relu())
    backend.activation_grad(far, far, Gradient(keep_scale=2.0))
    assert torch.equal(far, 2 * near.relu())
    labels, mask = torch.zeros(5, dtype=torch.int32), torch.ones(5, dtype=torch.uint8)
    counts, loss = torch.zeros(3, 3, 9, dtype=torch.int64), torch.zeros(2, 1, dtype=torch.float64)
    backend.confusion(far, labels, mask, counts)
    assert torch.equal(counts[0, 1], torch.bincount(far.float().argmax(1), minlength=9))
    back.copy_(far)
    for z, sum_of_rows in ((far, loss[0]), (back, loss[1])):
        backend.softmax_xent(z, LossTarget(labels, mask, 0.2), None, sum_of_rows, None)
    assert loss[0] == loss[1] != 0
    assert torch.equal(far, back)
