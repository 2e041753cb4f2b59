"""A block on one rank whose rows of other ranks come from a cache: messages, the ring of lines, and what is missing.

T targets, S sources of the block, K vertices of the halo, D width; on the host.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from mggcn import native
from mggcn.aggregate.base import Aggregation, BuildContext, padded_rows
from mggcn.aggregate.edge_op import SUM, EdgeOp, Target
from mggcn.aggregate.history_cache import Cache, Vector
from mggcn.aggregate.local import LocalBlock, LocalPlan
from mggcn.backend.base import Epilogue
from mggcn.backend.events import DONE, Event
from mggcn.blocks.block import HaloRows
from mggcn.errors import PlanError

if TYPE_CHECKING:
    from torch import Tensor


class _Args(ctypes.Structure):
    """`History` of cpu/history.cpp."""

    _fields_ = (
        ("line_of", ctypes.c_void_p),
        ("number_of", ctypes.c_void_p),
        ("arrived", ctypes.c_void_p),
        ("numbers", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
        ("found", ctypes.c_void_p),
        ("missing", ctypes.c_void_p),
        ("lines", ctypes.c_int64),
        ("next", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("sources", ctypes.c_int64),
        ("step", ctypes.c_int64),
        ("life", ctypes.c_int64),
        ("hits", ctypes.c_int64),
    )


class _Ring:
    """Which row lies in which line of a cache, and which lines the rows of a step are in. sources: the most of a step."""

    def __init__(self, cache: Cache, sources: int) -> None:
        self.line_of: Vector = np.full(cache.halo, -1, np.int32)
        self.number_of: Vector = np.full(cache.lines, -1, np.int32)
        self.arrived: Vector = np.zeros(cache.lines, np.int64)
        self.missing: Vector = np.zeros(sources, np.uint8)
        self._found, self._named = (np.empty(count, np.int32) for count in (max(sources, cache.halo), cache.halo))
        self.args: _Args = _Args(lines=cache.lines, life=cache.life)
        for name in ("line_of", "number_of", "arrived", "missing"):
            setattr(self.args, name, getattr(self, name).ctypes.data)
        self.args.found = self._found.ctypes.data

    def store(self, numbers: Vector, first: int, step: int) -> Vector:
        """Return the lines of rows that have come, -1 where a later one has it; numbers: of the halo less `first`."""
        named, args = np.add(numbers, first, out=self._named[: numbers.size]), self.args
        args.numbers, args.count, args.step = named.ctypes.data, named.size, step
        native.kernel("mggcn_history_store")(ctypes.byref(args))
        return self._found[: named.size]

    def find(self, rows: HaloRows, sources: int, step: int) -> tuple[Vector, int]:
        """Return the lines of a step's rows, -1 for what is missing, and how many are there."""
        args = self.args
        args.numbers, args.places = rows.numbers.ctypes.data, rows.places.ctypes.data
        args.count, args.sources, args.step = rows.places.size, sources, step
        native.kernel("mggcn_history_find")(ctypes.byref(args))
        return self._found[: rows.places.size], int(args.hits)

    def nothing(self, rows: HaloRows) -> Vector:
        """Return that none of a step's rows is in a line, and leave all of them missing."""
        self.missing.fill(0)
        self.missing[rows.places] = 1
        found: Vector = self._found[: rows.places.size]
        found.fill(-1)
        return found

    def clear(self) -> None:
        """Forget all rows."""
        self.line_of.fill(-1)
        self.number_of.fill(-1)
        self.args.next = 0

    def restore(self, number_of: Vector, arrived: Vector, following: int) -> None:
        """Have these rows in the lines; following: the line that is taken next."""
        self.number_of[:], self.arrived[:], self.args.next = number_of, arrived, following
        held = np.flatnonzero(self.number_of >= 0)
        self.line_of[self.number_of[held]] = held


