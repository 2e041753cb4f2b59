"""Dense products in the tiles of AVX-512 and in its pairs of bfloat16, compiled to instructions that any processor has.

"avx512_emulated" and "avx512_bf16_emulated" are the code of the sets without "emulated", which few processors have.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mggcn import native
from mggcn.errors import BackendError
from tests.compiled import compiled, version_of

OPTIONS = {"avx512_emulated": ("-DMGGCN_WIDE",), "avx512_bf16_emulated": ("-DMGGCN_WIDE", "-DMGGCN_PAIRS")}
SOURCE = Path(__file__).resolve().parents[3] / "cpu" / "gemm.cpp"
# Optimised, 24 sums of 64 bytes take the compiler half a minute.
COMPILE = ("g++", "-std=c++17", "-Og", "-shared", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-Wno-psabi")
_kernel = native.kernel


def dense_isas() -> tuple[str, ...]:
    """Return the instruction sets of dense products that run here; one if nothing is built and tests are just collected."""
    try:
        return native.dense_isas()
    except BackendError:
        return ("baseline",)


ISAS = (*dense_isas(), *OPTIONS)
"""The instruction sets of dense products that run here, and these two."""


@functools.cache
def library(isa: str) -> ctypes.CDLL:
    """Compile a set, in a few seconds, or load what was made of the same sources."""
    sources = [path.read_text() for path in sorted(SOURCE.parent.glob("*.h"))] + [SOURCE.read_text()]
    options = (*COMPILE, *OPTIONS[isa], f"-DMGGCN_ISA={isa}")

    def make(target: Path) -> None:
        done = subprocess.run([*options, str(SOURCE), "-o", str(target)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    return ctypes.CDLL(str(compiled((sources, options, version_of("g++", "--version")), f"{isa}.so", make)))


def kernel(name: str, kind: str = "", set_: str = "") -> Callable[..., None]:
    """As native.kernel, which it replaces, for these sets too."""
    if set_ not in OPTIONS:
        return _kernel(name, kind, set_)
    loaded: Any = getattr(library(set_), f"{name}{kind}_{set_}")
    loaded.argtypes, loaded.restype = (ctypes.c_void_p,), None
    function: Callable[..., None] = loaded
    return function
