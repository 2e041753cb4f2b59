"""SpMM on a GPU by our own kernels: how rows are divided among threads, and the launches of one product.

Work is balanced by three kinds of rows, longest first: parts of hub rows, whose sums a second kernel adds in order; long
rows, a block each; the others, a group of lanes each, ordered by length inside windows of 256 consecutive rows, so that the
groups of a warp end together while rows that are near each other, which often share neighbours, still run at one time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from mggcn.backend.base import Epilogue, Sparse
from mggcn.backend.cuda.kernels import Kernels, epilogue_args, out_option
from mggcn.backend.cuda.sizes import LONG_ROW, WINDOW, DeviceTraits, segment_length
from mggcn.backend.cuda.variants import Variant, choose, choose_slices, is_slicing, slicings
from mggcn.backend.sparse_products import Product
from mggcn.backend.spmm_choice import NO_CHOICES, Choices, SpmmChoice, SpmmKey
from mggcn.errors import BackendError

BLOCK = 128
WARPS = 4
ORDERED_AT_ONCE = 2**12 * WINDOW
"""Rows that are put in order together: bounds the memory of the host."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Which threads sum which rows, in which order. All tensors are on the device."""

    order: Tensor
    """uint8, rows padded to whole windows: the place in its window of every row, longest first."""
    long_rows: Tensor
    """int32: rows of more than `shortest` nonzeros that are no hubs, the longest classes (powers of two) first."""
    parts: Tensor
    """int32 (num_parts, 4): row, first nonzero in the row, nonzeros, slot in the workspace."""
    hubs: Tensor
    """int32 (num_hubs, 4): row, first slot, slots, 0."""
    shortest: int
    hub: int
    """A row of more nonzeros is cut into parts."""
    longer_than: tuple[int, ...]
    """How many long rows have more than shortest * 2**k nonzeros, for k = 0, 1, 2, 3."""

    def limit(self, unroll: int) -> int:
        """Return the nonzeros up to which a row is left to a group: it then takes at most 32 steps of `unroll`."""
        return min(self.shortest * max(unroll, 2) // 2, self.hub)

    def num_long(self, unroll: int) -> int:
        """Return how many rows, the first of long_rows, have more nonzeros than limit(unroll)."""
        return self.longer_than[max(unroll, 2).bit_length() - 2]


def make_schedule(
    indptr: npt.NDArray[Any],
    upload: Callable[[npt.NDArray[Any]], Tensor],
    *,
    shortest: int = LONG_ROW,
    segment: int | None = None,
) -> Schedule:
    """Return the schedule of a matrix with these row pointers (host, int64).

    Cost: sorts of windows, about 0.1 s per million rows; on the device 1 byte per row, 4 per long row, 16 per part and hub.
    shortest, a power of two, and segment are for tests: small values turn short rows into long rows and hubs.
    """
    nnz = int(indptr[-1])
    segment = segment or segment_length(nnz)
    lengths = np.diff(indptr)
    long_rows = np.flatnonzero((lengths > shortest) & (lengths <= 2 * segment))
    classes = np.frexp((lengths[long_rows] - 1).astype(np.float64))[1]
    in_order = np.argsort(-classes, kind="stable")
    parts, hubs = _cut(lengths, segment)
    return Schedule(
        upload(_order(lengths)),
        upload(long_rows[in_order].astype(np.int32)),
        upload(parts),
        upload(hubs),
        shortest,
        2 * segment,
        tuple(int((lengths[long_rows] > shortest << k).sum()) for k in range(4)),
    )


def even_schedule(rows: int, upload: Callable[[npt.NDArray[Any]], Tensor]) -> Schedule:
    """Return a schedule for any pattern of so many rows: a group of lanes each, in their order, however long they are.

    So that a launch depends on no pattern. Drawn rows are of at most a fan-out; those of the transpose may be longer.
    """
    order = np.tile(np.arange(WINDOW, dtype=np.uint8), -(-rows // WINDOW))
    nothing = np.zeros((0, 4), np.int32)
    most = 2**31 - 1
    return Schedule(
        upload(order), upload(np.zeros(0, np.int32)), upload(nothing), upload(nothing), most, most, (0, 0, 0, 0)
    )


def _order(lengths: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Places of rows in their windows, longest first; rows beyond the last are behind all of its window."""
    windows = -(-lengths.size // WINDOW)
    order = np.empty((windows, WINDOW), np.uint8)
    for start in range(0, windows * WINDOW, ORDERED_AT_ONCE):
        some = lengths[start : start + ORDERED_AT_ONCE]
        # 16-bit keys are sorted by radix. Lengths from 32767 on are equal: such rows are long ones and hubs.
        keys = np.full(-(-some.size // WINDOW) * WINDOW, 1, np.int16)
        keys[: some.size] = -np.minimum(some, 32767)
        first = start // WINDOW
        order[first : first + keys.size // WINDOW] = np.argsort(keys.reshape(-1, WINDOW), axis=1, kind="stable")
    return order.reshape(-1)


def _cut(lengths: npt.NDArray[Any], segment: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Cut rows longer than two segments into near-equal parts of at most one segment; return the parts and the hub rows."""
    rows = np.flatnonzero(lengths > 2 * segment)
    counts = -(-lengths[rows] // segment)
    first_slots = np.cumsum(counts) - counts
    hubs = np.stack([rows, first_slots, counts, np.zeros_like(rows)], axis=1)
    of = np.repeat(np.arange(rows.size), counts)
    slots = np.arange(of.size)
    place = slots - first_slots[of]
    begins, ends = (lengths[rows][of] * p // counts[of] for p in (place, place + 1))
    parts = np.stack([rows[of], begins, ends - begins, slots], axis=1)
    return parts.astype(np.int32), hubs.astype(np.int32)


class OwnSpmm:
    """Products by the kernels of cuda/spmm*.cu.

    workspace: of the accumulation type, for the parts of hubs: workspace_bytes of the largest matrix and width.
    choices: measured slices, which override the model's.
    """

    def __init__(
        self, kernels: Kernels, traits: DeviceTraits, workspace: Tensor, choices: Choices = NO_CHOICES
    ) -> None:
        self._kernels = kernels
        self._traits = traits
        self._workspace = workspace
        self._choices = choices

    def product(self, adj: Sparse, h: Tensor, out: Tensor) -> Product:
        """Implement SparseProducts.product, remembering nothing. An operand that is not aligned is multiplied without
        slices.
        """
        width, item, summed = out.shape[1], h.itemsize, out.itemsize > h.itemsize
        if not is_aligned(h):
            return Product(adj, width, item, summed, SpmmChoice())
        kept = self._choices.get(key_of(adj, h, width, summed=summed)) if self._choices else None
        if kept is not None and is_slicing(kept, item):
            return Product(adj, width, item, summed, kept)
        chosen = choose_slices(adj.num_rows, adj.nnz, h.shape[0], width, item, self._traits)
        return Product(adj, width, item, summed, chosen)

    def proposals(
        self, product: Product, adj: Sparse, h: Tensor, out: Tensor
    ) -> tuple[SpmmKey, tuple[SpmmChoice, ...]]:
        """See SparseProducts.proposals. Compiles the kernels here, so that no later call includes compilation.

        An operand that is not aligned has no slices.
        """
        if not is_aligned(h):
            return key_of(adj, h, product.width, summed=product.summed), (product.choice,)
        slices = slicings(adj.num_rows, adj.nnz, h.shape[0], product.width, product.item, self._traits)
        for some in slices:
            variant = choose(product.width, product.item, True, some.panel, weighted=adj.values is not None)
            self._kernels.prepare("spmm", "spmm_balanced", _options(adj, h, out, variant))
        return key_of(adj, h, product.width, summed=product.summed), slices

    def multiply(
        self,
        adj: Sparse,
        h: Tensor,
        out: Tensor,
        *,
        accumulate: bool,
        epilogue: Epilogue | None,
        choice: SpmmChoice | None = None,
        variant: Variant | None = None,
    ) -> None:
        """Implement KernelBackend.spmm, with h of the kernels' type. `choice` overrides the slices, `variant` all.

        Raises: BackendError if hubs need more workspace than there is.
        """
        rows, cols = out.shape
        if rows == 0 or (adj.nnz == 0 and accumulate and epilogue is None):
            return
        aligned = is_aligned(h)
        panel = (choice or self.product(adj, h, out).choice).panel
        chosen = variant or choose(cols, h.itemsize, aligned, panel, weighted=adj.values is not None)
        ends = (int(accumulate), *epilogue_args(epilogue))
        if chosen.kernel == "simple":
            dense = (h, h.stride(0), out, out.stride(0), rows, cols)
            options = out_option(h, out)
            csr = (adj.indptr, adj.indices, adj.values)
            self._kernels.launch(
                "spmm_simple", "spmm_simple", (-(-rows // WARPS),), (BLOCK,), *csr, *dense, *ends, options=options
            )
        elif chosen.aligned and not aligned:
            raise BackendError("an aligned variant needs rows of the dense operand at multiples of 16 bytes")
        elif chosen.kernel == "groups":
            self._groups(adj, h, out, chosen, ends)
        else:
            self._balanced(adj, h, out, chosen, ends)

    def _groups(self, adj: Sparse, h: Tensor, out: Tensor, variant: Variant, ends: tuple[Any, ...]) -> None:
        rows, cols = out.shape
        grid = (-(-rows // _rows_of_block(variant)), -(-cols // variant.tile(h.itemsize)))
        options = _options(adj, h, out, variant)
        self._kernels.launch(
            "spmm_groups", "spmm_groups", grid, (BLOCK,), *_operands(adj, h, out), *ends, options=options
        )

    def _balanced(self, adj: Sparse, h: Tensor, out: Tensor, variant: Variant, ends: tuple[Any, ...]) -> None:
        rows, cols = out.shape
        plan: Schedule = adj.schedule
        num_parts, num_long = plan.parts.shape[0], plan.num_long(variant.unroll)
        step = 64 // self._workspace.itemsize
        ld = -(-cols // step) * step
        if num_parts * ld > self._workspace.numel():
            raise BackendError(
                f"hub rows in {num_parts} parts times {cols} columns need {num_parts * ld} elements of workspace, there "
                f"are {self._workspace.numel()}; plan for this matrix and width with cuda.sizes.workspace_bytes"
            )
        blocks = num_parts + num_long + -(-rows // _rows_of_block(variant))
        work = (plan.parts, num_parts, plan.long_rows, num_long, plan.order, plan.limit(variant.unroll))
        self._kernels.launch(
            "spmm",
            "spmm_balanced",
            (blocks, -(-cols // variant.tile(h.itemsize))),
            (BLOCK,),
            *_operands(adj, h, out),
            ends[0],
            *work,
            self._workspace,
            ld,
            *ends[1:],
            options=_options(adj, h, out, variant),
        )
        self._kernels.launch(
            "spmm_hubs",
            "spmm_hubs",
            (plan.hubs.shape[0], -(-cols // 32)),
            (512,),
            plan.hubs,
            self._workspace,
            ld,
            out,
            out.stride(0),
            cols,
            *ends,
            options=out_option(h, out),
        )


def key_of(adj: Sparse, h: Tensor, width: int, *, summed: bool) -> SpmmKey:
    """Return the key of a product in a table of measured slices. Arguments as for `choose_spmm`."""
    schedule: Schedule = adj.schedule
    # Lengths of rows decide what slices gain, and tell a matrix from its transpose.
    traits = (schedule.longer_than, schedule.hub, schedule.parts.shape[0], schedule.hubs.shape[0])
    digest = hashlib.sha256(repr(traits).encode()).hexdigest()[:16]
    return SpmmKey(adj.num_rows, h.shape[0], adj.nnz, width, h.itemsize, summed, digest)


def is_aligned(dense: Tensor) -> bool:
    return dense.data_ptr() % 16 == 0 and dense.stride(0) * dense.itemsize % 16 == 0


def _rows_of_block(variant: Variant) -> int:
    return WARPS * (32 // variant.lanes)


def _operands(adj: Sparse, h: Tensor, out: Tensor) -> tuple[Any, ...]:
    vectors = int(is_aligned(out))
    return (adj.indptr, adj.indices, adj.values, h, h.stride(0), out, out.stride(0), vectors, *out.shape)


def _options(adj: Sparse, h: Tensor, out: Tensor, variant: Variant) -> tuple[str, ...]:
    """The shape of the kernel.

    Ragged: the last tile ends behind the row in memory, a sector behind the columns or behind all of the operand's memory.
    """
    cols = out.shape[1]
    tile = variant.tile(h.itemsize)
    covered = -(-cols // tile) * tile
    # The last columns of a wider tensor end before their stride does: behind the last row there may be nothing.
    last_row = h.storage_offset() + max(h.shape[0] - 1, 0) * h.stride(0)
    room = min(h.stride(0), h.untyped_storage().nbytes() // h.itemsize - last_row) if variant.aligned else cols
    ragged = covered > room or (covered - cols) * h.itemsize >= 32
    flags = {
        "-DMGGCN_WEIGHTED": adj.values is not None,
        "-DMGGCN_TIGHT": not variant.aligned,
        "-DMGGCN_RAGGED": ragged,
    }
    shape = (
        f"-DMGGCN_LANES={variant.lanes}",
        f"-DMGGCN_PIECES={variant.pieces}",
        f"-DMGGCN_UNROLL={variant.unroll}",
    )
    return (*shape, *(flag for flag, on in flags.items() if on), *out_option(h, out))
