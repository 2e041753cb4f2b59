"""Which variant a call of a sparse product takes while a run finds out which is fastest. Imports no torch.

Every variant gives the same bits, so calls that a run has to make anyway do the timing, each in another variant than the
last one. The figures of the machine leave two or three variants of a product; one that is far behind after a call is out
(successive halving: Jamieson and Talwalkar, "Non-stochastic best arm identification and hyperparameter optimization",
AISTATS 2016).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mggcn.backend.spmm_choice import HOPELESS, SpmmChoice, SpmmKey

if TYPE_CHECKING:
    from torch import Tensor

    from mggcn.backend.base import Epilogue, Sparse
    from mggcn.backend.sparse_products import SparseProducts

SAMPLES = 2
"""Calls of a variant that count; the least seconds of them are its own: what it takes when nothing else runs."""
OUT = 1.3
"""A variant that takes as many times the best seconds so far is tried no more; one call may be as far off by chance."""
KEPT_GAIN = 1.05
"""A variant must be faster than the model's by this factor to be taken: less may be chance."""
BUDGET = 0.8
"""Epochs that trying may cost, less than the one that was promised: a call may take longer than was expected."""
REPAID = 16.0
"""The calls that are left must be able to save as many times what a call of a variant takes, if the figures are as wrong as
they ever were: as wrong as they mostly are, they save an eighth of that, and trying costs about as much.
"""
SHORTEST_S = 1e-4
"""Calls that are expected to take less are not tried: they are mostly Python and the waking of threads."""


@dataclass(slots=True)
class Trial:
    """One product: its variants, the model's first, and the seconds of the calls of each that count.

    expected: what the model expects of each, in a unit of its own. Calls are compared with calls alike, such as those that
    end in dropout: the first one says of which `kind`.
    """

    key: SpmmKey
    variants: tuple[SpmmChoice, ...]
    expected: tuple[float, ...]
    seconds: list[list[float]] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    """Variants that the budget does not allow."""
    left_out: bool = False
    """Whether this run has too few calls for some variants, which a longer one would try."""
    kind: Hashable = None

    def __post_init__(self) -> None:
        self.seconds = self.seconds or [[] for _ in self.variants]

    @property
    def next(self) -> int | None:
        """The first variant that was not tried, else of those that are not out the one with the fewest calls.

        The model's, with which all are compared, is never out: one call of it that something disturbed must not decide.
        """
        near = [k == 0 or self.least_s(k) <= OUT * self.least_s(self.fastest) for k in range(len(self.variants))]
        left = [k for k, s in enumerate(self.seconds) if not s or (near[k] and len(s) < SAMPLES)]
        return min((k for k in left if k not in self.dropped), key=lambda k: len(self.seconds[k]), default=None)

    def least_s(self, variant: int) -> float:
        """Return the least seconds of a variant; infinite before its first call."""
        return min(self.seconds[variant], default=math.inf)

    def expected_s(self, variant: int) -> float:
        """Return the expected seconds of a call, scaled by the measured seconds of the model's variant."""
        return self.least_s(0) * self.expected[variant] / self.expected[0]

    @property
    def fastest(self) -> int:
        """The number of the fastest variant; the model's before any was tried."""
        return min(range(len(self.variants)), key=self.least_s)

    @property
    def spent_s(self) -> float:
        """Seconds of all timed calls above what the fastest variant takes."""
        return math.fsum(s - self.least_s(self.fastest) for timed in self.seconds for s in timed)

    @property
    def gain(self) -> float:
        """How many times faster than the model's choice the fastest variant was; 1 before enough calls of the model's."""
        return self.least_s(0) / self.least_s(self.fastest) if len(self.seconds[0]) >= SAMPLES else 1.0

    @property
    def beaten(self) -> bool:
        """Whether the fastest variant is taken instead of the model's."""
        return self.gain >= KEPT_GAIN

    @property
    def winner(self) -> SpmmChoice:
        """The variant that is chosen from what is known, and why."""
        if not self.beaten:
            reason = f"measured: no other variant was {KEPT_GAIN:g} times as fast"
            return dataclasses.replace(self.variants[0], reason=reason)
        reason = f"measured: {self.gain:.2f} times as fast as {self.variants[0].text}"
        return dataclasses.replace(self.variants[self.fastest], reason=reason)

    @property
    def known(self) -> bool:
        """Whether a table may keep the winner: nothing is left to be tried, and the model's variant was called enough."""
        return self.next is None and len(self.seconds[0]) >= SAMPLES and not self.left_out


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of what a run tries."""

    epochs: int | None = None
    """How many it makes at most, in which a trial must be able to repay itself; None: try whatever has variants."""
    budget: float = BUDGET
    """Epochs that trying may cost."""
    slowest: float = HOPELESS
    """Variants that the model expects to take more times its own choice's seconds are not tried."""


