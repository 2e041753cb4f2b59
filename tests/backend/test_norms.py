"""Layer norm and batch norm of dense rows, against NumPy in float64."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from mggcn import native
from mggcn.backend.base import KernelBackend
from mggcn.backend.cpu.backend import CpuBackend
from mggcn.backend.cuda import norms as cuda_norms
from mggcn.backend.cuda import rows as cuda_rows
from mggcn.backend.norms import BatchTerms
from tests.backend.cases import (
    Make,
    filled,
    guards_hold,
    host,
    padded,
    random_dense,
    reals,
    skewed,
    tight,
    tolerance,
    zeros,
)
from tests.backend.emulated import emulated_backend

EPS = 1e-5
ROWS, COLS = (0, 1, 37, 150), (1, 3, 8, 40, 129, 515)
SHAPES = [(rows, cols) for rows, cols in itertools.product(ROWS, COLS) if rows != 150 or cols < 129]
MAKES = pytest.mark.parametrize("make", [padded, tight, skewed])


def vectors(backend: KernelBackend, count: int, cols: int, seed: int) -> list[torch.Tensor]:
    """Vectors (D,) in float64."""
    return [filled(zeros(backend, cols, dtype=torch.float64), row) for row in random_dense(count, cols, seed)]


def room(backend: KernelBackend, sums: int, cols: int) -> torch.Tensor:
    """Partial sums, to be overwritten."""
    return zeros(backend, sums, backend.partials, cols, dtype=torch.float64).fill_(float("nan"))


def hostile(rows: int, cols: int, seed: int) -> np.ndarray:
    """Rows of any size, among them constant ones and some far from zero beside what they differ by."""
    z = random_dense(rows, cols, seed)
    z[::5] = 3.0
    z[1::5] += 200.0
    z[2::5] *= 1e-3
    return z


def standardised(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scale = 1 / np.sqrt(z.var(1, keepdims=True) + EPS)
    return (z - z.mean(1, keepdims=True)) * scale, scale


def close(backend: KernelBackend, found: torch.Tensor, expected: np.ndarray) -> None:
    np.testing.assert_allclose(host(found), expected, **tolerance(backend))


def gradient_holds(
    backend: KernelBackend, g: np.ndarray, z: np.ndarray, gain: np.ndarray, out: torch.Tensor, partials: torch.Tensor
) -> None:
    """Check a gradient of layer norm, and its sums over the columns."""
    y, scale = standardised(z)
    h = g * gain
    expected = scale * (h - h.mean(1, keepdims=True) - y * (h * y).mean(1, keepdims=True))
    size = scale * np.abs(h).max(initial=1.0)  # differences of numbers of this size are rounded
    np.testing.assert_allclose(host(out) / size, expected / size, **tolerance(backend))
    np.testing.assert_allclose(host(partials[0].sum(0)), g.sum(0), rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(host(partials[1].sum(0)), (g * y).sum(0), rtol=1e-8, atol=1e-8)


@MAKES
def test_layer_norm(backend: KernelBackend, make: Make) -> None:
    """Fails if a row's mean or variance lacks columns or cancels, or anything beside the rows is written."""
    for rows, cols in SHAPES:
        z = filled(make(backend, rows, cols)[0], hostile(rows, cols, 3))
        gain, bias = (reals(backend, row) for row in random_dense(2, cols, 4))
        out, whole = make(backend, rows, cols)
        y, _ = standardised(host(z))
        backend.norms.layer_norm(z, gain, bias, EPS, out)
        close(backend, out, y * host(gain) + host(bias))
        assert guards_hold(whole, out, 1)
        backend.norms.layer_norm(z, gain, bias, EPS, z)
        assert torch.equal(z, out)


@MAKES
def test_layer_norm_gradient(backend: KernelBackend, make: Make) -> None:
    """Fails if a term of the gradient is missing, or a row, a column or a chunk is in no sum or in two."""
    for rows, cols in SHAPES:
        z = filled(make(backend, rows, cols)[0], hostile(rows, cols, 5))
        g = filled(make(backend, rows, cols)[0], random_dense(rows, cols, 6))
        gain = reals(backend, random_dense(1, cols, 7)[0])
        out, whole = make(backend, rows, cols)
        partials = room(backend, 2, cols)
        backend.norms.layer_norm_grad(g, z, gain, EPS, out, partials)
        gradient_holds(backend, host(g), host(z), host(gain), out, partials)
        assert guards_hold(whole, out, 1)
        again = room(backend, 2, cols)
        backend.norms.layer_norm_grad(g, z, gain, EPS, g, again)
        assert torch.equal(g, out)
        assert torch.equal(again, partials)


