"""Machine code of cuda/*.cu: compiled by the NVRTC that CuPy has, and kept on disk for later processes.

cupy.RawModule would do both, but appends -ftz=true, whatever it is given: numbers below 1.2e-38 would count as zero, unlike
in the emulator, under CUDA's own compiler and on CPUs.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
from pathlib import Path
from typing import Any

from mggcn.backend.cuda.kernels import Module, folder
from mggcn.files import read_bytes, write_bytes

log: logging.Logger = logging.getLogger(__name__)

DIGEST_BYTES = 32


def load_kernels(cupy: Any, path: Path, options: tuple[str, ...]) -> Module:
    """Return the kernels of a .cu file for the current device. Cost: once per process, device and options.

    It takes about a second where no process before has compiled it, and a few milliseconds where one has.
    Raises: CuPy's CompileException with the compiler's words.
    """
    return _loaded(cupy, int(cupy.cuda.runtime.getDevice()), path.read_text(), path.name, options)


def nvrtc_options(options: tuple[str, ...]) -> tuple[str, ...]:
    """Return all options of NVRTC except the architecture: denormals are kept, which is its default."""
    return ("--std=c++17", f"-I{folder()}", *options)


@functools.cache
def _loaded(cupy: Any, device: int, source: str, name: str, options: tuple[str, ...]) -> Module:
    module: Any = cupy.cuda.function.Module()
    module.load(_machine_code(cupy, source, name, options))
    found: Module = module
    return found


def _machine_code(cupy: Any, source: str, name: str, options: tuple[str, ...]) -> bytes:
    """Return the binary kept for these options, which include a digest of the headers, or compile it and keep it."""
    made_by = (cupy.__version__, cupy.cuda.nvrtc.getVersion(), cupy.cuda.Device().compute_capability)
    place = cache_folder() / f"mggcn-{hashlib.sha256(repr((source, options, made_by)).encode()).hexdigest()[:40]}.bin"
    kept = _read(place)
    if kept is not None:
        return kept
    code: bytes = cupy.cuda.compiler.compile_using_nvrtc(source, nvrtc_options(options), filename=name)[0]
    try:
        _keep(place, code)
    except OSError as error:
        log.warning("compiled kernels cannot be kept for later processes: %s; see CUPY_CACHE_DIR", error)
    return code


def cache_folder() -> Path:
    """Return CuPy's cache folder of compiled kernels."""
    return Path(os.environ.get("CUPY_CACHE_DIR") or "~/.cupy/kernel_cache").expanduser()


def _read(place: Path) -> bytes | None:
    """Return the kept binary; None if it is missing or damaged."""
    try:
        text = read_bytes(place)
    except OSError:
        return None
    digest, code = text[:DIGEST_BYTES], text[DIGEST_BYTES:]
    return code if hashlib.sha256(code).digest() == digest else None


def _keep(place: Path, code: bytes) -> None:
    """Write the file of a binary: processes that start together compile the same one."""
    place.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(place, hashlib.sha256(code).digest() + code)
