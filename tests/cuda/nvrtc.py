"""NVRTC of CUDA 12 on the .cu files, as CuPy calls it: the last compiler that knows the V100 (compute_70). Needs no GPU."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from mggcn.backend.cuda.compile import nvrtc_options
from tests.cuda.nvcc import COMPILERS, CompileError, Resources, parse
from tests.cuda.units import Unit

LIBRARY = "libnvrtc.so.12"


def find() -> str | None:
    """Return the library that `make test-all` installed, or the name of the system's."""
    own = COMPILERS / "nvidia" / "cuda_nvrtc" / "lib" / LIBRARY
    if own.is_file():
        return str(own)
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    return LIBRARY


@functools.cache
def _library(where: str) -> ctypes.CDLL:
    library = ctypes.CDLL(where)
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return library


def version(where: str) -> str:
    """Return NVRTC's version, such as 12.9."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _library(where).nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def compile_unit(where: str, unit: Unit, target: str) -> list[Resources]:
    """Compile a unit to machine code (target sm_70), as CuPy does, and return its resources.

    Raises: CompileError with the compiler's words, also for a warning other than that the architecture is an old one.
    """
    options = [f"--gpu-architecture={target}", "--ptxas-options=-v", *nvrtc_options(unit.options)]
    status, log, nbytes, _ = _compile(_library(where), unit.path, options)
    warns = "warning" in log.replace("warning: Architectures prior to", "")
    if status or not nbytes or warns:
        raise CompileError(f"{unit} for {target}: {_library(where).nvrtcGetErrorString(status).decode()}: {log}")
    return parse(log)


def ptx(where: str, unit: Unit, target: str, *more: str) -> str:
    """Return the PTX of a unit (target compute_90) under the options that CuPy is given. Raises: CompileError."""
    options = [f"--gpu-architecture={target}", *nvrtc_options(unit.options), *more]
    status, log, _, text = _compile(_library(where), unit.path, options)
    if status or not text:
        raise CompileError(f"{unit} for {target}: {log}")
    return text


def _compile(library: ctypes.CDLL, path: Path, options: list[str]) -> tuple[int, str, int, str]:
    """Return NVRTC's status, its log, the bytes of machine code and the PTX."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    source = path.read_bytes()
    library.nvrtcCreateProgram(ctypes.byref(program), source, path.name.encode(), 0, None, None)
    try:
        status = library.nvrtcCompileProgram(program, len(options), array)
        library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(program, log)
        nbytes = ctypes.c_size_t()
        library.nvrtcGetCUBINSize(program, ctypes.byref(nbytes))
        size.value = 0
        library.nvrtcGetPTXSize(program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value + 1)
        library.nvrtcGetPTX(program, text)
        return status, log.value.decode(), nbytes.value, text.value.decode()
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