@MAKES
def test_column_moments(backend: KernelBackend, make: Make) -> None:
    """Fails if a row that another rank counts is counted, or one of this rank is not."""
    for rows, cols in SHAPES:
        z = filled(make(backend, rows, cols)[0], hostile(rows, cols, 8))
        once = filled(zeros(backend, rows, dtype=torch.float64), (np.arange(rows) % 3 > 0).astype(float))
        (mean,) = vectors(backend, 1, cols, 9)
        partials = room(backend, 1, cols)[0]
        backend.norms.column_moments(z, None, once, partials)
        np.testing.assert_allclose(host(partials.sum(0)), host(once) @ host(z), rtol=1e-11, atol=1e-11)
        backend.norms.column_moments(z, mean, once, partials)
        squares = host(once) @ (host(z) - host(mean)) ** 2
        np.testing.assert_allclose(host(partials.sum(0)), squares, rtol=1e-11, atol=1e-11)


@MAKES
def test_batch_norm_with_its_gradient(backend: KernelBackend, make: Make) -> None:
    """Fails if a vector is read at another column, a copy's second term counts, or in-place passes differ."""
    for rows, cols in SHAPES:
        z = filled(make(backend, rows, cols)[0], random_dense(rows, cols, 10))
        g = filled(make(backend, rows, cols)[0], random_dense(rows, cols, 11))
        mean, factor, slope, shift = vectors(backend, 4, cols, 12)
        once = filled(zeros(backend, rows, dtype=torch.float64), (np.arange(rows) % 2).astype(float))
        norms, partials = backend.norms, room(backend, 2, cols)
        away = host(z) - host(mean)
        norms.column_products(g, z, mean, partials)
        np.testing.assert_allclose(host(partials[0].sum(0)), host(g).sum(0), rtol=1e-11, atol=1e-11)
        np.testing.assert_allclose(host(partials[1].sum(0)), (host(g) * away).sum(0), rtol=1e-11, atol=1e-11)
        norms.column_products(g, z, None, partials)
        np.testing.assert_allclose(host(partials[1].sum(0)), (host(g) * host(z)).sum(0), rtol=1e-11, atol=1e-11)
        out, whole = make(backend, rows, cols)
        norms.batch_norm_grad(g, z, BatchTerms(mean, factor, slope, shift, once), out)
        counted = host(once)[:, None] * (host(slope) * away + host(shift))
        close(backend, out, host(factor) * (host(g) - counted))
        assert guards_hold(whole, out, 1)
        norms.batch_norm_grad(g, z, BatchTerms(mean, factor, slope, shift, once), g)
        assert torch.equal(g, out)
        norms.batch_norm(z, mean, factor, shift, out)
        close(backend, out, host(factor) * away + host(shift))
        assert guards_hold(whole, out, 1)
        norms.batch_norm(z, mean, factor, shift, z)
        assert torch.equal(z, out)


def test_nan_stays_in_its_row_and_its_columns(backend: KernelBackend) -> None:
    """Fails if NaN in a row or in the padding spreads, or becomes a number."""
    z, _ = padded(backend, 6, 5, fill=float("nan"))
    z.copy_(torch.from_numpy(random_dense(6, 5, 13)))
    z[2, 4] = float("nan")
    gain, bias = (reals(backend, row) for row in random_dense(2, 5, 14))
    out, _ = padded(backend, 6, 5)
    backend.norms.layer_norm(z, gain, bias, EPS, out)
    assert torch.isnan(out).all(1).nonzero().flatten().tolist() == [2]
    assert not torch.isnan(out[[0, 1, 3, 4, 5]]).any()
    partials, once = room(backend, 1, 5)[0], zeros(backend, 6, dtype=torch.float64).fill_(1)
    backend.norms.column_moments(z, None, once, partials)
    assert torch.isnan(partials.sum(0)).nonzero().flatten().tolist() == [4]


