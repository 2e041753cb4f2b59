"""What a plan says of narrow types where this machine computes no faster in them."""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path

import pytest

from mggcn.assemble import plan as assemble
from mggcn.backend.cpu.figures import Figures
from mggcn.cost.machine import tuned_path
from tests.cli.runs import run_main
from tests.cost.test_machine import GOOD
from tests.machines import XEON, ZEN3

ARXIV = ["--vertices", 169343, "--edges", 2340000, "--features", 128, "--classes", 40, "--set", "model.hidden=512"]
WITHOUT_AMX = dataclasses.replace(XEON, dense=tuple(rate for rate in XEON.dense if rate.kernel != "amx"))
SLOW = dataclasses.replace(
    ZEN3,
    bf16=(2.2,) * len(ZEN3.bf16),
    dense=tuple(dataclasses.replace(r, flop_s=r.flop_s * (0.7 if r.dtype == "bf16" else 1.0)) for r in ZEN3.dense),
)


@pytest.mark.parametrize(
    ("figures", "options", "said"),
    [
        (XEON, ["--set", "run.precision=bf16"], ""),
        (SLOW, ["--set", "run.precision=bf16"], "bf16 gains memory alone here: "),
        (SLOW, ["--set", "run.precision=mixed"], "mixed gains memory alone here: "),
        (SLOW, [], ""),
        (SLOW, ["--set", "run.precision=bf16", "--device", "cuda", "--machine", "dgx-h100"], ""),
    ],
)
def test_a_plan_says_where_memory_alone_is_gained(
    figures: Figures,
    options: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Fails if bf16 that the figures promise no speed of is offered as fast, or fast one as slow."""
    monkeypatch.setattr(assemble, "figures_here", lambda config: figures)
    assert run_main("plan", *ARXIV, *options) == 0
    out = capsys.readouterr().out
    assert ("gains memory alone here" in out) == bool(said)
    assert said in out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], True),
        (["--precision", "mixed"], False),
        (["--set", "model.kind=gat", "--set", "model.heads=2"], False),
        (["--ranks", 1], False),
        # What the host draws may be what a step waits for.
        (["--batch", 4096, "--fanout", "15,10,5", "--set", "run.batches=cooperative"], False),
    ],
)
def test_a_plan_says_what_narrower_messages_gain(
    options: list[object], said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if links bound an epoch and a plan is silent on mixed, or names it where it gains nothing or cannot be."""
    papers = ["--vertices", 11105996, "--edges", 323137174, "--symmetric", "--features", 128, "--classes", 172]
    machine = ["--training", 120718, "--set", "model.hidden=208,208", "--device", "cuda", "--machine", "dgx-h100"]
    assert run_main("plan", *papers, *machine, *(() if "--ranks" in options else ("--ranks", 8)), *options) == 0
    out = capsys.readouterr().out
    assert ("spent waiting for messages: --precision mixed" in out) == said
    if said:
        (line,) = (line for line in out.splitlines() if "spent waiting" in line)
        waiting, whole, narrow = (float(ms) for ms in re.findall(r"([\d.]+) ms", line))
        assert 0.25 * whole < waiting < whole
        assert narrow < whole / 1.05


def test_dense_products_count(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a processor whose dense products of bf16 were measured slow is taken to be as fast as with AMX."""
    seconds = []
    for figures in (XEON, WITHOUT_AMX):
        monkeypatch.setattr(assemble, "figures_here", lambda config, figures=figures: figures)
        assert run_main("plan", *ARXIV, "--set", "run.precision=bf16", "--json") == 0
        seconds.append(float(capsys.readouterr().out.split('"training": {\n   "seconds": ')[1].split(",")[0]))
    assert seconds[1] > 1.3 * seconds[0]


def test_a_tuned_file_hides_no_slow_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if `mggcn tune`, whose file has gathers of float32, makes bf16 look twice as fast as it was measured."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    tuned_path().parent.mkdir()
    rates = {
        "fp32 = 1e11": "fp32 = 2e11, bf16 = 2e11",
        "memory_bytes = 1000": "memory_bytes = 100000000000",
        "8e9": "4e10",
    }
    tuned_path().write_text(functools.reduce(lambda text, change: text.replace(*change), rates.items(), GOOD))
    for ratio in (4.0, 0.5):
        figures = dataclasses.replace(ZEN3, bf16=(ratio,) * len(ZEN3.bf16))
        monkeypatch.setattr(assemble, "figures_here", lambda config, figures=figures: figures)
        assert run_main("plan", *ARXIV, "--set", "run.precision=bf16") == 0
        assert ("bf16 gains memory alone here: " in capsys.readouterr().out) == (ratio > 1)
