"""Scores of validation and test links from embeddings of all vertices, some links at a time.

N vertices, V rows of this rank, D columns, M links of a split, K negatives of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mggcn.backend.base import KernelBackend
from mggcn.comm.base import Communicator
from mggcn.graph.csr import Rows
from mggcn.memory.arena import BufferSpec
from mggcn.model.runtime import Inputs
from mggcn.partition.order import part_sizes
from mggcn.planning.links import MOST, PAIR_BYTES, SUMS, counts_nbytes, decoder_names
from mggcn.train.link_metrics import LinkCounts
from mggcn.train.metrics import SPLITS
from mggcn.train.runtime import DTYPES

Ids = npt.NDArray[np.int64]


class PairDecoder:
    """Scores pairs in float64: dot products, or a network on products. layers: weight (D, E) and bias (E,) of each, as they
    are when a pair is scored. upload: brings ids to the device of embeddings and weights.
    """

    def __init__(
        self, layers: Sequence[tuple[Tensor, Tensor]], upload: Callable[[Ids], Tensor] = torch.from_numpy
    ) -> None:
        self._layers, self._upload = layers, upload

    def scores(self, x: Tensor, heads: Ids, tails: Ids) -> npt.NDArray[np.float64]:
        """Return the scores (n, K) of each row of x in `heads` (n,) with those in `tails` (n, K), some at a time."""
        found = np.empty(tails.shape)
        step = max(1, PAIR_BYTES // (8 * x.shape[1] * tails.shape[1]))
        for start in range(0, heads.size, step):
            some = slice(start, start + step)
            one = x[self._upload(heads[some])].double()
            others = x[self._upload(tails[some].ravel())].double().view(one.shape[0], -1, x.shape[1])
            found[some] = self._of(one, others).cpu().numpy()
        return found

    def _of(self, one: Tensor, others: Tensor) -> Tensor:
        """Return the scores (n, K) of rows (n, D) with others (n, K, D), which are overwritten."""
        if not self._layers:
            return torch.bmm(others, one[:, :, None])[:, :, 0]
        h = others.mul_(one[:, None]).flatten(0, 1)
        for number, (weight, bias) in enumerate(self._layers):
            h = torch.relu(h) if number else h
            h = torch.addmm(bias.double(), h, weight.double())
        return h.view(others.shape[:2])


def decoder_layers(weights: Mapping[str, Tensor], decoder: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Return the layers that score pairs, of a run's weights by name. decoder: setting links.decoder."""
    return [(weights[f"{name}.weight"], weights[f"{name}.bias"]) for name in decoder_names(weights, decoder)]


class EveryEmbedding:
    """Gives every rank the embeddings of all vertices, in memory of `shape`. inputs: whose rows this rank's are."""

    def __init__(self, inputs: Inputs, shape: BufferSpec, comm: Communicator, backend: KernelBackend) -> None:
        self._inputs, self._comm = inputs, comm
        self._flat = backend.allocate(shape.nbytes).view(DTYPES[shape.dtype])
        self._all = self._flat.as_strided((shape.rows, shape.cols), (shape.ld, 1))

    def __call__(self, z: Tensor) -> Tensor:
        """Return the embeddings of all vertices, by vertex, from this rank's (V, D). Collective."""
        owned = self._inputs.owned
        ids, rows = (owned.ids, z) if owned.owned is None else (owned.ids[owned.owned], z[owned.owned])
        self._flat.zero_()
        self._all.index_copy_(0, ids, rows)
        self._comm.all_reduce(self._flat).wait()
        self._comm.synchronize()
        return self._all


class LinkScores:
    """Scores the links of a graph that are not trained on. Every rank counts its share of their negatives.

    links: Rows int32 (M, 2 + K) by split; the training links are not scored. everyone: gives a rank the embeddings of all
    vertices, by vertex; None: it has them, and rows int32 (N,) is the row of each. Memory: planning/links.py.
    """

    def __init__(
        self,
        metric: str,
        links: Mapping[str, Rows],
        decoder: PairDecoder,
        comm: Communicator,
        backend: KernelBackend,
        everyone: Callable[[Tensor], Tensor] | None,
        rows: npt.NDArray[np.int32] | None = None,
    ) -> None:
        self._metric, self._backend = metric, backend
        self._links, self._decoder, self._comm = links, decoder, comm
        self._everyone, self._rows = everyone, rows
        if comm.size > 1:
            self._counts = backend.allocate(counts_nbytes(comm.size)).view(torch.float64).view(comm.size, 2, -1)

    def scores(self, z: Tensor) -> dict[str, float | None]:
        """Return the metric of each split from this rank's embeddings (V, D); None for training links. Collective."""
        return {name: found.get(self._metric) for name, found in self.every(z).items()}

    def every(self, z: Tensor) -> dict[str, dict[str, float | None]]:
        """Return every score of each split from this rank's embeddings (V, D), {} without links to score. Collective."""
        x = z if self._everyone is None else self._everyone(z)
        counts = {name: self._count(x, self._links[name]) for name in SPLITS[1:] if name in self._links}
        if self._comm.size > 1:
            self._add_up(list(counts.values()))
        return {name: counts[name].scores() if name in counts else {} for name in SPLITS}

    def _pieces(self, links: Rows, first: int, last: int) -> Iterator[tuple[slice, Ids]]:
        """Yield links [first, last) some at a time, as rows of embeddings, in Fortran's order."""
        step = max(1, PAIR_BYTES // (8 * links.shape[1]))
        for start in range(first, last, step):
            some = slice(start, min(start + step, last))
            read = links.read(some.start, some.stop)
            yield some, (read if self._rows is None else self._rows[read]).astype(np.int64, order="F")

    def _count(self, x: Tensor, links: Rows) -> LinkCounts:
        found = np.empty(links.shape[0])
        # Every rank scores all links, a pair each, and counts its share of their negatives, many pairs each.
        for some, rows in self._pieces(links, 0, links.shape[0]):
            found[some] = self._decoder.scores(x, rows[:, 0], rows[:, 1:2])[:, 0]
        counts, sizes = LinkCounts(np.sort(found)), part_sizes(links.shape[0], self._comm.size)
        first = sum(sizes[: self._comm.rank])
        for some, rows in self._pieces(links, first, first + sizes[self._comm.rank]):
            counts.add(found[some], self._decoder.scores(x, rows[:, 0], rows[:, 2:]))
        return counts

    def _add_up(self, counts: Sequence[LinkCounts]) -> None:
        """Give every rank the counts of all: sums in the order of ranks, and the best scores of each."""
        found = self._counts.zero_()
        for part, one in enumerate(counts):
            self._backend.write(np.concatenate([one.sums, one.best]), found[self._comm.rank, part])
        self._comm.all_reduce(found).wait()
        self._comm.synchronize()
        everyone = found.cpu().numpy()
        for part, one in enumerate(counts):
            one.sums = everyone[:, part, :SUMS].sum(0)
            one.best = np.sort(everyone[:, part, SUMS:].ravel())[-MOST:]
