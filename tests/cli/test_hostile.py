"""Run folders and stores that somebody else has filled: every file in turn is no file, damaged or without end."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from mggcn.config.files import from_toml
from tests.cli.runs import run_main
from tests.planted import DAMAGE, plant

LIMIT_S = 20.0
"""Seconds after which a command hangs: it takes a tenth of one."""
IN_RUN = (
    "config.toml",
    "plan.json",
    "job.json",
    "history.jsonl",
    "result.json",
    "status/rank-0.json",
    "checkpoints/latest",
    "checkpoints/*/progress.json",
    "checkpoints/*/weights.safetensors",
    "checkpoints/*/best.safetensors",
)
IN_STORE = ("meta.json", "tuned.json", ".trusted.json", "indptr.npy", "features.npy", "labels.npy", "train.npy")
SETTINGS = ["--threads", 1, "--set", "model.hidden=4", "--epochs", 2]
TITLE = "\x1b]0;title\x07\x1b[31m\u202e\x9b1m"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store and a run on it."""
    root = tmp_path_factory.mktemp("hostile")
    store = root / "store"
    assert run_main("generate", "community", store, "--vertices", 60, "--edges", 200, "--features", 4) == 0
    assert run_main("train", store, *SETTINGS, "--quiet", "--out", root / "run") == 0
    return root


@pytest.fixture
def here(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "here")
    job = tmp_path / "here" / "run" / "job.json"
    job.write_text(job.read_text().replace(str(made), str(tmp_path / "here")))
    return tmp_path / "here"


@pytest.fixture(autouse=True)
def _bound() -> Iterator[None]:
    """End a command that waits for ever."""

    def hangs(number: int, frame: FrameType | None) -> None:
        raise AssertionError("the command hangs")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def ended(capsys: pytest.CaptureFixture[str], *arguments: object) -> int:
    """Run a command, which may refuse what it finds in one line, and return its exit code."""
    capsys.readouterr()
    code = run_main(*arguments)
    err = capsys.readouterr().err
    assert code in (0, 2), err
    assert err.count("\n") == (1 if code else 0), err
    assert "Traceback" not in err
    assert all(c.isprintable() or c == "\n" for c in err), err
    return code


@pytest.mark.covering(2)
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", IN_RUN)
@pytest.mark.parametrize("command", ["status", "predict", "train --resume", "train --start-from"])
def test_every_file_of_a_run(
    here: Path, capsys: pytest.CaptureFixture[str], command: str, name: str, damage: str
) -> None:
    """Fails if a command hangs at a file of a run, reads without end, or ends in a traceback."""
    (place,) = (here / "run").glob(name)
    plant(place, damage)
    first, *more = command.split()
    started = [here / "store", "--quiet", "--out", here / "new"] if "--start-from" in more else []
    ended(capsys, first, *started, *more, here / "run")


@pytest.mark.covering(1)
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["config.toml", "plan.json", "history.jsonl", "result.json"])
def test_every_file_of_a_report(here: Path, capsys: pytest.CaptureFixture[str], name: str, damage: str) -> None:
    """Fails if a report hangs at a file of a run, reads without end, or ends in a traceback."""
    plant(here / "run" / name, damage)
    ended(capsys, "report", here / "run")


@pytest.mark.covering(2)
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", IN_STORE)
@pytest.mark.parametrize("command", ["train", "plan", "store info", "store verify"])
def test_every_file_of_a_store(
    here: Path, capsys: pytest.CaptureFixture[str], command: str, name: str, damage: str
) -> None:
    """Fails if a command hangs at a file of a store, reads without end, or ends in a traceback."""
    plant(here / "store" / name, damage)
    more = [*SETTINGS, "--quiet", "--out", here / "new"] if command == "train" else []
    ended(capsys, *command.split(), here / "store", *more)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("plan.json", "{}"),
        ("plan.json", '{"graph": {"name": "x"}, "per_rank": []}'),
        ("plan.json", '{"graph": 3, "per_rank": [1]}'),
        ("job.json", '{"store": 7, "graph_sha256": []}'),
        ("job.json", '{"store": "a\\u0000b", "graph_sha256": "0"}'),
        ("history.jsonl", '{"epoch": 1, "loss": null}\n'),
        ("history.jsonl", '{"epoch": "one", "loss": "much"}\n'),
        ("history.jsonl", "[" * 5000 + "\n"),
        ("config.toml", "x"),
        ("config.toml", "[train]\nepochs = " + "[" * 5000),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_a_damaged_run_hides_no_other(
    here: Path, capsys: pytest.CaptureFixture[str], name: str, content: str, as_json: bool
) -> None:
    """Fails if one run that cannot be read takes the lines of others away, or is passed over itself."""
    for run in ("a", "b", "c"):
        shutil.copytree(here / "run", here / "runs" / run)
    (here / "runs" / "b" / name).write_text(content)
    assert run_main("status", here / "runs", *(["--json"] if as_json else [])) == 2
    said = capsys.readouterr()
    if as_json:
        found = {Path(run["folder"]).name: run["state"] for run in json.loads(said.out)["runs"]}
        assert found == {"a": "complete", "b": "damaged", "c": "complete"}
        return
    assert said.err == ""
    lines = said.out.splitlines()
    assert [line.partition(":")[0][-1] for line in lines] == ["a", "b", "c"]
    assert ["damaged: " in line for line in lines] == [False, True, False]
    assert name in lines[1]


