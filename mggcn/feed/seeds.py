"""Which training vertices each step reads. Steps are the same for every number of ranks, and so is their gradient, unless
each rank has a range of the vertices.

N vertices, T training vertices, B of a step, S steps of an epoch, P ranks.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mggcn.errors import PlanError
from mggcn.feed.batch import Pairs
from mggcn.feed.pairs import LinkDraws
from mggcn.partition.order import part_sizes

Ids = npt.NDArray[np.int64]
_START = np.uint64(0x5851F42D4C957F2D)
"""Makes of an epoch's key the one of the point at which its draws begin."""


@dataclass(frozen=True, slots=True)
class Seeds:
    """The training vertices, int64 (T,) ascending, in steps of `batch`. drop_last: leave out a smaller last step.

    owner uint16 (N,): the rank of each vertex, by which a step's vertices are dealt to P ranks; None for one rank.
    shuffle: whether every epoch has an order of its own; False, on one rank: the vertices come as they are given.
    dealt uint16 (T,): the rank of each training vertex, as `ranges_of`; None: owners take them as they come.
    weights (T,): how often an epoch reads each vertex, in proportion, at most once a step; None: once.
    """

    train: Ids
    batch: int
    drop_last: bool = False
    owner: npt.NDArray[np.uint16] | None = None
    ranks: int = 1
    shuffle: bool = field(default=True, kw_only=True)
    dealt: npt.NDArray[np.uint16] | None = field(default=None, kw_only=True)
    weights: npt.NDArray[np.float64] | None = field(default=None, kw_only=True)

    @property
    def num_steps(self) -> int:
        """Steps of an epoch: at least one."""
        whole, rest = divmod(self.train.size, self.batch)
        return max(whole if self.drop_last else whole + (rest > 0), 1)

    @property
    def most(self) -> int:
        """Most vertices of a step on one rank."""
        return -(-self._size // self.ranks)

    @property
    def _size(self) -> int:
        """Vertices of a step that is full."""
        return min(self.batch, self.train.size)

    def order(self, seed: int, epoch: int) -> Ids:
        """Return the training vertices in the order in which an epoch reads them.

        They are sorted by a 64-bit hash of seed, epoch and vertex. Cost: 24 bytes a training vertex, one sort.
        """
        if not self.shuffle:
            return self.train
        key = _hashed(np.array([seed], np.uint64) << np.uint64(32) | np.uint64(epoch))
        places = np.argsort(_hashed(self.train.astype(np.uint64) ^ key), kind="stable")
        if self.weights is not None:
            places = self._drawn(places, self.weights, float(_hashed(key ^ _START)[0]) / 2**64)
        elif self.dealt is not None:
            places = self._in_turn(places, self.dealt)
        return self.train[places]

    def _in_turn(self, places: Ids, dealt: npt.NDArray[np.uint16]) -> Ids:
        """Return the places with one vertex of each rank after the other, the ranks with a vertex more first.

        So every step has as many of each rank, but for one vertex, and a rank's come in the order that they had.
        """
        counts = np.bincount(dealt, minlength=self.ranks)
        turn = np.empty(self.ranks, np.int64)
        turn[np.argsort(-counts, kind="stable")] = np.arange(self.ranks)
        of = dealt[places]
        grouped = places[np.argsort(of, kind="stable")]
        first = np.repeat(np.cumsum(counts) - counts, counts)
        out = np.empty_like(places)
        out[(np.arange(places.size) - first) * self.ranks + np.repeat(turn, counts)] = grouped
        return out

    def _drawn(self, places: Ids, weights: npt.NDArray[np.float64], start: float) -> Ids:
        """Return the places of S steps of B vertices each, drawn by weight; start: a number drawn from [0, 1).

        Vertices lie on a line of length S B, in an order of their own in each epoch, each on a piece as long as its weight
        says. A step reads those at B points at distances of S: as none is longer than S, they are distinct, and each is
        read with the chance B w / sum(w). The steps' points differ by ones, so that an epoch reads a vertex as often as its
        piece is long, rounded up or down. Source: systematic sampling, Madow, Ann. Math. Stat. 20, 1949.
        """
        steps, size = self.num_steps, self._size
        ends = np.cumsum(weights[places])
        ends *= steps * size / ends[-1]
        first = (steps * start + np.arange(steps)) % steps
        found = np.searchsorted(ends, np.add.outer(first, steps * np.arange(size)), side="right")
        # Rounding may put a point behind the last piece, or two on one that is S long.
        found -= np.arange(size)
        np.minimum(np.maximum.accumulate(found, axis=1, out=found), places.size - size, out=found)
        found += np.arange(size)
        out: Ids = places[found.ravel()]
        return out

    def of_step(self, order: Ids, step: int) -> Ids:
        """Return the vertices of a step on all ranks, ascending if they are shuffled."""
        vertices = order[step * self.batch : (step + 1) * self.batch]
        return np.sort(vertices) if self.shuffle else vertices

    def of_rank(self, step: Ids, rank: int) -> Ids:
        """Return a rank's share of a step's vertices, ascending; shares differ by at most one vertex.

        A vertex goes to the rank to which it is dealt; else to its owner, and those for whom that one has no room to the
        first ranks that have some.
        """
        return step if self.ranks == 1 else step[self.ranks_of(step) == rank]

    def ranks_of(self, step: Ids) -> npt.NDArray[np.uint16]:
        """Return the rank of each of a step's vertices."""
        if self.dealt is not None:
            return self.dealt[np.searchsorted(self.train, step)]
        if self.owner is None or self.ranks == 1:
            return np.zeros(step.size, np.uint16)
        sizes, owners = np.array(part_sizes(step.size, self.ranks)), self.owner[step]
        counts = np.bincount(owners, minlength=self.ranks)
        grouped = np.argsort(owners, kind="stable")
        place = np.empty(step.size, np.int64)
        place[grouped] = np.arange(step.size) - np.repeat(np.cumsum(counts) - counts, counts)
        stays = place < sizes[owners]
        owners[~stays] = np.repeat(np.arange(self.ranks), sizes - np.minimum(sizes, counts))
        return owners


@dataclass(frozen=True, slots=True)
class Step:
    """A step: its number in the run, by which draws are named, and its seeds on all ranks."""

    seed: int
    number: int
    seeds: Ids


class RankSeeds:
    """The seeds of each step on one rank, for any thread that asks.

    together: whether the rank draws around the seeds of all ranks, because they share batches. links: where links are
    predicted, seeds are numbers of training links, and the vertices of their pairs take their place when a batch is drawn.
    Memory: the order of two epochs.
    """

    def __init__(self, seeds: Seeds, rank: int = 0, *, together: bool = False, links: LinkDraws | None = None) -> None:
        self.all: Seeds = seeds
        self.rank: int = rank
        self.links: LinkDraws | None = links
        self.num_steps: int = seeds.num_steps
        self._together = together
        self._orders: dict[tuple[int, int], Ids] = {}
        self._ordering = threading.Lock()

    def step(self, seed: int, number: int) -> Step:
        """Return a step by its number in the run."""
        epoch, at = divmod(number, self.num_steps)
        with self._ordering:  # threads that draw over the end of an epoch make the order of the next one once
            order = self._orders.get((seed, epoch))
            if order is None:
                self._orders = dict([*self._orders.items()][-1:])
                order = self._orders[seed, epoch] = self.all.order(seed, epoch)
            # Within the lock: no thread has an order that the next one's has already replaced.
            return Step(seed, number, self.all.of_step(order, at))

    def own(self, step: Step) -> Ids:
        """Return the seeds around which this rank draws."""
        return step.seeds if self._together else self.all.of_rank(step.seeds, self.rank)

    def around(self, step: Step, seeds: Ids) -> tuple[Ids, Pairs | None, Ids | None]:
        """Return the vertices around which a batch of some of a step's seeds is drawn, and of links their pairs, and the
        edges that are left out.
        """
        if self.links is None:
            return seeds, None, None
        return *self.links.of_seeds(step.seed, step.number, step.seeds, seeds), self.links.left_out(step.seeds)

    def halves(self, seeds: Ids) -> tuple[Ids, Ids]:
        """Return the halves of seeds that are too many for what was planned. Raises: PlanError for a single one."""
        if seeds.size < 2:
            what = "vertex" if self.links is None else "link"
            raise PlanError(
                f"the neighbourhood of {what} {seeds[0]} alone is larger than a batch was planned to be; set smaller "
                "fan-outs or sample.plan = bound"
            )
        middle = seeds.size // 2
        return seeds[:middle], seeds[middle:]


def ranges_of(train: Ids, owner: npt.NDArray[np.uint16], ranks: int) -> npt.NDArray[np.uint16]:
    """Return the rank (T,) of each training vertex if these are cut into P ranges, each dealt to one rank.

    Vertices are in the order of a graph whose parts have consecutive numbers, by owner. Ranges differ by at most one
    vertex; the largest overlap of a range with the vertices of a rank decides first, of equal ones that of the lowest rank.
    Cost: a sort of T numbers. Source: Zheng et al., DistDGL, IA3 2020.
    """
    owners = owner[train]
    order, sizes = np.argsort(owners, kind="stable"), part_sizes(train.size, ranks)
    of_range = np.repeat(np.arange(ranks), sizes)
    overlap = np.bincount(owners[order].astype(np.int64) * ranks + of_range, minlength=ranks * ranks).reshape(
        ranks, ranks
    )
    rank_of = np.empty(ranks, np.uint16)
    for _ in range(ranks):
        rank, chosen = np.unravel_index(overlap.argmax(), overlap.shape)
        rank_of[chosen] = rank
        overlap[rank], overlap[:, chosen] = -1, -1
    out = np.empty(train.size, np.uint16)
    out[order] = rank_of[of_range]
    return out


def _hashed(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele, Lea and Flood, OOPSLA 2014) of each number, as cpu/shuffle.h has it."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    hashed: npt.NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return hashed
