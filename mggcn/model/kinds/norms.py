"""Layer norm and batch norm, with their gradients, by blocks of rows that stay in the cache, in float64.

V rows of this rank, D columns, N vertices of the graph, B rows of a block. Nothing is allocated but vectors of D numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from mggcn.model.kinds.aggregate import Part
from mggcn.model.runtime import Runtime, Sizes
from mggcn.model.values import Adjoint, Op, PlainKind, Scratch, Value

if TYPE_CHECKING:
    from torch import Tensor

EPS: Final = 1e-5
"""Added to variances, as torch does."""
MOMENTUM: Final = 0.1
"""Share of an epoch's statistics in the running ones, as torch's default."""


class Passes(NamedTuple):
    """What an op moves and calls, for predictions: rows of stored matrices that it reads or writes; float64 rows of blocks
    that it reads or writes; calls for each block.
    """

    stored: int
    blocks: int
    calls: int


def room(value: Value, sizes: Sizes, blocks: int, columns: int = 0, vectors: int = 0) -> dict[str, Scratch]:
    """Return memory in float64: blocks (B, D), columns of a block, and vectors (D,)."""
    cols, rows = value.operands[0].cols, sizes.block_rows(value.operands[0].cols)
    wanted = {f"block {k}": Scratch(cols, rows, "fp64") for k in range(blocks)}
    wanted |= {f"column {k}": Scratch(rows, 1, "fp64") for k in range(columns)}
    return wanted | {f"vector {k}": Scratch(cols, 1, "fp64") for k in range(vectors)}


@dataclass(frozen=True, slots=True)
class Work:
    """The memory of `room` while an op runs."""

    rt: Runtime
    op: Op

    def vector(self, number: int) -> Tensor:
        """Return a vector (D,)."""
        return self.rt.buffer(self.op.scratch[f"vector {number}"])[0]

    def column(self, number: int, rows: int) -> Tensor:
        """Return a column (rows, 1)."""
        return self.rt.buffer(self.op.scratch[f"column {number}"])[0, :rows, None]

    def blocks(self, *whole: Tensor) -> Iterator[tuple[slice, list[Tensor]]]:
        """Yield a range of rows and all blocks; the first blocks hold these rows of `whole`."""
        names = [name for name in self.op.scratch if name.startswith("block ")]
        rooms = [self.rt.buffer(self.op.scratch[name]) for name in names]
        count, step = whole[0].shape[0], max(1, rooms[0].shape[0])
        for first in range(0, count, step):
            rows = slice(first, min(count, first + step))
            some = [block[: rows.stop - first] for block in rooms]
            for block, matrix in zip(some, whole, strict=False):
                block.copy_(matrix[rows])
            yield rows, some


def add_sums(block: Tensor, into: Tensor, sums: Tensor) -> None:
    """Sums (D,) += the sums of a block's columns, which pass through `into` (D,)."""
    import torch

    sums.add_(torch.sum(block, 0, out=into))


@dataclass(frozen=True, slots=True)
class LayerNorm(PlainKind):
    """out = gain * (z - mean) / sqrt(variance + eps) + bias, row by row (Ba et al. 2016, eq. 4)."""

    has_parameters = True
    passes = Passes(2, 14, 9)
    gain: str
    bias: str
    site: int

    @property
    def label(self) -> str:
        return f"layer-norm {self.site}"

    def scratch(self, value: Value, sizes: Sizes) -> Mapping[str, Scratch]:
        return room(value, sizes, blocks=2, columns=1)

    def adjoint(self, value: Value, gradient: Value) -> Adjoint:
        (z,) = value.operands
        back = Value(LayerNormGrad(self.gain, self.bias, self.site), (gradient, z), z.cols)
        return Adjoint((back,), (back,))

    def run(self, rt: Runtime, op: Op) -> None:
        z, out, work = op.tensor(rt, 0), rt.buffer(op.out), Work(rt, op)
        gain, bias = rt.parameter(self.gain).double(), rt.parameter(self.bias).double()
        for rows, (y, free) in work.blocks(z):
            standardise(y, free, work.column(0, y.shape[0]))
            out[rows].copy_(y.mul_(gain).add_(bias))


