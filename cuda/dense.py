"""Triton's kernels of dense products on tensor cores: h W and g W^T, with what follows them.

Imported where a GPU has them, or a test interprets them: torch's builds for CUDA bring Triton along, those for CPUs do not.

M rows, K inner width, N columns of the result. float32 is summed as three products of TF32 (`parts` 2): a number is the
sum of its upper 11 bits and of the next 11, and only the product of both lower parts is left out (Markidis et al., "NVIDIA
Tensor Core Programmability, Performance and Precision", 2018). No atomics: bits repeat. Twin: cpu/gemm.cpp.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def upper(x):
    """Round float32 to TF32, to nearest: what tensor cores read of it."""
    return ((x.to(tl.uint32, bitcast=True) + 0x1000) & 0xFFFFE000).to(tl.float32, bitcast=True)


@triton.jit
def lower(x, above):
    """Return what rounding took away, itself rounded to TF32; NaN where x is not finite, so that the product shows it."""
    return upper(x - above)


@triton.jit
def pack(b, step_k, step_n, packed, K: tl.constexpr, N: tl.constexpr, rows: tl.constexpr, cols: tl.constexpr,
         parts: tl.constexpr, block: tl.constexpr):  # fmt: skip
    """Write b (K, N) as packed (parts, cols, rows): transposed, padded by zeros, upper parts, then lower ones.

    Tensor cores read TF32 only along the inner dimension; split once here instead of in every block of rows.
    """
    at = tl.program_id(0) * block + tl.arange(0, block)
    n, k = at // rows, at % rows
    x = tl.load(b + k * step_k + n * step_n, mask=(k < K) & (n < N), other=0.0)
    if parts == 0:
        tl.store(packed + at, x, mask=at < rows * cols)
    else:
        above = upper(x)
        tl.store(packed + at, above, mask=at < rows * cols)
        if parts == 2:
            tl.store(packed + rows * cols + at, lower(x, above), mask=at < rows * cols)


@triton.jit
def kept(clock, layer, threshold, ids, column, BM: tl.constexpr, BN: tl.constexpr):
    """Return which elements dropout keeps, (BM, BN): Philox4x32-10 as in cuda/epilogue.cuh, once for eight columns."""
    k0, k1 = tl.load(clock).to(tl.uint32), tl.load(clock + 1).to(tl.uint32)
    zero = tl.zeros((BM, BN // 8), tl.uint32)
    c0 = zero + (column // 8 + tl.arange(0, BN // 8)).to(tl.uint32)[None, :]
    c1 = zero + ids.to(tl.uint32)[:, None]
    c2 = zero + (ids >> 32).to(tl.uint32)[:, None]
    c3 = zero + layer.to(tl.uint32)
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(zero + 0xD2511F53, c0), c0 * 0xD2511F53
        high1, low1 = tl.umulhi(zero + 0xCD9E8D57, c2), c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    # Word w of a group is half w % 2 of output w // 2: join puts its second operand's elements behind the first's.
    outputs = tl.reshape(tl.join(tl.join(c0, c2), tl.join(c1, c3)), (BM, BN // 2))
    words = tl.join(outputs & 0xFFFF, outputs >> 16)
    return tl.reshape(words >= threshold, (BM, BN))


@triton.jit
def rows_times(a, at, packed, n0, K: tl.constexpr, rows: tl.constexpr, cols: tl.constexpr, parts: tl.constexpr,
               BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """Return the sums (BM, BN) of the rows of a that begin at `at` with columns n0, ... of b; packed as `pack` does."""
    sums = tl.zeros((BM, BN), tl.float32)
    inner = tl.arange(0, BK)
    b = packed + (n0 + tl.arange(0, BN)[None, :]) * rows + inner[:, None]
    for k in range(0, K, BK):
        if K % BK == 0:
            x = tl.load(a + at[:, None] + (k + inner)[None, :])
        else:
            x = tl.load(a + at[:, None] + (k + inner)[None, :], mask=(k + inner < K)[None, :], other=0.0)
        y = tl.load(b + k)
        if parts == 0:
            sums = tl.dot(x, y, sums)
        else:
            above = upper(x)
            if parts == 2:
                # Tensor cores cut off what does not fit beside a sum: along all of K = 256 1e-5 of a result.
                some = tl.dot(lower(x, above), y, input_precision="tf32")
                some = tl.dot(above, tl.load(b + rows * cols + k), some, input_precision="tf32")
                sums += tl.dot(above, y, some, input_precision="tf32")
            else:
                sums = tl.dot(above, y, sums, input_precision="tf32")
    return sums


@triton.jit
def product_rows(a, ld_a, packed, out, ld_out, M, first_row, row_scale, bias, out_scale, row_ids, clock, layer,
                 threshold, keep_scale, K: tl.constexpr, N: tl.constexpr, rows: tl.constexpr, cols: tl.constexpr,
                 parts: tl.constexpr, accumulate: tl.constexpr, relu: tl.constexpr, BM: tl.constexpr,
                 BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """Out (M, N) = or += a (M, K) @ b, then the epilogue of cuda/epilogue.cuh; None switches its parts off.

    Grid: blocks of BM rows x blocks of BN columns, those of the same rows side by side: they share them in the L2 cache.
    """
    tiles: tl.constexpr = cols // BN
    n0 = (tl.program_id(0) % tiles) * BN
    row, column = (tl.program_id(0) // tiles) * BM + tl.arange(0, BM), n0 + tl.arange(0, BN)
    at = tl.minimum(row, M - 1).to(tl.int64)
    z = rows_times(a, at * ld_a, packed, n0, K, rows, cols, parts, BM, BN, BK)
    to, inside = out + at[:, None] * ld_out + column[None, :], (row < M)[:, None] & (column < N)[None, :]
    if accumulate:
        z += tl.load(to, mask=inside, other=0.0).to(tl.float32)
    at += first_row
    if row_scale is not None:
        z *= tl.load(row_scale + at)[:, None]
    if bias is not None:
        z += tl.load(bias + column, mask=column < N, other=0.0)[None, :]
    if relu:
        z = tl.where(z < 0, 0.0, z)  # NaN stays
    if clock is not None:
        keep = kept(clock, layer, threshold, tl.load(row_ids + at), n0, BM, BN)
        z = tl.where(keep, z * keep_scale, 0.0)
    if out_scale is not None:
        z *= tl.load(out_scale + at)[:, None]
    tl.store(to, z.to(out.dtype.element_ty), mask=inside)


@triton.jit
def product_rows_grad(a, ld_a, packed, h, ld_h, out, ld_out, M, keep_scale, h_scale, out_scale, partials, num_partials,
                      K: tl.constexpr, N: tl.constexpr, rows: tl.constexpr, cols: tl.constexpr, parts: tl.constexpr,
                      masked: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """Out (M, N) = out_scale * d, d = (h != 0 or not masked) * keep_scale * h_scale * (a @ b); out may be h.

    Column sums of d go to partials, float64 (num_partials, N), a row for each chunk of blocks of rows and zeros behind.
    Grid: chunks x blocks of BN columns. Sums of a block are float32 in a tree, those of a chunk float64 in order.
    """
    tiles: tl.constexpr = cols // BN
    chunk, chunks = tl.program_id(0) // tiles, tl.num_programs(0) // tiles
    n0 = (tl.program_id(0) % tiles) * BN
    column = n0 + tl.arange(0, BN)
    total = tl.zeros((BN,), tl.float64)
    blocks = tl.cdiv(M, BM)
    wide = chunk.to(tl.int64)  # blocks x chunks may pass 2^31
    for block in range((blocks * wide // chunks).to(tl.int32), (blocks * (wide + 1) // chunks).to(tl.int32)):
        row = block * BM + tl.arange(0, BM)
        at = tl.minimum(row, M - 1).to(tl.int64)
        d = rows_times(a, at * ld_a, packed, n0, K, rows, cols, parts, BM, BN, BK)
        inside = (row < M)[:, None] & (column < N)[None, :]
        scale = tl.zeros((BM,), tl.float32) + keep_scale
        if h_scale is not None:
            scale *= tl.load(h_scale + at)
        d *= scale[:, None]
        if masked:
            passes = tl.load(h + at[:, None] * ld_h + column[None, :], mask=inside, other=0.0) != 0
            d = tl.where(passes, d, 0.0)
        if partials is not None:
            total += tl.sum(tl.where((row < M)[:, None], d, 0.0), axis=0).to(tl.float64)
        if out_scale is not None:
            d *= tl.load(out_scale + at)[:, None]
        tl.store(out + at[:, None] * ld_out + column[None, :], d.to(out.dtype.element_ty), mask=inside)
    if partials is not None:
        for first in range(chunk, num_partials, 32 * chunks):
            part = (first + chunks * tl.arange(0, 32))[:, None]
            inside = (part < num_partials) & (column < N)[None, :]
            tl.store(partials + part * N + column[None, :], tl.where(part == chunk, total[None, :], 0.0), mask=inside)
