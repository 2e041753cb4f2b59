"""`--tune` on one rank: the epochs of a run explore the variants of its sparse products until all ranks have finished."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from mggcn.comm.base import Communicator
from mggcn.comm.gather import gather_texts
from mggcn.trace.timeline import Watch
from mggcn.tuning.exploration import Exploration
from mggcn.tuning.findings import Findings, from_json, to_json


class Tuning:
    """Explores, agrees with the other ranks on the end, and then reports on rank 0, once, what all have found.

    comm: the rank's transport, which carries host tensors; a number goes over it after every epoch until the end.
    """

    def __init__(self, comm: Communicator, exploration: Exploration, report: Callable[[Findings], None]) -> None:
        self._comm = comm
        self._report = report
        self.exploration = exploration
        self.finished = False

    def watched(self, watch: Watch, synchronize: Callable[[], None]) -> Watch:
        """Return a Watch that times every epoch for this, around the run's own. synchronize: waits for the device."""
        return _TunedEpochs(watch, self, synchronize)

    def epoch(self, seconds: float) -> None:
        """Note that a training epoch is done. Collective: finishes with the epoch in which the last rank is done."""
        if self.finished:
            return
        self.exploration.epoch(seconds)
        # A rank that ended alone would leave the others' products unmeasured, or wait for them in another call.
        busy = torch.tensor([0 if self.exploration.done else 1])
        self._comm.all_reduce(busy).wait()
        if not busy.item():
            self.finish()

    def finish(self) -> None:
        """Explore no more, also if the run ends before all is known. Collective."""
        if self.finished:
            return
        self.finished = True
        self.exploration.close()
        texts = gather_texts(self._comm, to_json(self.exploration))
        if self._comm.rank == 0:
            self._report(from_json(texts))


class _TunedEpochs:
    """As Tuning.watched."""

    def __init__(self, watch: Watch, tuning: Tuning, synchronize: Callable[[], None]) -> None:
        self._watch = watch
        self._tuning = tuning
        self._synchronize = synchronize

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
        self._tuning.finish()
