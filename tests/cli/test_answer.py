"""Answers as JSON: one document, with the keys that the page names, and nothing else on standard output."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mggcn.cli.answer import plain
from tests.cli.runs import refused, run_main

PAGE = Path(__file__).resolve().parents[2] / "docs" / "command-line.md"


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store, an edge list, a grid and a run."""
    folder = tmp_path_factory.mktemp("answers")
    assert run_main("generate", "community", folder / "g", "--vertices", 120, "--edges", 600, "--classes", 3) == 0
    (folder / "edges.txt").write_text("0 1\n1 2\n")
    (folder / "grid.toml").write_text("[train]\nepochs = 1\n[grid]\ntrain.lr = [0.1, 0.01]\n")
    assert run_main("train", folder / "g", "--epochs", 2, "--threads", 1, "--out", folder / "run", "--quiet") == 0
    return folder


def promised(command: str) -> set[str]:
    """The keys of a document that the page promises."""
    [cell] = re.findall(rf"^\| `{re.escape(command)}` \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    keys = set(
        re.findall(r"`(\w+)`", re.sub(r"\(.*?\)|: each .*?(?:;|$)|what `.*`(?= of)|and what .*?, such as", "", cell))
    )
    return (keys - {"generate"}) | (promised("generate") if cell.startswith("as `generate`") else set())


COMMANDS: dict[str, list[object]] = {
    "datasets": ["datasets", "--root", "{here}"],
    "doctor": ["doctor", "--quick"],
    "generate": ["generate", "rmat", "{here}/rmat", "--scale", 6],
    "partition": ["partition", "{here}/g", "--parts", 2],
    "partition --list": ["partition", "{here}/g", "--list"],
    "plan": ["plan", "{here}/g"],
    "predict": ["predict", "{here}/run", "--classes", "--out", "{here}/classes.csv"],
    "prepare": ["prepare", "{here}/edges.txt", "{here}/prepared"],
    "report": ["report", "{here}/run"],
    "settings": ["settings", "model"],
    "status": ["status", "{here}"],
    "store export": ["store", "export", "{here}/g", "{here}/out.txt"],
    "store info": ["store", "info", "{here}/g"],
    "store verify": ["store", "verify", "{here}/g"],
    "sweep": ["sweep", "{here}/grid.toml", "{here}/g", "--out", "{here}/sweep", "--at-once", 1],
    "train": ["train", "{here}/g", "--epochs", 2, "--threads", 1, "--out", "{here}/second"],
    "tune --store": ["tune", "--store", "{here}/g", "--threads", 1],
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full) if name == "sweep" else name for name in COMMANDS]
)
def test_an_answer_is_one_document(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if anything else is on standard output, the document is none, or a promised key is missing."""
    capsys.readouterr()
    code = run_main(*(str(word).format(here=here) for word in COMMANDS[name]), "--json")
    out = capsys.readouterr().out

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is no JSON")

    answer: dict[str, Any] = json.loads(out, parse_constant=refuse)
    assert code == (0 if answer.get("usable", True) else 1)
    assert promised(name)
    assert promised(name) <= answer.keys()


def test_answers_say_what_is_there(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if an answer has other numbers than the text, or the files."""

    def answer(*words: object) -> dict[str, Any]:
        capsys.readouterr()
        assert run_main(*words, "--json") == 0
        return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]

    trained = answer("train", "--resume", here / "run")
    assert trained["folder"] == str(here / "run")
    assert trained["best"] == json.loads((here / "run" / "result.json").read_text())["best"]
    found = answer("store", "info", here / "g")
    assert (found["vertices"], found["classes"], found["task"]) == (120, 3, "classes")
    assert found["files"]["indptr.npy"]["shape"] == [121]
    assert len(found["digest"]) == 64
    described = {entry["name"]: entry for entry in answer("settings")["settings"]}
    assert described["run.device"]["values"] == ["cpu", "cuda"]
    assert described["train.epochs"]["default"] == 200
    [run] = answer("status", here / "run")["runs"]
    assert (run["state"], run["epoch"]) == ("complete", 2)


@pytest.mark.parametrize(
    "command",
    [
        ["plan", "nowhere"],
        ["train", "nowhere"],
        ["store", "verify", "nowhere"],
        ["settings", "nowhere"],
        ["status", "nowhere"],
        ["sweep", "nowhere.toml", "nowhere"],
    ],
)
def test_an_error_leaves_standard_output_empty(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a refused command prints half a document, or its error as one."""
    assert "nowhere" in refused(capsys, *command, "--json")
    assert not capsys.readouterr().out


def in_process(words: list[object], timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run a command, in which a library in C prints, in a process of its own."""
    module = words[0]
    program = f"import os, sys; from mggcn.cli import {module}; run = {module}.run\n"
    program += "def loud(arguments):\n    os.write(1, b'loud')\n    return run(arguments)\n"
    program += f"{module}.run = loud\nfrom mggcn.cli.entry import main\nsys.exit(main())"
    command = [sys.executable, "-c", program, *map(str, words), "--json"]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


def test_libraries_print_beside_it() -> None:
    """Fails if what a library in C prints comes between: it knows the stream's number alone."""
    done = in_process(["settings", "lr"])
    assert [entry["name"] for entry in json.loads(done.stdout)["settings"]] == ["train.lr"]
    assert "loud" in done.stderr


@pytest.mark.full
def test_ranks_print_beside_it(here: Path, tmp_path: Path) -> None:
    """Fails if what a rank process prints comes between."""
    out = tmp_path / "run"
    ranks = ["--ranks", 2, "--transport", "gloo", "--threads", 1]
    done = in_process(["train", here / "g", *ranks, "--epochs", 2, "--out", out])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["folder"] == str(out)
    assert f"run folder {out}" in done.stderr


def test_plain_values() -> None:
    """Fails if a value of numpy's, a path or a number that is not finite makes no JSON."""
    value = {"a": np.float32(0.5), "b": [np.int64(3), float("nan")], 3: (Path("x"), np.arange(2)), "d": True}
    assert plain(value) == {"a": 0.5, "b": [3, None], "3": ["x", [0, 1]], "d": True}
