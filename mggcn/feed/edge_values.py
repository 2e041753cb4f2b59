"""What drawn edges count in sums over neighbours: their weights, and what stands for the edges that were not drawn.

T targets, E edges of a block.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from mggcn import native
from mggcn.blocks.sampler import DrawnHop
from mggcn.config import SampleConfig
from mggcn.feed.relation_means import RelationMeans
from mggcn.feed.shared import in_order
from mggcn.graph.csr import CSR

Vector = npt.NDArray[Any]


class EdgeValues:
    """What drawn edges count. real: the type of values.

    corrected: whether sums over neighbours read values, which then stand for the edges that were not drawn; stored: whether
    they read the weights of edges; num_relations: of means over the neighbours of each relation, 0 of others.
    """

    def __init__(
        self,
        adj_t: CSR,
        sample: SampleConfig,
        *,
        self_loops: bool,
        corrected: bool,
        stored: bool,
        real: npt.DTypeLike,
        num_relations: int = 0,
    ) -> None:
        self.sample: SampleConfig = sample
        self.real: npt.DTypeLike = real
        typed = num_relations > 0
        self.relations: RelationMeans | None = RelationMeans(adj_t, sample, num_relations) if typed else None
        self.needed: bool = stored or typed or (corrected and sample.weights != "block")
        """Whether edges of a batch have values at all."""
        by_weight = sample.draw == "weight" and sample.weights != "block"
        weights = adj_t.values if stored or by_weight else None
        self._arrays = adj_t.indptr.array(), adj_t.indices.array(), None if weights is None else weights.array()
        self._store_at = [None if of is None else of.ctypes.data for of in self._arrays]
        whole = sample.weights == "mean" or (sample.weights == "unbiased" and not sample.draw.startswith("labor"))
        self._drawn = sample.weights != "block" and (corrected or by_weight)
        self._flags = int(self_loops), int(corrected and whole and not (typed and sample.draws_by_type)), int(by_weight)

    def write(self, ids: Vector, hop: DrawnHop, out: Vector, out_t: Vector | None = None) -> None:
        """Write the values (E,) of a hop's edges, and those of its transpose if asked for; ids (T,): its targets."""
        if hop.counted is not None:
            np.copyto(out, hop.counted)
            if out_t is not None and hop.transposed is not None:
                order = hop.transposed.order
                in_order(out, order, out_t[: order.size])
            return
        indptr, indices, weights = self._store_at
        loops, normalised, by_weight = self._flags
        draw = hop.values if self._drawn else None
        arguments = native.BlockValuesArgs(
            store_indptr=indptr,
            ids=ids.ctypes.data,
            indptr=hop.indptr.ctypes.data,
            place=None if hop.places is None else hop.places.ctypes.data,
            store_indices=indices,
            indices=hop.indices.ctypes.data,
            weights=weights,
            draw=None if draw is None else draw.ctypes.data,
            degrees=hop.degrees.ctypes.data,
            order=None if out_t is None or hop.transposed is None else hop.transposed.order.ctypes.data,
            values_t=None if out_t is None else out_t.ctypes.data,
            rows=ids.size,
            self_loops=loops,
            normalised=normalised,
            by_weight=by_weight,
        )
        kernel = native.kernel("mggcn_block_values_", "f64" if out.dtype == np.float64 else "f32")
        kernel(ctypes.byref(arguments), out.ctypes.data)
