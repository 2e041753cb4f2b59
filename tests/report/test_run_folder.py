"""mggcn/report/run_folder.py: what is absent or damaged is named."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mggcn.errors import RunError
from mggcn.report.run_folder import read_run
from tests.report.run_folders import write_run


@pytest.mark.parametrize("name", ["config.toml", "history.jsonl", "plan.json"])
def test_missing_file(tmp_path: Path, name: str) -> None:
    run = write_run(tmp_path / "run", epochs=3)
    (run / name).unlink()
    with pytest.raises(RunError, match=f"not a complete run folder: {re.escape(name)} missing"):
        read_run(run)


def test_no_folder_and_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is not a run folder"):
        read_run(tmp_path / "absent")
    with pytest.raises(RunError, match=r"config\.toml, history\.jsonl, plan\.json missing"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.toml", b"[train", "is not valid TOML"),
        ("config.toml", b"train = 3", "must be a table"),
        ("config.toml", b"\xff", "is not valid TOML"),
        ("history.jsonl", b"\n", "has no completed epoch"),
        ("history.jsonl", b'{"epoch": 1', "line 1 is not valid JSON"),
        ("history.jsonl", b'{"epoch": 1, "loss": 2}', "line 1 lacks 'train'"),
        ("history.jsonl", b"3", "line 1 is not valid JSON: it must hold a JSON object, got int"),
        ("plan.json", b'{"ranks": 1', "is not valid JSON"),
        ("plan.json", b"[]", "must hold a JSON object"),
        ("plan.json", b"{}", "lacks 'ranks'"),
        ("result.json", b"", "is not valid JSON"),
        ("result.json", b"{}", "lacks 'metric'"),
        ("result.json", b'{"metric": "accuracy"}', "lacks 'best.epoch'"),
    ],
)
def test_damaged_file(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    run = write_run(tmp_path / "run", epochs=3)
    (run / name).write_bytes(content)
    with pytest.raises(RunError, match=re.escape(message)) as caught:
        read_run(run)
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda plan: plan["graph"].pop("num_edges"), "lacks 'graph.num_edges'"),
        (lambda plan: plan["programs"].pop("train"), "lacks 'programs.train'"),
        (lambda plan: plan["per_rank"].pop(), "one entry for each of 2 ranks, got 1"),
        (lambda plan: plan["per_rank"][1].pop("regions"), "per_rank lacks 'regions'"),
        (lambda plan: plan["per_rank"][1]["buffers"][0].pop("offset"), "buffers lacks 'offset'"),
        (lambda plan: plan["partition"]["nnz"].pop(), "partition.nnz must be 2 x 2"),
    ],
)
def test_partial_plan(tmp_path: Path, spoil: Callable[[dict[str, Any]], object], message: str) -> None:
    run = write_run(tmp_path / "run", ranks=2, epochs=3)
    plan = json.loads((run / "plan.json").read_text())
    spoil(plan)
    (run / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(RunError, match=re.escape(message)):
        read_run(run)


def test_torn_line_of_a_finished_run_is_an_error(tmp_path: Path) -> None:
    """Only an interruption explains a torn line."""
    run = write_run(tmp_path / "run", epochs=3)
    with (run / "history.jsonl").open("a") as file:
        file.write('{"epoch"')
    with pytest.raises(RunError, match="line 4 is not valid JSON"):
        read_run(run)
    (run / "result.json").unlink()
    record = read_run(run)
    assert [epoch["epoch"] for epoch in record.runs[0]] == [1, 2, 3]
    assert len(record.notes) == 2


def test_history_of_repeats_and_of_a_resumed_run(tmp_path: Path) -> None:
    """Repeats are kept apart; an epoch that a resumed run repeats counts once, as it was last."""
    record = read_run(write_run(tmp_path / "repeats", repeats=3, epochs=10))
    assert [len(epochs) for epochs in record.runs.values()] == [10, 7, 4]
    run = write_run(tmp_path / "run", epochs=3)
    again = json.loads((run / "history.jsonl").read_text().splitlines()[1]) | {"loss": 77.0}
    with (run / "history.jsonl").open("a") as file:
        file.write(json.dumps(again))
    assert [epoch["loss"] == 77.0 for epoch in read_run(run).runs[0]] == [False, True, False]


def test_metric_of_an_interrupted_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", epochs=3, finished=False)
    assert read_run(run).metric == "score"
    (run / "config.toml").write_text('[train]\nmetric = "macro_f1"\n')
    assert read_run(run).metric == "macro_f1"