def standardise(y: Tensor, free: Tensor, scale: Tensor) -> None:
    """Turn rows z into (z - mean) / sqrt(variance + eps), the factor into `scale` (B, 1)."""
    import torch

    y.sub_(torch.mean(y, 1, keepdim=True, out=scale))
    torch.mean(torch.mul(y, y, out=free), 1, keepdim=True, out=scale)
    y.mul_(scale.add_(EPS).rsqrt_())


@dataclass(frozen=True, slots=True)
class LayerNormGrad(PlainKind):
    """The gradient of z (V, D), and those of gain and bias. Operands g and z.

    dz = scale * (h - mean(h) - y mean(h y)), h = gain * g, means over a row, y the standardised row.
    """

    in_place = (0,)
    passes = Passes(3, 32, 19)
    gain: str
    bias: str
    site: int

    @property
    def label(self) -> str:
        return f"layer-norm-grad {self.site}"

    @property
    def gradient_of(self) -> str:
        return self.gain

    def scratch(self, value: Value, sizes: Sizes) -> Mapping[str, Scratch]:
        return room(value, sizes, blocks=3, columns=2, vectors=3)

    def run(self, rt: Runtime, op: Op) -> None:
        import torch

        g, z, out, work = op.tensor(rt, 0), op.tensor(rt, 1), rt.buffer(op.out), Work(rt, op)
        gain = rt.parameter(self.gain).double()
        of_gain, of_bias, sums = (work.vector(number) for number in range(3))
        of_gain.zero_()
        of_bias.zero_()
        for rows, (h, y, free) in work.blocks(g, z):
            scale, mean = (work.column(number, h.shape[0]) for number in range(2))
            standardise(y, free, scale)
            add_sums(h, sums, of_bias)
            add_sums(torch.mul(h, y, out=free), sums, of_gain)
            torch.mul(h.mul_(gain), y, out=free)
            y.mul_(torch.mean(free, 1, keepdim=True, out=mean))
            torch.mean(h, 1, keepdim=True, out=mean)
            out[rows].copy_(h.sub_(mean).sub_(y).mul_(scale))
        rt.gradient(self.gain).copy_(of_gain)
        rt.gradient(self.bias).copy_(of_bias)


@dataclass(frozen=True, slots=True)
class BatchNorm(PlainKind):
    """out = gain * (z - mean) / sqrt(variance + eps) + bias, column by column (Ioffe & Szegedy 2015, algorithm 1).

    The statistics cover all N vertices, each counted once, and are summed over ranks: first the mean, then the squared
    deviations, so that nothing cancels. The running statistics, which evaluation reads, move towards them by MOMENTUM.
    """

    has_parameters = True
    passes = Passes(4, 20, 13)
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
        kept = vectors | {"sums": Scratch(value.cols + 1, 1, "fp64"), "once": Scratch(sizes.rows, 1, "fp64")}
        return kept | room(value, sizes, blocks=1, vectors=1)

    def adjoint(self, value: Value, gradient: Value) -> Adjoint:
        (z,) = value.operands
        parts = (Value(Part(name), (value,), value.cols) for name in ("mean", "scale", "sums", "once"))
        back = Value(BatchNormGrad(self.gain, self.bias, self.site, self.cols), (gradient, z, *parts), z.cols)
        return Adjoint((back,), (back,))

    def run(self, rt: Runtime, op: Op) -> None:
        import torch

        z, out, work = op.tensor(rt, 0), rt.buffer(op.out), Work(rt, op)
        sums, mean, scale = (rt.buffer(op.scratch[name])[0] for name in ("sums", "mean", "scale"))
        once = counted_once(rt, rt.buffer(op.scratch["once"])[0])
        sums.zero_()
        for rows, (block,) in work.blocks(z):
            add_sums(block.mul_(once[rows]), work.vector(0), sums[:-1])
        sums[-1:].add_(once.sum())
        rt.sum_over_ranks(sums)
        torch.div(sums[:-1], sums[-1], out=mean)
        scale.zero_()
        for rows, (block,) in work.blocks(z):
            block.sub_(mean)
            add_sums(block.mul_(block).mul_(once[rows]), work.vector(0), scale)
        rt.sum_over_ranks(scale)
        # torch keeps the unbiased variance.
        unbiased = scale / (sums[-1] - 1).clamp(min=1)
        scale.div_(sums[-1])
        for name, now in ((self.mean, mean), (self.variance, unbiased)):
            rt.parameter(name).lerp_(now.to(rt.parameter(name).dtype), MOMENTUM)
        scale.add_(EPS).rsqrt_()
        normalise(rt, work, z, out, mean, scale, self.gain, self.bias)


