"""How `python -m bench.gpu` runs its tasks: what counts as finished, what a lost task leaves, what is refused."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from pathlib import Path

import pytest

from bench.gpu import __main__ as gpu
from bench.gpu import tasks as gpu_tasks
from bench.gpu.graphs import Preparation, available, find_store, workload
from bench.gpu.lab import Settings
from bench.gpu.tasks import Task, digest, finished, read_rows, run, tasks
from bench.report import ROOT


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


def test_the_commands_of_the_guide_measure_every_task_once() -> None:
    """Fails if docs/gpu.md names a part that is not there, leaves one out, or has it measured by two commands."""
    guide = (ROOT / "docs" / "gpu.md").read_text()
    found = [
        quoted or plain
        for quoted, plain in re.findall(r'-m bench\.gpu --minutes 9 --parts (?:"([^"]+)"|([\w,]+))', guide)
    ]
    named = [task.name for parts in found for task in tasks(parts.split(","))]
    assert sorted(named) == sorted(task.name for task in gpu_tasks.ORDER)


def test_a_task_that_overruns_is_ended(toy: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a hanging part takes longer than there is, or its process stays."""
    monkeypatch.setattr(gpu_tasks, "START_S", 0.5)
    began = time.monotonic()
    assert run(Task("ceilings"), tmp_path, toy, began + 1) == (
        "cut off: the time is up; call again with the same --out"
    )
    assert time.monotonic() - began < 20
    assert not finished(Task("ceilings"), tmp_path, toy, keep=True)


def test_another_process_goes_on_until_there_is_nothing_new(
    toy: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a task ends with the process of its first contender, or begins for ever what ends every process."""
    part = tmp_path / "bench" / "gpu" / "part.py"
    part.parent.mkdir(parents=True)
    for package in (part.parent, part.parent.parent):
        (package / "__init__.py").touch()
    part.write_text(
        "import json, sys\n"
        "job = json.loads(sys.argv[1])\n"
        "rows = open(job['file'], 'a+')\n"
        "rows.seek(0)\n"
        "count = rows.read().count('row')\n"
        "rows.write(json.dumps({'kind': 'start'}) + '\\n')\n"
        "if count < 3: rows.write(json.dumps({'kind': 'row', 'number': count}) + '\\n')\n"
        "sys.exit(int(job['cache']) if count < 3 or job['cache'] == '9' else 0)\n"
    )
    monkeypatch.setattr(gpu_tasks, "ROOT", tmp_path)
    task, until = Task("ceilings"), time.monotonic() + 100
    assert run(task, tmp_path, dataclasses.replace(toy, cache=str(gpu_tasks.AGAIN)), until) == ""
    assert [row["number"] for row in read_rows(task.file(tmp_path)) if row["kind"] == "row"] == [0, 1, 2]
    task.file(tmp_path).unlink()
    assert run(task, tmp_path, dataclasses.replace(toy, cache="9"), until) == "failed with code 9"
    assert len([row for row in read_rows(task.file(tmp_path)) if row["kind"] == "row"]) == 3


def test_no_task_starts_without_time(toy: Settings, tmp_path: Path) -> None:
    assert run(Task("ceilings"), tmp_path, toy, time.monotonic() + 5) == "no time left; call again with the same --out"


@pytest.mark.slow
def test_a_task_that_fails_says_so(toy: Settings, tmp_path: Path) -> None:
    """The case does not exist: the process ends with 1, its rows with the reason."""
    task = Task("epoch", "cora 9x9")
    assert run(task, tmp_path, toy, time.monotonic() + 100) == ("not finished: KeyError: 'cora 9x9'")
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
    assert "File exists" in Preparation(["cora"], toy.scale, blocked, "").wait("cora", time.monotonic() + 100)


def test_real_graphs_are_taken_where_they_are(data_root: Path) -> None:
    assert find_store("cora", 1.0, "nowhere", str(data_root)) == data_root / "cora"
    assert available("arxiv-like", "")
    assert not available("cnr_2000", "")
    assert workload("cora", 1e-3).vertices == 2708


@pytest.mark.full
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
