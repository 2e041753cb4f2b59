"""Training steps that run on the device alone: program, sums over ranks, optimiser, loss history, clock.

Nothing here looks at a result, so that a device may record the work once and repeat it by itself; seed and epoch,
learning rates and losses of a window of epochs lie on the device. An epoch's signals start from this rank's own
(Books.own), which the end of the previous epoch copies there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from mggcn.backend.base import KernelBackend
from mggcn.backend.epoch_end import LOSS, SECONDS, STOP, Books
from mggcn.backend.events import Eager
from mggcn.comm.counting import CountingCommunicator
from mggcn.config import TrainConfig
from mggcn.errors import PlanError
from mggcn.feed.batch import Batch, Feed
from mggcn.planning.run import SIGNALS
from mggcn.train.nonfinite import origin_of_nonfinite
from mggcn.train.optimizer import Optimizer, learning_rates
from mggcn.train.runtime import RankRuntime
from mggcn.train.timeline import Watch

__all__ = ["LOSS", "SECONDS", "STOP", "WINDOW", "Repeated", "TrainingEpoch"]

WINDOW = 4096
"""Epochs whose learning rates and signals a device holds, 128 KiB: a run's records do not grow with its epochs."""


@dataclass(frozen=True, kw_only=True, slots=True, weakref_slot=True)
class _Work:
    """The work of a device in an epoch. It does not refer to its repeater, so no cycle keeps a finished run's memory
    alive.
    """

    runtime: RankRuntime
    comm: CountingCommunicator
    watch: Watch
    books: Books
    end: Callable[[], None]

    def gradients(self) -> None:
        runtime = self.runtime
        runtime.run(runtime.programs["train"])
        if self.comm.size > 1:
            summed = self.comm.all_reduce(runtime.weights.grad, runtime.backend.record())
            signalled = self.comm.all_reduce(runtime.signals, runtime.backend.record())
            summed.wait()
            signalled.wait()

    def step(self) -> None:
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


LoadBatch = Callable[[Batch], None]
"""Makes a batch the one that the training program runs over."""


class TrainingEpoch:
    """Runs epochs of one repeat, each the steps of a feed: `run` queues one, `history` reads the signals of finished ones.

    Device memory: history float64 (S, 3), learning rates (S,), of the steps of at most WINDOW epochs. Rates are written
    once a window.
    """

    def __init__(
        self,
        config: TrainConfig,
        runtime: RankRuntime,
        comm: CountingCommunicator,
        optimizer: Optimizer,
        watch: Watch,
        feed: Feed,
        load: LoadBatch,
    ) -> None:
        backend = runtime.backend
        self._config = config
        self._feed, self._load, self._steps = feed, load, feed.num_steps
        self._rate: float | None = None
        self._window = -1
        self._epochs = min(max(1, WINDOW // self._steps), config.epochs)
        rows = self._epochs * self._steps
        rates = backend.allocate(8 * rows).view(torch.float64)
        history = backend.allocate(8 * SIGNALS * rows).view(torch.float64).view(-1, SIGNALS)
        own = backend.allocate(8 * SIGNALS).view(torch.float64)
        halted = backend.allocate(8).view(torch.int64)
        books = Books(runtime.clock, rates, runtime.signals, own, history, halted)
        self._work = _Work(
            runtime=runtime,
            comm=comm,
            watch=watch,
            books=books,
            end=backend.epoch_end(optimizer.step, books),
        )
        self._own = [0.0] * SIGNALS
        # A recording has fixed sizes; a batch has its own.
        whole = feed.stack is None
        self._repeatable = Repeated(self._work.step, backend, comm) if whole else Eager(self._work.step)

    @property
    def state(self) -> str:
        """How steps are launched: Repeatable.state."""
        return self._repeatable.state

    def start(self, seed: int, epoch: int) -> None:
        """Set seed and epoch, from 0, of the next run, and the signals that it starts from; weights move again."""
        books = self._work.books
        books.halted.zero_()
        books.clock.copy_(torch.tensor([seed, epoch * self._steps], dtype=torch.int64))
        books.signals.copy_(books.own)

    def set_rate(self, rate: float | None) -> None:
        """Set the learning rate that the plateau schedule has reached (Progress.rate), from the next epoch on."""
        self._rate, self._window = rate, -1

    def _open_window(self, epoch: int) -> None:
        """Have the learning rates of an epoch on the device."""
        window = epoch // self._epochs
        if window != self._window:
            self._window = window
            epochs = range(window * self._epochs, (window + 1) * self._epochs)
            rates = np.repeat(learning_rates(self._config, epochs, self._rate), self._steps)
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
        if epoch >= self._config.epochs:
            raise IndexError(f"the run has {self._config.epochs} epochs, epoch {epoch + 1} was requested")
        self._open_window(epoch)
        work = self._work
        work.comm.check()
        work.runtime.begin_epoch(epoch)
        with work.watch.epoch(epoch):
            batches = self._feed.epoch(epoch)
            for number in range(self._steps):
                if (batch := next(batches, None)) is None:
                    raise PlanError(f"a feed of {self._steps} steps gave {number} batches in epoch {epoch + 1}")
                self._load(batch)
                self._repeatable()

    def gradients(self, epoch: int) -> None:
        """Forward, loss and backward of an epoch's first step; leaves the summed gradients and signals."""
        self._load(next(self._feed.epoch(epoch)))
        self._work.gradients()

    def history(self, first: int, last: int) -> npt.NDArray[np.float64]:
        """Return the signals summed over ranks of epochs first .. last - 1, (last - first, 3). Waits for the device.

        Of several steps the mean of their losses, and the other signals of the last one. The epochs lie in one window
        (`window_end`).
        """
        start, count = first % self._epochs * self._steps, (last - first) * self._steps
        steps = (
            self._work.books.history[start : start + count].cpu().numpy().reshape(last - first, self._steps, SIGNALS)
        )
        signals: npt.NDArray[np.float64] = steps[:, -1].copy()
        signals[:, LOSS] = steps[:, :, LOSS].mean(1)
        return signals

    def window_end(self, epoch: int) -> int:
        """Return the epoch after the window of an epoch: the host must read the history before it."""
        return epoch - epoch % self._epochs + self._epochs

    def origin(self, seed: int, epoch: int) -> str:
        """Run an epoch again whose update was skipped; say in words where what is not finite began. Collective."""
        work = self._work
        self.start(seed, epoch)
        work.runtime.begin_epoch(epoch)
        self._load(next(self._feed.epoch(epoch)))
        with work.watch.epoch(epoch):
            return origin_of_nonfinite(work.runtime, work.runtime.programs["train"], work.comm.rank, work.comm.size)
