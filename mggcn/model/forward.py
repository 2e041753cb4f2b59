"""The ops of the forward pass: each names the buffers it reads and writes, and runs on a Runtime.

Shapes and buffer names as in ops.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from mggcn.aggregate.base import aggregate_name
from mggcn.backend.base import Dropout, Epilogue
from mggcn.model.ops import EpilogueSpec, Runtime, dropped_block, finished_product, product_of_rows, require


@dataclass(frozen=True, slots=True)
class Linear:
    """dst (V, E) = finish(src (V, D) @ W); src "" is the constant dense input. By blocks of rows if finish has work.

    rounded: room for a block of the result where dst has another type than src, or "".
    """

    layer: int
    src: str
    dst: str
    finish: EpilogueSpec
    block_rows: int
    rounded: str = ""

    @property
    def label(self) -> str:
        return f"linear {self.layer}"

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.src,) if self.src else ()

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.dst, self.rounded) if self.rounded else (self.dst,)

    def run(self, rt: Runtime) -> None:
        src = rt.buffer(self.src) if self.src else require(rt.inputs.dense)
        epilogue = self.finish.epilogue(rt)
        dst, weight = rt.buffer(self.dst), rt.weight(self.layer)
        finished_product(rt, src, weight, dst, epilogue, self.block_rows, self.rounded)


@dataclass(frozen=True, slots=True)
class DroppedLinear:
    """dst (V, E) = finish((S_c drop(X)) @ W) with X the constant dense input, by blocks of rows; rounded: as of Linear."""

    layer: int
    block: str
    dst: str
    finish: EpilogueSpec
    dropped: EpilogueSpec
    block_rows: int
    rounded: str = ""

    @property
    def label(self) -> str:
        return f"linear {self.layer}"

    @property
    def reads(self) -> tuple[str, ...]:
        return ()

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.block, self.dst, *([self.rounded] if self.rounded else []))

    def run(self, rt: Runtime) -> None:
        dst, epilogue = rt.buffer(self.dst), self.finish.epilogue(rt)
        for first in range(0, dst.shape[0], self.block_rows):
            out = dst[first : first + self.block_rows]
            block = dropped_block(rt, self.block, self.dropped, first, out.shape[0])
            product_of_rows(rt, block, rt.weight(self.layer), out, epilogue, first, self.rounded)


@dataclass(frozen=True, slots=True)
class DroppedInput:
    """dst (V, D) = S_c drop(X): the whole input at once, for an aggregation."""

    layer: int
    dst: str
    dropped: EpilogueSpec

    @property
    def label(self) -> str:
        return f"input {self.layer}"

    @property
    def reads(self) -> tuple[str, ...]:
        return ()

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.dst,)

    def run(self, rt: Runtime) -> None:
        dropped_block(rt, self.dst, self.dropped, 0, rt.buffer(self.dst).shape[0])


@dataclass(frozen=True, slots=True)
class Rounded:
    """dst = src, rounded to the type of dst, for an aggregation. what: "input" or "gradient" of the layer."""

    layer: int
    src: str
    dst: str
    what: str

    @property
    def label(self) -> str:
        return f"rounded {self.what} {self.layer}"

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.src,)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.dst,)

    def run(self, rt: Runtime) -> None:
        rt.backend.finish(rt.buffer(self.src), rt.buffer(self.dst), Epilogue())


@dataclass(frozen=True, slots=True)
class DroppedValues:
    """The values of the sparse input under this epoch's mask, in both orders."""

    layer: int
    probability: float

    @property
    def label(self) -> str:
        return f"input {self.layer}"

    @property
    def reads(self) -> tuple[str, ...]:
        return ()

    @property
    def writes(self) -> tuple[str, ...]:
        return ()

    def run(self, rt: Runtime) -> None:
        inputs = rt.inputs
        values, values_t = require(require(inputs.dropped).values), require(require(inputs.dropped_t).values)
        dropout = Dropout(self.probability, rt.clock, self.layer - 1)
        rt.backend.dropout_values(require(inputs.sparse), values, inputs.row_ids, dropout)
        rt.backend.gather_rows(values.view(-1, 1), require(inputs.position), values_t.view(-1, 1))


@dataclass(frozen=True, slots=True)
class SparseLinear:
    """dst (V, E) = finish(M @ W) with M the constant sparse input (V, D)."""

    layer: int
    dst: str
    finish: EpilogueSpec
    dropped: bool

    @property
    def label(self) -> str:
        return f"sparse-linear {self.layer}"

    @property
    def reads(self) -> tuple[str, ...]:
        return ()

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.dst,)

    def run(self, rt: Runtime) -> None:
        matrix = require(rt.inputs.dropped if self.dropped else rt.inputs.sparse)
        epilogue = self.finish.epilogue(rt)
        rt.backend.spmm(matrix, rt.weight(self.layer), rt.buffer(self.dst), accumulate=False, epilogue=epilogue)


@dataclass(frozen=True, slots=True)
class Aggregate:
    """dst (V, E) = finish(A^T src); backward = True: finish(A src). `slots` are the strategy's own buffers."""

    layer: int
    src: str
    dst: str
    slots: tuple[str, ...]
    finish: EpilogueSpec
    backward: bool = False

    @property
    def name(self) -> str:
        """Name of the aggregation, with which the names of its buffers start."""
        return aggregate_name(self.layer, self.backward)

    @property
    def label(self) -> str:
        return f"aggregate-grad {self.layer}" if self.backward else f"aggregate {self.layer}"

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.src,)

    @property
    def writes(self) -> tuple[str, ...]:
        # A strategy may use the gradient up.
        return (self.dst, *([self.src] if self.backward else []), *self.slots)

    def run(self, rt: Runtime) -> None:
        move = rt.aggregation.backward if self.backward else rt.aggregation.forward
        slots = [rt.buffer(name) for name in self.slots]
        move(rt.buffer(self.src), rt.buffer(self.dst), slots, self.layer, self.finish.epilogue(rt))


@dataclass(frozen=True, slots=True)
class Panel:
    """Columns [first, first + width) of the dense input X become those of A_hat X, in place, through the buffer `panel`."""

    panel: str
    slots: tuple[str, ...]
    first: int
    width: int

    @property
    def label(self) -> str:
        return f"panel {self.first}"

    @property
    def reads(self) -> tuple[str, ...]:
        return ()

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.panel, *self.slots)

    def run(self, rt: Runtime) -> None:
        columns = require(rt.inputs.dense)[:, self.first : self.first + self.width]
        panel = rt.buffer(self.panel)[:, : self.width]
        slots = [rt.buffer(name) for name in self.slots]
        rt.backend.finish(columns, panel, Epilogue(out_scale=rt.inputs.col_scale))
        rt.aggregation.forward(panel, columns, slots, 1, Epilogue(row_scale=rt.inputs.row_scale))


@dataclass(frozen=True, slots=True)
class Score:
    """Adds the confusion counts of the three splits to rt.counts; the logits z stay readable after the program."""

    z: str

    @property
    def label(self) -> str:
        return "score"

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.z,)

    @property
    def writes(self) -> tuple[str, ...]:
        return ()

    def run(self, rt: Runtime) -> None:
        rt.backend.confusion(rt.buffer(self.z), rt.inputs.labels, rt.inputs.mask, rt.counts)
