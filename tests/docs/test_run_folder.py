"""docs/run-folder.md lists the files of a run folder, and the fields of those that scripts read, and no others."""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import mggcn
import mggcn.nn
from mggcn.graph.generate import community
from tests.cli.runs import run_main

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "run-folder.md").read_text()
SIGNS = {"NAME": "run-*", "R": "[0-9]*", "S": "[0-9]*", "K": "[0-9]*"}
ROW = re.compile(r"^\| ((?:`[^`]+` ?)+)\| ([^|]+) \|", re.MULTILINE)
RECORDS = ("plan.json", "job.json", "result.json", "history.jsonl")
SAVED = {
    "always",
    "before the first epoch",
    "from the first epoch on",
    "from set-up on",
    "once saved",
    "once validated",
    "when the run is complete",
}
PLANNED = {"planned models", "classes and labels"}


def table(heading: str) -> dict[str, str]:
    """The names of a section's table, each with when it is there."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return {name: when for names, when in ROW.findall(section) for name in re.findall(r"`([^`]+)`", names)}


class Layer(torch.nn.Module):
    """A module of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = torch.nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, part: mggcn.nn.PartitionedGraph) -> torch.Tensor:
        scores: torch.Tensor = self.dense(mggcn.nn.aggregate(x, part))
        return scores


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[Path, set[str]]:
    """Complete runs, each with what decides whether a file or a field is there."""
    root = tmp_path_factory.mktemp("runs")
    graph = community(300, 1500, 8, 3, seed=71, train=0.3)
    mggcn.save(graph, root / "plain")
    mggcn.save(dataclasses.replace(graph, class_names=("red", "green", "blue")), root / "named")
    options = ["--epochs", 2, "--threads", 1, "--quiet", "--out"]
    assert run_main("train", root / "plain", *options, root / "chosen", "--strategy", "auto") == 0
    assert run_main("predict", root / "chosen") == 0
    cut = ["--ranks", 2, "--transport", "threads", "--strategy", "delayed", "--delay", 1]
    repeated = [*cut, "--repeat", 2, "--start-from", root / "chosen"]
    assert run_main("train", root / "named", *options, root / "repeated", *repeated) == 0
    assert run_main("train", root / "plain", *options, root / "paged", "--set", "run.capacity=disk") == 0
    mggcn.Trainer(mggcn.load(root / "plain"), mggcn.GCN(hidden=8), out=root / "python", threads=1).fit(2)
    mggcn.Trainer(graph, Layer(), out=root / "own", threads=1).fit(2)
    return {
        root / "chosen": SAVED | PLANNED | {"`auto`", "`mggcn predict`"},
        root / "repeated": SAVED
        | PLANNED
        | {"`--repeat`", "`--start-from`", "delayed strategy", "graphs that have some"},
        root / "paged": SAVED | PLANNED | {"rows on disk", "rows on disk or on the host"},
        root / "python": SAVED | PLANNED,
        root / "own": SAVED | {"modules of your own"},
    }


def test_the_files_are_those_of_the_page(runs: Mapping[Path, set[str]]) -> None:
    """Fails if a run leaves a file that the page does not list, or not one that it promises."""
    listed = {re.sub(r"\b[A-Z]+\b", lambda sign: SIGNS[sign[0]], name): when for name, when in table("Files").items()}
    assert len(listed) > 20
    for run, occasions in runs.items():
        found = [str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()]
        assert [name for name in found if not any(fnmatch.fnmatchcase(name, known) for known in listed)] == []
        for pattern, when in listed.items():
            assert bool(fnmatch.filter(found, pattern)) == (when in occasions), (run.name, pattern)


@pytest.mark.parametrize("name", RECORDS)
def test_the_fields_are_those_of_the_page(name: str, runs: Mapping[Path, set[str]]) -> None:
    """Fails if a field is added, renamed or left out without a word on the page."""
    listed = table(name)
    assert len(listed) >= 7
    for run, occasions in runs.items():
        records: list[dict[str, Any]] = [json.loads(line) for line in _documents(run / name)]
        for record in records:
            assert record.keys() == {field for field, when in listed.items() if when in occasions}, run.name


def test_the_fields_inside_are_those_of_the_page(runs: Mapping[Path, set[str]]) -> None:
    """Fails if versions, scores or a rank's sizes are others than the page says."""
    for run, occasions in runs.items():
        result, plan = (json.loads((run / name).read_text()) for name in ("result.json", "plan.json"))
        assert all(f"`{name}`" in PAGE for name in result["versions"])
        assert result["final"].keys() == result["best"].keys() == {"epoch", "train", "val", "test"}
        stable = {"rank", "rows", "nnz", "arena_bytes", "total_bytes", "regions", "buffers"}
        stable |= {"messages_per_epoch", "bytes_sent_per_epoch"} if "planned models" in occasions else set()
        for rank in plan["per_rank"]:
            assert stable <= rank.keys()
            assert max(sum(rank["regions"].values()), rank.get("setup_bytes", 0)) == rank["total_bytes"]


def test_what_the_page_reads_is_there(runs: Mapping[Path, set[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the page's way to the weights, or the table of the command line, is no longer right."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    for run, occasions in runs.items():
        names: dict[str, Any] = {}
        exec(code.replace("runs/first", str(run)), names)
        assert ("layers.1.weight" in names["weights"]) == ("planned models" in occasions)


def _documents(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
