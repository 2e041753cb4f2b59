"""Kernels of a .cu file on the CPU, with the calling convention of CuPy's modules.

    module = EmulatedModule(path, ("-DMGGCN_F32",), seed=5)
    module.get_function("rows")((blocks,), (threads,), (tensor, np.int32(7)), shared_mem=0)

Seed 0 runs the threads of a block in order, and blocks in order; other seeds shuffle them: run a test under several.
What emulate.hpp can see going wrong raises EmulationError.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import re
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from tests.compiled import compiled, version_of

HERE = Path(__file__).resolve().parent
HEADER = "emulate.hpp"
CHECKS = ("-fsanitize=alignment,null,bounds,shift,integer-divide-by-zero",)
MORE_CHECKS = {
    "memory": ("-fsanitize=address", "--param=asan-stack=0", "--param=asan-globals=0"),
    "races": ("-fsanitize=thread",),
    "fused": ("-mfma", "-ffp-contract=fast", "-fexpensive-optimizations"),
}
"""What tests/emulator/checked.py adds: accesses outside tensors, with libasan loaded; races, by races.hpp alone; products
fused with what is added to them, as a GPU's compiler does.
"""
# No strict aliasing, as nvcc: a row of floats is also read as float4.
COMPILE = (
    *("g++", "-std=c++17", "-O1", "-fPIC", "-w", "-fno-exceptions", "-fno-rtti", "-fvisibility=hidden"),
    *("-fno-strict-aliasing", "-ffp-contract=off"),
)
KERNEL = re.compile(r'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\s*\(')
LIMITS = (2**31 - 1, 65535, 65535)
BLOCK_LIMITS = (1024, 1024, 64)
SHARED_LIMIT = 48 * 1024
STACKS_BYTES = 1024 * (64 * 1024 + 5 * 64)
SPARE_BYTES = 1 << 20
"""Below the stacks: what overflows the lowest one must not reach Python's own objects, which the system maps there."""
_thread = threading.local()
_compiling = threading.Lock()
_libraries: dict[object, ctypes.CDLL] = {}


class EmulationError(Exception):
    """A kernel did what a GPU would not survive, or would answer with anything."""


class _Launch(ctypes.Structure):
    """struct Launch of schedule.hpp."""

    _fields_: ClassVar = [
        ("dims", ctypes.c_uint * 6),
        ("seed", ctypes.c_uint),
        ("shared_bytes", ctypes.c_size_t),
        ("stacks", ctypes.c_void_p),
        ("arguments", ctypes.c_char_p),
        ("error", ctypes.c_char * 512),
    ]


def unit(path: Path) -> str:
    """Return the translation unit: CUDA's names, the file as it is, one C function per kernel."""
    source = path.read_text()
    wrappers = "".join(f"EMULATE_KERNEL({name})\n" for name in KERNEL.findall(source))
    # All that the file defines is its own: the same name in two files, or in two types, is two things.
    return f'#include "emulate.hpp"\nnamespace {{\n#line 1 "{path.name}"\n{source}\n}}\n{wrappers}'


def library(path: Path, options: tuple[str, ...]) -> ctypes.CDLL:
    """Return the compiled file, from the cache if nothing changed."""
    with _compiling:
        text, own = unit(path), (version_of("g++", "--version"), _texts(HERE, "*.hpp"), COMPILE, CHECKS)
        sources = (text, _texts(path.parent, "*.cuh"), options, own)
        if sources not in _libraries:
            header = compiled(own, f"{HEADER}.gch", _precompile)
            made = compiled(sources, f"{path.stem}.so", functools.partial(_compile, text, path.parent, options, header))
            _libraries[sources] = ctypes.CDLL(str(made))
        return _libraries[sources]


def _texts(folder: Path, pattern: str) -> tuple[str, ...]:
    return tuple(file.read_text() for file in sorted(folder.glob(pattern)))


def _precompile(target: Path) -> None:
    """Compile emulate.hpp, which takes as long as most kernels."""
    _tool([*COMPILE, *CHECKS, "-x", "c++-header", str(HERE / HEADER), "-o", str(target)])


