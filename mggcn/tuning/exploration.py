"""Which variant the next call of a sparse product takes while a run finds out which is fastest. Imports no torch.

Every variant gives the same bits, so the epochs of a run do the timing themselves. The variants of a product are tried once
each, those first that the model expects to be fast; one that is far behind is out, the others go on (successive halving:
Jamieson and Talwalkar, "Non-stochastic best arm identification and hyperparameter optimization", AISTATS 2016).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mggcn.backend.spmm_choice import SpmmChoice, SpmmKey

if TYPE_CHECKING:
    from torch import Tensor

    from mggcn.backend.base import Epilogue, Sparse
    from mggcn.backend.sparse_products import SparseProducts

SAMPLES = 3
"""Calls of a variant that count; the least seconds of them are its own: what it takes when nothing else runs."""
OUT = 1.3
"""A variant that takes as many times the best seconds so far is tried no more; one call may be as far off by chance."""
KEPT_GAIN = 1.05
"""A variant must be faster than the model's by this factor to be kept: less may be chance."""
BUDGET = 1.5
"""Epochs that exploring may cost by default."""


@dataclass(slots=True)
class Trial:
    """One product: its variants, the model's first, and the seconds of the calls of each that count.

    Calls are compared with calls alike, such as those that end in dropout: the first one says of which kind. It is a
    warm-up and does not count.
    """

    key: SpmmKey
    variants: tuple[SpmmChoice, ...]
    seconds: list[list[float]] = field(default_factory=list)
    stopped: bool = False
    _kind: Hashable = None
    _warm: bool = False
    _decided: SpmmChoice | None = None

    def __post_init__(self) -> None:
        self.seconds = self.seconds or [[] for _ in self.variants]

    def sample(self, kind: Hashable) -> int | None:
        """Return the number of the variant that the next call times; None: it is not timed and takes the `winner`."""
        if self._decided is None and self.over:
            self._decided = self.winner
        if self._decided is not None:
            return None
        if not self._warm:
            self._kind, self._warm = kind, True
            return None
        return self._next if kind == self._kind else None

    @property
    def _next(self) -> int | None:
        """The first variant that was not tried, else of those that are not out the one with the fewest samples.

        The model's, with which all are compared, is never out: one call of it that something disturbed must not decide.
        """
        limit = OUT * self.best_s
        left = [
            k
            for k, values in enumerate(self.seconds)
            if len(values) < SAMPLES and (k == 0 or not values or min(values) <= limit)
        ]
        return min(left, key=lambda k: len(self.seconds[k]), default=None)

    def least_s(self, variant: int) -> float:
        """Return the least seconds of a variant; infinite before its first call."""
        return min(self.seconds[variant], default=math.inf)

    @property
    def best_s(self) -> float:
        """The least seconds of any variant; infinite before the first."""
        return self.least_s(self.fastest)

    @property
    def fastest(self) -> int:
        """The number of the fastest variant; the model's before any was tried."""
        return min(range(len(self.variants)), key=self.least_s)

    @property
    def complete(self) -> bool:
        """Whether nothing is left to be tried."""
        return len(self.variants) == 1 or self._next is None

    @property
    def over(self) -> bool:
        return self.stopped or self.complete

    @property
    def spent_s(self) -> float:
        """Seconds of the calls that counted above what the fastest variant takes."""
        best = self.best_s
        return math.fsum(seconds - best for values in self.seconds for seconds in values)

    @property
    def gain(self) -> float:
        """How many times faster than the model's choice the fastest variant was; 1 before both were tried."""
        return self.least_s(0) / self.best_s if self.seconds[0] else 1.0

    @property
    def beaten(self) -> bool:
        """Whether the fastest variant is taken in place of the model's: by less than `OUT` only after enough calls of both.

        Not before enough calls of the model's, of which one may have been disturbed, unless no more will come.
        """
        fastest, known = self.fastest, len(self.seconds[0]) >= SAMPLES
        if fastest == 0 or not (known or self.stopped):
            return False
        return self.gain >= (KEPT_GAIN if known and len(self.seconds[fastest]) >= SAMPLES else OUT)

    @property
    def winner(self) -> SpmmChoice:
        """The variant that is taken by what is known."""
        if self._decided is not None or not self.beaten:
            return self._decided or self.variants[0]
        reason = f"measured: {self.gain:.2f} times as fast as {self.variants[0].text}"
        return dataclasses.replace(self.variants[self.fastest], reason=reason)

    @property
    def kept(self) -> SpmmChoice | None:
        """What a table gets, None if too little is known to decide for good, though the run may take the `winner`."""
        if self.beaten:
            return self.winner if len(self.seconds[0]) >= SAMPLES else None
        if not (self.complete and self.seconds[0]):
            return None
        return dataclasses.replace(
            self.variants[0], reason=f"measured: no other variant was {KEPT_GAIN:g} times as fast"
        )


