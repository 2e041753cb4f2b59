"""The epochs of a run on one rank, which try the variants of its sparse products, and what all ranks report of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from mggcn.comm.base import Communicator
from mggcn.comm.gather import gather_texts
from mggcn.config import Config
from mggcn.train.timeline import Unwatched, Watch
from mggcn.tuning.exploration import Exploration, Limits
from mggcn.tuning.findings import Findings, from_json, to_json

LAST = 10
"""The epoch after which ranks report. Known beforehand, it needs no agreement between them in any epoch."""


def limits_of(config: Config, done: int = 0) -> Limits | None:
    """Return the limits of what the epochs of a run try; None for nothing. It depends on settings, so all ranks agree.

    done: epochs that a resumed run does not repeat. tune = "auto" leaves out runs that end before their ranks would report,
    GPUs, whose variants differ in the last bits, and timelines, which would show epochs that are slow on purpose.
    """
    run, epochs = config.run, config.train.epochs * config.train.repeat
    if run.tune == "on":
        return Limits()
    tries = run.tune == "auto" and run.device == "cpu" and not run.timeline and epochs > LAST
    return Limits(epochs - done) if tries else None


class Tuning:
    """A Watch that explores in the epochs of a run, and reports on rank 0, once, what all ranks have found.

    comm: the rank's transport, which carries host tensors, and after the epoch `last` what each rank has found.
    """

    def __init__(
        self, comm: Communicator, limits: Limits, report: Callable[[Findings], None], last: int = LAST
    ) -> None:
        self._comm, self._limits, self._report, self._left = comm, limits, report, last
        self._watch: Watch = Unwatched()
        self._synchronize: Callable[[], None] = lambda: None
        self.exploration: Exploration = Exploration()

    def begin(self, watch: Watch, synchronize: Callable[[], None], exploration: Exploration) -> None:
        """Time the coming epochs for `exploration`, around the run's own watch. synchronize: waits for the device."""
        self._watch, self._synchronize, self.exploration = watch, synchronize, exploration
        exploration.open(self._limits)

    @contextmanager
    def epoch(self, number: int) -> Iterator[None]:
        """Implement Watch.epoch. Collective after the last epoch that explores."""
        self.exploration.begin()
        began = time.perf_counter()
        with self._watch.epoch(number):
            yield
        if self._left == 0:
            return
        self._synchronize()
        self.exploration.epoch(time.perf_counter() - began)
        self._left -= 1
        if self._left == 0:
            self._finish()

    def doing(self, label: str) -> AbstractContextManager[None]:
        """Implement Watch.doing."""
        return self._watch.doing(label)

    def close(self) -> None:
        """Stop exploring, also if the run ends early. Collective."""
        self._watch.close()
        if self._left > 0:
            self._left = 0
            self._finish()

    def _finish(self) -> None:
        self.exploration.close()
        texts = gather_texts(self._comm, to_json(self.exploration))
        if self._comm.rank == 0:
            self._report(from_json(texts))
