"""Predicted seconds of a step on a batch: what the host draws and gathers for it, and its way to the device.

Both happen beside the step before if batches are made ahead; then the slowest sets the pace, or the lock of Python, which
the threads share. Needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

EDGE_S: Final = 4e-8
"""Seconds of a thread for an edge that it draws, numbers, transposes and counts: beside an H200 773,000 in 28 ms, on a
Xeon of two cores 869,000 in 19 to 24 (docs/notes/0034-sampler.md), and 4e-9 each, an estimate, for what they count."""
LOOKED_S: Final = 7e-9
"""Seconds of a thread for an entry of a target's row that it passes over to draw from it, as LABOR does: batches of
cnr_2000 took 6.4 ms for 956,000 of which they drew 26,000, of 0.1 M vertices 36 ms for 2.2 million and 407,000, which is 6
and 9 ns beside EDGE_S (2 cores, AMD EPYC of family 25). Draws by weight and by type, which pass over rows too, were not
measured."""
ROW_S: Final = 3.5e-8
"""Seconds until a row that is read at random is there, beside its bytes, and for its scale: several rows are under way at a
time; beside an H200 303,000 rows of 400 bytes took 24 ms, their scales 2."""
CROWD: Final = 0.03
"""What each thread more adds to the time of all, as they share the memory: 12 of them took 1.34 times as long each."""
GATHER_RATE: Final = 8e9
"""Bytes per second of the rows that a thread gathers from memory, read and written, once they are found."""
NONZERO_S: Final = 1.1e-8
"""Seconds of a thread for a nonzero of sparse features that it copies and transposes: 362,000 of coauthor_cs took 4.0 ms on
a Xeon of two cores that others used, three quarters of them to transpose (docs/notes/0003-input.md)."""
LOCK_S: Final = 1e-3
"""Seconds for which a batch on its way to a GPU holds Python's lock, on all threads together: beside an H200 a small batch
took 1.2 ms with 2 threads that draw or 12, of which Python took 0.6 for what is drawn and 0.3 to send it."""
CUT_S: Final = 4e-8
"""Seconds of a thread for an edge of a batch that ranks share, of which it takes its part, in both directions: about what
drawing it takes (docs/notes/0036-batches.md)."""
MATRIX_CALLS: Final = 3
"""Beginnings of ops as long as which Python takes to make one of a batch's matrices, on a host whose epochs were not
measured: a batch of 8 took 1.8 ms, with its rows, where one takes 0.09 (2 cores, AMD EPYC of family 25)."""
EAGER_S: Final = 2e-5
"""Seconds of a call of a GPU's step that is not captured: Python and the launch, an estimate. Beside an H200 eager epochs
of PyG's GCN took 1.96 ms for 54 kernels, with autograd (bench/results/gpu_nvidia-h200_2026-11-26.md)."""
PAIR_S: Final = 1e-7
"""Seconds of a thread for a pair of links' training that it draws and sorts by row: 0.06 to 0.16 s for a million, 200,000
vertices, the more on busy cores (2 cores, Xeon)."""
SCORED_S: Final = 1.2e-7
"""Seconds for a pair without a link whose score is counted; beside it, for each of its products in float64:"""
PRODUCT_S: Final = 6e-9
"""4 million pairs of 16 columns took some 1 s, of 128 columns 4 s (likewise)."""
HOST, PYTHON = "the host", "Python"
MAX_AHEAD: Final = 64
"""The most that sample.ahead may be (config/sample.py)."""


def scored_s(pairs: int, embedding: int, decoder: Sequence[int]) -> float:
    """Return the estimated seconds in which pairs are scored by their embeddings, and counted."""
    widths = (embedding, *decoder, 1) if decoder else ()
    dense = sum(d * e for d, e in pairwise(widths))
    # A dense layer's products are read from the cache, those of two embeddings from memory.
    return pairs * (SCORED_S + PRODUCT_S * (embedding + dense / 16))


@dataclass(frozen=True, slots=True)
class Sample:
    """A thread draws the `entries` edges of a batch, and gathers the features of its `rows` rows, of `row_bytes` each.

    pairs: drawn for the training links of the batch, if it has some. cut: edges, of all ranks, of which it takes its part.
    nonzeros: of sparse features, which it writes and transposes; rows then have no bytes beside them. looked: entries of
    rows that it passes over to draw.
    """

    rows: int
    entries: int
    row_bytes: int
    pairs: int = 0
    cut: int = 0
    nonzeros: int = field(default=0, kw_only=True)
    looked: int = field(default=0, kw_only=True)

    @property
    def seconds(self) -> float:
        """Seconds of one thread with a core of its own; estimates, which no machine's file has."""
        return self.seconds_on(1)

    def seconds_on(self, threads: int) -> float:
        """Return the seconds of a thread that draws, of which so many gather, each with a core of its own."""
        gathered_s = self.rows * (ROW_S + self.row_bytes / GATHER_RATE)
        drawn_s = self.entries * EDGE_S + self.looked * LOOKED_S + self.cut * CUT_S + self.pairs * PAIR_S
        return drawn_s + gathered_s / threads + self.nonzeros * NONZERO_S


