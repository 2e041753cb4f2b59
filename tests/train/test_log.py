"""The history and the progress of rank 0, as whoever follows a run sees them."""

from __future__ import annotations

import itertools
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from mggcn.errors import RunError
from mggcn.train.log import PROGRESS_S, RunLog, require_history

ROWS: list[dict[str, Any]] = [
    {"epoch": epoch, "loss": 2.0 / epoch, "val": None if epoch % 2 else 0.5, "seconds": 4.0} for epoch in range(1, 9)
]


def test_off_a_terminal_a_line_comes_every_ten_seconds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a batch log stays empty, gets a line for every epoch, or a control character of the bar."""
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    log = RunLog(tmp_path, False, 8)
    clock[0] += PROGRESS_S  # set-up counts as no silence of the epochs
    log.start(0)
    for row in ROWS:
        clock[0] += 4.0
        log.epoch(row)
    log.close()
    out, err = capsys.readouterr()
    assert out == f"run folder {tmp_path}\n"
    assert err.splitlines() == [
        "epoch 3/8  loss 0.6667  4.000 s/epoch  20 s left",
        "epoch 6/8  loss 0.3333  val 0.5000  4.000 s/epoch  8 s left",
    ]


def test_steps_of_a_long_epoch_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if nothing is told within an epoch, its steps count for nothing in the time left, or come into the history."""
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    log = RunLog(tmp_path, False, 2)
    log.start(0)
    for step in (25, 50, 75):
        clock[0] += 6.0
        log.step({"run": 0, "epoch": 1, "loss": 0.5, "val": None, "seconds": 24.0}, step, 100)
    log.close()
    assert capsys.readouterr().err.splitlines() == ["epoch 1/2, step 50/100  loss 0.5000  24.000 s/epoch  12 s left"]
    assert not (tmp_path / "history.jsonl").read_text()


@pytest.mark.parametrize("quiet", [True, False])
def test_every_epoch_can_be_read_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str], quiet: bool) -> None:
    """Fails if the history comes in blocks of some KiB, or --quiet prints."""
    log = RunLog(tmp_path, quiet, 8)
    log.start(0)
    for row in ROWS:
        log.epoch(row)
        assert json.loads((tmp_path / "history.jsonl").read_text().splitlines()[-1]) == row
    log.close()
    assert capsys.readouterr() == ("" if quiet else f"run folder {tmp_path}\n", "")


def test_other_ranks_are_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a rank without a folder writes or prints."""
    log = RunLog(None, False, 8)
    log.start(0)
    log.epoch(ROWS[0])
    log.say("a word")
    log.close()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("text", "found"), [(None, 0), ("{}\n", 1), ("{}\n{}", 1), ("{}\n{}\n{}\n", 3)])
def test_a_history_that_lost_epochs_is_not_continued(tmp_path: Path, text: str | None, found: int) -> None:
    """Fails if a run goes on in silence with less history than its checkpoint stands for."""
    if text is not None:
        (tmp_path / "history.jsonl").write_text(text)
    require_history(tmp_path, found)
    with pytest.raises(RunError, match=rf"has {found} of the 9 epochs .* put it back"):
        require_history(tmp_path, 9)


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    """Fails if a row that the disk refuses is a traceback, or lost in silence."""
    log = RunLog(tmp_path, True, 2)
    log.start(0)
    assert log._file is not None
    log._file.close()
    log._file = Path("/dev/full").open("a", buffering=1)
    with pytest.raises(RunError, match=r"history.jsonl could not be written: No space left on device; free space"):
        log.epoch({"epoch": 1, "loss": 0.5, "val": None, "seconds": 1.0})
    log.close()


def bar_of(
    rows: list[dict[str, Any]], repeat: int, folder: Path, capsys: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch
) -> list[str]:
    """What a bar on a terminal shows of rows that come two seconds after each other."""
    clock = [100.0]
    patch.setattr("time.monotonic", lambda: clock[0])
    patch.setattr("sys.stderr.isatty", lambda: True)
    log = RunLog(folder, False, 8, repeat)
    log.start(0)
    for row in rows:
        clock[0] += 2
        log.epoch(row)
    log.close()
    return capsys.readouterr().err.split("\r")[1:]


@pytest.mark.parametrize(
    ("repeat", "left"),
    [
        (1, ["", "12 s", "10 s", "8 s", "6 s", "4 s", "2 s", ""]),
        (3, ["", "44 s", "42 s", "40 s", "38 s", "36 s", "34 s", "32 s"]),
    ],
)
def test_the_bar_tells_the_time_left(
    repeat: int, left: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if the time left counts other epochs or another pace, repeats are forgotten, or old letters stay."""
    shown = bar_of(ROWS, repeat, tmp_path, capsys, monkeypatch)
    assert [text.partition("s/epoch")[2].strip().removesuffix(" left") for text in shown] == left
    assert all(len(now.rstrip("\n")) >= len(before.rstrip()) for before, now in itertools.pairwise(shown))


def test_a_resumed_run_counts_its_own_epochs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if epochs of before an interruption make the pace look faster."""
    shown = bar_of(ROWS[5:], 1, tmp_path, capsys, monkeypatch)
    assert [text.rstrip().endswith("2 s left") for text in shown] == [False, True, False]


def test_programs_hear_of_epochs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Fails if the logger of mggcn is silent at INFO, or speaks for other ranks or at WARNING."""
    for level, folder, count in ((logging.INFO, tmp_path, 1), (logging.INFO, None, 0), (logging.WARNING, tmp_path, 0)):
        caplog.clear()
        with caplog.at_level(level, "mggcn"):
            log = RunLog(folder, True, 8)
            log.start(0)
            log.epoch(ROWS[1])
            log.close()
        assert [record.getMessage() for record in caplog.records] == [
            "epoch 2/8  loss 1.0000  val 0.5000  4.000 s/epoch"
        ] * count
