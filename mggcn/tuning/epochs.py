"""The epochs of a run on one rank, which try the variants of its sparse products, and what all ranks report of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from mggcn.comm.base import Communicator
from mggcn.comm.gather import gather_texts
from mggcn.config import Config
from mggcn.trace.timeline import Watch
from mggcn.tuning.exploration import Exploration, Limits
from mggcn.tuning.findings import Findings, from_json, to_json

LAST = 10
"""The epoch after which ranks report. Known beforehand, it needs no agreement between them in any epoch."""


def limits_of(config: Config) -> Limits | None:
    """Return what the epochs of a run try, by its settings alone, alike on all ranks; None: nothing.

    run.tune auto leaves out runs that end before their ranks would report, GPUs, whose variants differ in the last bits,
    and timelines, which would show epochs that are slow on purpose.
    """
    run, epochs = config.run, config.train.epochs * config.train.repeat
    if run.tune == "on":
        return Limits()
    return Limits(epochs) if run.tune == "auto" and run.device == "cpu" and not run.timeline and epochs > LAST else None


class Tuning:
    """Explores in the epochs of a run, and reports on rank 0, once, what all ranks have found.

    comm: the rank's transport, which carries host tensors, and after the epoch `last` what each rank has found.
    """

    def __init__(
        self, comm: Communicator, limits: Limits, report: Callable[[Findings], None], last: int = LAST
    ) -> None:
        self._comm, self._limits, self._report, self._left = comm, limits, report, last
        self.exploration = Exploration()

    def watched(self, watch: Watch, synchronize: Callable[[], None], exploration: Exploration) -> Watch:
        """Return a Watch that times every epoch for `exploration`, around the run's own. synchronize: waits for the
        device.
        """
        self.exploration = exploration
        exploration.open(self._limits)
        return _TunedEpochs(watch, self, synchronize)

    def epoch(self, seconds: float) -> None:
        """Note that a training epoch is done. Collective after the last one that explores."""
        self._left -= 1
        if self._left >= 0:
            self.exploration.epoch(seconds)
        if self._left == 0:
            self._finish()

    def close(self) -> None:
        """Explore no more, also if the run ends before all is known. Collective."""
        if self._left > 0:
            self._left = 0
            self._finish()

    def _finish(self) -> None:
        self.exploration.close()
        texts = gather_texts(self._comm, to_json(self.exploration))
        if self._comm.rank == 0:
            self._report(from_json(texts))


class _TunedEpochs:
    """As Tuning.watched."""

    def __init__(self, watch: Watch, tuning: Tuning, synchronize: Callable[[], None]) -> None:
        self._watch, self._tuning, self._synchronize = watch, tuning, synchronize

    @contextmanager
    def epoch(self, number: int) -> Iterator[None]:
        self._tuning.exploration.begin()
        began = time.perf_counter()
        with self._watch.epoch(number):
            yield
        self._synchronize()
        self._tuning.epoch(time.perf_counter() - began)

    def doing(self, label: str) -> AbstractContextManager[None]:
        return self._watch.doing(label)

    def close(self) -> None:
        self._watch.close()
        self._tuning.close()
