"""Memory into which the features of any vertices are gathered, by the thread that asks. D features."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from mggcn import native
from mggcn.backend.cpu.args import NAMES
from mggcn.backend.cpu.memory import allocate
from mggcn.errors import GraphError
from mggcn.graph.csr import CSR
from mggcn.memory.arena import BufferSpec

if TYPE_CHECKING:
    from torch import Tensor

    from mggcn.feed.features import VertexFeatures


CONVERTED_BYTES = 32 << 10
"""Bytes of features of another type, or that are normalised, that are gathered at a time."""

THREAD_BYTES = 1 << 20
"""Bytes of features for which a thread more is woken: 0.1 ms of one, which it takes some 0.05 to wake."""


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
            raise GraphError(
                f"features have {out.shape[1]} columns, entry {bad.value} is in column {indices[bad.value]}; the store is "
                "damaged: copy or prepare it again"
            )
        return out
