"""Memory into which the features of any vertices are gathered, by the thread that asks; and features that are read where
they are. N vertices, D features.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import torch

from mggcn import native
from mggcn.backend.cpu.args import NAMES
from mggcn.backend.cpu.memory import allocate
from mggcn.blocks.block import RowSet
from mggcn.blocks.sampler import BatchTooLargeError
from mggcn.blocks.sparse_rows import SparseRowsPlan
from mggcn.errors import GraphError
from mggcn.feed.batch import SparseFeatures
from mggcn.graph.csr import CSR
from mggcn.host import machine_memory
from mggcn.memory.arena import BufferSpec
from mggcn.partition.rows.tiles import Tile

if TYPE_CHECKING:
    from torch import Tensor

    from mggcn.feed.features import VertexFeatures


CONVERTED_BYTES = 32 << 10
"""Bytes of features of another type, or that are normalised, that are gathered at a time."""

THREAD_BYTES = 1 << 20
"""Bytes of features for which a thread more is woken: 0.1 ms of one, which it takes some 0.05 to wake."""
NAMED: Final = 4096
"""Places that are replaced by vertices at a time, and rows that are looked at: what lies between memory takes no more."""
FULL: Final = 1
COLUMN: Final = 2
REPEATED: Final = 4
"""Of `Status` in cpu/sparse_rows.cpp."""
NONZEROS: Final = "nonzeros of features"


class GatheredRows:
    """Features of at most spec.rows vertices, padded as rows of the arena. storage: the type of activations.

    spec: None gives every call memory of its own, contiguous. memory: gives so many bytes. threads: that gather at most.
    """

    def __init__(
        self,
        reader: VertexFeatures,
        spec: BufferSpec | None,
        storage: torch.dtype,
        memory: Callable[[int], Tensor] = allocate,
        threads: int = 1,
    ) -> None:
        self._threads = threads
        self._rows: Tensor | None = None
        if spec is not None:
            self._rows = memory(spec.nbytes).view(storage).as_strided((spec.rows, spec.cols), (spec.ld, 1))
        self._index, self._storage = np.empty(0 if spec is None else spec.rows, np.int32), storage
        self._reader, self._cols, features = reader, reader.num_features, reader.graph.features
        self._source: npt.NDArray[Any] | None = None
        self._sparse: tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any] | None] | None = None
        if isinstance(features, CSR):
            values = None if features.values is None else features.values.array()
            self._sparse = features.indptr.array(), features.indices.array(), values
        # Of graphs in several files, and where a file is converted, rows are taken a few at a time.
        real = np.float64 if storage == torch.float64 else np.float32
        if features is not None and not isinstance(features, CSR) and not features.copied:
            plain = features.dtype == real and not reader.row_normalize
            self._source = features.array() if plain else None

    def gather(self, ids: npt.NDArray[np.int64]) -> Tensor:
        """Return the features of vertices, (len(ids), D), valid until the next call if memory is planned.

        Cost: a random access for each.
        """
        source, index = self._source, self._index[: ids.size]
        if self._rows is None:
            out = torch.empty((ids.size, self._cols), dtype=self._storage)
            index = np.empty(ids.size, np.int32)
        else:
            out = self._rows[: ids.size]
        if self._sparse is not None:
            return self._from_sparse(*self._sparse, ids, out)
        if source is None:
            # A few rows at a time, so that what is converted takes no memory of note.
            step = max(1, CONVERTED_BYTES // (4 * max(out.shape[1], 1)))
            for start in range(0, ids.size, step):
                some = slice(start, start + step)
                out[some].copy_(torch.from_numpy(self._reader.gather(ids[some])))
            return out
        np.copyto(index, ids, casting="unsafe")
        kernel = native.kernel("mggcn_gather_rows_", {torch.bfloat16: "f32_bf16"}.get(out.dtype) or NAMES[out.dtype])
        threads = min(self._threads, 1 + source[:1].nbytes * ids.size // THREAD_BYTES)
        kernel(
            source.ctypes.data, source.shape[1], index.ctypes.data, out.data_ptr(), out.stride(0), *out.shape, threads
        )
        return out

    def _from_sparse(self, indptr: Any, indices: Any, values: Any, ids: npt.NDArray[np.int64], out: Tensor) -> Tensor:
        """Write rows of a CSR matrix as dense ones. Raises: GraphError for a column that it does not have."""
        bad = ctypes.c_int64(-1)
        kernel = native.kernel("mggcn_gather_sparse_", NAMES[out.dtype])
        addresses = (indptr.ctypes.data, indices.ctypes.data, None if values is None else values.ctypes.data)
        normalised = int(self._reader.row_normalize)
        kernel(
            *addresses,
            ids.ctypes.data,
            out.data_ptr(),
            out.stride(0),
            *out.shape,
            normalised,
            ctypes.addressof(bad),
        )
        if bad.value >= 0:
            raise _no_column(out.shape[1], bad.value, indices)
        return out


def stored_rows(features: VertexFeatures, dtype: torch.dtype) -> Tensor | None:
    """Return the features (N, D) where they are stored, if they are as activations are, else None."""
    stored = features.graph.features
    if stored is None or isinstance(stored, CSR) or stored.copied or features.row_normalize:
        return None
    if dtype != torch.float32 or stored.dtype != np.float32:
        return None
    array = np.ascontiguousarray(stored.array())  # as every file is
    # Not torch.from_numpy, which warns of a map that cannot be written to; nothing writes to it.
    memory = (ctypes.c_byte * array.nbytes).from_address(array.ctypes.data)
    memory._array = array  # type: ignore[attr-defined]  # ours: it keeps the map open
    return torch.frombuffer(memory, dtype=dtype).view(array.shape)


class StoredFeatures:
    """Features (N, D) that a step reads where they are stored: rows (N, D) float32, each without a gap."""

    def __init__(self, rows: Tensor) -> None:
        self.rows: Tensor = rows
        memory = machine_memory()
        self.far: bool = memory is not None and rows.nbytes > memory.available
        """Whether memory may not hold the file."""

    def prepare(self, ids: npt.NDArray[np.int64], indices: npt.NDArray[np.int32]) -> None:
        """Replace places among a batch's rows, which are of the vertices `ids`, by these, and make ready to read them.

        Cost: a random access for each place; of rows that are far, one for each page, which a thread beside the step waits
        for instead of the step.
        """
        for first in range(0, indices.size, NAMED):
            some = indices[first : first + NAMED]
            np.copyto(some, ids[some], casting="unsafe")
        if self.far:
            for first in range(0, ids.size, NAMED):
                self._touch(ids[first : first + NAMED].astype(np.int32))

    def _touch(self, index: npt.NDArray[np.int32]) -> None:
        """Read a number of each page that rows are on."""
        cols, out = self.rows.shape[1], np.empty(index.size, np.float32)
        kernel = native.kernel("mggcn_gather_rows_", "f32")
        for col in (*range(0, cols, mmap.PAGESIZE // 4), cols - 1):
            kernel(self.rows.data_ptr() + 4 * col, cols, index.ctypes.data, out.ctypes.data, 1, index.size, 1, 1)


class GatheredSparse:
    """Sparse features of at most as many vertices as a plan has room for, as rows of X and their transposes.

    Raises: GraphError for a graph with dense features.
    """

    def __init__(self, reader: VertexFeatures, plan: SparseRowsPlan) -> None:
        features = reader.graph.features
        if not isinstance(features, CSR):
            raise GraphError("batches were planned with sparse features, and the graph's are dense; plan the run again")
        values = None if features.values is None else features.values.array()
        self._source = features.indptr.array(), features.indices.array(), values
        self._plan, self._normalised = plan, int(reader.row_normalize)
        self._arrays = {name: np.empty(count, dtype) for name, dtype, count in plan.arrays()}
        kind = {"float32": "f32", "float64": "f64"}[plan.real]
        self._gather = native.kernel("mggcn_gather_csr_", kind)
        self._transpose = native.kernel("mggcn_transpose_csr_", kind)

    def gather(
        self, rows: Mapping[RowSet, npt.NDArray[np.int64]], col_scale: npt.NDArray[Any] | None
    ) -> dict[RowSet, SparseFeatures]:
        """Return the features of each row set that products read, valid until the next call. rows: ids of all row sets.

        col_scale (R,): S_c of the input's rows, None for ones. Cost: two random accesses a row, two passes over
        the nonzeros of the input's rows, and one over those of each other row set. Raises: BatchTooLargeError for more
        nonzeros than were planned; GraphError for a column that the features do not have, a row with more entries than
        columns, or pointers that do not ascend.
        """
        ids, at, status = rows[self._plan.sizes[0][0]], self._address, np.zeros(2, np.int64)
        indptr, indices, values = self._source
        scale = col_scale if self._plan.scaled else None
        self._gather(
            indptr.ctypes.data,
            indices.ctypes.data,
            None if values is None else values.ctypes.data,
            self._plan.cols,
            indices.shape[0],
            ids.ctypes.data,
            None if scale is None else scale.ctypes.data,
            ids.size,
            self._normalised,
            self._plan.nonzeros,
            at("indptr"),
            at("indices"),
            at("values"),
            status.ctypes.data,
        )
        hop = len(rows) - 2  # the last one, which reads the input
        self._check(int(status[0]), int(status[1]), hop)
        return {name: self._of(number, rows[name].size, hop) for number, (name, _, _) in enumerate(self._plan.sizes)}

    def _of(self, number: int, count: int, hop: int) -> SparseFeatures:
        """Return the first rows, so many, and make their transpose."""
        arrays, at, most = self._arrays, self._address, self._plan.sizes[number][2]
        nnz = int(arrays["indptr"][count])
        if nnz > most:
            raise BatchTooLargeError(hop, NONZEROS, most)
        back = [f"{name}{number}" for name in ("indptr_t", "indices_t", "values_t", "order")]
        own = [at(name) for name in ("indptr", "indices", "values")]
        self._transpose(*own, count, self._plan.cols, *map(at, back))
        matrix = Tile(arrays["indptr"][: count + 1], arrays["indices"][:nnz], arrays["values"][:nnz])
        order = arrays[back[3]][:nnz] if self._plan.dropped else None
        return SparseFeatures(matrix, Tile(arrays[back[0]], arrays[back[1]][:nnz], arrays[back[2]][:nnz]), order)

    def _address(self, name: str) -> int | None:
        """Return where an array is, None if the plan has none of this name."""
        return self._arrays[name].ctypes.data if name in self._arrays else None

    def _check(self, status: int, at: int, hop: int) -> None:
        """Raise what ended a gather early (`Status` of cpu/sparse_rows.cpp)."""
        if status == FULL:
            raise BatchTooLargeError(hop, NONZEROS, self._plan.nonzeros)
        if status == COLUMN:
            raise _no_column(self._plan.cols, at, self._source[1])
        if status == REPEATED:
            count = int(self._source[0][at + 1] - self._source[0][at])
            raise GraphError(
                f"the features of vertex {at} have {count} entries in {self._plan.cols} columns, so that a column is there "
                "twice; the store is damaged: copy or prepare it again"
            )
        if status:
            raise GraphError(
                f"row pointers of the features of vertex {at} must ascend within the {self._source[1].shape[0]} stored "
                "entries and do not; the store is damaged: copy or prepare it again"
            )


def _no_column(cols: int, entry: int, indices: npt.NDArray[Any]) -> GraphError:
    return GraphError(
        f"features have {cols} columns, entry {entry} is in column {indices[entry]}; the store is damaged: copy or prepare "
        "it again"
    )
