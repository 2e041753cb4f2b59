"""The epoch loop of one rank: advance, evaluate, keep the best, cut the rate, save, stop together, resume.

What trains is an `Engine` (train/engine.py): a planned model (train/trainer.py), or a module of one's own
(nn/module_engine.py). P ranks; every rank takes the same decisions from the same sums.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mggcn.backend.epoch_end import LOSS, SECONDS, STOP
from mggcn.config import TrainConfig
from mggcn.errors import ConfigError, RunError
from mggcn.planning.block_evaluation import EVALUATED_FANOUT
from mggcn.train.checkpoint import Progress, load_checkpoint, of_rank, refusing_strangers, save_checkpoint, stage_state
from mggcn.train.engine import Engine, Scores, Stop, moved_steps, refuse_skipped
from mggcn.train.heartbeat import Heartbeat
from mggcn.train.log import RunLog
from mggcn.train.optimizer import follow_plateau
from mggcn.train.repeats import keep_repeat
from mggcn.train.samples import EpochSeconds
from mggcn.train.threads import ThreadChoice

OnEpoch = Callable[[dict[str, Any]], None]


class Loop:
    """Trains all repeats of a run on one rank."""

    def __init__(
        self,
        config: TrainConfig,
        engine: Engine,
        progress: Progress,
        seconds: EpochSeconds,
        stop: Stop,
        threads: ThreadChoice | None = None,
    ) -> None:
        self._config = config
        self._engine = engine
        self._progress = progress
        self._seconds = seconds
        self._stop = stop
        self._threads = threads
        self._heartbeat: Heartbeat | None = None

    def fit(self, log: RunLog, folder: Path | None, on_epoch: OnEpoch | None, heartbeat: Heartbeat | None) -> bool:
        """Train until the last epoch, early stop or a signal; return whether the run is complete.

        Resumes from the checkpoint in `folder` if there is one; saves as configured, when stopped, and at the end.
        """
        progress = self._progress
        self._resume(folder)
        log.start(progress.history_lines)
        self._heartbeat = heartbeat
        if heartbeat is not None:
            heartbeat.begin(progress.run, progress.epoch, progress.step, progress.steps)
            # The peak of set-up, before epochs map more of the files.
            heartbeat.beat(progress.run, progress.epoch, progress.step, self._engine.peak_bytes())
        try:
            while progress.run < self._config.repeat:
                if not self._fit_one(log, folder, on_epoch):
                    self._save(log, folder)
                    return False
                self._finish_repeat(folder)
                self._save(log, folder)
        finally:
            log.close()
        return True

    @property
    def _seed(self) -> int:
        return self._config.seed + self._progress.run

    @property
    def _done(self) -> int:
        """Steps done of this repeat."""
        return self._progress.epoch * self._progress.steps + self._progress.step

    def _fit_one(self, log: RunLog, folder: Path | None, on_epoch: OnEpoch | None) -> bool:
        """Train one repeat; False if a signal stopped it.

        Between two reads of results the device gets as many steps as it can queue, but no evaluation and no checkpoint.
        """
        config, progress, engine = self._config, self._progress, self._engine
        engine.start(self._seed, self._done, progress.rate)
        # A look at the device waits for it, so steps are queued until they last queue_s. The first look comes after one
        # step, for its time is not known, and `ahead` at most doubles, since the next may be slower.
        ahead, wall, unsaved = 1, 0.0, 0.0
        while progress.epoch < config.epochs and not (config.patience and progress.waited >= config.patience):
            first = self._done
            last = self._next_look(first, ahead)
            # A signal reaches one rank first. It travels with the losses, so that all ranks stop after the same step.
            engine.set_signals(float(self._stop.signal), wall)
            began = time.perf_counter()
            signals = engine.advance(first, last)
            seconds = (time.perf_counter() - began) / (last - first)
            moved = moved_steps(signals)
            # Steps before a loss that is not finite are recorded, also those queued with it: they moved the weights.
            self._record(log, signals[:moved], seconds, on_epoch)
            refuse_skipped(engine, first, signals)
            # The mean over ranks by the last all-reduce: all ranks must queue equally many steps.
            mean_s = float(signals[-1, SECONDS]) / engine.size
            ahead = max(1, min(2 * ahead, int(engine.queue_s / mean_s) if mean_s else 1))
            # Behind the record, so that the checkpoint which the caller writes counts these steps.
            if signals[:, STOP].any():
                return False
            if self._threads is not None:
                log.say(self._threads.after_epoch(seconds, mean_s, progress.epoch))
            if self._heartbeat is not None and self._heartbeat.due:
                self._heartbeat.beat(progress.run, progress.epoch, progress.step, engine.peak_bytes())
            unsaved += mean_s * (last - first)
            late = config.checkpoint_minutes and unsaved >= 60 * config.checkpoint_minutes
            if late or (not progress.step and config.checkpoint_every and not progress.epoch % config.checkpoint_every):
                self._save(log, folder)
                unsaved = 0.0
            wall = (time.perf_counter() - began) / (last - first)  # with evaluation: the next steps report it
        return True

    def _next_look(self, step: int, ahead: int) -> int:
        """Return the step before which the host reads results next: at most `ahead` later, or earlier if something is
        due.
        """
        config, epoch = self._config, self._progress.epoch
        # Evaluations, comparisons and checkpoints read the weights of their own epoch: none may be queued behind it.
        intervals = (config.eval_every, config.checkpoint_every, self._engine.compare_every)
        due = [epoch - epoch % every + every for every in intervals if every]
        return min(step + ahead, self._engine.window_end(step), min([config.epochs, *due]) * self._progress.steps)

    def _record(self, log: RunLog, signals: npt.NDArray[np.float64], seconds: float, on_epoch: OnEpoch | None) -> None:
        """Count the steps of `signals`, of `seconds` each, and write the epochs that they complete."""
        progress = self._progress
        for loss in signals[:, LOSS].tolist():
            # One after the other, so that a mean does not depend on where an epoch was interrupted.
            progress.loss_sum = progress.loss_sum + loss if progress.step else loss
            progress.seconds = progress.seconds + seconds if progress.step else seconds
            progress.step += 1
            if progress.step == progress.steps:
                self._end_epoch(log, on_epoch)
        if done := progress.step:
            loss, seconds = progress.loss_sum / done, progress.seconds / done * progress.steps
            row = {"run": progress.run, "epoch": progress.epoch, "loss": loss, "val": None, "seconds": seconds}
            log.step(row, done, progress.steps)

    def _end_epoch(self, log: RunLog, on_epoch: OnEpoch | None) -> None:
        """Write an epoch whose steps are done, with its scores and a comparison of gradients if they are due."""
        config, progress = self._config, self._progress
        self._seconds.add(progress.seconds)
        rate = self._engine.rate_of(progress.epoch, progress.rate)
        loss, seconds = progress.loss_sum / progress.steps, progress.seconds
        counts = self._engine.batch_counts(progress.epoch)
        progress.epoch += 1
        progress.step, progress.loss_sum, progress.seconds = 0, 0.0, 0.0
        every = self._engine.compare_every
        # Before the evaluation, whose scores are read later, and lie in the same arena.
        compared = self._engine.compare(progress.epoch) if every and progress.epoch % every == 0 else {}
        due = self._due(progress.epoch)
        scores = self._score() if due or progress.epoch == config.epochs else dict.fromkeys(("train", "val", "test"))
        row = {"epoch": progress.epoch, "loss": loss, **scores, "lr": rate, "seconds": seconds, **compared, **counts}
        if config.evaluate == "sampled" and any(score is not None for score in scores.values()):
            row["evaluated_fanout"] = EVALUATED_FANOUT
        if config.repeat > 1:
            row["run"] = progress.run
        log.epoch(row)
        if on_epoch is not None:
            on_epoch(row)

    def _due(self, epoch: int) -> bool:
        """Whether an evaluation is due after an epoch, rather than made because the run ends there."""
        every = self._config.eval_every
        return bool(every) and epoch % every == 0

    def _score(self) -> Scores:
        """Evaluate and remember the scores; if due, keep the weights of a better one, and count for patience and plateau.

        The others leave no trace, so that an extended run goes on as a longer one.
        """
        config, progress, lower = self._config, self._progress, self._engine.lower_is_better
        scores = self._engine.evaluate()
        progress.last = {"epoch": progress.epoch, **scores}
        if not self._due(progress.epoch):
            return scores
        value = scores["val"]
        if value is None and (config.patience or config.schedule == "plateau"):
            raise ConfigError(
                f"train.patience and train.schedule plateau need a validation score, and {self._engine.metric} has none on "
                "these validation vertices (all of one class, or all labels unknown); choose another train.metric, or "
                "train without them"
            )
        best = None if progress.best is None else progress.best["val"]
        known = value is not None and not math.isnan(value)  # a metric of one's own may have no number
        if known and (best is None or (value < best if lower else value > best)):
            progress.best = dict(progress.last)
            progress.waited = 0
            self._engine.keep_best()
        elif value is not None:
            progress.waited += 1
        if (
            config.schedule == "plateau"
            and value is not None
            and progress.epoch > config.schedule_start
            and follow_plateau(config, progress, value, lower=lower)
        ):
            self._engine.set_rate(progress.rate)
        return scores

    def _finish_repeat(self, folder: Path | None) -> None:
        """Record a complete repeat, keep its weights if there are several, and start the next one from fresh weights."""
        progress = self._progress
        if progress.last is None or progress.last["epoch"] != progress.epoch:
            self._score()
        progress.finished.append(
            {
                "seed": self._seed,
                "epochs": progress.epoch,
                "best": progress.best or progress.last,
                "final": progress.last,
            }
        )
        if folder is not None and self._config.repeat > 1 and self._engine.rank == 0:
            keep_repeat(folder, self._seed, self._engine.weights(best=progress.best is not None))
        progress.run += 1
        if progress.run < self._config.repeat:
            progress.epoch, progress.waited, progress.best, progress.last = 0, 0, None, None
            progress.rate, progress.peak, progress.stalled = None, None, 0
            self._engine.restart(self._seed)

    def _save(self, log: RunLog, folder: Path | None) -> None:
        """Write a checkpoint: rank 0 what all ranks share, every rank what its strategy keeps."""
        engine, progress = self._engine, self._progress
        state = engine.state()
        if folder is None:
            return
        progress.history_lines = log.lines
        # Rank 0 moves what all ranks have staged into the checkpoint: not before all are done, and none may stage for the
        # next one until it has.
        stage_state(folder / "checkpoints", engine.rank, state)
        engine.barrier()
        if engine.rank == 0:
            # The checkpoint names how many lines of history are its own: they must be on the disk before it is.
            log.flush()
            parts = engine.weights(best=progress.best is not None) | {"optimizer": engine.optimizer_state()}
            save_checkpoint(folder / "checkpoints", progress, parts, engine.size)
        engine.barrier()

    def _resume(self, folder: Path | None) -> None:
        """Restore weights, optimiser and progress from the latest checkpoint, if there is one."""
        progress, steps = self._progress, self._engine.steps
        progress.steps = steps
        wanted = of_rank(self._engine.rank, self._engine.size)
        found = None if folder is None else load_checkpoint(folder / "checkpoints", wanted)
        if found is None:
            return
        saved, parts = found
        if saved.step and saved.steps != steps:
            raise RunError(
                f"the checkpoint in {folder} is of step {saved.step} of {saved.steps} of an epoch, which now has {steps} "
                "steps; resume with the settings that the run had"
            )
        saved.steps = steps
        for name in Progress.__dataclass_fields__:
            setattr(progress, name, getattr(saved, name))
        # A schedule that begins here starts without the plateau schedule's earlier cuts.
        if progress.epoch <= self._config.schedule_start:
            progress.rate, progress.peak, progress.stalled = None, None, 0
        if self._config.repeat == 1 and progress.finished:
            # A complete run that is extended: its only repeat goes on. Without more epochs it ends again as it did.
            progress.run, progress.finished = 0, []
        with refusing_strangers(folder):
            self._engine.load(parts)
