"""Layer norm and batch norm, with their gradients. By blocks of rows, which torch normalises while they lie in the cache.

V rows of this rank, D columns, N vertices of the graph. Sums are float32, or float64 in runs of float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from mggcn.model.kinds.aggregate import Part
from mggcn.model.runtime import Runtime, Sizes
from mggcn.model.values import Adjoint, Op, PlainKind, Scratch, Value

if TYPE_CHECKING:
    from torch import Tensor

EPS: Final = 1e-5
"""Added to variances, as torch does."""
MOMENTUM: Final = 0.1
"""Share of an epoch's statistics in the running ones, as torch's default."""
BLOCK_BYTES: Final = 1 << 19


def blocks(rows: Tensor) -> Iterator[slice]:
    """Yield the rows of a matrix in blocks of about half a MiB."""
    step = max(1, BLOCK_BYTES // max(1, rows.shape[1] * rows.element_size()))
    for first in range(0, rows.shape[0], step):
        yield slice(first, first + step)


@dataclass(frozen=True, slots=True)
class LayerNorm(PlainKind):
    """out = gain * (z - mean) / sqrt(variance + eps) + bias, row by row (Ba et al. 2016, eq. 4)."""

    has_parameters = True
    gain: str
    bias: str
    site: int

    @property
    def label(self) -> str:
        return f"layer-norm {self.site}"

    def adjoint(self, value: Value, gradient: Value) -> Adjoint:
        (z,) = value.operands
        back = Value(LayerNormGrad(self.gain, self.bias, self.site), (gradient, z), z.cols)
        return Adjoint((back,), (back,))

    def run(self, rt: Runtime, op: Op) -> None:
        import torch

        z, out = op.tensor(rt, 0), rt.buffer(op.out)
        gain, bias = rt.parameter(self.gain), rt.parameter(self.bias)
        for rows in blocks(z):
            some = z[rows].to(gain.dtype)
            out[rows].copy_(torch.nn.functional.layer_norm(some, gain.shape, gain, bias, EPS))


@dataclass(frozen=True, slots=True)
class LayerNormGrad(PlainKind):
    """The gradient of z (V, D), and those of gain and bias. Operands g and z."""

    in_place = (0,)
    gain: str
    bias: str
    site: int

    @property
    def label(self) -> str:
        return f"layer-norm-grad {self.site}"

    @property
    def gradient_of(self) -> str:
        return self.gain

    def run(self, rt: Runtime, op: Op) -> None:
        import torch

        g, z, out = op.tensor(rt, 0), op.tensor(rt, 1), rt.buffer(op.out)
        gain, bias = rt.parameter(self.gain), rt.parameter(self.bias)
        grads = rt.gradient(self.gain), rt.gradient(self.bias)
        for grad in grads:
            grad.zero_()
        for rows in blocks(z):
            some, back = z[rows].to(gain.dtype), g[rows].to(gain.dtype)
            _, mean, rstd = torch.native_layer_norm(some, gain.shape, gain, bias, EPS)
            found = torch.ops.aten.native_layer_norm_backward(
                back, some, gain.shape, mean, rstd, gain, bias, [True, True, True]
            )
            out[rows].copy_(found[0])
            for grad, part in zip(grads, found[1:], strict=True):
                grad.add_(part)


@dataclass(frozen=True, slots=True)
class BatchNorm(PlainKind):
    """out = gain * (z - mean) / sqrt(variance + eps) + bias, column by column (Ioffe & Szegedy 2015, algorithm 1).

    Statistics are those of all N vertices, each counted once, and summed over ranks: the mean first, then the squares of
    what is left, so that nothing cancels. The running ones, which evaluation reads, take MOMENTUM of them.
    """

    has_parameters = True
    gain: str
    bias: str
    mean: str
    variance: str
    site: int
    cols: int

    @property
    def label(self) -> str:
        return f"batch-norm {self.site}"

    @property
    def sums_over_ranks(self) -> tuple[int, ...]:
        return 8 * (self.cols + 1), 8 * self.cols

    def scratch(self, value: Value, sizes: Sizes) -> Mapping[str, Scratch]:
        vectors = {name: Scratch(value.cols, 1, "fp64") for name in ("mean", "scale")}
        return vectors | {"sums": Scratch(value.cols + 1, 1, "fp64"), "once": Scratch(1)}

    def adjoint(self, value: Value, gradient: Value) -> Adjoint:
        (z,) = value.operands
        parts = (Value(Part(name), (value,), value.cols) for name in ("mean", "scale", "sums", "once"))
        back = Value(BatchNormGrad(self.gain, self.bias, self.site, self.cols), (gradient, z, *parts), z.cols)
        return Adjoint((back,), (back,))

    def run(self, rt: Runtime, op: Op) -> None:
        import torch

        z, out = op.tensor(rt, 0), rt.buffer(op.out)
        sums, mean, scale = (rt.buffer(op.scratch[name])[0] for name in ("sums", "mean", "scale"))
        once = counted_once(rt, rt.buffer(op.scratch["once"]))
        sums.zero_()
        for rows in blocks(z):
            sums[:-1].add_((z[rows].double() * once[rows]).sum(0))
        sums[-1:].add_(once.double().sum(0))
        rt.sum_over_ranks(sums)
        torch.div(sums[:-1], sums[-1], out=mean)
        scale.zero_()
        for rows in blocks(z):
            scale.add_(((z[rows].double() - mean).square() * once[rows]).sum(0))
        rt.sum_over_ranks(scale)
        # torch keeps the unbiased variance.
        unbiased = scale / (sums[-1] - 1).clamp(min=1)
        scale.div_(sums[-1])
        for name, now in ((self.mean, mean), (self.variance, unbiased)):
            rt.parameter(name).lerp_(now.to(rt.parameter(name).dtype), MOMENTUM)
        scale.add_(EPS).rsqrt_()
        normalise(rt, z, mean, scale, self.gain, self.bias, out)


def counted_once(rt: Runtime, once: Tensor) -> Tensor:
    """Once (V, 1) = 1 for rows that this rank owns, 0 for copies of another rank's."""
    if rt.inputs.owned is None:
        return once.fill_(1)
    return once.zero_().index_fill_(0, rt.inputs.owned, 1)


