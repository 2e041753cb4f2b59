"""The ops of the backward pass: gradients overwrite the activations they belong to.

Shapes and buffer names as in ops.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from mggcn.model.ops import (
    ActivationBackward,
    EpilogueSpec,
    Runtime,
    dropped_block,
    finished_product,
    partials_of,
    require,
)


@dataclass(frozen=True, slots=True)
class Loss:
    """z (V, C) becomes the gradient of the masked cross-entropy, times S_r if `scaled`; sums loss and bias gradient."""

    layer: int
    z: str
    partials: str
    scaled: bool

    @property
    def label(self) -> str:
        return "loss"

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.z,)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.z, self.partials) if self.partials else (self.z,)

    def run(self, rt: Runtime) -> None:
        partials = partials_of(rt, self.partials)
        inputs = rt.inputs
        scale = inputs.row_scale if self.scaled else None
        rt.backend.softmax_xent(
            rt.buffer(self.z), inputs.labels, inputs.mask, inputs.inv_count, scale, rt.loss, partials
        )
        if partials is not None:
            rt.backend.sum_partials(partials, rt.bias_grad(self.layer))


@dataclass(frozen=True, slots=True)
class WeightGrad:
    """dW (D, E) = h^T g; h "" is the constant dense input."""

    layer: int
    h: str
    g: str

    @property
    def label(self) -> str:
        return f"weight-grad {self.layer}"

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.h, self.g) if self.h else (self.g,)

    @property
    def writes(self) -> tuple[str, ...]:
        return ()

    def run(self, rt: Runtime) -> None:
        h = rt.buffer(self.h) if self.h else require(rt.inputs.dense)
        rt.backend.matmul(h.t(), rt.buffer(self.g), rt.weight_grad(self.layer))


@dataclass(frozen=True, slots=True)
class DroppedWeightGrad:
    """dW = (S_c drop(X))^T g, the masks computed again by blocks of rows, in order."""

    layer: int
    block: str
    g: str
    dropped: EpilogueSpec
    block_rows: int

    @property
    def label(self) -> str:
        return f"weight-grad {self.layer}"

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.g,)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.block,)

    def run(self, rt: Runtime) -> None:
        g, grad = rt.buffer(self.g), rt.weight_grad(self.layer)
        grad.zero_()
        for first in range(0, g.shape[0], self.block_rows):
            rows = g[first : first + self.block_rows]
            block = dropped_block(rt, self.block, self.dropped, first, rows.shape[0])
            rt.backend.matmul(block.t(), rows, grad, accumulate=True)


@dataclass(frozen=True, slots=True)
class SparseWeightGrad:
    """dW (D, E) = M^T g with M the constant sparse input."""

    layer: int
    g: str
    dropped: bool

    @property
    def label(self) -> str:
        return f"sparse-weight-grad {self.layer}"

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.g,)

    @property
    def writes(self) -> tuple[str, ...]:
        return ()

    def run(self, rt: Runtime) -> None:
        matrix = require(rt.inputs.dropped_t if self.dropped else rt.inputs.sparse_t)
        rt.backend.spmm(matrix, rt.buffer(self.g), rt.weight_grad(self.layer), accumulate=False, epilogue=None)


@dataclass(frozen=True, slots=True)
class InputGrad:
    """h (V, D) becomes the gradient before its activation, from g (V, E) @ W^T, by blocks of rows: no (V, D) buffer.

    rounded: the buffer, of another type, that takes the gradient instead of h, or "".
    """

    layer: int
    g: str
    h: str
    block: str
    partials: str
    activated: ActivationBackward
    rounded: str = ""

    @property
    def label(self) -> str:
        return f"input-grad {self.layer}"

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.g, self.h)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.rounded or self.h, self.block, *([self.partials] if self.partials else []))

    def run(self, rt: Runtime) -> None:
        g, h, block = rt.buffer(self.g), rt.buffer(self.h), rt.buffer(self.block)
        partials = partials_of(rt, self.partials)
        out = rt.buffer(self.rounded) if self.rounded else None
        self.activated.run_product(rt, g, rt.weight(self.layer).t(), h, block, partials, out)
        if partials is not None:
            rt.backend.sum_partials(partials, rt.bias_grad(self.layer - 1))


@dataclass(frozen=True, slots=True)
class ProductGrad:
    """dst (V, D) = finish(g (V, E) @ W^T): the gradient of an aggregate, before it goes back through the graph.

    rounded: room for a block of the result where dst has another type than g, or "".
    """

    layer: int
    g: str
    dst: str
    finish: EpilogueSpec
    block_rows: int
    rounded: str = ""

    @property
    def label(self) -> str:
        return f"product-grad {self.layer}"

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.g,)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.dst, self.rounded) if self.rounded else (self.dst,)

    def run(self, rt: Runtime) -> None:
        g, dst, epilogue = rt.buffer(self.g), rt.buffer(self.dst), self.finish.epilogue(rt)
        finished_product(rt, g, rt.weight(self.layer).t(), dst, epilogue, self.block_rows, self.rounded)


@dataclass(frozen=True, slots=True)
class ActivationGrad:
    """h (V, D) becomes the gradient before its activation, from the gradient g (V, D) after it.

    rounded: as of InputGrad.
    """

    layer: int
    g: str
    h: str
    partials: str
    activated: ActivationBackward
    rounded: str = ""

    @property
    def label(self) -> str:
        return f"activation-grad {self.layer - 1}"

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.g, self.h)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.rounded or self.h, *([self.partials] if self.partials else []))

    def run(self, rt: Runtime) -> None:
        partials = partials_of(rt, self.partials)
        out = rt.buffer(self.rounded) if self.rounded else None
        self.activated.run(rt, rt.buffer(self.g), rt.buffer(self.h), partials, out)
        if partials is not None:
            rt.backend.sum_partials(partials, rt.bias_grad(self.layer - 1))
