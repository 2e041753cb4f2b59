"""A rank's part of a vertex cut on its device: matrices, lists of split rows, and what they do to partial results.

V rows of this rank, the first S of them split; L leaves, R roots once per leaf; D width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mggcn.aggregate.base import BuildContext, padded_rows
from mggcn.aggregate.edge_op import SUM, Accumulation, EdgeOp, Target, single_tile
from mggcn.aggregate.relations import upload_tile
from mggcn.backend.base import Epilogue, KernelBackend, Sparse
from mggcn.backend.events import Event
from mggcn.graph.csr import Graph
from mggcn.partition.cut.partition import Lists, cut_partition, exchange_lists
from mggcn.partition.cut.tiles import cut_tile, row_slices
from mggcn.partition.order import Owners
from mggcn.partition.rows.shard import ShardOptions
from mggcn.partition.rows.tiles import Tile, degrees

if TYPE_CHECKING:
    from torch import Tensor

    from mggcn.comm.base import Communicator


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A rank's part on the device: matrices of its ranges of rows for A^T, those for A, and its lists.

    lists: those of all split vertices; bins: those of each bin, for cd-r; missing (S,), on the host: each split vertex's
    degree in the whole graph divided by its degree in this part, 1 if it has no edges here.
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

    def begin_split(self, op: EdgeOp, h: Tensor, target: Target) -> Accumulation:
        """Return the split rows of the op over this part's in-edges, before `end`."""
        partial = op.begin(self.backend, target.rows(0, self.num_split))
        if self.num_split:
            partial.tile(self.forward[0], h, last=False)
        return partial

    def end_split(self, partial: Accumulation) -> None:
        """Turn the split rows' partial results into results, and apply their epilogue."""
        if self.num_split:
            partial.end()

    def compute(self, op: EdgeOp, h: Tensor, target: Target, number: int) -> None:
        """Compute range `number` of the op over this part's in-edges."""
        first, last = self.bounds[number : number + 2]
        if last > first:
            single_tile(op, self.backend, self.forward[number], h, target.rows(first, last))

    def compute_t(self, op: EdgeOp, g: Tensor, target: Target) -> None:
        """Compute all rows of the op over this part's out-edges."""
        bounds = self.bounds if len(self.backward) > 1 else (0, target.out.shape[0])
        for matrix, (first, last) in zip(self.backward, pairwise(bounds), strict=True):
            if last > first:
                single_tile(op, self.backend, matrix, g, target.rows(first, last))

    def sums(self, rows: Tensor) -> Accumulation:
        """Return rows as partial results that add up: sums, and every gradient of copies."""
        return SUM.begin(self.backend, Target(rows))

    def finish(self, out: Tensor, epilogue: Epilogue | None) -> None:
        """Apply the epilogue to the split rows."""
        if epilogue is not None and self.num_split:
            self.backend.finish(out[: self.num_split], out[: self.num_split], epilogue)

    def scale(self, sums: Tensor, shares: Tensor) -> None:
        """Multiply the split rows of `sums` by `shares` (S,)."""
        if self.num_split:
            split = sums[: self.num_split]
            self.backend.finish(split, split, Epilogue(row_scale=shares))


