"""Brings the pairs of a step to a rank's device, with the target of their scores. M pairs, S rows that they are of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from mggcn.backend.base import KernelBackend, LossTarget, Sparse
from mggcn.blocks.block import EVERYONE, PAIRS
from mggcn.blocks.padded import PairRoom, placed
from mggcn.errors import PlanError
from mggcn.feed.batch import Batch, Pairs
from mggcn.feed.packed import PackedPairs
from mggcn.model.runtime import PairRows, Rows
from mggcn.train.runtime import RankRuntime, arrays_of
from mggcn.train.targets import EntryTarget

NO_ENTRIES = np.zeros((3, 0), np.int64)


class PairLoader:
    """Loads the pairs of a feed's batches, behind `load`, which loads the rest. dot: whether scores are dot products.

    room: of a device that records a step once, and so keeps pairs of steps over the whole graph where they are; None: each
    step's pairs are in memory of their own. num_vertices: N where the pairs are of the rows of all ranks, else 0.
    """

    def __init__(
        self,
        runtime: RankRuntime,
        load: Callable[[Batch], None],
        *,
        dot: bool,
        num_vertices: int,
        room: PairRoom | None = None,
    ) -> None:
        self._runtime, self._load, self._dot = runtime, load, dot
        self._like: Sparse | None = None
        if num_vertices:
            # Only their number is read; the pairs say which.
            everyone = Rows(ids=torch.zeros(1, dtype=torch.int64).expand(num_vertices))
            inputs = runtime.inputs
            runtime.inputs = dataclasses.replace(inputs, rows={**inputs.rows, EVERYONE: everyone})
        self._memory: PairMemory | None = None
        if room is not None:
            self._memory = PairMemory(runtime.backend, room)
            bind_pairs(runtime, room, self._memory.arrays)

    def load(self, batch: Batch) -> None:
        """Make the training program run over this batch. Raises: PlanError for one without pairs, or with too many."""
        self._load(batch)
        if batch.pairs is None:
            raise PlanError("a step that predicts links needs pairs, and its feed gave none")
        if self._memory is not None:
            self._memory.write(batch.pairs)
        else:
            self._upload(batch, batch.pairs)

    def _upload(self, batch: Batch, pairs: Pairs) -> None:
        runtime, backend = self._runtime, self._runtime.backend
        count, real = pairs.heads.size, np.dtype(str(runtime.weights.flat.dtype).removeprefix("torch."))
        if self._dot:
            others = np.concatenate([pairs.tails, pairs.heads])[pairs.ends]
            matrix = backend.sparse(pairs.indptr, others, np.zeros(others.size, real), self._like)
        else:
            matrix = backend.sparse(pairs.indptr, pairs.ends, None, self._like)
        self._like = self._like or matrix
        heads, tails = backend.upload(pairs.heads), backend.upload(pairs.tails)
        pair = backend.upload(pairs.ends % np.int32(max(count, 1)))
        on_device = PairRows(heads=heads, tails=tails, matrix=matrix, pair=pair)
        labels = np.zeros((count, 1), real)
        labels[: pairs.links] = 1
        mean = LossTarget(backend.upload(labels), backend.upload(np.ones(count, np.uint8)), 1.0 / max(pairs.total, 1))
        _score(runtime, on_device, mean)
        counts = {name: ids.size for name, ids in batch.rows.items()} | {PAIRS: count}
        runtime.programs = {**runtime.programs, "train": runtime.programs["train"].cut(counts)}


class PairMemory:
    """Pairs of steps over the whole graph, in memory of the device whose addresses do not change.

    arrays: of the room, on the device. Memory: the room's bytes, here and on the device.
    """

    def __init__(self, backend: KernelBackend, room: PairRoom) -> None:
        self._backend = backend
        self._packed = PackedPairs(room, torch.zeros(room.nbytes, dtype=torch.uint8))
        self._memory = backend.allocate(room.nbytes)
        self.arrays: Mapping[str, Tensor] = arrays_of(self._memory, placed(room.arrays()))

    def write(self, pairs: Pairs) -> None:
        """Have the next step score these pairs. Raises: PlanError for more than were planned."""
        self._packed.write(pairs)
        self._backend.write(self._packed.memory.numpy(), self._memory)


def bind_pairs(runtime: RankRuntime, room: PairRoom, arrays: Mapping[str, Tensor]) -> None:
    """Have the training program score the pairs that lie in these arrays of the device, as they are at each step."""
    pairs = pairs_in_place(runtime.backend, room, arrays)
    _score(runtime, pairs, LossTarget(arrays["labels"].view(-1, 1), arrays["mask"], 0.0, changing=arrays["scale"]))


def pairs_in_place(backend: KernelBackend, room: PairRoom, arrays: Mapping[str, Tensor]) -> PairRows:
    """Return the pairs that lie in these arrays of the device, with room for the gradients of dot products."""
    real = arrays["labels"].dtype
    values = backend.allocate(2 * room.pairs * real.itemsize).view(real) if room.dot else None
    columns = room.rows if room.dot else 2 * room.pairs
    return PairRows(
        heads=arrays["heads"],
        tails=arrays["tails"],
        matrix=backend.sparse_in_place(arrays["pair_indptr"], arrays["pair_indices"], values, columns),
        pair=arrays["pair_of"],
    )


def _score(runtime: RankRuntime, pairs: PairRows, mean: LossTarget) -> None:
    """Have the training program score pairs on the device, and compare them with a target."""
    inputs = runtime.inputs
    rows = Rows(ids=pairs.heads, target=EntryTarget("bce", mean, NO_ENTRIES))
    runtime.inputs = dataclasses.replace(inputs, rows={**inputs.rows, PAIRS: rows}, pairs=pairs)
