"""Triton's kernels in its interpreter, on tensors of the CPU, with what it does otherwise than a GPU mended."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.experimental.gluon  # the interpreter imports it where it would find mended functions
import triton.language as tl
from triton.runtime import interpreter

from mggcn.backend.cuda.dense_blocks import Options
from mggcn.backend.cuda.triton_kernels import Args, Constants, load_kernels

Handle = interpreter.TensorHandle


@functools.cache
def kernels() -> ModuleType:
    """Return a copy of the module of kernels whose functions the interpreter runs; the module itself is for GPUs."""
    _mend()
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        return load_kernels()


class InterpretedKernels:
    """BlockKernels of the CPU. seed: of the order of blocks; None: that of their numbers, as in Triton's interpreter."""

    def __init__(self, seed: int | None = None) -> None:
        self._order = None if seed is None else np.random.default_rng(seed)

    def launch(self, kernel: str, blocks: int, args: Args, constants: Constants, options: Options) -> None:
        function = getattr(kernels(), kernel)
        with np.errstate(invalid="ignore", over="ignore"), in_order(self._order, blocks):
            function[(blocks,)](**args, **constants)


@contextlib.contextmanager
def in_order(rng: np.random.Generator | None, blocks: int) -> Iterator[None]:
    """Let the blocks of launches inside the context run in a drawn order; rng None: in that of their numbers."""
    if rng is None:
        yield
        return
    builder, numbers = interpreter.interpreter_builder, rng.permutation(blocks)
    before = builder.set_grid_idx
    builder.set_grid_idx = lambda x, y, z: before(int(numbers[x]), y, z)
    try:
        yield
    finally:
        del builder.set_grid_idx


def read_as_tf32(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return what a tensor core reads of float32 operands: it ignores their 13 low bits."""
    return (np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def _floats(x: Handle, input_precision: Any) -> npt.NDArray[Any]:
    """The operand of a product as numbers: the interpreter has bf16 as integers of 16 bits, and multiplies these."""
    if x.dtype.scalar == tl.bfloat16:
        return (x.data.astype(np.uint32) << 16).view(np.float32)
    tf32 = "TF32" in str(input_precision)
    return read_as_tf32(x.data) if tf32 and x.dtype.scalar == tl.float32 else x.data


def _create_dot(self: Any, a: Handle, b: Handle, d: Handle, input_precision: Any, _: Any) -> Handle:
    product = np.matmul(_floats(a, input_precision), _floats(b, input_precision), dtype=d.data.dtype)
    return Handle(product + d.data, d.dtype.scalar)


def _converted(src: Handle, dst_type: Any) -> npt.NDArray[Any]:
    """Float32 to bf16, to nearest and even as torch does, or back; the interpreter cuts off, or carries no bit."""
    if src.dtype.scalar == tl.bfloat16:
        return (src.data.astype(np.uint32) << 16).view(np.float32)
    rounded = torch.from_numpy(np.ascontiguousarray(src.data)).bfloat16()
    return rounded.view(torch.int16).numpy().view(np.uint16).reshape(src.data.shape)


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A kernel that calls another: Triton's language is given back as it was, which the interpreter forgets here."""
    scope = interpreter._patch_lang(self.fn)
    try:
        return self.rewrite()(*args, **kwargs)
    finally:
        scope.restore()


@functools.cache
def _mend() -> None:
    builder = interpreter.InterpreterBuilder
    builder.create_dot = _create_dot
    for name in ("cast_impl", "create_fp_to_fp"):
        setattr(builder, name, _mended(getattr(builder, name)))
    patch = interpreter._patch_lang_tensor
    # Triton's zeros, sum and others are themselves kernels, decorated for GPUs when Triton was imported.
    functions = {
        value: interpreter.InterpretedFunction(value.fn)
        for value in vars(tl.standard).values()
        if isinstance(value, triton.JITFunction)
    }
    own = [
        (m, n, functions[v])
        for m in (tl, tl.standard)
        for n, v in vars(m).items()
        if isinstance(v, triton.JITFunction) and v in functions
    ]

    def patch_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))  # NumPy 2.4 wants no array here
        for module, name, function in own:
            scope.set_attr(module, name, function)

    interpreter._patch_lang_tensor = patch_tensor
    interpreter.InterpretedFunction.__call__ = _call


def _mended(original: Any) -> Any:
    def convert(self: Any, src: Handle, dst_type: Any, *rounding: Any) -> Handle:
        if {src.dtype.scalar, dst_type.scalar} == {tl.float32, tl.bfloat16}:
            return Handle(_converted(src, dst_type), dst_type.scalar)
        return original(self, src, dst_type, *rounding)

    return convert
