"""Pairs of a step that predicts links: training links, and for each pairs without a link, drawn by name.

T training links of the graph, M pairs of a step on a rank, S rows that they are of. The draw of negative j of link e is
named by (seed, step; e, j), whatever the rank, so that a step's pairs are the same for every number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from mggcn.blocks.block import Stack
from mggcn.blocks.sampler import edge_keys
from mggcn.feed.batch import Batch, Pairs
from mggcn.graph.csr import Rows
from mggcn.graph.philox import draw_below
from mggcn.partition.order import part_sizes

STREAM: Final = 0xC0000000
"""First counter of negatives (graph/philox.py has the streams)."""
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LinkDraws:
    """The pairs that a step has for training links, Rows int32 (T, 2): each link, and `negatives` pairs without one.

    in_batch: whether destinations without a link are those of the step's links, instead of any vertex. The source is never
    one, and in a batch neither is the link's own destination; of links for which that leaves none, they are any vertex.
    """

    links: Rows
    num_vertices: int
    negatives: int
    in_batch: bool

    def ends(self, seed: int, step: int, links: Ids, own: Ids) -> tuple[Ids, Ids]:
        """Return sources and destinations (M,) for the links `own`, these first, then the negatives of each.

        links: numbers of all of a step's links, of which the rank has `own`; step: its number in the run, below 2^32.
        """
        read = self.links.array()
        sources, destinations = read[own].astype(np.int64).T
        key = seed, step % 2**32
        drawn = self._of_step(key, links, own) if self.in_batch else self._any_other(key, own, sources)
        heads = np.concatenate([sources, np.repeat(sources, self.negatives)])
        return heads, np.concatenate([destinations, drawn.ravel()])

    def _any_other(self, key: tuple[int, int], own: Ids, sources: Ids) -> Ids:
        """Return destinations (M, negatives) that are not the source."""
        drawn = draw_below(self.num_vertices - 1, key, own, self.negatives, stream=STREAM)
        return drawn + (drawn >= sources[:, None])

    def _of_step(self, key: tuple[int, int], links: Ids, own: Ids) -> Ids:
        """Return destinations (M, negatives) of a step's links that are neither end of the own link, if it has others."""
        read = self.links.array()
        # Links whose destination is one of both ends are skipped: two ranges of the sorted destinations.
        every, ends = np.sort(read[links, 1]).astype(np.int64), np.sort(read[own].astype(np.int64).T, 0)
        first, after = np.searchsorted(every, ends), np.searchsorted(every, ends, side="right")
        others = every.size - (after - first).sum(0)
        place = draw_below(others, key, own, self.negatives, stream=STREAM)
        for start, stop in zip(first, after, strict=True):
            place += (place >= start[:, None]) * (stop - start)[:, None]
        drawn = every[np.minimum(place, every.size - 1)]
        none = others == 0
        if none.any():
            drawn[none] = self._any_other(key, own[none], read[own[none], 0])
        return drawn

    def left_out(self, links: Ids) -> Ids:
        """Return the keys of a step's links and their reverses, as the sampler leaves edges out."""
        sources, destinations = self.links.array()[links].astype(np.int64).T
        return edge_keys(np.concatenate([destinations, sources]), np.concatenate([sources, destinations]))

    def of_seeds(self, seed: int, step: int, links: Ids, own: Ids) -> tuple[Ids, Pairs]:
        """Return the vertices of a batch's pairs, ascending, and the pairs as rows of these."""
        heads, tails = self.ends(seed, step, links, own)
        vertices, rows = np.unique(np.concatenate([heads, tails]), return_inverse=True)
        return vertices, self._pairs(rows[: heads.size], rows[heads.size :], vertices.size, links.size, own.size)

    def of_rows(self, seed: int, step: int, own: Ids, rows: npt.NDArray[np.int32] | None) -> Pairs:
        """Return pairs of the links `own`, in a step of all links. rows int32 (N,): that of each vertex; None: its id."""
        everything = np.arange(self.links.shape[0])
        ends = self.ends(seed, step, everything, own)
        heads, tails = ends if rows is None else (rows[ends[0]], rows[ends[1]])
        return self._pairs(heads, tails, self.num_vertices, everything.size, own.size)

    def _pairs(self, heads: Any, tails: Any, num_rows: int, links: int, own: int) -> Pairs:
        indptr, ends = incidence(heads, tails, num_rows)
        total = links * (1 + self.negatives)
        heads, tails = heads.astype(np.int32), tails.astype(np.int32)
        return Pairs(heads=heads, tails=tails, links=own, total=total, indptr=indptr, ends=ends)


def incidence(heads: Any, tails: Any, num_rows: int) -> tuple[Ids, npt.NDArray[np.int32]]:
    """Return which ends of pairs each row is: indptr (S + 1,), ends (2 M,), places among heads and then tails, ascending.

    Cost: a counting sort.
    """
    both = np.concatenate([heads, tails])
    of_end = np.ones(both.size, np.int8), both.astype(np.int32), np.arange(both.size + 1, dtype=np.int32)
    by_row = sp.csr_array(of_end, shape=(both.size, num_rows)).tocsc()
    return by_row.indptr.astype(np.int64), by_row.indices.astype(np.int32, copy=False)


class LinkFeed:
    """The feed of whole-graph training on links: one step an epoch, over all training links, with new negatives each.

    Ranks share the links evenly; each scores pairs of the rows of all ranks. rows: as `LinkDraws.of_rows`.
    """

    stack: Stack | None = None
    num_steps = 1

    def __init__(self, draws: LinkDraws, rank: int, ranks: int, rows: npt.NDArray[np.int32] | None) -> None:
        self._draws, self._rows = draws, rows
        sizes = part_sizes(draws.links.shape[0], ranks)
        first = sum(sizes[:rank])
        self._own = np.arange(first, first + sizes[rank])

    def epoch(self, seed: int, number: int, first: int = 0) -> Iterator[Batch]:
        """Yield the pairs of an epoch's step."""
        yield Batch(pairs=self._draws.of_rows(seed, number, self._own, self._rows))

    def counts(self, seed: int, number: int) -> Mapping[str, int]:
        return {}

    def halt(self) -> None:
        return
