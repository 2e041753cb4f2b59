"""Training steps that run on the device alone: program, sums over ranks, optimiser, loss history, clock.

Nothing here looks at a result, so that a device may record the work once and repeat it by itself; seed and epoch,
learning rates and losses of a window of steps lie on the device. A step's signals start from this rank's own
(Books.own), which the end of the previous step copies there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mggcn.backend.base import KernelBackend
from mggcn.backend.epoch_end import LOSS, SECONDS, STOP, Books
from mggcn.backend.events import Eager
from mggcn.comm.counting import CountingCommunicator
from mggcn.config import TrainConfig
from mggcn.errors import PlanError
from mggcn.feed.batch import Batch, Feed
from mggcn.planning.run import SIGNALS
from mggcn.train.nonfinite import first_place, origin_of_nonfinite
from mggcn.train.optimizer import Optimizer, learning_rates
from mggcn.train.runtime import RankRuntime
from mggcn.train.timeline import Watch

__all__ = ["LOSS", "SECONDS", "STOP", "WINDOW", "Repeated", "TrainingEpoch"]

WINDOW = 4096
"""Steps whose learning rates and signals a device holds, 128 KiB: a run's records do not grow with its epochs."""


@dataclass(kw_only=True, slots=True, weakref_slot=True)
class _Work:
    """The work of a device in a step. It does not refer to its repeater, so no cycle keeps a finished run's memory
    alive.

    kept: the gradients of a step's parts but the last; None: steps have none. parted: whether it has any now. alike:
    whether all steps do the same work, whatever a batch has: kept gradients are then added also where there are none.
    """

    runtime: RankRuntime
    comm: CountingCommunicator
    watch: Watch
    books: Books
    end: Callable[[], None]
    kept: Tensor | None = None
    parted: bool = False
    alike: bool = False

    def keep(self) -> None:
        """Run a part of a step that is not the last: the loss is added by itself, gradients are kept.

        Raises: PlanError where a part of a step cannot be: of the whole graph, where ops sum over ranks, of which
        others may have no part, or where rows are learned, which move once a step.
        """
        program, grad = self.runtime.programs["train"], self.runtime.weights.grad
        summing = any(op.kind.sums_over_ranks for op in program.program.ops)
        if self.kept is None or summing or self.runtime.learned is not None:
            raise PlanError(
                "a step came in parts, and the model needs the whole step at once; let the feed give it whole"
            )
        self.runtime.run(program)
        self.kept = self.kept.add_(grad) if self.parted or self.alike else self.kept.copy_(grad)
        self.parted = True

    def gradients(self, program: str = "train") -> None:
        runtime = self.runtime
        runtime.run(runtime.programs[program])
        if self.kept is not None and (self.parted or self.alike):
            runtime.weights.grad.add_(self.kept)
            self.parted = False
            if self.alike:
                self.kept.zero_()
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
    """Runs steps of one repeat: `run` queues one, `history` reads the signals of finished ones.

    Steps are counted from 0 over all epochs; each epoch has those of the feed. alike: whether `load` leaves sizes and
    addresses as they are, so that a device may record a step, as of the whole graph.
    Device memory: history float64 (S, 3), learning rates (S,), of at most WINDOW steps. Rates are written once a window.
    Making one is collective where a feed has blocks. Raises: PlanError if the ranks' epochs have other numbers of steps.
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
        alike: bool = True,
    ) -> None:
        backend = runtime.backend
        self._config = config
        self._feed, self._load = feed, load
        self.steps: int = feed.num_steps
        """Steps of an epoch."""
        if feed.stack is not None:
            _require_equal_steps(runtime, comm, self.steps)
        self._batches: Iterator[Batch] = iter(())
        self._next = -1
        self._rate: float | None = None
        self._seed = config.seed
        self._window = -1
        self._rows = rows = min(WINDOW, config.epochs * self.steps)
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
            kept=None if feed.stack is None else torch.zeros_like(runtime.weights.grad),
            alike=alike and feed.stack is not None,
        )
        self._own = [0.0] * SIGNALS
        self._repeatable = Repeated(self._work.step, backend, comm) if alike else Eager(self._work.step)

    @property
    def state(self) -> str:
        """How steps are launched: Repeatable.state."""
        return self._repeatable.state

    def start(self, seed: int, step: int) -> None:
        """Set seed and step of the next run, and the signals that it starts from; weights move again."""
        self._seed, self._next, self._work.parted = seed, -1, False
        if self._work.alike and self._work.kept is not None:
            self._work.kept.zero_()
        books = self._work.books
        books.halted.zero_()
        books.clock.copy_(torch.tensor([seed, step], dtype=torch.int64))
        books.signals.copy_(books.own)

    def set_rate(self, rate: float | None) -> None:
        """Set the learning rate that the plateau schedule has reached (Progress.rate), from the next epoch on."""
        self._rate, self._window = rate, -1

    def _open_window(self, step: int) -> None:
        """Have the learning rates of the window of a step on the device."""
        window = step // self._rows
        if window != self._window:
            self._window = window
            epochs = np.arange(window * self._rows, (window + 1) * self._rows) // self.steps
            rates = learning_rates(self._config, range(epochs[0], epochs[-1] + 1), self._rate)
            self._work.books.rates.copy_(torch.from_numpy(rates[epochs - epochs[0]]))

    def set_signals(self, stop: float, seconds: float) -> None:
        """Set what this rank adds to the stop flag and the seconds of the steps to come."""
        own = [0.0, stop, seconds]
        # A copy from the host may wait for the device: unchanged signals are left alone.
        if own != self._own:
            self._own = own
            books = self._work.books
            books.own.copy_(torch.tensor(own, dtype=torch.float64))
            books.signals.copy_(books.own)

    def run(self, step: int) -> None:
        """Queue one step, that of the clock too. Raises: IndexError after the last epoch, PlanError without a batch."""
        epoch = step // self.steps
        if epoch >= self._config.epochs:
            raise IndexError(f"the run has {self._config.epochs} epochs, epoch {epoch + 1} was requested")
        self._open_window(step)
        work = self._work
        work.comm.check()
        work.runtime.begin_epoch(step)
        with work.watch.epoch(step):
            self._load_step(step)
            self._repeatable()

    def _load_step(self, step: int, run_part: Callable[[], None] | None = None) -> None:
        """Load the batch of a step, the feed's next one or, of another step than the next, from a new iterator.

        Of a batch in parts the last is loaded, once `run_part`, which keeps the gradients, was called with each of the
        others loaded. Raises: PlanError without one.
        """
        epoch, number = divmod(step, self.steps)
        if number == 0 or step != self._next:
            self._batches = self._feed.epoch(self._seed, epoch, number)
        self._next = step + 1
        for batch in self._batches:
            self._load(batch)
            if batch.last:
                return
            (run_part or self._work.keep)()
        raise PlanError(f"a feed of {self.steps} steps gave {number} batches in epoch {epoch + 1}")

    def gradients(self, epoch: int) -> None:
        """Forward, loss and backward of an epoch's first step; leaves the summed gradients and signals."""
        self._load_step(epoch * self.steps)
        self._work.gradients()

    def exact_gradients(self) -> None:
        """Do the same over the whole graph, in a step over batches that is compared with it."""
        self._work.gradients("exact")

    def history(self, first: int, last: int) -> npt.NDArray[np.float64]:
        """Return the signals summed over ranks of steps first .. last - 1, (last - first, 3). Waits for the device.

        The steps lie in one window (`window_end`).
        """
        start = first % self._rows
        signals: npt.NDArray[np.float64] = self._work.books.history[start : start + last - first].cpu().numpy().copy()
        return signals

    def window_end(self, step: int) -> int:
        """Return the step after the window of a step: the host must read the history before it."""
        return step - step % self._rows + self._rows

    def origin(self, seed: int, step: int) -> str:
        """Run a step again whose update was skipped; say in words where what is not finite began. Collective."""
        work = self._work
        self.start(seed, step)
        work.runtime.begin_epoch(step)
        found = list[int]()
        with work.watch.epoch(step):
            self._load_step(step, lambda: found.append(first_place(work.runtime)))
            found.append(first_place(work.runtime))
            return origin_of_nonfinite(work.runtime, found, work.comm.rank, work.comm.size)


def _require_equal_steps(runtime: RankRuntime, comm: CountingCommunicator, steps: int) -> None:
    """Raises: PlanError, on all ranks, if a rank's epochs have no steps, or others' than another's. Collective."""
    counts = runtime.backend.allocate(8 * comm.size).view(torch.float64)
    counts[comm.rank] = steps
    runtime.sum_over_ranks(counts)
    found = [int(count) for count in counts.tolist()]
    if min(found) < 1 or len(set(found)) > 1:
        each = ", ".join(f"{count} on rank {rank}" for rank, count in enumerate(found))
        raise PlanError(f"an epoch needs as many steps on every rank, and at least one; the feeds have {each}")
