"""Precision of torch's float32 products on GPUs while a run trains: a setting of the process, restored afterwards."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Undo = Callable[[], None]


@contextmanager
def float32_products(*, tf32: bool) -> Iterator[None]:
    """Let float32 products of the block round their operands to TF32, or not; sums of bf16 products stay float32.

    torch has an older and a newer name for the setting, and reading one raises where only the other was written:
    set_float32_matmul_precision writes both, so that torch.compile and whoever reads either work in the block and after it.
    """
    undo = [_bf16_sums(), _matmul_precision("high" if tf32 else "highest")]
    try:
        yield
    finally:
        for give_back in undo:
            give_back()


def _bf16_sums() -> Undo:
    """Sum bf16 products in float32 throughout, also where cuBLAS splits them."""
    matmul, name = torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"
    before = getattr(matmul, name)
    if hasattr(matmul, f"{name}_split_k"):
        before = (before, getattr(matmul, f"{name}_split_k"))
    setattr(matmul, name, False)
    return lambda: setattr(matmul, name, before)


def _matmul_precision(precision: str) -> Undo:
    written = (torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None))
    newer: list[Any] = [matmul for matmul in written if hasattr(matmul, "fp32_precision")]  # since torch 2.9
    kept = [matmul.fp32_precision for matmul in newer]
    try:
        older = torch.get_float32_matmul_precision()
    except RuntimeError:  # the user wrote the newer name alone; what the older one held cannot be read then
        older = "highest"
    _set(precision)

    def give_back() -> None:
        _set(older)
        for matmul, value in zip(newer, kept, strict=True):
            matmul.fp32_precision = value

    return give_back


def _set(precision: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch 2.9 recommends the newer name, which breaks torch.compile
        torch.set_float32_matmul_precision(precision)
