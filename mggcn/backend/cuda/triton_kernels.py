"""Triton's kernels without Triton's driver: its compiler makes machine code, CuPy loads and starts it.

So a launch costs what those of cuda/*.cu cost, no C compiler or header of Python's is asked for, and what runs on a GPU is
compiled in the same way where there is none.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from mggcn.backend.cuda.dense_blocks import Options
from mggcn.backend.cuda.kernels import folder
from mggcn.errors import BackendError
from mggcn.files import temporary_folder

log: logging.Logger = logging.getLogger(__name__)

Args = Mapping[str, Tensor | int | float | None]
Constants = Mapping[str, int]
POINTERS = {torch.float32: "*fp32", torch.float64: "*fp64", torch.bfloat16: "*bf16", torch.int64: "*i64"}
LARGE = ("ld_", "step_")
"""Beginnings of the names of 64-bit numbers; others have 32."""
MEASURED = (9, 0)
TRIED = ("3.6.", "3.7.", "3.8.")
"""Triton's versions whose compiler and launches these kernels were tried with: both change from one to the next. 3.6 ran on
an H200; 3.7.1 and 3.8.0 compile to the same arguments and about the same registers and spills (docs/notes/0038)."""
ALIGNED = 16
"""Triton is told which addresses and numbers are multiples of this many bytes, or of this number."""


class BlockKernels(Protocol):
    """The kernels of cuda/dense.py on a device."""

    def launch(self, kernel: str, blocks: int, args: Args, constants: Constants, options: Options) -> None:
        """Launch so many blocks of a kernel on the current stream; None switches an argument off."""
        ...


@dataclass(frozen=True, slots=True)
class Code:
    """Machine code of a kernel and what a launch needs to know; arguments: those that it takes, with their types."""

    binary: bytes
    name: str
    shared_bytes: int
    arguments: tuple[tuple[str, str], ...]


def available(capability: tuple[int, int]) -> bool:
    """Return whether these kernels were measured on GPUs of this kind, an H200, and with the Triton that is installed."""
    if capability != MEASURED or importlib.util.find_spec("triton") is None:
        return False
    try:
        return metadata.version("triton").startswith(TRIED)
    except metadata.PackageNotFoundError:
        return False


def kind(name: str, value: Tensor | int | float | None) -> str:
    """Return Triton's type of an argument; a missing one is a constant."""
    if isinstance(value, Tensor):
        return POINTERS[value.dtype]
    if value is None:
        return "constexpr"
    return "fp32" if isinstance(value, float) else "i64" if name.startswith(LARGE) else "i32"


def is_aligned(name: str, value: Tensor | int | float | None) -> bool:
    """Whether Triton may know that an address or leading dimension is a multiple of 16: it then loads 16 bytes at once."""
    if isinstance(value, Tensor):
        return value.data_ptr() % ALIGNED == 0
    return name.startswith(LARGE) and value is not None and value % ALIGNED == 0


def load_kernels() -> ModuleType:
    """Return the kernels of cuda/dense.py as a new module: decorated for GPUs, or for Triton's interpreter if it is on."""
    spec = importlib.util.spec_from_file_location("mggcn_dense", folder() / "dense.py")
    if spec is None or spec.loader is None:
        raise BackendError(f"{folder() / 'dense.py'} cannot be imported; install mggcn again")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_kernels = functools.cache(load_kernels)


def compile_kernel(
    kernel: str,
    kinds: Mapping[str, str],
    aligned: frozenset[str],
    constants: Constants,
    options: Options,
    capability: tuple[int, int],
) -> Code:
    """Compile a kernel of cuda/dense.py. Needs no GPU. Raises: BackendError if no folder can be written.

    Cost: about a second where no process before has compiled it, or Triton's cache cannot be written.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(_kernels(), kernel)
    signature = {name: kinds.get(name, "constexpr") for name in function.arg_names}
    fixed = {name: constants.get(name) for name, of in signature.items() if of == "constexpr"}
    hints = {(i,): [["tt.divisibility", ALIGNED]] for i, name in enumerate(function.arg_names) if name in aligned}
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    settings = {"num_warps": options.warps, "num_stages": options.stages}
    if options.registers:
        settings["maxnreg"] = options.registers
    with COMPILING:
        made = _compiled(
            lambda: triton.compile(ASTSource(function, signature, constexprs=fixed, attrs=hints), target, settings)
        )
    taken = tuple((name, of) for name, of in signature.items() if of != "constexpr")
    return Code(made.asm["cubin"], made.metadata.name, made.metadata.shared, taken)


def _compiled(compile_it: Callable[[], Any]) -> Any:
    """Return what Triton compiled and kept, or, where its cache cannot be written, compiled into a temporary folder."""
    import triton

    try:
        return compile_it()
    except OSError as error:
        _say_not_kept(error.strerror or str(error))
    try:
        # The machine code is read before the folder is removed.
        with temporary_folder() as place, triton.knobs.cache.scope():
            triton.knobs.cache.dir = str(place)
            return compile_it()
    except OSError as error:
        raise BackendError(
            f"Triton finds no folder for what it compiles ({error}); let TRITON_CACHE_DIR name one that can be written"
        ) from error


@functools.cache
def _say_not_kept(reason: str) -> None:
    """Warn once of a process."""
    log.warning("dense products cannot be kept for later processes: %s; see TRITON_CACHE_DIR", reason)


COMPILING = threading.Lock()
"""Ranks that are threads compile the same kernels: the first one does."""
SCALARS: dict[str, Callable[[Any], Any]] = {"i32": np.int32, "i64": np.int64, "fp32": np.float32}
SMALL_SHARED = 48 * 1024
"""Shared memory that a kernel may use unasked, in bytes."""
MAX_SHARED_ATTRIBUTE = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES."""
NO_SCRATCH = (np.uint64(0), np.uint64(0))
"""Triton's own last two arguments: memory that none of these kernels asks for."""


class TritonKernels:
    """The kernels on the current GPU: compiled on first use."""

    def __init__(self, cupy: Any, capability: tuple[int, int]) -> None:
        self._cupy, self._capability = cupy, capability
        self._ready: dict[tuple[Any, ...], tuple[Callable[..., None], Code]] = {}

    def launch(self, kernel: str, blocks: int, args: Args, constants: Constants, options: Options) -> None:
        """Implement BlockKernels.launch."""
        kinds = tuple((name, of) for name, value in args.items() if (of := kind(name, value)) != "constexpr")
        aligned = frozenset(name for name, value in args.items() if is_aligned(name, value))
        key = (kernel, kinds, aligned, tuple(constants.items()), options)
        if key not in self._ready:
            code = compile_kernel(kernel, dict(kinds), aligned, constants, options, self._capability)
            self._ready[key] = self._loaded(code), code
        function, code = self._ready[key]
        values = (_converted(of, args[name]) for name, of in code.arguments)
        function((blocks,), (32 * options.warps,), (*values, *NO_SCRATCH), shared_mem=code.shared_bytes)

    def _loaded(self, code: Code) -> Callable[..., None]:
        module = self._cupy.cuda.function.Module()
        module.load(code.binary)
        function: Any = module.get_function(code.name)
        if code.shared_bytes > SMALL_SHARED:
            self._cupy.cuda.driver.funcSetAttribute(function.ptr, MAX_SHARED_ATTRIBUTE, code.shared_bytes)
        loaded: Callable[..., None] = function
        return loaded


def _converted(of: str, value: Tensor | int | float | None) -> Any:
    return np.uint64(value.data_ptr()) if isinstance(value, Tensor) else SCALARS[of](value)
