"""The plan of an evaluation by blocks: layer by layer, over some rows at a time with all of their in-neighbours.

N vertices, V rows of this rank, T rows and E edges of a chunk. Needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from mggcn.aggregate.base import Matrix
from mggcn.aggregate.local import LocalPlan
from mggcn.blocks.block import WHOLE, Block, Capacity, RowSet
from mggcn.blocks.capacities import layers_of
from mggcn.config import Config
from mggcn.memory.arena import ITEM_BYTES, ArenaPlan, BufferSpec, place
from mggcn.memory.device import REAL
from mggcn.memory.units import human
from mggcn.model.builder import Network
from mggcn.model.choices import InputShape
from mggcn.model.lower import Plans, lower
from mggcn.model.network import NETWORKS, Choices, Values, make_values, num_aggregations
from mggcn.model.program import Program
from mggcn.model.runtime import Sizes
from mggcn.model.stages import Stages, cut
from mggcn.planning.shape import GraphShape

CHUNK_ROWS: Final = 1 << 14
CHUNK_EDGES: Final = 1 << 20
"""Rows and edges that are computed at a time, unless a single row has more edges: some tens of MiB at usual widths, and
enough work for every thread."""
FEATURE_BYTES: Final = 32 << 20
"""Bytes of features of a chunk, where these are converted: fewer rows are computed at a time then, but LEAST_ROWS."""
LEAST_ROWS: Final = 256
INPUT: Final = "input"
"""Name of the features where they are kept in the type of activations, because an aggregation reads them."""
ASSIGNMENT_BYTES: Final = 6
"""Bytes a vertex by which columns are numbered (partition/order.py)."""
REORDERED: Final = ("permute", "locality")
"""Orders by which a single rank has the vertices in another order too."""
TYPED_BYTES: Final = 64
"""Bytes an edge while a chunk's edges are put in order by relation."""


def layer_values(config: Config, shape: GraphShape, network: Network | None = None) -> tuple[Values, tuple[Block, ...]]:
    """Return a model's values over one block for each layer, and the blocks, the input's first; none without a graph.

    The order of a layer's products follows its widths: the narrower side goes through the graph, and is what is kept.
    """
    model, run, network = config.model, config.run, network or NETWORKS[config.model.kind]
    depth = num_aggregations(network, model, shape.num_features, shape.num_classes, shape.num_relations, sparse=True)
    blocks = layers_of(depth)
    over = blocks or (WHOLE,)
    choices = Choices(
        shape=InputShape(
            rows=shape.num_vertices, cols=shape.num_features, nnz=None, adj_nnz=shape.num_edges, aggregated_nnz=0
        ),
        features="dense",
        products=run.products,
        precision=run.precision,
        num_relations=shape.num_relations,
        counted=shape.repeats == "counted",
        blocks=over,
        evaluated=over,
    )
    return make_values(network, model, shape.num_features, shape.num_classes, choices), blocks


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockEvaluation:
    """How a rank evaluates by blocks. programs: of the stages, over a chunk; whole: all of them over the rank's share of
    the rows, which says what an evaluation costs and sends.

    kept: the rows of all vertices that stages keep, once for all ranks of a machine. chunk: the most rows, sources and
    edges that are computed at a time. features: memory for the features of a chunk, None where they are read in place.
    """

    blocks: tuple[Block, ...]
    stages: Stages
    programs: tuple[Program, ...]
    whole: Program
    plans: Plans
    kept: ArenaPlan
    chunk: Capacity
    features: BufferSpec | None
    result: BufferSpec
    nbytes: int

    @property
    def rows(self) -> dict[RowSet, int]:
        """The rank's share of the rows of every layer, as `whole` has them."""
        return dict.fromkeys((self.blocks[0].sources, *(block.targets for block in self.blocks)), self.result.rows)

    @property
    def edges_at_once(self) -> int:
        """Edges of a chunk of several rows, at most, without inserted self-loops."""
        return min(CHUNK_EDGES, self.chunk.edges)

    @property
    def matrix(self) -> Matrix:
        """The largest matrix of a chunk."""
        return Matrix(self.chunk.targets, self.chunk.edges)

    def lines(self, ranks: int) -> list[str]:
        """Describe the evaluation: what is computed at a time, and what is kept."""
        widths = [f"{rows.label} ({rows.cols})" for rows in self.stages.kept]
        shared = ", which ranks share" if ranks > 1 else ""
        return [
            f"evaluation by blocks of all in-neighbours, layer by layer: at most {self.chunk.targets:,} rows and "
            f"{self.chunk.edges:,} edges at a time",
            f"  rows of all vertices are kept from layer to layer: {', '.join(widths)}; at most "
            f"{human(self.kept.nbytes)} at once{shared}",
        ]


