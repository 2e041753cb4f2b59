"""The P tiles of a rank's rows: CSR blocks with local column ids, and the scales of the normalisation.

V rows of this rank, P ranks; tile q holds the columns that rank q owns.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mggcn import native
from mggcn.errors import GraphError
from mggcn.graph.csr import CSR
from mggcn.partition.order import Owners, whole_graph
from mggcn.partition.sweep import Chunk, sweep

MakeArray = Callable[[int, npt.DTypeLike], npt.NDArray[Any]]
"""Makes an array of a length and a type, whose content is overwritten."""
MAX_TILE_NNZ = 2**31 - 1
"""cuSPARSE and CuPy narrow to 32 bits in places: larger tiles are refused."""


@dataclass(frozen=True, slots=True)
class Tile:
    """One block of the adjacency: indptr int64 (V + 1,), indices int32 (nnz,) local to the owner of the columns.

    types: uint8 or uint16 (nnz,), the relation of each entry, where a model reads them.
    """

    indptr: npt.NDArray[np.int64]
    indices: npt.NDArray[np.int32]
    values: npt.NDArray[Any] | None
    types: npt.NDArray[Any] | None = None

    @property
    def nnz(self) -> int:
        return int(self.indices.shape[0])


@dataclass(frozen=True, slots=True)
class RowColumnMask:
    """Masks of the rows and columns whose entries are taken, bool (N,) by original id; None: all."""

    rows: npt.NDArray[np.bool_] | None = None
    cols: npt.NDArray[np.bool_] | None = None


EVERYTHING: Final = RowColumnMask()


def check_tile_nnz(nnz: int, ranks: int) -> None:
    """Raise GraphError if a tile of `nnz` nonzeros cannot be addressed."""
    if nnz > MAX_TILE_NNZ:
        raise GraphError(
            f"a tile of {nnz:,} nonzeros exceeds the limit of {MAX_TILE_NNZ:,} with {ranks} ranks; use more ranks "
            f"(about {int(np.ceil(ranks * np.sqrt(nnz / MAX_TILE_NNZ)))} or more)"
        )


def sweep_arguments(
    chunk: Chunk, owners: Owners, rank: int, self_loops: bool, only: RowColumnMask = EVERYTHING
) -> native.SweepArgs:
    """Return a chunk as arguments for kernels; they point into its arrays, which must live as long."""
    return native.SweepArgs(
        chunk.indptr.ctypes.data,
        chunk.indices.ctypes.data,
        None if chunk.values is None else chunk.values.ctypes.data,
        chunk.first,
        chunk.rows,
        owners.arguments(),
        owners.counts[rank],
        rank,
        int(self_loops),
        None if only.rows is None else only.rows.ctypes.data,
        None if only.cols is None else only.cols.ctypes.data,
    )


def build_tiles(
    matrix: CSR,
    owners: Owners,
    rank: int,
    *,
    self_loops: bool,
    dtype: npt.DTypeLike,
    threads: int,
    only: RowColumnMask = EVERYTHING,
    span: range | None = None,
    among: range | None = None,
    array: MakeArray = np.empty,
) -> tuple[Tile, ...]:
    """Cut the rows that `rank` owns into P tiles, with missing diagonals inserted if `self_loops`.

    only: which entries, diagonals included; the tiles have all V rows, and those that are not required are empty.
    span: consecutive rows, where one rank has all vertices in their order: the tile has these rows alone. among:
    consecutive rows among which the rank's are; None: as owners say. array: makes the arrays of entries.

    Columns ascend in each row, except inserted diagonals, which come last where the rank keeps the original order.
    Cost: two sweeps over the rows among which the rank's are, in chunks of 8 MiB; besides the tiles nothing of the size of
    the graph is held.
    Raises: GraphError if a tile has 2^31 nonzeros or more, or the matrix changed between the sweeps.
    """
    ranks, first = owners.num_ranks, 0
    if span is not None:
        owners, first = whole_graph(span.stop), span.start
    rows = owners.counts[rank] - first
    swept = owners.span(rank) if among is None else among
    swept = swept if span is None else span
    indptr = np.zeros((ranks, rows + 1), np.int64)
    # Kernels find the pointers of a row by its number, from that of row 0 on.
    pointers_at = indptr.ctypes.data - first * indptr.itemsize
    count, fill = native.kernel("mggcn_tile_count"), native.kernel("mggcn_tile_fill")
    for chunk in sweep(matrix, span=swept):
        arguments = sweep_arguments(chunk, owners, rank, self_loops, only)
        count(ctypes.byref(arguments), pointers_at, threads)
    for pointers in indptr:
        np.cumsum(pointers, out=pointers)
        check_tile_nnz(int(pointers[-1]), ranks)
    weighted = matrix.values is not None
    indices = [array(int(p[-1]), np.int32) for p in indptr]
    values = [array(int(p[-1]), dtype) if weighted else None for p in indptr]
    changed = ctypes.c_int32(0)
    addresses = (ctypes.c_void_p * (ranks + 1))(*[a.ctypes.data for a in indices], ctypes.addressof(changed))
    value_addresses = (ctypes.c_void_p * ranks)(*[None if a is None else a.ctypes.data for a in values])
    wide = int(np.dtype(dtype) == np.float64)
    for chunk in sweep(matrix, span=swept):
        arguments = sweep_arguments(chunk, owners, rank, self_loops, only)
        fill(ctypes.byref(arguments), pointers_at, addresses, value_addresses, wide, ranks, threads)
    if changed.value:
        raise GraphError("the matrix changed between two sweeps over it; leave the graph alone, and start again")
    tiles = tuple(Tile(p, i, v) for p, i, v in zip(indptr, indices, values, strict=True))
    sort = native.kernel("mggcn_tile_sort")
    for owner, (p, tile) in enumerate(zip(indptr, tiles, strict=True)):
        # All rows of a tile are treated alike, whatever they hold: so a row has its order also where entries are left out.
        if span is not None or owners.in_order(owner):
            continue
        weights = None if tile.values is None else tile.values.ctypes.data
        sort(p.ctypes.data, rows, tile.indices.ctypes.data, weights, wide, threads)
    return tiles


def degrees(matrix: CSR, owners: Owners, rank: int, *, self_loops: bool, threads: int) -> npt.NDArray[np.float64]:
    """Return the sum of each owned row of `matrix`, inserted self-loops included: the in-degrees if it is adj_t.

    Raises: GraphError if one is negative, which no normalisation admits.
    """
    degree = np.zeros(owners.counts[rank])
    kernel = native.kernel("mggcn_tile_degree")
    for chunk in sweep(matrix, span=owners.span(rank)):
        kernel(ctypes.byref(sweep_arguments(chunk, owners, rank, self_loops)), degree.ctypes.data, threads)
    if degree.size and degree.min() < 0:
        raise GraphError(f"in-degrees must be 0 or more, got {degree.min():g} from negative edge weights; drop them")
    return degree


def scales(
    degree: npt.NDArray[np.float64], norm: str
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64] | None]:
    """Return S_r and S_c of S_r A^T S_c, None for ones; a vertex without in-edges gets 0.

    mean: 1 / in-degree on the rows (MG-GCN, eq. 2); symmetric: in-degree^-1/2 on both sides (Kipf & Welling, eq. 2).
    """
    with np.errstate(divide="ignore"):
        scale = 1.0 / degree if norm == "mean" else 1.0 / np.sqrt(degree)
    scale[~np.isfinite(scale)] = 0.0
    return scale, None if norm == "mean" else scale
