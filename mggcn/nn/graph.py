"""A graph on one device, for messages along its edges in a user's own torch module.

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

    Operands of edges have their rows in the order of `edges()`: for a Graph by destination, then by source; for
    `from_edges` and `from_csr` as given. Edges may repeat, and all count; a Graph has them as often as the PyG or DGL graph
    that it was loaded from.

    Cost: 8 bytes for each vertex and 4 for each edge, or 8 with an order of your own; the first gradient by an operand of
    sources adds 8 bytes for each edge, 4 for a symmetric Graph.

    Args:
        graph: A graph from `mggcn.load`.
        device: "cpu", "cuda" or a GPU such as "cuda:1".
        threads: Threads of the CPU's kernels; 0 takes as many as torch.
        backend_of: Kernels other than the device's own, for tests.

    Raises:
        GraphError: `graph` is not a graph.
        BackendError: The device is not there.

    Examples:
        >>> graph = mggcn.nn.DeviceGraph.from_edges(torch.tensor([[0, 2, 1], [1, 1, 0]]))
        >>> graph.num_vertices, graph.num_edges
        (3, 3)
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
        self.by_destination: EdgeRows = EdgeRows(backend.sparse(lists.indptr, lists.sources, None), edge_ids=given)
        """Edges grouped by destination, as reductions walk them."""
        matrix = self.by_destination.matrix
        self.num_vertices: int = matrix.num_rows
        """Number of vertices, N."""
        self.num_edges: int = matrix.nnz
        """Number of edges, E, repeated ones included."""
        self.device: torch.device = matrix.indptr.device
        """Device on which operands must be."""
        self._by_source: EdgeRows | None = None
        self._symmetric = lists.symmetric
        self.edge_weights: Tensor | None = None if lists.weights is None else backend.upload(lists.weights)
        """The stored weights of a Graph's edges, float32 (E,) in the order of `edges()`; None if it has none.

        Numbers of parallel edges are no weights: `edges()` has each of these.
        """

    @classmethod
    def from_edges(cls, edges: Any, *, num_vertices: int | None = None, **options: Any) -> DeviceGraph:
        """Make a graph of an edge list, keeping its order and its repeated edges.

        Cost: a sort of E keys of 8 bytes.

        Args:
            edges: Integers (2, E), sources in row 0, as PyG's edge_index.
            num_vertices: Number of vertices; default: the largest id + 1.
            **options: device, threads.

        Raises:
            GraphError: A shape, a type or an id does not fit.
        """
        return cls(edge_lists.of_edges(edges, num_vertices), **options)

    @classmethod
    def from_csr(cls, indptr: Any, indices: Any, **options: Any) -> DeviceGraph:
        """Make a graph of an adjacency by rows: row u lists the destinations of u's edges, in any order, with repeats.

        Cost: as for `from_edges`.

        Args:
            indptr: Integers (N + 1,).
            indices: Integers (E,).
            **options: device, threads.

        Raises:
            GraphError: As for `from_edges`.
        """
        return cls(edge_lists.of_csr(indptr, indices), **options)

    def edges(self) -> Tensor:
        """Return sources and destinations, int64 (2, E), in the order of the rows of edge operands.

        Cost: 40 bytes for each edge while it runs.
        """
        matrix, given = self.by_destination.matrix, self.by_destination.edge_ids
        vertices = torch.arange(self.num_vertices, device=self.device)
        pairs = torch.stack([matrix.indices.long(), torch.repeat_interleave(vertices, matrix.indptr.diff())])
        if given is None:
            return pairs
        in_order = torch.empty_like(pairs)
        in_order[:, given.long()] = pairs
        return in_order

    @property
    def by_source(self) -> EdgeRows:
        """Edges grouped by source, as gradients by operands of sources walk them. Cost: a sort on first use."""
        if self._by_source is None:
            self._by_source = self._transposed()
        return self._by_source

    def _transposed(self) -> EdgeRows:
        matrix, backend = self.by_destination.matrix, self._any_backend
        indptr, ends, place = edge_lists.by_source(matrix.indptr.cpu().numpy(), matrix.indices.cpu().numpy())
        transposed = matrix if self._symmetric else backend.sparse(indptr, ends, None)
        return EdgeRows(transposed, backend.upload(place), matrix.indptr, self.by_destination.edge_ids)

    def backend(self, dtype: torch.dtype, cols: int) -> KernelBackend:
        """Return the kernels for a storage type and width, for the calling thread.

        Raises:
            BackendError: The device has no kernels for this type.
        """
        backend = self._backend_of(dtype, cols)
        backend.activate()
        return backend

    @property
    def _any_backend(self) -> KernelBackend:
        """Structures are the same for every storage type."""
        return self._backend_of(torch.float32, 1)
