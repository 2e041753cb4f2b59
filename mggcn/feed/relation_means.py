"""What drawn edges count in means over the in-neighbours of each relation.

T targets, E edges of a block, R relations. Source: Schlichtkrull et al. 2018, eq. 2; D_vr is the number of in-neighbours of
v of relation r, or the sum of their weights.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from mggcn import native
from mggcn.blocks.sampler import DrawnHop
from mggcn.config import SampleConfig
from mggcn.errors import GraphError
from mggcn.graph.csr import CSR

Vector = npt.NDArray[Any]


class RelationMeans:
    """Turns what drawn edges count in a sum into weights of means. adj_t: has types.

    sample.weights block: a mean over what was drawn. Else what was drawn stands for all edges and is divided by D_vr, so
    that its expectation is the whole graph's mean: of uniform draws of each relation this is the mean over what was drawn,
    too. Raises: GraphError for edges without types.
    """

    def __init__(self, adj_t: CSR, sample: SampleConfig, num_relations: int) -> None:
        if adj_t.types is None or adj_t.type_degrees is None:
            raise GraphError("means over relations need types of edges, and this graph has none; give edge_types")
        self.num_relations: int = num_relations
        self._types, self._degrees = adj_t.types.array(), adj_t.type_degrees.array()
        self._indptr = adj_t.indptr.array()
        self.dtype: np.dtype[Any] = self._types.dtype
        completed = sample.draws_by_type and (sample.weights == "mean" or not sample.draw.startswith("labor"))
        # D_vr is the number of edges that may be drawn, or, drawn by weight, their sum: else those must be counted.
        counted = adj_t.values is not None and sample.draw != "weight"
        self._mode = 3 if sample.weights == "block" else 0 if not completed else 2 if counted else 1

    def write(self, ids: Vector, hop: DrawnHop, values: Vector, types: Vector, sums: Vector) -> None:
        """Turn the values (E,) of a hop's edges into weights of means, and write the types (E,) of the edges.

        ids (T,): its targets. sums float64 (R,): work space, zero before and after. Cost: a random access for each edge,
        and, of weighted graphs drawn by type, a pass over the targets' rows for each relation that was drawn.
        """
        if hop.types is not None:  # `values` has what their owner has counted
            np.copyto(types, hop.types)
            return
        assert hop.places is not None  # typed batches have them (slot_plan)
        arguments = native.RelationMeansArgs(
            indptr=hop.indptr.ctypes.data,
            place=hop.places.ctypes.data,
            ids=ids.ctypes.data,
            store_indptr=self._indptr.ctypes.data,
            store_types=self._types.ctypes.data,
            store_degrees=self._degrees.ctypes.data,
            draw=None if hop.values is None else hop.values.ctypes.data,
            sums=sums.ctypes.data,
            rows=ids.size,
            bad=-1,
            relations=self.num_relations,
            wide=int(self._types.itemsize == 2),
            mode=self._mode,
        )
        kernel = native.kernel("mggcn_relation_means_", "f64" if values.dtype == np.float64 else "f32")
        kernel(ctypes.byref(arguments), types.ctypes.data, values.ctypes.data)
        if arguments.bad >= 0:
            found = self._types[arguments.bad]
            raise GraphError(
                f"edge {arguments.bad} has type {found}, and the graph {self.num_relations} relations; the store is "
                "damaged: copy or prepare it again"
            )
