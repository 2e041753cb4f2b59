"""Elementwise steps on rows: scales, bias, ReLU, dropout, and how a gradient passes back through them.

One kind stands for any of these or several in a fixed order, since kernels apply them to a row in one pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from mggcn.backend.base import Dropout, Epilogue, Gradient, keep_scale
from mggcn.blocks.block import RowSet
from mggcn.model.runtime import Runtime, Sizes
from mggcn.model.values import Adjoint, Op, PlainKind, Scratch, Value

if TYPE_CHECKING:
    from torch import Tensor

Scale = Literal["", "row", "col"]
"""A diagonal matrix: none, S_r or S_c."""
PARTS = ("row_scale", "bias", "relu", "dropout", "out_scale")
"""What an epilogue does, in order."""


def scale_of(rt: Runtime, scale: Scale, rows: RowSet) -> Tensor | None:
    """Return the diagonal of a scale matrix as a vector; None for the identity."""
    inputs = rt.inputs.rows[rows]
    return {"": None, "row": inputs.row_scale, "col": inputs.col_scale}[scale]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpilogueSpec:
    """The elementwise steps that may follow a product, by name: out_scale * drop(relu(row_scale * z + bias)).

    bias: a parameter, "" for none. dropout: probability; site: which mask of the epoch, 0 for the input.
    """

    row_scale: Scale = ""
    bias: str = ""
    relu: bool = False
    dropout: float = 0.0
    site: int = 0
    out_scale: Scale = ""

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of its steps, in order."""
        return tuple(part for part in PARTS if getattr(self, part))

    def then(self, after: EpilogueSpec) -> EpilogueSpec | None:
        """Return one spec for this and then `after`; None if a step of `after` cannot follow one of this."""
        if not self.parts or not after.parts:
            return after if not self.parts else self
        last, first = PARTS.index(self.parts[-1]), PARTS.index(after.parts[0])
        if last >= first:
            return None
        both: dict[str, Any] = {part: getattr(self, part) or getattr(after, part) for part in PARTS}
        return EpilogueSpec(site=self.site if self.dropout else after.site, **both)

    def epilogue(self, rt: Runtime, rows: RowSet) -> Epilogue | None:
        """Return the epilogue with the vectors of a row set; None if it does nothing."""
        if not self.parts:
            return None
        return Epilogue(
            scale_of(rt, self.row_scale, rows),
            rt.parameter(self.bias) if self.bias else None,
            self.relu,
            Dropout(self.dropout, rt.clock, self.site, rt.first_column) if self.dropout else None,
            rt.inputs.rows[rows].ids,
            scale_of(rt, self.out_scale, rows),
        )


NOTHING = EpilogueSpec()


@dataclass(frozen=True, slots=True)
class Elementwise(PlainKind):
    """out = spec(z) for all rows; layer: the dense layer that it follows, 0 for the input."""

    in_place: ClassVar[tuple[int, ...]] = (0,)
    by_rows: ClassVar[bool] = True

    spec: EpilogueSpec
    layer: int

    @property
    def has_parameters(self) -> bool:
        return bool(self.spec.bias)

    @property
    def label(self) -> str:
        return f"elementwise {self.layer}" if self.layer else "input 1"

    def adjoint(self, value: Value, gradient: Value) -> Adjoint:
        """The derivative of ReLU and dropout is read from the zeros that the forward pass stored, if there is a ReLU."""
        spec, g = self.spec, gradient
        if spec.relu:
            kind = ActivationGrad(spec.dropout, spec.out_scale, self.layer)
            g = Value(kind, (gradient, value), value.cols)
        else:
            diagonal = EpilogueSpec(dropout=spec.dropout, site=spec.site, out_scale=spec.out_scale)
            g = elementwise(gradient, diagonal, self.layer)
        effects = (Value(BiasGrad(spec.bias, self.layer), (g,), value.cols),) if spec.bias else ()
        return Adjoint((elementwise(g, EpilogueSpec(row_scale=spec.row_scale), self.layer),), effects)

    def run(self, rt: Runtime, op: Op) -> None:
        rt.backend.finish(op.tensor(rt, 0), rt.buffer(op.out), self.spec.epilogue(rt, op.rows) or Epilogue())


def elementwise(value: Value, spec: EpilogueSpec, layer: int = 0) -> Value:
    """Return spec(value), the value itself if it does nothing."""
    return Value(Elementwise(spec, layer), (value,), value.cols) if spec.parts else value


