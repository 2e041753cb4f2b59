"""Ranks that are processes, and the scripts, notebooks and standard inputs whose functions they call."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mggcn.comm.call import packed
from mggcn.errors import ConfigError
from tests.comm.test_launch import ENV, ROOT, alive
from tests.comm.worlds import wait_until

GRAPH = "import numpy as np, mggcn, mggcn.nn\ngraph = mggcn.load(np.array([[0, 1, 2, 3], [1, 2, 3, 0]]))\n"
CALL = "mggcn.nn.run(rows, graph, ranks=2, transport='gloo', threads=1)"


def python(source: str, *arguments: str, code: int = 0) -> tuple[str, str]:
    """Run Python on standard input, which must leave with `code`; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", *(arguments or ("-",))],
        input=source,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
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


@pytest.mark.slow
def test_flags_of_the_interpreter_reach_the_ranks(tmp_path: Path) -> None:
    """Fails if -O, -X or -W of a script do not hold in its ranks."""
    (tmp_path / "script.py").write_text(
        f"import sys\n{GRAPH}"
        "def rows(part):\n    return sys.flags.optimize, sys._xoptions, [w for w in sys.warnoptions if 'Future' in w]\n"
        f"if __name__ == '__main__':\n    print({CALL})\n"
    )
    out, _ = python("", "-O", "-X", "faulthandler", "-W", "ignore::FutureWarning", str(tmp_path / "script.py"))
    assert out == f"{[(1, {'faulthandler': True}, ['ignore::FutureWarning'])] * 2}\n"


@pytest.mark.full
def test_a_script_without_a_guard_is_told_so(tmp_path: Path) -> None:
    """Fails if ranks that run the script again start ranks, or the caller does not hear why they do not."""
    (tmp_path / "script.py").write_text(f"{GRAPH}def rows(part):\n    return part.num_rows\n{CALL}\n")
    _, err = python("", str(tmp_path / "script.py"), code=1)
    assert re.search(
        "ConfigError: rank [01]: a rank process runs the script again .* put that call under `if __name", err
    )


def test_without_cloudpickle_one_line_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a function that no process can import is sent by name, or one that can be needs another package."""
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None, raising=False)
    preparation, function = packed(python)
    assert pickle.loads(function) is python
    assert "init_main_from_path" in preparation
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    with pytest.raises(ConfigError, match=r"only with the package cloudpickle \(pip install cloudpickle\); or put"):
        packed(python)


def test_what_a_function_holds_must_travel_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a closure comes out otherwise than it went in, or what cannot travel ends in an error of pickle's."""
    pytest.importorskip("cloudpickle")
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None, raising=False)
    weight = 3
    assert pickle.loads(packed(lambda part: weight * part)[1])(5) == 15
    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"must be picklable: .* all that it refers to \(cannot pickle .*lock"):
        packed(lambda part: lock)


@pytest.mark.full
def test_an_interrupt_ends_the_ranks_first(tmp_path: Path) -> None:
    """Fails if Ctrl-C leaves a rank behind, waits for its work, or is no KeyboardInterrupt where ranks were processes."""
    (tmp_path / "script.py").write_text(
        f"import os, pathlib, time\n{GRAPH}"
        f"def rows(part):\n    pathlib.Path({str(tmp_path)!r}, f'pid-{{os.getpid()}}').touch()\n    time.sleep(200)\n"
        f"if __name__ == '__main__':\n    try:\n        {CALL}\n"
        "    except KeyboardInterrupt:\n        print('interrupted')\n"
    )
    command = [sys.executable, str(tmp_path / "script.py")]
    with subprocess.Popen(command, env={**os.environ, **ENV}, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert wait_until(lambda: len(list(tmp_path.glob("pid-*"))) == 2, 120)
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=20) == ("interrupted\n", None)
        finally:
            process.kill()
    assert not any(alive(int(path.name.removeprefix("pid-"))) for path in tmp_path.glob("pid-*"))
