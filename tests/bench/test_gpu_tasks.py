"""How bench/gpu.py runs its tasks: what counts as finished, what a lost task leaves, what is refused."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import gpu
import gpu_tasks
import pytest
from gpu_graphs import Preparation, available, find_store, workload
from gpu_lab import Settings
from gpu_tasks import Task, digest, finished, read_rows, run, tasks


def rows_of(folder: Path, settings: Settings, *, stopped: str = "", source: str = "") -> Task:
    """A task with a start, one row and an end in a folder."""
    task = Task("ceilings")
    start = {"kind": "start", "settings": dataclasses.asdict(settings), "digest": source or digest()}
    lines = [start, {"kind": "copy"}, {"kind": "end", "stopped": stopped}]
    task.file(folder).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return task


def test_finished_under_the_same_settings_and_sources(toy: Settings, tmp_path: Path) -> None:
    """Fails if old, stopped or differently scaled rows are taken for these."""
    assert finished(rows_of(tmp_path, toy), tmp_path, toy, keep=False)
    assert not finished(rows_of(tmp_path, toy, stopped="budget"), tmp_path, toy, keep=True)
    other = rows_of(tmp_path, toy, source="another")
    assert not finished(other, tmp_path, toy, keep=False)
    assert finished(other, tmp_path, toy, keep=True)
    assert not finished(other, tmp_path, dataclasses.replace(toy, scale=1.0), keep=True)
    assert not finished(Task("overlap", "none"), tmp_path, toy, keep=True)


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"kind": "start"}\n{"kind": "co')
    assert read_rows(path) == [{"kind": "start"}]


def test_parts_and_single_tasks_are_chosen_by_name() -> None:
    assert [task.name for task in tasks(["epoch", "ceilings"])][:2] == ["ceilings", "epoch cora 2x16"]
    assert [task.name for task in tasks(["spmm cnr_2000"])] == ["spmm cnr_2000"]
    with pytest.raises(SystemExit, match="no such part: spm; there are ceilings"):
        tasks(["spm"])


def test_a_task_that_overruns_is_ended(toy: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a hanging part takes the time of the others, or its process stays."""
    monkeypatch.setattr(gpu_tasks, "START_S", 0.5)
    began = time.monotonic()
    assert run(Task("ceilings"), tmp_path, dataclasses.replace(toy, budget_s=0.0), began + 60) == (
        "stopped: it overran its budget"
    )
    assert time.monotonic() - began < 20


def test_no_task_starts_without_time(toy: Settings, tmp_path: Path) -> None:
    assert run(Task("ceilings"), tmp_path, toy, time.monotonic() + 5) == "no time left; call again with the same --out"


def test_a_task_that_fails_says_so(toy: Settings, tmp_path: Path) -> None:
    """The case does not exist: the process ends with 1, its rows with the reason."""
    task = Task("epoch", "cora 9x9")
    assert run(task, tmp_path, toy, time.monotonic() + 100) == "failed with code 1"
    assert read_rows(task.file(tmp_path))[-1]["stopped"] == "KeyError: 'cora 9x9'"
    assert "Traceback" in task.file(tmp_path).with_suffix(".log").read_text()


def test_graphs_come_in_the_background(toy: Settings, tmp_path: Path) -> None:
    """Fails if a waiting part is not told that its graph is there, or why it is not."""
    graphs = Preparation(["arxiv-like", "cora"], toy.scale, tmp_path, "")
    until = time.monotonic() + 100
    assert [graphs.wait(name, until) for name in ("arxiv-like", "cora")] == ["", ""]
    assert (find_store("arxiv-like", toy.scale, str(tmp_path), "") / "indptr.npy").exists()
    assert graphs.ready("cora")
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    assert "returned non-zero" in Preparation(["cora"], toy.scale, blocked, "").wait("cora", time.monotonic() + 100)


def test_real_graphs_are_taken_where_they_are(data_root: Path) -> None:
    assert find_store("cora", 1.0, "nowhere", str(data_root)) == data_root / "cora"
    assert find_store("arxiv-like", 1.0, "cache", str(data_root)).parent == Path("cache")
    assert available("arxiv-like", "")
    assert not available("cnr_2000", "")
    assert workload("cora", 1e-3).vertices == 2708


def test_one_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the command does not get from generating a graph to a report, or measures again what is finished."""
    monkeypatch.setenv("MGGCN_DATA", str(tmp_path))
    command = ["--device", "emulated", "--scale", "1e-4", "--quick", "--only", "accuracy cora", "--out", str(tmp_path)]
    assert gpu.main([*command, "--cache", str(tmp_path / "graphs")]) == 0
    rows = tmp_path / "rows" / "accuracy_cora.jsonl"
    before = rows.read_text()
    assert gpu.main([*command, "--cache", str(tmp_path / "elsewhere")]) == 0
    assert rows.read_text() == before
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert next(tmp_path.glob("gpu_emulated-gpu_*.md")).exists()
