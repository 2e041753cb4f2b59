"""Standard output and error that are closed, full, left by their reader, or short of letters."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mggcn import output
from mggcn.train.log import RunLog
from tests.cli.runs import run_main

ROOT = Path(__file__).resolve().parents[1]
FULL = "mggcn: standard output could not be written: No space left on device"


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store."""
    folder = tmp_path_factory.mktemp("output")
    assert run_main("generate", "community", folder / "g", "--vertices", 120, "--edges", 500) == 0
    return folder


def shell(here: Path, command: str, **env: str) -> tuple[int, str, str]:
    """Run `mggcn COMMAND` in a shell; return its exit code and what it printed."""
    given = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    line = f'"{sys.executable}" -m mggcn {command}; exit "${{PIPESTATUS[0]}}"'
    done = subprocess.run(["bash", "-c", line], cwd=here, env=given, capture_output=True, timeout=120)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("datasets > /dev/full", 2, FULL),
        ("datasets --json > /dev/full", 2, FULL),
        ("store info g > /dev/full", 2, FULL),
        ("--help > /dev/full", 2, FULL),
        ("datasets | true", 0, ""),
        ("datasets >&-", 0, ""),
        ("datasets > /dev/full 2> /dev/full", 2, ""),
        pytest.param("plan g > /dev/full", 2, FULL, marks=pytest.mark.slow),
        pytest.param("plan g --json > /dev/full", 2, FULL, marks=pytest.mark.slow),
        pytest.param("settings --help > /dev/full", 2, FULL, marks=pytest.mark.slow),
        pytest.param("settings 2>&- > /dev/full", 2, "", marks=pytest.mark.full),
    ],
)
def test_an_answer_that_cannot_be_printed_is_one_line(here: Path, command: str, code: int, said: str) -> None:
    """Fails if a command whose output is lost ends in a traceback, in silence, or with another code."""
    found, _, err = shell(here, command)
    assert found == code, err
    # With --json standard error has what else there is to say.
    assert (said in err) if "--json" in command else err.startswith(said)
    assert "Traceback" not in err
    assert "--json" in command or err.count("\n") == bool(said), err


@pytest.mark.parametrize(
    ("streams", "ranks"),
    [
        (">&- 2>&-", 1),
        pytest.param("| true", 1, marks=pytest.mark.slow),
        pytest.param("> /dev/full 2>&1", 2, marks=pytest.mark.slow),
        *(
            pytest.param(text, ranks, marks=pytest.mark.slow)
            for text in (">&- 2>&-", "> /dev/full", ">&-", "2>&-", "2> /dev/full", "> /dev/full 2>&1", "| true")
            for ranks in (1, 2)
            if (text, ranks) not in ((">&- 2>&-", 1), ("| true", 1), ("> /dev/full 2>&1", 2))
        ),
    ],
)
def test_training_goes_on_without_its_output(here: Path, tmp_path: Path, streams: str, ranks: int) -> None:
    """Fails if output that cannot be written ends a run, or the run does not save its result."""
    out = tmp_path / "run"
    several = f"--ranks {ranks} --transport gloo" if ranks > 1 else ""
    settings = f"--epochs 2 --threads 1 --set model.hidden=4 --out {out}"
    code, _, err = shell(here, f"train g {settings} {several} {streams}")
    assert code == 0, err
    assert "Traceback" not in err
    assert json.loads((out / "result.json").read_text())
    assert len((out / "history.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    "env", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}]
)
def test_letters_that_a_stream_cannot_show_are_escaped(tmp_path: Path, env: dict[str, str]) -> None:
    """Fails if a name outside ASCII ends a command on a stream of ASCII."""
    (tmp_path / "e.txt").write_text("0 1\n1 2\n")
    code, out, err = shell(tmp_path, "prepare e.txt köln", **env)
    assert code == 0, err
    assert "k" in out
    assert out.isascii()
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["köln"]


def test_a_lasting_stream_writes_all_and_then_nothing() -> None:
    """Fails if what a pipe takes in parts is cut, or if a stream raises once its reader has left."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    raw = output._Lasting(write, "w")
    text, got = b"x" * 300_000, bytearray()

    def take() -> None:
        while len(got) < len(text):
            got.extend(os.read(read, 65536))

    reader = threading.Thread(target=take)
    reader.start()
    stream = io.BufferedWriter(raw)
    stream.write(text)
    stream.flush()
    reader.join()
    assert bytes(got) == text
    failed = raw.failure
    assert failed is None
    os.close(read)
    for _ in range(3):
        stream.write(text)
        stream.flush()
    assert isinstance(raw.failure, BrokenPipeError)
    stream.close()


class _Refusing(io.StringIO):
    """A stream that takes nothing."""

    def write(self, text: str, /) -> int:
        raise OSError(28, "No space left on device")


def _closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("kind", ["none", "full", "closed", "ascii"])
@pytest.mark.parametrize("bar", [False, True])
def test_a_run_in_any_program_prints_or_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, bar: bool
) -> None:
    """Fails if the streams of a program that calls mggcn end its run, or lose a line for a letter."""
    ascii_ = io.TextIOWrapper(io.BytesIO(), "ascii")
    stream = {"none": None, "full": _Refusing(), "closed": _closed(), "ascii": ascii_}[kind]
    folder = tmp_path / "rün"
    folder.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "stderr", stream)
        log = RunLog(folder, quiet=False, total_epochs=2)
        log._bar = bar
        log.start(0)
        for epoch in (1, 2):
            log.epoch({"epoch": epoch, "loss": 1.0, "val": None, "seconds": 0.1})
        log.close()
    assert len((folder / "history.jsonl").read_text().splitlines()) == 2
    ascii_.seek(0)
    assert ("run folder" in ascii_.read()) == (kind == "ascii")