def normalise(rt: Runtime, z: Tensor, mean: Tensor, scale: Tensor, gain: str, bias: str, out: Tensor) -> None:
    """Out (V, D) = gain * scale * (z - mean) + bias."""
    factor, shift = rt.parameter(gain) * scale.to(rt.parameter(gain).dtype), rt.parameter(bias)
    centre = mean.to(factor.dtype)
    for rows in blocks(z):
        out[rows].copy_((z[rows].to(factor.dtype) - centre).mul_(factor).add_(shift))


@dataclass(frozen=True, slots=True)
class BatchNormGrad(PlainKind):
    """The gradient of z (V, D), and those of gain and bias. Operands g, z and what BatchNorm kept.

    dz = gain * scale * (g - (db + y dgain) / N): g of a copy is a part of its vertex's, the second term counts once.
    """

    in_place = (0,)
    gain: str
    bias: str
    site: int
    cols: int

    @property
    def label(self) -> str:
        return f"batch-norm-grad {self.site}"

    @property
    def gradient_of(self) -> str:
        return self.gain

    @property
    def sums_over_ranks(self) -> tuple[int, ...]:
        return (16 * self.cols,)

    def scratch(self, value: Value, sizes: Sizes) -> Mapping[str, Scratch]:
        return {"totals": Scratch(2 * value.cols, 1, "fp64")}

    def run(self, rt: Runtime, op: Op) -> None:
        g, z, out = op.tensor(rt, 0), op.tensor(rt, 1), rt.buffer(op.out)
        mean, scale, sums = (op.tensor(rt, index)[0] for index in (2, 3, 4))
        once, totals = op.tensor(rt, 5), rt.buffer(op.scratch["totals"])[0]
        of_bias, of_gain = totals[: self.cols], totals[self.cols :]
        totals.zero_()
        for rows in blocks(z):
            back = g[rows].double()
            of_bias.add_(back.sum(0))
            of_gain.add_((back * (z[rows].double() - mean)).sum(0))
        of_gain.mul_(scale)
        rt.gradient(self.bias).copy_(of_bias)  # summed over ranks with all gradients
        rt.gradient(self.gain).copy_(of_gain)
        rt.sum_over_ranks(totals)
        totals.div_(sums[-1])
        real = rt.parameter(self.gain).dtype
        factor = rt.parameter(self.gain) * scale.to(real)
        centre, shift, slope = mean.to(real), of_bias.to(real), (of_gain * scale).to(real)
        for rows in blocks(z):
            constant = (z[rows].to(real) - centre).mul_(slope).add_(shift).mul_(once[rows].to(real))
            out[rows].copy_((g[rows].to(real) - constant).mul_(factor))


@dataclass(frozen=True, slots=True)
class RunningNorm(PlainKind):
    """out = gain * (z - mean) / sqrt(variance + eps) + bias with the running statistics, in evaluations."""

    has_parameters = True
    gain: str
    bias: str
    mean: str
    variance: str
    site: int

    @property
    def label(self) -> str:
        return f"batch-norm {self.site}"

    def run(self, rt: Runtime, op: Op) -> None:
        scale = (rt.parameter(self.variance).double() + EPS).rsqrt()
        mean = rt.parameter(self.mean)
        normalise(rt, op.tensor(rt, 0), mean, scale, self.gain, self.bias, rt.buffer(op.out))
