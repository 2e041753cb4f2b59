"""Tiles, degrees and scales against SciPy's slicing."""

from __future__ import annotations

import itertools
from ctypes import addressof, byref, c_int32, c_void_p
from dataclasses import dataclass

import numpy as np
import pytest
import scipy.sparse as sp

from mggcn import native
from mggcn.errors import GraphError
from mggcn.graph.csr import CSR, ArrayRows
from mggcn.partition import sweep as sweep_module
from mggcn.partition.order import assign
from mggcn.partition.rows import tiles as tiles_module
from mggcn.partition.rows.tiles import RowColumnMask, build_tiles, check_tile_nnz, degrees, scales
from mggcn.partition.sweep import Chunk
from tests.graphs import csr, pattern

KINDS = ["random", "directed", "weighted", "hub-row", "empty", "star"]


@dataclass
class Exchanged:
    """Rows that are others from the second read on."""

    rows: list[np.ndarray]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rows[0].shape

    dtype, nbytes = np.dtype(np.int32), 4

    def read(self, start: int, stop: int) -> np.ndarray:
        return (self.rows.pop(0) if len(self.rows) > 1 else self.rows[0])[start:stop]

    def array(self) -> np.ndarray:
        return self.rows[0]

    copied = False

    def take(self, ids: np.ndarray) -> np.ndarray:
        return self.rows[0][ids]

    def in_place(self) -> Exchanged:
        return self


