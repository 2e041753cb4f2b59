"""The order `stream`: parts of the vertices with fewer edges between them, found in one pass over the rows.

N vertices, M edges, P parts.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mggcn import native
from mggcn.errors import ConfigError
from mggcn.graph.csr import Graph
from mggcn.partition.locality.chunks import both_directions, row_chunks
from mggcn.partition.metis.edge_cut import EdgeCut, edge_cut
from mggcn.partition.order import MAX_PARTS
from mggcn.partition.sweep import EDGES, ROWS

UNKNOWN = 0xFFFF
"""Part of a vertex whose row has not come yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamSettings:
    """Settings that determine the parts: with the same graph, the same bits."""

    parts: int
    """Number of parts P, in 1 .. 1024."""

    def __post_init__(self) -> None:
        if not 1 <= self.parts <= MAX_PARTS:
            raise ConfigError(f"a stream makes 1 to {MAX_PARTS} parts, got {self.parts}")

    @property
    def name(self) -> str:
        """Name of the cut's folder."""
        return f"stream-{self.parts}"


def stream_nbytes(num_vertices: int, num_stored: int, symmetric: bool) -> dict[str, int]:
    """Return the memory of `stream` at its peak, by purpose, without that of its statistics."""
    matrices = 1 if symmetric else 2
    rows, entries = min(ROWS, num_vertices), min(EDGES, num_stored * matrices)
    return {"parts": 2 * num_vertices, "rows": 24 * matrices * (rows + 1) + 8 * entries}


def stream(graph: Graph, settings: StreamSettings) -> EdgeCut:
    """Assign every vertex to a part when its row comes, in the order of the store.

    A vertex goes where most of its neighbours are that came before, less a price that rises with what a part has:
    alpha 1.5 sqrt(load), alpha = sqrt(P) M / N^1.5. Load is nonzeros, as METIS counts them, over their average: no part
    has more than 1.05 times its share, but for one vertex. Parts differ in their number of rows.
    Cost: one sweep over the edges on one thread, 2 N bytes, then the statistics.
    Source: Tsourakakis et al., "Fennel: streaming graph partitioning for massive scale graphs", WSDM 2014.
    """
    return edge_cut(graph, stream_parts(graph, settings.parts), settings.parts)


def stream_parts(graph: Graph, parts: int) -> npt.NDArray[np.uint16]:
    """Return the part of every vertex, uint16 (N,)."""
    num, matrices = graph.num_vertices, both_directions(graph)
    entries = sum(matrix.nnz for matrix in matrices)
    edges = entries / 2 if graph.symmetric else graph.adj.nnz
    per_row = len(matrices)  # its self-loop
    owner = np.full(num, UNKNOWN, np.uint16)
    load, count = np.zeros((2, parts), np.int64)
    cost, met = np.zeros(parts, np.float64), np.empty(parts, np.uint16)
    arguments = native.StreamArgs(
        *(array.ctypes.data for array in (owner, load, count, cost, met)),
        parts,
        per_row,
        (per_row * num + entries) * 105 // (100 * parts),
        1.5 * math.sqrt(parts) * edges / num**1.5,
        (per_row * num + entries) / num,
    )
    kernel = native.kernel("mggcn_stream")
    for chunk in row_chunks(matrices, 1):
        kernel(chunk.pointer, ctypes.byref(arguments))
    return owner
