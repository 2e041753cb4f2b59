"""Where the CPU kernels are looked for, and how a checkout builds them without an installation."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from mggcn import native
from mggcn.errors import BackendError
from tests.commands.runs import run_main


@pytest.fixture
def not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A checkout whose mggcn is not installed; the folder in which it builds."""

    def missing(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    monkeypatch.setattr(native, "BUILD", tmp_path / "checkout")
    return tmp_path / "checkout"


def test_what_is_missing_and_what_helps(not_installed: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fails if the hint to build in place comes where there is nothing to build."""
    with pytest.raises(
        BackendError, match=r"not installed.*pip install \..* or, in a checkout, python -m mggcn.native"
    ):
        native.path()
    monkeypatch.setattr(native, "CHECKOUT", tmp_path)
    with pytest.raises(BackendError, match=r"apt-get install g\+\+\)$"):
        native.path()


def test_kernels_older_than_their_sources(not_installed: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fails if kernels of other sources are called: their arguments may lie elsewhere."""
    monkeypatch.setattr(native, "CHECKOUT", tmp_path)
    source, library = tmp_path / "cpu" / "spmm.cpp", not_installed / "libmggcn_cpu.so"
    for file, age in ((source, 1), (library, 2)):
        file.parent.mkdir()
        file.touch()
        os.utime(file, (age, age))
    assert native.path() == library
    os.utime(source, (3, 3))
    with pytest.raises(BackendError, match=r"cpu/spmm\.cpp is newer than .* python -m mggcn\.native"):
        native.path()


@pytest.mark.slow
def test_built_in_place(not_installed: Path) -> None:
    """Fails if the build differs from an installation's in name or kernels, or is not found afterwards."""
    built = native.installed_or_built()
    assert built == not_installed / "libmggcn_cpu.so"
    assert native.path() == built
    library = ctypes.CDLL(str(built))
    assert all(hasattr(library, f"mggcn_spmm_{kind}_{isa}") for kind in ("f32", "f64") for isa in native.isas())
    assert all(hasattr(library, f"mggcn_gemm_{kind}_{isa}") for kind in ("f32", "f64") for isa in native.dense_isas())


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors have one instruction set of kernels")
def test_every_instruction_set_is_compiled() -> None:
    """Fails if a processor with wider vectors than this one would find no dense product."""
    for isa in ("baseline", "avx2", "avx512", "avx512_bf16"):
        assert all(hasattr(native.library(), f"mggcn_gemm_{kind}_{isa}") for kind in ("f32", "f64", "bf16", "bf16_f32"))


def test_an_installation_is_not_built_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fails if tests of an installation compile for minutes what they do not load."""
    library = tmp_path / "libmggcn_cpu.so"
    library.touch()
    monkeypatch.setattr(native.metadata, "distribution", lambda name: SimpleNamespace(locate_file=lambda file: library))
    monkeypatch.setattr(native, "build", lambda: pytest.fail("built"))
    assert native.installed_or_built() == native.path() == library


def test_what_the_compiler_says_is_told(not_installed: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "CMakeLists.txt").write_text('message(FATAL_ERROR "no such thing")')
    monkeypatch.setattr(native, "CHECKOUT", broken)
    with pytest.raises(BackendError, match="no such thing"):
        native.installed_or_built()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BackendError, match="needs CMake"):
        native.build()


FORKS = """
import os, signal, sys, time
import numpy as np
import mggcn.nn
store, text = sys.argv[1:]
graph = mggcn.load(store)
trainer = mggcn.Trainer(graph, mggcn.GCN(hidden=(4,)), ranks=1)
trainer.fit(epochs=1)
KINDS = {
    "train": lambda: mggcn.Trainer(graph, mggcn.GCN(hidden=(4,)), ranks=1, threads=1).fit(epochs=1),
    "threads": lambda: mggcn.Trainer(graph, mggcn.GCN(hidden=(4,)), ranks=2, transport="threads").fit(epochs=1),
    "processes": lambda: mggcn.Trainer(graph, mggcn.GCN(hidden=(4,)), ranks=2, transport="gloo").fit(epochs=1),
    "go on": lambda: trainer.fit(epochs=2),
    "predict": trainer.predict,
    "run": lambda: mggcn.nn.run(lambda part: part.num_rows, graph, ranks=1),
    "parse": lambda: mggcn.load(text),
}
if not hasattr(os, "register_at_fork") or len(os.listdir("/proc/self/task")) == 1:
    sys.exit(5)  # one core: there are no threads to lack
for kind, work in KINDS.items():
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        try:
            work()
            os._exit(0)
        except mggcn.MggcnError as error:
            os._exit(3 if "spawn" in str(error) and "\\n" not in str(error) else 4)
    print(kind, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
pid = os.fork()
if pid == 0:
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        try:
            KINDS["train"]()
        except mggcn.MggcnError:
            os._exit(3)
    os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print("grandchild", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
trainer.fit(epochs=2)
print("parent", 3)
"""


def test_a_forked_child_of_a_process_that_has_computed_is_refused(tmp_path: Path) -> None:
    """Fails if a child without its parent's threads waits for them for ever, whatever it does first, or its parent is
    refused.
    """
    store, text = tmp_path / "g", tmp_path / "edges.txt"
    assert run_main("generate", "community", store, "--vertices", 300, "--edges", 1500) == 0
    text.write_text("".join(f"{i % 1000} {i * 7 % 1000}\n" for i in range(100_000)))
    env = {**os.environ, "PYTHONPATH": str(native.CHECKOUT)}
    script = tmp_path / "forks.py"
    script.write_text(FORKS)
    command = [sys.executable, str(script), str(store), str(text)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=env)
    if done.returncode == 5:
        pytest.skip("one core")
    assert done.returncode == 0, done.stderr
    ended = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())
    assert len(ended) == 9
    assert set(ended.values()) == {"3"}, ended


def test_a_child_forked_before_anything_is_computed_computes(tmp_path: Path) -> None:
    """Fails if each forked child is refused, or what it makes differs."""
    script = tmp_path / "early.py"
    script.write_text(
        "import os, numpy as np, mggcn.nn\n"
        "pid = os.fork()\n"
        "graph = mggcn.load(np.array([[0, 1, 2], [1, 2, 0]]))\n"
        "rows = mggcn.nn.run(lambda part: part.num_rows, graph, ranks=1)\n"
        "os._exit(rows != [3]) if pid == 0 else exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    env = {**os.environ, "PYTHONPATH": str(native.CHECKOUT)}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100, env=env)
    assert done.returncode == 0, done.stderr