@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("then", [[3, 4, 5], [0, 1, 3]])
@pytest.mark.parametrize("others", [[], [0, 1, 2, 3, 4, 5] * 2])
def test_a_matrix_that_changes_between_the_sweeps_is_refused(
    loops: bool, weighted: bool, then: list[int], others: list[int]
) -> None:
    """Fails if a row takes more entries than were counted, which would lie outside its tile, or fewer, left unwritten."""
    indptr = np.cumsum([0, 3, *[len(others) // 2] * 2, 0, 0, 0])
    columns = Exchanged([np.array([*first, *others], np.int32) for first in ([0, 1, 2], then)])
    values = ArrayRows(np.ones(columns.shape, np.float32)) if weighted else None
    matrix = CSR(ArrayRows(indptr), columns, values, 6)
    with pytest.raises(GraphError, match=r"changed between two sweeps over it; .* start again"):
        build_tiles(matrix, assign(6, 2, "none", 1), 0, self_loops=loops, dtype="f4", threads=1)


def test_nothing_is_written_outside_of_what_was_counted() -> None:
    """Fails if the kernel trusts the second sweep: here nothing was counted, and three entries and a diagonal come."""
    owners, columns = assign(6, 2, "none", 1), np.array([1, 4, 5], np.int32)
    chunk = Chunk(0, np.array([0, 3, 3, 3, 3, 3, 3]), columns, np.ones(3, np.float32))
    arguments = tiles_module.sweep_arguments(chunk, owners, 0, True)
    around, weights = np.full(32, -7, np.int32), np.full(32, -7, np.float32)
    counted, changed = np.zeros((2, 4), np.int64), c_int32(0)
    addresses = (c_void_p * 3)(around[8:].ctypes.data, around[24:].ctypes.data, addressof(changed))
    values = (c_void_p * 2)(weights[8:].ctypes.data, weights[24:].ctypes.data)
    native.kernel("mggcn_tile_fill")(byref(arguments), counted.ctypes.data, addresses, values, 0, 2, 1)
    assert changed.value == 1
    assert (around == -7).all()
    assert (weights == -7).all()


def looped(kind: str, n: int, self_loops: bool) -> tuple[np.ndarray, np.ndarray]:
    """A matrix, and the same with missing diagonals inserted."""
    stored = pattern(kind, n, 13)
    full = stored.copy()
    if self_loops:
        missing = np.diagonal(full) == 0
        full[np.flatnonzero(missing), np.flatnonzero(missing)] = 1
    return stored, full


@pytest.mark.covering(1, rest="slow")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_tiles_equal_slices(kind: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a tile misses an entry, takes one of another rank, local ids are wrong, or a self-loop comes twice."""
    monkeypatch.setattr(sweep_module.sweep, "__defaults__", (31, 8))
    n = 37
    for order, loops, threads in itertools.product(("random", "permute", "none"), (False, True), (1, 2)):
        stored, full = looped(kind, n, loops)
        weighted = kind == "weighted"
        owners = assign(n, ranks, order, 99)
        for rank, dtype in itertools.product(range(ranks), ("f4", "f8") if weighted else ("f4",)):
            made = build_tiles(csr(stored, weighted), owners, rank, self_loops=loops, dtype=dtype, threads=threads)
            assert len(made) == ranks
            for other, tile in enumerate(made):
                assert (tile.values is not None) == weighted
                assert tile.indptr.dtype == np.int64
                assert tile.indices.dtype == np.int32
                data = np.ones(tile.nnz) if tile.values is None else tile.values
                shape = (owners.counts[rank], owners.counts[other])
                got = sp.csr_matrix((data, tile.indices, tile.indptr), shape).toarray()
                required = full[np.ix_(owners.owned(rank), owners.owned(other))]
                assert np.array_equal(got, required if weighted else required != 0)
                assert tile.nnz == np.count_nonzero(required)


@pytest.mark.parametrize("kind", ["directed", "weighted", "empty"])
@pytest.mark.parametrize("loops", [False, True])
def test_only_some_rows_or_columns(kind: str, loops: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if an entry or a diagonal comes that is not required, or one is missing, or entries change places in a row."""
    monkeypatch.setattr(sweep_module.sweep, "__defaults__", (31, 8))
    stored, full = looped(kind, 37, loops)
    weighted, required = kind == "weighted", np.random.default_rng(5).random(37) < 0.4
    for ranks, order, threads in ((1, "none", 1), (3, "random", 2)):
        owners = assign(37, ranks, order, 99)
        build = {"self_loops": loops, "dtype": "f4", "threads": threads}
        for rank, by_rows in itertools.product(range(ranks), (True, False)):
            only = RowColumnMask(rows=required) if by_rows else RowColumnMask(cols=required)
            made = build_tiles(csr(stored, weighted), owners, rank, **build, only=only)  # type: ignore[arg-type]
            whole = build_tiles(csr(stored, weighted), owners, rank, **build)  # type: ignore[arg-type]
            for other, (tile, all_) in enumerate(zip(made, whole, strict=True)):
                mine, theirs = owners.owned(rank), owners.owned(other)
                rows = np.repeat(np.arange(mine.size), np.diff(all_.indptr))
                taken = required[mine][rows] if by_rows else required[theirs][all_.indices]
                assert np.array_equal(tile.indices, all_.indices[taken])
                assert np.array_equal(np.diff(tile.indptr), np.bincount(rows[taken], minlength=mine.size))
                if all_.values is not None and tile.values is not None:
                    assert np.array_equal(tile.values, all_.values[taken])
                kept = full * (required[:, None] if by_rows else required)
                assert tile.nnz == np.count_nonzero(kept[np.ix_(mine, theirs)])


@pytest.mark.parametrize("kind", ["random", "weighted", "hub-row"])
@pytest.mark.parametrize("order", ["permute", "random"])
def test_columns_ascend(kind: str, order: str) -> None:
    """Fails if a product leaps back and forth in its operand, or a sorted row's inserted diagonal moves from its end."""
    for ranks, threads in ((1, 2), (3, 1)):
        stored, _ = looped(kind, 61, False)
        owners = assign(61, ranks, order, 5)
        matrix = csr(stored, kind == "weighted")
        for tile in build_tiles(matrix, owners, 0, self_loops=True, dtype="f8", threads=threads):
            rows = [tile.indices[a:b] for a, b in itertools.pairwise(tile.indptr)]
            assert all((np.diff(row[:-1]) > 0).all() for row in rows)
            assert any(row.size > 2 for row in rows)
        if ranks == 1 and order == "random":
            lacking = np.flatnonzero(np.diagonal(stored) == 0)
            assert all(rows[v][-1] == v for v in lacking)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loops", [False, True])
def test_degrees_and_scales_equal_numpy(kind: str, loops: bool) -> None:
    """Fails on a wrong sum, a vertex without in-edges that gets infinity, or S_c where there is none."""
    stored, full = looped(kind, 41, loops)
    weighted = kind == "weighted"
    owners = assign(41, 3, "permute", 6)
    for rank in range(3):
        degree = degrees(csr(stored, weighted), owners, rank, self_loops=loops, threads=2)
        expected = full.astype(float).sum(1)[owners.owned(rank)]
        np.testing.assert_allclose(degree, expected, rtol=1e-12)
        with np.errstate(divide="ignore"):
            inverse = np.where(expected > 0, 1 / expected, 0)
        mean, none = scales(degree, "mean")
        assert none is None
        np.testing.assert_allclose(mean, inverse, rtol=1e-12)
        row, col = scales(degree, "symmetric")
        np.testing.assert_allclose(row, np.sqrt(inverse), rtol=1e-12)
        assert col is row


def test_negative_degrees_are_refused() -> None:
    """Fails if edge weights that admit no normalisation make NaN scales."""
    matrix = csr(np.array([[0, -2.0], [1.0, 0]], np.float32), True)
    with pytest.raises(GraphError, match="negative edge weights"):
        degrees(matrix, assign(2, 1, "none", 1), 0, self_loops=False, threads=1)


def test_large_tiles_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a tile of 2^31 nonzeros passes, one less is refused, or the advice of more ranks is not enough."""
    check_tile_nnz(2**31 - 1, 1)
    with pytest.raises(GraphError, match=r"use more ranks \(about 3 or more\)"):
        check_tile_nnz(2**32, 2)
    with pytest.raises(GraphError, match="use more ranks"):
        check_tile_nnz(2**31, 1)
    monkeypatch.setattr(tiles_module, "MAX_TILE_NNZ", 5)
    with pytest.raises(GraphError, match="a tile of"):
        build_tiles(csr(pattern("star", 9, 1)), assign(9, 1, "none", 1), 0, self_loops=False, dtype="f4", threads=1)