def counted_once(rt: Runtime, once: Tensor) -> Tensor:
    """Return the column (V, 1) of 1 for rows that this rank owns, 0 for copies of another rank's; once: its memory."""
    if rt.inputs.owned is None:
        return once.fill_(1)[:, None]
    return once.zero_().index_fill_(0, rt.inputs.owned, 1)[:, None]


def normalise(
    rt: Runtime, work: Work, z: Tensor, out: Tensor, mean: Tensor, scale: Tensor, gain: str, bias: str
) -> None:
    """Out (V, D) = gain * scale * (z - mean) + bias."""
    factor, shift = rt.parameter(gain) * scale, rt.parameter(bias).double()
    for rows, (block, *_) in work.blocks(z):
        out[rows].copy_(block.sub_(mean).mul_(factor).add_(shift))


@dataclass(frozen=True, slots=True)
class BatchNormGrad(PlainKind):
    """The gradient of z (V, D), and those of gain and bias. Operands g, z and what BatchNorm kept.

    dz = gain * scale * (g - (db + y dgain) / N): g of a copy is a part of its vertex's, the second term counts once.
    """

    in_place = (0,)
    passes = Passes(5, 25, 15)
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
        return {"totals": Scratch(2 * value.cols, 1, "fp64")} | room(value, sizes, blocks=2, vectors=1)

    def run(self, rt: Runtime, op: Op) -> None:
        g, z, out, work = op.tensor(rt, 0), op.tensor(rt, 1), rt.buffer(op.out), Work(rt, op)
        mean, scale, sums, once = (op.tensor(rt, index)[0] for index in (2, 3, 4, 5))
        totals, column = rt.buffer(op.scratch["totals"])[0], work.vector(0)
        of_bias, of_gain = totals[: self.cols], totals[self.cols :]
        totals.zero_()
        for _, (back, y) in work.blocks(g, z):
            add_sums(back, column, of_bias)
            add_sums(back.mul_(y.sub_(mean)), column, of_gain)
        of_gain.mul_(scale)
        rt.gradient(self.bias).copy_(of_bias)  # summed over ranks with all gradients
        rt.gradient(self.gain).copy_(of_gain)
        rt.sum_over_ranks(totals)
        totals.div_(sums[-1])
        factor = rt.parameter(self.gain) * scale
        slope = of_gain.mul_(scale)
        for rows, (back, y) in work.blocks(g, z):
            y.sub_(mean).mul_(slope).add_(of_bias).mul_(once[rows, None])
            out[rows].copy_(back.sub_(y).mul_(factor))


@dataclass(frozen=True, slots=True)
class RunningNorm(PlainKind):
    """out = gain * (z - mean) / sqrt(variance + eps) + bias with the running statistics, in evaluations."""

    has_parameters = True
    in_place = (0,)
    passes = Passes(2, 8, 5)
    gain: str
    bias: str
    mean: str
    variance: str
    site: int

    @property
    def label(self) -> str:
        return f"batch-norm {self.site}"

    def scratch(self, value: Value, sizes: Sizes) -> Mapping[str, Scratch]:
        return room(value, sizes, blocks=1)

    def run(self, rt: Runtime, op: Op) -> None:
        scale = (rt.parameter(self.variance).double() + EPS).rsqrt()
        mean = rt.parameter(self.mean).double()
        normalise(rt, Work(rt, op), op.tensor(rt, 0), rt.buffer(op.out), mean, scale, self.gain, self.bias)
