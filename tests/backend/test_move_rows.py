"""Rows that move: gather, scatter and scatter-add, also between columns of wider tensors."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from mggcn.backend.base import KernelBackend
from tests.backend.cases import (
    GUARD,
    filled,
    guards_hold,
    host,
    padded,
    random_dense,
    real_type,
    reals,
    skewed,
    tight,
    zeros,
)


def test_gather_and_scatter(backend: KernelBackend) -> None:
    """Fails if rows are mixed up, a row is lost, or the padding of a row is copied over a neighbour."""
    rng = np.random.default_rng(55)
    for cols, make in itertools.product((1, 7, 40, 530), (padded, tight, skewed)):
        source = filled(padded(backend, 23, cols)[0], random_dense(23, cols, 1))
        index = backend.upload(rng.permutation(23)[:11].astype(np.int32))
        out, whole = make(backend, 11, cols)
        backend.gather_rows(source, index, out)
        assert torch.equal(out, source[index.long()])
        assert guards_hold(whole, out, 1)
        target, whole = make(backend, 23, cols)
        target.fill_(1.0)
        backend.scatter_add_rows(out, index, target)
        expected = np.ones((23, cols))
        expected[host(index)] += host(out)
        assert np.array_equal(host(target), host(torch.from_numpy(expected).to(backend.dtype)))
        assert guards_hold(whole, target, 1)
        target.fill_(1.0)
        backend.scatter_rows(out, index, target)
        expected = np.ones((23, cols))
        expected[host(index)] = host(out)
        assert np.array_equal(host(target), expected)
        assert guards_hold(whole, target, 1)


@pytest.mark.parametrize("moved", [(9, 0), (0, 5), (40, 8), (1, 3), (21, 16), (530, 11)], ids=str)
def test_rows_of_columns(backend: KernelBackend, moved: tuple[int, int]) -> None:
    """Fails if some columns of wider tensors are taken for rows of their width, or a neighbour is written."""
    (cols, first), rng = moved, np.random.default_rng(8806)
    narrow, wide = slice(first, first + cols), slice(2 * first, 2 * first + cols)
    values, before = random_dense(29, cols + first + 4, 71), random_dense(29, cols + 2 * first + 1, 72)
    source = filled(padded(backend, *values.shape)[0], values)
    for make, order in itertools.product((padded, tight, skewed), (rng.permutation(29), rng.permutation(29)[:13])):
        # Behind the first entries, as the lists of several ranks lie one behind the other.
        index = backend.upload(np.append(order[:3], order).astype(np.int32))[3:]
        for call, scattered in (("gather_rows", False), ("scatter_rows", True), ("scatter_add_rows", True)):
            out, whole = make(backend, *before.shape)
            filled(out, before)
            expected, given = host(out), host(source)[:, narrow]
            rows = source[: order.size] if scattered else source
            target = out if scattered else out[: order.size]
            getattr(backend, call)(rows[:, narrow], index, target[:, wide])
            if call == "gather_rows":
                expected[: order.size, wide] = given[order]
            elif call == "scatter_rows":
                expected[order, wide] = given[: order.size]
            else:
                expected[order, wide] += given[: order.size]
            assert np.array_equal(host(out), host(torch.from_numpy(expected).to(backend.dtype)))
            assert guards_hold(whole, out, 1)


@pytest.mark.parametrize("call", ["gather_rows", "scatter_rows"])
def test_moved_rows_keep_their_bits(backend: KernelBackend, call: str) -> None:
    """Fails if rows are moved as numbers: a NaN's payload or the sign of a zero would change."""
    size = backend.dtype.itemsize
    for cols in (3, 32):
        raw = np.random.default_rng(410).integers(0, 256, (6, cols * size), np.uint8)
        raw.view(f"u{size}")[0] = {2: 0x7FA1, 4: 0x7FA00001, 8: 0x7FF4000000000001}[size]
        raw.view(f"u{size}")[1] = 1 << (8 * size - 1)
        source, out = backend.upload(raw).view(backend.dtype), zeros(backend, 6, cols, dtype=backend.dtype)
        order = np.array([3, 0, 5, 1, 4, 2], np.int32)
        getattr(backend, call)(source, backend.upload(order), out)
        came = out.cpu().view(torch.uint8).numpy()
        assert np.array_equal(
            came if call == "gather_rows" else came[order], raw[order] if call == "gather_rows" else raw
        )


def test_gather_and_scatter_of_edge_values(backend: KernelBackend) -> None:
    """Fails if values, which are of the type of sums, are moved as if they were of the storage type."""
    values = reals(backend, random_dense(300, 1, 12))
    index = backend.upload(np.random.default_rng(77).integers(0, 300, 500).astype(np.int32))
    out = zeros(backend, 500, 1, dtype=real_type(backend))
    backend.gather_rows(values, index, out)
    assert torch.equal(out, values[index.long()])
    order = backend.upload(np.random.default_rng(78).permutation(500)[:300].astype(np.int32))
    expected = out.clone()
    expected[order.long()] = values
    backend.scatter_rows(values, order, out)
    assert torch.equal(out, expected)
    expected[order.long()] += values
    backend.scatter_add_rows(values, order, out)
    assert torch.equal(out, expected)


def test_no_rows_move(backend: KernelBackend) -> None:
    """Fails if a rank that sends nothing makes a launch that a device refuses, or writes something."""
    kept, whole = padded(backend, 9, 12)
    index = backend.upload(np.zeros(0, np.int32))
    empty = padded(backend, 0, 5)[0]
    for move in (backend.gather_rows, backend.scatter_rows, backend.scatter_add_rows):
        move(empty, index, empty)
    for move in (backend.scatter_rows, backend.scatter_add_rows):
        move(kept[3:3, 2:7], index, kept[:, 2:7])
    backend.gather_rows(kept[:, 2:7], index, kept[3:3, 2:7])
    assert bool((whole == GUARD).all())


def test_denormals_are_added(backend: KernelBackend) -> None:
    """Fails if a device takes numbers below the smallest normal one for zero, and so sums otherwise than the others."""
    tiny = torch.finfo(backend.dtype).smallest_normal / 4
    source, target = padded(backend, 3, 9)[0], padded(backend, 3, 9)[0]
    source.fill_(tiny)
    target.fill_(tiny)
    backend.scatter_add_rows(source, backend.upload(np.arange(3, dtype=np.int32)), target)
    assert (target == 2 * tiny).all()
