"""SpMM on the CPU: how rows are divided among threads, the traits that the choice of a kernel depends on, and one
product.

V rows and N columns of the matrix, D columns of the operand.
"""

from __future__ import annotations

import ctypes
import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mggcn import native
from mggcn.backend.base import Epilogue, Sparse
from mggcn.backend.cpu.args import address, epilogue_args, kind_of
from mggcn.backend.cpu.figures import LINE, Figures
from mggcn.backend.cpu.memory import Workspace
from mggcn.backend.cpu.sizes import CHUNKS, aligned, padded_columns, real_bytes, spmm_bytes, variant_bytes
from mggcn.backend.cpu.structs import ProductArgs
from mggcn.backend.cpu.variants import MatrixTraits, candidates, choose_spmm, costs_of, hub_length, key_of
from mggcn.backend.sparse_products import Product
from mggcn.backend.spmm_choice import Choices, SpmmChoice, SpmmKey
from mggcn.backend.team import Team
from mggcn.errors import BackendError

STARTS, FIRST_ENTRIES, MAX_LEVELS = 4, 1024, 11
"""Sample positions in a matrix; entries counted in the first window; doublings of the window."""


@dataclass(frozen=True, slots=True)
class CpuSchedule:
    """Which thread sums which rows, and the traits by which a variant is chosen.

    It depends on the pattern of the matrix, not on its values.
    """

    chunks: Tensor
    """int64 (num_chunks + 1,): row ranges of about equal work, handed out dynamically."""
    parts: Tensor
    """int64 (num_parts, 2): first entry of each part of a hub row, and the one behind its last."""
    hubs: Tensor
    """int64 (num_hubs, 3), by row: row, first part, parts."""
    hub: int
    """A row of more entries is cut into parts."""
    traits: MatrixTraits
    like: CpuSchedule | None = None
    """Whose variants the products take: of a batch, that of the first one."""


def make_schedule(
    indptr: npt.NDArray[Any],
    indices: npt.NDArray[Any],
    threads: int,
    isa: str,
    *,
    hub: int | None = None,
    like: CpuSchedule | None = None,
) -> CpuSchedule:
    """Return the schedule of a pattern: indptr int64 (V + 1,), indices int32 (nnz,).

    like: the schedule of a similar pattern, whose traits are taken, but for what this one is too small for.
    Cost: a pass over the row pointers; without `like` one over the entries, and at most 4 Mi random bits. hub is for tests:
    a small value turns short rows into hubs.
    """
    rows, nnz = indptr.shape[0] - 1, int(indptr[-1])
    chunks = np.empty(max(1, min(rows, CHUNKS)) + 1, np.int64)
    native.kernel("mggcn_balance", "", isa)(indptr.ctypes.data, rows, chunks.shape[0] - 1, chunks.ctypes.data)
    if like is None:
        traits = _traits(indptr, indices, threads, isa)
    else:  # whether columns ascend is not looked at
        traits = MatrixTraits(rows, int(indices.max(initial=-1)) + 1, nnz, ascending=False)
    hub = hub or hub_length(nnz)
    parts, hubs = _cut(indptr, hub)
    first = like if like is None else like.like or like
    return CpuSchedule(torch.from_numpy(chunks), torch.from_numpy(parts), torch.from_numpy(hubs), hub, traits, first)


def even_schedule(rows: int, columns: int, most: int) -> CpuSchedule:
    """Return a schedule for any pattern of so many rows, columns, and at most so many entries: equal numbers of rows, no
    hubs, plain rows.
    """
    chunks = torch.from_numpy(np.linspace(0, rows, max(1, min(rows, CHUNKS)) + 1).astype(np.int64))
    parts, hubs = (torch.zeros((0, width), dtype=torch.int64) for width in (2, 3))
    return CpuSchedule(chunks, parts, hubs, 2**62, MatrixTraits(rows, columns, most, ascending=False))


