"""`mggcn tune --store`: times every variant of the sparse products of a run, and finds the fastest of each.

A variant that is far behind after a call is out (successive halving: Jamieson and Talwalkar, "Non-stochastic best arm
identification and hyperparameter optimization", AISTATS 2016).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mggcn.assemble.plan import memory_limit, plan_graph
from mggcn.assemble.rank import gpu_of_rank, make_rank
from mggcn.backend.spmm_choice import SpmmChoice, SpmmKey
from mggcn.config import Config
from mggcn.errors import ConfigError
from mggcn.graph.csr import Graph
from mggcn.planning.advice import require_fit
from mggcn.runs.local import on_local_ranks

if TYPE_CHECKING:
    from torch import Tensor

    from mggcn.backend.base import Epilogue, Sparse
    from mggcn.backend.cuda.base import Device
    from mggcn.backend.sparse_products import SparseProducts
    from mggcn.comm.base import Communicator
    from mggcn.train.engine import Stop

SAMPLES = 3
"""Calls of a variant that count; the least seconds of them are its own: what it takes when nothing else runs."""
OUT = 1.3
"""A variant that takes as many times the best seconds so far is called no more; one call may be as far off by chance."""
KEPT_GAIN = 1.05
"""A variant must be faster than the model's by this factor to be taken: less may be chance."""
BUDGET = 40.0
"""Epochs' seconds that timing may take by default: once some twenty variants of products that take most of an epoch."""
LEAST_S = 1.0
"""Seconds that timing may take whatever an epoch does: short ones are mostly Python, and so is timing theirs."""
REPORT_S = 10.0
"""Seconds between two lines that tell how far it is."""


@dataclass(slots=True)
class Trial:
    """One product: its variants, the model's first, and the seconds of the calls of each."""

    key: SpmmKey
    variants: tuple[SpmmChoice, ...]
    seconds: list[list[float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.seconds = self.seconds or [[] for _ in self.variants]

    @property
    def next(self) -> int | None:
        """The first variant that was not called, else of those that are not out the one with the fewest calls.

        The model's, with which all are compared, is never out: one call of it that something disturbed must not decide.
        """
        best = self.least_s(self.fastest)
        near = [k == 0 or self.least_s(k) <= OUT * best for k in range(len(self.variants))]
        left = [k for k, s in enumerate(self.seconds) if not s or (near[k] and len(s) < SAMPLES)]
        return min(left, key=lambda k: len(self.seconds[k]), default=None)

    @property
    def known(self) -> bool:
        """Whether nothing is left to be called."""
        return self.next is None

    def least_s(self, variant: int) -> float:
        """Return the least seconds of a variant; infinite before its first call."""
        return min(self.seconds[variant], default=math.inf)

    @property
    def fastest(self) -> int:
        """The number of the fastest variant; the model's before any was called."""
        return min(range(len(self.variants)), key=self.least_s)

    @property
    def gain(self) -> float:
        """How many times faster than the model's choice the fastest variant was, once all are known."""
        return self.least_s(0) / self.least_s(self.fastest)

    @property
    def beaten(self) -> bool:
        """Whether the fastest variant is taken instead of the model's."""
        return self.known and self.gain >= KEPT_GAIN

    @property
    def winner(self) -> SpmmChoice:
        """The variant that is chosen from what is known, and why."""
        if not self.beaten:
            reason = f"measured: no other variant was {KEPT_GAIN:g} times as fast"
            return dataclasses.replace(self.variants[0], reason=reason)
        reason = f"measured: {self.gain:.2f} times as fast as {self.variants[0].text}"
        return dataclasses.replace(self.variants[self.fastest], reason=reason)

    @property
    def text(self) -> str:
        """The product, what the model chose and why, the least ms of each variant (and its calls), and which is taken."""
        key, model = self.key, self.variants[0]
        called = (
            f"{variant.text} {1e3 * min(s):.2f} ({len(s)})"
            for variant, s in zip(self.variants, self.seconds, strict=True)
            if s
        )
        return (
            f"{key.rows:,} x {key.columns:,}, {key.nnz:,} nonzeros, width {key.width}, {key.item} bytes; "
            f"the model: {model.text}, {model.reason}; ms: {'; '.join(called)}; "
            + (f"taken: {self.winner.text}, {self.winner.reason}" if self.known else "left open")
        )


@dataclass(frozen=True, slots=True)
class Findings:
    """The findings of all ranks: (rank, trial) of every product that has several variants."""

    trials: tuple[tuple[int, Trial], ...]
    seconds: float
    """How long timing took."""

    def kept(self) -> dict[SpmmKey, SpmmChoice]:
        """Return the choices to record. Of equal products on several ranks, the one that gained most decides."""
        ordered = sorted((trial for _, trial in self.trials if trial.known), key=lambda trial: trial.gain)
        return {trial.key: trial.winner for trial in ordered}

    @property
    def text(self) -> str:
        """Describe in words how many products take a variant other than the model's."""
        if not self.trials:
            return "no sparse product of this run has several variants"
        beaten, open_ = (sum(values) for values in zip(*((t.beaten, not t.known) for _, t in self.trials), strict=True))
        return (
            f"{beaten} of {len(self.trials)} sparse products take another variant than the model's"
            f"{f', {open_} left open' if open_ else ''}; timing them took {self.seconds:.1f} s"
        )

    def lines(self) -> list[str]:
        """Return a line for each product."""
        return [f"rank {rank}: {trial.text}" for rank, trial in self.trials]


@dataclass(frozen=True, slots=True)
class Call:
    """A sparse product of an epoch, as it was called first."""

    products: SparseProducts
    adj: Sparse
    h: Tensor
    out: Tensor
    options: dict[str, Any]
    """Whether it accumulates, and its epilogue."""

    def trial(self) -> Trial:
        """Return the product with the variants to be timed, ready for it."""
        product = self.products.product(self.adj, self.h, self.out)
        return Trial(*self.products.proposals(product, self.adj, self.h, self.out))

    def run(self, choice: SpmmChoice) -> None:
        self.products.multiply(self.adj, self.h, self.out, choice=choice, **self.options)


class Recorded:
    """Sparse products that note in `calls` the first call of each kind."""

    def __init__(self, calls: dict[Hashable, Call], products: SparseProducts) -> None:
        self._calls, self._products = calls, products

    def multiply(self, adj: Sparse, h: Tensor, out: Tensor, *, accumulate: bool, epilogue: Epilogue | None) -> None:
        """Implement KernelBackend.spmm."""
        options = {"accumulate": accumulate, "epilogue": epilogue}
        if out.numel():
            at = (id(adj.schedule), out.shape[1], h.dtype, out.dtype)
            self._calls.setdefault(at, Call(self._products, adj, h, out, options))
        self._products.multiply(adj, h, out, accumulate=accumulate, epilogue=epilogue)


def tune_products(
    config: Config,
    graph: Graph,
    budget: float,
    report: Callable[[str], None],
    stop: Stop,
    device_of: Callable[[Config, Communicator], Device] = gpu_of_rank,
) -> Findings:
    """Train two epochs without a run folder, and time all variants of their products and of an evaluation's, on the
    operands that they had.

    Ranks are threads and time at once, as they multiply in a run. report: called now and then with how far it is. stop:
    ends it after a call, with what is known. device_of: which device serves a rank under run.device cuda.
    Cost: set-up, two epochs, then about `budget` epochs' seconds at most; memory as planned.
    Raises: ConfigError for cuSPARSE's products; PlanError if it does not fit; GraphError; TrainError.
    """
    if config.run.spmm != "own":
        raise ConfigError(f"mggcn tune --store times mggcn's own products, got debug.spmm {config.run.spmm}; use own")
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, epochs=2))
    plan, partition = plan_graph(config, graph)
    require_fit(plan, memory_limit(config))

    def body(comm: Communicator) -> tuple[list[Trial], float]:
        calls: dict[Hashable, Call] = {}
        wrap = functools.partial(Recorded, calls)
        rank = make_rank(config, graph, plan, partition, comm, device_of=device_of, wrap_spmm=wrap)
        calls.clear()  # A X, a product of set-up alone: no epoch makes it
        rank.trainer.step(0)  # touches memory for the first time
        began = time.perf_counter()
        rank.trainer.step(1)
        most_s = max(budget * (time.perf_counter() - began), LEAST_S)
        programs = rank.trainer.runtime.programs
        if "evaluate" not in programs or programs["evaluate"].aggregations != programs["train"].aggregations:
            rank.trainer.evaluate()
        told = report if comm.rank == 0 else _untold
        began = time.perf_counter()
        trials = time_calls(list(calls.values()), most_s, rank.trainer.runtime.backend.synchronize, told, stop)
        return trials, time.perf_counter() - began

    ranks: list[tuple[list[Trial], float]] = on_local_ranks(config, body)
    found = [(rank, trial) for rank, (trials, _) in enumerate(ranks) for trial in trials]
    return Findings(tuple(found), max(seconds for _, seconds in ranks))


