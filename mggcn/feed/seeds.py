"""Which training vertices each step reads. Steps are the same for every number of ranks, and so is their gradient.

N vertices, T training vertices, B of a step, P ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mggcn.partition.order import part_sizes

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Seeds:
    """The training vertices, int64 (T,) ascending, in steps of `batch`. drop_last: leave out a smaller last step.

    owner uint16 (N,): the rank of each vertex, by which a step's vertices are dealt to P ranks; None for one rank.
    shuffle: whether every epoch has an order of its own; False, on one rank: the vertices come as they are given.
    """

    train: Ids
    batch: int
    drop_last: bool = False
    owner: npt.NDArray[np.uint16] | None = None
    ranks: int = 1
    shuffle: bool = field(default=True, kw_only=True)

    @property
    def num_steps(self) -> int:
        """Steps of an epoch: at least one."""
        whole, rest = divmod(self.train.size, self.batch)
        return max(whole if self.drop_last else whole + (rest > 0), 1)

    @property
    def most(self) -> int:
        """Most vertices of a step on one rank."""
        return -(-min(self.batch, self.train.size) // self.ranks)

    def order(self, seed: int, epoch: int) -> Ids:
        """Return the training vertices in the order in which an epoch reads them.

        They are sorted by a 64-bit hash of seed, epoch and vertex. Cost: 24 bytes a training vertex, one sort.
        """
        if not self.shuffle:
            return self.train
        key = _hashed(np.array([seed], np.uint64) << np.uint64(32) | np.uint64(epoch))
        return self.train[np.argsort(_hashed(self.train.astype(np.uint64) ^ key), kind="stable")]

    def of_step(self, order: Ids, step: int) -> Ids:
        """Return the vertices of a step on all ranks, ascending if they are shuffled."""
        vertices = order[step * self.batch : (step + 1) * self.batch]
        return np.sort(vertices) if self.shuffle else vertices

    def of_rank(self, step: Ids, rank: int) -> Ids:
        """Return a rank's share of a step's vertices, ascending; shares differ by at most one vertex.

        A vertex goes to its owner, and those for whom that one has no room to the first ranks that have some.
        """
        if self.owner is None or self.ranks == 1:
            return step
        sizes, owners = np.array(part_sizes(step.size, self.ranks)), self.owner[step]
        counts = np.bincount(owners, minlength=self.ranks)
        grouped = np.argsort(owners, kind="stable")
        place = np.empty(step.size, np.int64)
        place[grouped] = np.arange(step.size) - np.repeat(np.cumsum(counts) - counts, counts)
        stays = place < sizes[owners]
        room = sizes - np.minimum(sizes, counts)
        first = int(room[:rank].sum())
        moved = step[~stays][first : first + int(room[rank])]
        return np.sort(np.concatenate([step[stays & (owners == rank)], moved]))


def _hashed(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele, Lea and Flood, OOPSLA 2014) of each number, as cpu/shuffle.h has it."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    hashed: npt.NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return hashed
