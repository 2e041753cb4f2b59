"""Exit codes and messages: one line on stderr that says what was expected, what came and what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mggcn.cli import entry as cli
from tests.cli.runs import refused, run_main


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stores") / "small"
    assert run_main("generate", "community", folder, "--vertices", 120, "--edges", 600) == 0
    return folder


def test_runs_that_are_refused_leave_nothing(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a run that cannot start leaves a folder that blocks the next try, or its reason is not said."""
    out = tmp_path / "run"
    train = ["train", store, "--threads", 1, "--out", out]
    text = refused(capsys, *train, "--memory-limit", "10MiB")
    assert "needs" in text
    assert "10.00 MiB may be used; no number of ranks up to 120 would fit: a process takes 176.00 MiB" in text
    assert not out.exists()
    assert "use --device cpu" in refused(capsys, *train, "--device", "cuda", code=1)
    assert not out.exists()
    assert run_main(*train, "--epochs", 1, "--quiet") == 0
    assert f"--resume {out}" in refused(capsys, *train)
    (tmp_path / "file").write_text("")
    assert "cannot be written" in refused(capsys, "train", store, "--out", tmp_path / "file" / "run")


def test_a_plan_that_does_not_fit_says_what_would(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if the advice for a limit just below the need is missing or wrong."""
    shape = ["--vertices", "1e7", "--edges", "1e8", "--features", 128, "--classes", 40, "--set", "run.capacity=memory"]
    assert run_main("plan", *shape, "--memory-limit", "12GiB") == 2
    first = capsys.readouterr().out.splitlines()[0]
    ranks = int(first.partition("per rank; ")[2].split()[0])
    assert run_main("plan", *shape, "--memory-limit", "12GiB", "--ranks", ranks) == 0
    assert run_main("plan", *shape, "--memory-limit", "12GiB", "--ranks", ranks - 1) == 2


def test_runs_that_are_none(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if predict or report take a folder that no run wrote, or one without a checkpoint."""
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "not the folder of a run" in refused(capsys, "predict", empty)
    assert "there is no run folder" in refused(capsys, "predict", tmp_path / "nothing")
    assert "not a complete run folder" in refused(capsys, "report", empty)
    run = tmp_path / "run"
    assert run_main("train", store, "--threads", 1, "--epochs", 1, "--out", run, "--quiet") == 0
    assert "expects a file" in refused(capsys, "predict", run, "--out", empty)
    assert "expects a file" in refused(capsys, "predict", run, "--out", tmp_path / "nothing" / "scores.npy")
    (run / "checkpoints" / "latest").unlink()
    assert "no checkpoint" in refused(capsys, "predict", run)
    assert not (run / "scores.npy").exists()


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        ([], "mggcn [-h]"),
        (["help"], "mggcn [-h]"),
        (["help", "train"], "mggcn train"),
        (["help", "store", "info"], "mggcn store info"),
    ],
)
def test_help_is_printed_without_a_question(command: list[str], usage: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if `mggcn` alone or `mggcn help COMMAND` is an error, or prints the help of another command."""
    assert run_main(*command) == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"usage: {usage}")
    assert not said.err
    assert "invalid choice: 'nothing'" in refused(capsys, "help", "nothing")


@pytest.mark.parametrize(
    "command",
    [
        ["report", "run", "--epochs", "3"],
        ["doctor", "--gpu"],
        ["store", "info", "graph", "--vertices", "3"],
        ["predict", "run", "--momentum", "0.1"],
        ["status", "run", "--overwrite"],
        ["datasets", "--force"],
    ],
)
def test_a_command_suggests_only_what_it_has(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a flag or a setting of another command is suggested, or the help of another one."""
    text = refused(capsys, *command)
    assert "unrecognized arguments" in text
    assert "mean" not in text
    assert "use" not in text
    assert text.endswith(f"; see mggcn {' '.join(command[: 2 if command[0] == 'store' else 1])} --help\n")


def test_help_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a setting can be neither found in --help nor seen with its default."""
    from mggcn.config import Config
    from mggcn.config.files import to_tables

    for command in ("train", "plan"):
        assert run_main(command, "--help") == 0
        text = capsys.readouterr().out
        for table, values in to_tables(Config()).items():
            assert all((f" {table}.{key}=" in text) is (table != "debug") for key in values)
        assert "model.hidden=128,128" in text
        assert "model.dropout=0.0 (in [0, 1))" in text
        assert "(1 or more, default: 200)" in text
        assert "--spmm" not in text
        assert "fp32 and mixed are products on tensor cores, each as three of TF32 (tf32x3)" in " ".join(text.split())


def test_other_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a bug looks like bad input, or an interruption or a closed pipe like a bug."""

    def raising(error: BaseException) -> None:
        def run(_: object) -> int:
            raise error

        monkeypatch.setattr(cli.doctor, "run", run)

    raising(ZeroDivisionError("bug"))
    assert run_main("doctor") == 1
    assert "Traceback" in capsys.readouterr().err
    raising(KeyboardInterrupt())
    assert run_main("doctor") == 130
    assert capsys.readouterr().err == "mggcn: interrupted\n"


def test_a_reader_that_leaves_early_is_no_error(store: Path) -> None:
    """Fails if `mggcn plan ... | head -1` prints a traceback."""
    command = f"{sys.executable} -m mggcn plan {store} | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""


WITHOUT_DOCSTRINGS = """
import contextlib, io, sys
from mggcn.cli import entry as cli
for words in COMMANDS:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            code = cli.main(words)
        except SystemExit as leaving:
            code = leaving.code
    print(*words, code or 0, bool(said.getvalue()), sep=",")
"""


def test_commands_without_docstrings() -> None:
    """Fails if `python -OO`, which leaves no docstrings, ends a command in a traceback, or in silence."""
    commands = [["--help"], ["train", "--help"], ["--version"], ["datasets"], ["settings"], ["completion", "bash"]]
    commands.append(["store", "info", "--help"])
    line = WITHOUT_DOCSTRINGS.replace("COMMANDS", repr(commands))
    done = subprocess.run([sys.executable, "-OO", "-c", line], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert done.stdout.splitlines() == [",".join([*words, "0", "True"]) for words in commands]


@pytest.mark.slow
def test_a_run_without_docstrings(store: Path, tmp_path: Path) -> None:
    """Fails if `python -OO` cannot train, report and predict, whose modules are imported when they are used."""
    run = str(tmp_path / "run")
    program = "import sys; from mggcn.cli import entry as cli; sys.exit(any(cli.main(words) for words in COMMANDS))"
    small = ["--epochs", "2", "--threads", "1", "--set", "model.hidden=4"]
    commands = [["plan", str(store)], ["train", str(store), *small, "--out", run], ["report", run], ["status", run]]
    commands += [["predict", run]]
    line = program.replace("COMMANDS", repr(commands))
    done = subprocess.run([sys.executable, "-OO", "-c", line], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "command", [["plan", "x"], ["train", "x"], ["doctor"], ["status", "runs"], ["prepare", "a", "b"]]
)
def test_a_working_folder_that_was_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    """Fails if a command begins where libraries end the process with lines of their own."""
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert cli.main(command) == 2
    assert capsys.readouterr().err == "mggcn: the working folder was deleted; cd to one that exists, and start again\n"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            RuntimeError("can't start new thread"),
            "no thread or process could be started: can't start new thread; raise",
        ),
        (BlockingIOError(11, "Resource temporarily unavailable"), "no thread or process could be started: [Errno 11]"),
        (MemoryError("rank 1: can't start new thread"), "no thread or process could be started: rank 1"),
        (MemoryError("rank 0: 3 GiB"), "memory ran out: rank 0: 3 GiB; mggcn plan"),
    ],
)
def test_a_limit_of_processes_is_not_told_as_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, words: str
) -> None:
    """Fails if a user is sent for memory who needs more processes, or the other way round."""

    def fails(_: object) -> int:
        raise error

    monkeypatch.setattr("mggcn.cli.doctor.run", fails)
    assert cli.main(["doctor"]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"mggcn: {words}")
    assert err.count("\n") == 1
