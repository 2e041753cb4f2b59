"""Faults are programs, the same for a seed, and leave no trace; what tests catch of them is counted."""

from __future__ import annotations

import ast
import contextlib
import json
import random
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.faults import __main__ as faults
from tests.faults.checkout import Checkout
from tests.faults.sites import AREAS, SUFFIXES, Fault, draw, faults_of

ALONE = pytest.mark.skipif(
    any(entry.metadata["Name"] == "mggcn" for entry in metadata.distributions()),
    reason="mggcn is installed: tests in a copy would import that one, which python -m tests.faults refuses",
)

ROOT = Path(__file__).resolve().parents[2]
PYTHON = b'''
"""Adds 1."""
def f(a: int = 3, *, b: bool = True) -> "list[int]":
    """Docstring of 2."""
    if a < 2 and not b:
        raise ValueError(f"{a + 1} is less than 2")
    self.x = a % 2 + (a
        - 4)
    a += 1
    print(f"{a:3}")
    return a
'''
CPP = b"""#include "common.h"  // a + b
template <int N = 3> void g();
static void f(const float* x, long long n) {
  const char* text = "a + 1";
  for (long long i = 0; i < n; ++i) out[i] = x[i] * 2.5f;
  sum += x[n - 1];
  store(sum, x);
}
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    return Checkout(ROOT, tmp_path_factory.mktemp("faults") / "checkout")


def changes(path: str, text: bytes) -> list[str]:
    return [f.said(text).partition(": ")[2] for f in faults_of(path, text)]


def test_a_copy_has_every_source(copy: Checkout) -> None:
    """Fails if folders of the package stay behind because results have the same names (build, runs)."""
    there = {path.relative_to(ROOT) for area in AREAS for path in (ROOT / area).rglob("*") if path.suffix in SUFFIXES}
    copied = {path.relative_to(copy.root) for area in AREAS for path in (copy.root / area).rglob("*")}
    assert not there - copied
    assert not (copy.root / "runs").exists()


def test_faults_of_python() -> None:
    """Fails if a kind of fault is forgotten, or planted where nothing runs: in texts, annotations and messages."""
    assert sorted(changes("mggcn/a.py", PYTHON)) == sorted(
        [
            *("3 -> (4)", "True -> False", "a < 2 -> (a <= 2)", "2 -> (3)", "a < 2 and not b -> (a < 2 or not b)"),
            *("not b -> (b)", 'raise ValueError(f"{a + 1} is less than 2") -> pass', "a % 2 -> (a // 2)", "2 -> (3)"),
            *("a % 2 + (a - 4) -> (a % 2 - (a - 4))", "a - 4 -> (a + 4)", "4 -> (5)", "1 -> (2)", "a += 1 -> pass"),
            *("self.x = a % 2 + (a - 4) -> pass", 'print(f"{a:3}") -> pass'),
        ]
    )


def test_faults_of_cpp() -> None:
    """Fails if a type, a comment, a text or a line of the preprocessor passes for a place."""
    assert sorted(changes("cpu/a.cpp", CPP)) == sorted(
        ["0 -> 1", "< -> <=", "* -> +", "+= -> -=", "- -> +", "1 -> 2", "sum += x[n - 1]; -> ;", "store(sum, x); -> ;"]
    )


def test_every_fault_of_python_is_a_program() -> None:
    """Fails if a fault does not compile, or compiles to what was there."""
    files = sorted((ROOT / "mggcn").rglob("*.py"))
    for path in random.Random(70619).sample(files, 30):
        text, choose = path.read_bytes(), random.Random(path.name)
        before, found = ast.dump(ast.parse(text)), faults_of("mggcn/x.py", text)
        for fault in choose.sample(found, min(len(found), 4)):
            assert ast.dump(ast.parse(fault.planted(text))) != before, fault.said(text)


def contents(root: Path) -> dict[Path, tuple[bytes, int]]:
    files = (path for area in AREAS for path in (root / area).rglob("*") if path.suffix in SUFFIXES)
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


@pytest.mark.slow
def test_the_copy_is_left_as_it_was(copy: Checkout) -> None:
    """Fails if a fault stays behind, also after an error, or its file's time makes the kernels compile again."""
    before = contents(copy.root)
    drawn = draw(copy.root, 5, 9090, copy.valid)
    assert contents(copy.root) == before
    assert [fault.path.partition("/")[0] for fault in drawn] == ["mggcn"] * 3 + ["cpu", "cuda"]
    for fault in drawn:
        with contextlib.suppress(ZeroDivisionError), copy._written(fault):
            changed = {path for path, (text, _) in contents(copy.root).items() if text != before[path][0]}
            assert changed == {copy.root / fault.path}
            raise ZeroDivisionError
    assert contents(copy.root) == before
    assert drawn == draw(copy.root, 5, 9090, copy.valid)
    assert drawn != draw(copy.root, 5, 9091, lambda fault: True)