def _compile(text: str, includes: Path, options: tuple[str, ...], header: Path, target: Path) -> None:
    source, objects = target.with_suffix(".cpp"), target.with_suffix(".o")
    source.write_text(text)
    # The checks call handlers of our own (emulate.hpp): the second step links no sanitizer's library.
    folders = (f"-I{header.parent}", f"-I{HERE}", f"-I{includes}")
    _tool([*COMPILE, *CHECKS, *options, *folders, "-c", str(source), "-o", str(objects)])
    _tool(["g++", "-shared", str(objects), "-o", str(target)])


def _tool(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EmulationError(f"{' '.join(command)}\n{done.stderr}")


class EmulatedModule:
    """A .cu file, whose kernels get_function offers as functions of (grid, block, args, shared_mem=bytes)."""

    def __init__(self, path: str | Path, options: tuple[str, ...] = (), seed: int = 0) -> None:
        self._library = library(Path(path).resolve(), tuple(options))
        self._seed = seed

    def get_function(self, name: str) -> Callable[..., None]:
        run = getattr(self._library, f"emulate_run_{name}")
        run.restype = None
        text = ctypes.create_string_buffer(1024)
        getattr(self._library, f"emulate_describe_{name}")(text)
        return functools.partial(_launch, name, run, text.value.decode().split(), self._seed)


def _launch(
    name: str,
    run: Any,
    kinds: list[str],
    seed: int,
    grid: tuple[int, ...],
    block: tuple[int, ...],
    args: tuple[Any, ...],
    *,
    shared_mem: int = 0,
) -> None:
    dims = (*(*grid, 1, 1)[:3], *(*block, 1, 1)[:3])
    _check_dims(name, dims, shared_mem)
    if len(args) != len(kinds):
        raise TypeError(f"{name} takes {len(kinds)} arguments, got {len(args)}")
    packed = b"".join(map(_packed, kinds, args))
    launch = _Launch((ctypes.c_uint * 6)(*dims), seed, shared_mem, _own_stacks(), packed)
    run(ctypes.byref(launch))
    if launch.error:
        raise EmulationError(f"{name}: {launch.error.decode()}")


def _own_stacks() -> int:
    """The address of the calling thread's stacks for emulated threads; only what is used takes memory."""
    if not hasattr(_thread, "address"):
        _thread.stacks = mmap.mmap(-1, SPARE_BYTES + STACKS_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        lowest = ctypes.addressof(ctypes.c_char.from_buffer(_thread.stacks))
        # Recursion without end stops this process here.
        if ctypes.CDLL(None).mprotect(ctypes.c_void_p(lowest), ctypes.c_size_t(mmap.PAGESIZE), 0):
            raise EmulationError("the system refuses to guard the stacks of emulated threads")
        _thread.address = lowest + SPARE_BYTES
    return int(_thread.address)


def _check_dims(name: str, dims: tuple[int, ...], shared_mem: int) -> None:
    limits = (*LIMITS, *BLOCK_LIMITS)
    fits = all(1 <= dim <= limit for dim, limit in zip(dims, limits, strict=True))
    if not fits or dims[3] * dims[4] * dims[5] > 1024 or not 0 <= shared_mem <= SHARED_LIMIT:
        raise EmulationError(f"{name}: no GPU launches grid {dims[:3]} of blocks {dims[3:]} with {shared_mem} bytes")


def _packed(kind: str, value: Any) -> bytes:
    """The bytes of an argument; cupy passes NumPy scalars as they are, so a scalar of another type is an error."""
    if kind == "p8":
        if hasattr(value, "data_ptr"):
            value = np.uint64(value.data_ptr())
        elif isinstance(value, np.ndarray):
            value = np.uint64(value.ctypes.data)
        kind = "u8"
    if not isinstance(value, np.generic) or value.dtype.str[1:] != kind:
        raise TypeError(f"expected a NumPy scalar of type {kind}, got {value!r} of type {type(value).__name__}")
    return value.tobytes().ljust(8, b"\0")
