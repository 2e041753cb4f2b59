"""The sparse product and its epilogue against dense float64."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from mggcn import native
from mggcn.backend.base import Dropout, Epilogue, KernelBackend, Sparse
from mggcn.backend.cpu.backend import CpuBackend
from mggcn.errors import BackendError
from tests.backend.cases import (
    BATTERY,
    NAMES,
    RANDOM,
    Case,
    clock,
    filled,
    guards_hold,
    host,
    numpy_reals,
    padded,
    random_dense,
    reals,
    tight,
    tolerance,
)
from tests.reference import dropout_mask

WIDTHS = (1, 3, 7, 8, 16, 40, 41, 129, 512)
PARTS = ("row_scale", "bias", "relu", "dropout", "out_scale")


def sparse_of(backend: KernelBackend, case: Case, weighted: bool) -> tuple[Sparse, np.ndarray]:
    """The case on the device and as a dense matrix."""
    m = case.adj
    values = numpy_reals(backend, m.data) if weighted else None
    dense = np.asarray(m.todense())
    sparse = backend.sparse(m.indptr.astype(np.int64), m.indices.astype(np.int32), values)
    return sparse, dense if weighted else (dense != 0).astype(float)


def epilogue_of(backend: KernelBackend, parts: tuple[str, ...], rows: int, cols: int, seed: int = 71) -> Epilogue:
    rng = np.random.default_rng(seed)
    ids = backend.upload(rng.integers(0, 2**40, rows))
    return Epilogue(
        reals(backend, rng.random(rows) + 0.5) if "row_scale" in parts else None,
        reals(backend, rng.normal(size=cols)) if "bias" in parts else None,
        "relu" in parts,
        Dropout(0.4, clock(backend, 81231, 5), 2) if "dropout" in parts else None,
        ids,
        reals(backend, rng.random(rows) - 0.5) if "out_scale" in parts else None,
    )


def finished(z: np.ndarray, e: Epilogue) -> np.ndarray:
    """The epilogue in float64."""
    if e.row_scale is not None:
        z = z * host(e.row_scale)[:, None]
    if e.bias is not None:
        z = z + host(e.bias)
    if e.relu:
        z = np.where(z < 0, 0, z)
    if e.dropout is not None and e.row_ids is not None:
        seed, epoch = e.dropout.clock.tolist()
        z = z * dropout_mask(host(e.row_ids), z.shape[1], e.dropout.probability, seed, epoch, e.dropout.layer)
    if e.out_scale is not None:
        z = z * host(e.out_scale)[:, None]
    return z


def multiply(backend: KernelBackend, case: Case, cols: int, weighted: bool, **options: Any) -> tuple[Any, np.ndarray]:
    """Run one product between guards; return (out, expected) and check the guards.

    options: accumulate, epilogue, make, the types of operand and result, and the columns of padding that may be written.
    """
    accumulate, epilogue = options.get("accumulate", False), options.get("epilogue")
    make, (read, written) = options.get("make", padded), options.get("types", (None, None))
    padding = options.get("padding", 32 // backend.dtype.itemsize)
    sparse, dense = sparse_of(backend, case, weighted)
    rows, inner = dense.shape
    h, _ = make(backend, inner, cols, read)
    filled(h, random_dense(inner, cols, 17))
    out, whole = make(backend, rows, cols, written)
    before = np.zeros((rows, cols))
    if accumulate:
        before = host(filled(out, random_dense(rows, cols, 18)))
    backend.spmm(sparse, h, out, accumulate=accumulate, epilogue=epilogue)
    assert guards_hold(whole, out, padding if make is padded else 1)
    expected = dense @ host(h) + before
    return out, expected if epilogue is None else finished(expected, epilogue)


@pytest.mark.covering(1)
@pytest.mark.parametrize("case", BATTERY, **NAMES)
def test_spmm_matches_float64(backend: KernelBackend, case: Case, sample: Any) -> None:
    """Fails on a wrong row pointer, a dropped long row, a lost accumulate, a tail of columns or a write outside."""
    for cols, weighted, accumulate in sample(itertools.product(WIDTHS, (False, True), (False, True)), 6):
        if case is RANDOM and cols not in (3, 41, 129):
            continue
        out, expected = multiply(backend, case, cols, weighted, accumulate=accumulate)
        np.testing.assert_allclose(host(out), expected, **tolerance(backend))


def test_a_matrix_is_rewritten_in_place(backend: KernelBackend, request: pytest.FixtureRequest) -> None:
    """Fails if a product over memory that is rewritten depends on the matrix that was there before, skips a long row, or
    reads what lies behind the last row pointer.
    """
    cols = 41
    rows, columns = (max(case.adj.shape[side] for case in BATTERY) + 5 for side in (0, 1))
    most = max(case.adj.nnz for case in BATTERY) + 9
    indptr = backend.upload(np.zeros(rows + 1, np.int64))
    indices = backend.upload(np.full(most, columns - 1, np.int32))
    values = reals(backend, np.full(most, np.nan))
    if "cusparse" in request.node.name:
        with pytest.raises(BackendError, match="cuSPARSE prepares a product for one matrix"):
            backend.sparse_in_place(indptr, indices, values, columns)
        return
    sparse = backend.sparse_in_place(indptr, indices, values, columns)
    h, _ = padded(backend, columns, cols, None)
    filled(h, random_dense(columns, cols, 17))
    for case in BATTERY:
        m = case.adj
        backend.write(np.append(m.indptr, np.full(rows - m.shape[0], m.nnz)).astype(np.int64), indptr)
        backend.write(m.indices.astype(np.int32), indices[: m.nnz])
        backend.write(numpy_reals(backend, m.data), values[: m.nnz])
        out, whole = padded(backend, rows, cols, None)
        backend.spmm(sparse, h, out, accumulate=False, epilogue=None)
        assert guards_hold(whole, out, 32 // backend.dtype.itemsize)
        expected = np.zeros((rows, cols))
        expected[: m.shape[0]] = m.toarray() @ host(h)[: m.shape[1]]
        np.testing.assert_allclose(host(out), expected, **tolerance(backend), err_msg=case.name)
        values.fill_(float("nan"))


@pytest.mark.covering(0, rest=1)
def test_spmm_without_padding(backend: KernelBackend, sample: Any) -> None:
    """Fails if a row that is not padded is read or written beyond its end, into its neighbour or a guard."""
    for cols, weighted, accumulate in sample(itertools.product((1, 7, 40, 41), (False, True), (False, True)), 5):
        out, expected = multiply(backend, BATTERY[2], cols, weighted, accumulate=accumulate, make=tight)
        np.testing.assert_allclose(host(out), expected, **tolerance(backend))


@pytest.mark.covering(1, rest="slow")
@pytest.mark.parametrize("parts", [(), *((p,) for p in PARTS), PARTS[:3], PARTS], ids="+".join)
def test_every_epilogue(backend: KernelBackend, parts: tuple[str, ...]) -> None:
    """Fails if a part of the epilogue is skipped, misplaced, or takes the vectors of another row."""
    close = tolerance(backend)
    for cols, accumulate in itertools.product((1, 8, 41, 129), (False, True)):
        for case in (RANDOM, BATTERY[1]):
            epilogue = epilogue_of(backend, parts, case.adj.shape[0], cols)
            out, expected = multiply(backend, case, cols, True, accumulate=accumulate, epilogue=epilogue)
            np.testing.assert_allclose(host(out), expected, rtol=max(5e-5, close["rtol"]), atol=close["atol"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_bits_do_not_depend_on_threads_or_run(dtype: torch.dtype, isa: str) -> None:
    """Fails if rows are summed in an order that depends on who computes them, or anything adds atomically."""
    if isa not in native.isas():
        pytest.skip(f"this processor has no {isa}")
    results = []
    for threads in (1, 2, 2, 1):
        backend = CpuBackend(dtype, threads, isa)
        epilogue = epilogue_of(backend, PARTS, RANDOM.adj.shape[0], 41)
        results.append(multiply(backend, RANDOM, 41, True, epilogue=epilogue)[0])
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_nan_passes_the_epilogue(backend: KernelBackend) -> None:
    """Fails if ReLU turns NaN into 0, so that a broken sum stays unseen; NaN in the padding must not spread."""
    sparse, _ = sparse_of(backend, BATTERY[0], False)
    h, _ = padded(backend, 37, 5, fill=float("nan"))
    h.zero_()
    h[3, 2] = float("nan")
    out, _ = padded(backend, 37, 5)
    backend.spmm(sparse, h, out, accumulate=False, epilogue=Epilogue(relu=True))
    assert torch.isnan(out).nonzero().tolist() == [[3, 2]]


def test_balance_covers_all_rows_in_order() -> None:
    """Fails if chunks overlap, leave rows out, or a hub does not get a chunk nearly of its own."""
    backend = CpuBackend(torch.float32, 1)
    lengths = np.ones(5000, np.int64)
    lengths[1234] = 10**6
    for counts in (lengths, lengths[:0], lengths[:1], np.zeros(700, np.int64), lengths[:513]):
        indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        chunks = backend.sparse(indptr, np.zeros(int(indptr[-1]), np.int32), None).schedule.chunks.numpy()
        assert chunks[0] == 0
        assert chunks[-1] == counts.size
        assert (np.diff(chunks) >= 0).all()
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    chunks = backend.sparse(indptr, np.zeros(int(indptr[-1]), np.int32), None).schedule.chunks.numpy()
    work = np.diff(indptr[chunks] + 8 * chunks)
    share = work.sum() / (chunks.size - 1)
    assert sorted(work)[-2] <= 2 * share + 9
    # The first tenth of the rows has all entries: most of the chunks are theirs.
    lengths = np.repeat([40, 0], [600, 5400])
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    chunks = backend.sparse(indptr, np.zeros(int(indptr[-1]), np.int32), None).schedule.chunks.numpy()
    assert np.searchsorted(chunks, 600) >= 0.7 * chunks.size
