"""A rank's part of a vertex cut on its device: matrices, lists of split rows, and what they do to sums.

V rows of this rank, the first S of them split; L leaves, R roots once per leaf; D width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mggcn.aggregate.base import BuildContext
from mggcn.backend.base import Epilogue, KernelBackend, Sparse
from mggcn.backend.events import Event
from mggcn.graph.csr import Graph
from mggcn.partition.cut.partition import Lists, cut_partition, exchange_lists
from mggcn.partition.cut.tiles import cut_tile, row_slices
from mggcn.partition.order import Assignment
from mggcn.partition.rows.shard import ShardOptions
from mggcn.partition.rows.tiles import Tile, degrees

if TYPE_CHECKING:
    from torch import Tensor

    from mggcn.comm.base import Communicator


@dataclass(frozen=True, slots=True)
class Part:
    """A rank's part on the device: matrices of its ranges of rows for A^T, those for A, and its lists.

    lists: of all split vertices; bins: of each bin, for cd-r; missing (S,), on the host: the degree of a split vertex in
    the whole graph over that in this part, 1 without edges here.
    """

    backend: KernelBackend
    bounds: tuple[int, ...]
    forward: Sequence[Sparse]
    backward: Sequence[Sparse]
    lists: DeviceLists
    bins: Sequence[DeviceLists]
    missing: npt.NDArray[Any]

    @property
    def num_split(self) -> int:
        return self.bounds[1]

    def multiply(self, h: Tensor, out: Tensor, number: int, epilogue: Epilogue | None) -> None:
        """Rows `number` of out = epilogue(A^T h)."""
        first, last = self.bounds[number : number + 2]
        if last > first:
            finish = None if epilogue is None else rows_from(epilogue, first)
            self.backend.spmm(self.forward[number], h, out[first:last], accumulate=False, epilogue=finish)

    def scale(self, sums: Tensor, shares: Tensor) -> None:
        """Multiply the split rows of `sums` by `shares` (S,)."""
        if self.num_split:
            split = sums[: self.num_split]
            self.backend.finish(split, split, Epilogue(row_scale=shares))

    def finish(self, out: Tensor, epilogue: Epilogue | None) -> None:
        """The epilogue on the split rows, once their sums are complete."""
        if epilogue is not None and self.num_split:
            self.backend.finish(out[: self.num_split], out[: self.num_split], epilogue)

    def multiply_t(self, g: Tensor, out: Tensor, epilogue: Epilogue | None) -> None:
        """Out = epilogue(A g)."""
        bounds = self.bounds if len(self.backward) > 1 else (0, out.shape[0])
        for matrix, first, last in zip(self.backward, bounds, bounds[1:], strict=False):
            if last > first:
                finish = None if epilogue is None else rows_from(epilogue, first)
                self.backend.spmm(matrix, g, out[first:last], accumulate=False, epilogue=finish)


def rows_from(epilogue: Epilogue, first: int) -> Epilogue:
    """Return an epilogue for rows first, ...: its vectors start there."""

    def tail(vector: Tensor | None) -> Tensor | None:
        return None if vector is None else vector[first:]

    return dataclasses.replace(
        epilogue,
        row_scale=tail(epilogue.row_scale),
        row_ids=tail(epilogue.row_ids),
        out_scale=tail(epilogue.out_scale),
    )


@dataclass(frozen=True, slots=True)
class DeviceLists:
    """One bin's Lists on the device. roots: one list for each leaf's rank, without repeats."""

    leaves: Tensor
    leaf_counts: tuple[int, ...]
    roots: tuple[Tensor, ...]
    root_counts: tuple[int, ...]

    def send_up(self, comm: Communicator, leaves: Tensor, roots: Tensor, after: Event) -> Event:
        """Send the leaves' rows (L, D) to the ranks of their roots, where they arrive in `roots` (R, D)."""
        return comm.all_to_all(whole_rows(roots), whole_rows(leaves), self.root_counts, self.leaf_counts, after)

    def send_down(self, comm: Communicator, roots: Tensor, leaves: Tensor, after: Event) -> Event:
        """Send the roots' rows (R, D) to the ranks of their leaves, where they arrive in `leaves` (L, D)."""
        return comm.all_to_all(whole_rows(leaves), whole_rows(roots), self.leaf_counts, self.root_counts, after)

    def gather_leaves(self, backend: KernelBackend, sums: Tensor, out: Tensor) -> None:
        """Out (L, D) = the rows of the leaves."""
        backend.gather_rows(sums, self.leaves, out)

    def scatter_leaves(self, backend: KernelBackend, totals: Tensor, sums: Tensor) -> None:
        """The leaves take their totals (L, D)."""
        backend.scatter_rows(totals, self.leaves, sums)

    def add_to_leaves(self, backend: KernelBackend, others: Tensor, sums: Tensor) -> None:
        """The leaves add what the other copies have (L, D)."""
        backend.scatter_add_rows(others, self.leaves, sums)

    def add_to_roots(self, backend: KernelBackend, partial: Tensor, sums: Tensor) -> None:
        """Every root adds what its leaves sent (R, D), rank after rank."""
        first = 0
        for rows in self.roots:
            last = first + rows.shape[0]
            if last > first:
                backend.scatter_add_rows(partial[first:last], rows, sums)
            first = last

    def gather_roots(self, backend: KernelBackend, sums: Tensor, out: Tensor) -> None:
        """Out (R, D) = the rows of the roots, once for each leaf."""
        first = 0
        for rows in self.roots:
            last = first + rows.shape[0]
            if last > first:
                backend.gather_rows(sums, rows, out[first:last])
            first = last

    def scatter_roots(self, backend: KernelBackend, totals: Tensor, sums: Tensor) -> None:
        """The roots take their totals (R, D), as gather_roots gave them."""
        first = 0
        for rows in self.roots:
            last = first + rows.shape[0]
            if last > first:
                backend.scatter_rows(totals[first:last], rows, sums)
            first = last


