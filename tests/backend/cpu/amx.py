"""The AMX kernels with their tiles in plain C++, and their scalar twin, compiled for any processor."""

from __future__ import annotations

import ctypes
import functools
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mggcn import native
from mggcn.backend.cpu.args import address
from mggcn.backend.cpu.machine import dense_kernels
from mggcn.errors import BackendError
from tests.compiled import compiled, version_of

EMULATED = "amx_emulated"
KERNELS = Path(__file__).resolve().parents[3] / "cpu"
TWIN = Path(__file__).with_name("amx_twin.cpp")
_kernel = native.kernel


def _granted() -> bool:
    try:
        return "amx" in dense_kernels()
    except BackendError:
        return False


TILES = (EMULATED, "amx") if _granted() else (EMULATED,)
"""The tiles that run here: those in plain C++, and the processor's."""


@functools.cache
def library(source: Path) -> ctypes.CDLL:
    """Compile a source in a few seconds, or load what was made of the same."""
    fma = ("-mfma",) if "avx2" in native.isas() else ()
    command = ("g++", "-std=c++17", "-O2", *fma, "-shared", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-Wno-psabi")
    options = (*command, "-DMGGCN_AMX_EMULATED", f"-DMGGCN_ISA={EMULATED}")
    if source == TWIN:
        options = (*command[:-2], "-ffp-contract=off")
    texts = [path.read_text() for path in (*sorted(KERNELS.glob("*.h")), source)]

    def make(target: Path) -> None:
        done = subprocess.run([*options, str(source), "-o", str(target)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    return ctypes.CDLL(str(compiled((texts, options, version_of("g++", "--version")), f"{source.stem}.so", make)))


def kernel(name: str, kind: str = "", set_: str = "") -> Callable[..., None]:
    """As native.kernel, which it replaces, for the emulated tiles too."""
    if set_ != EMULATED:
        return _kernel(name, kind, set_)
    loaded: Any = getattr(library(KERNELS / "gemm_amx.cpp"), f"{name}{kind}_{set_}")
    loaded.argtypes, loaded.restype = (ctypes.c_void_p,), None
    function: Callable[..., None] = loaded
    return function


def twin(a: Tensor, b: Tensor, segments: int, start: Tensor | None = None) -> Tensor:
    """Return a b in float32 as the twin computes it, number by number; start: what rows begin from."""
    right = b.contiguous()
    out = torch.zeros(a.shape[0], b.shape[1]) if start is None else start.clone()
    run = library(TWIN).amx_twin
    run.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 2, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    run.argtypes += [*[ctypes.c_int64] * 4, ctypes.c_int32]
    sizes = (a.shape[0], a.shape[1], b.shape[1])
    run(
        address(a), *a.stride(), address(right), right.stride(0), address(out), *sizes, segments, int(start is not None)
    )
    return out
