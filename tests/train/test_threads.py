"""How many threads compute: chosen by what epochs take, of no effect on a bit."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mggcn
from mggcn.backend.cpu.backend import CpuBackend
from mggcn.backend.team import Team
from mggcn.host import ProcessorUse, ProcessorWatch
from mggcn.train.threads import ThreadChoice

QUIET, BUSY, SHARED = ProcessorUse(0.0, 1.0), ProcessorUse(0.6, 0.0), ProcessorUse(0.0, 0.0)


class Machine:
    """A machine on which an epoch takes `seconds[threads]`; `epochs` returns the threads of each epoch."""

    def __init__(self, planned: int, first: int, ranks: int = 1) -> None:
        self.use: ProcessorUse | None = QUIET
        self.team = Team(planned)
        self.choice = ThreadChoice(self.team, first, ranks, lambda: self.use)
        self.said: list[str] = []
        self.seconds: dict[int, float] = {}
        self._last, self._done, self._lag = 0.0, 0, ranks > 1

    def epochs(self, count: int) -> list[int]:
        threads = []
        for _ in range(count):
            threads.append(self.team.running)
            now = self.seconds[self.team.running]
            mean, self._last = self._last if self._lag else now, now
            self._done += 1
            self.said += filter(None, [self.choice.after_epoch(now, mean, self._done)])
        return threads


def test_short_epochs_get_threads_where_these_are_faster() -> None:
    """Fails if a quiet machine leaves cores idle that would shorten epochs, or keeps those that do not."""
    machine = Machine(8, 1)
    machine.seconds = {1: 0.004, 2: 0.0025, 4: 0.0016, 8: 0.0017}
    machine.epochs(60)
    assert machine.epochs(100).count(4) >= 80
    assert machine.said == []


@pytest.mark.parametrize("first", [1, 2])
def test_a_busy_machine_gets_one_thread(first: int) -> None:
    """Fails if epochs wait for a second thread, whether they began with it or tried it, more than now and then."""
    machine = Machine(2, first)
    machine.use, machine.seconds = BUSY, {1: 0.004, 2: 0.03}
    machine.epochs(12)
    assert machine.epochs(200).count(2) <= 2
    told = machine.said == ["the machine is busy: one thread from epoch 9 on, more when it is quiet"]
    assert told if first == 2 else not machine.said


def test_trials_cost_a_fiftieth_of_the_epochs() -> None:
    """Fails if trials go on although each shows the same."""
    machine = Machine(2, 1)
    machine.use, machine.seconds = SHARED, {1: 0.01, 2: 0.05}
    count = 20_000
    slow = machine.epochs(count).count(2)
    extra = slow * (0.05 - 0.01)
    assert 0 < extra <= 0.05 + 0.02 * (count * 0.01 + extra)


def test_a_quiet_machine_keeps_its_threads() -> None:
    """Fails if long epochs that wait for nothing are spent on trials."""
    machine = Machine(4, 4)
    machine.seconds = {1: 4.0, 2: 2.0, 4: 1.0}
    assert machine.epochs(100) == [4] * 100


def test_a_gpu_runs_on_the_one_thread_that_it_plans() -> None:
    """Fails if more threads than the team has are begun with, as on a GPU beside many cores."""
    machine = Machine(1, 16)
    machine.seconds = {1: 0.004}
    assert machine.epochs(9) == [1] * 9
    assert machine.choice.epochs == {1: 9}


def test_threads_come_back_when_the_machine_is_quiet() -> None:
    """Fails if one busy minute leaves a run with one thread for ever."""
    machine = Machine(2, 2)
    machine.use, machine.seconds = BUSY, {1: 1.0, 2: 2.5}
    assert machine.epochs(30)[-1] == 1
    machine.use, machine.seconds = QUIET, {1: 1.0, 2: 0.55}
    assert machine.epochs(40)[-20:] == [2] * 20


def test_fewer_threads_are_tried_without_a_sign_too() -> None:
    """Fails if epochs that fewer threads shorten keep all of them because nothing waits, or if that is told as busy."""
    for ranks, use in ((1, QUIET), (1, None), (2, None)):
        machine = Machine(2, 2, ranks=ranks)
        machine.use, machine.seconds = use, {1: 0.01, 2: 0.02}
        machine.epochs(300)
        assert machine.epochs(100).count(1) >= 90
        assert machine.said == []


def test_ranks_choose_alike() -> None:
    """Fails if ranks take different numbers of threads although they see the same seconds, or look at their own cores."""
    machines = [Machine(2, 2, ranks=2) for _ in range(2)]
    machines[1].use = BUSY
    for seconds in ({1: 1.0, 2: 0.6}, {1: 1.2, 2: 3.0}, {1: 1.0, 2: 0.6}):
        chosen = []
        for machine in machines:
            machine.seconds = seconds
            chosen.append(machine.epochs(400))
        assert chosen[0] == chosen[1]
        assert chosen[0][-1] == min(seconds, key=seconds.__getitem__)


MODELS = (
    mggcn.GCN(hidden=(70,), dropout=0.4, norm_layer="batch"),
    mggcn.GAT(hidden=(24,), heads=3, dropout=0.3, attention_dropout=0.2),
    mggcn.SAGE(hidden=(33, 20), aggregator="mean", self_loops=False, norm_layer="layer", residual="linear"),
    mggcn.GIN(hidden=(40,)),
    mggcn.APPNP(hidden=(40,), dropout=0.2),
)


@pytest.mark.covering(1, rest="slow")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.kind)
def test_bits_do_not_depend_on_when_threads_change(
    model: Any, precision: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a kernel sums in another order on fewer threads than its work space and blocks were made for."""
    edges = np.random.default_rng(5021).integers(0, 900, (2, 7000))
    x = np.random.default_rng(773).normal(size=(900, 37)).astype(np.float32)
    labels = np.arange(900) % 5
    splits = {"train": labels < 3, "val": labels == 3, "test": labels == 4}
    graph = mggcn.load(edges, features=x, labels=labels, splits=splits)
    if model.kind == "gat" and precision == "bf16":
        precision = "fp64"  # attention has no bf16
    monkeypatch.setattr("mggcn.assemble.rank.epoch_threads", lambda plan, threads: 4)
    transport = "threads" if ranks > 1 else "auto"
    histories, weights = [], []
    for sizes in ((4,), (1,), (1, 4, 2, 3)):
        turns = itertools.cycle(sizes)

        def chosen(self: ThreadChoice, seconds: float, mean_s: float, epoch: int, turns: Any = turns) -> str:
            self._team.running = next(turns)
            return ""

        monkeypatch.setattr(ThreadChoice, "after_epoch", chosen)
        trainer = mggcn.Trainer(graph, model, precision=precision, ranks=ranks, transport=transport, seed=90)
        history = trainer.fit(epochs=6)
        histories.append([(row["loss"], row["val"]) for row in history])
        weights.append(trainer.predict())
    assert histories[1] == histories[0]
    assert histories[2] == histories[0]
    np.testing.assert_array_equal(weights[2], weights[0])


