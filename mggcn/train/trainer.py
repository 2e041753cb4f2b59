"""The epoch loop of one rank: run the program, sum over ranks, step, evaluate, keep the best, save, stop together.

P ranks, C classes. Every rank takes the same decisions from the same sums.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mggcn.comm.counting import CountingCommunicator
from mggcn.config import Config
from mggcn.errors import ConfigError, DivergedError
from mggcn.planning.run import RankPlan
from mggcn.planning.task import LOWER_IS_BETTER, better
from mggcn.trace.timeline import Watch
from mggcn.train.checkpoint import Progress, load_checkpoint, refusing_strangers, save_checkpoint, stage_state
from mggcn.train.epoch import LOSS, SECONDS, STOP, Repeated, TrainingEpoch
from mggcn.train.heartbeat import Heartbeat
from mggcn.train.log import RunLog
from mggcn.train.metrics import Counts, counted
from mggcn.train.optimizer import Optimizer, follow_plateau, learning_rate
from mggcn.train.ranking import RankingScores
from mggcn.train.repeats import best_repeat, keep_repeat
from mggcn.train.runtime import RankRuntime
from mggcn.train.samples import EpochSeconds

Scores = dict[str, float | None]


@dataclass(slots=True)
class Stop:
    """The flag that a signal handler sets; all ranks see it after the same epoch."""

    signal: int = 0
    saves: bool = True
    """Whether epochs have begun, so that a signal is noted rather than obeyed at once."""


class RankTrainer:
    """Trains one model on one rank's shard."""

    def __init__(
        self,
        config: Config,
        plan: RankPlan,
        runtime: RankRuntime,
        comm: CountingCommunicator,
        metric: str,
        ranking: RankingScores | None,
        stop: Stop,
        watch: Watch,
    ) -> None:
        self._config = config
        self._plan = plan
        self.runtime = runtime
        self._comm = comm
        self.metric = metric
        self._ranking = ranking
        self._stop = stop
        self._optimizer = Optimizer(config.train, runtime.weights)
        self._epoch = TrainingEpoch(config.train, plan, runtime, comm, self._optimizer, watch)
        self._score_again = Repeated(lambda: runtime.run(plan.evaluate), runtime.backend, comm)
        self._best = torch.zeros_like(runtime.weights.flat)
        self.progress = Progress()
        self.epoch_seconds = EpochSeconds()
        self._start: Mapping[str, torch.Tensor] | None = None
        self._heartbeat: Heartbeat | None = None
        self._initialize()

    def warm_start(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Begin with these weights, every repeat too. Raises: ConfigError if they are those of another model."""
        self._start = weights
        self._initialize()

    def _initialize(self) -> None:
        """Set the weights that a repeat begins with."""
        self.runtime.weights.initialize(self._seed)
        if self._start is not None:
            self.runtime.weights.load_state_dict(self._start)

    def gradients(self, epoch: int) -> float:
        """Run forward, loss and backward of an epoch; leave the summed gradients in weights.grad, return the loss.

        Raises: DivergedError if the loss is not finite.
        """
        self.runtime.backend.activate()
        self._epoch.start(self._seed, epoch)
        self.runtime.training.begin_epoch(epoch)
        self._epoch.gradients()
        loss = float(self.runtime.signals[LOSS])
        if not math.isfinite(loss):
            raise self._diverged(epoch, loss)
        return loss

    def step(self, epoch: int) -> float:
        """Train one epoch and return its loss. Raises: as `gradients`."""
        self.runtime.backend.activate()
        self._epoch.start(self._seed, epoch)
        signals = self._advance(epoch, epoch + 1)
        self._refuse_skipped(epoch, signals)
        return float(signals[0, LOSS])

    @property
    def states(self) -> dict[str, str]:
        """How epochs and evaluations are launched: Repeatable.state of each."""
        return {"epoch": self._epoch.state, "evaluation": self._score_again.state}

    @property
    def _seed(self) -> int:
        return self._config.train.seed + self.progress.run

    def _advance(self, first: int, last: int) -> npt.NDArray[np.float64]:
        """Train epochs first .. last - 1 and return their signals, summed over ranks. Raises: CommError.

        From an epoch on whose loss or gradient is not finite no weight is moved, and STOP is NaN.
        """
        for epoch in range(first, last):
            self._epoch.run(epoch)
        signals = self._epoch.history(first, last)
        self._comm.check()
        return signals

    def _refuse_skipped(self, first: int, signals: npt.NDArray[np.float64]) -> None:
        """Raises: DivergedError, on all ranks, if there are epochs, counted from `first`, that moved no weight."""
        if len(signals) > (moved := _moved(signals)):
            raise self._diverged(first + moved, float(signals[moved, LOSS]))

    def _diverged(self, epoch: int, loss: float) -> DivergedError:
        """Return the error of an epoch, from 0, that moves no weight; it names layer and rank. Collective."""
        what = (
            f"the gradient of epoch {epoch + 1} is not finite, its loss is {loss:.6g}"
            if math.isfinite(loss)
            else f"the loss of epoch {epoch + 1} is {loss}"
        )
        return DivergedError(
            f"{what}; lower train.lr (now {self._config.train.lr}) or check the features for huge values; "
            f"{self._epoch.origin(self._seed, epoch)}; the weights and the last checkpoint are those before it"
        )

    def evaluate(self) -> Scores:
        """Run the forward pass without dropout and return the scores of the three splits."""
        if self._ranking is not None:
            self._forward()
            return self._ranking.scores(self.logits())
        return counted(self.metric, self.count(), self.runtime.inputs.target.known)

    def count(self) -> Counts:
        """Run the forward pass without dropout and return the counts (3, 3, C) of all ranks, valid until the next one."""
        runtime = self.runtime
        self._forward()
        if self._comm.size > 1:
            self._comm.all_reduce(runtime.counts, runtime.backend.record()).wait()
        counts: Counts = runtime.counts.cpu().numpy()
        return counts

    def _forward(self) -> None:
        self.runtime.backend.activate()
        self.runtime.counts.zero_()
        self._score_again()

    def logits(self) -> torch.Tensor:
        """Return the logits (V, C) of the last evaluation; valid until the next epoch."""
        return self.runtime.views["evaluate"][self._plan.evaluate.result]

    def scores(self) -> npt.NDArray[Any]:
        """Return the logits (V, C) of the last evaluation on the host, in the type of the weights."""
        return self.logits().to(self.runtime.weights.flat.dtype).cpu().numpy()

    def fit(
        self,
        log: RunLog,
        folder: Path | None,
        on_epoch: Callable[[dict[str, Any]], None] | None = None,
        heartbeat: Heartbeat | None = None,
    ) -> bool:
        """Train until the last epoch, early stop or a signal; return whether the run is complete.

        Resumes from the checkpoint in `folder` if there is one; saves as configured, when stopped, and at the end.
        """
        self.runtime.backend.activate()
        self._resume(folder)
        log.start(self.progress.history_lines)
        self._heartbeat = heartbeat
        if heartbeat is not None:
            heartbeat.begin(self.progress.run, self.progress.epoch)
        try:
            while self.progress.run < self._config.train.repeat:
                if not self._fit_one(log, folder, on_epoch):
                    self._save(log, folder)
                    return False
                self._finish_repeat(folder)
                self._save(log, folder)
        finally:
            log.close()
        return True

    def _fit_one(self, log: RunLog, folder: Path | None, on_epoch: Callable[[dict[str, Any]], None] | None) -> bool:
        """Train one repeat; False if a signal stopped it.

        Between two reads of results the device gets as many epochs as it can queue, but no evaluation and no checkpoint.
        """
        config, progress, queue_s = self._config.train, self.progress, self.runtime.backend.queue_s
        self._epoch.start(self._seed, progress.epoch)
        self._epoch.set_rate(progress.rate)
        # A look at the device waits for it, so epochs are queued until they last queue_s. The first look comes after one
        # epoch, for its time is not known, and `ahead` at most doubles, since the next may be slower.
        ahead, wall, unsaved = 1, 0.0, 0.0
        while progress.epoch < config.epochs and not (config.patience and progress.waited >= config.patience):
            first, last = progress.epoch, self._next_look(progress.epoch, ahead)
            self._epoch.set_signals(float(self._stop.signal), wall)
            began = time.perf_counter()
            signals = self._advance(first, last)
            seconds = (time.perf_counter() - began) / (last - first)
            moved = _moved(signals)
            self._record(log, signals[:moved], seconds, on_epoch)
            self._refuse_skipped(first, signals)
            # The mean over ranks by the last all-reduce: all ranks must queue equally many epochs.
            mean_s = float(signals[-1, SECONDS]) / self._comm.size
            ahead = max(1, min(2 * ahead, int(queue_s / mean_s) if mean_s else 1))
            if signals[:, STOP].any():
                return False
            if self._heartbeat is not None and self._heartbeat.due:
                self._heartbeat.beat(progress.run, progress.epoch, self.runtime.backend.peak_bytes())
            unsaved += mean_s * (last - first)
            late = config.checkpoint_minutes and unsaved >= 60 * config.checkpoint_minutes
            if late or (config.checkpoint_every and progress.epoch % config.checkpoint_every == 0):
                self._save(log, folder)
                unsaved = 0.0
            wall = (time.perf_counter() - began) / (last - first)  # with evaluation: the next epochs report it
        return True

    def _next_look(self, epoch: int, ahead: int) -> int:
        """Return the epoch before which the host reads results next: at most `ahead` later, or earlier if something is
        due.
        """
        config = self._config.train
        due = [epoch - epoch % every + every for every in (config.eval_every, config.checkpoint_every) if every]
        return min(epoch + ahead, config.epochs, self._epoch.window_end(epoch), *due)

    def _record(
        self,
        log: RunLog,
        signals: npt.NDArray[np.float64],
        seconds: float,
        on_epoch: Callable[[dict[str, Any]], None] | None,
    ) -> None:
        """Write the epochs of `signals`, the last with its scores if an evaluation is due."""
        config, progress = self._config.train, self.progress
        for loss in signals[:, LOSS].tolist():
            self.epoch_seconds.add(seconds)
            rate = learning_rate(config, progress.epoch, progress.rate)
            progress.epoch += 1
            due = self._due(progress.epoch)
            scores = (
                self._score() if due or progress.epoch == config.epochs else dict.fromkeys(("train", "val", "test"))
            )
            row = {"epoch": progress.epoch, "loss": loss, **scores, "lr": rate, "seconds": seconds}
            if config.repeat > 1:
                row["run"] = progress.run
            log.epoch(row)
            if on_epoch is not None:
                on_epoch(row)

    def _due(self, epoch: int) -> bool:
        """Whether an evaluation is due after an epoch, rather than made because the run ends there."""
        every = self._config.train.eval_every
        return bool(every) and epoch % every == 0

    def _score(self) -> Scores:
        """Evaluate and remember the scores; if due, keep the weights of a better one, and count for patience and plateau.

        The others leave no trace, so that an extended run goes on as a longer one.
        """
        config, progress = self._config.train, self.progress
        scores = self.evaluate()
        progress.last = {"epoch": progress.epoch, **scores}
        if not self._due(progress.epoch):
            return scores
        value = scores["val"]
        if value is None and (config.patience or config.schedule == "plateau"):
            raise ConfigError(
                f"train.patience and train.schedule plateau need a validation score, and {self.metric} has none on these "
                "validation vertices (all of one class, or all labels unknown); choose another train.metric, or train "
                "without them"
            )
        best = None if progress.best is None else progress.best["val"]
        if value is not None and (best is None or better(self.metric, value, best)):
            progress.best = dict(progress.last)
            progress.waited = 0
            self._best.copy_(self.runtime.weights.flat)
        elif value is not None:
            progress.waited += 1
        if (
            config.schedule == "plateau"
            and value is not None
            and progress.epoch > config.schedule_start
            and follow_plateau(config, progress, value, lower=self.metric in LOWER_IS_BETTER)
        ):
            self._epoch.set_rate(progress.rate)
        return scores

    def _finish_repeat(self, folder: Path | None) -> None:
        """Record a complete repeat, keep its weights if there are several, and start the next one from fresh weights."""
        progress = self.progress
        if progress.last is None or progress.last["epoch"] != progress.epoch:
            self._score()
        progress.finished.append(
            {
                "seed": self._config.train.seed + progress.run,
                "epochs": progress.epoch,
                "best": progress.best or progress.last,
                "final": progress.last,
            }
        )
        if folder is not None and self._config.train.repeat > 1 and self._plan.rank == 0:
            keep_repeat(folder, self._seed, self._weights())
        progress.run += 1
        if progress.run < self._config.train.repeat:
            progress.epoch, progress.waited, progress.best, progress.last = 0, 0, None, None
            progress.rate, progress.peak, progress.stalled = None, None, 0
            self._initialize()
            self._optimizer.reset()

    def _save(self, log: RunLog, folder: Path | None) -> None:
        """Write a checkpoint: rank 0 what all ranks share, every rank what its strategy keeps."""
        state = self.runtime.training.state()  # every message has come
        if folder is None:
            return
        self.progress.history_lines = log.lines
        stage_state(folder / "checkpoints", self._plan.rank, state)
        self._comm.barrier()
        if self._plan.rank == 0:
            log.flush()
            parts = self._weights() | {"optimizer": self._optimizer.tensors()}
            save_checkpoint(folder / "checkpoints", self.progress, parts)
        self._comm.barrier()

    def _weights(self) -> dict[str, dict[str, torch.Tensor]]:
        """The weights now, and those of the best validation score, by the names of their files."""
        weights = self.runtime.weights
        return {"weights": weights.state_dict(), "best": weights.state_dict(self._best) if self.progress.best else {}}

    def _resume(self, folder: Path | None) -> None:
        """Restore weights, optimiser and progress from the latest checkpoint, if there is one."""
        found = None if folder is None else load_checkpoint(folder / "checkpoints")
        if found is None:
            return
        self.progress, parts = found
        # A schedule that begins here starts without the plateau schedule's earlier cuts.
        if self.progress.epoch <= self._config.train.schedule_start:
            self.progress.rate, self.progress.peak, self.progress.stalled = None, None, 0
        if self._config.train.repeat == 1 and self.progress.finished:
            # A complete run that is extended: its only repeat goes on. Without more epochs it ends again as it did.
            self.progress.run, self.progress.finished = 0, []
        weights = self.runtime.weights
        if "best" in parts:
            weights.load_state_dict(parts["best"])
            self._best.copy_(weights.flat)
        weights.load_state_dict(parts["weights"])
        with refusing_strangers(folder):
            self._optimizer.load_tensors(parts.get("optimizer", {}))
            self.runtime.training.load_state(parts.get(f"rank-{self._plan.rank}", {}))

    def summary(self) -> dict[str, Any]:
        """Return result.json's scores: metric, best, final, epochs; of several repeats the best one's, mean, deviation."""
        finished = self.progress.finished
        shown = best_repeat(finished, self.metric)
        result: dict[str, Any] = {"metric": self.metric, **{name: shown[name] for name in ("best", "final", "epochs")}}
        if self._config.train.repeat > 1:
            result["runs"] = finished
            for name, function in (("mean", np.mean), ("std", np.std)):
                result[name] = {
                    kind: {
                        split: float(function(known)) if (known := _known(finished, kind, split)) else None
                        for split in ("train", "val", "test")
                    }
                    for kind in ("best", "final")
                }
        return result


def _moved(signals: npt.NDArray[np.float64]) -> int:
    """Return how many epochs moved the weights, before the first that did not."""
    skipped = np.isnan(signals[:, STOP])
    return int(skipped.argmax()) if skipped.any() else len(signals)


def _known(finished: list[dict[str, Any]], kind: str, split: str) -> list[float]:
    return [run[kind][split] for run in finished if run[kind][split] is not None]
