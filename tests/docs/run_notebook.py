"""Runs examples/notebook.ipynb in its own kernel; `python -m tests.docs.run_notebook` puts its outputs into the file."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "notebook.ipynb"
_EXECUTE = """
import nbclient, nbformat, sys
notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
for cell in notebook.cells:
    cell.metadata.clear()  # times
    if "outputs" in cell:  # what libraries print beside has this machine's paths
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
nbformat.write(notebook, sys.argv[2])
"""


def execute(notebook: Path, done: Path) -> None:
    """Write the notebook with the outputs of a run in the current folder. Raises: CalledProcessError if a cell fails."""
    environ = os.environ | {"PYTHONPATH": str(NOTEBOOK.parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _EXECUTE, str(notebook), str(done)]
    subprocess.run(command, check=True, cwd=done.parent, timeout=280, env=environ)


def outputs(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the outputs of all cells."""
    return [output for cell in notebook["cells"] for output in cell.get("outputs", [])]


def text_of(output: dict[str, Any]) -> str:
    """Return what an output says as plain text."""
    return "".join(output["text"] if "text" in output else output["data"].get("text/plain", ""))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        done = Path(folder) / "done.ipynb"
        execute(NOTEBOOK, done)
        NOTEBOOK.write_text(done.read_text())
