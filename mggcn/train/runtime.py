"""The runtime of a rank's ops: views into the arena, weights and their gradients in flat buffers, and the inputs.

L layers, D input width, E output width, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

import torch
from torch import Tensor

from mggcn.aggregate.base import Aggregation
from mggcn.backend.base import KernelBackend
from mggcn.backend.events import Annotate
from mggcn.blocks.block import Block, RowSet
from mggcn.blocks.padded import Place
from mggcn.comm.base import Communicator
from mggcn.errors import ConfigError
from mggcn.memory.arena import ALIGNMENT, ArenaPlan, BufferSpec, Placement, operand_nbytes, operand_stride
from mggcn.model.program import Program
from mggcn.model.runtime import Inputs, Parameter, Runtime, check_state
from mggcn.model.values import Op
from mggcn.train.hosted import PinnedRows
from mggcn.train.learned import NAME, LearnedRows

TYPES = {
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
    "float32": torch.float32,
    "float64": torch.float64,
}
"""Types of what the host packs, by NumPy's names."""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64, "int64": torch.int64}


def buffer_view(arena: Tensor, placement: Placement) -> Tensor:
    """Return a planned buffer as a (rows, cols) view into the arena."""
    spec = placement.spec
    flat = arena[placement.offset : placement.end].view(DTYPES[spec.dtype])
    return flat.as_strided((spec.rows, spec.cols), (spec.ld, 1))


def arrays_of(flat: Tensor, places: Mapping[str, Place]) -> dict[str, Tensor]:
    """Return the arrays that lie in an array of bytes."""
    return {name: flat[place.offset : place.end].view(TYPES[place.dtype]) for name, place in places.items()}


