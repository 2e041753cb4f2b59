"""Ranks and other helpers that are processes start the same in every working folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mggcn.host import python

MINE = ("types.py", "queue.py", "random.py", "torch.py", "runpy.py", "mggcn.py", "json/__init__.py")
SCRIPT = """
import mggcn, mggcn.nn, numpy, helper
def body(part):
    return helper.twice(part.num_rows)
if __name__ == "__main__":
    graph = mggcn.load(numpy.array([[0, 1, 2], [1, 2, 0]]))
    print(sum(mggcn.nn.run(body, graph, ranks=2, transport="gloo")))
"""


def spoilt(folder: Path) -> Path:
    """Make a folder with modules of the user's that have names of others."""
    for name in MINE:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("raise RuntimeError('mine')\n")
    return folder


@pytest.mark.parametrize("module", ["mggcn.runs.worker", "mggcn.runs.sweep_worker", "mggcn.runs.messages"])
def test_helpers_take_no_module_of_the_working_folder(module: str, tmp_path: Path) -> None:
    """Fails if a rank, a worker of a sweep or a measurement imports a user's types.py for the library's."""
    command = [*python(module), "--help"]
    done = subprocess.run(command, cwd=spoilt(tmp_path / "here"), capture_output=True, text=True, timeout=60)
    assert (done.returncode, "usage" in done.stdout) == (0, True), done.stderr


@pytest.mark.slow
def test_functions_of_ones_own_are_found_beside_the_script(tmp_path: Path) -> None:
    """Fails if ranks of mggcn.nn.run import from the working folder, or lose the folder of the script."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/mine.py").write_text(SCRIPT)
    (tmp_path / "scripts/helper.py").write_text("def twice(x):\n    return 2 * x\n")
    command = [sys.executable, str(tmp_path / "scripts/mine.py")]
    here = spoilt(tmp_path / "here")
    done = subprocess.run(command, cwd=here, env=dict(os.environ), capture_output=True, text=True, timeout=120)
    assert done.stdout.split()[-1:] == ["6"], done.stderr