class Exploration:
    """The trials of one rank's products, over the runs that share its kernels, and what those of a run cost together.

    Nothing is tried before the first epoch of a run is done, which touches memory for the first time. Of a product that
    training uses, calls of training count and no others, which may do other things beside gathering rows; a product of
    evaluations alone is tried in these.
    """

    def __init__(self) -> None:
        self.winners: dict[Hashable, SpmmChoice] = {}
        """What was found of products, in this run and in those before it."""
        self.open(Limits())
        self.close()

    def open(self, limits: Limits) -> None:
        """Begin a run."""
        self._limits, self._open, self._training, self._epochs = limits, True, False, 0
        self._trials: dict[Hashable, Trial | None] = {}
        self._calls: Counter[Hashable] = Counter()
        self._trained: set[Hashable] = set()
        self.cost_s: float = 0.0
        """Seconds that trying has cost: those of its calls above what the fastest variants take."""
        self.epoch_s: float = math.inf
        """Seconds of the fastest epoch so far."""

    def close(self) -> None:
        """Try no more: every product takes its winner."""
        self._open = False
        self.winners |= {at: trial.winner for at, trial in self._trials.items() if trial is not None}

    @property
    def trials(self) -> tuple[Trial, ...]:
        """The products that this run tries."""
        return tuple(trial for trial in self._trials.values() if trial is not None)

    @property
    def done(self) -> bool:
        """Whether nothing is left to be tried among the products that were called."""
        return self._epochs > 1 and all(trial.next is None for trial in self.trials)

    def begin(self) -> None:
        """Record that a training epoch begins: until it ends, all calls belong to training."""
        self._training = True

    def epoch(self, seconds: float) -> None:
        """Record the end of an epoch, and its seconds."""
        self._training = False
        self._epochs += 1
        self.epoch_s = min(self.epoch_s, seconds)

    def trial(
        self, at: Hashable, propose: Callable[[float], tuple[SpmmKey, Mapping[SpmmChoice, float]]]
    ) -> Trial | None:
        """Return the trial in which a call of the product `at` counts; None if it is not tried.

        propose: as SparseProducts.proposals, for the slowest variant.
        """
        if not self._open or at in self.winners:
            return None
        if (trial := self._trials.get(at)) is not None and trial.next is None:
            self.winners[at] = trial.winner
            return None
        self._calls[at] += 1
        if self._training:
            self._trained.add(at)
        if self._epochs == 0 or (at in self._trained and not self._training):
            return None
        if at not in self._trials:
            key, expected = propose(self._limits.slowest)
            model = next(iter(expected))
            some = {v: s for v, s in expected.items() if v is model or self._may_repay(at, expected[model], s)}
            trial = Trial(key, tuple(some), tuple(some.values()), left_out=len(some) < len(expected))
            self._trials[at] = trial if len(some) > 1 else None
        return self._trials[at]

    def _may_repay(self, at: Hashable, model_s: float, seconds: float) -> bool:
        """Whether the calls that are left may save what trying costs, if the figures are as wrong as they ever were."""
        if self._limits.epochs is None:
            return True
        # This call is the first of its epoch.
        left = (self._limits.epochs - self._epochs) * max(self._calls[at] - 1, 1) / self._epochs
        return model_s >= SHORTEST_S and left * (model_s - seconds / HOPELESS) >= REPAID * seconds

    def sample(self, trial: Trial, kind: Hashable) -> int | None:
        """Return which variant a call takes and times; None: it is not timed. What the budget does not allow is dropped.

        The first epoch is slower than those after it: while it is the only one, half the budget waits for the second.
        """
        allowed = self._limits.budget * self.epoch_s * (0.5 if self._epochs == 1 else 1.0)
        while trial.kind in (None, kind) and (number := trial.next) is not None:
            extra = trial.expected_s(number) - trial.least_s(trial.fastest) if trial.seconds[0] else 0.0
            if self.cost_s + extra <= allowed:
                return number
            if self._epochs == 1:
                return None
            trial.dropped.append(number)
        return None

    def add(self, trial: Trial, kind: Hashable, variant: int, seconds: float) -> None:
        """Count a timed call, which makes earlier ones dearer if it is the fastest so far."""
        before, trial.kind = trial.spent_s, kind
        trial.seconds[variant].append(seconds)
        self.cost_s += trial.spent_s - before

    def explored(self, products: SparseProducts, now: Callable[[], float]) -> ExploredSpmm:
        """Implement Explorer.explored."""
        return ExploredSpmm(products, self, now)


class ExploredSpmm:
    """Sparse products in the variants that an exploration asks for; what a table knows is done as it says."""

    def __init__(self, products: SparseProducts, exploration: Exploration, now: Callable[[], float]) -> None:
        self._products, self._exploration, self._now = products, exploration, now

    def multiply(self, adj: Sparse, h: Tensor, out: Tensor, *, accumulate: bool, epilogue: Epilogue | None) -> None:
        """Implement KernelBackend.spmm."""
        run = functools.partial(self._products.multiply, adj, h, out, accumulate=accumulate, epilogue=epilogue)
        product = self._products.product(adj, h, out) if out.numel() else None
        if product is None or product.measured:
            return run()
        at = (id(product.pattern.schedule), product.width, product.item, product.summed)
        trial = self._exploration.trial(at, functools.partial(self._products.proposals, product, adj, h, out))
        kind = None if trial is None else _kind(adj, accumulate, epilogue)
        number = None if trial is None else self._exploration.sample(trial, kind)
        if trial is None or number is None:
            return run(choice=self._exploration.winners.get(at))
        # Looking at the clock waits for a GPU: calls that are not timed do not.
        began = self._now()
        run(choice=trial.variants[number])
        self._exploration.add(trial, kind, number, self._now() - began)


def _kind(adj: Sparse, accumulate: bool, epilogue: Epilogue | None) -> Hashable:
    """What a product does beside gathering rows: calls that differ in it take different seconds in any variant."""
    weighted = adj.values is not None
    if epilogue is None:
        return weighted, accumulate
    parts = (epilogue.row_scale, epilogue.bias, epilogue.dropout, epilogue.out_scale)
    return (weighted, accumulate, epilogue.relu, *(part is not None for part in parts))