class HistoryBlock(Aggregation):
    """The block on one rank. `load` of `edges` gives it the edges of a step, `take` the rows of other ranks.

    These are overwritten in the operand: nothing reads what the rank itself computes of them, and they have no gradient.
    """

    exact = False

    def __init__(self, name: str, cache: Cache, local: LocalPlan, context: BuildContext) -> None:
        self._name, self._cache, self._backend, self._comm = name, cache, context.backend, context.comm
        self._local = LocalBlock(context.backend, local.back)
        buffers = context.states[name]
        self.lines: Tensor = buffers[f"{name}.lines"]
        """The rows that are kept (lines, D)."""
        out, into = buffers[f"{name}.out"], buffers[f"{name}.in"]
        self.ring: _Ring = _Ring(cache, local.size.sources)
        """Which rows these are."""
        sent, received = cache.messages(self.lines.stride(0) * self.lines.itemsize)
        self._rows, self._in = (sent.rows, received.rows), into
        self._slots = [list(_parts(of, cache.slots)) for of in (out, into)]
        self._out_parts, self._in_parts = (
            [layout.parts(slot) for slot in slots] for layout, slots in zip((sent, received), self._slots, strict=True)
        )
        self._first: list[int] = np.cumsum([0, *cache.received])[:-1].tolist()
        ones = np.ones(local.size.targets, context.options.dtype)
        self._shares, self._scale = context.backend.upload(ones), context.backend.upload(ones.copy())
        self._flying: dict[int, Event] = {}
        """The messages on their way, by slot."""
        self._step = 0
        self._taken: HaloRows | None = None
        self._counts: dict[int, list[int]] = {}
        """By epoch, how many rows were found in the cache, and how many were looked up."""

    def begin_epoch(self, epoch: int) -> None:
        """Begin a step; `epoch` is its number in the run."""
        self._step = epoch
        if epoch == 0:
            self._forget()

    @property
    def edges(self) -> LocalBlock:
        return self._local

    def take(self, rows: HaloRows | None, *, whole: bool) -> None:
        if not whole:
            raise PlanError(
                "a step came in parts, of which other ranks know nothing, and rows of each layer are sent once a step; set "
                "sample.plan = bound"
            )
        if rows is None:
            raise PlanError("a batch needs the rows of other ranks, and the feed gave none")
        self._taken = rows

    def found(self, epoch: int) -> tuple[int, int]:
        hits, count = self._counts.pop(epoch, [0, 0])
        return hits, count

    def forward(self, h: Tensor, target: Target, buffers: Sequence[Tensor], layer: int, op: EdgeOp = SUM) -> None:
        cache, slot = self._cache, self._step % self._cache.slots
        if not cache.delay:
            self._push(h, slot)
        if slot in self._flying:
            self._receive(slot)
        if cache.delay and cache.pushes(self._step):
            self._push(h, slot)
        self._fill(h)
        self._local.forward(h, self._weighted(target), buffers, layer, op)

    def backward(self, g: Tensor, target: Target, buffers: Sequence[Tensor], layer: int, op: EdgeOp = SUM) -> None:
        if self._cache.rest:
            self._backend.finish(g, g, Epilogue(row_scale=self._shares[: g.shape[0]]))
        self._local.backward(g, target, buffers, layer, op)
        self._copy(target.out, self.ring.nothing(self._given), target.out, self._given.places)

    @property
    def _given(self) -> HaloRows:
        if self._taken is None:
            raise PlanError("a block was run before the rows of other ranks were known; load a batch first")
        return self._taken

    def _push(self, h: Tensor, slot: int) -> None:
        """Send this step's rows, h (S, D), to all ranks."""
        for (rows, numbers), (places, names) in zip(self._out_parts[slot], self._given.pushed, strict=True):
            numbers[: names.size] = names
            numbers[names.size :] = -1
            self._copy(h, places, rows, None)
        out, into = (padded_rows(slots[slot]) for slots in self._slots)
        sent, received = self._rows
        self._flying[slot] = self._comm.all_to_all(into, out, received, sent, self._backend.record())

    def _receive(self, slot: int) -> None:
        """Wait for a message, and cache its rows, rank after rank."""
        self._flying.pop(slot).wait()
        for first, (rows, numbers) in zip(self._first, self._in_parts[slot], strict=True):
            count = int(np.count_nonzero(numbers >= 0))
            self._copy(rows, None, self.lines, self.ring.store(numbers[:count], first, self._step))

    def _fill(self, h: Tensor) -> None:
        """Fill the rows of other ranks in h (S, D) from the cache, with zeros where they are not in it."""
        rows, hits = self._given, 0
        if self._cache.reads(self._step):
            found, hits = self.ring.find(rows, h.shape[0], self._step)
        else:
            found = self.ring.nothing(rows)
        self._copy(self.lines, found, h, rows.places)
        counts = self._counts.setdefault(self._step // self._cache.steps, [0, 0])
        counts[0] += hits
        counts[1] += rows.places.size

    def _weighted(self, target: Target) -> Target:
        """Return the target with a factor for each row, by which what is left of it counts as all of it."""
        if not self._cache.rest:
            return target
        if self._local.loaded is None:
            raise PlanError("a block was run before a batch was loaded")
        matrix, rows = self._local.loaded[0], target.out.shape[0]
        shares, values = self._shares[:rows], matrix.values
        native.kernel("mggcn_history_shares_", "f64" if shares.dtype == torch.float64 else "f32")(
            matrix.indptr.data_ptr(),
            matrix.indices.data_ptr(),
            None if values is None else values.data_ptr(),
            self.ring.missing.ctypes.data,
            shares.data_ptr(),
            rows,
        )
        epilogue = target.epilogue or Epilogue()
        if epilogue.row_scale is not None:
            shares = torch.mul(shares, epilogue.row_scale[:rows], out=self._scale[:rows])
        return replace(target, epilogue=replace(epilogue, row_scale=shares))

    def _copy(self, rows: Tensor, source: Vector | None, out: Tensor, to: Vector | None) -> None:
        """Copy row source[i] of `rows` to row to[i] of `out`; None: i itself, -1: zeros, or nowhere."""
        index = source if source is not None else to
        native.kernel("mggcn_history_copy")(
            rows.data_ptr(),
            rows.stride(0) * rows.itemsize,
            None if source is None else source.ctypes.data,
            out.data_ptr(),
            out.stride(0) * out.itemsize,
            None if to is None else to.ctypes.data,
            0 if index is None else index.size,
            out.shape[1] * out.itemsize,
            self._backend.team.running,
        )

    def _settle(self) -> None:
        """Wait for every message, in the same order on all ranks."""
        for slot in range(self._cache.slots):
            if slot in self._flying:
                self._flying[slot].wait()
                self._flying[slot] = DONE

    def _forget(self) -> None:
        """Empty the cache, once no message is on its way."""
        self._settle()
        self._flying.clear()
        self._counts.clear()
        self.ring.clear()

    def state(self) -> Mapping[str, Tensor]:
        """Return the cache and the messages received, with an int64 vector: the next line, the epoch at hand with what it
        found and looked up, and for each slot whether it holds a message.

        They are where they are, padding and all, so that a checkpoint takes no memory for a cache once more.
        """
        self._settle()
        epoch = max(self._counts, default=-1)
        flying = [int(slot in self._flying) for slot in range(self._cache.slots)]
        progress = [self.ring.args.next, epoch, *self._counts.get(epoch, [0, 0]), *flying]
        tensors = {
            "lines": padded_rows(self.lines),
            "in": padded_rows(self._in),
            "number_of": torch.from_numpy(self.ring.number_of),
            "arrived": torch.from_numpy(self.ring.arrived),
            "progress": torch.tensor(progress, dtype=torch.int64),
        }
        return {f"{self._name}.{what}": tensor for what, tensor in tensors.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned; an empty mapping resets all."""
        self._forget()
        if not state:
            return
        kept = {what: state[f"{self._name}.{what}"] for what in ("lines", "in", "number_of", "arrived", "progress")}
        padded_rows(self.lines).copy_(kept["lines"])
        padded_rows(self._in).copy_(kept["in"])
        following, epoch, *counts = kept["progress"].tolist()
        self.ring.restore(kept["number_of"].numpy(), kept["arrived"].numpy(), following)
        self._flying = {slot: DONE for slot in range(self._cache.slots) if counts[2 + slot]}
        if epoch >= 0:
            self._counts[epoch] = counts[:2]


def _parts(rows: Tensor, count: int) -> Iterator[Tensor]:
    """Yield equal parts of a buffer."""
    each = rows.shape[0] // count
    return (rows[first * each : (first + 1) * each] for first in range(count))
