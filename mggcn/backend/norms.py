"""Layer norm and batch norm at kernel level: passes over dense rows in float64, rounded where they are stored.

Shapes: V rows of this rank, D columns, N vertices of all ranks, S chunks of rows whose sums are kept apart
(KernelBackend.partials). Rows are of the storage type; gain and bias (D,) are float32, beside float64 rows float64; all
other vectors, and partial sums, are float64. Partial sums, overwritten, are left to the caller to add.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class BatchTerms(NamedTuple):
    """The gradient of batch norm, out = factor * (g - once * (slope * (z - mean) + shift)): vectors (D,), once (V,)."""

    mean: Tensor
    factor: Tensor
    slope: Tensor
    shift: Tensor
    once: Tensor


class NormKernels(Protocol):
    """Kernels of one device for one storage type. Outputs are written in place; results repeat bit for bit."""

    def layer_norm(self, z: Tensor, gain: Tensor, bias: Tensor, eps: float, out: Tensor) -> None:
        """Out = gain * y + bias with y = (z - mean) / sqrt(variance + eps), row by row; out may be z."""
        ...

    def layer_norm_grad(self, g: Tensor, z: Tensor, gain: Tensor, eps: float, out: Tensor, partials: Tensor) -> None:
        """Out = the gradient of z; partials (2, S, D) = the column sums of g and of g * y. Out may be g."""
        ...

    def column_moments(self, z: Tensor, mean: Tensor | None, once: Tensor, partials: Tensor) -> None:
        """Partials (S, D) = the column sums of once * z, or with means of once * (z - mean)^2; once (V,) is 0 or 1."""
        ...

    def batch_norm(self, z: Tensor, mean: Tensor, factor: Tensor, shift: Tensor, out: Tensor) -> None:
        """Out = factor * (z - mean) + shift; out may be z."""
        ...

    def column_products(self, g: Tensor, z: Tensor, mean: Tensor | None, partials: Tensor) -> None:
        """Partials (2, S, D) = the column sums of g and of g * (z - mean), with no mean those of g * z."""
        ...

    def batch_norm_grad(self, g: Tensor, z: Tensor, terms: BatchTerms, out: Tensor) -> None:
        """Out = what `BatchTerms` says; out may be g."""
        ...
