"""The fast suite's choice of cases: nothing is left out that no other case covers, and a single case always runs."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.covering import Row, covering, factors, pairwise, uncovered

ROOT = Path(__file__).resolve().parents[1]
SUITE = """
import pytest

@pytest.mark.covering(1)
@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize("pair", [("x", 1), ("y", 2)])
@pytest.mark.parametrize("c", [0, 1, pytest.param(2, marks=pytest.mark.cuda)])
def test_product(a, pair, c): pass

@pytest.mark.covering(0, rest=1)
@pytest.mark.parametrize("a", range(2))
@pytest.mark.parametrize("b", range(3))
def test_two_arrays(a, b): pass

@pytest.mark.full
def test_full(): pass

def test_loop(sample):
    print("sampled", sample(range(50), 6), end=" ")
"""


def product(*sizes: int) -> list[Row]:
    levels = itertools.product(*map(range, sizes))
    return [tuple((f"f{i}", value) for i, value in enumerate(row)) for row in levels]


@pytest.mark.parametrize("strength", [0, 1, 2, 3])
@pytest.mark.parametrize("sizes", [(7,), (3, 4), (2, 3, 4, 5), (1, 1, 6, 2)], ids=str)
def test_every_combination_that_occurs_is_chosen(sizes: tuple[int, ...], strength: int) -> None:
    """Fails if a combination of values runs in no chosen case, whatever cases there are, or all are chosen."""
    rows = random.Random(str((sizes, strength))).sample(product(*sizes), 7 * len(product(*sizes)) // 8 or 1)
    chosen = covering(rows, strength, "seed")
    size = min(strength, len(sizes))
    wanted = set().union(*(itertools.combinations(row, size) for row in rows))
    assert wanted == set().union(*(itertools.combinations(rows[number], size) for number in chosen))
    assert chosen == covering(rows, strength, "seed")
    assert len(chosen) < len(rows) or strength >= len([s for s in sizes if s > 1])
    assert strength or len(chosen) == 1


LEVELS = {"a": [0, 1, 2], "b": ["x", "y"], "c": [True, False], "d": [0, 1, 2, 3]}


@pytest.mark.parametrize("seed", ["one", "other"])
def test_pairs_that_are_not_refused_occur(seed: str) -> None:
    """Fails if a legal pair is in no case, a refused one or an illegal case is taken, or the whole product is."""
    refused = [(("a", 1), ("d", 3)), (("c", False), ("b", "y"))]
    cases = pairwise(LEVELS, refused, lambda case: case != {"a": 0, "b": "x", "c": True, "d": 0}, seed)
    assert {frozenset(pair) for pair in uncovered(cases, LEVELS)} == set(map(frozenset, refused))
    assert {"a": 0, "b": "x", "c": True, "d": 0} not in cases
    assert 11 <= len(cases) <= 16
    assert cases == pairwise(LEVELS, refused, lambda case: case != {"a": 0, "b": "x", "c": True, "d": 0}, seed)
    assert (("a", 0), ("b", "x")) in uncovered(cases[:0], LEVELS)


def test_a_pair_without_a_legal_case_is_an_error() -> None:
    """Fails if a pair that was forgotten among the refused ones is left out silently."""
    with pytest.raises(LookupError, match=r"\('a', 2\), \('d', 3\)"):
        pairwise(LEVELS, [], lambda case: (case["a"], case["d"]) != (2, 3), "seed")


def test_elements_of_tuples_are_factors() -> None:
    """Fails if a fixture's parameters, which are tuples, count as one value, or what has no hash is an error."""
    found = factors({"b": ("x", (1, 2)), "a": [3]})
    assert found == (("a", "[3]"), ("b.0", "x"), ("b.1.0", 1), ("b.1.1", 2))


def run(folder: Path, *arguments: str) -> tuple[set[str], str]:
    """Run SUITE under this project's settings and conftest.py: the cases that passed, and the loop's sample."""
    settings = (ROOT / "pyproject.toml").read_text()
    first, last = settings.index("[tool.pytest.ini_options]"), settings.index("[tool.importlinter]")
    (folder / "pyproject.toml").write_text(settings[first:last].replace('testpaths = ["tests"]', ""))
    (folder / "conftest.py").write_text("from tests.conftest import *\n")
    (folder / "test_suite.py").write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-vs", "--no-header", "-p", "no:cacheprovider", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = set(re.findall(r"^(test_suite.py::\S+) [^\n]*PASSED", done.stdout, re.MULTILINE))
    return passed, "".join(re.findall(r"sampled (\[[\d, ]+\])", done.stdout))


@pytest.mark.slow
def test_collecting_compiles_nothing() -> None:
    """Fails if whoever asks for the list of tests waits for a compiler."""
    code = """
import sys, pytest
from mggcn import native
from mggcn.errors import BackendError
def missing(): raise BackendError("not built")
native.path, native.build = missing, lambda: sys.exit("compiles")
sys.exit(pytest.main(["--collect-only", "-q", "tests/backend", "tests/cuda", "tests/emulator", "tests/partition"]))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr


def products(cases: set[str]) -> set[str]:
    return {case for case in cases if "test_product" in case}


def arrays(cases: set[str]) -> set[str]:
    return {case for case in cases if "test_two_arrays" in case}


@pytest.mark.full
def test_each_suite_runs_what_it_should(tmp_path: Path) -> None:
    """Fails if the fast suite runs what is full, test-all leaves out a pair, or -m "" a case or a part of a loop."""
    fast, sampled = run(tmp_path)
    everything, whole = run(tmp_path, "-m", "not slow")
    slow, loop = run(tmp_path, "-m", "")
    numbers = [len(products(cases)) for cases in (fast, everything, slow)]
    assert numbers[::2] == [3, 12]
    assert 6 <= numbers[1] <= 8
    assert [len(arrays(cases)) for cases in (fast, everything, slow)] == [1, 3, 6]
    assert fast < everything < slow
    assert "test_suite.py::test_full" in everything - fast
    assert len(fast - arrays(fast) - products(fast)) == 1
    assert len(json.loads(whole)) == 12
    assert json.loads(loop) == list(range(50))
    assert len(json.loads(sampled)) == 6
    left_out = min(everything - fast - {"test_suite.py::test_full"})
    assert run(tmp_path, left_out) == ({left_out}, "")
    assert run(tmp_path, "-k", "loop")[1] == sampled
