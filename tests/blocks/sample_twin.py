"""Sampling written plainly, edge by edge in Python: what cpu/sample.cpp must give, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mggcn.blocks.draws import ALL, Draws
from mggcn.graph.csr import CSR
from tests.partition.cut.libra_twin import stream

WORD = 2**32


def philox(seed: int, step: int, counter: Sequence[int]) -> list[int]:
    """The four words of a block of Philox4x32-10."""
    c, k0, k1 = list(counter), seed, step
    for _ in range(10):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [p1 // WORD ^ c[1] ^ k0, p1 % WORD, p0 // WORD ^ c[3] ^ k1, p0 % WORD]
        k0, k1 = (k0 + 0x9E3779B9) % WORD, (k1 + 0xBB67AE85) % WORD
    return c


@dataclass(frozen=True)
class Name:
    """What names the draws of a hop."""

    seed: int
    step: int
    hop: int

    def word(self, vertex: int, number: int, kind: int = 0) -> int:
        block = 2**16 * kind + number // 4
        return philox(self.seed, self.step, (2**31 + self.hop, vertex, 0, block))[number % 4]


def mixed(x: int) -> int:
    x = (x ^ x >> 16) * 0x7FEB352D % WORD
    x = (x ^ x >> 15) * 0x846CA68B % WORD
    return x ^ x >> 16


def labor_number(name: Name, vertex: int, every_hop: bool) -> int:
    key = stream(name.seed << 32 | name.step, 0 if every_hop else name.hop + 1)
    return mixed((mixed(vertex ^ key % WORD) + (key >> 32)) % WORD)


def exponential(word: int) -> float:
    """Minus the logarithm of (word + 1/2) / 2^32, operation by operation."""
    m, power = np.frexp((word + 0.5) * 2.0**-32)
    m, power = 2.0 * float(m), int(power) - 1
    if m > 1.4142135623730951:
        m, power = 0.5 * m, power + 1
    s = (m - 1.0) / (m + 1.0)
    z, total = s * s, 1.0 / 19
    for k in range(17, 0, -2):
        total = total * z + 1.0 / k
    return -(power * 0.6931471805599453 + 2.0 * s * total)


def ranks(name: Name, vertex: int, kind: int, degree: int, fanout: int, replace: bool) -> list[int]:
    """What is drawn of the numbers below `degree`, ascending."""
    if fanout == ALL or (degree <= fanout and not replace):
        return list(range(degree))
    drawn = list[int]()
    for k in range(fanout if degree else 0):
        last = degree - 1 if replace else degree - fanout + k
        pick = name.word(vertex, k, kind) * (last + 1) // WORD
        drawn.append(last if pick in drawn and not replace else pick)
    return sorted(drawn)


@dataclass
class TwinHop:
    indptr: list[int]
    indices: list[int]
    values: list[float]
    places: list[int]

    def transposed(self, sources: int) -> tuple[npt.NDArray[Any], ...]:
        """indptr_t, indices_t, order."""
        targets = np.repeat(np.arange(len(self.indptr) - 1), np.diff(self.indptr))
        order = np.argsort(np.array(self.indices, np.int64), kind="stable")
        counts = np.bincount(np.array(self.indices, np.int64), minlength=sources)
        return np.append(0, np.cumsum(counts)), targets[order], order


class Twin:
    """A sampler of the same arguments."""

    def __init__(self, adj_t: CSR, draws: Draws, *, self_loops: bool = False) -> None:
        self.draws, self.self_loops = draws, self_loops
        self.indptr, self.indices = adj_t.indptr.array(), adj_t.indices.array()
        self.weights = None if adj_t.values is None else adj_t.values.array()
        self.types = None if adj_t.types is None else adj_t.types.array()

    def draw(
        self, seeds: npt.NDArray[np.int64], seed: int, step: int, left_out: frozenset[tuple[int, int]] = frozenset()
    ) -> tuple[list[int], list[int], list[TwinHop]]:
        """Ids, sizes and hops."""
        ids = [int(v) for v in seeds]
        numbers = {v: i for i, v in enumerate(ids)}
        sizes, hops = [len(ids)], list[TwinHop]()
        for number in range(len(self.draws.fanouts)):
            hop = TwinHop([0], [], [], [])
            for v in ids[: sizes[-1]]:
                for place, value in self.row(Name(seed, step, number), v, left_out):
                    u = v if place < 0 else int(self.indices[place])
                    if u not in numbers:
                        numbers[u] = len(ids)
                        ids.append(u)
                    hop.indices.append(numbers[u])
                    hop.values.append(value)
                    hop.places.append(place)
                hop.indptr.append(len(hop.indices))
            hops.append(hop)
            sizes.append(len(ids))
        return ids, sizes, hops

    def row(self, name: Name, v: int, left_out: frozenset[tuple[int, int]]) -> list[tuple[int, float]]:
        """The places and values of what a vertex draws; place -1: an own entry that the graph lacks."""
        start, stop = int(self.indptr[v]), int(self.indptr[v + 1])
        own = [p for p in range(start, stop) if self.indices[p] == v] if self.self_loops else []
        free = [p for p in range(start, stop) if p not in own and (v, int(self.indices[p])) not in left_out]
        fanouts = self.draws.of_types(name.hop)
        by_type = isinstance(self.draws.fanouts[name.hop], tuple)
        drawn = list[tuple[int, float]]()
        for kind, fanout in enumerate(fanouts):
            of_kind = [
                [p for p in among if not by_type or self.types is None or self.types[p] == kind]
                for among in (free, [p for p in range(start, stop) if p not in own])
            ]
            drawn += self.of_type(name, v, kind, fanout, of_kind[0], start, len(of_kind[1]))
        if self.self_loops:
            drawn += [(place, 1.0) for place in own or [-1]]

        def position(entry: tuple[int, float]) -> tuple[int, int]:
            place = entry[0]
            return (v if place < 0 else int(self.indices[place]), place)

        return sorted(drawn, key=position)

    def of_type(
        self, name: Name, v: int, kind: int, fanout: int, places: list[int], start: int, stored: int
    ) -> list[tuple[int, float]]:
        """What a vertex draws of the edges of one type, of which the graph stores so many."""
        if self.draws.by == "uniform":
            picks = ranks(name, v, kind, len(places), fanout, self.draws.replace)
            return [(places[r], float(picks.count(r))) for r in sorted(set(picks))]
        if self.draws.by == "weight":
            assert self.weights is not None
            if fanout == ALL:
                return [(p, float(self.weights[p])) for p in places]
            heavy = [p for p in places if self.weights[p] > 0 and fanout]
            keys = {p: exponential(name.word(v, p - start)) / float(self.weights[p]) for p in heavy}
            drawn = sorted(heavy, key=lambda p: (keys[p], p))[:fanout]
            return [(p, float(self.weights[p]) if len(drawn) == len(heavy) else 1.0) for p in drawn]
        bound, counted = WORD, len(places)
        if fanout != ALL and len(places) > fanout:
            bound, counted = fanout * WORD // len(places), fanout
        value = np.float32(stored) / np.float32(max(counted, 1))
        every_hop = self.draws.by == "labor-one"
        return [(p, float(value)) for p in places if labor_number(name, int(self.indices[p]), every_hop) < bound]
