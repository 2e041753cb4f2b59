"""Sweeps over the rows of A, with those of A^T where it is another matrix, as cpu/locality.h takes them.

N vertices.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mggcn import native
from mggcn.graph.csr import CSR, Graph
from mggcn.partition.sweep import EDGES, ROWS


@dataclass(frozen=True, slots=True)
class RowChunk:
    """Rows of consecutive vertices, of both matrices; `arrays` are those that `arguments` points to."""

    arguments: native.ChunkArgs
    arrays: tuple[npt.NDArray[Any], ...]

    @property
    def pointer(self) -> Any:
        """The chunk as arguments of a kernel."""
        return ctypes.byref(self.arguments)

    @property
    def entries(self) -> int:
        """Entries of both matrices."""
        return sum(indices.shape[0] for indices in self.arrays[1::2])


def both_directions(graph: Graph) -> tuple[CSR, ...]:
    """Return A, and A^T if it is another matrix."""
    return (graph.adj,) if graph.symmetric else (graph.adj, graph.adj_t)


def num_entries(matrices: tuple[CSR, ...]) -> npt.NDArray[np.int64]:
    """Return the entries of each vertex's rows, int64 (N,). Cost: reads the row pointers."""
    counts = np.zeros(matrices[0].num_rows, np.int64)
    for matrix in matrices:
        for start in range(0, matrix.num_rows, ROWS):
            stop = min(start + ROWS, matrix.num_rows)
            counts[start:stop] += np.diff(matrix.read_pointers(start, stop + 1))
    return counts


def row_chunks(matrices: tuple[CSR, ...], threads: int) -> Iterator[RowChunk]:
    """Yield the rows of one or two matrices in order, at most ROWS rows and EDGES entries at a time, or one row.

    Cost: reads indptr and indices once; values are not looked at.
    """
    num_rows = matrices[0].num_rows
    for start in range(0, num_rows, ROWS):
        pointers = [m.read_pointers(start, min(start + ROWS, num_rows) + 1) for m in matrices]
        ends = sum((p - p[0] for p in pointers), np.zeros_like(pointers[0]))
        low, last = 0, ends.shape[0] - 1
        while low < last:
            high = int(np.searchsorted(ends, ends[low] + EDGES, side="right")) - 1
            high = min(max(high, low + 1), last)
            arrays: list[npt.NDArray[Any]] = []
            for matrix, p in zip(matrices, pointers, strict=True):
                arrays += [p[low : high + 1] - p[low], matrix.read_columns(int(p[low]), int(p[high]))]
            addresses = [array.ctypes.data for array in arrays] + [None] * (4 - len(arrays))
            yield RowChunk(native.ChunkArgs(*addresses, start + low, high - low, threads), tuple(arrays))
            low = high