@pytest.mark.parametrize("gone", ["plan.json", "job.json", "config.toml", "all"])
def test_a_run_without_a_file_and_a_path_without_a_run_hide_no_other(
    here: Path, capsys: pytest.CaptureFixture[str], gone: str
) -> None:
    """Fails if a run of which a part is missing is not listed, or a wrong path ends the list."""
    shutil.copytree(here / "run", here / "runs" / "b")
    (shutil.rmtree if gone == "all" else os.unlink)(here / "runs" / "b" / ("" if gone == "all" else gone))
    assert run_main("status", here / "runs" / "b", here / "run") == 2
    first, second = capsys.readouterr().out.splitlines()
    assert "damaged: " in first
    assert ": complete, epoch 2 of 2" in second


@pytest.mark.parametrize("state", ["\x1b[2J", "done", "", "complete\n"])
def test_states_are_those_that_are_known(here: Path, capsys: pytest.CaptureFixture[str], state: str) -> None:
    """Fails if status prints whatever a file says of a rank."""
    (here / "run" / "result.json").unlink()
    path = here / "run" / "status" / "rank-0.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"state": state}))
    assert run_main("status", here / "run") == 0
    assert ": not begun, epoch" in capsys.readouterr().out


def raw(text: str) -> list[str]:
    """Return the characters of an output that a terminal acts on."""
    return [c for c in text if not c.isprintable() and c != "\n"]


@pytest.mark.parametrize("command", ["train", "plan", "plan --explain", "store info", "store verify", "partition"])
def test_the_name_of_a_store_is_escaped(here: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    """Fails if control characters of a store's name reach the terminal."""
    path = here / "store" / "meta.json"
    meta = json.loads(path.read_text())
    del meta["meta_sha256"]
    path.write_text(json.dumps(meta | {"name": TITLE}))
    first, *words = command.split()
    store = [*words, here / "store"] if first == "store" else [here / "store", *words]
    more = {"train": [*SETTINGS, "--out", here / "new"], "partition": ["--parts", 2]}.get(first, [])
    assert run_main(first, *store, *more) == 0
    said = capsys.readouterr()
    assert raw(said.out + said.err) == []
    if command != "store verify":
        assert r"\x1b]0;title\x07\x1b[31m\u202e\x9b1m" in said.out


@pytest.mark.parametrize("command", ["status", "predict", "report", "train --resume", "train --out", "plan", "typo"])
def test_the_name_of_a_folder_is_escaped(here: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    """Fails if control characters of a path reach the terminal, as output or in an error."""
    where = here / f"x{TITLE}"
    first, *words = command.split()
    if words == ["--out"]:
        arguments: list[Any] = [first, here / "store", *SETTINGS, "--out", where]
    elif first in ("plan", "typo"):
        (here / "store").rename(where)
        arguments = [first, where]
    else:
        (here / "run").rename(where)
        arguments = [first, *words, where]
    assert run_main(*arguments) == (2 if first == "typo" else 0)
    said = capsys.readouterr()
    assert raw(said.out + said.err) == []


def test_the_host_of_a_rank_is_escaped(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if the name of a machine, as a file has it, reaches the terminal."""
    path = here / "run" / "status" / "rank-0.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"host": TITLE}))
    assert run_main("status", here / "run") == 0
    assert raw(capsys.readouterr().out) == []


OUTPUTS = ("y.csv", "y.parquet", "y.npy")


@pytest.mark.parametrize("kind", ["link", "FIFO", "folder"])
@pytest.mark.parametrize("name", OUTPUTS)
def test_predictions_follow_nothing(here: Path, capsys: pytest.CaptureFixture[str], name: str, kind: str) -> None:
    """Fails if a file that lies at the name of the temporary one is written, or waited for."""
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    (victim := here / "victim").write_text("precious")
    plant(here / f".{name}.tmp", f"link to {victim}" if kind == "link" else kind)
    assert ended(capsys, "predict", here / "run", "--out", here / name) == 0
    assert victim.read_text() == "precious"
    assert (here / name).is_file()
    assert not (here / name).is_symlink()
    assert sorted(path.name for path in here.glob(f".{name}*")) == [f".{name}.tmp"]


@pytest.mark.parametrize(
    "name", ["config.toml", "plan.json", "job.json", "history.jsonl", "result.json", "status/.rank-0.json"]
)
@pytest.mark.parametrize("kind", ["link", "FIFO"])
def test_runs_follow_nothing(here: Path, capsys: pytest.CaptureFixture[str], name: str, kind: str) -> None:
    """Fails if a resumed run writes through a link, or waits for a FIFO, where a temporary file was of a known name."""
    (victim := here / "victim").write_text("precious")
    path = here / "run" / name
    plant(path.with_name(f".{path.name.lstrip('.')}.tmp"), f"link to {victim}" if kind == "link" else kind)
    assert ended(capsys, "train", "--resume", here / "run", "--epochs", 3, "--quiet") == 0
    assert victim.read_text() == "precious"
    assert from_toml(here / "run" / "config.toml").train.epochs == 3


@pytest.mark.parametrize("arguments", [[TITLE], ["train", "x", f"--{TITLE}"], ["plan", "--ranks", TITLE]])
def test_arguments_are_escaped(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    """Fails if control characters of an argument, as a shell's pattern finds them among files, reach the terminal."""
    assert run_main(*arguments) == 2
    said = capsys.readouterr()
    assert raw(said.out + said.err) == []
