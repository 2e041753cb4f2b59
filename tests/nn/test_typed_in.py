"""Ranks that are processes, started from where no process can import the function: notebooks and standard input."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mggcn.errors import ConfigError
from mggcn.nn import typed_in

REPOSITORY = Path(__file__).resolve().parents[2]
GRAPH = "import numpy as np, mggcn, mggcn.nn\ngraph = mggcn.load(np.array([[0, 1, 2, 3], [1, 2, 3, 0]]))\n"
CALL = "mggcn.nn.run(rows, graph, ranks=2, transport='gloo', threads=1)"


def python(source: str, *arguments: str, code: int = 0) -> tuple[str, str]:
    """Run Python on standard input, which must leave with `code`; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", *(arguments or ("-",))],
        input=source,
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        timeout=120,
    )
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


@pytest.mark.slow
def test_a_function_from_standard_input_runs_in_processes() -> None:
    """Fails if what is typed in, and what it refers to, does not reach the ranks."""
    body = "offset = 10\ndef rows(part):\n    return offset * part.num_rows + part.rank\n"
    assert python(f"{GRAPH}{body}print({CALL})\nprint(__file__)")[0] == "[20, 21]\n<stdin>\n"


@pytest.mark.slow
def test_a_trainer_on_standard_input_has_ranks_as_processes() -> None:
    """Fails if the ranks of a trainer look for a main module."""
    graph = (
        "import numpy as np, mggcn\n"
        "graph = mggcn.load(np.array([[0, 1, 2, 3], [1, 0, 3, 2]]), features=np.eye(4, dtype=np.float32), "
        "labels=[0, 0, 1, 1], splits={'train': [0, 2], 'test': [1, 3]})\n"
    )
    call = "print(len(mggcn.Trainer(graph, mggcn.GCN(4), ranks=2, threads=1).fit(2)))"
    assert python(graph + call)[0] == "2\n"


@pytest.mark.full
def test_a_script_without_a_guard_is_told_so(tmp_path: Path) -> None:
    """Fails if ranks that run the script again start ranks, or end in multiprocessing's page of advice."""
    (tmp_path / "script.py").write_text(f"{GRAPH}def rows(part):\n    return part.num_rows\n{CALL}\n")
    _, err = python("", str(tmp_path / "script.py"), code=1)
    assert "put that call under `if __name__ ==" in err
    assert re.search("rank [01] ended with exit code 1 and did not say why; its output is above", err)


def test_without_cloudpickle_one_line_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a function that no process can import is sent by name, or one that can be needs another package."""
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)
    assert typed_in.portable(python) is python
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None, raising=False)
    with pytest.raises(ConfigError, match=r"only with the package cloudpickle \(pip install cloudpickle\); or put"):
        typed_in.portable(python)


def test_what_a_function_holds_must_travel_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a closure comes out otherwise than it went in, or what cannot travel ends in an error of pickle's."""
    pytest.importorskip("cloudpickle")
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None, raising=False)
    weight = 3
    sent = pickle.loads(pickle.dumps(typed_in.portable(lambda part: weight * part)))
    assert sent(5) == 15
    lock = threading.Lock()
    with pytest.raises(ConfigError, match="something that it refers to cannot be pickled"):
        typed_in.portable(lambda part: lock)