def partial_sums(value: Value, sizes: Sizes, sums: str) -> dict[str, Scratch]:
    """Return the scratch memory for partial sums of columns; none without a sum."""
    return {"partials": Scratch(value.cols, sizes.device.partials, "fp64", sums=True)} if sums else {}


def partials_of(rt: Runtime, op: Op) -> Tensor | None:
    """Return the scratch tensor for the partial sums of a bias gradient; None without one."""
    if "partials" not in op.scratch:
        return None
    padded = rt.buffer(op.scratch["partials"])
    # The kernels take adjacent rows without padding.
    return padded.as_strided(padded.shape, (padded.shape[1], 1))


@dataclass(frozen=True, slots=True)
class ActivationGrad(PlainKind):
    """The gradient before an activation, from g after it and its stored output h (both (V, D)).

    out = row_scale * dz, dz = (h != 0) * keep * h_scale * g; sums: the bias whose gradient is the sum of dz's columns.
    """

    title: ClassVar[str] = "activation-grad {self.layer}"
    in_place: ClassVar[tuple[int, ...]] = (1,)
    by_rows: ClassVar[bool] = True
    dropout: float
    h_scale: Scale
    layer: int
    row_scale: Scale = ""
    sums: str = ""

    def scratch(self, value: Value, sizes: Sizes) -> Mapping[str, Scratch]:
        return partial_sums(value, sizes, self.sums)

    def gradient(self, rt: Runtime, op: Op) -> Gradient:
        """Return the kernel's arguments other than g and h."""
        scales = scale_of(rt, self.h_scale, op.rows), scale_of(rt, self.row_scale, op.rows)
        return Gradient(True, keep_scale(self.dropout), *scales, partials_of(rt, op))

    def run(self, rt: Runtime, op: Op) -> None:
        h, out = result_beside(op.tensor(rt, 1), rt.buffer(op.out))
        gradient = self.gradient(rt, op)
        rt.backend.activation_grad(op.tensor(rt, 0), h, gradient, out=out)
        sum_partials(rt, gradient.partials, self.sums)


def result_beside(h: Tensor, out: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the arguments of a kernel that works in place: h, and a separate result if it has another type.

    The result overwrites h, unless something reads h later: then a copy of it.
    """
    if out.dtype != h.dtype:
        return h, out
    if out.data_ptr() != h.data_ptr():
        out.copy_(h)
    return out, None


def sum_partials(rt: Runtime, partials: Tensor | None, name: str) -> None:
    """Add up the partial sums of a bias gradient, if there are any."""
    if partials is not None:
        rt.backend.sum_partials(partials, rt.gradient(name))


@dataclass(frozen=True, slots=True)
class BiasGrad(PlainKind):
    """db (D,) = the column sums of g, for a gradient that no kernel sums while computing it."""

    title: ClassVar[str] = "bias-grad {self.layer}"
    stored = False
    by_rows: ClassVar[bool] = True
    bias: str
    layer: int

    @property
    def gradient_of(self) -> str:
        return self.bias

    def scratch(self, value: Value, sizes: Sizes) -> Mapping[str, Scratch]:
        return partial_sums(value, sizes, self.bias)

    def run(self, rt: Runtime, op: Op) -> None:
        g, partials = op.tensor(rt, 0), partials_of(rt, op)
        # Writes g over itself, and sums its columns on the way.
        rt.backend.activation_grad(g, g, Gradient(False, 1.0, None, None, partials))
        sum_partials(rt, partials, self.bias)


@dataclass(frozen=True, slots=True)
class Add(PlainKind):
    """out = a + b."""

    in_place: ClassVar[tuple[int, ...]] = (0, 1)
    by_rows: ClassVar[bool] = True
    layer: int = 0

    @property
    def label(self) -> str:
        return f"add {self.layer}" if self.layer else "add"

    def adjoint(self, value: Value, gradient: Value) -> Adjoint:
        return Adjoint((gradient, gradient))

    def run(self, rt: Runtime, op: Op) -> None:
        import torch

        torch.add(op.tensor(rt, 0), op.tensor(rt, 1), out=rt.buffer(op.out))


@dataclass(frozen=True, slots=True)
class Rounded(PlainKind):
    """out = z, rounded to the type of what is multiplied with the graph."""

    title: ClassVar[str] = "rounded {self.what} {self.layer}"
    by_rows: ClassVar[bool] = True
    what: str
    layer: int

    def run(self, rt: Runtime, op: Op) -> None:
        rt.backend.finish(op.tensor(rt, 0), rt.buffer(op.out), Epilogue())
