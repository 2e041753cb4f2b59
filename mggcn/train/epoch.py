"""One training epoch that runs on the device alone: program, sums over ranks, optimiser, loss history, clock.

Nothing here reads a result, so that a device may record the work once and replay it by itself; seed and epoch,
learning rates and losses lie on the device. An epoch's signals start from this rank's own (Books.own), which
the end of the previous epoch copies there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from mggcn.backend.base import KernelBackend
from mggcn.backend.epoch_end import Books
from mggcn.comm.counting import CountingCommunicator
from mggcn.config import TrainConfig
from mggcn.planning.run import SIGNALS, RankPlan
from mggcn.trace.timeline import Watch
from mggcn.train.optimizer import Optimizer, learning_rates
from mggcn.train.runtime import RankRuntime

LOSS, STOP, SECONDS = range(SIGNALS)
"""Columns of the signals and of their history."""


@dataclass(frozen=True, kw_only=True, slots=True, weakref_slot=True)
class _Work:
    """The work of a device in an epoch. It does not refer to its repeater, so no cycle keeps a finished run's memory
    alive.
    """

    plan: RankPlan
    runtime: RankRuntime
    comm: CountingCommunicator
    watch: Watch
    books: Books
    end: Callable[[], None]

    def gradients(self) -> None:
        runtime = self.runtime
        runtime.run(self.plan.train)
        if self.comm.size > 1:
            summed = self.comm.all_reduce(runtime.weights.grad, runtime.backend.record())
            signalled = self.comm.all_reduce(runtime.signals, runtime.backend.record())
            summed.wait()
            signalled.wait()

    def epoch(self) -> None:
        self.gradients()
        with self.watch.doing("optimizer"):
            self.end()


class Repeated:
    """Work that the backend may record once and replay, with the bytes that it sends counted on every call.

    A replayed CUDA graph sends without passing through the counting communicator, so the bytes of the recorded call are
    added for each replay.
    """

    def __init__(self, function: Callable[[], None], backend: KernelBackend, comm: CountingCommunicator) -> None:
        self._comm = comm
        self._sent = sent = [0]

        def counted() -> None:
            before = comm.bytes_sent
            function()
            sent[0] = comm.bytes_sent - before

        self._repeatable = backend.repeatable(counted, comm.agree)

    @property
    def state(self) -> str:
        """See Repeatable.state."""
        return self._repeatable.state

    def __call__(self) -> None:
        before = self._comm.bytes_sent
        self._repeatable()
        self._comm.bytes_sent = before + self._sent[0]


class TrainingEpoch:
    """Runs epochs of one repeat: `run` queues one epoch, `history` reads the signals of finished ones.

    Device memory: history float64 (epochs, 3), learning rates (epochs,).
    """

    def __init__(
        self,
        config: TrainConfig,
        plan: RankPlan,
        runtime: RankRuntime,
        comm: CountingCommunicator,
        optimizer: Optimizer,
        watch: Watch,
    ) -> None:
        backend = runtime.backend
        rates = learning_rates(config)
        history = backend.allocate(8 * SIGNALS * config.epochs).view(torch.float64).view(-1, SIGNALS)
        own = backend.allocate(8 * SIGNALS).view(torch.float64)
        books = Books(runtime.clock, backend.upload(rates), runtime.signals, own, history)
        self._work = _Work(
            plan=plan,
            runtime=runtime,
            comm=comm,
            watch=watch,
            books=books,
            end=backend.epoch_end(optimizer.step, books),
        )
        self._own = [0.0] * SIGNALS
        self._repeatable = Repeated(self._work.epoch, backend, comm)

    @property
    def state(self) -> str:
        """How epochs are launched: Repeatable.state."""
        return self._repeatable.state

    def start(self, seed: int, epoch: int) -> None:
        """Set seed and epoch, from 0, of the next run, and the signals that it starts from."""
        books = self._work.books
        books.clock.copy_(torch.tensor([seed, epoch], dtype=torch.int64))
        books.signals.copy_(books.own)

    def set_rates(self, rates: npt.NDArray[np.float64]) -> None:
        """Set the learning rates of all epochs, (epochs,)."""
        self._work.books.rates.copy_(torch.from_numpy(rates))

    def set_signals(self, stop: float, seconds: float) -> None:
        """Set what this rank adds to the stop flag and the seconds of the epochs to come."""
        own = [0.0, stop, seconds]
        # A copy from the host may wait for the device: unchanged signals are left alone.
        if own != self._own:
            self._own = own
            books = self._work.books
            books.own.copy_(torch.tensor(own, dtype=torch.float64))
            books.signals.copy_(books.own)

    def run(self, epoch: int) -> None:
        """Queue one epoch, number `epoch` from 0, as the clock says too. Raises: IndexError after the last epoch."""
        if epoch >= self._work.books.history.shape[0]:
            raise IndexError(f"the run has {self._work.books.history.shape[0]} epochs, epoch {epoch + 1} was requested")
        work = self._work
        work.comm.check()
        work.runtime.training.begin_epoch(epoch)
        with work.watch.epoch(epoch):
            self._repeatable()

    def gradients(self) -> None:
        """Forward, loss and backward; leaves the summed gradients in weights.grad and the summed signals."""
        self._work.gradients()

    def history(self, first: int, last: int) -> npt.NDArray[np.float64]:
        """Return the signals summed over ranks of epochs first .. last - 1, (last - first, 3). Waits for the device."""
        return self._work.books.history[first:last].cpu().numpy()
