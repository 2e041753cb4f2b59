"""The plan of an evaluation by blocks: layer by layer, over some rows at a time with all of their in-neighbours.

N vertices, V rows of this rank, T rows and E edges of a chunk. Needs no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from mggcn.aggregate.base import Matrix
from mggcn.aggregate.local import LocalPlan
from mggcn.backend.cpu.figures import Figures
from mggcn.blocks.block import OWNED, WHOLE, Block, Capacity, RowSet
from mggcn.blocks.capacities import layers_of
from mggcn.blocks.drawn_rows import row_slots
from mggcn.blocks.slot import SlotPlan
from mggcn.config import Config, SampleConfig
from mggcn.memory.arena import ITEM_BYTES, ArenaPlan, BufferSpec, place
from mggcn.memory.device import DEVICES, OPERAND, REAL, STORAGE
from mggcn.memory.units import human
from mggcn.model.builder import Network
from mggcn.model.choices import InputShape
from mggcn.model.lower import Plans, lower
from mggcn.model.network import NETWORKS, Choices, Values, make_values, num_aggregations
from mggcn.model.program import Program
from mggcn.model.runtime import Sizes
from mggcn.model.stages import RESULT, Stages, cut
from mggcn.planning.batches import draws_of
from mggcn.planning.regions import RankSizes
from mggcn.planning.shape import GraphShape
from mggcn.planning.sparse_rows import is_stored

CHUNK_ROWS: Final = 1 << 14
CHUNK_EDGES: Final = 1 << 20
"""Rows and edges that are computed at a time, unless a single row has more edges: some tens of MiB at usual widths, and
enough work for every thread."""
FEATURE_BYTES: Final = 32 << 20
"""Bytes of features of a chunk, where these are converted: fewer rows are computed at a time then, but LEAST_ROWS."""
LEAST_ROWS: Final = 256
INPUT: Final = "input"
"""Name of the features in the type of activations, where an aggregation reads them and they are stored otherwise."""
REORDERED: Final = ("permute", "locality")
"""Orders by which a single rank has the vertices in another order too."""
ROW_BYTES: Final = 104
"""Bytes a row of a chunk, and of the one before: row pointers as they are read and multiplied, ids, and scales."""
EVALUATED_FANOUT: Final = 20
"""In-neighbours of a row that train.evaluate sampled draws in each layer: BatchGNN's."""
TYPED_BYTES: Final = 64
"""Bytes an edge while a chunk's edges are put in order by relation."""


def layer_values(config: Config, shape: GraphShape, network: Network | None = None) -> tuple[Values, tuple[Block, ...]]:
    """Return a model's values over one block for each layer, and the blocks, the input's first; none without a graph.

    The order of a layer's products follows its widths: the narrower side goes through the graph, and is a stage's output.
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

    outputs: the rows that stages write for each other, of all vertices, and the scores that are kept; ranks of a machine
    have them once, in memory that they share, of which each counts its part. chunk: the most rows, sources and edges that
    are computed at a time. features: memory for the features of a chunk, None where they are read in place. scores: of a
    chunk; result: of the rank's vertices, at most.
    """

    values: Values
    blocks: tuple[Block, ...]
    stages: Stages
    programs: tuple[Program, ...]
    whole: Program
    plans: Plans
    outputs: ArenaPlan
    chunk: Capacity
    features: BufferSpec | None
    scores: BufferSpec
    result: BufferSpec
    share: int
    nbytes: int
    drawn: SlotPlan | None = None
    """What drawing in-neighbours takes; None: all of them are read."""

    @property
    def rows(self) -> dict[RowSet, int]:
        """The rank's share of the rows of every layer, as `whole` has them."""
        return dict.fromkeys((self.blocks[0].sources, *(block.targets for block in self.blocks)), self.share)

    @property
    def arena_bytes(self) -> int:
        """The bytes of the arena that a chunk takes."""
        return max(program.arena.nbytes for program in self.programs)

    @property
    def edges_at_once(self) -> int:
        """Edges of a chunk of several rows, at most, without inserted self-loops."""
        return min(CHUNK_EDGES, self.chunk.edges)

    @property
    def matrix(self) -> Matrix:
        """The largest matrix of a chunk."""
        return Matrix(self.chunk.targets, self.chunk.edges)

    def lines(self, ranks: int) -> list[str]:
        """Describe the evaluation: what is computed at a time, and what is in memory between layers."""
        widths = Counter[int]()
        for rows in self.stages.outputs:
            widths[rows.first + 1] += rows.cols * (rows.name != RESULT)
        columns = [f"{cols} columns for sum {number}" for number, cols in widths.items() if cols]
        scored = next((p.spec.rows for p in self.outputs.placements if p.spec.name == RESULT), 0)
        shared = f", once for all ranks, of which each counts 1/{ranks}" if ranks > 1 else ""
        which = f"{EVALUATED_FANOUT} DRAWN in-neighbours a row" if self.drawn else "all in-neighbours"
        return [
            f"evaluation by blocks of {which}, layer by layer: at most {self.chunk.targets:,} rows and "
            f"{self.chunk.edges:,} edges at a time",
            f"  in memory between sums over neighbours: {', '.join(columns)} of all vertices, and scores of {scored:,}; "
            f"at most {human(self.outputs.nbytes)} at once{shared}",
        ]


