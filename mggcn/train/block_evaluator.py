"""Evaluation by blocks: layer by layer, over some vertices and all of their in-neighbours at a time, on the host.

What a layer leaves for the next is in memory for all vertices (`StageMemory`); features and edges are read from the graph
where they are. N vertices, M of any split, V of this rank among those, T rows of a chunk, D features, C columns of scores.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mggcn.aggregate.local import LocalBlock
from mggcn.aggregate.relations import upload_tile
from mggcn.backend.base import KernelBackend
from mggcn.blocks.block import RowSet
from mggcn.comm.base import Communicator
from mggcn.comm.shared_memory import shared_memory
from mggcn.feed.drawn_tiles import DrawnTiles
from mggcn.feed.features import VertexFeatures
from mggcn.feed.gather import GatheredRows, stored_rows
from mggcn.feed.norm_scales import NormScales
from mggcn.graph.csr import CSR, Graph
from mggcn.memory.arena import ArenaPlan, Placement
from mggcn.model.program import Program
from mggcn.model.runtime import Inputs, Rows
from mggcn.model.stages import RESULT, Stage, of_all
from mggcn.partition.order import Owners
from mggcn.partition.rows.required import required_sets
from mggcn.partition.rows.shard import ShardOptions
from mggcn.partition.rows.tiles import RowColumnMask, Tile, build_tiles
from mggcn.partition.rows.typed import typed_tiles
from mggcn.planning.block_evaluation import INPUT, BlockEvaluation
from mggcn.train.runtime import BoundProgram, RankRuntime, buffer_view

Mask = npt.NDArray[np.bool_]
Ids = npt.NDArray[np.int64]
Write = Callable[[range, Tensor], object]
"""Takes the scores (T, C) of a range of vertices, which are valid until it returns."""


class StageMemory:
    """Rows of all vertices that stages write for each other, by name: in memory that the ranks of a machine share.

    Every rank writes rows of its own; what it has written, others read after `barrier`. Making it is collective.
    """

    def __init__(self, plan: ArenaPlan, comm: Communicator, backend: KernelBackend) -> None:
        self._comm = comm
        memory = shared_memory(plan.nbytes, comm) if comm.size > 1 else backend.allocate(plan.nbytes)
        self.rows: dict[str, Tensor] = {p.spec.name: buffer_view(memory, p) for p in plan.placements}

    def barrier(self) -> None:
        """Wait until every rank has written and read what it had to. Collective."""
        if self._comm.size > 1:
            self._comm.barrier()


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluatedGraph:
    """What an evaluation reads of the graph: in-edges, features, and the scales of the vertices.

    options: the normalisation of the edges. everyone: all vertices as one rank's, in their order. required: by layer, the
    input's first, which rows the scores depend on, bool (N,), the last those that are evaluated; None: all. drawn: where
    in-edges are drawn, what does it.
    """

    adj_t: CSR
    features: VertexFeatures
    norm: NormScales | None
    options: ShardOptions
    everyone: Owners
    required: Sequence[Mask | None]
    drawn: DrawnTiles | None = None


class BlockEvaluator:
    """Evaluates on one rank: a contiguous share of the vertices, of about equal numbers of edges. Making it is collective.

    runtime: has the weights; arena: serves a chunk.
    """

    def __init__(self, plan: BlockEvaluation, graph: EvaluatedGraph, runtime: RankRuntime, arena: Tensor) -> None:
        backend, comm = runtime.backend, runtime.comm
        self._plan, self._graph, self._backend, self._arena = plan, graph, backend, arena
        self.memory: StageMemory = StageMemory(plan.outputs, comm, backend)
        self._runtime = RankRuntime(
            backend=backend,
            programs={},
            inputs=Inputs(rows={}),
            weights=runtime.weights,
            signals=runtime.signals,
            counts=runtime.counts,
            clock=runtime.clock,
            comm=comm,
        )
        self._edges = LocalBlock(backend, back=False)
        self.spans: tuple[range, ...] = tuple(_spans(graph.adj_t, comm, plan))
        """The ranges of vertices that this rank computes, one after the other."""
        self._mapped = stored_rows(graph.features, backend.dtype)
        spec = plan.features if self._mapped is None else None
        self._gathered = GatheredRows(graph.features, spec, backend.dtype)
        self._scores = buffer_view(backend.allocate(plan.scores.nbytes), Placement(plan.scores, 0, 0, 0))
        # Ids of all vertices, of which nothing reads more than how many there are.
        self._all = torch.zeros(1, dtype=torch.int64).expand(graph.adj_t.num_rows)

    def run(self, write: Write, seed: int = 0) -> None:
        """Compute scores, and give them to `write` range by range. seed: names draws, where in-edges are drawn. Collective.

        Cost: every edge and every row once a layer, as far as the scores depend on them.
        """
        rows = self.memory.rows
        self.memory.barrier()  # what was written last has been read
        # Features that an aggregation reads in another type than they are stored in.
        if INPUT in rows and self._mapped is None:
            for span in self.spans:
                self._graph.features.read_ahead(span)
                rows[INPUT][span.start : span.stop].copy_(self._features_of(span))
            self.memory.barrier()
        for stage, program in zip(self._plan.stages.stages, self._plan.programs, strict=True):
            required = self._graph.required[stage.number]
            for span in self.spans:
                if required is None or required[span.start : span.stop].any():
                    self._compute(stage, program, span, required, seed)
                    if stage.number == len(self._plan.blocks):
                        write(span, self._scores[: len(span)])
            self.memory.barrier()

    def _compute(self, stage: Stage, program: Program, span: range, required: Mask | None, seed: int) -> None:
        """Run a stage over the rows of a span, and write what later stages read of them."""
        count, outputs = len(span), dict[str, Tensor]()
        for name, rows in self.memory.rows.items():
            outputs[name], outputs[of_all(name)] = rows[span.start : span.stop], rows
        outputs[RESULT] = self._scores[:count]
        inside = {
            p.spec.name: buffer_view(self._arena, p)[: count if p.spec.row_set else None]
            for p in program.arena.placements
        }
        aggregations = {}
        if stage.block is not None:
            aggregations[stage.block] = self._edges
            self._load(self._tile(stage.number, span, required, seed))
        self._runtime.inputs = self._inputs(stage, span)
        self._runtime.run(BoundProgram(program, self._arena, aggregations, outputs | inside))

    def _tile(self, layer: int, span: range, required: Mask | None, seed: int) -> Tile:
        """Return the in-edges of a span's rows, as the whole graph's tile has them, or drawn; of rows that are not required
        none.
        """
        graph, options = self._graph, self._graph.options
        if graph.drawn is not None:
            return graph.drawn.tile(seed, layer, span, required)
        build = functools.partial(
            build_tiles,
            owners=graph.everyone,
            rank=0,
            self_loops=options.self_loops,
            dtype=options.dtype,
            threads=options.threads,
            only=RowColumnMask(rows=required),
            span=span,
        )
        (tile,) = typed_tiles(build, graph.adj_t)
        return tile

    def _load(self, tile: Tile) -> None:
        like = None if self._edges.loaded is None else self._edges.loaded[0]
        if tile.types is None:
            self._edges.load(self._backend.sparse(tile.indptr, tile.indices, tile.values, like), None)
        else:
            self._edges.load(upload_tile(self._backend, tile), None)

    def _inputs(self, stage: Stage, span: range) -> Inputs:
        """Return what ops read of a span's rows, and of those of all vertices over an aggregation."""
        some, upload = slice(span.start, span.stop), self._backend.upload
        found = (None, None) if self._graph.norm is None else self._graph.norm.of(np.arange(span.start, span.stop))
        row, col = (None if scale is None else upload(scale) for scale in found)
        dense = whole = None
        if stage.needs_input:
            self._graph.features.read_ahead(span)
            whole = self.memory.rows.get(INPUT) if self._mapped is None else self._mapped
            dense = self._features_of(span) if whole is None else whole[some]
        ids = upload(np.arange(span.start, span.stop))
        rows: dict[RowSet, Rows] = {stage.rows: Rows(ids=ids, row_scale=row, col_scale=col, dense=dense)}
        if stage.block is not None:
            rows[stage.block.sources] = Rows(ids=self._all, dense=whole)
        return Inputs(rows=rows)

    def _features_of(self, span: range) -> Tensor:
        """Return the features (T, D) of a span's rows, in the type of activations."""
        return self._gathered.gather(np.arange(span.start, span.stop))


