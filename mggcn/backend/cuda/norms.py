"""Layer norm and batch norm on a GPU: launches of cuda/norms.cu."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mggcn.backend.cuda.kernels import Kernels, strided
from mggcn.backend.cuda.rows import SUM_THREADS, chunks, row_shape, sum_shape, vector
from mggcn.backend.norms import BatchTerms

WARPS = SUM_THREADS // 32


class CudaNorms:
    """The kernels for one storage type on one device."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def layer_norm(self, z: Tensor, gain: Tensor, bias: Tensor, eps: float, out: Tensor) -> None:
        shape = (-(-z.shape[0] // WARPS),), (32, WARPS)
        self._kernels.launch("norms", "layer_norm", *shape, *strided(z), gain, bias, *strided(out), eps, *z.shape)

    def layer_norm_grad(self, g: Tensor, z: Tensor, gain: Tensor, eps: float, out: Tensor, partials: Tensor) -> None:
        shape = (chunks(z.shape[0]),), (32, WARPS)
        args = (*strided(g), *strided(z), gain, *strided(out), *_sums(z, partials), eps, *z.shape)
        self._kernels.launch("norms", "layer_norm_grad", *shape, *args)

    def column_moments(self, z: Tensor, mean: Tensor | None, once: Tensor, partials: Tensor) -> None:
        args = (*strided(z), mean, once, *_sums(z, partials), *z.shape)
        self._kernels.launch("norms", "column_moments", *sum_shape(*_size(z), vector(z.dtype)), *args)

    def batch_norm(self, z: Tensor, mean: Tensor, factor: Tensor, shift: Tensor, out: Tensor) -> None:
        args = (*strided(z), mean, factor, shift, *strided(out), *z.shape)
        self._kernels.launch("norms", "batch_norm", *row_shape(*_size(z), vector(z.dtype)), *args)

    def column_products(self, g: Tensor, z: Tensor, mean: Tensor | None, partials: Tensor) -> None:
        args = (*strided(g), *strided(z), mean, *_sums(z, partials), *z.shape)
        self._kernels.launch("norms", "column_products", *sum_shape(*_size(z), vector(z.dtype)), *args)

    def batch_norm_grad(self, g: Tensor, z: Tensor, terms: BatchTerms, out: Tensor) -> None:
        args = (*strided(g), *strided(z), *terms, *strided(out), *z.shape)
        self._kernels.launch("norms", "batch_norm_grad", *row_shape(*_size(z), vector(z.dtype)), *args)


def _size(tensor: Tensor) -> tuple[int, int]:
    return tensor.shape[0], tensor.shape[1]


def _sums(z: Tensor, partials: Tensor) -> tuple[Any, ...]:
    if not z.shape[0]:
        partials.zero_()  # nothing is launched
    return partials, partials.shape[-2]
