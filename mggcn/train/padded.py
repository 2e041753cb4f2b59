"""Batches on a GPU: uploaded beside the step before, and filled up to the most that a step may have.

So sizes, addresses and grids are the same in every step, and a device records a step once. Rows that fill up have no edges,
no label and no weight in a batch norm: their gradients are zero, and nothing reads their values, which must be finite, as
zero times infinity is none. So what is gathered for them is zero. V rows of a row set, T of the seeds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from mggcn.backend.base import KernelBackend, Sparse
from mggcn.backend.events import Event, Mark
from mggcn.blocks.padded import PaddedLayout
from mggcn.errors import PlanError
from mggcn.feed.batch import Batch, Packed, transposed
from mggcn.feed.features import VertexFeatures
from mggcn.feed.norm_scales import NormScales
from mggcn.feed.packed import PackedBatch, ReadLabels
from mggcn.model.runtime import Rows, Target
from mggcn.train.pairs import bind_pairs
from mggcn.train.runtime import DTYPES, RankRuntime, arrays_of
from mggcn.train.targets import StepTargets

Arrays = Mapping[str, Tensor]


class PaddedLoader:
    """Loads the batches of a feed into memory whose addresses do not change.

    features, norm, targets, dtype: as of a BatchLoader; without targets the layout has pairs. ahead: batches that the feed
    makes beside the step; with one or more the next batch is uploaded during a step, to memory of its own, from which it is
    copied on the device when the step has ended, so that a step that is recorded once reads one place. Memory: the layout's
    bytes, with `ahead` twice.
    """

    def __init__(
        self,
        runtime: RankRuntime,
        layout: PaddedLayout,
        features: VertexFeatures,
        norm: NormScales | None,
        targets: StepTargets | None,
        dtype: str,
        ahead: int,
    ) -> None:
        self.runtime: RankRuntime = runtime
        self._layout, self._stack = layout, layout.stack
        self._columns, self._targets = features.num_features, targets
        backend = runtime.backend
        self._read = backend.allocate(layout.nbytes)
        self._sent = backend.allocate(layout.nbytes) if ahead else self._read
        places = layout.places()
        self._inputs = [places[name] for name in layout.inputs]
        self._own = _OwnBatches(backend, layout, features, norm, None if targets is None else targets.read)
        self._filled = 0
        """Rows of the input that the last batch has written."""
        self._taken: Event | None = None
        """The point from which the next batch may be sent: None before the first."""
        self._bind(arrays_of(self._read, places), DTYPES[dtype])

    def _bind(self, arrays: Arrays, dtype: torch.dtype) -> None:
        """Have the training program read these arrays."""
        runtime, stack = self.runtime, self._stack
        inputs = {name: rows_of_input(arrays[name], self._layout, dtype, self._columns) for name in self._layout.inputs}
        target: Target | None = None
        if self._targets is not None:
            target = self._targets.target(self._label_rows(arrays), arrays["mask"], 0.0, arrays["scale"])
        rows = {
            name: Rows(
                ids=arrays["ids"][:count],
                row_scale=arrays.get(f"row_scale{number}"),
                col_scale=arrays.get(f"col_scale{number}"),
                counted=arrays[f"counted{number}"],
                dense=inputs["features"][:count] if "features" in inputs else None,
                sums=inputs["sums"][:count] if "sums" in inputs else None,
                target=target if name == stack.seeds else None,
            )
            for number, (name, count) in enumerate(stack.rows.items())
        }
        runtime.inputs = dataclasses.replace(runtime.inputs, rows={**runtime.inputs.rows, **rows})
        if self._layout.pairs is not None:
            bind_pairs(runtime, self._layout.pairs, arrays)
        for number, (block, size) in enumerate(zip(stack.blocks, stack.capacities, strict=True)):
            edges = runtime.programs["train"].aggregations[block].edges
            if edges is None:
                raise PlanError(f"block {block.name!r} does not take edges from a batch")
            back = self._matrix(arrays, f"_t{number}", size.targets) if edges.back else None
            edges.load(self._matrix(arrays, f"{number}", size.sources), back)

    def _matrix(self, arrays: Arrays, name: str, columns: int) -> Sparse:
        values = arrays.get(f"values{name}")
        return self.runtime.backend.sparse_in_place(arrays[f"indptr{name}"], arrays[f"indices{name}"], values, columns)

    def _label_rows(self, arrays: Arrays) -> Tensor:
        """Return labels as (T,), or (T, C) if they are entries."""
        columns = self._layout.labels[1]
        return arrays["labels"] if self._layout.labels[0] == "int32" else arrays["labels"].view(-1, columns)

    def load(self, batch: Batch) -> None:
        """Send a batch, and have the steps from now on run over it; nothing waits on the host.

        Raises: PlanError if the plan has no room for it; GraphError for a seed without a label.
        """
        packed, reads = (batch.packed, batch.reads) if batch.packed is not None else self._own.pack(batch)
        backend, stream = self.runtime.backend, self.runtime.backend.upload_stream
        twice = self._sent is not self._read
        # Without a second place, the step that reads the first must have ended.
        with stream.working(self._taken if twice else backend.record()):
            self._send(packed)
        sent = stream.record()
        reads.append(sent)
        sent.wait()
        if twice:
            self._read.copy_(self._sent)
            self._taken = backend.record()

    def _send(self, packed: Packed) -> None:
        """Copy a batch to the device, up to the rows that it has: work of the upload stream."""
        begin = 0
        for place in self._inputs:
            end = place.offset + packed.rows * self._layout.feature_bytes
            self._sent[begin:end].copy_(packed.memory[begin:end], non_blocking=True)
            if packed.rows < self._filled:
                self._sent[end : place.offset + self._filled * self._layout.feature_bytes].zero_()
            begin = place.end
        self._filled = packed.rows


class _OwnBatches:
    """Packs the batches of a feed that does not, on the thread of the steps, in two places in turn.

    features, norm: of batches without features, or scales; places are made for the first batch.
    """

    def __init__(
        self,
        backend: KernelBackend,
        layout: PaddedLayout,
        features: VertexFeatures,
        norm: NormScales | None,
        labels: ReadLabels | None,
    ) -> None:
        self._backend, self._layout, self._labels = backend, layout, labels
        self._features, self._norm = features, norm
        self._places: list[tuple[PackedBatch, list[Mark]]] = []
        """Each with the points up to which a device reads it."""

    def pack(self, batch: Batch) -> tuple[PackedBatch, list[Mark]]:
        """Return a batch in pinned memory, and where to note who reads it. Raises: PlanError if there is no room for it."""
        layout, stack = self._layout, self._layout.stack
        batch.check(stack)
        if not self._places:
            memory = [self._backend.pinned(layout.nbytes) for _ in range(2)]
            self._places = [(PackedBatch(layout, one, self._labels), []) for one in memory]
        self._places.reverse()
        packed, reads = self._places[0]
        while reads:
            reads.pop().synchronize()
        self._write_rows(batch, packed)
        scales, edges = batch.scales, dict(batch.edges)
        if scales is None and self._norm is not None:
            scales = {name: self._norm.of(np.ascontiguousarray(ids, np.int64)) for name, ids in batch.rows.items()}
        for number, block in enumerate(stack.blocks):
            if layout.is_transposed(number) and edges[block].transposed is None:
                back = transposed(edges[block], batch.rows[block.sources].size)
                edges[block] = dataclasses.replace(edges[block], transposed=back)
        packed.write(dataclasses.replace(batch, scales=scales, edges=edges))
        return packed, reads

    def _write_rows(self, batch: Batch, packed: PackedBatch) -> None:
        """Copy what was gathered, or gather it. Raises: PlanError for sums that the feed has not."""
        ids, given = batch.rows[self._layout.stack.blocks[0].sources], {"features": batch.features, "sums": batch.sums}
        for name in self._layout.inputs:
            found = given[name]
            if found is None:
                if name == "sums":
                    raise PlanError("the first layer's sums are read from A X, and the feed gathers none of its rows")
                found = torch.from_numpy(self._features.gather(ids))
            columns = self._features.num_features
            rows_of_input(packed.bytes_of(name), self._layout, self._backend.dtype, columns)[: ids.size] = found


def rows_of_input(flat: Tensor, layout: PaddedLayout, dtype: torch.dtype, columns: int) -> Tensor:
    """Return the features (V, D) of the input's rows, or sums of them, in an array of bytes."""
    flat = flat.view(dtype)
    return flat.as_strided((layout.stack.capacities[0].sources, columns), (layout.feature_bytes // flat.itemsize, 1))
