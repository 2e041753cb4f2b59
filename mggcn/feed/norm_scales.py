"""S_r and S_c of some vertices at a time, so that the first batch need not wait for the degrees of all.

N vertices of the graph, T of a call.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from mggcn import native
from mggcn.errors import GraphError
from mggcn.feed.batch import Scales
from mggcn.graph.csr import CSR

Vector = npt.NDArray[Any]


class NormScales:
    """The scales of the whole graph's normalisation, which the rows of A^T give one by one. real: their type.

    Bits are those of `partition.rows.tiles.scales`. Memory: where a degree is more than a difference of row pointers, in
    graphs with weights or inserted self-loops, what was found is cached: N numbers, of which the system holds the pages
    that were written. every (N,): the scales of all vertices, where the graph lacks rows of some. Threads may share it.
    """

    def __init__(
        self, adj_t: CSR, norm: str, *, self_loops: bool, real: npt.DTypeLike, every: Vector | None = None
    ) -> None:
        values = adj_t.values
        self.norm: str = norm
        self._real, self._loops, self._every = np.dtype(real), self_loops, every
        self._arrays = adj_t.indptr.array(), adj_t.indices.array(), None if values is None else values.array()
        cached = norm != "none" and every is None and (self_loops or values is not None)
        self._known = np.zeros(adj_t.num_rows if cached else 0, self._real)
        self._at = [None if of is None else of.ctypes.data for of in (*self._arrays, self._known if cached else None)]

    def of(self, ids: npt.NDArray[np.int64], out: Vector | None = None) -> Scales:
        """Return S_r and S_c of vertices, (T,), None for ones. out: where to write, (T,) or more.

        Cost: a random line or two for each, and for one that is new, under weights its row. Raises: GraphError for a
        negative degree, or a damaged row pointer.
        """
        if self.norm == "none":
            return None, None
        found = np.empty(ids.size, self._real) if out is None else out[: ids.size]
        if self._every is not None:
            np.take(self._every, ids, out=found, mode="clip")
            return found, found if self.norm == "symmetric" else None
        indptr, indices, values, known = self._at
        arguments = native.RowScalesArgs(
            indptr=indptr,
            ids=ids.ctypes.data,
            indices=indices,
            values=values,
            known=known,
            num_entries=self._arrays[1].size,
            rows=ids.size,
            self_loops=int(self._loops),
            symmetric=int(self.norm == "symmetric"),
        )
        kernel = native.kernel("mggcn_row_scales_", "f64" if self._real == np.float64 else "f32")
        kernel(ctypes.byref(arguments), found.ctypes.data)
        if arguments.status == 2:
            raise GraphError(
                f"in-degrees must be 0 or more, that of vertex {arguments.bad} is less; drop negative weights"
            )
        if arguments.status:
            raise GraphError(f"the row pointers of vertex {arguments.bad} are damaged: copy or prepare the graph again")
        return found, found if self.norm == "symmetric" else None