def _traits(indptr: npt.NDArray[Any], indices: npt.NDArray[Any], threads: int, isa: str) -> MatrixTraits:
    rows, nnz = indptr.shape[0] - 1, int(indptr[-1])
    ascending = np.zeros(1, np.int32)
    run = native.kernel("mggcn_ascending", "", isa)
    run(indptr.ctypes.data, indices.ctypes.data, rows, ascending.ctypes.data, threads)
    columns = int(indices.max()) + 1 if nnz else 0
    levels = min(MAX_LEVELS, (nnz // STARTS // FIRST_ENTRIES).bit_length())
    distinct = np.zeros((STARTS, levels), np.int64)
    run = native.kernel("mggcn_reuse", "", isa)
    run(indices.ctypes.data, nnz, columns, STARTS, FIRST_ENTRIES, levels, distinct.ctypes.data, threads)
    reuse = tuple((FIRST_ENTRIES << k, int(distinct[:, k].sum()) // STARTS) for k in range(levels))
    empty = int(np.count_nonzero(indptr[1:] == indptr[:-1]))
    return MatrixTraits(rows, columns, nnz, bool(ascending[0]), reuse, empty)


def _cut(indptr: npt.NDArray[Any], hub: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Parts of the rows of more than `hub` entries, nearly equal in a row and at most hub / 2 long, and the hubs."""
    if indptr[-1] <= hub:
        return np.zeros((0, 2), np.int64), np.zeros((0, 3), np.int64)
    # 4,096 rows at a time: of a batch there is a schedule a step, which allocates nothing of note.
    long = [np.flatnonzero(np.diff(indptr[at : at + 4097]) > hub) + at for at in range(0, indptr.size - 1, 4096)]
    rows = np.concatenate(long) if long else np.zeros(0, np.int64)
    lengths = indptr[rows + 1] - indptr[rows]
    counts = -(-lengths // max(hub // 2, 1))
    first = np.cumsum(counts) - counts
    of = np.repeat(np.arange(rows.size), counts)
    place = np.arange(of.size) - first[of]
    ends = [indptr[rows][of] + lengths[of] * p // counts[of] for p in (place, place + 1)]
    return np.stack(ends, axis=1), np.stack([rows, first, counts], axis=1)


def worth_timing(
    matrix: MatrixTraits, width: int, item: int, figures: Figures, model: SpmmChoice, *, summed: bool
) -> tuple[SpmmChoice, ...]:
    """Return the variants to time: the model's choice, then the others, the fastest by its expectation first.

    Those that need more work space than a plan allows for are left out. Arguments as for `choose_spmm`.
    """
    gathered = min(matrix.columns, matrix.nnz)
    planned = spmm_bytes(matrix.rows, gathered, matrix.nnz, width, item, real_bytes(item), figures)
    costs = costs_of(matrix, width, item, figures, summed=summed)
    plain = dataclasses.replace(model, reason="")
    fit = (variant for variant in costs if variant_bytes(matrix, width, item, variant) <= planned)
    return (model, *sorted((variant for variant in fit if variant != plain), key=costs.__getitem__))


class CpuSpmm:
    """Products of matrices, summed in the type that `dtype` sums in. choices: override those of the model."""

    def __init__(
        self, dtype: torch.dtype, team: Team, isa: str, figures: Figures, workspace: Workspace, choices: Choices
    ) -> None:
        self._real = torch.float64 if dtype == torch.float64 else torch.float32
        self._team = team
        self._isa = isa
        self.figures: Figures = figures
        """What the model knows of this machine."""
        self._workspace = workspace
        self._choices = choices
        self._products: dict[tuple[int, int, int, bool], Product] = {}

    @property
    def products(self) -> tuple[Product, ...]:
        """The kinds of products multiplied so far, in order of their first call."""
        return tuple(self._products.values())

    def choice(self, adj: Sparse, h: Tensor, out: Tensor) -> SpmmChoice:
        """Return the variant of a product: as measured, or as the model says.

        A measured variant that does not fit the product is not taken; the reason then says so.
        """
        return self.product(adj, h, out).choice

    def product(self, adj: Sparse, h: Tensor, out: Tensor) -> Product:
        """Return the kind of product of these operands, and remember it."""
        width, item, summed = out.shape[1], h.itemsize, out.dtype == self._real
        # Of batches, of which there are many, the first one's product stands for all.
        schedule: CpuSchedule = adj.schedule.like or adj.schedule
        at = (id(schedule), width, item, summed)
        found = self._products.get(at)
        if found is None:
            traits = schedule.traits
            choice = self._choices.get(key_of(traits, width, item, summed=summed))
            unfit = "" if choice is None else self._unfit(traits, h, out, choice)
            if choice is None or unfit:
                choice = choose_spmm(traits, width, item, self.figures, summed=summed)
            if unfit:
                choice = dataclasses.replace(choice, reason=f"{choice.reason}; not as measured: {unfit}")
            # The pattern keeps its schedule alive, so no other schedule can get the same id.
            pattern = Sparse(adj.indptr, adj.indices, None, schedule)
            found = self._products[at] = Product(pattern, width, item, summed, choice)
        return found

    def candidates(self, product: Product) -> dict[str, SpmmChoice]:
        """Return the variants of a product by name; the first is plain rows."""
        traits: MatrixTraits = product.pattern.schedule.traits
        return candidates(traits, product.width, product.item, self.figures, summed=product.summed)

    def proposals(
        self, product: Product, adj: Sparse, h: Tensor, out: Tensor
    ) -> tuple[SpmmKey, tuple[SpmmChoice, ...]]:
        """Implement SparseProducts.proposals. Touches the work space, so that no variant pays for first use of pages."""
        traits: MatrixTraits = product.pattern.schedule.traits
        width, item, summed = product.width, product.item, product.summed
        variants = worth_timing(traits, width, item, self.figures, product.choice, summed=summed)
        largest = max(variant_bytes(traits, width, item, variant) for variant in variants)
        with self._workspace.lock:
            self._workspace.take(largest).zero_()
        return key_of(traits, width, item, summed=summed), variants

    def multiply(
        self,
        adj: Sparse,
        h: Tensor,
        out: Tensor,
        *,
        accumulate: bool,
        epilogue: Epilogue | None,
        choice: SpmmChoice | None = None,
    ) -> None:
        """Implement KernelBackend.spmm; out may be of the type of sums. `choice` overrides the model and the table.

        Raises: BackendError for a choice that does not fit the product.
        """
        if not out.numel():
            return
        plan: CpuSchedule = adj.schedule
        chosen = choice or self.choice(adj, h, out)
        if unfit := self._unfit(plan.traits, h, out, chosen):
            if choice is not None or plan.like is None:
                raise BackendError(unfit)
            chosen = SpmmChoice(ahead=chosen.ahead)  # this batch is larger than the first
        arguments = None if epilogue is None else epilogue_args(epilogue)
        ld_sums = padded_columns(out.shape[1])
        sizes = (
            plan.traits.columns * chosen.panel * h.itemsize,
            8 * adj.num_rows if chosen.blocks > 1 else 0,
            plan.parts.shape[0] * ld_sums * self._real.itemsize,
        )
        with self._workspace.lock:
            packed, following, sums = self._split(sizes)
            args = ProductArgs(
                plan.chunks.shape[0] - 1,
                plan.parts.shape[0],
                plan.hubs.shape[0],
                address(plan.chunks),
                address(plan.parts),
                address(plan.hubs),
                address(adj.indptr),
                address(adj.indices),
                address(adj.values),
                address(h),
                address(out),
                None if arguments is None else ctypes.addressof(arguments),
                packed,
                following,
                sums,
                h.stride(0),
                out.stride(0),
                ld_sums,
                plan.traits.columns,
                out.shape[1],
                plan.hub,
                chosen.panel or out.shape[1],
                chosen.blocks,
                chosen.ahead,
                int(accumulate),
                self._team.running,
            )
            native.kernel("mggcn_spmm_", kind_of(h.dtype, out.dtype), self._isa)(ctypes.byref(args))

    def _split(self, sizes: tuple[int, ...]) -> list[int | None]:
        """Addresses of consecutive parts of the work space, each aligned to a cache line; None for empty ones."""
        padded = [aligned(size) for size in sizes]
        if not any(padded):
            return [None] * len(sizes)
        start = self._workspace.take(sum(padded)).data_ptr()
        return [start + sum(padded[:k]) if size else None for k, size in enumerate(padded)]

    def _unfit(self, traits: MatrixTraits, h: Tensor, out: Tensor, chosen: SpmmChoice) -> str:
        """Say why a variant does not fit a product; "" if it does."""
        if chosen.blocks > 1 and (chosen.panel or out.dtype != self._real or not traits.ascending):
            return (
                f"blocks of the operand's rows need all columns at once, entries that ascend in each row and a result of "
                f"the type of sums, got {chosen} for a result of {out.dtype}; choose rows or panels"
            )
        if chosen.panel * h.itemsize % LINE:
            return (
                f"a panel has rows of whole cache lines, multiples of {LINE // h.itemsize} columns; got {chosen.panel}"
            )
        packed = traits.columns * chosen.panel * h.itemsize
        if packed and packed > self.figures.near_bytes:
            return (
                f"a packed panel takes at most {self.figures.near_bytes} bytes, those that are near here and "
                f"that plans reckon with; {chosen.panel} columns of {traits.columns} rows take {packed}"
            )
        return ""