class Weights:
    """The weights of all layers as views into one flat tensor, so that one message sums all gradients.

    flat, grad: (number of weights,) with every matrix and vector aligned to 64 bytes, in `dtype`. Where the backend
    stores activations in another type, products read copies of the matrices in that type, their rows padded to 16 bytes
    (operand_stride), which `refresh` and the end of an epoch make; stored: all of them, else None.
    """

    def __init__(self, parameters: Mapping[str, Parameter], dtype: torch.dtype, backend: KernelBackend) -> None:
        self._parameters = dict(parameters)
        parameters = dict(sorted(parameters.items(), key=lambda item: not item[1].trained))
        step = ALIGNMENT // dtype.itemsize
        sizes = {name: -(-math.prod(p.shape) // step) * step for name, p in parameters.items()}
        total = sum(sizes.values())
        self.flat: Tensor = backend.allocate(total * dtype.itemsize).view(dtype)
        trained = sum(size for name, size in sizes.items() if parameters[name].trained)
        self.trained: Tensor = self.flat[:trained]
        """The weights that an optimiser updates: all but statistics, which come last."""
        self.grad: Tensor = backend.allocate(trained * dtype.itemsize).view(dtype)
        self.views: dict[str, Tensor] = {}
        start = 0
        for name, parameter in parameters.items():
            self.views[name] = self.flat[start : start + math.prod(parameter.shape)].view(parameter.shape)
            start += sizes[name]
        self.grads: Mapping[str, Tensor] = self.views_of(self.grad)
        self.stored: Tensor | None = None
        self.copies: dict[str, Tensor] = {}
        if backend.dtype != dtype:
            self._add_copies(backend)
        self.operands: Mapping[str, Tensor] = {
            name: view for name, view in self.views.items() if view.dim() == 2
        } | self.copies
        """The matrices in the form that products read."""

    def _add_copies(self, backend: KernelBackend) -> None:
        item = backend.dtype.itemsize
        matrices = {name: view.shape for name, view in self.views.items() if view.dim() == 2}
        sizes = [operand_nbytes(rows, cols, item) // item for rows, cols in matrices.values()]
        self.stored = backend.allocate(sum(sizes) * item).view(backend.dtype)
        for (name, shape), part in zip(matrices.items(), self.stored.split(sizes), strict=True):
            self.copies[name] = part.as_strided(shape, (operand_stride(shape[1], item), 1))

    def views_of(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the matrices and vectors of another tensor like `flat`, or like `trained` those that it has."""
        return {
            name: flat.as_strided(view.shape, view.stride(), view.storage_offset())
            for name, view in self.views.items()
            if self._parameters[name].trained or flat.shape == self.flat.shape
        }

    def initialize(self, seed: int) -> None:
        """Start every parameter as it says (Glorot & Bengio 2010, eq. 16), the same on every rank and device."""
        generator = torch.Generator().manual_seed(seed)
        self.flat.zero_()
        for name, view in self.views.items():
            parameter = self._parameters[name]
            if parameter.start == "ones":
                view.fill_(1.0)
            elif parameter.start != "zeros":
                uniform = parameter.start == "uniform"
                bound = math.sqrt(1.0 / parameter.inputs if uniform else 6.0 / (view.shape[-2] + view.shape[-1]))
                drawn = torch.rand(view.shape, generator=generator, dtype=torch.float64).mul_(2 * bound).sub_(bound)
                view.copy_(drawn)
        self.refresh()

    def refresh(self) -> None:
        """Update the copies of the weights that products read; call it after every change of the weights."""
        for name, operand in self.copies.items():
            operand.copy_(self.views[name])

    def state_dict(self, flat: Tensor | None = None) -> dict[str, Tensor]:
        """Return copies on the host: layers.<l>.weight (D, E) and layers.<l>.bias (E,), l from 1.

        flat: another tensor like `flat` to take them from.
        """
        source = self.flat if flat is None else flat
        return {name: view.cpu().clone() for name, view in self.views_of(source).items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy weights in. Raises: ConfigError if they are not tensors, or names or shapes differ from the model's."""
        check_state(state)
        expected = {name: tuple(view.shape) for name, view in self.views.items()}
        came = {name: tuple(value.shape) for name, value in state.items()}
        if expected != came:
            raise ConfigError(
                f"the model has the weights {expected}, got {came}; use the configuration they were made with"
            )
        for name, view in self.views.items():
            view.copy_(state[name])
        self.refresh()


@dataclass(frozen=True, slots=True)
class BoundProgram:
    """A program with a rank's memory: its buffers by name, and the aggregation over each of its blocks."""

    program: Program
    arena: Tensor
    aggregations: Mapping[Block, Aggregation]
    views: Mapping[str, Tensor]

    @property
    def result(self) -> Tensor:
        """The result, which stays readable after the program, where `keeps_result`."""
        return self.views[self.program.result]

    @property
    def keeps_result(self) -> bool:
        """Whether the result is in memory after the program: not where it lies on disk, and nothing needs all of it."""
        return self.program.result in self.views

    def cut(self, rows: Mapping[RowSet, int]) -> BoundProgram:
        """Return the program with its buffers cut to the rows that a step has of each set."""
        views = {
            p.spec.name: buffer_view(self.arena, p)[: rows.get(p.spec.row_set) if p.spec.row_set else None]
            for p in self.program.arena.placements
        }
        return replace(self, views=views)


def bind(program: Program, arena: Tensor, aggregations: Mapping[Block, Aggregation]) -> BoundProgram:
    """Bind a program to the arena, which all programs of a rank share."""
    views = {p.spec.name: buffer_view(arena, p) for p in program.arena.placements}
    return BoundProgram(program, arena, aggregations, views)


After = Callable[[Op, Runtime, bool], None]
"""Called behind an op with what it ran over, and whether these are its stage's last rows or columns."""


class Staged(Protocol):
    """A program that runs in stages, over a part of their rows or columns at a time (train/staged.py)."""

    def run(self, runtime: RankRuntime, after: After | None = None) -> None:
        """Run all stages."""
        ...


class DiskCounts(Protocol):
    """What has been read from disk and written to it so far, and how long was waited for it."""

    bytes_read: int
    bytes_written: int
    waited_s: float


NO_PROGRAM: Final = BoundProgram(Program("", (), ArenaPlan((), 0)), torch.empty(0), {}, {})


@dataclass(kw_only=True, slots=True)
class RankRuntime:
    """The Runtime of model/runtime.py: one rank's buffers, weights and inputs, for one program at a time.

    programs: by name: train, evaluate, if it computes anything setup, and exact if steps are compared with the whole graph.
    """

    backend: KernelBackend
    programs: Mapping[str, BoundProgram]
    inputs: Inputs
    weights: Weights
    signals: Tensor
    counts: Tensor
    clock: Tensor
    comm: Communicator
    host: PinnedRows | None = None
    """Where training keeps rows on the host; None: all are in memory of the device, or on disk."""
    learned: LearnedRows | None = None
    """Learned rows of vertices; None: inputs are constant."""
    bound: BoundProgram = NO_PROGRAM
    """The program at hand."""
    annotate: Annotate = nullcontext
    """Opens a block around each op."""
    stages: Mapping[str, Staged] = field(default_factory=dict)
    """What runs the programs whose values lie on disk, by name."""
    pages: DiskCounts | None = None
    """The file of rows on disk; None: all are in memory."""
    continues: bool = False
    first_column: int = 0

    def aggregation(self, block: Block) -> Aggregation:
        return self.bound.aggregations[block]

    def buffer(self, name: str) -> Tensor:
        return self.bound.views[name]

    def num_rows(self, rows: RowSet) -> int:
        return self.inputs.rows[rows].ids.shape[0]

    def apart(self) -> AbstractContextManager[None]:
        return nullcontext()

    def initialize(self, seed: int) -> None:
        """Start weights, and learned rows, as a seed says."""
        self.weights.initialize(seed)
        if self.learned is not None:
            self.learned.initialize(seed)

    def load_weights(self, state: Mapping[str, Tensor]) -> None:
        """Take weights, of learned rows those of this rank's vertices. Raises: ConfigError as `Weights.load_state_dict`."""
        if self.learned is not None and NAME in state:
            self.learned.load(state[NAME])
            state = {name: tensor for name, tensor in state.items() if name != NAME}
        self.weights.load_state_dict(state)

    def begin_epoch(self, step: int) -> None:
        """Tell the aggregations of training the number of the step that begins: over the whole graph, of the epoch.

        Raises: BackendError as `PinnedRows.begin`.
        """
        if self.host is not None:
            self.host.begin()
        for aggregation in self.programs["train"].aggregations.values():
            aggregation.begin_epoch(step)

    def state(self) -> dict[str, Tensor]:
        """Return what the aggregations of training keep from epoch to epoch, on the host. Collective."""
        kept = (aggregation.state() for aggregation in self.programs["train"].aggregations.values())
        return {name: tensor for one in kept for name, tensor in one.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        for aggregation in self.programs["train"].aggregations.values():
            aggregation.load_state(state)

    def parameter(self, name: str) -> Tensor:
        return self.weights.views[name]

    def operand(self, name: str) -> Tensor:
        return self.weights.operands[name]

    def gradient(self, name: str) -> Tensor:
        return self.weights.grads[name]

    @property
    def loss(self) -> Tensor:
        return self.signals[:1]

    def sum_over_ranks(self, values: Tensor) -> None:
        if self.comm.size > 1:
            self.comm.all_reduce(values, self.backend.record()).wait()

    def run(self, bound: BoundProgram, after: After | None = None) -> None:
        """Run the ops of a program in order. after: called behind each op of one that runs in stages."""
        self.bound = bound
        if bound.program.name in self.stages:
            self.stages[bound.program.name].run(self, after)
            return
        for op in bound.program.ops:
            with self.annotate(op.label):
                op.run(self)


def state_views(backend: KernelBackend, states: Mapping[str, Sequence[BufferSpec]]) -> dict[str, dict[str, Tensor]]:
    """Allocate what strategies keep from epoch to epoch; return each op's buffers as (rows, cols) views by name."""
    memory = backend.allocate(sum(spec.nbytes for specs in states.values() for spec in specs))
    views: dict[str, dict[str, Tensor]] = {}
    start = 0
    for op, specs in states.items():
        views[op] = {}
        for spec in specs:
            views[op][spec.name] = buffer_view(memory, Placement(spec, 0, 0, start))
            start += spec.nbytes
    return views
