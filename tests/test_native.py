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

from mggcn import forks, native
from mggcn.errors import BackendError
from tests.cli.runs import run_main


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
import os, signal, sys
import mggcn, torch
store, text, first = sys.argv[1:]
if first == "torch":  # before mggcn has loaded anything of its own
    torch.set_num_threads(2)
    torch.ones(1 << 20).exp()
graph = mggcn.load(store)
def trainer(**settings):
    return mggcn.Trainer(graph, mggcn.GCN(hidden=(4,)), **settings)
mine = trainer(ranks=1)
if first == "mggcn":
    mine.fit(epochs=1)
expected = trainer(ranks=1).fit(epochs=2)[-1]["loss"] if first == "mggcn" else None
import mggcn.nn
def check(loss):
    if expected is not None and loss != expected:
        os._exit(6)
KINDS = {
    "train": lambda: check(trainer(ranks=1).fit(epochs=2)[-1]["loss"]),
    "threads": lambda: trainer(ranks=2, transport="threads").fit(epochs=1),
    "go on": lambda: check(mine.fit(epochs=2)[-1]["loss"]),
    "predict": lambda: mine.predict() if first == "mggcn" else None,
    "run": lambda: mggcn.nn.run(lambda part: part.num_rows, graph, ranks=1),
    "parse": lambda: mggcn.load(text),
    "torch": lambda: torch.ones(1 << 20).exp(),
}
if first == "torch":  # ranks that load torch themselves: once will do
    KINDS["processes"] = lambda: trainer(ranks=2, transport="gloo").fit(epochs=1)
if not hasattr(os, "register_at_fork") or len(os.listdir("/proc/self/task")) == 1:
    sys.exit(5)  # one core: there are no threads to lack
def child(work):
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        try:
            code = work()
            os._exit(code if isinstance(code, int) else 0)
        except BaseException as error:
            print(error, file=sys.stderr, flush=True)
            os._exit(4)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
for kind, work in KINDS.items():
    print(kind, child(work))
print("grandchild", child(lambda: child(KINDS["train"])))
mine.fit(epochs=2)
print("parent", 0)
"""


@pytest.mark.parametrize("first", ["mggcn", pytest.param("torch", marks=pytest.mark.slow)])
def test_a_forked_child_of_a_process_that_has_computed_computes(tmp_path: Path, first: str) -> None:
    """Fails if a child waits for ever for threads that its parent has, whatever it does first, or computes other bits,
    or if its parent does after the forks.
    """
    store, text = tmp_path / "g", tmp_path / "edges.txt"
    assert run_main("generate", "community", store, "--vertices", 300, "--edges", 1500) == 0
    text.write_text("".join(f"{i % 1000} {i * 7 % 1000}\n" for i in range(100_000)))
    env = {**os.environ, "PYTHONPATH": str(native.CHECKOUT)}
    script = tmp_path / "forks.py"
    script.write_text(FORKS)
    command = [sys.executable, str(script), str(store), str(text), first]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=env)
    if done.returncode == 5:
        pytest.skip("one core")
    assert done.returncode == 0, done.stderr
    ended = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())
    assert len(ended) == 9 + (first == "torch")
    assert set(ended.values()) == {"0"}, (ended, done.stderr)


def test_runtimes_are_found_by_their_names() -> None:
    """Fails if a folder passes for a runtime, or a path is cut at a blank."""
    lines = [
        "7f00-7f01 r-xp 00000000 08:01 12   /home/a b/lib/libgomp-1.so.1\n",
        "7f01-7f02 r-xp 00000000 08:01 12   /home/a b/lib/libgomp-1.so.1\n",
        "7f02-7f03 r-xp 00000000 08:01 13   /opt/libgomp-env/lib/libtorch.so\n",
        "7f03-7f04 rw-p 00000000 00:00 0 \n",
        "7f04-7f05 rw-p 00000000 00:00 0   [heap]\n",
    ]
    assert forks._runtimes(lines) == ["/home/a b/lib/libgomp-1.so.1"]


def test_a_child_whose_parents_threads_could_not_be_ended_is_refused(tmp_path: Path) -> None:
    """Fails if a child forked where OpenMP cannot end its threads, as within a parallel region, waits for ever."""
    script = tmp_path / "forks.py"
    script.write_text(
        "import os, signal, sys, threading, time, mggcn, mggcn.forks, numpy as np\n"
        "graph = mggcn.load(np.array([[0, 1, 2], [1, 2, 0]]), labels=np.array([0, 1, 0]), features=np.eye(3), "
        "splits={'train': [0, 1, 2]})\n"
        "mggcn.Trainer(graph, mggcn.GCN(hidden=(4,)), ranks=1).fit(epochs=1)\n"
        "mggcn.forks._pause = lambda: False\n"
        "mggcn.forks.threading.active_count = lambda: 0\n"
        "pid = os.fork()\n"
        "if pid: sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
        "signal.alarm(20)\n"
        "try:\n"
        "    mggcn.Trainer(graph, mggcn.GCN(hidden=(4,)), ranks=1).fit(epochs=1)\n"
        "except mggcn.MggcnError as error:\n"
        "    os._exit(3 if 'spawn' in str(error) and chr(10) not in str(error) else 4)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(native.CHECKOUT)}
    assert subprocess.run([sys.executable, str(script)], timeout=100, env=env).returncode == 3


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
