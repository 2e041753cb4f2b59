"""A copy of a checkout in which faults are planted, one at a time, and tests run."""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import scipy.sparse  # noqa: F401
import torch  # noqa: F401

from tests.cuda.units import all_units, samples
from tests.emulator import module as emulator
from tests.faults.probes import MODULE, PLUGIN, Recorded, gathered, probed
from tests.faults.sites import Fault

INCLUDED = re.compile(r'#include "(\w+\.\w+)"')
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
SYNTAX = ("g++", "-std=c++17", "-fsyntax-only", "-w")
TEST_S = 120
"""Seconds for one test: a fault may let it run for ever."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a selection of tests made of a fault; `by` is the test that failed."""

    caught: bool
    by: str
    seconds: float


class Checkout:
    """A copy of `source` in `root`, which keeps what was compiled there."""

    def __init__(self, source: Path, root: Path) -> None:
        self.root = root
        if not root.exists():
            shutil.copytree(source, root, ignore=_left_out(source, root))
            if (source / "build" / "tests").exists():  # kept by content
                shutil.copytree(source / "build" / "tests", root / "build" / "tests")

    def build(self) -> None:
        """Compile the kernels. Raises: SystemExit if tests in the copy would import another mggcn."""
        code = "import mggcn, pathlib; print(pathlib.Path(mggcn.__file__).parents[1])"
        found = subprocess.run([sys.executable, "-c", code], cwd=self.root, capture_output=True, text=True, check=True)
        if Path(found.stdout.strip()) != self.root:
            sys.exit(
                f"{sys.executable} imports mggcn from {found.stdout.strip()}; take a Python without mggcn installed"
            )
        subprocess.run([sys.executable, "-m", "mggcn.native"], cwd=self.root, stdout=subprocess.DEVNULL, check=True)

    @contextmanager
    def planted(self, fault: Fault) -> Iterator[None]:
        """Hold the fault, and kernels that have it; then everything is as it was."""
        build, kept = self.root / "build" / "checkout", self.root / "build" / "kept"
        with self._written(fault):
            if not fault.path.startswith("cpu/"):
                yield
                return
            shutil.copytree(build, kept)
            try:
                self.build()
                yield
            finally:
                shutil.rmtree(build)
                kept.rename(build)

    def valid(self, fault: Fault) -> bool:
        """Whether the file with the fault is a program: Python that compiles, C++ that g++ takes."""
        file = self.root / fault.path
        if fault.path.endswith(".py"):
            return _compiles(fault.planted(file.read_bytes()))
        with self._written(fault):
            return all(subprocess.run(c, capture_output=True, check=False).returncode == 0 for c in self._syntax(file))

    @contextmanager
    def _written(self, fault: Fault) -> Iterator[None]:
        file = self.root / fault.path
        text, times = file.read_bytes(), (file.stat().st_atime_ns, file.stat().st_mtime_ns)
        file.write_bytes(fault.planted(text))
        try:
            yield
        finally:
            file.write_bytes(text)
            os.utime(file, ns=times)  # make goes by it

    def _syntax(self, file: Path) -> Iterator[list[str]]:
        """Return commands that parse everything which includes a file."""
        folder = file.parent
        users = {file.name} | {path.name for path in folder.iterdir() if file.name in _closure(path)}
        if folder.name == "cpu":
            for name in sorted(name for name in users if name.endswith(".cpp")):
                yield [*SYNTAX, "-fopenmp", "-DMGGCN_ISA=baseline", str(folder / name)]
            return
        for unit in samples(all_units()):
            if unit.path.name in users:
                source = self.root / "build" / "unit.cpp"
                source.parent.mkdir(exist_ok=True)
                source.write_text(emulator.unit(folder / unit.path.name))
                yield [*SYNTAX, *unit.options, f"-I{emulator.HERE}", f"-I{folder}", str(source)]

    def record(self, faults: list[Fault], marks: list[str]) -> Recorded:
        """Run the tests once, with a probe at the place of each fault of Python, and return which tests came by."""
        folder, module = self.root / "build" / "hits", self.root / MODULE
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "now").touch()
        files = {path: (self.root / path).read_bytes() for path in {fault.path for fault in faults}}
        names = [fault.said(files[fault.path]) for fault in faults]
        try:
            shutil.copy(Path(__file__).with_name("probe.py"), module)
            for path, text in files.items():
                of_file = [(number, fault) for number, fault in enumerate(faults) if fault.path == path]
                (self.root / path).write_bytes(probed(text, of_file))
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", PLUGIN, *marks]
            with (folder / "log").open("w") as log:
                subprocess.run(command, cwd=self.root, stdout=log, stderr=subprocess.STDOUT, check=False)
        finally:
            module.unlink(missing_ok=True)
            for path, text in files.items():
                (self.root / path).write_bytes(text)
        return gathered(folder, names)

    def first(self, fault: Fault) -> list[list[str]]:
        """Return which tests concern a fault: those that name its module, then its room, then what trains."""
        area, *rooms, name = fault.path.split("/")
        tests = sorted(path for path in (self.root / "tests").rglob("test_*.py"))
        if area == "mggcn":
            dotted = re.compile(rf"\b{re.escape('.'.join((area, *rooms)))}(\.| import .*\b){Path(name).stem}\b")
            named = [path for path in tests if dotted.search(path.read_text())]
            room = [self.root / "tests" / rooms[0]] if rooms else []
        else:
            stem = Path(name).stem.partition("_")[0]
            named = [path for path in tests if stem in path.name]
            room = [self.root / "tests" / "backend", *([self.root / "tests" / "partition"] if area == "cpu" else [])]
        stages = [named, room, [self.root / "tests" / "golden"], [self.root / "tests"]]
        there = [[path.relative_to(self.root).as_posix() for path in stage if path.exists()] for stage in stages]
        return [stage for stage in there if stage]

    def run(self, tests: list[str], without: list[str], marks: list[str], limit_s: float) -> Outcome:
        """Run tests up to the first failure. What does not end in time is caught: somebody would have noticed."""
        arguments = ["-x", "-q", "-p", "no:cacheprovider", f"--timeout={TEST_S}", *marks, *tests]
        arguments += [f"--ignore={path}" for path in without if path not in tests]
        began, log = time.monotonic(), self.root / "pytest.log"
        process = multiprocessing.get_context("fork").Process(target=_pytest, args=(self.root, arguments, log))
        process.start()
        process.join(limit_s)
        seconds = time.monotonic() - began
        if process.exitcode is None:
            os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()
            return Outcome(True, f"no end within {limit_s:g} s", seconds)
        said = log.read_text(errors="replace")
        if process.exitcode in (3, 4):
            sys.exit(f"pytest did not understand {' '.join(arguments)}:\n{said}")
        failed = FAILED.search(said)
        caught = process.exitcode not in (0, 5)
        return Outcome(caught, failed[1] if failed else "the tests do not start" if caught else "", seconds)


