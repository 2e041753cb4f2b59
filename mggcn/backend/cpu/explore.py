"""Which way the next call of a sparse product takes while a run finds out which is fastest. Needs no torch, reads no clock.

Every way gives the same bits, so the epochs of a run do the timing themselves. The ways of a product are tried once each,
those first that the model expects to be fast; who is far behind is out, the others go on (successive halving: Jamieson and
Talwalkar, "Non-stochastic best arm identification and hyperparameter optimization", AISTATS 2016).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from mggcn.backend.cpu.machine import Caches
from mggcn.backend.cpu.sizes import real_bytes, spmm_bytes, way_bytes
from mggcn.backend.cpu.variants import MatrixTraits, SpmmChoice, SpmmKey, candidates, expected_ns

SAMPLES = 3
"""Calls of a way that count; the least seconds of them are its own: what it takes when nothing else runs."""
OUT = 1.3
"""A way that takes as many times the best seconds so far is tried no more; one call may be as far off by chance. The
model's way, with which all are compared, is never out."""
KEPT_GAIN = 1.05
"""A way must be faster than the model's by this factor to be kept: less may be chance."""
HOPELESS = 2.0
"""A way is not tried if the model expects it to take as many times what its own choice takes."""
BUDGET = 1.5
"""Epochs that exploring may cost by default."""


def proposals(
    matrix: MatrixTraits, width: int, item: int, caches: Caches, model: SpmmChoice, *, summed: bool
) -> tuple[SpmmChoice, ...]:
    """Return the ways to be tried: the model's choice, then the others, the one that it expects to be fastest first.

    Left out are those that it expects to be hopeless, and those that work in more than a plan reckons with. Arguments as
    for `choose_spmm`.
    """
    gathered = min(matrix.columns, matrix.nnz)
    planned = spmm_bytes(matrix.rows, gathered, matrix.nnz, width, item, real_bytes(item), caches)
    limit = HOPELESS * expected_ns(matrix, width, item, caches, model)
    costs = [
        (expected_ns(matrix, width, item, caches, way), way)
        for way in candidates(matrix, width, item, caches, summed=summed).values()
        if way != dataclasses.replace(model, reason="") and way_bytes(matrix, width, item, way) <= planned
    ]
    return (model, *(way for cost, way in sorted(costs, key=lambda pair: pair[0]) if cost <= limit))


@dataclass(slots=True)
class Trial:
    """One product: its ways, the model's first, and the seconds of the calls of each that count.

    Calls are compared with calls alike, such as those that end in dropout: the first one says of which kind. It is a
    warm-up and does not count.
    """

    key: SpmmKey
    ways: tuple[SpmmChoice, ...]
    seconds: list[list[float]] = field(default_factory=list)
    stopped: bool = False
    _kind: Hashable = field(init=False, default=None)
    _warm: bool = field(init=False, default=False)
    _decided: SpmmChoice | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.seconds = self.seconds or [[] for _ in self.ways]

    def turn(self, kind: Hashable) -> int | None:
        """Return the number of the way whose seconds the next call gives to `took`; None: it goes the `winner`'s way."""
        if self._decided is not None:
            return None
        if self.over:
            self._decided = self.winner
            return None
        if not self._warm:
            self._kind, self._warm = kind, True
            return None
        return self._next if kind == self._kind else None

    def took(self, turn: int, seconds: float) -> None:
        """Count a call."""
        self.seconds[turn].append(seconds)

    @property
    def _next(self) -> int | None:
        """The first way that was not tried, else of those that are not out the one with the fewest samples."""
        left = [k for k, values in enumerate(self.seconds) if len(values) < SAMPLES and not self._out(k)]
        return min(left, key=lambda k: len(self.seconds[k]), default=None)

    def _out(self, way: int) -> bool:
        return way != 0 and bool(self.seconds[way]) and self._least(way) > OUT * self.best_s

    def _least(self, way: int) -> float:
        return min(self.seconds[way], default=math.inf)

    @property
    def best_s(self) -> float:
        """The least seconds of any way; infinite before the first."""
        return min(map(min, filter(None, self.seconds)), default=math.inf)

    @property
    def complete(self) -> bool:
        """Whether nothing is left to be tried."""
        return len(self.ways) == 1 or self._next is None

    @property
    def over(self) -> bool:
        return self.stopped or self.complete

    @property
    def spent_s(self) -> float:
        """Seconds of the calls that counted above what the fastest way takes."""
        best = self.best_s
        return math.fsum(seconds - best for values in self.seconds for seconds in values)

    @property
    def fastest(self) -> int:
        """The number of the fastest way; the model's before any was tried."""
        return min(range(len(self.ways)), key=self._least)

    @property
    def gain(self) -> float:
        """How many times faster than the model's choice the fastest way was; 1 before both were tried."""
        return self._least(0) / self.best_s if self.seconds[0] else 1.0

    @property
    def beaten(self) -> bool:
        """Whether the fastest way is taken in place of the model's: by less than `OUT` only after enough calls of both.

        Not before enough calls of the model's, of which one may have been disturbed, unless no more will come.
        """
        fastest, known = self.fastest, len(self.seconds[0]) >= SAMPLES
        if fastest == 0 or not (known or self.stopped):
            return False
        return self.gain >= (KEPT_GAIN if known and len(self.seconds[fastest]) >= SAMPLES else OUT)

    @property
    def winner(self) -> SpmmChoice:
        """The way that is taken by what is known."""
        if self._decided is not None:
            return self._decided
        if not self.beaten:
            return self.ways[0]
        reason = f"measured: {self.gain:.2f} times as fast as {self.ways[0].text}"
        return dataclasses.replace(self.ways[self.fastest], reason=reason)

    @property
    def kept(self) -> SpmmChoice | None:
        """What a table gets, None if too little is known to decide for good, though the run may go the `winner`'s way."""
        if self.beaten:
            return self.winner if len(self.seconds[0]) >= SAMPLES else None
        if not (self.complete and self.seconds[0]):
            return None
        return dataclasses.replace(self.ways[0], reason=f"measured: no other way was {KEPT_GAIN:g} times as fast")

    def plain(self) -> dict[str, Any]:
        """Return it as what JSON holds."""
        ways = [dataclasses.asdict(way) for way in self.ways]
        return {"key": dataclasses.asdict(self.key), "ways": ways, "seconds": self.seconds, "stopped": self.stopped}

    @staticmethod
    def of(plain: dict[str, Any]) -> Trial:
        """Return the trial that `plain` describes."""
        ways = tuple(SpmmChoice(**way) for way in plain["ways"])
        return Trial(SpmmKey(**plain["key"]), ways, plain["seconds"], plain["stopped"])


