"""nvcc on the .cu files: found, run for several architectures at once, and what ptxas says of every kernel."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from mggcn.backend.cuda.kernels import folder
from tests.cuda.units import Unit

ARCHITECTURES = (75, 80, 90, 100, 120)
"""Turing, Ampere, Hopper, Blackwell (data centre, desktop): what CUDA 13 compiles and mggcn runs on."""
COMPILERS = Path(sys.prefix) / "compilers"
"""Where `make test-all` puts CUDA's compilers (dependency group `compilers`)."""
_ENTRY = re.compile(r"Compiling entry function '(\w+)' for 'sm_(\d+)\w?'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


class CompileError(Exception):
    """What the compiler said."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What one kernel takes on one architecture; bytes are per thread, shared memory (static) per block."""

    kernel: str
    arch: int
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int

    @property
    def spills(self) -> bool:
        return self.spill_stores + self.spill_loads > 0


def find() -> Path | None:
    """Return nvcc: the one that `make test-all` installed, or that of the path, or of CUDA's usual folder."""
    own = COMPILERS / "nvidia" / "cu13" / "bin" / "nvcc"
    elsewhere = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    return own if own.is_file() else Path(elsewhere) if elsewhere else None


def version(nvcc: Path) -> str:
    """Return nvcc's version, such as 13.0.88."""
    said = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"V(\d+\.\d+\.\d+)", said)
    if found is None:
        raise CompileError(f"{nvcc} --version says no version: {said}")
    return found[1]


def compile_unit(nvcc: Path, unit: Unit, architectures: tuple[int, ...] = ARCHITECTURES) -> list[Resources]:
    """Compile a unit to machine code; a warning is an error. Raises: CompileError with the compiler's words."""
    targets = [f"--generate-code=arch=compute_{arch},code=sm_{arch}" for arch in architectures]
    options = ["--std=c++17", "-I", str(folder()), "--Werror", "all-warnings", "--resource-usage", *unit.options]
    with tempfile.TemporaryDirectory(prefix="mggcn-nvcc-") as out:
        command = [str(nvcc), *options, *targets, "--fatbin", "-o", f"{out}/unit.fatbin", str(unit.path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError(f"{unit}: {done.stderr}{done.stdout}")
    return parse(done.stderr + done.stdout)


def parse(text: str) -> list[Resources]:
    """Return what `--resource-usage` printed, by kernel and architecture. Raises: CompileError if a figure is missing."""
    starts = list(_ENTRY.finditer(text))
    if not starts:
        raise CompileError(f"the compiler names no kernel: {text}")
    ends = [start.start() for start in starts[1:]] + [len(text)]
    return [_resources(start, text[start.end() : end]) for start, end in zip(starts, ends, strict=True)]


def _resources(entry: re.Match[str], said: str) -> Resources:
    stack, used, shared = _STACK.search(said), _USED.search(said), _SHARED.search(said)
    if stack is None or used is None:
        raise CompileError(f"ptxas tells too little of {entry[1]} for sm_{entry[2]}: {said}")
    frame, stores, loads = (int(number) for number in stack.groups())
    return Resources(entry[1], int(entry[2]), int(used[1]), frame, stores, loads, int(shared[1]) if shared else 0)