def device_lists(backend: KernelBackend, lists: Lists) -> DeviceLists:
    """Return the lists on the device."""
    bounds = [0]
    for count in lists.root_counts:
        bounds.append(bounds[-1] + count)
    roots = tuple(backend.upload(lists.roots[a:b]) for a, b in pairwise(bounds))
    return DeviceLists(backend.upload(lists.leaves), lists.leaf_counts, roots, lists.root_counts)


def whole_rows(block: Tensor) -> Tensor:
    """Return rows with their padding: a message is one contiguous range."""
    return block.as_strided((block.shape[0], block.stride(0)), block.stride())


def build_part(site: BuildContext, bounds: tuple[int, ...], bins: int, *, partial: bool) -> Part:
    """Build the matrices and lists of a rank; bounds: of its ranges of rows; partial: sums may stand for whole ones.

    Raises: GraphError for a matrix that is too large.
    """
    partition, options, backend = cut_partition(site.partition), site.options, site.backend
    held, graph, cut = site.held or partition.local_index(site.rank), site.graph, partition.cut
    loops, dtype = options.self_loops, options.dtype
    tile = cut_tile(graph.adj_t, cut.edge_part_t, partition, held, site.rank, self_loops=loops, dtype=dtype)
    forward = [backend.sparse(t.indptr, t.indices, t.values) for t in row_slices(tile, bounds)]
    backward = forward
    if not graph.symmetric:
        tile_t = cut_tile(graph.adj, cut.edge_part, partition, held, site.rank, self_loops=loops, dtype=dtype)
        backward = [backend.sparse(tile_t.indptr, tile_t.indices, tile_t.values)]
    complete = device_lists(backend, exchange_lists(partition, site.rank, bins=1)[0])
    in_turn = [complete]
    if bins > 1:
        in_turn = [device_lists(backend, lists) for lists in exchange_lists(partition, site.rank, bins=bins)]
    missing = np.ones(bounds[1], options.dtype)
    if partial:
        missing = _missing(graph, tile, held, site.rank, options, bounds[1])
    return Part(backend, bounds, forward, backward, complete, in_turn, missing)


def _missing(
    graph: Graph, tile: Tile, held: Assignment, rank: int, options: ShardOptions, num_split: int
) -> npt.NDArray[Any]:
    """Return the degree of each split row in the whole graph over that in this part (S,). Cost: a sweep over the edges."""
    # Entries, not their weights: weights of both signs may add up to next to nothing.
    pattern = dataclasses.replace(graph.adj_t, values=None)
    whole = degrees(pattern, held, rank, self_loops=options.self_loops, threads=options.threads)[:num_split]
    here = np.diff(tile.indptr[: num_split + 1]).astype(np.float64)
    return np.divide(whole, here, out=np.ones(num_split), where=here > 0).astype(options.dtype)
