"""One training epoch as work of the device alone: program, sums over ranks, optimiser, loss history, clock.

Nothing here looks at a result, so that a device may record the work once and repeat it by itself; seed and epoch,
learning rate and losses lie on the device.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from mggcn.comm.counting import CountingCommunicator
from mggcn.config import TrainConfig
from mggcn.trace.timeline import Watch
from mggcn.train.optimizer import Optimizer, learning_rate
from mggcn.train.runplan import SIGNALS, RankPlan
from mggcn.train.runtime import RankRuntime

LOSS, STOP, SECONDS = range(SIGNALS)
"""Columns of the signals and of their history."""


class TrainingEpoch:
    """Runs epochs of one repeat: `run` makes one, `history` reads what they left.

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
        self._plan = plan
        self._runtime = runtime
        self._comm = comm
        self._optimizer = optimizer
        self._watch = watch
        rates = np.array([learning_rate(config, epoch) for epoch in range(config.epochs)])
        self._rates = backend.upload(rates).to(backend.rate_dtype)
        self._rate = self._rates[0:1].clone()
        self._history = backend.allocate(8 * SIGNALS * config.epochs).view(torch.float64).view(-1, SIGNALS)
        self._own = backend.allocate(8 * SIGNALS).view(torch.float64)
        self._told = [0.0] * SIGNALS
        self._counted = 0
        self._repeatable = backend.repeatable(self._whole)

    def start(self, seed: int, epoch: int) -> None:
        """Set seed and epoch, from 0, of the next run."""
        self._runtime.clock.copy_(torch.tensor([seed, epoch], dtype=torch.int64))

    def tell(self, stop: float, seconds: float) -> None:
        """Set what this rank adds to the stop flag and the seconds of the epochs to come."""
        told = [0.0, stop, seconds]
        if told != self._told:
            self._told = told
            self._own.copy_(torch.tensor(told, dtype=torch.float64))

    def run(self, epoch: int) -> None:
        """Queue one epoch, number `epoch` from 0, as the clock says too."""
        self._comm.check()
        self._runtime.aggregation.begin_epoch(epoch)
        before = self._comm.bytes_sent
        with self._watch.epoch(epoch):
            self._repeatable()
        # A repeated recording sends what its first run sent, past the counter.
        sent = self._comm.bytes_sent - before
        self._counted = sent or self._counted
        self._comm.bytes_sent += self._counted - sent

    def gradients(self) -> None:
        """Forward, loss and backward; leaves the summed gradients in weights.grad and the summed signals."""
        runtime = self._runtime
        runtime.signals.copy_(self._own)
        runtime.run(self._plan.train)
        if self._comm.size > 1:
            summed = self._comm.all_reduce(runtime.weights.grad, runtime.backend.record())
            signalled = self._comm.all_reduce(runtime.signals, runtime.backend.record())
            summed.wait()
            signalled.wait()

    def history(self, first: int, last: int) -> npt.NDArray[np.float64]:
        """Return the signals summed over ranks of epochs first .. last - 1, (last - first, 3). Waits for the device."""
        return self._history[first:last].cpu().numpy()

    def _whole(self) -> None:
        self.gradients()
        epoch = self._runtime.clock[1:]
        self._history.index_copy_(0, epoch, self._runtime.signals.view(1, -1))
        torch.index_select(self._rates, 0, epoch, out=self._rate)
        with self._watch.doing("optimizer"):
            self._optimizer.step(self._rate[0])
        epoch.add_(1)