@dataclass(frozen=True, kw_only=True, slots=True)
class RelayCost:
    """What fetching rows of other ranks takes, for `batches` steps together.

    exchanges: seconds for which the link carries each of a relay's messages, or, where relays share messages, each of those
    from a relay to the next; latency_s: of each, beside that. served_s: in which a rank gathers what others ask it for,
    between two of them. a_step: relays of a step, on average. early: whether each message is under way during a step, else
    ranks wait for all. busy: share of a rank's device that a message takes; sums_s: seconds of the sums of a step on the
    link. counted: whether drawn batches say how many rows.
    """

    exchanges: tuple[float, ...]
    latency_s: float
    served_s: float
    batches: int
    a_step: float
    early: bool
    busy: float
    sums_s: float = 0.0
    counted: bool = False
    edges: bool = False
    """Whether edges that owners have drawn come, too."""

    @property
    def messages_s(self) -> float:
        """Seconds of the messages of a step, one after the other, on average."""
        return self.a_step * self._relay_s

    @property
    def _relay_s(self) -> float:
        return sum(self.exchanges) + len(self.exchanges) * self.latency_s

    def waiting_s(self, step_s: float) -> float:
        """Return how much longer a step takes on average, given the seconds from a step to the next without relays.

        A relay begins as many steps early as it has messages, and the next one `batches` steps later: so messages that are
        `batches` apart are under way in one step, one behind the other, and may take as long as it computes.
        """
        if not self.early:
            return self.a_step * (self._relay_s + self.served_s)
        free_s, waiting_s = max(step_s - self.sums_s, 0.0), self.busy * self._relay_s + self.served_s
        for first in range(min(self.batches, len(self.exchanges))):
            together_s = sum(self.exchanges[first :: self.batches]) + self.latency_s
            waiting_s += max((1 - self.busy) * together_s - free_s, 0.0)
        return self.a_step * waiting_s


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchCost:
    """Seconds of a batch. sample_s: of one of the threads that make batches; upload_s: to the device, 0 on the host;
    ahead: batches that threads make beside the step; cores: of the device's own, if they compute the steps as well, else 0;
    beside: whether the next batch is uploaded during a step. lock_s: for which it holds Python's lock, on the host in the
    thread that computes.
    alone_s: of a thread with one core, if sample_s is of several. relay: how rows of other ranks come, if they are fetched.
    """

    sample_s: float
    upload_s: float
    ahead: int
    cores: float
    beside: bool = True
    lock_s: float = 0.0
    alone_s: float = 0.0
    relay: RelayCost | None = None

    def step_s(self, computing_s: float) -> float:
        """Return the seconds from a step to the next, given those of a step alone."""
        return self._paced_s(computing_s) + self.waiting_s(computing_s)

    def waiting_s(self, computing_s: float) -> float:
        """Return the seconds of it for which a step waits for rows of other ranks."""
        return 0.0 if self.relay is None else self.relay.waiting_s(self._paced_s(computing_s))

    def _paced_s(self, computing_s: float) -> float:
        """Return the seconds from a step to the next if all rows are here."""
        if self.cores:
            # A thread that draws takes half of the core of one that computes, for which the others wait: on two cores it
            # takes twice its share (docs/notes/0036-batches.md), as long as if it drew before the step.
            share = min(1.0, 2.0 / max(self.cores, 1.0)) if self.ahead else 1.0
            return computing_s + self.lock_s + share * self.sample_s
        if not self.ahead:
            return computing_s + self.upload_s + self.sample_s + self.lock_s
        return max(self._beside(computing_s).values())

    def limit(self, computing_s: float) -> str:
        """Return in words what sets the pace."""
        if self.cores or not self.ahead:
            return "one after the other"
        found = self._beside(computing_s)
        slowest = max(found, key=found.__getitem__)
        if slowest == PYTHON:
            return "as fast as Python passes batches on, by one thread at a time; larger batches take fewer steps"
        if slowest != HOST:
            return f"as fast as {slowest}"
        pace_s = max(seconds for what, seconds in found.items() if what != HOST)
        alone_s = max(self.alone_s, self.sample_s) + self.lock_s
        # a threads keep up if each takes at most a times the pace.
        enough = math.ceil(alone_s * (1 - CROWD) / max(pace_s - CROWD * alone_s, 1e-9))
        if enough <= MAX_AHEAD:
            return f"as fast as the host; sample.ahead = {enough} would keep up"
        return f"as fast as the host; no sample.ahead up to {MAX_AHEAD} keeps up: draw fewer neighbours, or plan more ranks"

    def _beside(self, computing_s: float) -> dict[str, float]:
        """Return the seconds of what runs beside each other."""
        crowded_s = (self.sample_s + self.lock_s) * (1 + CROWD * (self.ahead - 1))
        host = {HOST: crowded_s / self.ahead, PYTHON: self.lock_s}
        if self.beside:
            return {"computing": computing_s, "the upload": self.upload_s} | host
        return {"upload and computing in turn": self.upload_s + computing_s} | host
