"""Colours on terminals alone, and what the environment says of them."""

from __future__ import annotations

import io

import pytest

from mggcn.cli.colour import has_colours, painted
from tests.cli.runs import run_main

PLAN = ["plan", "--vertices", 100, "--edges", 500, "--features", 8, "--classes", 3]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


@pytest.mark.parametrize(
    ("environment", "terminal", "file"),
    [
        ({}, True, False),
        ({"TERM": "dumb"}, False, False),
        ({"NO_COLOR": "1"}, False, False),
        ({"NO_COLOR": ""}, True, False),
        ({"FORCE_COLOR": "1"}, True, True),
        ({"FORCE_COLOR": "0"}, True, False),
        ({"CLICOLOR_FORCE": "1", "TERM": "dumb"}, True, True),
        ({"CLICOLOR_FORCE": "0"}, True, False),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False, False),
    ],
)
def test_colours_are_for_terminals(
    environment: dict[str, str], terminal: bool, file: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a file gets colours that nobody asked for, or a terminal others than the environment says."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert (has_colours(Terminal()), has_colours(io.StringIO())) == (terminal, file)
    assert painted("a", "red", io.StringIO()) == ("\x1b[31ma\x1b[0m" if file else "a")


def test_verdicts_and_errors_have_colours(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a plan that fits is not green, one that does not is not red, an error is not, or JSON gets a colour."""
    assert run_main(*PLAN) == 0
    assert "\x1b" not in capsys.readouterr().out
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert run_main(*PLAN) == 0
    assert capsys.readouterr().out.startswith("\x1b[32m")
    assert run_main(*PLAN, "--memory-limit", "1MiB") == 2
    assert capsys.readouterr().out.startswith("\x1b[31m")
    assert run_main("train", "nowhere") == 2
    assert capsys.readouterr().err.startswith("\x1b[31mmggcn:\x1b[0m there is no nowhere")
    assert run_main("trian") == 2
    assert capsys.readouterr().err.startswith("\x1b[31mmggcn:\x1b[0m ")
    assert run_main(*PLAN, "--json") == 0
    assert "\x1b" not in capsys.readouterr().out