def plan_blocks(
    config: Config, shape: GraphShape, rows: int, sizes: Sizes, entries: int, network: Network | None = None
) -> BlockEvaluation:
    """Plan an evaluation by blocks on a rank. rows: V; sizes: the rank's; entries: nonzeros with inserted self-loops."""
    values, blocks = layer_values(config, shape, network)
    stages = cut(values.evaluation.roots[0].operands[0], blocks)
    vertices, run = shape.num_vertices, config.run
    at_once, row = min(vertices, CHUNK_ROWS), BufferSpec("", 1, shape.num_features, sizes.dtype).nbytes
    stored = shape.feature_nnz is None if shape.in_place is None else shape.in_place
    in_place = stored and sizes.dtype == "fp32" and not config.data.row_normalize
    if not in_place:
        at_once = min(at_once, max(LEAST_ROWS, FEATURE_BYTES // row))
    # A row has at most an edge from each vertex, of each relation.
    longest = vertices * max(shape.num_relations, 1)
    chunk = Capacity(at_once, vertices, min(entries, max(CHUNK_EDGES, longest) + at_once))
    small = Sizes(
        rows={**dict.fromkeys((b.targets for b in blocks), at_once), blocks[0].sources: at_once},
        dtype=sizes.dtype,
        operand=sizes.operand,
        device=sizes.device,
    )
    over = {block: LocalPlan(chunk, back=False) for block in blocks}
    programs = tuple(lower(f"evaluation {s.number}", s.graph, small, over) for s in stages.stages)
    share = Capacity(rows, vertices, -(-entries * rows // max(vertices, 1)))
    plans = {block: LocalPlan(share, back=False) for block in blocks}
    every = Sizes(rows=dict.fromkeys(small.rows, rows), dtype=sizes.dtype, operand=sizes.operand, device=sizes.device)
    whole = lower("evaluate", values.evaluation, every, plans)
    kept = _kept(stages, sizes, vertices, shape.num_features if stages.reads_input and not in_place else 0)
    features = None if in_place else BufferSpec("", at_once, shape.num_features, sizes.dtype)
    # A rank that has all vertices in their order returns the rows that are kept.
    in_order = run.ranks == 1 and run.order not in REORDERED
    result = BufferSpec("", rows, shape.num_classes, sizes.dtype)
    nbytes = kept.nbytes + _chunk_bytes(shape, chunk, run.precision, typed=values.typed)
    nbytes += (0 if features is None else features.nbytes) + (0 if in_order else result.nbytes + 4 * rows)
    nbytes += (ASSIGNMENT_BYTES + len(blocks) + 1) * vertices  # and which rows each layer computes
    return BlockEvaluation(
        blocks=blocks,
        stages=stages,
        programs=programs,
        whole=whole,
        plans=plans,
        kept=kept,
        chunk=chunk,
        features=features,
        result=result,
        nbytes=nbytes,
    )


@dataclass(frozen=True, slots=True)
class _Use:
    """A stage as memory planning sees it."""

    label: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]


def _kept(stages: Stages, sizes: Sizes, vertices: int, input_cols: int) -> ArenaPlan:
    """Place the rows that stages keep; input_cols: of features that are kept, 0 for none."""
    count = max(stage.number for stage in stages.stages) + 1
    specs = [
        BufferSpec(rows.name, vertices, rows.cols, sizes.operand if rows.operand else sizes.dtype)
        for rows in stages.kept
    ]
    reading = [stage.number for stage in stages.stages if stage.needs_input]
    if input_cols:
        specs.append(BufferSpec(INPUT, vertices, input_cols, sizes.dtype))
    uses = []
    for number in range(count):
        reads = [rows.name for rows in stages.kept if rows.first < number <= rows.last]
        writes = [rows.name for rows in stages.kept if rows.first == number]
        if input_cols and number <= max(reading):
            (reads if number else writes).append(INPUT)
        uses.append(_Use(f"stage {number}", tuple(reads), tuple(writes)))
    return place(specs, uses)


def _chunk_bytes(shape: GraphShape, chunk: Capacity, precision: str, *, typed: bool) -> int:
    """Return the bytes of a chunk's edges as they are read and as they are multiplied, and of its rows' ids."""
    real, weighted = ITEM_BYTES[REAL[precision]], shape.weighted or typed
    edge = 8 + (4 + real) * weighted + TYPED_BYTES * typed
    return chunk.edges * edge + 40 * chunk.targets
