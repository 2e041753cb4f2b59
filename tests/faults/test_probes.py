"""Probes say which tests run the place of a fault, and change nothing else."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults import probes
from tests.faults.probes import Recorded, gathered, probed
from tests.faults.sites import faults_of

ROOT = Path(__file__).resolve().parents[2]
PYTHON = b'''
N = 2 + 3


def f(x, y=4):
    """Docstring."""
    if x < 3 and y:
        x += 1
        return -(x
            * 2)
    match x:
        case 5:
            raise ValueError(x)
    return [n % 2 for n in range(x)]
'''


def came_by(monkeypatch: pytest.MonkeyPatch, *arguments: int) -> tuple[list[object], set[str]]:
    """Return what f gives with all probes in it, and the places that it came by."""
    faults, hits = faults_of("mggcn/x.py", PYTHON), set()
    module = type(sys)("mggcn.fault_probes")
    module.hit = hits.add  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mggcn.fault_probes", module)
    names: dict[str, object] = {}
    exec(compile(probed(PYTHON, enumerate(faults)), "probed", "exec"), names)
    hits.clear()
    results = [names["f"](x) for x in arguments]  # type: ignore[operator]
    return results, {faults[n].said(PYTHON).partition(": ")[2].partition(" -> ")[0] for n in hits}


def test_a_probe_says_what_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a probe changes a value, or says of a branch not taken that it was."""
    results, places = came_by(monkeypatch, 6)
    assert results == [[0, 1, 0, 1, 0, 1]]
    assert places == {"4", "x < 3 and y", "x < 3", "3", "5", "n % 2", "2"}
    results, places = came_by(monkeypatch, 2)
    assert results == [-6]
    assert places == {"4", "x < 3 and y", "x < 3", "3", "x += 1", "1", "x * 2", "2"}


def test_every_module_takes_its_probes(sample: Any) -> None:
    """Fails if a probe leaves no program: in patterns, at the first statement, in a place within another."""
    for path in sample(sorted((ROOT / "mggcn").rglob("*.py")), 6):
        text = path.read_bytes()
        ast.parse(probed(text, enumerate(faults_of("mggcn/x.py", text)[:40])))


def test_what_a_run_wrote(tmp_path: Path) -> None:
    """Fails if a test that failed, or that did not end, counts among those to run, or the shortest is not the first."""
    (tmp_path / "hits").write_text("0\tt::a\n0\tt::b\n0\tt::c\n1\t\n0\tt::d\n0\tt::killed\n")
    results = [("t::a", 2.0, True), ("t::a", 1.0, True), ("t::b", 0.5, True), ("t::c", 0.1, False), ("t::d", 4.0, True)]
    lines = [json.dumps({"test": t, "seconds": s, "passed": p}) for t, s, p in results]
    (tmp_path / "tests").write_text("\n".join(lines))
    recorded = gathered(tmp_path, ["first", "second", "third"])
    assert recorded == Recorded(
        {"first": ["t::a", "t::b", "t::c", "t::d", "t::killed"], "second": [""], "third": []},
        {"t::a": 3.0, "t::b": 0.5, "t::c": 0.1, "t::d": 4.0},
        ["t::c"],
    )
    assert recorded.cheapest("first", 100.0) == ["t::b", "t::a", "t::d"]
    assert recorded.cheapest("first", 3.6) == ["t::b", "t::a"]
    assert recorded.cheapest("first", 0.1) == ["t::b"]
    assert recorded.cheapest("third", 9.0) == []


def test_a_process_of_a_test_writes_too(tmp_path: Path) -> None:
    """Fails if a rank's hits are lost, with its parent's environment or without, or a module's constants are a test's."""
    package, folder = tmp_path / "mggcn", tmp_path / "build" / "hits"
    package.mkdir()
    folder.mkdir(parents=True)
    (folder / "now").write_text("t::started")
    shutil.copy(Path(__file__).with_name("probe.py"), tmp_path / probes.MODULE)
    (package / "__init__.py").write_text(f"{probes.CALL.format(1)}\ndef f(): {probes.CALL.format(2)}\nf()\nf()\n")
    for test in ({}, {"PYTEST_CURRENT_TEST": "t::inherited[a b] (call)"}):
        subprocess.run([sys.executable, "-S", "-c", "import mggcn"], cwd=tmp_path, env=test, check=True)
    lines = (folder / "hits").read_text().splitlines()
    assert lines == ["1\t", "2\tt::started", "1\t", "2\tt::inherited[a b]"]
