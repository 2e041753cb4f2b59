"""Run the command in this process or in one of its own, and read what a run folder holds."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mggcn.cli.entry import main
from mggcn.host import python

CORA = ["--threads", "1", "--seed", "90210", "--set", "model.hidden=16", "--set", "model.dropout=0.5"]
"""Settings of the runs on cora that are compared with each other."""


def run_main(*arguments: object) -> int:
    """Run `mggcn ...` in this process and return its exit code."""
    try:
        return main([str(a) for a in arguments])
    except SystemExit as leaving:
        return int(leaving.code or 0)


def refused(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 2) -> str:
    """Run `mggcn ...`, which must fail with one line on stderr, and return that line."""
    capsys.readouterr()
    assert run_main(*arguments) == code
    err = capsys.readouterr().err
    assert err.startswith("mggcn: ")
    assert err.count("\n") == 1
    return err


def start(*arguments: object, module: Sequence[str] = ()) -> subprocess.Popen[str]:
    """Start `mggcn ...`, or another module, as a process; mggcn is a fork of this one (tests/forked.py)."""
    command = [sys.executable, "-m", *module] if module else python("mggcn")
    command += [str(a) for a in arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str], timeout_s: float = 90) -> tuple[int, str, str]:
    """Wait for a process and return its exit code, stdout and stderr; it never outlives the test."""
    with process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        finally:
            process.kill()
    return process.returncode, out, err


def interrupt(process: subprocess.Popen[str], folder: Path, signum: int, epochs: int) -> tuple[int, str, str]:
    """Signal a training process once its checkpoint has `epochs` epochs, and wait for its end."""
    deadline = time.monotonic() + 60
    while saved_epochs(folder) < epochs and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signum)
    return finish(process, 30)


def saved_epochs(folder: Path) -> int:
    """Epochs of the latest checkpoint, 0 if there is none yet."""
    with contextlib.suppress(OSError, ValueError):
        latest = folder / "checkpoints" / (folder / "checkpoints" / "latest").read_text().split()[0]
        return int(json.loads((latest / "progress.json").read_text())["epoch"])
    return 0


def history(folder: Path) -> list[dict[str, Any]]:
    """Rows of history.jsonl without their times."""
    rows = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def losses(folder: Path) -> np.ndarray:
    return np.array([row["loss"] for row in history(folder)])


def result(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())  # type: ignore[no-any-return]


def saved_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the latest checkpoint: weights, best weights, optimiser."""
    latest = folder / "checkpoints" / (folder / "checkpoints" / "latest").read_text().split()[0]
    return {f"{f.stem}.{name}": t for f in sorted(latest.glob("*.safetensors")) for name, t in load_file(f).items()}


def same_tensors(a: Path, b: Path) -> bool:
    """Whether two runs saved the same bits."""
    first, second = saved_tensors(a), saved_tensors(b)
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)
