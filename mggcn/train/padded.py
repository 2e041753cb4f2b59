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

from mggcn.aggregate.base import padded_rows
from mggcn.aggregate.local import LocalBlock
from mggcn.backend.base import KernelBackend, Sparse
from mggcn.backend.events import Event, Mark
from mggcn.blocks.block import RowSet
from mggcn.blocks.padded import PaddedLayout
from mggcn.errors import PlanError
from mggcn.feed.batch import Batch, BlockEdges, Scales
from mggcn.feed.features import VertexFeatures
from mggcn.feed.norm_scales import NormScales
from mggcn.model.runtime import Rows
from mggcn.train.batches import transposed
from mggcn.train.runtime import DTYPES, RankRuntime
from mggcn.train.targets import SeedLabels, StepTargets

Arrays = Mapping[str, Tensor]
TYPES = {
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
    "float32": torch.float32,
    "float64": torch.float64,
}


class PaddedLoader:
    """Loads the batches of a feed into memory whose addresses do not change.

    features, norm, targets, dtype: as of a BatchLoader. ahead: batches that the feed makes beside the step; with one or
    more the next batch is uploaded during a step, to memory of its own, from which it is copied on the device when the
    step has ended, so that a step that is recorded once reads one place. Memory: the layout's bytes, with `ahead` twice.
    """

    def __init__(
        self,
        runtime: RankRuntime,
        layout: PaddedLayout,
        features: VertexFeatures,
        norm: NormScales | None,
        targets: StepTargets,
        dtype: str,
        ahead: int,
    ) -> None:
        self.runtime: RankRuntime = runtime
        self._layout, self._stack = layout, layout.stack
        self._features, self._norm, self._targets = features, norm, targets
        backend = runtime.backend
        self._read = backend.allocate(layout.nbytes)
        self._sent = backend.allocate(layout.nbytes) if ahead else self._read
        self._arrays = _arrays(self._sent, layout)
        self._inputs = {name: self._rows_of_input(self._arrays[name], dtype) for name in layout.inputs}
        self._labels = _PinnedLabels(backend, layout, ahead + 2)
        self._filled = 0
        """Rows of the input that the last batch has written."""
        self._taken: Event | None = None
        """The point from which the next batch may be sent: None before the first."""
        self._bind(_arrays(self._read, layout), dtype)

    def _rows_of_input(self, array: Tensor, dtype: str) -> Tensor:
        """Return the features (V, D) of the input's rows, or sums of them, in an array of bytes."""
        flat, size = array.view(DTYPES[dtype]), self._stack.capacities[0].sources
        ld = self._layout.feature_bytes // flat.itemsize
        return flat.as_strided((size, self._features.num_features), (ld, 1))

    def _bind(self, arrays: Arrays, dtype: str) -> None:
        """Have the training program read these arrays."""
        runtime, stack = self.runtime, self._stack
        inputs = {name: self._rows_of_input(arrays[name], dtype) for name in self._layout.inputs}
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
        for number, (block, size) in enumerate(zip(stack.blocks, stack.capacities, strict=True)):
            aggregation = runtime.programs["train"].aggregations[block]
            if not isinstance(aggregation, LocalBlock):
                raise PlanError(f"block {block.name!r} does not take edges from a batch")
            back = self._matrix(arrays, f"_t{number}", size.targets) if aggregation.back else None
            aggregation.load(self._matrix(arrays, f"{number}", size.sources), back)

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
        batch.check(self._stack)
        labels = self._labels.write(self._targets.read(batch.rows[self._stack.seeds], batch.seeds))
        backend, stream = self.runtime.backend, self.runtime.backend.upload_stream
        twice = self._sent is not self._read
        # Without a second place, the step that reads the first must have ended.
        after = self._taken if twice else backend.record()
        with stream.working(after):
            self._send(batch, labels)
        sent = stream.record()
        batch.reads.append(sent)
        self._labels.sent(sent)
        sent.wait()
        if twice:
            self._read.copy_(self._sent)
            self._taken = backend.record()

    def _send(self, batch: Batch, labels: Arrays) -> None:
        """Copy a batch to the device and fill it up: work of the upload stream."""
        for name, array in labels.items():
            self._put(name, array)
        self._arrays["mask"][labels["mask"].shape[0] :].zero_()
        self._send_inputs(batch)
        for number, row_set in enumerate(self._stack.rows):
            counted, size = self._arrays[f"counted{number}"], batch.rows[row_set].size
            counted[:size].fill_(1)
            counted[size:].zero_()
            self._send_scales(batch, row_set, number)
        for number, block in enumerate(self._stack.blocks):
            edges, count = batch.edges[block], batch.rows[block.sources].size
            self._send_edges(f"{number}", edges)
            if self._layout.is_transposed(number):
                self._send_edges(f"_t{number}", edges.transposed or transposed(edges, count))

    def _send_inputs(self, batch: Batch) -> None:
        """Copy ids, and what was gathered. Raises: PlanError for sums that the feed has not."""
        ids, given = batch.rows[self._stack.blocks[0].sources], {"features": batch.features, "sums": batch.sums}
        self._put("ids", torch.from_numpy(ids))
        for name, rows in self._inputs.items():
            out, found = rows[: ids.size], given[name]
            if found is None:
                if name == "sums":
                    raise PlanError("the first layer's sums are read from A X, and the feed gathers none of its rows")
                found = torch.from_numpy(self._features.gather(ids))
            if found.stride() == out.stride():  # rows with their padding are one copy
                out, found = padded_rows(out), padded_rows(found)
            out.copy_(found, non_blocking=True)
            rows[ids.size : self._filled].zero_()
        self._filled = ids.size

    def _send_scales(self, batch: Batch, name: RowSet, number: int) -> None:
        both: Scales = None, None
        if batch.scales is not None:
            both = batch.scales[name]
        elif self._norm is not None:
            both = self._norm.of(np.ascontiguousarray(batch.rows[name], np.int64))
        for place, scale in zip((f"row_scale{number}", f"col_scale{number}"), both, strict=True):
            if scale is not None:
                self._put(place, torch.from_numpy(scale))

    def _send_edges(self, name: str, edges: BlockEdges) -> None:
        count, indptr = edges.indices.size, self._arrays[f"indptr{name}"]
        self._put(f"indptr{name}", torch.from_numpy(edges.indptr))
        indptr[edges.indptr.size :].fill_(count)  # rows that fill up have no edges
        self._put(f"indices{name}", torch.from_numpy(edges.indices))
        if self._layout.valued:
            if edges.values is None:
                self._arrays[f"values{name}"][:count].fill_(1)
            else:
                self._put(f"values{name}", torch.from_numpy(edges.values))
        elif edges.values is not None:
            raise PlanError("edges of a batch count other than one, and the plan has no room for what they count")

    def _put(self, name: str, array: Tensor) -> None:
        """Write the first elements of an array on the device."""
        self._arrays[name][: array.shape[0]].copy_(array, non_blocking=True)