def plan_blocks(
    config: Config, shape: GraphShape, rows: int, sizes: Sizes, entries: int, network: Network | None = None
) -> BlockEvaluation:
    """Plan an evaluation by blocks on a rank. rows: V; sizes: the rank's; entries: nonzeros with inserted self-loops."""
    values, blocks = layer_values(config, shape, network)
    stages = cut(values.evaluation.roots[0].operands[0], blocks)
    vertices, run = shape.num_vertices, config.run
    at_once, row = min(vertices, CHUNK_ROWS), BufferSpec("", 1, shape.num_features, sizes.dtype).nbytes
    in_place = is_stored(config, shape)
    if not in_place:
        at_once = min(at_once, max(LEAST_ROWS, FEATURE_BYTES // row))
    # Of a graph that is not at hand: a row has at most an edge from each vertex, of each relation.
    longest = vertices * max(shape.num_relations, 1) if shape.longest_row is None else shape.longest_row
    chunk = Capacity(at_once, vertices, min(entries, max(CHUNK_EDGES, longest) + at_once))
    small = Sizes(
        rows=dict.fromkeys((blocks[0].sources, *(b.targets for b in blocks)) if blocks else (OWNED,), at_once),
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
    scored = vertices if shape.num_evaluated is None else shape.num_evaluated
    input_cols = shape.num_features if stages.reads_input and not in_place else 0
    outputs = _outputs(stages, sizes, (vertices, scored), input_cols)
    features = None if in_place else BufferSpec("", at_once, shape.num_features, sizes.dtype)
    # A rank that has all vertices in their order returns the scores that are kept.
    in_order = run.ranks == 1 and run.order not in REORDERED
    scores, result = (BufferSpec("", most, shape.num_classes, sizes.dtype) for most in (at_once, min(rows, scored)))
    drawn = None if config.train.evaluate != "sampled" else _drawing(config, shape, len(blocks), values.typed)
    valued = shape.weighted or drawn is not None
    nbytes = -(-outputs.nbytes // run.ranks) + _chunk_bytes(chunk, run.precision, valued=valued, typed=values.typed)
    nbytes += 0 if drawn is None else drawn.nbytes
    nbytes += scores.nbytes + (0 if features is None else features.nbytes)
    nbytes += 0 if in_order else result.nbytes + 4 * result.rows
    nbytes += (len(blocks) + 1) * vertices  # and which rows each layer computes
    return BlockEvaluation(
        values=values,
        blocks=blocks,
        stages=stages,
        programs=programs,
        whole=whole,
        plans=plans,
        outputs=outputs,
        chunk=chunk,
        features=features,
        scores=scores,
        result=result,
        share=rows,
        nbytes=nbytes,
        drawn=drawn,
    )


def evaluated_sample(config: Config) -> SampleConfig:
    """Return how train.evaluate sampled draws: as the run does, but EVALUATED_FANOUT in-neighbours in every layer."""
    layers = (EVALUATED_FANOUT,) * len(config.sample.fanout)
    return replace(config.sample, fanout=layers, first="drawn", by_type=config.sample.draws_by_type)


def _drawing(config: Config, shape: GraphShape, layers: int, typed: bool) -> SlotPlan:
    draws = draws_of(evaluated_sample(config), shape.num_relations)
    return row_slots(draws, shape.num_vertices, places=shape.weighted or typed)


@dataclass(frozen=True, slots=True)
class _Use:
    """A stage as memory planning sees it."""

    label: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]


def _outputs(stages: Stages, sizes: Sizes, counts: tuple[int, int], input_cols: int) -> ArenaPlan:
    """Place the rows that stages write. counts: of all vertices, and of those whose scores are kept; input_cols: of
    features in the type of activations, 0 for none.
    """
    count, (vertices, scored) = max(stage.number for stage in stages.stages) + 1, counts
    written = [rows for rows in stages.outputs if rows.name != RESULT or scored]
    specs = [
        BufferSpec(
            rows.name,
            scored if rows.name == RESULT else vertices,
            rows.cols,
            sizes.operand if rows.operand else sizes.dtype,
        )
        for rows in written
    ]
    reading = [stage.number for stage in stages.stages if stage.needs_input]
    if input_cols:
        specs.append(BufferSpec(INPUT, vertices, input_cols, sizes.dtype))
    uses = []
    for number in range(count):
        reads = [rows.name for rows in written if rows.first < number <= rows.last]
        writes = [rows.name for rows in written if rows.first == number]
        if input_cols and number <= max(reading):
            (reads if number else writes).append(INPUT)
        uses.append(_Use(f"stage {number}", tuple(reads), tuple(writes)))
    return place(specs, uses)


def _chunk_bytes(chunk: Capacity, precision: str, *, valued: bool, typed: bool) -> int:
    """Return the bytes of a chunk's edges as they are read and as they are multiplied, beside those of the chunk before,
    and of what goes with its rows.
    """
    real, valued = ITEM_BYTES[REAL[precision]], valued or typed
    edge = 3 * 4 + (4 + 2 * real) * valued + TYPED_BYTES * typed
    return chunk.edges * edge + ROW_BYTES * chunk.targets


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoringPlan:
    """How a rank scores its share of all vertices by blocks, with nothing of training. regions: bytes by purpose."""

    evaluation: BlockEvaluation
    regions: Mapping[str, int]
    figures: Figures

    @property
    def total_bytes(self) -> int:
        """Predicted peak of the process, without the scores of all vertices, which whoever asks keeps or writes."""
        return sum(self.regions.values())


def plan_scoring(config: Config, shape: GraphShape, figures: Figures, network: Network | None = None) -> ScoringPlan:
    """Plan the scores of all vertices of a graph on one of a run's ranks. shape: as `in_blocks` gives it.

    figures: of the CPU, by which its kernels are chosen. network: the model, by default that of model.kind.
    """
    run, vertices = config.run, shape.num_vertices
    shape, loops = replace(shape, num_evaluated=0), vertices * config.model.self_loops
    if config.train.evaluate == "sampled":
        config = config.evaluating("blocks")  # scores of all vertices are exact
    sizes = Sizes(rows={}, dtype=STORAGE[run.precision], operand=OPERAND[run.precision], device=DEVICES["cpu"])
    plan = plan_blocks(config, shape, -(-vertices // run.ranks), sizes, shape.num_edges + loops, network)
    chunks = Counter([plan.matrix] if plan.blocks else ())
    rank = RankSizes(
        config=config,
        shape=shape,
        values=plan.values,
        rows=plan.chunk.targets,
        input=replace(plan.values.input, nbytes=0),
        inputs=InputShape(rows=plan.share, cols=shape.num_features, nnz=None, adj_nnz=0, aggregated_nnz=0),
        forward=chunks,
        backward={},
        drawn=chunks,
        pairs=None,
        index_bytes=0,
        assignment_bytes=0,
        figures=figures,
    )
    kernels = {name: nbytes for name, nbytes in rank.regions(0).items() if name == "runtime" or "kernel" in name}
    scales = ITEM_BYTES[REAL[run.precision]] * vertices * (shape.weighted or config.model.self_loops)
    regions = {
        "arena": plan.arena_bytes,
        "weights": rank.weight_bytes + rank.gradient_bytes + rank.operand_bytes,
        "vertex data": scales,
        "evaluation by blocks": plan.nbytes,
        "edges that no file holds": shape.copied_bytes,
        **kernels,
    }
    return ScoringPlan(evaluation=plan, regions=regions, figures=figures)
