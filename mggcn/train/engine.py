"""What the epoch loop trains: an `Engine`, and what it says of steps that moved no weight. P ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from mggcn.backend.epoch_end import LOSS, STOP
from mggcn.errors import DivergedError

Scores = dict[str, float | None]


@dataclass(slots=True)
class Stop:
    """The flag that a signal handler sets; all ranks see it after the same step."""

    signal: int = 0
    saves: bool = True
    """Whether epochs have begun, so that a signal is noted rather than obeyed at once."""


class Engine(Protocol):
    """What the loop needs of whatever trains on one rank. All ranks make all calls in the same order.

    A step moves the weights once. Steps are counted from 0 over all epochs of a repeat.
    """

    rank: int
    size: int
    """Number of ranks, P."""
    metric: str
    """Name of the score."""
    lower_is_better: bool
    """Whether the score is an error."""
    steps: int
    """Steps of an epoch."""
    compare_every: int
    """Epochs between two comparisons of gradients; 0: none."""
    queue_s: float
    """Seconds of steps that may be queued between two looks at results."""

    def start(self, seed: int, step: int, rate: float | None) -> None:
        """Set the seed, the next step, and the learning rate that the plateau schedule has reached."""

    def set_rate(self, rate: float | None) -> None:
        """Set the learning rate that the plateau schedule has reached, from the next epoch on."""

    def set_signals(self, stop: float, seconds: float) -> None:
        """Set what this rank adds to the stop flag and the seconds of the steps to come."""

    def advance(self, first: int, last: int) -> npt.NDArray[np.float64]:
        """Train steps first .. last - 1; return their signals (last - first, 3) summed over ranks: LOSS, STOP, SECONDS.

        From a step on whose loss or gradient is not finite no weight is moved, and STOP is NaN.
        """

    def window_end(self, step: int) -> int:
        """Return the step before which the host must read results."""

    def remedy(self, step: int) -> str:
        """Return what to do about a step that moved no weight, and where the fault began. Collective."""

    def rate_of(self, epoch: int, rate: float | None) -> float:
        """Return the learning rate of an epoch, for the history."""

    def evaluate(self) -> Scores:
        """Return the scores of the three splits."""

    def compare(self, epoch: int) -> dict[str, float | None]:
        """Return how far the gradient of an epoch's first step, which is not trained, is from the exact one."""

    def batch_counts(self, epoch: int) -> dict[str, Any]:
        """Return, for the history, the rows that all ranks' batches of an epoch, from 0, have read, by whose they are,
        where ranks fetch rows, and which share of other ranks' rows they found in a cache, where they have one. Collective.
        """

    def keep_best(self) -> None:
        """Keep the weights as those of the best validation score."""

    def restart(self, seed: int) -> None:
        """Begin a repeat: fresh weights and optimiser."""

    def state(self) -> Mapping[str, Tensor]:
        """Return the state that this rank alone keeps between steps, once every message has arrived."""

    def weights(self, *, best: bool) -> dict[str, Mapping[str, Tensor]]:
        """Return copies of the "weights" now, and of the "best" if there are some, by the names of their files."""

    def optimizer_state(self) -> Mapping[str, Tensor]:
        """Return copies of the optimiser's state."""

    def load(self, parts: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Restore what a checkpoint holds. Raises: KeyError, RuntimeError if it is of another model or optimiser."""

    def barrier(self) -> None:
        """Wait for all ranks."""

    def peak_bytes(self) -> int:
        """Return the peak memory of the device so far, in bytes."""


def refuse_skipped(engine: Engine, first: int, signals: npt.NDArray[np.float64]) -> None:
    """Refuse steps, counted from `first`, that moved no weight. Raises: DivergedError, on all ranks."""
    if len(signals) > (moved := moved_steps(signals)):
        raise diverged(engine, first + moved, float(signals[moved, LOSS]))


def diverged(engine: Engine, step: int, loss: float) -> DivergedError:
    """Return the error of a step that moved no weight. Collective."""
    epoch, number = divmod(step, engine.steps)
    where = f"epoch {epoch + 1}" if engine.steps == 1 else f"step {number + 1} of epoch {epoch + 1}"
    what = (
        f"the gradient of {where} is not finite, its loss is {loss:.6g}"
        if math.isfinite(loss)
        else f"the loss of {where} is {loss}"
    )
    return DivergedError(
        f"{what}; lower {engine.remedy(step)}; the weights and the last checkpoint are those before it"
    )


def moved_steps(signals: npt.NDArray[np.float64]) -> int:
    """Return how many steps moved the weights, before the first that did not."""
    skipped = np.isnan(signals[:, STOP])
    return int(skipped.argmax()) if skipped.any() else len(signals)
