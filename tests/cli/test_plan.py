"""Plans of bare shapes and of stores: the verdict, in a moment, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.runs import refused, result, run_main

PAPERS = ["--vertices", "111059956", "--edges", "1615685872", "--features", "128", "--classes", "172"]
PROTEINS = ["--vertices", "8745542", "--edges", "1309240502", "--features", "128", "--classes", "256"]
ON_GPUS = ["--device", "cuda", "--precision", "fp32"]
FITS = [*PAPERS, *ON_GPUS, "--set", "model.hidden=208,208", "--ranks", "8", "--memory-limit", "80GiB"]
MORE = [*PROTEINS, *ON_GPUS, "--set", "model.hidden=512,512", "--ranks", "1", "--memory-limit", "40GiB"]
NEVER = [*PAPERS, *ON_GPUS, "--set", "model.hidden=208,208", "--ranks", "8", "--memory-limit", "200MiB"]


@pytest.mark.parametrize(
    ("arguments", "code", "verdict"),
    [
        (FITS, 0, "fits: {} of 80.00 GiB per rank"),
        (
            MORE,
            2,
            "does not fit: {} of 40.00 GiB per rank; 3 ranks with as much memory each would fit or --precision bf16",
        ),
        (NEVER, 2, "does not fit: {} of 200.00 MiB per rank; no number of ranks"),
    ],
    ids=["fits", "more ranks", "never"],
)
def test_the_three_verdicts(capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, verdict: str) -> None:
    """Fails if a graph of MG-GCN is judged otherwise, the exit code contradicts the text, or it takes 2 s of a core."""
    began = time.process_time()
    assert run_main("plan", *arguments) == code
    assert time.process_time() - began < 2
    before, after = verdict.split("{}")
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith(before)
    assert after in first


def test_every_rewrite_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a rewrite has no line, or a line does not follow what it did; or the text says more without being asked."""
    shape = ["--vertices", "1000", "--edges", "9000", "--features", "32", "--classes", "7", "--training", "20"]
    assert run_main("plan", *shape) == 0
    assert "rewrites of the model" not in capsys.readouterr().out
    for extra, lines in (
        (
            ["--precision", "mixed"],
            ["constants: A X is computed once", "operands of the graph rounded: 14 values become 15"],
        ),
        (
            ["--set", "model.input_dropout=0.5", "--set", "model.hidden=64,16", "--set", "run.prune=off"],
            [
                "order of products: 1 of 3 layers aggregate first",
                "constants: no more than X",
                "scales moved into neighbours: 19 values, as many as before",
                "gradients copied before they are used up: nowhere",
                "pruned rows: no aggregation leaves any out",
            ],
        ),
        (
            ["--set", "model.kind=mlp"],
            ["scales moved into neighbours: nowhere", "gradients in one pass: 15 values become 13"],
        ),
    ):
        assert run_main("plan", *shape, *extra, "--explain") == 0
        text = capsys.readouterr().out
        explained = text[text.index("rewrites of the model") : text.index("ops of a training epoch")].splitlines()
        assert [line for line in lines if f"  {line}" not in explained] == [], text
        assert text.count("\n  weight-grad") == 3


def test_plan_generate_and_help_need_no_torch(tmp_path: Path) -> None:
    """Fails if a command that computes nothing on tensors loads torch, and with it seconds."""
    script = f"""
import contextlib, io, sys
from mggcn.cli.entry import main
commands = ["prepare", "plan", "train", "predict", "report", "generate", "tune", "doctor"]
for arguments in [["--help"], ["--version"], *([name, "--help"] for name in commands),
                  ["generate", "rmat", "--help"], ["generate", "community", {str(tmp_path / "g")!r}, "--vertices", "200",
                  "--edges", "1e3"], ["plan", {str(tmp_path / "g")!r}], ["prepare", {str(tmp_path / "g")!r}, "--verify"],
                  ["plan", "--vertices", "1000", "--edges", "1e4", "--features", "8", "--classes", "3"]]:
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        try:
            code = main(arguments)
        except SystemExit as leaving:
            code = leaving.code
    assert not code and text.getvalue(), arguments
    assert "torch" not in sys.modules, arguments
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_json_and_text_plan_the_same_run(data_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if --json is no JSON, or what is printed for a store is not what a run of it uses."""
    settings = ["--threads", 1, "--ranks", 2, "--transport", "threads", "--set", "model.hidden=16", "--epochs", 1]
    assert run_main("plan", "cora", "--root", data_root, *settings, "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan.pop("predicted")["training"]["seconds"] > 0
    assert (plan.pop("fits"), plan.pop("choice")) == (True, None)
    assert plan.pop("limit_bytes") > 0
    assert run_main("plan", data_root / "cora", *settings) == 0
    text = capsys.readouterr().out
    assert "cora: 2,708 vertices, 10,556 edges (symmetric)" in text
    assert "gcn 1433 -> 16 -> 7, fp32, 2 ranks on cpu" in text
    assert run_main("train", data_root / "cora", *settings, "--out", tmp_path / "run", "--quiet") == 0
    assert json.loads((tmp_path / "run" / "plan.json").read_text()) == plan
    sent = result(tmp_path / "run")["bytes_sent_per_epoch"]
    assert f"{sent:,} bytes sent" in text


def test_training_vertices_of_a_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if --training does not reach the plan, or is taken beside a store that says who trains."""
    shape = ["--vertices", 10_000, "--edges", 30_000, "--features", 9, "--classes", 4, "--training"]
    assert run_main("plan", *shape, 100, "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert [(row["layer"], row["rows"], row["level"]) for row in plan["training_rows"]] == [(2, 394, 1), (3, 100, 0)]
    assert plan["predicted"]["training"]["seconds"] < plan["predicted"]["training_all_rows"]["seconds"]
    assert run_main("plan", *shape, 100, "--set", "run.prune=off", "--json") == 0
    assert "training_all_rows" not in json.loads(capsys.readouterr().out)["predicted"]
    assert "1 .. 10,000 of the vertices can train, got 0" in refused(capsys, "plan", *shape, 0)
    assert run_main("generate", "community", tmp_path / "g", "--vertices", 50, "--edges", 100) == 0
    assert "not both" in refused(capsys, "plan", tmp_path / "g", "--training", 10)
