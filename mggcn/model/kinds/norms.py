"""Layer norm and batch norm, with their gradients, summed in float64.

V rows of this rank, D columns, N vertices of the graph, S chunks of rows (KernelBackend.partials). Kernels:
backend/norms.py. For the cost model, `passes` are the rows that a kind reads and writes, `operations` the instructions in
double for each of their numbers, conversions among them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from mggcn.backend.norms import BatchTerms
from mggcn.blocks.block import RowSet
from mggcn.model.kinds.aggregate import Part
from mggcn.model.runtime import Runtime, Sizes
from mggcn.model.values import Adjoint, Op, PlainKind, Scratch, Value

if TYPE_CHECKING:
    from torch import Tensor

EPS: Final = 1e-5
"""Added to variances, as torch does."""
MOMENTUM: Final = 0.1
"""Share of an epoch's statistics in the running ones, as torch's default."""


def partial_sums(value: Value, sizes: Sizes, sums: int) -> dict[str, Scratch]:
    """Return the scratch memory for `sums` vectors (D,) of sums over rows, and for their parts by chunk."""
    cols = value.operands[0].cols
    return {
        "partials": Scratch(sums * sizes.device.partials * cols, 1, "fp64", sums=True),
        "totals": Scratch(sums * cols, 1, "fp64"),
    }


def partials_of(rt: Runtime, op: Op, cols: int) -> Tensor:
    """Return the scratch tensor of the parts, (sums, S, D)."""
    return rt.buffer(op.scratch["partials"])[0].view(-1, rt.backend.partials, cols)


def totals_of(rt: Runtime, op: Op, partials: Tensor) -> Tensor:
    """Add up the parts in a fixed order, and return the sums (sums, D)."""
    import torch

    totals = rt.buffer(op.scratch["totals"])[0].view(partials.shape[0], -1)
    return torch.sum(partials, 1, out=totals)


@dataclass(frozen=True, slots=True)
class LayerNorm(PlainKind):
    """out = gain * (z - mean) / sqrt(variance + eps) + bias, row by row (Ba et al. 2016, eq. 4)."""

    title: ClassVar[str] = "layer-norm {self.site}"
    has_parameters = True
    in_place: ClassVar[tuple[int, ...]] = (0,)
    passes: ClassVar[int] = 2
    operations: ClassVar[int] = 12
    by_rows: ClassVar[bool] = True
    gain: str
    bias: str
    site: int

    def adjoint(self, value: Value, gradient: Value) -> Adjoint:
        (z,) = value.operands
        back = Value(LayerNormGrad(self.gain, self.bias, self.site), (gradient, z), z.cols)
        return Adjoint((back,), (back,))

    def run(self, rt: Runtime, op: Op) -> None:
        gain, bias = rt.parameter(self.gain), rt.parameter(self.bias)
        rt.backend.norms.layer_norm(op.tensor(rt, 0), gain, bias, EPS, rt.buffer(op.out))


@dataclass(frozen=True, slots=True)
class LayerNormGrad(PlainKind):
    """The gradient of z (V, D), and those of gain and bias. Operands g and z.

    dz = scale * (h - mean(h) - y mean(h y)), h = gain * g, means over a row, y the standardised row.
    """

    title: ClassVar[str] = "layer-norm-grad {self.site}"
    in_place: ClassVar[tuple[int, ...]] = (0,)
    passes: ClassVar[int] = 3
    operations: ClassVar[int] = 25
    by_rows: ClassVar[bool] = True
    gain: str
    bias: str
    site: int

    @property
    def gradient_of(self) -> str:
        return self.gain

    def scratch(self, value: Value, sizes: Sizes) -> Mapping[str, Scratch]:
        return partial_sums(value, sizes, sums=2)

    def run(self, rt: Runtime, op: Op) -> None:
        g, z, out = op.tensor(rt, 0), op.tensor(rt, 1), rt.buffer(op.out)
        partials = partials_of(rt, op, z.shape[1])
        rt.backend.norms.layer_norm_grad(g, z, rt.parameter(self.gain), EPS, out, partials)
        of_bias, of_gain = totals_of(rt, op, partials)
        rt.gradient(self.bias).copy_(of_bias)
        rt.gradient(self.gain).copy_(of_gain)


@dataclass(frozen=True, slots=True)
class BatchNorm(PlainKind):
    """out = gain * (z - mean) / sqrt(variance + eps) + bias, column by column (Ioffe & Szegedy 2015, algorithm 1).

    The statistics cover all N vertices, each counted once, of a batch once for each rank that drew it. They are summed over
    ranks: first the mean, then the squared deviations, so that nothing cancels. The running statistics, which evaluation
    reads, move towards them by MOMENTUM.
    """

    title: ClassVar[str] = "batch-norm {self.site}"
    has_parameters = True
    passes: ClassVar[int] = 4
    operations: ClassVar[int] = 9
    gain: str
    bias: str
    mean: str
    variance: str
    site: int
    cols: int

    @property
    def sums_over_ranks(self) -> tuple[int, ...]:
        return 8 * (self.cols + 1), 8 * self.cols

    def scratch(self, value: Value, sizes: Sizes) -> Mapping[str, Scratch]:
        vectors = {name: Scratch(value.cols, 1, "fp64") for name in ("mean", "scale")}
        kept = vectors | {
            "sums": Scratch(value.cols + 1, 1, "fp64"),
            "once": Scratch(sizes.rows[value.rows], 1, "fp64"),
        }
        return kept | partial_sums(value, sizes, sums=1)

    def adjoint(self, value: Value, gradient: Value) -> Adjoint:
        (z,) = value.operands
        parts = (Value(Part(name), (value,), value.cols) for name in ("mean", "scale", "sums", "once"))
        back = Value(BatchNormGrad(self.gain, self.bias, self.site, self.cols), (gradient, z, *parts), z.cols)
        return Adjoint((back,), (back,))

    def run(self, rt: Runtime, op: Op) -> None:
        import torch

        norms, z, out = rt.backend.norms, op.tensor(rt, 0), rt.buffer(op.out)
        sums, mean, scale = (rt.buffer(op.scratch[name])[0] for name in ("sums", "mean", "scale"))
        once, partials = (
            counted_once(rt, rt.buffer(op.scratch["once"])[0, : z.shape[0]], op.rows),
            partials_of(rt, op, self.cols),
        )
        norms.column_moments(z, None, once, partials[0])
        sums[:-1] = totals_of(rt, op, partials)[0]
        sums[-1] = once.sum()
        rt.sum_over_ranks(sums)
        torch.div(sums[:-1], sums[-1], out=mean)
        norms.column_moments(z, mean, once, partials[0])
        scale.copy_(totals_of(rt, op, partials)[0])
        rt.sum_over_ranks(scale)
        # torch keeps the unbiased variance.
        unbiased = scale / (sums[-1] - 1).clamp(min=1)
        scale.div_(sums[-1])
        for name, now in ((self.mean, mean), (self.variance, unbiased)):
            rt.parameter(name).lerp_(now.to(rt.parameter(name).dtype), MOMENTUM)
        scale.add_(EPS).rsqrt_()
        norms.batch_norm(z, mean, rt.parameter(self.gain) * scale, rt.parameter(self.bias).double(), out)


def counted_once(rt: Runtime, once: Tensor, rows: RowSet) -> Tensor:
    """Return a vector (V,) of 1 for rows that this rank owns, 0 for copies of another rank's and for rows that only fill
    up; once: its memory.
    """
    owned, counted = rt.inputs.rows[rows].owned, rt.inputs.rows[rows].counted
    if counted is not None:
        return once.copy_(counted)
    if owned is None:
        return once.fill_(1)
    return once.zero_().index_fill_(0, owned, 1)


@dataclass(frozen=True, slots=True)
class BatchNormGrad(PlainKind):
    """The gradient of z (V, D), and those of gain and bias. Operands g, z and what BatchNorm kept.

    dz = gain * scale * (g - (db + y dgain) / N): g of a copy is a part of its vertex's, the second term counts once.
    """

    title: ClassVar[str] = "batch-norm-grad {self.site}"
    in_place: ClassVar[tuple[int, ...]] = (0,)
    passes: ClassVar[int] = 5
    operations: ClassVar[int] = 12
    gain: str
    bias: str
    site: int
    cols: int

    @property
    def gradient_of(self) -> str:
        return self.gain

    @property
    def sums_over_ranks(self) -> tuple[int, ...]:
        return (16 * self.cols,)

    def scratch(self, value: Value, sizes: Sizes) -> Mapping[str, Scratch]:
        return partial_sums(value, sizes, sums=2)

    def run(self, rt: Runtime, op: Op) -> None:
        norms, g, z, out = rt.backend.norms, op.tensor(rt, 0), op.tensor(rt, 1), rt.buffer(op.out)
        # One row each, also where a step has no vertices of this rank.
        mean, scale, sums, once = (rt.buffer(name)[0] for name in op.operands[2:])
        once = once[: z.shape[0]]
        partials = partials_of(rt, op, self.cols)
        norms.column_products(g, z, mean, partials)
        of_bias, of_gain = totals = totals_of(rt, op, partials)
        of_gain.mul_(scale)
        rt.gradient(self.bias).copy_(of_bias)  # summed over ranks with all gradients
        rt.gradient(self.gain).copy_(of_gain)
        rt.sum_over_ranks(totals.view(-1))
        totals.div_(sums[-1])
        factor = rt.parameter(self.gain) * scale
        norms.batch_norm_grad(g, z, BatchTerms(mean, factor, of_gain.mul_(scale), of_bias, once), out)


@dataclass(frozen=True, slots=True)
class RunningNorm(PlainKind):
    """out = gain * (z - mean) / sqrt(variance + eps) + bias with the running statistics, in evaluations."""

    title: ClassVar[str] = "batch-norm {self.site}"
    has_parameters = True
    in_place: ClassVar[tuple[int, ...]] = (0,)
    passes: ClassVar[int] = 2
    operations: ClassVar[int] = 4
    by_rows: ClassVar[bool] = True
    gain: str
    bias: str
    mean: str
    variance: str
    site: int

    def run(self, rt: Runtime, op: Op) -> None:
        scale = (rt.parameter(self.variance).double() + EPS).rsqrt()
        mean, shift = rt.parameter(self.mean).double(), rt.parameter(self.bias).double()
        rt.backend.norms.batch_norm(op.tensor(rt, 0), mean, rt.parameter(self.gain) * scale, shift, rt.buffer(op.out))