class Exploration:
    """The trials of one rank's products, and what they cost together.

    Nothing is explored before the first epoch is done, which touches memory for the first time, nor once the calls have
    taken `budget` epochs more than the fastest variants would have. Of a product that training uses, calls of training
    count and no others, which may do other things beside gathering rows; a product of evaluations alone is explored in
    these.
    """

    def __init__(self, budget: float = BUDGET) -> None:
        self._budget = budget
        self._trials: dict[Hashable, Trial] = {}
        # Products asked for since set-up, since the last epoch, in the epoch before that, and in training.
        self._asked: set[Hashable] = set()
        self._called: set[Hashable] = set()
        self._called_before: set[Hashable] = set()
        self._trained: set[Hashable] = set()
        self._training = False
        self._epochs = 0
        self._closed = False
        self.cost_s = 0.0
        """Seconds that exploring has cost: those of its calls above what the fastest variants take."""
        self.epoch_s = math.inf
        """Seconds of the fastest epoch so far."""

    @property
    def trials(self) -> tuple[Trial, ...]:
        return tuple(self._trials.values())

    @property
    def untried(self) -> int:
        """How many products were asked for since set-up and have no trial: too few epochs, or the budget was spent."""
        return len(self._asked) - len(self._trials)

    def explored(self, products: SparseProducts, now: Callable[[], float]) -> ExploredSpmm:
        """As Explorer.explored."""
        return ExploredSpmm(products, self, now)

    def trial(self, at: Hashable, make: Callable[[], Trial]) -> Trial | None:
        """Return the trial of the product `at`, made when it is first asked for; None if it is not explored (any more).

        What evaluations have found of a product is forgotten when training first asks for it, not what it cost.
        """
        if self._training and at not in self._trained:
            self._trained.add(at)
            if not self._closed:
                self._trials.pop(at, None)
        self._called.add(at)
        if self._training or self._epochs:
            self._asked.add(at)
        if at not in self._trials and self._epochs and not self._closed and self._counts(at):
            self._trials[at] = make()
        return self._trials.get(at)

    def sample(self, at: Hashable, kind: Hashable) -> int | None:
        """Return which variant the next call of the product `at` times, as `Trial.sample` does; None: it is not timed."""
        return self._trials[at].sample(kind) if self._counts(at) else None

    def _counts(self, at: Hashable) -> bool:
        return self._training or at not in self._trained

    def add(self, trial: Trial, variant: int, seconds: float) -> None:
        """Count a call, which may be the last that the budget pays for."""
        before = trial.spent_s
        trial.seconds[variant].append(seconds)
        # A call that is the fastest so far makes the earlier ones dearer.
        self.cost_s += trial.spent_s - before
        self._heed_budget()

    def begin(self) -> None:
        """Note that a training epoch begins: until it is done, all calls are of training."""
        self._training = True

    def epoch(self, seconds: float) -> None:
        """Note that an epoch is done, and its seconds."""
        self._training = False
        self._called_before, self._called = self._called, set()
        self._epochs += 1
        self.epoch_s = min(self.epoch_s, seconds)
        self._heed_budget()

    def close(self) -> None:
        """Explore no more: every product takes its winner."""
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

    def _heed_budget(self) -> None:
        if not self._closed and self.cost_s >= self._budget * self.epoch_s:
            self.close()


class ExploredSpmm:
    """Sparse products in the variants that an exploration asks for; what a table knows is done as it says."""

    def __init__(self, products: SparseProducts, exploration: Exploration, now: Callable[[], float]) -> None:
        self._products = products
        self._exploration = exploration
        self._now = now

    def multiply(self, adj: Sparse, h: Tensor, out: Tensor, *, accumulate: bool, epilogue: Epilogue | None) -> None:
        """As KernelBackend.spmm."""
        exploration, at, trial = self._exploration, None, None
        product = self._products.product(adj, h, out) if out.numel() else None
        if product is not None and not product.measured:
            at = (id(product.pattern.schedule), product.width, product.item, product.summed)
            trial = exploration.trial(at, lambda: Trial(*self._products.proposals(product, adj, h, out)))
        number = None if trial is None else exploration.sample(at, _kind(adj, accumulate, epilogue))
        choice = None if trial is None else trial.winner if number is None else trial.variants[number]
        # Looking at the clock waits for a GPU: calls that are not timed do not.
        began = 0.0 if number is None else self._now()
        self._products.multiply(adj, h, out, accumulate=accumulate, epilogue=epilogue, choice=choice)
        if trial is not None and number is not None:
            exploration.add(trial, number, self._now() - began)


def _kind(adj: Sparse, accumulate: bool, epilogue: Epilogue | None) -> Hashable:
    """What a product does beside gathering rows: calls that differ in it take different seconds in any variant."""
    weighted = adj.values is not None
    if epilogue is None:
        return weighted, accumulate
    parts = (epilogue.row_scale, epilogue.bias, epilogue.dropout, epilogue.out_scale)
    return (weighted, accumulate, epilogue.relu, *(part is not None for part in parts))
