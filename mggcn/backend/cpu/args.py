"""Arguments of the CPU kernels that several of them take."""

from __future__ import annotations

import torch
from torch import Tensor

from mggcn import native
from mggcn.backend.base import Dropout, Epilogue

NAMES = {torch.float32: "f32", torch.float64: "f64", torch.bfloat16: "bf16"}


def kind_of(operand: torch.dtype, result: torch.dtype) -> str:
    """Return the suffix of a kernel's name that names the types of its dense operands and of its result."""
    return NAMES[operand] if operand == result else f"{NAMES[operand]}_{NAMES[result]}"


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def strided(matrix: Tensor | None) -> tuple[int | None, int]:
    """Return address and leading dimension; nothing and 0 for None."""
    return (None, 0) if matrix is None else (matrix.data_ptr(), matrix.stride(0))


def dropout_args(dropout: Dropout | None) -> native.DropoutArgs:
    if dropout is None:
        return native.DropoutArgs(0, 0, 0, 0, 1.0)
    seed, epoch = dropout.clock.tolist()
    scale, first_group = dropout.keep_scale, dropout.first_column // 8
    return native.DropoutArgs(seed, epoch, dropout.layer, dropout.threshold, scale, first_group)


def epilogue_args(epilogue: Epilogue) -> native.EpilogueArgs:
    return native.EpilogueArgs(
        address(epilogue.row_scale),
        address(epilogue.bias),
        address(epilogue.out_scale),
        address(epilogue.row_ids),
        dropout_args(epilogue.dropout),
        int(epilogue.relu),
    )
