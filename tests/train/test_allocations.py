"""From the third epoch on a training epoch asks nobody for more than 64 KiB: all that is large was planned and made before."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
BOUND = 64 << 10
CASES = [
    "dense",
    "dropout",
    "dense-input-dropout",
    "sparse",
    "sparse-input-dropout",
    "aggregate-first",
    "mlp",
    "sgd",
    "two-ranks",
    "two-ranks-dropout",
]


@pytest.fixture(scope="module")
def watcher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled malloc watcher."""
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("the malloc watcher needs Linux and a C compiler `cc`")
    library = tmp_path_factory.mktemp("watcher") / "watch_malloc.so"
    command = [compiler, "-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-o", str(library), str(HERE / "watch_malloc.c")]
    subprocess.run(command, check=True)
    return library


def watched(watcher: Path, case: str, *options: str) -> tuple[dict[str, Any], str]:
    """Train `case` in a process of its own: what the worker found, and the backtraces of large blocks."""
    # PYTHONMALLOC: else Python takes arenas of 1 MiB for small objects and hides who asked for how much.
    env = {**os.environ, "LD_PRELOAD": str(watcher), "PYTHONMALLOC": "malloc"}
    command = [sys.executable, "-m", "tests.train.allocation_worker", case, *options]
    root = HERE.parents[1]
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout), done.stderr


@pytest.mark.parametrize("case", CASES)
def test_epochs_allocate_nothing_large(watcher: Path, case: str) -> None:
    """Fails on an op with a temporary of the size of a block of rows, and on a library that packs into fresh memory."""
    found, stderr = watched(watcher, case)
    assert found["blocks"] > 0, "the watcher saw nothing at all: it was not preloaded"
    assert found["largest"] <= BOUND, f"{case}: {found['largest']} bytes; by op: {found['ops']}\n{stderr[:6000]}"


@pytest.mark.parametrize("case", ["dense", "two-ranks"])
def test_a_planted_temporary_is_caught(watcher: Path, case: str) -> None:
    """Fails if the watcher or the naming of the guilty op has gone blind."""
    found, stderr = watched(watcher, case, "--plant")
    assert found["largest"] >= 1 << 20
    assert found["ops"]["greedy"] >= 1 << 20
    assert "called from" in stderr
