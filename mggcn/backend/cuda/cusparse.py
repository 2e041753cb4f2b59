"""SpMM by cuSPARSE's generic API: a second implementation, against which our own kernels are measured.

Bound by ctypes: CuPy has no cusparseSpMM_preprocess, its descriptors are column-major, and a handle of one copy of the
library must not reach another. The library is the one that torch has loaded.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from mggcn.backend.base import Epilogue, Sparse
from mggcn.errors import BackendError

# cudaDataType, cusparseIndexType_t, cusparseOrder_t and cusparseSpMMAlg_t of library_types.h and cusparse.h
TYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 14}
INDEX_32 = 2
ROW_MAJOR = 2
ALGORITHMS = {"alg2": 6, "alg3": 12}
NAME = "libcusparse.so.12"

Algorithm = Literal["alg2", "alg3"]


class Library:
    """The functions of libcusparse that SpMM needs, with one handle; a status other than 0 raises BackendError.

    stream: returns the address of the stream that work is queued on, asked before each product.
    """

    def __init__(self, stream: Callable[[], int], load: Callable[[str], Any] = ctypes.CDLL) -> None:
        self._stream = stream
        try:
            self._functions = load(NAME)
        except OSError as error:
            raise BackendError(f"debug.spmm cusparse needs {NAME} ({error}); use --spmm own") from error
        self._handle = self.created("cusparseCreate")
        weakref.finalize(self, _call, self._functions, "cusparseDestroy", self._handle)

    def created(self, name: str, *args: Any) -> ctypes.c_void_p:
        """Return the object that a function creates and returns through its first parameter."""
        made = ctypes.c_void_p()
        self.call(name, ctypes.byref(made), *args)
        return made

    def call(self, name: str, *args: Any) -> None:
        _call(self._functions, name, *args)

    def on_stream(self, name: str, *args: Any) -> None:
        """Call a function whose first parameter is the handle, and queue its work on the current stream."""
        self.call("cusparseSetStream", self._handle, ctypes.c_void_p(self._stream()))
        self.call(name, self._handle, *args)


def _call(functions: Any, name: str, *args: Any) -> None:
    status = getattr(functions, name)(*args)
    if status:
        raise BackendError(f"{name} failed with cuSPARSE status {status}")


class EpilogueFn(Protocol):
    """KernelBackend.finish."""

    def __call__(self, z: Tensor, out: Tensor, epilogue: Epilogue, /) -> None: ...


@dataclass(frozen=True, slots=True)
class Product:
    """Descriptors of a matrix and of operands of one shape and type, whose addresses change, and the memory they point
    to.
    """

    csr: ctypes.c_void_p
    h: ctypes.c_void_p
    out: ctypes.c_void_p
    buffer: Tensor
    kept: tuple[Tensor, ...]
    """Keeps the matrix's addresses from being used again."""


