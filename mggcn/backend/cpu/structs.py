"""Arguments of the CPU's products as the compiled kernels take them. Needs no torch."""

from __future__ import annotations

import ctypes

_P, _L, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class ProductArgs(ctypes.Structure):
    """`Product<S, O>` of cpu/spmm_product.h."""

    _fields_ = (
        *((name, _L) for name in ("num_chunks", "num_parts", "num_hubs")),
        *((name, _P) for name in ("chunks", "parts", "hubs", "indptr", "indices", "values", "dense", "out")),
        *((name, _P) for name in ("epilogue", "packed", "next", "sums")),
        *((name, _L) for name in ("ld_dense", "ld_out", "ld_sums", "inner", "cols", "hub", "panel", "blocks", "ahead")),
        *((name, _I) for name in ("accumulate", "threads")),
    )


class GemmArgs(ctypes.Structure):
    """`Product<S>` of cpu/gemm_product.h."""

    _fields_ = (
        *((name, _P) for name in ("a", "b", "out", "h", "epilogue", "activation", "partials")),
        *((name, _P) for name in ("packed", "own", "carry")),
        *((name, _L) for name in ("rows", "inner", "cols", "ld_a", "step_k", "step_n", "ld_out", "ld_h", "ld_own")),
        *((name, _L) for name in ("segments", "first_row", "window_first", "total")),
        *((name, _I) for name in ("a_t", "accumulate", "threads")),
    )
