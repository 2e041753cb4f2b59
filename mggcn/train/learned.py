"""Learned rows of vertices on one rank: those that it owns, the rows of a batch from their owners, and how they move.

N vertices, V of this rank; S rows of a batch, of which R are other ranks'; A rows that other ranks ask this one for;
D columns, P ranks.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mggcn.backend.base import KernelBackend
from mggcn.backend.epoch_end import BETA1, BETA2, EPS, Weight
from mggcn.comm.base import Communicator
from mggcn.comm.requests import finished, request_rows
from mggcn.errors import ConfigError, PlanError
from mggcn.graph.philox import CACHED, philox
from mggcn.memory.arena import BufferSpec
from mggcn.partition.order import Owners
from mggcn.planning.learned import MOVED_ROWS

NAME: Final = "embedding.weight"
"""Name of the rows of all vertices (N, D) among a run's weights, as a torch.nn.Embedding would have it."""
ROWS: Final = "rows"
"""Prefix of the names of a rank's rows and their moments in its part of a checkpoint."""
STREAM: Final = 0xF0000000
"""First counter of the numbers that rows start from (graph/philox.py has the streams)."""
ADAGRAD_EPS: Final = 1e-10
"""Added to the root of a sum of squares, as torch.optim.Adagrad's default."""
Vector = npt.NDArray[Any]