def _left_out(source: Path, root: Path) -> Callable[[str, list[str]], set[str]]:
    """Return what `shutil.copytree` asks: results at the top of `source` (folders of the package have such names too)."""
    anywhere = shutil.ignore_patterns(".*", "__pycache__", root.name)
    at_the_top = shutil.ignore_patterns("build", "stores", "runs")
    return lambda folder, names: (
        anywhere(folder, names) | (at_the_top(folder, names) if Path(folder) == source else set())
    )


def _pytest(root: Path, arguments: list[str], log: Path) -> None:
    """Be `python -m pytest` in a copy, in a process that has loaded torch already: half of the time of a short run."""
    os.setsid()
    os.chdir(root)
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdin, sys.stdout, sys.stderr = open(os.devnull), os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("mggcn", "tests")]:
        del sys.modules[name]
    sys.path[0] = str(root)
    importlib.invalidate_caches()
    code = pytest.main(arguments)
    sys.stdout.flush()
    os._exit(code)


def _compiles(text: bytes) -> bool:
    try:
        compile(text, "fault", "exec")
    except SyntaxError:
        return False
    return True


@functools.cache
def _closure(path: Path) -> frozenset[str]:
    """Return the files of a folder that a file includes, at any depth."""
    found = {name for name in INCLUDED.findall(path.read_text()) if (path.parent / name).exists()}
    return frozenset(found.union(*(_closure(path.parent / name) for name in found)))