@pytest.mark.full
@pytest.mark.parametrize("path", ["cpu/sweep.h", "cuda/edge_gradient.cuh"])
def test_what_the_compiler_refuses_is_no_fault(copy: Checkout, path: str) -> None:
    """Fails if g++ is not asked, or not about the files that include the one with the fault."""
    text = (copy.root / path).read_bytes()
    end = text.rindex(b"}")
    assert copy.valid(Fault(path, 0, 0, "statement", b"\n"))
    assert not copy.valid(Fault(path, end, end, "statement", b"nonsense"))


def test_tests_that_concern_a_fault_come_first(copy: Checkout) -> None:
    """Fails if a room's own tests wait for all others, or no stage has all."""
    stages = copy.first(Fault("mggcn/memory/arena.py", 0, 0, "", b""))
    assert "tests/memory/test_arena.py" in stages[0]
    assert stages[1:] == [["tests/memory"], ["tests/golden"], ["tests"]]
    assert "tests/backend/test_loss.py" in copy.first(Fault("cuda/loss.cu", 0, 0, "", b""))[0]
    assert copy.first(Fault("mggcn/runs/worker.py", 0, 0, "", b""))[-1] == ["tests"]


SMALL = {
    "pyproject.toml": '[tool.pytest.ini_options]\nmarkers = ["slow: slow"]\n',
    "mggcn/__init__.py": "",
    "mggcn/native.py": "",
    "mggcn/sums.py": "def double(x):\n    return x + x\n\n\ndef unused(x):\n    return x * x\n",
    "tests/test_sums.py": "from mggcn.sums import double\n\n\ndef test_double():\n    assert double(3) == 6\n",
}


@pytest.mark.full
@ALONE
def test_what_is_caught_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a fault that a test sees counts as missed, or the other way, or a second run starts again."""
    for name, text in SMALL.items():
        (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "source" / name).write_text(text)
    out = tmp_path / "out"
    monkeypatch.setattr(
        sys, "argv", ["faults", "--count", "5", "--source", str(tmp_path / "source"), "--out", str(out)]
    )
    faults.main()
    rows = [json.loads(line) for line in (out / "fast.jsonl").read_text().splitlines()]
    assert {row["fault"]: (row["caught"], row["by"]) for row in rows} == {
        "mggcn/sums.py:2: x + x -> (x - x)": (True, "tests/test_sums.py::test_double"),
        "mggcn/sums.py:6: x * x -> (x + x)": (False, "no test runs it"),
    }
    said = (out / "fast.md").read_text()
    assert "1 of 2" in said
    assert "- `mggcn/sums.py:6: x * x -> (x + x)`" in said
    monkeypatch.setattr(Checkout, "run", lambda *_: pytest.fail("ran again"))
    faults.main()
    assert (out / "fast.md").read_text() == said


@pytest.mark.full
@ALONE
def test_a_test_that_fails_anyway_catches_nothing(tmp_path: Path) -> None:
    """Fails if a fault counts as caught by a test that fails on every machine, or on this one."""
    for name, text in (
        SMALL | {"tests/test_sums.py": "import mggcn.sums\ndef test_double():\n    assert False\n"}
    ).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    options = SimpleNamespace(suite="fast", limit=60)
    copy, fault = Checkout(tmp_path, tmp_path / "copy"), Fault("mggcn/sums.py", 25, 26, "operator", b"-")
    outcome, after = faults.caught(copy, fault, copy.first(fault), options)
    assert (outcome.caught, outcome.by, after) == (
        False,
        "tests/test_sums.py::test_double fails without the fault as well",
        "stage 1",
    )


@pytest.mark.full
def test_what_does_not_end_is_caught(tmp_path: Path) -> None:
    """Fails if a fault that lets a loop run for ever stops the count."""
    copy = Checkout(tmp_path, tmp_path / "copy")
    (copy.root / "test_loop.py").write_text("def test_loop():\n    while True: pass\n")
    outcome = copy.run(["test_loop.py"], [], [], 3)
    assert (outcome.caught, outcome.by) == (True, "no end within 3 s")
