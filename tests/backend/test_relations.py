"""Products with the matrices of several relations in one launch, and rows that are added in the order of relations."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mggcn.backend.base import KernelBackend
from mggcn.backend.relations import RelationKernels, chain_of
from mggcn.backend.sparse import RelationGroup
from tests.backend.cases import filled, guards_hold, host, padded, random_dense, skewed, tight, tolerance
from tests.backend.emulated import emulated_backend

SIZES = (1, 63, 64, 65, 7, 130)
"""Rows of each relation that is there: tiles that are full, cut and one row longer."""
RELATIONS = (0, 1, 3, 4, 6, 8)
MAKES = {"padded": padded, "tight": tight, "skewed": skewed}


def kernels_of(backend: KernelBackend) -> RelationKernels:
    if backend.relations is None:
        pytest.skip("a CPU multiplies relation by relation")
    return backend.relations


def spans_of() -> list[tuple[int, int, int]]:
    ends = np.cumsum(SIZES).tolist()
    return [(r, last - size, last) for r, size, last in zip(RELATIONS, SIZES, ends, strict=False)]


def group_of(backend: KernelBackend, rows: np.ndarray) -> RelationGroup:
    spans = np.array(spans_of(), np.int32)
    return RelationGroup(backend.upload(spans), max(SIZES), backend.upload(chain_of(rows)))


def rows_of() -> np.ndarray:
    """Rows of every relation, without repeats within it, most of them with several relations."""
    rng = np.random.default_rng(73)
    return np.concatenate([np.sort(rng.permutation(140)[:size]) for size in SIZES]).astype(np.int32)


@pytest.mark.covering(2)
@pytest.mark.parametrize("make", list(MAKES))
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("inner", "cols"), [(1, 1), (7, 40), (33, 32), (64, 33), (70, 3)])
def test_products_of_relations(backend: KernelBackend, inner: int, cols: int, transposed: bool, make: str) -> None:
    """Fails if a row meets another relation's matrix, a tile's end is lost, or something behind a row is written."""
    kernels, n = kernels_of(backend), sum(SIZES)
    group = group_of(backend, rows_of())
    a = filled(MAKES[make](backend, n, inner)[0], random_dense(n, inner, 5))
    weights = filled(padded(backend, 9, inner * cols)[0], random_dense(9, inner * cols, 6))
    out, whole = MAKES[make](backend, n, cols)
    kernels.multiply(a, weights, group, out, transposed=transposed)
    matrices = host(weights).reshape(9, *((cols, inner) if transposed else (inner, cols)))
    matrices = matrices.transpose(0, 2, 1) if transposed else matrices
    expected = np.concatenate([host(a)[first:last] @ matrices[r] for r, first, last in spans_of()])
    exact = tolerance(backend)
    np.testing.assert_allclose(host(out), expected, rtol=exact["rtol"], atol=exact["atol"] * inner)
    assert guards_hold(whole, out, 1)


@pytest.mark.covering(2)
@pytest.mark.parametrize("make", list(MAKES))
@pytest.mark.parametrize(("d", "e"), [(1, 1), (7, 40), (65, 32), (128, 5), (3, 70)])
def test_gradients_of_relations(backend: KernelBackend, d: int, e: int, make: str) -> None:
    """Fails if a row counts for another relation, what was there is lost, or a relation without rows changes."""
    kernels, n = kernels_of(backend), sum(SIZES)
    group = group_of(backend, rows_of())
    a = filled(MAKES[make](backend, n, d)[0], random_dense(n, d, 7))
    b = filled(MAKES[make](backend, n, e)[0], random_dense(n, e, 8))
    gradients, whole = padded(backend, 9, d * e)
    filled(gradients, random_dense(9, d * e, 9))
    expected = host(gradients)
    for r, first, last in spans_of():
        expected[r] += (host(a)[first:last].T @ host(b)[first:last]).ravel()
    kernels.add_products(a, b, group, gradients)
    exact = tolerance(backend)
    np.testing.assert_allclose(host(gradients), expected, rtol=exact["rtol"], atol=exact["atol"] * 20)
    assert guards_hold(whole, gradients, 1)


@pytest.mark.parametrize("cols", [1, 7, 40, 530])
def test_rows_are_added_in_the_order_of_relations(backend: KernelBackend, cols: int) -> None:
    """Fails if a row of a later relation is lost or added first: other bits than relation by relation."""
    if backend.dtype == torch.bfloat16:
        pytest.skip("sums by relation are not kept in bfloat16")
    kernels, rows = kernels_of(backend), rows_of()
    source = filled(padded(backend, rows.size, cols)[0], random_dense(rows.size, cols, 11) * 1e3)
    found, before = [], random_dense(150, cols, 12)
    for together in (True, False):
        out, whole = skewed(backend, 150, cols)
        filled(out, before)
        if together:
            kernels.scatter_add(source, backend.upload(rows), group_of(backend, rows), out)
        else:
            for _, first, last in spans_of():
                backend.scatter_add_rows(source[first:last], backend.upload(rows[first:last].copy()), out)
        assert guards_hold(whole, out, 1)
        found.append(out)
    assert torch.equal(found[0], found[1])
    assert not np.array_equal(host(found[0]), before)


def test_chains() -> None:
    """Fails if a list's repeats are not in order, or two places claim to be a row's first."""
    assert chain_of(np.array([5, 2, 5, 9, 2, 5], np.int32)).tolist() == [2, 4, ~5, 0, ~0, ~0]
    assert chain_of(np.empty(0, np.int32)).size == 0


@pytest.mark.emulated
def test_bits_repeat() -> None:
    """Fails if a sum depends on the order in which threads and blocks run."""
    found = []
    for seed in (0, 5, 91):
        backend = emulated_backend(torch.float32, seed)
        kernels, rows = kernels_of(backend), rows_of()
        group = group_of(backend, rows)
        a, b = (filled(tight(backend, rows.size, 37)[0], random_dense(rows.size, 37, number)) for number in (1, 2))
        weights, out, to = torch.ones(9, 37 * 37), torch.ones(rows.size, 37), torch.ones(140, 37)
        kernels.add_products(a, b, group, weights)
        kernels.multiply(a, weights, group, out, transposed=True)
        kernels.scatter_add(out, backend.upload(rows), group, to)
        found.append((weights, out, to))
    for one, *others in zip(*found, strict=True):
        assert all(torch.equal(one, other) for other in others)