class CusparseSpmm:
    """Products by cuSPARSE: CSR with 32-bit offsets and values, row-major operands, then `finish` for the epilogue.

    alg3 repeats bit for bit and is prepared once for each matrix and width; alg2 does neither. Descriptors, copies and
    work space (from `allocate`) are made at the first call of a product, which must not happen while a graph is captured.
    """

    def __init__(
        self, library: Library, allocate: Callable[[int], Tensor], finish: EpilogueFn, algorithm: Algorithm = "alg3"
    ) -> None:
        self._library = library
        self._allocate = allocate
        self._finish = finish
        self._algorithm = algorithm
        self._matrices: dict[tuple[Any, ...], tuple[Tensor, ...]] = {}
        self._products: dict[tuple[Any, ...], Product] = {}
        weakref.finalize(self, _destroy, library, self._products)

    def multiply(self, adj: Sparse, h: Tensor, out: Tensor, *, accumulate: bool, epilogue: Epilogue | None) -> None:
        """Implement KernelBackend.spmm. Raises: BackendError if bfloat16 operands meet edge values, which are float32."""
        if out.shape[0] == 0:
            return
        if adj.nnz:
            self._multiply(adj, h, out, accumulate)
        elif not accumulate:
            out.zero_()
        if epilogue is not None:
            self._finish(out, out, epilogue)

    def _multiply(self, adj: Sparse, h: Tensor, out: Tensor, accumulate: bool) -> None:
        shape = (h.shape[0], out.shape[1], h.stride(0), out.stride(0), h.dtype, out.dtype)
        key = (*_addresses(adj), *shape)
        if key not in self._products:
            self._products[key] = self._prepared(adj, h, out)
        product = self._products[key]
        self._library.call("cusparseDnMatSetValues", product.h, _address(h))
        self._library.call("cusparseDnMatSetValues", product.out, _address(out))
        self._run("cusparseSpMM", product.csr, product.h, product.out, h.dtype, accumulate, _address(product.buffer))

    def _prepared(self, adj: Sparse, h: Tensor, out: Tensor) -> Product:
        """Make the descriptors and work space of a product. It gets its own CSR descriptor, which stores the
        preparation.
        """
        offsets, indices, values = self._arrays(adj, h.dtype)
        sizes = (ctypes.c_int64(n) for n in (adj.num_rows, h.shape[0], adj.nnz))
        pointers = (_address(t) for t in (offsets, indices, values))
        kinds = (ctypes.c_int(n) for n in (INDEX_32, INDEX_32, 0, TYPES[h.dtype]))
        csr = self._library.created("cusparseCreateCsr", *sizes, *pointers, *kinds)
        dense = (self._dense(h), self._dense(out))
        nbytes = ctypes.c_size_t()
        self._run("cusparseSpMM_bufferSize", csr, *dense, h.dtype, False, ctypes.byref(nbytes))
        buffer = self._allocate(nbytes.value)
        if self._algorithm == "alg3":
            self._run("cusparseSpMM_preprocess", csr, *dense, h.dtype, False, _address(buffer))
        kept = (adj.indptr, offsets, indices, values)
        return Product(csr, *dense, buffer, kept)

    def _arrays(self, adj: Sparse, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Offsets, columns and values as cuSPARSE takes them: made once for each matrix."""
        if adj.values is not None and adj.values.dtype != dtype:
            raise BackendError(
                f"cuSPARSE multiplies {dtype} only by edge values of {dtype}, but these are {adj.values.dtype}; use "
                "--spmm own"
            )
        key = (*_addresses(adj), dtype)
        if key not in self._matrices:
            values = adj.values
            if values is None:
                values = self._allocate(adj.nnz * dtype.itemsize).view(dtype).fill_(1)
            offsets = self._allocate(4 * adj.indptr.shape[0]).view(torch.int32).copy_(adj.indptr)
            self._matrices[key] = (offsets, adj.indices, values)
        return self._matrices[key]

    def _dense(self, dense: Tensor) -> ctypes.c_void_p:
        sizes = (ctypes.c_int64(n) for n in (*dense.shape, dense.stride(0)))
        kinds = (ctypes.c_int(TYPES[dense.dtype]), ctypes.c_int(ROW_MAJOR))
        return self._library.created("cusparseCreateDnMat", *sizes, _address(dense), *kinds)

    def _run(self, name: str, csr: Any, h: Any, out: Any, dtype: torch.dtype, accumulate: bool, last: Any) -> None:
        """One of the three functions of SpMM, which take the same arguments except for the last."""
        real = ctypes.c_double if dtype == torch.float64 else ctypes.c_float
        compute = TYPES[torch.float64 if dtype == torch.float64 else torch.float32]
        alpha, beta = real(1), real(1 if accumulate else 0)
        plain, kinds = ctypes.c_int(0), (ctypes.c_int(compute), ctypes.c_int(ALGORITHMS[self._algorithm]))
        self._library.on_stream(name, plain, plain, ctypes.byref(alpha), csr, h, ctypes.byref(beta), out, *kinds, last)


def _destroy(library: Library, products: dict[tuple[Any, ...], Product]) -> None:
    for product in products.values():
        library.call("cusparseDestroySpMat", product.csr)
        library.call("cusparseDestroyDnMat", product.h)
        library.call("cusparseDestroyDnMat", product.out)


def _addresses(adj: Sparse) -> tuple[int, ...]:
    return tuple(0 if t is None else t.data_ptr() for t in (adj.indptr, adj.indices, adj.values))


def _address(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