class SplitScores:
    """Scores of a rank's vertices that are in any split, from those that all ranks compute. Making it is collective.

    ids int64 (V,): these vertices, in the rank's order.
    """

    def __init__(
        self, evaluator: BlockEvaluator, plan: BlockEvaluation, evaluated: Mask | None, ids: Ids, backend: KernelBackend
    ) -> None:
        self._evaluator, self._backend, self._evaluated = evaluator, backend, evaluated
        self._scores = evaluator.memory.rows[RESULT]  # (M, C), of ranks together
        places, first = ids, evaluator.spans[0].start if evaluator.spans else 0
        if evaluated is not None:
            places, first = np.searchsorted(np.flatnonzero(evaluated), ids), int(np.count_nonzero(evaluated[:first]))
        self._firsts: dict[range, int] = {}
        """The place of the first score of each range."""
        for span in evaluator.spans:
            self._firsts[span] = first
            first += len(span) if evaluated is None else int(np.count_nonzero(evaluated[span.start : span.stop]))
        ordered = places.size == self._scores.shape[0] and bool((places == np.arange(places.size)).all())
        self._index = None if ordered else torch.from_numpy(places.astype(np.int32))
        result = dataclasses.replace(plan.result, rows=places.size)
        memory = backend.allocate(0 if ordered else result.nbytes)
        self.result: Tensor = self._scores if ordered else buffer_view(memory, Placement(result, 0, 0, 0))
        """The scores (V, C) of the last evaluation."""

    def run(self, seed: int) -> None:
        """Compute the scores; seed: of this training. Collective. Cost: as `BlockEvaluator.run`."""
        self._evaluator.run(self._write, seed)
        if self._index is not None:
            self._backend.gather_rows(self._scores, self._index, self.result)

    def _write(self, span: range, scores: Tensor) -> None:
        first = self._firsts[span]
        if self._evaluated is None:
            self._scores[first : first + len(span)].copy_(scores)
            return
        some = np.flatnonzero(self._evaluated[span.start : span.stop]).astype(np.int32)
        self._backend.gather_rows(scores, torch.from_numpy(some), self._scores[first : first + some.size])


def required_rows(graph: Graph, evaluated: Mask, layers: int, threads: int) -> tuple[Mask | None, ...]:
    """Return which rows of each layer, the input's first, scores of the `evaluated` vertices depend on; None: all.

    Cost: a sweep over the edges for each layer, unless all vertices are evaluated.
    """
    if evaluated.all():
        return (None,) * (layers + 1)
    return tuple(reversed(required_sets(graph, evaluated, layers + 1, threads)))


def _spans(adj_t: CSR, comm: Communicator, plan: BlockEvaluation) -> Iterator[range]:
    """Yield the ranges of rows that this rank computes one after the other, each within the plan's chunk."""
    pointers, rows = adj_t.indptr.array(), adj_t.num_rows
    shares = [int(np.searchsorted(pointers, adj_t.nnz * rank // comm.size)) for rank in range(comm.size)]
    first, end = ([*shares, rows][comm.rank + place] for place in (0, 1))
    first = 0 if comm.rank == 0 else first
    while first < end:
        most = int(np.searchsorted(pointers, pointers[first] + plan.edges_at_once, side="right")) - 1
        last = min(max(most, first + 1), first + plan.chunk.targets, end)
        yield range(first, last)
        first = last