@dataclass(frozen=True, slots=True)
class DeviceLists:
    """One bin's Lists on the device. roots: one list for each leaf's rank, without repeats."""

    leaves: Tensor
    leaf_counts: tuple[int, ...]
    roots: tuple[Tensor, ...]
    root_counts: tuple[int, ...]

    def send_up(self, comm: Communicator, leaves: Tensor, roots: Tensor, after: Event) -> Event:
        """Send the leaves' rows (L, D) to the ranks of their roots, where they arrive in `roots` (R, D)."""
        return comm.all_to_all(padded_rows(roots), padded_rows(leaves), self.root_counts, self.leaf_counts, after)

    def send_down(self, comm: Communicator, roots: Tensor, leaves: Tensor, after: Event) -> Event:
        """Send the roots' rows (R, D) to the ranks of their leaves, where they arrive in `leaves` (L, D)."""
        return comm.all_to_all(padded_rows(leaves), padded_rows(roots), self.leaf_counts, self.root_counts, after)

    def add_to_roots(self, message: Tensor, partial: Accumulation) -> None:
        """Add to every root what its leaves sent (R, D), rank after rank: the rows of one rank name no root twice."""
        for rows, part in self._of_ranks(message):
            partial.combine(part, rows)

    def gather_roots(self, partial: Accumulation, message: Tensor) -> None:
        """Write the partial results of the roots to a message (R, D), once for each leaf."""
        for rows, part in self._of_ranks(message):
            partial.gather(rows, part)

    def scatter_roots(self, message: Tensor, partial: Accumulation) -> None:
        """Scatter a message that `gather_roots` packed (R, D) to the root rows."""
        for rows, part in self._of_ranks(message):
            partial.scatter(part, rows)

    def _of_ranks(self, message: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the roots with leaves on one rank, and their part of a message."""
        first = 0
        for rows in self.roots:
            last = first + rows.shape[0]
            if last > first:
                yield rows, message[first:last]
            first = last


def device_lists(backend: KernelBackend, lists: Lists) -> DeviceLists:
    """Upload the lists of split vertices."""
    bounds = [0]
    for count in lists.root_counts:
        bounds.append(bounds[-1] + count)
    roots = tuple(backend.upload(lists.roots[a:b]) for a, b in pairwise(bounds))
    return DeviceLists(backend.upload(lists.leaves), lists.leaf_counts, roots, lists.root_counts)


def build_part(context: BuildContext, bounds: tuple[int, ...], bins: int, *, partial: bool) -> Part:
    """Build the matrices and lists of a rank; bounds: of its ranges of rows; partial: sums may stand for whole ones.

    Raises: GraphError for a matrix that is too large.
    """
    partition, options, backend = cut_partition(context.partition), context.options, context.backend
    local_index, graph, cut = context.local_index or partition.local_index(context.rank), context.graph, partition.cut
    loops, dtype = options.self_loops, options.dtype
    tile = cut_tile(graph.adj_t, cut.edge_part_t, partition, local_index, context.rank, self_loops=loops, dtype=dtype)
    forward = [upload_tile(backend, some) for some in row_slices(tile, bounds)]
    backward = forward
    if not graph.symmetric:
        tile_t = cut_tile(graph.adj, cut.edge_part, partition, local_index, context.rank, self_loops=loops, dtype=dtype)
        backward = [upload_tile(backend, tile_t)]
    complete = device_lists(backend, exchange_lists(partition, context.rank, bins=1)[0])
    by_bin = [complete]
    if bins > 1:
        by_bin = [device_lists(backend, lists) for lists in exchange_lists(partition, context.rank, bins=bins)]
    missing = np.ones(bounds[1], options.dtype)
    if partial:
        missing = _missing(graph, tile, local_index, context.rank, options, bounds[1])
    return Part(
        backend=backend,
        bounds=bounds,
        forward=forward,
        backward=backward,
        lists=complete,
        bins=by_bin,
        missing=missing,
    )


def _missing(
    graph: Graph, tile: Tile, local_index: Owners, rank: int, options: ShardOptions, num_split: int
) -> npt.NDArray[Any]:
    """Return each split row's degree in the whole graph divided by its degree in this part (S,). Cost: a sweep over the
    edges.
    """
    # Entries, not their weights: weights of both signs may add up to next to nothing.
    pattern = dataclasses.replace(graph.adj_t, values=None)
    whole = degrees(pattern, local_index, rank, self_loops=options.self_loops, threads=options.threads)[:num_split]
    here = np.diff(tile.indptr[: num_split + 1]).astype(np.float64)
    return np.divide(whole, here, out=np.ones(num_split), where=here > 0).astype(options.dtype)
