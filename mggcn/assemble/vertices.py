"""Scores of some vertices: the model's evaluation over blocks of all in-neighbours, which reads their neighbourhood alone.

Hops are drawn one by one, each into memory for exactly its edges, which row pointers tell beforehand; then the program is
lowered for exactly these rows. So what a call takes is known before it is allocated, and depends on no call before.

N vertices of the graph; T targets, S sources, E edges of a block; K vertices that are scored, C columns of scores.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mggcn.aggregate.local import LocalBlock, LocalPlan
from mggcn.aggregate.relations import upload_tile
from mggcn.assemble.batches import mapped_once, norm_of
from mggcn.assemble.plan import memory_limit, threads_per_rank
from mggcn.backend.base import KernelBackend, LossTarget
from mggcn.backend.cpu.backend import CpuBackend
from mggcn.blocks.block import OWNED, Block, Capacity, RowSet
from mggcn.blocks.draws import ALL, Draws
from mggcn.blocks.sampler import DrawnHop, Sampler
from mggcn.blocks.slot import Slot, SlotPlan
from mggcn.comm.base import Communicator
from mggcn.config import Config, SampleConfig
from mggcn.errors import PlanError
from mggcn.feed.batch import BlockEdges
from mggcn.feed.edge_values import EdgeValues
from mggcn.feed.features import VertexFeatures
from mggcn.feed.gather import GatheredRows
from mggcn.graph.csr import Graph
from mggcn.graph.ids import ids_of
from mggcn.memory.arena import BufferSpec
from mggcn.memory.device import OPERAND, REAL, STORAGE, runtime_bytes, scale_dtype
from mggcn.memory.units import human
from mggcn.model.builder import Network
from mggcn.model.lower import lower
from mggcn.model.program import Program
from mggcn.model.runtime import Inputs, Rows, Sizes
from mggcn.partition.rows.tiles import Tile
from mggcn.planning.batches import reads_weights
from mggcn.planning.block_evaluation import TYPED_BYTES, layer_values
from mggcn.planning.shape import GraphShape
from mggcn.train.runtime import DTYPES, RankRuntime, Weights, bind
from mggcn.train.targets import ClassTarget

Vector = npt.NDArray[Any]
EVERY = Draws(fanouts=(ALL,))
"""A hop of all in-neighbours."""


@dataclass(frozen=True, slots=True)
class _Neighbourhood:
    """All that the scores of some vertices depend on. ids int64 (S,): of the input's rows, first the vertices themselves.

    sizes: rows of each row set, and edges: of each block, those of the vertices themselves first.
    """

    ids: npt.NDArray[np.int64]
    sizes: tuple[int, ...]
    edges: tuple[BlockEdges, ...]


class VertexScorer:
    """Scores vertices of a graph with one set of weights, on one rank of a CPU.

    config: with one rank. num_classes: C of the network. state: weights by name, those of the network among them.
    Memory: the weights; with a norm, under weights of edges or self-loops, the degrees that were read, a number a vertex.
    Raises: ConfigError if the weights are those of another model.
    """

    def __init__(
        self, config: Config, graph: Graph, num_classes: int, network: Network, state: Mapping[str, Tensor]
    ) -> None:
        self.config = config
        model, run = config.model, config.run
        shape = GraphShape(
            name=graph.name,
            num_vertices=graph.num_vertices,
            num_edges=graph.num_edges,
            num_features=graph.num_features,
            num_classes=num_classes,
            symmetric=graph.symmetric,
            num_relations=graph.num_relations,
            repeats=graph.repeats,
        )
        # The order of a layer's products is the same for every neighbourhood.
        self._values, blocks = layer_values(config, shape, network)
        self._blocks = tuple(reversed(blocks))
        typed, self._real = self._values.typed, np.dtype(scale_dtype(run.precision))
        self._graph = graph = mapped_once(graph if typed else graph.untyped())
        adj_t, threads = graph.adj_t, threads_per_rank(config)
        stored = reads_weights(config, adj_t.values is not None, graph.repeats)
        self._indptr = adj_t.indptr.array()
        self._sampler = Sampler(adj_t, EVERY, self_loops=model.self_loops)
        self._edge_values = EdgeValues(
            adj_t,
            SampleConfig(),
            self_loops=model.self_loops,
            corrected=False,
            stored=stored,
            real=self._real,
            num_relations=graph.num_relations if typed else 0,
        )
        self._norm = norm_of(config, graph) if blocks else None
        self._features = VertexFeatures(graph, config.data.row_normalize)
        self._backend: KernelBackend = CpuBackend(DTYPES[STORAGE[run.precision]], threads)
        self._weights = Weights(self._values.parameters, DTYPES[REAL[run.precision]], self._backend)
        self._weights.load_state_dict({name: state[name] for name in self._values.parameters if name in state})

    def scores(self, rows: npt.NDArray[np.int64], comm: Communicator) -> npt.NDArray[Any]:
        """Return the scores (K, C) of vertices in this order, which may repeat, in the type of the weights.

        They are computed together where their neighbourhoods fit into memory, else in halves or theirs.
        Cost: a pass over the edges of the neighbourhood for each sum over neighbours. Raises: PlanError for a vertex whose
        neighbourhood does not fit.
        """
        vertices, places = np.unique(rows, return_inverse=True)
        found: npt.NDArray[Any] = np.concatenate(list(self._parts(vertices.astype(np.int64), comm)))[places]
        return found

    def _parts(self, vertices: npt.NDArray[np.int64], comm: Communicator) -> Iterator[npt.NDArray[Any]]:
        """Yield the scores of the vertices, as many at a time as fit."""
        room = memory_limit(self.config) - runtime_bytes("cpu")
        drawn = self._drawn(vertices, room)
        if drawn is not None:
            yield self._evaluated(*drawn, comm)
            return
        if vertices.size == 1:
            vertex, most = ids_of(self._graph)[vertices[0]], human(max(room, 0))
            raise PlanError(
                f"the neighbourhood of vertex {vertex} alone does not fit into {most}; raise run.memory_limit, or predict "
                "all vertices, on the ranks of the run"
            )
        for part in np.array_split(vertices, 2):
            yield from self._parts(part, comm)

    def _drawn(self, vertices: npt.NDArray[np.int64], room: int) -> tuple[_Neighbourhood, Program, BufferSpec] | None:
        """Return the neighbourhood of vertices, its program, and its features' memory; None if they exceed `room` bytes."""
        ids, sizes, edges, nbytes = vertices, [vertices.size], list[BlockEdges](), 0
        for _ in self._blocks:
            slots = self._slots(ids)
            edge = self._real.itemsize + TYPED_BYTES * self._values.typed
            nbytes += slots.nbytes + edge * slots.capacities[0].edges
            if nbytes > room:
                return None
            drawn = self._sampler.draw(Slot(slots), ids, 0, 0)
            edges.append(self._edges_of(ids, drawn.hops[0]))
            ids = drawn.ids
            sizes.append(ids.size)
        found = _Neighbourhood(ids, tuple(sizes), tuple(edges))
        program = self._program(found)
        dtype = STORAGE[self.config.run.precision]
        features = BufferSpec("", ids.size, self._graph.num_features, dtype)
        nbytes += program.arena.nbytes + features.nbytes
        return None if nbytes > room else (found, program, features)

    def _edges_of(self, targets: npt.NDArray[np.int64], hop: DrawnHop) -> BlockEdges:
        """Return a hop's edges, with what they count and, of means over relations, their types."""
        values = types = None
        if self._edge_values.needed:
            values = np.empty(hop.indices.size, self._real)
            self._edge_values.write(targets, hop, values)
            if (relations := self._edge_values.relations) is not None:
                types = np.empty(values.size, relations.dtype)
                relations.write(targets, hop, values, types, np.zeros(relations.num_relations))
        return BlockEdges(hop.indptr, hop.indices, values, types=types)

    def _slots(self, ids: npt.NDArray[np.int64]) -> SlotPlan:
        """Return the memory that drawing all in-neighbours of some vertices takes at most."""
        num_vertices, loops = self._graph.num_vertices, ids.size * self.config.model.self_loops
        edges = int((self._indptr[ids + 1] - self._indptr[ids]).sum()) + loops
        size = Capacity(ids.size, min(num_vertices, ids.size + edges), edges)
        places = self._edge_values.needed
        return SlotPlan(draws=EVERY, capacities=(size,), num_vertices=num_vertices, places=places, transposed=0)

    def _row_sets(self, sizes: tuple[int, ...]) -> dict[RowSet, int]:
        """Return the number of rows of each row set, the vertices' own first."""
        if not self._blocks:
            return {OWNED: sizes[0]}
        names = [*(block.targets for block in self._blocks), self._blocks[-1].sources]
        return dict(zip(names, sizes, strict=True))

    def _program(self, of: _Neighbourhood) -> Program:
        run = self.config.run
        sizes = Sizes(rows=self._row_sets(of.sizes), dtype=STORAGE[run.precision], operand=OPERAND[run.precision])
        plans: dict[Block, LocalPlan] = {
            block: LocalPlan(Capacity(of.sizes[hop], of.sizes[hop + 1], of.edges[hop].indices.size), back=False)
            for hop, block in enumerate(self._blocks)
        }
        return lower("evaluate", self._values.evaluation, sizes, plans)

    def _evaluated(
        self, of: _Neighbourhood, program: Program, features: BufferSpec, comm: Communicator
    ) -> npt.NDArray[Any]:
        """Run the program over a neighbourhood; return its scores."""
        backend, aggregations = self._backend, dict[Block, LocalBlock]()
        for block, edges in zip(self._blocks, of.edges, strict=True):
            aggregations[block] = LocalBlock(backend, back=False)
            tile = Tile(edges.indptr, edges.indices, edges.values, edges.types)
            aggregations[block].load(upload_tile(backend, tile), None)
        memory = GatheredRows(self._features, features, backend.dtype)
        runtime = RankRuntime(
            backend=backend,
            programs={},
            inputs=self._inputs(of, memory.gather(of.ids)),
            weights=self._weights,
            signals=backend.allocate(0),
            counts=backend.allocate(8 * 9 * self._columns).view(torch.int64).view(3, 3, self._columns),
            clock=backend.allocate(16).view(torch.int64),
            comm=comm,
        )
        bound = bind(program, backend.allocate(program.arena.nbytes), aggregations)
        runtime.run(bound)
        return bound.result.to(self._weights.flat.dtype).numpy().copy()

    @property
    def _columns(self) -> int:
        return self._values.evaluation.roots[0].operands[0].cols

    def _inputs(self, of: _Neighbourhood, dense: Tensor) -> Inputs:
        """Return what ops read of the rows: the rows of every set are the first of the input's."""
        ids = self._backend.upload(of.ids)
        found = (None, None) if self._norm is None else self._norm.of(of.ids)
        scales = [None if scale is None else self._backend.upload(scale) for scale in found]
        # No row counts in any split.
        labels, mask = (torch.zeros(of.ids.size, dtype=dtype) for dtype in (torch.int32, torch.uint8))

        def first(count: int) -> Rows:
            row, col = (None if scale is None else scale[:count] for scale in scales)
            target = ClassTarget(LossTarget(labels[:count], mask[:count], 0.0))
            return Rows(ids=ids[:count], row_scale=row, col_scale=col, dense=dense[:count], target=target)

        return Inputs(rows={name: first(count) for name, count in self._row_sets(of.sizes).items()})