class _PinnedLabels:
    """Pinned memory for the labels of some steps in turn: more than batches may be on their way, so that none waits."""

    def __init__(self, backend: KernelBackend, layout: PaddedLayout, count: int) -> None:
        names = ("labels", "mask", "scale")
        places = {name: place for name, place in layout.places().items() if name in names}
        self._memory = [
            {name: backend.pinned(place.end - place.offset).view(TYPES[place.dtype]) for name, place in places.items()}
            for _ in range(count)
        ]
        self._until: list[Mark | None] = [None] * count
        self._at = 0

    def write(self, found: SeedLabels) -> Arrays:
        """Return a step's labels, flat, its mask and its scale in pinned memory."""
        self._at = (self._at + 1) % len(self._memory)
        until, memory = self._until[self._at], self._memory[self._at]
        if until is not None and not until.done():
            until.synchronize()
        arrays = {"labels": found.labels.reshape(-1), "mask": found.mask, "scale": np.array([found.inv_count])}
        for name, array in arrays.items():
            memory[name].numpy()[: array.size] = array
        return {name: memory[name][: array.size] for name, array in arrays.items()}

    def sent(self, event: Mark) -> None:
        """Say from which point on the memory of the last step may be written again."""
        self._until[self._at] = event


def _arrays(flat: Tensor, layout: PaddedLayout) -> Arrays:
    """Return the arrays of a layout in an array of bytes."""
    return {name: flat[place.offset : place.end].view(TYPES[place.dtype]) for name, place in layout.places().items()}
