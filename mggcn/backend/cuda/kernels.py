"""Kernels of cuda/*.cu by name: found, compiled for one storage type on first use, launched with converted arguments.

The same text serves NVRTC (cuda/compile.py) and the tests' emulator; what either makes offers `get_function(name)`.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from mggcn.backend.base import Epilogue
from mggcn.errors import BackendError

TYPE_OPTIONS = {torch.float32: "-DMGGCN_F32", torch.float64: "-DMGGCN_F64", torch.bfloat16: "-DMGGCN_BF16"}
_KERNEL = re.compile(
    r'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\s*\(([^)]*)\)', re.S
)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_SCALARS: dict[str, Callable[[Any], Any]] = {
    "int": np.int32,
    "unsigned": np.uint32,
    "long long": np.int64,
    "float": np.float32,
    "double": np.float64,
}

Function = Callable[..., None]


class Module(Protocol):
    """A compiled file of kernels, such as cupy.cuda.function.Module."""

    def get_function(self, name: str) -> Function:
        """Return a kernel, to be called as f(grid, block, args, shared_mem=bytes)."""
        ...


Compiler = Callable[[Path, tuple[str, ...]], Module]
"""Compiles a .cu file under options such as -DMGGCN_F32."""


def strided(matrix: Tensor) -> tuple[Tensor, int]:
    """Return a matrix and its leading dimension, as kernels take it."""
    return matrix, matrix.stride(0)


def out_option(operand: Tensor, out: Tensor) -> tuple[str, ...]:
    """Return the option for results of another type than the operand's (cuda/out.cuh)."""
    if out.dtype == operand.dtype:
        return ()
    return ("-DMGGCN_OUT_BF16",) if out.dtype == torch.bfloat16 else ("-DMGGCN_OUT_REAL",)


def folder() -> Path:
    """Return the folder of the .cu files: in the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[2]
    found = next((p for p in (package / "cuda", package.parent / "cuda") if (p / "common.cuh").is_file()), None)
    if found is None:
        raise BackendError(f"the CUDA sources are not in {package / 'cuda'}; install mggcn again")
    return found


def parameters(source: str) -> dict[str, tuple[str, ...]]:
    """Return the parameter types of every kernel of a file: "*" for a pointer, else the name of the scalar type."""
    return {name: tuple(_kinds(_COMMENT.sub("", text))) for name, text in _KERNEL.findall(source)}


def _kinds(text: str) -> list[str]:
    kinds = []
    for part in (p for p in text.split(",") if p.strip()):
        kind = re.sub(r"\b(const|__restrict__|volatile)\b", " ", part).rsplit(None, 1)[0]
        kinds.append("*" if "*" in part else " ".join(kind.split()))
    return kinds


@functools.cache
def headers_digest() -> str:
    """Return a digest of all headers: a compiler that caches by the text of a file alone must see that they changed."""
    digest = hashlib.sha256()
    for path in sorted(folder().glob("*.cuh")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


class Kernels:
    """The kernels for one storage type on one device."""

    def __init__(self, compiler: Compiler, dtype: torch.dtype) -> None:
        self._compiler = compiler
        self._options = (TYPE_OPTIONS[dtype], f"-DMGGCN_HEADERS=0x{headers_digest()}")
        self._ready: dict[tuple[str, tuple[str, ...]], dict[str, tuple[Function, tuple[str, ...]]]] = {}

    def launch(
        self,
        file: str,
        kernel: str,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        *args: Tensor | float | None,
        options: tuple[str, ...] = (),
        shared_bytes: int = 0,
    ) -> None:
        """Launch `kernel` of cuda/<file>.cu on the current stream; nothing happens for an empty grid.

        Tensors are passed by address, None as a null pointer, numbers as the type that the kernel declares.
        """
        if 0 in grid:
            return
        function, kinds = self._function(file, kernel, options)
        if len(args) != len(kinds):
            raise TypeError(f"{kernel} takes {len(kinds)} arguments, got {len(args)}")
        function(grid, block, tuple(map(_converted, kinds, args)), shared_mem=shared_bytes)

    def prepare(self, file: str, kernel: str, options: tuple[str, ...] = ()) -> None:
        """Compile what a launch needs."""
        self._function(file, kernel, options)

    def _function(self, file: str, kernel: str, options: tuple[str, ...]) -> tuple[Function, tuple[str, ...]]:
        known = self._ready.setdefault((file, options), {})
        if kernel not in known:
            path = folder() / f"{file}.cu"
            module = self._compiler(path, (*self._options, *options))
            for name, kinds in parameters(path.read_text()).items():
                known[name] = (module.get_function(name), kinds)
        return known[kernel]


def _converted(kind: str, value: Tensor | float | None) -> Any:
    if isinstance(value, Tensor):
        return np.uint64(value.data_ptr())
    return np.uint64(0) if value is None else _SCALARS[kind](value)


def epilogue_args(
    epilogue: Epilogue | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None, int, int, int, float]:
    """Return row_scale, bias, out_scale, row_ids, clock, relu, layer, threshold, keep_scale; None switches all off.

    A kernel declares them as const real_t* (3), const long long* (2), int, unsigned (2) and float: struct Epilogue of
    cuda/epilogue.cuh in another order.
    """
    if epilogue is None:
        return None, None, None, None, None, 0, 0, 0, 1.0
    vectors = (epilogue.row_scale, epilogue.bias, epilogue.out_scale)
    drop = epilogue.dropout
    if drop is None:
        return *vectors, None, None, int(epilogue.relu), 0, 0, 1.0
    return *vectors, epilogue.row_ids, drop.clock, int(epilogue.relu), drop.layer, drop.threshold, drop.keep_scale