def _untold(text: str) -> None:
    """Say nothing: rank 0 does."""


def time_calls(
    calls: Sequence[Call], seconds: float, synchronize: Callable[[], None], report: Callable[[str], None], stop: Stop
) -> list[Trial]:
    """Time the variants of the calls that have several, and return what is known after so many seconds at most.

    Products take turns, as in an epoch: none finds in the cache what it has just gathered. Operands are overwritten.
    """
    # What epochs left in shared memory may be of another type: read as numbers it may be subnormal, which is slow.
    for call in calls:
        call.out.zero_()
    for call in calls:
        call.h.fill_(1.0)
    timed = [(trial, call) for call in calls if len((trial := call.trial()).variants) > 1]
    trials = [trial for trial, _ in timed]
    told = began = time.perf_counter()
    while not all(trial.known for trial in trials):
        for trial, call in timed:
            if (number := trial.next) is None:
                continue
            if stop.signal or time.perf_counter() > began + seconds:
                return trials
            trial.seconds[number].append(call_s(call, trial.variants[number], synchronize))
        if time.perf_counter() >= told + REPORT_S:
            told = time.perf_counter()
            report(progress(trials))
    return trials


def call_s(call: Call, choice: SpmmChoice, synchronize: Callable[[], None]) -> float:
    """Return the seconds of one call, until the device is done with it."""
    synchronize()
    began = time.perf_counter()
    call.run(choice)
    synchronize()
    return time.perf_counter() - began


def progress(trials: Sequence[Trial]) -> str:
    """Describe how far a rank is."""
    called = sum(len(seconds) for trial in trials for seconds in trial.seconds)
    known = sum(trial.known for trial in trials)
    return f"{called} calls: {known} of {len(trials)} sparse products are known (rank 0)"