@pytest.mark.parametrize(("threads", "planned"), [(0, True), (2, False)])
def test_threads_that_are_set_stay(threads: int, planned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a run takes fewer threads than run.threads, or never chooses."""
    looked = []
    monkeypatch.setattr(ThreadChoice, "after_epoch", lambda *_: looked.append(1) or "")
    labels = np.arange(60) % 3
    edges, splits = np.arange(120).reshape(2, 60) % 60, {"train": labels >= 0}
    graph = mggcn.load(edges, features=np.eye(60), labels=labels, splits=splits)
    mggcn.Trainer(graph, mggcn.GCN(hidden=(4,)), ranks=1, threads=threads).fit(epochs=3)
    assert bool(looked) == planned


def test_the_kernels_count_of_waiting(tmp_path: Path) -> None:
    """Fails if shares are read from the wrong columns, a thread that ended ends the look, or no /proc is an error."""
    assert ProcessorWatch(tmp_path).use() is None
    task = tmp_path / "proc/self/task"
    for name in ("7", "8", "9"):
        (task / name).mkdir(parents=True)
    (task / "7/schedstat").write_text("1000 50 3\n")
    (task / "8/schedstat").write_text("1000 0 3\n")
    (tmp_path / "proc/stat").write_text("cpu  100 0 0 100 0 0 0 0 0 0\ncpu0 1\n")
    watch = ProcessorWatch(tmp_path)
    assert watch.use() is None  # no time passed
    (task / "7/schedstat").write_text("1600 250 3\n")
    (task / "8/schedstat").write_text("1200 0 3\n")
    (tmp_path / "proc/stat").write_text("cpu  130 0 10 115 5 0 0 0 0 0\ncpu0 1\n")
    use = watch.use()
    assert use is not None
    assert use.waited == pytest.approx(200 / 1000)
    assert use.idle_cores == pytest.approx(20 / 60 * (os.cpu_count() or 1))


def test_this_machine_can_be_read() -> None:
    """Fails if a look raises, or counts more waiting than time."""
    watch = ProcessorWatch()
    backend = CpuBackend(torch.float32, 1)
    assert backend.team.running == 1
    sum(range(2_000_000))
    use = watch.use()
    assert use is None or 0 <= use.waited <= 1
