"""A graph on one device, for messages along its edges in a torch module of one's own.

Shapes: N vertices, E edges. An edge goes from its source to its destination, where messages are reduced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mggcn.backend.base import KernelBackend
from mggcn.backend.edges import EdgeRows
from mggcn.graph.csr import Graph
from mggcn.nn import edge_lists
from mggcn.nn.devices import BackendOf, backends
from mggcn.nn.edge_lists import EdgeLists


class DeviceGraph:
    """The edges of a graph on one device, grouped by destination and, once a gradient asks for it, by source.

    Args: graph: from `mggcn.load`; device: "cpu", "cuda" or "cuda:1"; threads: of the CPU's kernels, 0 takes torch's;
    backend_of: other kernels than the device's own.
    Operands of edges have their rows in the order of `edges()`: for a Graph by destination, then by source; for
    `from_edges` and `from_csr` as given. A Graph has every edge once; the others may repeat edges, which all count.
    Cost: 8 bytes a vertex and 4 an edge, 8 with an order of one's own; the first gradient by an operand of sources adds
    8 bytes an edge, 4 for a symmetric Graph.
    Raises: GraphError if `graph` is none; BackendError if the device is not there.
    """

    def __init__(
        self,
        graph: Graph | EdgeLists,
        *,
        device: str | torch.device = "cpu",
        threads: int = 0,
        backend_of: BackendOf | None = None,
    ) -> None:
        lists = graph if isinstance(graph, EdgeLists) else edge_lists.of_graph(graph)
        self._backend_of = backend_of or backends(device, threads, lists.sources.size)
        backend = self._any_backend
        given = None if lists.given is None else backend.upload(lists.given)
        self._by_destination = EdgeRows(backend.sparse(lists.indptr, lists.sources, None), edge_ids=given)
        self._by_source: EdgeRows | None = None
        self._symmetric = lists.symmetric
        self._weights = None if lists.weights is None else backend.upload(lists.weights)

    @classmethod
    def from_edges(cls, edges: Any, *, num_vertices: int | None = None, **options: Any) -> DeviceGraph:
        """Make a graph of an edge list, keeping its order and its repeated edges.

        edges: integers (2, E), row 0 the sources, as PyG's edge_index; num_vertices: default the largest id + 1;
        options: device, threads. Cost: a sort of E keys of 8 bytes. Raises: GraphError on shapes, types or ids.
        """
        return cls(edge_lists.of_edges(edges, num_vertices), **options)

    @classmethod
    def from_csr(cls, indptr: Any, indices: Any, **options: Any) -> DeviceGraph:
        """Make a graph of an adjacency by rows: row u lists the destinations of u's edges, in any order, with repeats.

        indptr: integers (N + 1,); indices: integers (E,); options, cost, raises: as `from_edges`.
        """
        return cls(edge_lists.of_csr(indptr, indices), **options)

    @property
    def num_vertices(self) -> int:
        return self._by_destination.matrix.num_rows

    @property
    def num_edges(self) -> int:
        return self._by_destination.matrix.nnz

    @property
    def device(self) -> torch.device:
        """The device on which operands must be."""
        return self._by_destination.matrix.indptr.device

    @property
    def edge_weights(self) -> Tensor | None:
        """The stored weights of a Graph's edges, float32 (E,) in the order of `edges()`; None if it has none."""
        return self._weights

    def edges(self) -> Tensor:
        """Return sources and destinations, int64 (2, E), in the order of the rows of edge operands.

        Cost: 40 bytes an edge while it runs.
        """
        matrix, given = self._by_destination.matrix, self._by_destination.edge_ids
        vertices = torch.arange(self.num_vertices, device=self.device)
        pairs = torch.stack([matrix.indices.long(), torch.repeat_interleave(vertices, matrix.indptr.diff())])
        if given is None:
            return pairs
        in_order = torch.empty_like(pairs)
        in_order[:, given.long()] = pairs
        return in_order

    @property
    def by_destination(self) -> EdgeRows:
        """Edges as reductions walk them."""
        return self._by_destination

    @property
    def by_source(self) -> EdgeRows:
        """Edges as gradients by operands of sources walk them. Cost: on first use that of edge_lists.by_source."""
        if self._by_source is None:
            self._by_source = self._transposed()
        return self._by_source

    def backend(self, dtype: torch.dtype, cols: int) -> KernelBackend:
        """Return the kernels for a storage type and width, for the calling thread. Raises: BackendError for other types."""
        backend = self._backend_of(dtype, cols)
        backend.activate()
        return backend

    @property
    def _any_backend(self) -> KernelBackend:
        """Structures are the same for every storage type."""
        return self._backend_of(torch.float32, 1)

    def _transposed(self) -> EdgeRows:
        matrix, backend = self._by_destination.matrix, self._any_backend
        indptr, ends, place = edge_lists.by_source(matrix.indptr.cpu().numpy(), matrix.indices.cpu().numpy())
        transposed = matrix if self._symmetric else backend.sparse(indptr, ends, None)
        return EdgeRows(transposed, backend.upload(place), matrix.indptr, self._by_destination.edge_ids)