@pytest.mark.parametrize("chunks", [1, 3])
def test_chunks_of_many_rows(backend: KernelBackend, chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a chunk of a GPU that has more rows than a block takes at a time loses some, as in a graph of 10^5."""
    for module in (cuda_norms, cuda_rows):
        monkeypatch.setattr(module, "chunks", lambda rows: min(rows, chunks))
    rows, cols = 101, 9
    z, g, out = (padded(backend, rows, cols)[0] for _ in range(3))
    filled(z, hostile(rows, cols, 18))
    filled(g, random_dense(rows, cols, 19))
    gain, once = reals(backend, random_dense(1, cols, 20)[0]), zeros(backend, rows, dtype=torch.float64).fill_(1)
    sums = room(backend, 2, cols)
    backend.norms.layer_norm_grad(g, z, gain, EPS, out, sums)
    gradient_holds(backend, host(g), host(z), host(gain), out, sums)
    backend.norms.column_products(g, z, None, sums)
    products = [host(g).sum(0), (host(g) * host(z)).sum(0)]
    np.testing.assert_allclose(host(sums.sum(1)), products, rtol=1e-11, atol=1e-11)
    backend.norms.column_moments(z, None, once, sums[0])
    np.testing.assert_allclose(host(sums[0].sum(0)), host(z).sum(0), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("how", ["baseline", "avx2", "emulated"])
def test_rows_lie_beyond_two_gigabytes(how: str) -> None:
    """Fails if an offset of a row has 32 bits. The narrowest type: memory between rows is not touched, so takes none."""
    if how != "emulated" and how not in native.isas():
        pytest.skip(f"this processor has no {how}")
    backend: KernelBackend = (
        emulated_backend(torch.bfloat16, 331) if how == "emulated" else CpuBackend(torch.bfloat16, 2, how)
    )
    ld, cols = 2**30 + 8, 5
    g, z, out = (torch.empty(2 * ld + cols, dtype=backend.dtype).as_strided((3, cols), (ld, 1)) for _ in range(3))
    near, back, result = (torch.empty(3, cols, dtype=backend.dtype) for _ in range(3))
    for far, close_by, seed in ((g, back, 21), (z, near, 22)):
        far.copy_(filled(close_by, random_dense(3, cols, seed)))
    gain, bias = (reals(backend, row) for row in random_dense(2, cols, 23))
    mean, factor, slope, shift = vectors(backend, 4, cols, 24)
    once = torch.ones(3, dtype=torch.float64)
    terms, sums = BatchTerms(mean, factor, slope, shift, once), [room(backend, 2, cols) for _ in range(2)]
    for call in (
        lambda g, z, out, sums: backend.norms.layer_norm(z, gain, bias, EPS, out),
        lambda g, z, out, sums: backend.norms.layer_norm_grad(g, z, gain, EPS, out, sums),
        lambda g, z, out, sums: backend.norms.column_moments(z, mean, once, sums[0]),
        lambda g, z, out, sums: backend.norms.batch_norm(z, mean, factor, shift, out),
        lambda g, z, out, sums: backend.norms.column_products(g, z, mean, sums),
        lambda g, z, out, sums: backend.norms.batch_norm_grad(g, z, terms, out),
    ):
        for matrix in (out, result):
            matrix.zero_()
        for parts in sums:
            parts.zero_()
        call(g, z, out, sums[0])
        call(back, near, result, sums[1])
        assert torch.equal(out, result)
        assert torch.equal(*sums)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_threads_change_no_bit(dtype: torch.dtype) -> None:
    """Fails if a sum depends on the number of threads."""
    results = []
    for threads in (1, 2, 5):
        backend = CpuBackend(dtype, threads)
        g, z = (filled(padded(backend, 333, 70)[0], random_dense(333, 70, seed)) for seed in (15, 16))
        partials, gain = room(backend, 2, 70), reals(backend, random_dense(1, 70, 17)[0])
        backend.norms.layer_norm_grad(g, z, gain, EPS, g, partials)
        results.append((g.clone(), partials))
    for g, partials in results[1:]:
        assert torch.equal(g, results[0][0])
        assert torch.equal(partials, results[0][1])
