"""Row passes: dropout, epilogue, gradient of an activation, gather, scatter, dense products."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from mggcn.backend.base import PARTIALS, Dropout, Epilogue, KernelBackend
from mggcn.backend.cpu import CpuBackend
from tests.backend.cases import BATTERY, TYPES, filled, guards_hold, padded, random_dense, tight
from tests.backend.test_spmm import PARTS, epilogue_of, finished, tolerance
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


def test_dropout_equals_numpy_philox(backend: KernelBackend) -> None:
    """Fails if a mask differs in one bit, at any column or id, or the kept values are scaled otherwise."""
    for cols, p in itertools.product((1, 8, 63, 64, 65, 200), (1e-4, 0.3, 0.5, 0.97, 0.9999999)):
        dropout = Dropout(p, 2**32 - 5, 17, 3)
        z, whole = padded(IDS.size, cols, backend.dtype)
        z.fill_(1.0)
        backend.finish(z, z, Epilogue(dropout=dropout, row_ids=torch.from_numpy(IDS)))
        expected = dropout_mask(IDS, cols, p, dropout.seed, dropout.epoch, dropout.layer)
        assert np.array_equal(z.numpy().astype(float), expected)
        assert guards_hold(whole, z, 1)


def test_dropout_keeps_its_share() -> None:
    """Fails if masks are biased, or the same for two ids, epochs, layers or seeds."""
    ids = torch.arange(4096) + 2**33
    masks = []
    for seed, epoch, layer in ((7, 1, 1), (8, 1, 1), (7, 2, 1), (7, 1, 2)):
        z = torch.ones(4096, 96)
        CpuBackend(torch.float32, 1).finish(z, z, Epilogue(dropout=Dropout(0.3, seed, epoch, layer), row_ids=ids))
        masks.append((z != 0).double())
        # Five standard deviations.
        assert abs(masks[-1].mean() - 0.7) < 5 * (0.21 / z.numel()) ** 0.5
        assert z.max() == np.float32(65536 / (65536 - round(65536 * 0.3)))
        assert masks[-1].mean(0).std() < 2 * (0.21 / 4096) ** 0.5
    for one, other in itertools.combinations(masks, 2):
        assert abs(((one - 0.7) * (other - 0.7)).mean()) < 5 * 0.21 / one.numel() ** 0.5


def test_finish_in_place_and_not(backend: KernelBackend) -> None:
    """Fails if rows of a block take the vectors of other rows, or in-place and copying passes differ."""
    rows, first = 13, 7
    for cols, parts in itertools.product((3, 40, 129), ((), PARTS)):
        epilogue = epilogue_of(parts, rows + first, cols, backend.dtype)
        z = random_dense(rows, cols, 3).astype(TYPES[backend.dtype])
        source = filled(padded(rows, cols, backend.dtype)[0], z)
        out, whole = padded(rows, cols, backend.dtype)
        backend.finish(source, out, epilogue, first)
        backend.finish(source, source, epilogue, first)
        all_rows = np.zeros((rows + first, cols))
        all_rows[first:] = z
        np.testing.assert_allclose(out.numpy(), finished(all_rows, epilogue)[first:], rtol=1e-5, atol=1e-6)
        assert torch.equal(out, source)
        assert guards_hold(whole, out, 1)


@pytest.mark.parametrize("rows", [0, 1, 37, 200])
def test_activation_grad(backend: KernelBackend, rows: int) -> None:
    """Fails on a wrong mask, factor or row, or a bias gradient that takes scales it should not."""
    rng = np.random.default_rng(rows + 31)
    kind, first = TYPES[backend.dtype], 5
    for cols, masked, scaled, outer in itertools.product((1, 41), (False, True), (False, True), (False, True)):
        g, h = (rng.normal(size=(rows, cols)).astype(kind) for _ in range(2))
        h[rng.random(h.shape) < 0.4] = 0
        scales = (rng.random((2, rows + first)) + 0.5).astype(kind)
        out, whole = padded(rows, cols, backend.dtype)
        filled(out, h)
        partials = torch.zeros(PARTIALS, cols, dtype=torch.float64)
        backend.activation_grad(
            filled(padded(rows, cols, backend.dtype)[0], g),
            out,
            masked=masked,
            keep_scale=1.25,
            h_scale=torch.from_numpy(scales[0]) if scaled else None,
            out_scale=torch.from_numpy(scales[1]) if outer else None,
            partials=partials,
            first_row=first,
        )
        expected = g.astype(float) * 1.25 * ((h != 0) if masked else 1) * (scales[0][first:, None] if scaled else 1)
        bias = torch.zeros(cols, dtype=backend.dtype)
        backend.sum_partials(partials, bias)
        np.testing.assert_allclose(bias.numpy(), expected.sum(0), rtol=1e-4, atol=100 * tolerance(backend))
        expected = expected * (scales[1][first:, None] if outer else 1)
        np.testing.assert_allclose(out.numpy(), expected, rtol=1e-5)
        assert guards_hold(whole, out, 1)


def test_nan_passes_activation_grad(backend: KernelBackend) -> None:
    """Fails if a NaN activation masks its gradient to 0."""
    g, h = torch.ones(2, 3, dtype=backend.dtype), torch.zeros(2, 3, dtype=backend.dtype)
    h[1, 1] = g[0, 0] = float("nan")
    h[0, 0] = 1
    backend.activation_grad(g, h, masked=True, keep_scale=1.0, h_scale=None, out_scale=None, partials=None)
    assert h[1, 1] == 1
    assert torch.isnan(h[0, 0])


def test_gather_and_scatter(backend: KernelBackend) -> None:
    """Fails if rows are mixed up, a row is lost, or the padding of a row is copied over a neighbour."""
    rng = np.random.default_rng(55)
    for cols in (1, 7, 40):
        source = filled(padded(23, cols, backend.dtype)[0], random_dense(23, cols, 1).astype(TYPES[backend.dtype]))
        index = torch.from_numpy(rng.permutation(23)[:11].astype(np.int32))
        out, whole = tight(11, cols, backend.dtype)
        backend.gather_rows(source, index, out)
        assert torch.equal(out, source[index.long()])
        assert guards_hold(whole, out, 1)
        target, whole = padded(23, cols, backend.dtype)
        target.fill_(1.0)
        backend.scatter_add_rows(out, index, target)
        expected = torch.ones(23, cols, dtype=backend.dtype).index_add_(0, index.long(), out)
        assert torch.equal(target, expected)
        assert guards_hold(whole, target, 1)


def test_dropout_of_sparse_values_is_the_dense_mask(backend: KernelBackend) -> None:
    """Fails if sparse and dense features are dropped differently."""
    for case in (BATTERY[1], BATTERY[-1]):
        m = case.adj
        rows, cols = m.shape
        ids = np.random.default_rng(6).integers(0, 2**35, rows)
        values = m.data.astype(TYPES[backend.dtype])
        sparse = backend.sparse(m.indptr.astype(np.int64), m.indices.astype(np.int32), values)
        out = torch.empty(m.nnz, dtype=backend.dtype)
        backend.dropout_values(sparse, out, torch.from_numpy(ids), Dropout(0.6, 3, 4, 0))
        mask = dropout_mask(ids, cols, 0.6, 3, 4, 0)
        row_of = np.repeat(np.arange(rows), np.diff(m.indptr))
        expected = values * mask[row_of, m.indices].astype(values.dtype)
        assert np.array_equal(out.numpy(), expected)


def test_matmul_with_padding_and_without_rows(backend: KernelBackend) -> None:
    """Fails if BLAS is given a wrong leading dimension, writes padding, or an empty rank leaves garbage in its sum."""
    for rows, inner, cols in itertools.product((0, 1, 9), (1, 5, 40), (1, 3, 41)):
        a, b = random_dense(rows, inner, 1), random_dense(inner, cols, 2)
        kind = TYPES[backend.dtype]
        x = filled(padded(rows, inner, backend.dtype)[0], a.astype(kind))
        w = torch.from_numpy(b.astype(kind))
        out, whole = padded(rows, cols, backend.dtype)
        backend.matmul(x, w, out)
        np.testing.assert_allclose(out.numpy(), a @ b, rtol=1e-4, atol=1e-5)
        assert guards_hold(whole, out, 1)
        grad, whole = tight(inner, cols, backend.dtype)
        backend.matmul(x.t(), out, grad)
        np.testing.assert_allclose(grad.numpy(), a.T @ (a @ b), rtol=1e-4, atol=1e-4)
        backend.matmul(x.t(), out, grad, accumulate=True)
        np.testing.assert_allclose(grad.numpy(), 2 * a.T @ (a @ b), rtol=1e-4, atol=1e-4)
        assert guards_hold(whole, grad, 1)


def test_memory_is_aligned_and_zero(backend: KernelBackend) -> None:
    """Fails if the arena is not aligned to a cache line, not zeroed, or of another size."""
    for nbytes in (0, 1, 64, 100_000):
        memory = backend.allocate(nbytes)
        assert memory.shape == (nbytes,)
        assert not memory.any()
        assert nbytes == 0 or memory.data_ptr() % 64 == 0
