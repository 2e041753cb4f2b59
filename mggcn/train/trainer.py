"""A planned model on one rank: run the program, sum over ranks, step, evaluate, as the loop asks (train/engine.py).

P ranks, C classes.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from mggcn.blocks.block import OWNED
from mggcn.comm.counting import CountingCommunicator
from mggcn.config import Config
from mggcn.feed.batch import Feed, WholeGraph
from mggcn.planning.run import RankPlan
from mggcn.planning.task import LOWER_IS_BETTER
from mggcn.train.block_evaluator import SplitScores
from mggcn.train.checkpoint import Progress
from mggcn.train.comparison import Comparison
from mggcn.train.engine import Scores, Stop, diverged, refuse_skipped
from mggcn.train.epoch import LOSS, LoadBatch, Repeated, TrainingEpoch
from mggcn.train.heartbeat import Heartbeat
from mggcn.train.link_scores import LinkScores
from mggcn.train.log import RunLog
from mggcn.train.loop import Loop, OnEpoch
from mggcn.train.metrics import Counts, counted
from mggcn.train.optimizer import Optimizer, learning_rate
from mggcn.train.ranking import RankingScores
from mggcn.train.repeats import summary
from mggcn.train.runtime import RankRuntime
from mggcn.train.samples import EpochSeconds
from mggcn.train.score_parts import TakeScores, behind_scores, in_parts
from mggcn.train.threads import ThreadChoice
from mggcn.train.timeline import Watch

WAITED: Final = "disk_wait_seconds"


class RankTrainer:
    """Trains one model on one rank's shard."""

    def __init__(
        self,
        config: Config,
        plan: RankPlan,
        runtime: RankRuntime,
        comm: CountingCommunicator,
        metric: str,
        ranking: RankingScores | LinkScores | None,
        stop: Stop,
        watch: Watch,
        threads: ThreadChoice | None = None,
        feed: Feed | None = None,
        load: LoadBatch = lambda batch: None,
        alike: bool = True,
        by_blocks: SplitScores | None = None,
    ) -> None:
        self._config = config
        self._plan = plan
        self.runtime = runtime
        self._comm = comm
        self.rank: int = plan.rank
        self.size: int = comm.size
        self.metric = metric
        self.lower_is_better: bool = metric in LOWER_IS_BETTER
        self.queue_s: float = runtime.backend.queue_s
        self._ranking = ranking
        self._stop = stop
        self._optimizer = Optimizer(config.train, runtime.weights, runtime.learned)
        self._feed: Feed = feed or WholeGraph()
        self._epoch = TrainingEpoch(config.train, runtime, comm, self._optimizer, watch, self._feed, load, alike)
        self.steps: int = self._epoch.steps
        self.compare_every: int = 0 if plan.programs.exact is None else config.sample.compare_gradient
        self._comparison = Comparison(runtime, self._epoch) if self.compare_every else None
        self._score_again = Repeated(lambda: runtime.run(runtime.programs["evaluate"]), runtime.backend, comm)
        self._by_blocks = by_blocks
        self._best = torch.zeros_like(runtime.weights.flat)
        self.progress: Progress = Progress()
        self.epoch_seconds: EpochSeconds = EpochSeconds()
        self.threads = threads
        """Chooses how many threads compute; None: always all."""
        self._start: Mapping[str, torch.Tensor] | None = None
        self._set_up: dict[str, float] = _moved(runtime)
        self._step_moved: dict[str, float] = {}
        self._initialize(config.train.seed)

    def warm_start(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Begin with these weights, every repeat too. Raises: ConfigError if they are those of another model."""
        self._start = weights
        self._initialize(self._seed)
        if self.runtime.learned is not None:
            self._start = None  # the rows of all vertices, of a run without repeats

    def _initialize(self, seed: int) -> None:
        """Set the weights that a repeat begins with."""
        self.runtime.initialize(seed)
        if self._start is not None:
            self.runtime.load_weights(self._start)

    def gradients(self, epoch: int) -> float:
        """Run forward, loss and backward of an epoch's first step; return the loss.

        The summed gradients are left in weights.grad. Raises: DivergedError if the loss is not finite.
        """
        self.runtime.backend.activate()
        step = epoch * self.steps
        self._epoch.start(self._seed, step)
        self.runtime.begin_epoch(step)
        self._epoch.gradients(epoch)
        loss = float(self.runtime.signals[LOSS])
        if not math.isfinite(loss):
            raise diverged(self, step, loss)
        return loss

    def step(self, epoch: int) -> float:
        """Train one epoch and return its loss, of several steps their mean. Raises: as `gradients`."""
        self.runtime.backend.activate()
        first, end = epoch * self.steps, (epoch + 1) * self.steps
        self._epoch.start(self._seed, first)
        losses: list[float] = []
        while first < end:
            last = min(end, self.window_end(first))
            signals = self.advance(first, last)
            refuse_skipped(self, first, signals)
            losses += signals[:, LOSS].tolist()
            first = last
        return functools.reduce(operator.add, losses) / self.steps

    @property
    def states(self) -> dict[str, str]:
        """How epochs and evaluations are launched: Repeatable.state of each."""
        return {"epoch": self._epoch.state, "evaluation": self._score_again.state}

    @property
    def _seed(self) -> int:
        return self._config.train.seed + self.progress.run

    def advance(self, first: int, last: int) -> npt.NDArray[np.float64]:
        """Train steps first .. last - 1 and return their signals, summed over ranks. Raises: CommError, PlanError.

        From a step on whose loss or gradient is not finite no weight is moved, and STOP is NaN.
        """
        before = _moved(self.runtime)
        for step in range(first, last):
            self._epoch.run(step)
        self._comm.synchronize()
        # Every step moves the same bytes: those of an epoch, which is one step where rows are on disk.
        self._step_moved = {
            name: (total - before[name]) / (last - first) for name, total in _moved(self.runtime).items()
        }
        return self._epoch.history(first, last)

    def remedy(self, step: int) -> str:
        """Implement Engine.remedy; it names layer and rank."""
        where = self._epoch.origin(self._seed, step)
        return f"train.lr (now {self._config.train.lr}) or check the features for huge values; {where}"

    def evaluate(self) -> Scores:
        """Run the forward pass without dropout and return the scores of the three splits."""
        if self._ranking is not None:
            self._forward()
            return self._ranking.scores(self.logits())
        return counted(self.metric, self.count(), self.runtime.inputs.target.known)

    @contextlib.contextmanager
    def scoring_with(self, state: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Have other weights inside, those of the run's best score; learned rows are then the best ones of this rank."""
        weights, learned = self.runtime.weights, self.runtime.learned
        before = weights.state_dict()
        best = learned is not None and self.progress.best is not None
        weights.load_state_dict(state)
        if learned is not None and best:
            learned.swap_best()
        yield
        if learned is not None and best:
            learned.swap_best()
        weights.load_state_dict(before)

    def links(self) -> dict[str, Scores]:
        """Run the forward pass without dropout and return every score of the links of each split that has any."""
        self._forward()
        every = self._ranking.every(self.logits()) if isinstance(self._ranking, LinkScores) else {}
        return {name: found for name, found in every.items() if found}

    def count(self, take: TakeScores | None = None) -> Counts:
        """Run the forward pass without dropout and return the counts (3, 3, C) of all ranks, valid until the next one.

        take: gets the logits of all rows, as `each_scores`.
        """
        runtime = self.runtime
        self._forward(take)
        if self._comm.size > 1:
            self._comm.all_reduce(runtime.counts, runtime.backend.record()).wait()
            self._comm.synchronize()
        counts: Counts = runtime.counts.cpu().numpy()
        return counts

    def each_scores(self, take: TakeScores) -> None:
        """Run the forward pass without dropout and hand over the logits, a row for each of inputs.owned, in this order.

        take: gets the number of the first row and logits (rows, C), valid while it runs, SCORED_ROWS at most. Where values
        lie on disk, these are handed over as they are computed, and memory never holds all. Collective.
        """
        self._forward(take)

    def _forward(self, take: TakeScores | None = None) -> None:
        """Compute the scores and count them. take: as of `each_scores`."""
        runtime = self.runtime
        evaluate = runtime.programs["evaluate"] if self._by_blocks is None else None
        runtime.backend.activate()
        runtime.counts.zero_()
        if evaluate is not None and take is not None and not evaluate.keeps_result:
            runtime.run(evaluate, behind_scores(take))
            return
        if self._by_blocks is None:
            self._score_again()
        else:
            self._by_blocks.run(self._seed)
            if (target := runtime.inputs.owned.target) is not None:  # links are scored from the embeddings
                target.count(runtime.backend, self.logits(), runtime.counts)
        if take is not None:
            if self._comm.size > 1:
                self._comm.synchronize()
            in_parts(0, self.logits(), take)

    def logits(self) -> torch.Tensor:
        """Return the logits (V, C) of the last evaluation, a row for each of inputs.owned; valid until the next epoch.

        Of a run from disk there are none but where its metric needs all of them: `each_scores`.
        """
        return self.runtime.programs["evaluate"].result if self._by_blocks is None else self._by_blocks.result

    def scores(self) -> npt.NDArray[Any]:
        """Return the logits (V, C) on the host, a row for each of inputs.owned, in the type of the weights.

        These are all vertices of the rank, in an evaluation by blocks those in any split. Cost: a forward pass. Collective.
        """
        exact = self.runtime.weights.flat.dtype  # NumPy has no bf16
        whole = torch.empty(self.runtime.num_rows(OWNED), self.runtime.counts.shape[2], dtype=exact)
        self.each_scores(lambda first, logits: whole[first : first + len(logits)].copy_(logits))
        return whole.numpy()

    def fit(
        self, log: RunLog, folder: Path | None, on_epoch: OnEpoch | None = None, heartbeat: Heartbeat | None = None
    ) -> bool:
        """Train until the last epoch, early stop or a signal; return whether the run is complete. See `Loop.fit`."""
        self.runtime.backend.activate()
        # Made here, as it refers to this object: no cycle keeps a finished run's memory alive.
        loop = Loop(self._config.train, self, self.progress, self.epoch_seconds, self._stop, self.threads)
        return loop.fit(log, folder, on_epoch, heartbeat)

    def summary(self) -> dict[str, Any]:
        """Return result.json's scores, as `loop.summary`."""
        return summary(self._config.train, self.progress, self.metric)

    def start(self, seed: int, step: int, rate: float | None) -> None:
        self._epoch.start(seed, step)
        self._epoch.set_rate(rate)

    def set_rate(self, rate: float | None) -> None:
        self._epoch.set_rate(rate)

    def set_signals(self, stop: float, seconds: float) -> None:
        self._epoch.set_signals(stop, seconds)

    def window_end(self, step: int) -> int:
        return self._epoch.window_end(step)

    def rate_of(self, epoch: int, rate: float | None) -> float:
        return learning_rate(self._config.train, epoch, rate)

    def compare(self, epoch: int) -> dict[str, float | None]:
        self.runtime.backend.activate()
        return {} if self._comparison is None else self._comparison.run(self._seed, epoch)

    def batch_counts(self, epoch: int) -> dict[str, Any]:
        moved = {name: total if name == WAITED else round(total) for name, total in self._step_moved.items()}
        return {**self._feed.counts(self._seed, epoch), **self._hit_rates(epoch), **moved}

    @property
    def moved(self) -> dict[str, float]:
        """What this rank has read from disk and written to it since set-up; {} if its rows are in memory."""
        return {name: total - self._set_up[name] for name, total in _moved(self.runtime).items()}

    def _hit_rates(self, epoch: int) -> dict[str, Any]:
        """Return which share of other ranks' rows an epoch found in the cache of each layer; {} without one. Collective."""
        blocks = self.runtime.programs["train"].aggregations.values()
        counts = [found for found in (block.found(epoch) for block in blocks) if found is not None]
        if not counts:
            return {}
        total = torch.tensor(counts, dtype=torch.float64)
        self.runtime.sum_over_ranks(total)
        return {"hit_rates": [hits / count if count else None for hits, count in total.tolist()]}

    def keep_best(self) -> None:
        self._best.copy_(self.runtime.weights.flat)
        if self.runtime.learned is not None:
            self.runtime.learned.keep_best()

    def restart(self, seed: int) -> None:
        self._initialize(seed)
        self._optimizer.reset()

    def state(self) -> Mapping[str, torch.Tensor]:
        learned = self.runtime.learned
        rows = {} if learned is None else learned.state(best=self.progress.best is not None)
        return self.runtime.state() | rows

    def weights(self, *, best: bool) -> dict[str, Mapping[str, torch.Tensor]]:
        weights = self.runtime.weights
        return {"weights": weights.state_dict(), "best": weights.state_dict(self._best) if best else {}}

    def optimizer_state(self) -> Mapping[str, torch.Tensor]:
        return self._optimizer.tensors()

    def load(self, parts: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        weights = self.runtime.weights
        if "best" in parts:
            weights.load_state_dict(parts["best"])
            self._best.copy_(weights.flat)
        weights.load_state_dict(parts["weights"])
        self._optimizer.load_tensors(parts.get("optimizer", {}))
        if self.runtime.learned is not None:
            self.runtime.learned.load_state(parts)
        self.runtime.load_state(parts.get(f"rank-{self._plan.rank}", {}))

    def barrier(self) -> None:
        self._comm.barrier()

    def peak_bytes(self) -> int:
        return self.runtime.backend.peak_bytes()


def _moved(runtime: RankRuntime) -> dict[str, float]:
    """Return what a rank has read from disk and written to it so far, as history and result name it."""
    pages = runtime.pages
    if pages is None:
        return {}
    names = ("disk_bytes_read", "disk_bytes_written", WAITED)
    return dict(zip(names, (pages.bytes_read, pages.bytes_written, pages.waited_s), strict=True))
