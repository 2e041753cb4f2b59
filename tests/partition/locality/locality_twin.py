"""A sweep of local moves written plainly, vertex by vertex in Python: what cpu/locality.cpp must give, bit for bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tests.partition.cut.libra_twin import WORD, hash64

BATCHES, SAMPLE = 16, 1024


@dataclass
class Twin:
    """cluster and active by vertex, volume by cluster; rows: for each vertex its row of every matrix; own: its volume."""

    rows: Sequence[Sequence[Sequence[int]]]
    own: Sequence[int]
    cluster: list[int]
    volume: list[int]
    active: list[bool]
    total: int
    scale: int

    def sweep(self, key: int, chunks: Sequence[range]) -> int:
        """Move the vertices of every chunk, batch after batch; return how many moved."""
        moved = 0
        for chunk in chunks:
            looks = {v: hash64((key + v) % WORD) % BATCHES for v in chunk if self.active[v]}
            for v in chunk:
                self.active[v] = False
            for batch in range(BATCHES):
                required = {v: self.best(v, key) for v in looks if looks[v] == batch}
                for v, c in required.items():
                    if c != self.cluster[v]:
                        self.move(v, c)
                        moved += 1
        return moved

    def best(self, v: int, key: int) -> int:
        """The cluster that v wants to be in."""
        step = max(1, -(-max(len(row) for row in self.rows[v]) // SAMPLE))
        met = Counter(self.cluster[u] for row in self.rows[v] for u in row[::step] if u != v)
        mine, draw = self.cluster[v], hash64((key + v) % WORD)

        def gain(c: int) -> int:
            others = self.volume[c] - (self.own[v] if c == mine else 0)
            return self.scale * step * met[c] * self.total - self.own[v] * others

        best = max((gain(c) for c in met), default=gain(mine))
        if gain(mine) >= best:
            return mine
        return max((c for c in met if gain(c) == best), key=lambda c: hash64((draw + c) % WORD))

    def move(self, v: int, c: int) -> None:
        self.volume[self.cluster[v]] -= self.own[v]
        self.volume[c] += self.own[v]
        self.cluster[v] = c
        for row in self.rows[v]:
            for u in row:
                self.active[u] = True