class Exploration:
    """The trials of one rank's products, and what they cost together.

    Nothing is explored before the first epoch is done, which touches memory for the first time, nor once the calls have
    taken `budget` epochs more than the fastest ways would have. Of a product that training uses, calls of training count
    and no others, which may do other things beside gathering rows; a product of evaluations alone is explored in these.
    """

    def __init__(self, budget: float = BUDGET) -> None:
        self._budget = budget
        self._trials: dict[Hashable, Trial] = {}
        self._asked: set[Hashable] = set()
        self._called: set[Hashable] = set()
        self._called_before: set[Hashable] = set()
        self._trained: set[Hashable] = set()
        self._training = False
        self._epochs = 0
        self._spent_s = self._forgotten_s = 0.0
        self._closed = False
        self.epoch_s = math.inf
        """Seconds of the fastest epoch so far."""

    @property
    def trials(self) -> tuple[Trial, ...]:
        return tuple(self._trials.values())

    @property
    def untried(self) -> int:
        """How many products were asked for since set-up and have no trial: too few epochs, or the budget was spent."""
        return len(self._asked) - len(self._trials)

    def trial(self, at: Hashable, make: Callable[[], Trial]) -> Trial | None:
        """Return the trial of the product `at`, made when it is first asked for; None if it is not explored (any more).

        What evaluations have found of a product is forgotten when training first asks for it.
        """
        if self._training and at not in self._trained:
            self._trained.add(at)
            if at in self._trials and not self._closed:
                self._forgotten_s += self._trials.pop(at).spent_s
        self._called.add(at)
        if self._training or self._epochs:
            self._asked.add(at)
        found = self._trials.get(at)
        if found is None and self._epochs and not self._closed and self._counts(at):
            found = self._trials[at] = make()
        return found

    def turn(self, at: Hashable, kind: Hashable) -> int | None:
        """Return which way the next call of the product `at` tries, as `Trial.turn` does; None: the winner's."""
        return self._trials[at].turn(kind) if self._counts(at) else None

    def _counts(self, at: Hashable) -> bool:
        return self._training or at not in self._trained

    def took(self, trial: Trial, turn: int, seconds: float) -> None:
        """Count a call, which may be the last that the budget pays for."""
        before = trial.spent_s
        trial.took(turn, seconds)
        self._spent_s += trial.spent_s - before
        self._reckon()

    def begin(self) -> None:
        """Note that a training epoch begins: until it is done, all calls are of training."""
        self._training = True

    def epoch(self, seconds: float) -> None:
        """Note that an epoch is done, and its seconds."""
        self._training = False
        self._called_before, self._called = self._called, set()
        self._epochs += 1
        self.epoch_s = min(self.epoch_s, seconds)
        self._reckon()

    def close(self) -> None:
        """Explore no more: every product goes its winner's way."""
        self._closed = True
        for trial in self._trials.values():
            trial.stopped = True

    @property
    def done(self) -> bool:
        """Whether nothing is left to explore among the products that were called since the end of the last epoch but one.

        Those of evaluations that come every k-th epoch are not waited for.
        """
        called = self._called | self._called_before
        over = all(trial.over for at, trial in self._trials.items() if at in called)
        return self._closed or (self._epochs > 1 and over)

    @property
    def cost_s(self) -> float:
        """Seconds that exploring has cost: those of its calls above what the fastest ways take."""
        return self._forgotten_s + math.fsum(trial.spent_s for trial in self._trials.values())

    def _reckon(self) -> None:
        if not self._closed and self._spent_s >= self._budget * self.epoch_s:
            self.close()
