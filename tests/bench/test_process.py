"""Contenders in processes of their own: rounds, deaths, peaks; and what a report quotes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import contest, process
from bench.process import Worker, alternate, for_each, started
from bench.report import ROOT, shown

DIES = """
import os
from bench.process import Contender, serve


def prepare(job):
    left = iter(range(job["epochs"]))
    return Contender(lambda: float(next(left, -1) + 1 or os.kill(os.getpid(), 11) or 0), {})


serve(prepare)
"""
"""A worker that trains some epochs and then kills itself."""


@pytest.fixture
def dying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "dying_worker.py").write_text(DIES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "dying_worker"


def test_a_contender_that_dies_loses_its_own_row(dying: str) -> None:
    """Fails if a signal in one contender's process takes the epochs of the others, or hides what happened."""
    starts = {name: lambda n=n: Worker(dying, "tuned", 1, {"epochs": n}) for name, n in (("a", 9), ("b", 1))}
    lost: dict[str, str] = {}
    with started(starts, lost) as workers:
        epochs = alternate(workers, 4, lost)
        assert list(workers) == ["a"]
    assert lost == {"b": "died: signal 11"}
    assert list(epochs) == ["a"]
    assert [run["loss"] for run in epochs["a"]] == [1.0, 2.0, 3.0, 4.0]


def test_a_comparison_says_who_died(dying: str) -> None:
    """Fails if the report's table keeps a row of the dead, loses one of the living, or names no reason."""
    starts = {name: lambda malloc, n=n: Worker(dying, malloc, 1, {"epochs": n}) for name, n in (("a", 9), ("b", 3))}
    found = contest.compare(starts, rounds=2)
    assert found["left_out"] == {"b": "died: signal 11"}
    assert list(found["seconds"]) == list(found["peak_bytes"]) == list(found["loss_error"]) == ["a"]
    found["prepared"]["a"]["imported"] = 0
    assert contest.described(found, 1).endswith("Left out: b: died: signal 11.\n")


def test_a_contender_that_cannot_start_loses_its_own_row(dying: str) -> None:
    """Fails if one that fails while it gets ready ends the comparison, or is not said to be left out."""
    starts = {name: lambda job=job: Worker(dying, "tuned", 1, job) for name, job in (("a", {"epochs": 9}), ("b", {}))}
    lost: dict[str, str] = {}
    with started(starts, lost) as workers:
        assert list(alternate(workers, 1, lost)) == ["a"]
    assert lost == {"b": "KeyError: 'epochs'"}


def test_a_worker_that_died_while_idle_is_a_worker_s_error(dying: str) -> None:
    """Fails if its broken pipe ends a benchmark, which leaves out what raises RuntimeError."""
    worker = Worker(dying, "tuned", 1, {"epochs": 1})
    worker.process.kill()
    worker.process.wait()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^died: signal 9$"):
            worker.ask("epoch")
    lost: dict[str, str] = {}
    workers = {"a": worker}
    assert for_each(workers, lost, lambda _, w: w.ask("forget")) == {}
    assert (workers, lost) == ({}, {"a": "died: signal 9"})


def test_rounds_are_shuffled_and_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a contender is left out of a round, or all rounds have one order."""
    monkeypatch.setattr(process, "SETTLE_S", 0.0)
    asked: list[str] = []

    class Asked:
        def __init__(self, name: str) -> None:
            self.name = name

        def ask(self, _: str) -> dict[str, Any]:
            asked.append(self.name)
            return {"seconds": 1.0}

    names = ["a", "b", "c"]
    found = alternate({name: Asked(name) for name in names}, 6, {})  # type: ignore[misc]
    rounds = [tuple(asked[start : start + 3]) for start in range(0, 18, 3)]
    assert all(sorted(one) == names for one in rounds)
    assert len(set(rounds)) > 1
    assert {name: len(runs) for name, runs in found.items()} == dict.fromkeys(names, 6)


def test_what_others_do_meanwhile_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a contender's own work is taken for others', or others' for none."""
    monkeypatch.setattr(process, "SETTLE_S", 0.0)
    busy = iter((10.0, 13.0, 20.0, 21.0))
    clock = iter((0.0, 2.0, 2.0, 4.0))
    monkeypatch.setattr(process, "busy_s", lambda: next(busy))
    monkeypatch.setattr(process.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(process.os, "cpu_count", lambda: 2)

    class Asked:
        def ask(self, _: str) -> dict[str, Any]:
            return {"seconds": 1.0, "cpu_seconds": 2.0}

    runs = alternate({"a": Asked()}, 2, {})["a"]  # type: ignore[dict-item]
    assert [run["beside"] for run in runs] == [0.25, 0.0]


def test_reports_quote_no_path_of_the_machine() -> None:
    """Fails if a folder outside the repository is told, or one inside is hidden."""
    inside = str(ROOT / "bench" / "results")
    assert shown("/home/someone/graphs") == "<graphs>"
    assert shown("--cache=/home/someone/graphs") == "--cache=<graphs>"
    assert shown(inside) == "bench/results"
    assert [shown(text) for text in ("--rounds", "3", "a=b")] == ["--rounds", "3", "a=b"]


def test_memory_counts_processes_that_were_started_and_shared_pages_once() -> None:
    """Fails if a process that was started is left out, or pages that it shares with its parent count twice."""
    code = (
        "import os, signal; from bench import process; before = process.held()['Pss_Anon']; held = bytearray(64 << 20)\n"
        "ends = os.pipe(); child = os.fork()\n"
        "if not child: own = bytearray(32 << 20); os.write(ends[1], b'.'); signal.pause()\n"
        "os.read(ends[0], 1); print(process.held()['Pss_Anon'] - before); os.kill(child, 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert 96 << 20 <= int(done.stdout) < 112 << 20


def test_a_worker_forgets_its_peak() -> None:
    """Fails if memory that was held before counts as the peak of what follows."""
    code = (
        "from bench import process\n"
        "held = bytearray(64 << 20); before = process.memory()['VmHWM']\n"
        "del held; process.forget_peak(); print(before - process.memory()['VmHWM'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert int(done.stdout) > 48 << 20


def test_a_memory_group_limits_and_counts() -> None:
    """Fails if a command is not in its control group, or the group stays behind."""
    try:
        with process.memory_group(256 * 2**20) as group:
            process.mggcn("--version", group=group)
            peak = process.group_peak(group)
    except OSError as error:
        pytest.skip(f"control groups cannot be made here: {error}")
    assert not group.exists()
    assert 2**20 < peak <= 256 * 2**20
