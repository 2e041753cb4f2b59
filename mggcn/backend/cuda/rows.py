"""Launches of cuda/rows, columns, loss and entries.cu: every grid and block is a pure function of shapes and types.

V rows, D columns, C classes. Arguments are those of KernelBackend; `kernels` are those for the type of the dense tensors
that are read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mggcn.backend.base import ENTRY_LOSSES, Dropout, EntryLoss, Epilogue, Gradient, LossTarget, Sparse
from mggcn.backend.cuda.kernels import Kernels, epilogue_args, out_option, strided

PARTIALS = 1024
"""Most row chunks whose sums are added in order: a block each, of which an H100 holds about as many at once."""
CHUNK_ROWS = 16
"""Least rows of a chunk: fewer are not worth one of their own."""
ROW_THREADS = 128
SUM_THREADS = 256
SHARED_BYTES = 47 * 1024
"""Dynamic shared memory of a block: what every GPU offers, less a little for static arrays."""

Shape = tuple[tuple[int, ...], tuple[int, ...]]


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def vector(dtype: torch.dtype) -> int:
    """Return the columns of a 16-byte access (kVector of cuda/common.cuh)."""
    return 16 // dtype.itemsize


def chunks(rows: int) -> int:
    """Return the number of row chunks that are summed separately."""
    return min(PARTIALS, _ceil(rows, CHUNK_ROWS))


def row_shape(rows: int, cols: int, width: int) -> Shape:
    """Return grid and block of a row pass whose threads have `width` columns each: whole rows side by side in a block."""
    x = min(max(_ceil(cols, width), 1), ROW_THREADS)
    y = ROW_THREADS // x
    return (_ceil(rows, y), _ceil(cols, width * x)), (x, y)


def sum_shape(rows: int, cols: int, width: int) -> Shape:
    """Return grid and block of a pass that sums columns: a block per chunk, no more threads than the chunk has rows for."""
    x = min(_ceil(cols, width), SUM_THREADS)
    y = max(1, min(SUM_THREADS // x, _ceil(rows, max(chunks(rows), 1))))
    return (chunks(rows), _ceil(cols, width * x)), (x, y)


def loss_lanes(classes: int) -> int:
    """Return the lanes of a warp that share a row of scores."""
    return next((lanes for lanes in (4, 8, 16) if classes <= lanes), 32)


def finish(kernels: Kernels, z: Tensor, out: Tensor, epilogue: Epilogue, first_row: int = 0) -> None:
    rows, cols = out.shape
    dropped = epilogue.dropout is not None and epilogue.dropout.threshold > 0
    kernels.launch(
        "rows",
        "finish_rows_dropout" if dropped else "finish_rows",
        *row_shape(rows, cols, 8 if dropped else vector(z.dtype)),
        *strided(z),
        *strided(out),
        rows,
        cols,
        first_row,
        *epilogue_args(epilogue),
        options=out_option(z, out),
    )


def activation_grad(
    kernels: Kernels, g: Tensor, h: Tensor, gradient: Gradient, first_row: int = 0, out: Tensor | None = None
) -> None:
    rows, cols = h.shape
    partials = gradient.partials
    to = h if out is None else out
    begins = first_row == 0
    if not rows and begins and partials is not None:
        partials.zero_()
    kernels.launch(
        "columns",
        "activation_grad",
        *sum_shape(rows, cols, vector(h.dtype)),
        *strided(g),
        *strided(h),
        *strided(to),
        rows,
        cols,
        first_row,
        int(gradient.masked),
        gradient.keep_scale,
        gradient.h_scale,
        gradient.out_scale,
        partials,
        0 if partials is None else partials.shape[0],
        int(begins),
        options=out_option(h, to),
    )


def sum_partials(kernels: Kernels, partials: Tensor, out: Tensor) -> None:
    """Out is of the accumulation type, and so are the kernels."""
    cols = out.shape[0]
    kernels.launch("columns", "sum_partials", (_ceil(cols, 32),), (32, 32), partials, partials.shape[0], out, cols)


@dataclass(frozen=True, slots=True)
class LossSums:
    """Sums of the loss: loss float64 (1,), partials of the bias gradient or None, and room to do so.

    losses: float64 (PARTIALS,), overwritten; arrived: int32 (1,), zero before and after.
    """

    loss: Tensor
    partials: Tensor | None
    losses: Tensor
    arrived: Tensor


def softmax_xent(kernels: Kernels, z: Tensor, target: LossTarget, row_scale: Tensor | None, sums: LossSums) -> None:
    spread = target.weights is not None or target.smoothing > 0
    options = (target.weights, target.smoothing) if spread else ()
    kernel = "softmax_xent_spread" if spread else "softmax_xent"
    _loss(kernels, ("loss", kernel), z, target, options, row_scale, sums)


def entry_loss(
    kernels: Kernels, kind: EntryLoss, z: Tensor, target: LossTarget, row_scale: Tensor | None, sums: LossSums
) -> None:
    _loss(kernels, ("entries", "entry_loss"), z, target, (ENTRY_LOSSES.index(kind),), row_scale, sums)


def _loss(
    kernels: Kernels,
    kernel: tuple[str, str],
    z: Tensor,
    target: LossTarget,
    options: tuple[Tensor | float | None, ...],
    row_scale: Tensor | None,
    sums: LossSums,
) -> None:
    """Launch a kernel with the frame of cuda/loss.cuh; options: its own arguments."""
    rows, cols = z.shape
    used, partials = chunks(rows), sums.partials
    if not used:
        if partials is not None:
            partials.zero_()
        return
    lanes = loss_lanes(cols)
    fitting = SHARED_BYTES // (8 * cols) if partials is not None else SUM_THREADS
    groups = max(1, min(SUM_THREADS // lanes, fitting))
    kernels.launch(
        *kernel,
        (used,),
        (lanes, groups),
        *strided(z),
        rows,
        cols,
        target.labels,
        target.mask,
        target.inv_count,
        target.changing,
        *options,
        row_scale,
        sums.losses,
        sums.arrived,
        sums.loss,
        partials,
        0 if partials is None else partials.shape[0],
        int(fitting > 0),
        shared_bytes=8 * cols * groups if partials is not None and fitting else 0,
    )


def entry_counts(kernels: Kernels, z: Tensor, labels: Tensor, mask: Tensor, counts: Tensor) -> None:
    rows, cols = z.shape
    lanes = loss_lanes(cols)
    block = (lanes, SUM_THREADS // lanes)
    kernels.launch("entries", "entry_counts", (chunks(rows),), block, *strided(z), rows, cols, labels, mask, counts)


def confusion(kernels: Kernels, z: Tensor, labels: Tensor, mask: Tensor, counts: Tensor) -> None:
    rows, cols = z.shape
    lanes = loss_lanes(cols)
    shared = 4 * 9 * cols if 4 * 9 * cols <= SHARED_BYTES else 0
    kernels.launch(
        "loss",
        "confusion",
        (chunks(rows),),
        (lanes, SUM_THREADS // lanes),
        *strided(z),
        rows,
        cols,
        labels,
        mask,
        counts,
        int(shared > 0),
        shared_bytes=shared,
    )


def dropout_values(kernels: Kernels, matrix: Sparse, out: Tensor, row_ids: Tensor, dropout: Dropout) -> None:
    """Implement KernelBackend.dropout_values; values and out are of the accumulation type, and so are the kernels."""
    rows = matrix.num_rows
    lanes = 32 if matrix.nnz >= 16 * rows else 8
    kernels.launch(
        "rows",
        "dropout_values",
        (_ceil(rows, ROW_THREADS // lanes),),
        (lanes, ROW_THREADS // lanes),
        matrix.indptr,
        matrix.indices,
        matrix.values,
        out,
        rows,
        row_ids,
        dropout.clock,
        dropout.layer,
        dropout.threshold,
        dropout.keep_scale,
    )


def move_rows(kernels: Kernels, kernel: str, source: Tensor, index: Tensor, out: Tensor) -> None:
    """Gather or scatter rows, as many as `index` lists."""
    rows, cols = index.shape[0], out.shape[1]
    moved = (*strided(source), index, *strided(out), rows, cols)
    options = out_option(source, out)
    kernels.launch("rows", kernel, *row_shape(rows, cols, vector(source.dtype)), *moved, options=options)
