"""Row passes: dropout, epilogue, gradient of an activation, dense products."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from mggcn.backend.base import Dropout, Epilogue, Gradient, KernelBackend
from mggcn.backend.cpu.backend import CpuBackend
from tests.backend.cases import (
    BATTERY,
    Case,
    Make,
    clock,
    filled,
    guards_hold,
    host,
    numpy_reals,
    padded,
    random_dense,
    real_type,
    reals,
    skewed,
    tight,
    tolerance,
    zeros,
)
from tests.backend.test_spmm import PARTS, epilogue_of, finished
from tests.reference import dropout_mask, philox

IDS = np.array([0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**40 + 7, 99], np.int64)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        (0x00000000, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (0xFFFFFFFF, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ],
)
def test_reference_philox_gives_the_published_answers(word: int, expected: tuple[int, ...]) -> None:
    """Fails if the reference itself is not Philox4x32-10 (Random123's kat_vectors)."""
    assert tuple(int(w) for w in philox(np.full(4, word, np.uint64), (word, word))) == expected


@pytest.mark.parametrize("make", [padded, tight, skewed])
def test_dropout_equals_numpy_philox(backend: KernelBackend, make: Make) -> None:
    """Fails if a mask differs in one bit, at any column or id, or the kept values are scaled otherwise."""
    for cols, p in itertools.product((1, 8, 63, 64, 65, 200), (1e-4, 0.3, 0.5, 0.97, 0.9999999)):
        z, whole = make(backend, IDS.size, cols)
        z.fill_(1.0)
        dropout = Dropout(p, clock(backend, 2**32 - 5, 17), 3)
        backend.finish(z, z, Epilogue(dropout=dropout, row_ids=backend.upload(IDS)))
        expected = dropout_mask(IDS, cols, p, 2**32 - 5, 17, 3)
        assert np.array_equal(host(z), host(torch.from_numpy(expected).to(backend.dtype)))
        assert guards_hold(whole, z, 1)


def test_word_at_the_threshold_is_kept(backend: KernelBackend) -> None:
    """Fails if a word equal to the threshold drops; here all others drop."""
    ids = np.arange(60_000)
    mask = dropout_mask(ids, 8, 0.9999999, 11, 12, 13)
    ids = ids[mask.any(1)]
    assert ids.size > 1
    z = padded(backend, ids.size, 8)[0].fill_(1.0)
    dropout = Dropout(0.9999999, clock(backend, 11, 12), 13)
    backend.finish(z, z, Epilogue(dropout=dropout, row_ids=backend.upload(ids)))
    assert np.array_equal(host(z), mask[ids])


def test_dropout_keeps_its_share() -> None:
    """Fails if masks are biased, or the same for two ids, epochs, layers or seeds."""
    backend = CpuBackend(torch.float32, 1)
    ids = torch.arange(4096) + 2**33
    masks = []
    for seed, epoch, layer in ((7, 1, 1), (8, 1, 1), (7, 2, 1), (7, 1, 2)):
        z = torch.ones(4096, 96)
        dropout = Dropout(0.3, clock(backend, seed, epoch), layer)
        backend.finish(z, z, Epilogue(dropout=dropout, row_ids=ids))
        masks.append((z != 0).double())
        # Five standard deviations.
        assert abs(masks[-1].mean() - 0.7) < 5 * (0.21 / z.numel()) ** 0.5
        assert z.max() == np.float32(65536 / (65536 - round(65536 * 0.3)))
        assert masks[-1].mean(0).std() < 2 * (0.21 / 4096) ** 0.5
    for one, other in itertools.combinations(masks, 2):
        assert abs(((one - 0.7) * (other - 0.7)).mean()) < 5 * 0.21 / one.numel() ** 0.5


@pytest.mark.parametrize("make", [padded, tight, skewed])
def test_finish_in_place_and_not(backend: KernelBackend, make: Make) -> None:
    """Fails if rows of a block take the vectors of other rows, or in-place and copying passes differ."""
    rows, first = 13, 7
    for cols, parts in itertools.product((1, 3, 40, 129, 1100), ((), PARTS[:3], PARTS)):
        epilogue = epilogue_of(backend, parts, rows + first, cols)
        source = filled(make(backend, rows, cols)[0], random_dense(rows, cols, 3))
        all_rows = np.zeros((rows + first, cols))
        all_rows[first:] = host(source)
        out, whole = make(backend, rows, cols)
        backend.finish(source, out, epilogue, first)
        backend.finish(source, source, epilogue, first)
        np.testing.assert_allclose(host(out), finished(all_rows, epilogue)[first:], **tolerance(backend))
        assert torch.equal(out, source)
        assert guards_hold(whole, out, 1)


def test_finish_leaves_nan_where_it_is(backend: KernelBackend) -> None:
    """Fails if NaN in the padding spreads, or NaN in a row becomes a number."""
    z, _ = padded(backend, 6, 5, fill=float("nan"))
    z.fill_(-1.0)
    z[2, 4] = float("nan")
    backend.finish(z, z, epilogue_of(backend, PARTS[1:3], 6, 5))
    assert torch.isnan(z).nonzero().tolist() == [[2, 4]]


@pytest.mark.parametrize("rows", [0, 1, 37, 200])
@pytest.mark.parametrize("make", [padded, skewed])
def test_activation_grad(backend: KernelBackend, rows: int, make: Make) -> None:
    """Fails on a wrong mask, factor or row, or a bias gradient that takes scales it should not."""
    rng = np.random.default_rng(rows + 31)
    first = 5
    for cols, masked, scaled, outer in itertools.product((1, 41), (False, True), (False, True), (False, True)):
        g = filled(make(backend, rows, cols)[0], rng.normal(size=(rows, cols)))
        out, whole = make(backend, rows, cols)
        filled(out, rng.normal(size=(rows, cols)) * (rng.random((rows, cols)) > 0.4))
        h = host(out)
        h_scale, out_scale = (reals(backend, rng.random(rows + first) + 0.5) for _ in range(2))
        partials = zeros(backend, backend.partials, cols, dtype=torch.float64)
        backend.activation_grad(
            g,
            out,
            Gradient(
                masked=masked,
                keep_scale=1.25,
                h_scale=h_scale if scaled else None,
                out_scale=out_scale if outer else None,
                partials=partials,
            ),
            first_row=first,
        )
        expected = host(g) * 1.25 * ((h != 0) if masked else 1) * (host(h_scale)[first:, None] if scaled else 1)
        bias = zeros(backend, cols, dtype=real_type(backend))
        backend.sum_partials(partials, bias)
        exact = 1e-11 if backend.dtype == torch.float64 else 2e-5
        np.testing.assert_allclose(host(bias), expected.sum(0), rtol=exact, atol=10 * exact)
        expected = expected * (host(out_scale)[first:, None] if outer else 1)
        np.testing.assert_allclose(host(out), expected, **tolerance(backend))
        assert guards_hold(whole, out, 1)


def test_column_sums_of_many_rows_and_columns(backend: KernelBackend) -> None:
    """Fails if a chunk, or a slab of a wide row, is left out or added twice, or later rows do not add to the first.

    What lies in the partial sums before must not count: chunks that have no rows, too, begin at zero.
    """
    for rows, cols in ((1100, 3), (20, 2100)):
        g = filled(padded(backend, rows, cols)[0], random_dense(rows, cols, 8))
        out = padded(backend, rows, cols)[0]
        partials = zeros(backend, backend.partials, cols, dtype=torch.float64)
        partials.fill_(float("nan"))
        for first in (0, rows):
            backend.activation_grad(g, out, Gradient(masked=False, partials=partials), first_row=first)
        bias = zeros(backend, cols, dtype=real_type(backend))
        backend.sum_partials(partials, bias)
        np.testing.assert_allclose(host(bias), 2 * host(g).sum(0), rtol=2e-5, atol=2e-4)
        assert torch.equal(out, g)


def test_sum_of_all_partials(backend: KernelBackend) -> None:
    """Fails if a chunk is left out."""
    for cols in (1, 33, 100):
        values = random_dense(backend.partials, cols, 60)
        out = zeros(backend, cols, dtype=real_type(backend))
        backend.sum_partials(backend.upload(values), out)
        np.testing.assert_allclose(host(out), values.sum(0), rtol=1e-6, atol=1e-6)


def test_nan_passes_activation_grad(backend: KernelBackend) -> None:
    """Fails if a NaN activation masks its gradient to 0."""
    g, h = (zeros(backend, 2, 3, dtype=backend.dtype) for _ in range(2))
    g.fill_(1.0)
    h[1, 1] = g[0, 0] = float("nan")
    h[0, 0] = 1
    backend.activation_grad(g, h, Gradient())
    assert h[1, 1] == 1
    assert torch.isnan(h[0, 0])
    assert h.isnan().sum() == 1


def test_no_rows(backend: KernelBackend) -> None:
    """Fails if a rank without rows makes a launch that a device refuses, or leaves garbage in its sums."""
    empty, partials = padded(backend, 0, 5)[0], zeros(backend, backend.partials, 5, dtype=torch.float64).fill_(3.0)
    backend.finish(empty, empty, Epilogue(relu=True))
    backend.activation_grad(empty, empty, Gradient(partials=partials))
    bias = zeros(backend, 5, dtype=real_type(backend)).fill_(7.0)
    backend.sum_partials(partials, bias)
    assert not bias.any()


FULL = Case("full", sp.csr_matrix(np.random.default_rng(8).normal(size=(9, 70))))


@pytest.mark.parametrize("case", [BATTERY[1], BATTERY[6], BATTERY[7], BATTERY[-1], FULL], ids=lambda case: case.name)
def test_dropout_of_sparse_values_is_the_dense_mask(backend: KernelBackend, case: Case) -> None:
    """Fails if sparse and dense features are dropped differently."""
    m = case.adj
    rows, cols = m.shape
    ids = np.random.default_rng(6).integers(0, 2**35, rows)
    values = numpy_reals(backend, m.data)
    sparse = backend.sparse(m.indptr.astype(np.int64), m.indices.astype(np.int32), values)
    out = zeros(backend, m.nnz, dtype=real_type(backend))
    backend.dropout_values(sparse, out, backend.upload(ids), Dropout(0.6, clock(backend, 3, 4), 1))
    mask = dropout_mask(ids, cols, 0.6, 3, 4, 1)
    row_of = np.repeat(np.arange(rows), np.diff(m.indptr))
    assert np.array_equal(out.cpu().numpy(), values * mask[row_of, m.indices].astype(values.dtype))


def test_matmul_with_padding_and_without_rows(backend: KernelBackend) -> None:
    """Fails if BLAS is given a wrong leading dimension, writes padding, or an empty rank leaves garbage in its sum."""
    loose = {"rtol": max(1e-4, tolerance(backend)["rtol"]), "atol": 1e-4}
    for rows, inner, cols in itertools.product((0, 1, 9), (1, 5, 40), (1, 3, 41)):
        x = filled(padded(backend, rows, inner)[0], random_dense(rows, inner, 1))
        w = filled(tight(backend, inner, cols)[0], random_dense(inner, cols, 2))
        out, whole = padded(backend, rows, cols)
        backend.matmul(x, w, out)
        np.testing.assert_allclose(host(out), host(x) @ host(w), **loose)
        assert guards_hold(whole, out, 1)
        # Gradients of weights are of the type of sums.
        grad, whole = tight(backend, inner, cols, real_type(backend))
        expected = host(x).T @ host(out)
        backend.matmul(x.t(), out, grad)
        np.testing.assert_allclose(host(grad), expected, rtol=1e-4, atol=1e-4)
        backend.matmul(x.t(), out, grad, accumulate=True)
        np.testing.assert_allclose(host(grad), 2 * expected, rtol=1e-4, atol=1e-4)
        assert guards_hold(whole, grad, 1)


def test_memory_is_aligned_and_zero(backend: KernelBackend) -> None:
    """Fails if the arena is not aligned to a cache line, not zeroed, or of another size."""
    for nbytes in (0, 1, 64, 100_000):
        memory = backend.allocate(nbytes)
        assert memory.shape == (nbytes,)
        assert not memory.any()
        assert nbytes == 0 or memory.data_ptr() % 64 == 0