def start_rows(seed: int, ids: npt.NDArray[np.int64], cols: int) -> npt.NDArray[np.float64]:
    """Return the rows (len(ids), D) that vertices start with, uniform in +-1 / sqrt(D).

    Number d of vertex v is word d mod 4 of Philox under key (seed, 0) and counter (STREAM + d / 4, v low, v high, 0).
    Cost: some 50 ns a number.
    """
    blocks = -(-cols // 4)
    v, number = np.repeat(ids.astype(np.uint64), blocks), np.tile(np.arange(blocks, dtype=np.uint64), ids.size)
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    words = philox((seed, 0), np.stack([number + np.uint64(STREAM), v & low, v >> half, np.zeros_like(v)]))
    uniform = (words.T.reshape(ids.size, 4 * blocks)[:, :cols].astype(np.float64) + 0.5) * 2.0**-32
    return (2 * uniform - 1) / math.sqrt(cols)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Batch:
    """The rows of a batch, by owner. rows, places int32: of those of this rank, here and in the batch.

    places_there int32 (R,): of those of others, in the batch; counts: how many of each rank. asked int32 (A,): rows of
    this rank that others have in theirs; asked_counts: how many of each.
    """

    size: int
    rows: Tensor
    places: Tensor
    places_there: Tensor
    counts: list[int]
    asked: Tensor
    asked_counts: list[int]


class LearnedRows:
    """The rows (V, D) of this rank's vertices, `values`, and `gradient`: of all of them, or (S, D) of a batch's rows.

    sources: the most rows of a batch, None where a step reads all of this rank's. moments: names of what an optimiser keeps
    of every row. Memory: as planning/learned.py counts it.
    """

    def __init__(
        self,
        backend: KernelBackend,
        comm: Communicator,
        owners: Owners,
        spec: BufferSpec,
        moments: tuple[str, ...],
        sources: int | None,
    ) -> None:
        self._backend, self._comm, self._owners = backend, comm, owners
        self._ids = owners.owned(comm.rank)
        self._moments = {name: self._memory(spec) for name in moments}
        self.values: Tensor = self._memory(spec)
        self.best: Tensor = self._memory(spec)
        """The rows of the best validation score."""
        self.steps: Tensor = torch.zeros((), dtype=torch.float32)
        """Steps that the optimiser has made."""
        batch = spec if sources is None else BufferSpec(spec.name, sources, spec.cols, spec.dtype)
        self.gradient: Tensor = self._memory(batch)
        self.in_batches: bool = sources is not None
        self._rows = self._memory(batch) if self.in_batches else self.values
        self._place = torch.zeros(spec.rows if self.in_batches else 0, dtype=torch.int32)
        self._batch: _Batch | None = None
        self._rooms: dict[str, Tensor] = {}

    def _memory(self, spec: BufferSpec) -> Tensor:
        flat = self._backend.allocate(spec.nbytes).view(self._backend.dtype)
        return flat.as_strided((spec.rows, spec.cols), (spec.ld, 1))

    def initialize(self, seed: int) -> None:
        """Start all rows, each as its vertex says, and forget all steps."""
        step = max(1, CACHED // -(-self.values.shape[1] // 4))
        for start in range(0, self._ids.size, step):
            some = slice(start, start + step)
            self.values[some] = torch.from_numpy(start_rows(seed, self._ids[some], self.values.shape[1]))
        for tensor in (*self._moments.values(), self.steps):
            tensor.zero_()

    def load(self, rows: Tensor) -> None:
        """Take the rows of this rank's vertices from those of all (N, D). Raises: ConfigError for another shape."""
        expected = (self._owners.num_vertices, self.values.shape[1])
        if tuple(rows.shape) != expected:
            raise ConfigError(
                f"{NAME} has the shape {tuple(rows.shape)}, expected {expected}: learned rows belong to the graph that "
                "they were trained on"
            )
        self.values.copy_(rows[torch.from_numpy(self._ids)])

    def keep_best(self) -> None:
        """Keep the rows as those of the best validation score."""
        self.best.copy_(self.values)

    def swap_best(self) -> None:
        """Exchange the rows and the best ones."""
        for start in range(0, self.values.shape[0], MOVED_ROWS):
            some = slice(start, start + MOVED_ROWS)
            now = self.values[some].clone()
            self.values[some] = self.best[some]
            self.best[some] = now

    def weight(self, decay: float) -> Weight:
        """Return all rows as a weight that an epoch's end moves. Padding has no gradient, and stays 0."""
        flat, grad = _whole(self.values), _whole(self.gradient)
        return Weight(flat, grad, tuple(map(_whole, self._moments.values())), self.steps, None, decay)

    def state(self, *, best: bool) -> dict[str, Tensor]:
        """Return the state of this rank's rows, for its part of a checkpoint. best: whether there are best rows."""
        kept = {"weight": self.values, **({"best": self.best} if best else {}), **self._moments}
        found = {f"{ROWS}.{name}": tensor for name, tensor in kept.items()}
        return found | {f"{ROWS}.ids": torch.from_numpy(self._ids), f"{ROWS}.step": self.steps.view(1)}

    def load_state(self, parts: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Restore what `state` returned, from the parts of a checkpoint; ranks may have been others.

        Raises: KeyError if a row is missing, or it is the state of another optimiser.
        """
        missing = self._ids.size
        for ids, part in parts_with_rows(parts):
            mine = np.flatnonzero(self._owners.owner_of(ids) == self._comm.rank)
            index, chosen = torch.from_numpy(self._owners.local_of(ids[mine]).astype(np.int64)), torch.from_numpy(mine)
            names = {"weight": self.values, **self._moments} | ({"best": self.best} if f"{ROWS}.best" in part else {})
            for name, tensor in names.items():
                tensor[index] = part[f"{ROWS}.{name}"][chosen]
            self.steps.copy_(part[f"{ROWS}.step"][0])
            missing -= mine.size
        if missing:
            raise KeyError(f"{missing} learned rows")

    def fetch(self, ids: npt.NDArray[np.int64]) -> Tensor:
        """Return the rows (S, D) of a batch's vertices, each there once, as they are now; valid until the next call.

        Collective. Bytes: 4 for each row of another rank, and the rows that others ask for, after a number to each rank.
        """
        backend, batch, out = self._backend, self._by_owner(ids), self._rows[: ids.size]
        self._batch = batch
        if self._comm.size == 1:
            backend.gather_rows(self.values, batch.rows, out)
            return out
        served, came = self._room("asked", batch.asked), self._room("there", batch.places_there)
        backend.gather_rows(self.values, batch.asked, served)
        arrival = self._comm.all_to_all(came, served, batch.counts, batch.asked_counts, backend.record())
        own = self._room("own", batch.rows)
        backend.gather_rows(self.values, batch.rows, own)
        backend.scatter_rows(own, batch.places, out)
        arrival.wait()
        backend.scatter_rows(came, batch.places_there, out)
        return out

    def _by_owner(self, ids: npt.NDArray[np.int64]) -> _Batch:
        """Tell the owners of a batch's rows which these are. Collective."""
        comm = self._comm
        local = self._owners.local_of(ids)
        if comm.size == 1:
            own, none = torch.from_numpy(local), torch.zeros(0, dtype=torch.int32)
            return _Batch(
                size=ids.size, rows=own, places=none, places_there=none, counts=[0], asked=none, asked_counts=[0]
            )
        owner = self._owners.owner_of(ids)
        mine = owner == comm.rank
        places, there = np.flatnonzero(mine).astype(np.int32), np.flatnonzero(~mine).astype(np.int32)
        asked = finished(request_rows(comm, owner[there], local[there]))
        return _Batch(
            size=ids.size,
            rows=torch.from_numpy(local[places]),
            places=torch.from_numpy(places),
            places_there=torch.from_numpy(there[asked.order]),
            counts=asked.wanted,
            asked=asked.rows,
            asked_counts=asked.given,
        )

    def move(self, rate: float) -> None:
        """Move the rows that the last batch of any rank has read, against the sum of their gradients. Collective.

        Bytes: a gradient for each row of another rank. Gradients of a row are added in the order of the ranks.
        """
        self.steps.add_(1)
        rows, sums = self._summed()
        for start in range(0, rows.shape[0], MOVED_ROWS):
            some = slice(start, start + MOVED_ROWS)
            self._move(rows[some], sums[some], rate)

    def _summed(self) -> tuple[Tensor, Tensor]:
        """Return the rows of this rank that were read, each once, and the sums of their gradients."""
        backend, comm, batch = self._backend, self._comm, self._batch
        if batch is None:
            raise PlanError("learned rows were to move before a batch had read any")
        gradient = self.gradient[: batch.size]
        if comm.size == 1:
            return batch.rows, gradient
        sent, came = self._room("there", batch.places_there), self._room("asked", batch.asked)
        backend.gather_rows(gradient, batch.places_there, sent)
        arrival = comm.all_to_all(came, sent, batch.asked_counts, batch.counts, backend.record())
        own = self._room("own", batch.places)
        backend.gather_rows(gradient, batch.places, own)
        arrival.wait()
        rows = torch.from_numpy(np.unique(np.concatenate([batch.rows.numpy(), batch.asked.numpy()])))
        self._place[rows.long()] = torch.arange(rows.shape[0], dtype=torch.int32)
        sums = self._room("sums", rows).zero_()
        parts = list(zip(batch.asked.split(batch.asked_counts), came.split(batch.asked_counts), strict=True))
        parts[comm.rank] = batch.rows, own
        for index, gradients in parts:
            backend.scatter_add_rows(gradients, self._place[index.long()], sums)
        return rows, sums

    def _move(self, rows: Tensor, g: Tensor, rate: float) -> None:
        """Move some rows, as torch.optim.SparseAdam or Adagrad, without a decay of rates, would."""
        w = self._taken("values", self.values, rows)
        moments = [self._taken(name, one, rows) for name, one in self._moments.items()]
        if len(moments) == 2:
            first, second = moments
            steps = float(self.steps)
            size = rate * math.sqrt(1 - BETA2**steps) / (1 - BETA1**steps)
            first.add_(g.sub(first).mul_(1 - BETA1))
            second.add_(g.square().sub_(second).mul_(1 - BETA2))
            w.sub_(first.div(second.sqrt().add_(EPS)).mul_(size))
        else:
            (total,) = moments
            total.add_(g.square())
            w.sub_(g.div(total.sqrt().add_(ADAGRAD_EPS)).mul_(rate))
        for tensor, found in ((self.values, w), *zip(self._moments.values(), moments, strict=True)):
            self._backend.scatter_rows(found, rows, tensor)

    def _taken(self, name: str, source: Tensor, rows: Tensor) -> Tensor:
        """Return copies of some rows, in the room of this name."""
        found = self._room(name, rows)
        self._backend.gather_rows(source, rows, found)
        return found

    def _room(self, name: str, index: Tensor) -> Tensor:
        """Return memory for as many rows as an index has, without padding, as messages carry them: valid until the next
        call of this name. It grows in the first steps, and stays.
        """
        count = index.shape[0]
        if name not in self._rooms or self._rooms[name].shape[0] < count:
            self._rooms.pop(name, None)  # first, so that there are never two
            self._rooms[name] = torch.empty(count, self.values.shape[1], dtype=self.values.dtype)
        return self._rooms[name][:count]


def _whole(padded: Tensor) -> Tensor:
    """Return the memory of padded rows as one vector."""
    return padded.as_strided((padded.shape[0] * padded.stride(0),), (1,))


def parts_with_rows(
    parts: Mapping[str, Mapping[str, Tensor]],
) -> Iterator[tuple[npt.NDArray[np.int64], Mapping[str, Tensor]]]:
    """Yield the parts of a checkpoint that have learned rows, each with their vertices."""
    for part in parts.values():
        if f"{ROWS}.ids" in part:
            yield part[f"{ROWS}.ids"].numpy(), part


@dataclass(frozen=True, slots=True)
class SavedRows:
    """The learned rows of all vertices (N, D) as the parts of a checkpoint have them: what is asked for is read.

    A `Rows` of graph/csr.py. parts: of each its vertices, int64 (V,), the order in which they ascend, likewise, and their
    rows (V, D). Memory: 8 bytes a vertex beside maps. Cost: two searches a row and part.
    """

    parts: tuple[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Vector], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return sum(ids.size for ids, _, _ in self.parts), self.parts[0][2].shape[1]

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.parts[0][2].dtype

    copied = True

    def read(self, start: int, stop: int) -> Vector:
        return self.take(np.arange(start, stop))

    def array(self) -> Vector:
        return self.read(0, self.shape[0])

    def take(self, ids: npt.NDArray[np.int64]) -> Vector:
        out = np.empty((ids.size, self.shape[1]), self.dtype)
        for own, order, rows in self.parts:
            at = order[np.minimum(np.searchsorted(own, ids, sorter=order), own.size - 1)]
            mine = np.flatnonzero(own[at] == ids)
            out[mine] = rows[at[mine]]
        return out

    def in_place(self) -> SavedRows:
        return self


def saved_rows(parts: Mapping[str, Mapping[str, Tensor]], *, best: bool) -> SavedRows | None:
    """Return the learned rows of all vertices of a checkpoint, the best if it has them, in place; None without any."""
    found = [(ids, part) for ids, part in parts_with_rows(parts) if ids.size]
    if not found:
        return None
    name = _rows_name([part for _, part in found], best=best)
    return SavedRows(tuple((ids, np.argsort(ids), part[name].numpy()) for ids, part in found))


def _rows_name(parts: Sequence[Mapping[str, Tensor]], *, best: bool) -> str:
    """Return the name of the rows in the parts of a checkpoint: of the best ones, if all have them."""
    return f"{ROWS}.best" if best and all(f"{ROWS}.best" in part for part in parts) else f"{ROWS}.weight"


def all_rows(parts: Mapping[str, Mapping[str, Tensor]], *, best: bool, file: Path | None = None) -> Tensor | None:
    """Return the learned rows of all vertices (N, D) of a checkpoint, the best if it has them; None without any.

    file: the `.npy` file in which they are to lie, mapped; None: in memory. Raises: OSError.
    """
    found = list(parts_with_rows(parts))
    if not found:
        return None
    name = _rows_name([part for _, part in found], best=best)
    first = found[0][1][name]
    shape = sum(ids.size for ids, _ in found), first.shape[1]
    if file is None:
        whole = first.new_zeros(shape)
    else:
        mapped = np.lib.format.open_memmap(file, "w+", first.numpy().dtype, shape)
        handle = os.open(file, os.O_RDWR)
        try:  # a full disk is an error here, and a signal where a page is written
            os.posix_fallocate(handle, 0, os.fstat(handle).st_size)
        finally:
            os.close(handle)
        whole = torch.from_numpy(mapped)
    for ids, part in found:
        whole[torch.from_numpy(ids)] = part[name]
    return whole
