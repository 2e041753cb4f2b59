"""Brings the pairs of a step to a rank's device, with the target of their scores. M pairs, S rows that they are of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch

from mggcn.backend.base import LossTarget, Sparse
from mggcn.blocks.block import EVERYONE, PAIRS
from mggcn.errors import PlanError
from mggcn.feed.batch import Batch
from mggcn.model.runtime import PairRows, Rows
from mggcn.train.runtime import RankRuntime
from mggcn.train.targets import EntryTarget

NO_ENTRIES = np.zeros((3, 0), np.int64)


class PairLoader:
    """Loads the pairs of a feed's batches, behind `load`, which loads the rest. dot: whether scores are dot products.

    num_vertices: N where the pairs are of the rows of all ranks, else 0.
    """

    def __init__(self, runtime: RankRuntime, load: Callable[[Batch], None], *, dot: bool, num_vertices: int) -> None:
        self._runtime, self._load, self._dot = runtime, load, dot
        self._like: Sparse | None = None
        if num_vertices:
            # Only their number is read; the pairs say which.
            everyone = Rows(ids=torch.zeros(1, dtype=torch.int64).expand(num_vertices))
            inputs = runtime.inputs
            runtime.inputs = dataclasses.replace(inputs, rows={**inputs.rows, EVERYONE: everyone})

    def load(self, batch: Batch) -> None:
        """Make the training program run over this batch. Raises: PlanError for one without pairs."""
        self._load(batch)
        pairs, runtime, backend = batch.pairs, self._runtime, self._runtime.backend
        if pairs is None:
            raise PlanError("a step that predicts links needs pairs, and its feed gave none")
        count, real = pairs.heads.size, np.dtype(str(runtime.weights.flat.dtype).removeprefix("torch."))
        if self._dot:
            others = np.concatenate([pairs.tails, pairs.heads])[pairs.ends]
            matrix = backend.sparse(pairs.indptr, others, np.zeros(others.size, real), self._like)
        else:
            matrix = backend.sparse(pairs.indptr, pairs.ends, None, self._like)
        self._like = self._like or matrix
        labels = np.zeros((count, 1), real)
        labels[: pairs.links] = 1
        mean = LossTarget(backend.upload(labels), backend.upload(np.ones(count, np.uint8)), 1.0 / max(pairs.total, 1))
        heads = backend.upload(pairs.heads)
        rows = Rows(ids=heads, target=EntryTarget("bce", mean, NO_ENTRIES))
        on_device = PairRows(
            heads=heads,
            tails=backend.upload(pairs.tails),
            matrix=matrix,
            pair=backend.upload(pairs.ends % np.int32(max(count, 1))),
        )
        inputs = runtime.inputs
        runtime.inputs = dataclasses.replace(inputs, rows={**inputs.rows, PAIRS: rows}, pairs=on_device)
        counts = {name: ids.size for name, ids in batch.rows.items()} | {PAIRS: count}
        runtime.programs = {**runtime.programs, "train": runtime.programs["train"].cut(counts)}
