"""The plan as text: what `mggcn plan` prints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from mggcn.config import ModelConfig
from mggcn.graph.csr import columns
from mggcn.html import html_table
from mggcn.memory.device import launching
from mggcn.memory.units import human
from mggcn.model.program import Program
from mggcn.partition.cut.partition import CutStats
from mggcn.partition.rows.partition import row_stats
from mggcn.planning.advice import Room, advice, lacking_space, smallest_ranks
from mggcn.planning.batch_rows import fetch_lines
from mggcn.planning.batches import batch_lines, first_lines
from mggcn.planning.history import history_lines
from mggcn.planning.learned import learned_lines
from mggcn.planning.record import layer_reasons
from mggcn.planning.run import RankPlan, RunPlan
from mggcn.planning.shape import GraphShape
from mggcn.planning.sparse_rows import sparse_rows

SHOWN_TILES = 8
"""Ranks up to which every tile is listed."""


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Return lines of aligned columns: text left, numbers right."""
    cells = [[str(c) for c in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(header), *cells]) for i in range(len(header))]
    right = [all(row[i][:1].isdigit() for row in cells) for i in range(len(header))]
    return [
        "  " + "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)).rstrip()
        for row in [list(header), *cells]
    ]


def render(
    plan: RunPlan, limit: int | None = None, notes: Sequence[str] = (), explain: bool = False, room: Room | None = None
) -> str:
    """Return the plan as text; with `limit` bytes per rank, the verdict first. notes: lines at its end, such as its cost.

    room: as for `advice`. explain: also what each rewrite of the model did, and the resulting ops.
    """
    config, rank = plan.config, plan.largest
    lines = [
        *([] if limit is None else [verdict(plan, limit, room), ""]),
        *subject(plan),
        "",
        "order of products",
        *(f"  {line}" for line in layer_reasons(plan)),
        *_training_rows(plan),
        *_batches(plan),
        *learned_lines(config, plan.shape, rank.learned),
        *(_explained(rank, plan) if explain else []),
        "",
        f"rank {rank.rank}{', the largest' if len(plan.ranks) > 1 else ''}: {rank.sizes.owned:,} rows, "
        f"{rank.nnz:,} nonzeros",
        "",
        *([] if plan.on_disk else [*_buffers(rank.train), ""]),
        *_regions(plan, rank),
        "",
        *_epoch(rank, "step" if plan.config.sample.batch else "epoch"),
        *([f"  {how}"] if (how := launching(config)) else []),
    ]
    if len(plan.ranks) > 1:
        lines += ["", *_ranks(plan), "", *_tiles(plan)]
    if notes:
        lines += ["", *notes]
    return "\n".join(lines)


def subject(plan: RunPlan) -> tuple[str, str]:
    """Describe the subject of a plan in words: the graph, and the model with ranks, strategy and order."""
    config, shape = plan.config, plan.shape
    widths = " -> ".join(str(w) for w in (shape.num_features, *config.model.hidden, shape.num_classes))
    model = ", ".join([f"{config.model.kind} {widths}", *_around(config.model)])
    features = "dense" if shape.feature_nnz is None else f"sparse, {shape.feature_nnz:,} nonzeros"
    features = "learned" if config.data.learned else features
    return (
        f"{shape.name}: {shape.num_vertices:,} vertices, {shape.num_edges:,} edges "
        f"({'symmetric' if shape.symmetric else 'directed'}{', weighted' if shape.weighted else ''}"
        f"{f', {shape.num_relations} relations' if shape.num_relations else ''}), "
        f"{shape.num_features:,} features ({features}), {columns(shape.task, shape.num_classes)}",
        f"{model}, {config.run.precision}, {len(plan.ranks)} rank{'s' * (len(plan.ranks) > 1)} on {config.run.device}, "
        f"{_strategy(plan)}{_unread(config.model, shape)}",
    )


def _around(model: ModelConfig) -> list[str]:
    """The settings of a model besides kind and widths, where they are not the defaults."""
    heads = f"{model.heads} heads" if model.heads > 1 else ""
    aggregator = model.aggregator if model.kind == "sage" and model.aggregator != "gcn" else ""
    norm = f"{model.norm_layer} norm" if model.norm_layer != "none" else ""
    residual = f"{model.residual} residual" if model.residual != "none" else ""
    jumping = f"jumping {model.jumping}" if model.jumping != "last" else ""
    return [word for word in (aggregator, heads, norm, residual, jumping) if word]


def _unread(model: ModelConfig, shape: GraphShape) -> str:
    """What the graph's edges have and the model does not read."""
    read = model.attends and shape.repeats == "counted"
    weights = shape.weighted and not read and (model.attends or not model.aggregates or model.aggregator == "max")
    types = shape.num_relations and model.kind != "rgcn"
    names = " and ".join([*["weights"] * bool(weights), *["types"] * bool(types)])
    return f"; {names} of edges are not read" if names else ""


@dataclass(frozen=True, slots=True)
class PrintedPlan:
    """The plan of a run, which prints as text."""

    run: RunPlan

    def __str__(self) -> str:
        return render(self.run)

    def __repr__(self) -> str:
        """Return the plan in short; `print` shows it all."""
        return f"<Plan of {', on '.join(reversed(subject(self.run)))}; predicted peak {self._peak}>"

    def _repr_html_(self) -> str:
        """Return a table for notebooks, with the whole plan to unfold."""
        graph, network = subject(self.run)
        short = html_table("Plan", {"graph": graph, "model": network, "predicted peak": self._peak})
        return (
            f"{short}<details><summary>every buffer, byte and message</summary><pre>{escape(str(self))}</pre></details>"
        )

    @property
    def _peak(self) -> str:
        return ", ".join(filter(None, [f"{human(self.run.largest.total_bytes)} per rank", self.run.elsewhere]))


def _strategy(plan: RunPlan) -> str:
    """Name the strategy, and say whether its gradients are those of the whole graph."""
    run = plan.config.run
    if plan.stats.kind == "rows":
        return f"order {run.order}, strategy {run.strategy}"
    name = f"strategy {run.strategy}, {'0c' if run.delay == 'none' else f'cd-{run.delay}'}"
    if plan.ranks[0].aggregation.exact:
        return name
    return f"{name}: training gradients are APPROXIMATE (sums over neighbours are partial or late), evaluation is exact"


def _training_rows(plan: RunPlan) -> list[str]:
    """List the rows that every aggregation of a training epoch computes, with the reason; empty without aggregations."""
    vertices, entries = plan.shape.num_vertices, plan.stats.num_entries
    rows = [
        (
            f"layer {layer.layer}",
            _of(layer.rows, vertices),
            _of(layer.nnz, entries),
            "all rows" if layer.block.hops is None else "these rows alone",
            layer.reason,
        )
        for layer in plan.ranks[0].rows
    ]
    if not rows:
        return []
    kind = "" if plan.stats.exact else " (expected of random training vertices)"
    return [
        "",
        f"aggregations of a training epoch{kind}",
        *table(("", "rows required", "nonzeros", "computed", "since"), rows),
    ]


def _batches(plan: RunPlan) -> list[str]:
    """Describe the batches of an epoch, if it is not one step over the whole graph."""
    if plan.stack is None or not plan.config.sample.batch:
        return []
    rank = plan.largest
    nbytes = rank.regions["batches on their way"]
    evaluated = [] if rank.by_blocks is None else ["", *rank.by_blocks.lines(len(plan.ranks))]
    sparse = sparse_rows(plan.config, plan.shape, plan.stack, rank.values)
    stored, pinned = rank.values.reads_stored, rank.pinned_bytes
    lines = batch_lines(plan.config, plan.shape, plan.stack, plan.steps, nbytes, pinned, sparse, stored=stored)
    fetched = rank.regions.get("rows of other ranks", 0)
    lines += fetch_lines(plan.config, plan.shape, rank.sizes.owned, fetched)
    cached = history_lines(plan.config, plan.shape, plan.steps, rank.train, rank.training, rank.sizes.operand)
    return ["", *lines, *cached, *evaluated]


def _explained(rank: RankPlan, plan: RunPlan) -> list[str]:
    """List what the rewrites did to the model, and the ops of a training epoch with the buffers that they read and
    write.
    """
    ops = [(op.label, ", ".join(op.reads) or "-", ", ".join(dict.fromkeys(op.writes)) or "-") for op in rank.train.ops]
    cached = [] if plan.stack is None else first_lines(plan.config, plan.shape)
    return [
        *(["", *cached] if cached else []),
        "",
        "rewrites of the model",
        *(f"  {line}" for line in rank.values.explained),
        "",
        "ops of a training epoch",
        *table(("op", "reads", "writes"), ops),
    ]


def _of(count: int | None, total: int) -> str:
    return "-" if count is None else f"{count:,} ({count / max(total, 1):.1%})"


def _buffers(program: Program) -> list[str]:
    """The arena of a training epoch, buffer by buffer."""
    rows = [
        (
            p.spec.name,
            f"{p.spec.rows:,}",
            p.spec.cols,
            p.spec.dtype,
            p.spec.lifetime,
            f"{program.ops[p.first].label} .. {program.ops[p.last].label}",
            f"{p.offset:,}",
            f"{p.spec.nbytes:,}",
        )
        for p in sorted(program.arena.placements, key=lambda p: (p.first, p.offset))
    ]
    header = ("buffer", "rows", "width", "type", "lifetime", "live from .. to", "offset", "bytes")
    return ["buffers of a training epoch", *table(header, rows)]


def _regions(plan: RunPlan, rank: RankPlan) -> list[str]:
    rows = [(name, f"{nbytes:,}", human(nbytes)) for name, nbytes in rank.regions.items()]
    rows.append(("predicted peak", f"{rank.total_bytes:,}", human(rank.total_bytes)))
    paper = f"L + {3 if rank.ranks > 1 else 1}"
    names = {"evaluate": "evaluation", "setup": "set-up", "exact": "the exact gradient"}
    notes = [f"{names[p.name]} {human(p.arena.nbytes)}" for p in rank.programs.over_whole if p.name in names]
    if rank.programs.stages:
        most = max(program.arena.nbytes for program in rank.programs.stages)
        notes = [f"a chunk of the evaluation {human(most)}", *notes]
    return [
        "memory",
        *table(("region", "bytes", ""), rows),
        f"  the arena serves training {human(rank.train.arena.nbytes)}, {', '.join(notes)}; MG-GCN's {paper} buffers "
        f"would take {human(rank.paper_bytes)}"
        if rank.disk is None
        else f"  the arena holds what a stage reads and writes at a time; in memory training would take "
        f"{human(rank.train.arena.nbytes)}",
        f"  set-up needs {human(rank.setup_bytes)} before the first epoch",
        *_nccl(plan, rank),
    ]


def _nccl(plan: RunPlan, rank: RankPlan) -> list[str]:
    """Say whether the bytes of NCCL are measured or estimated; nothing without it."""
    if "NCCL" not in rank.regions:
        return []
    sizes, found = plan.nccl.sizes, plan.nccl.found(rank.ranks)
    if found is not None:
        return [f"  NCCL's bytes are as measured between {found.ranks} ranks"]
    return [
        f"  NCCL's bytes are an estimate, for {sizes.channels} channels, {sizes.p2p_channels} of them to each peer; "
        "mggcn tune measures them"
    ]


def _epoch(rank: RankPlan, training: str) -> list[str]:
    return [
        f"per {training}",
        f"  training    {rank.num_spmm} SpMMs, {rank.messages(rank.train)} messages, "
        f"{rank.bytes_sent(rank.train):,} bytes sent ({human(rank.bytes_sent(rank.train))})",
        f"  evaluation  {rank.evaluate_spmm} SpMMs, {rank.messages(rank.evaluate)} messages, "
        f"{rank.bytes_sent(rank.evaluate):,} bytes sent ({human(rank.bytes_sent(rank.evaluate))})",
        *_moved(rank),
    ]


def _moved(rank: RankPlan) -> list[str]:
    """Say what a rank has on disk and moves; nothing where its rows are in memory."""
    if rank.disk is None:
        return []
    programs = [("training", rank.disk.programs["train"]), ("evaluation", rank.disk.programs["evaluate"])]
    moved = [f"{name} reads {human(one.read)} and writes {human(one.written)}" for name, one in programs]
    return [f"  on disk     {human(rank.disk.file_bytes)}; {', '.join(moved)}"]


def _ranks(plan: RunPlan) -> list[str]:
    rows = [
        (
            r.rank,
            f"{r.sizes.owned:,}",
            f"{r.nnz:,}",
            human(r.arena_bytes),
            human(r.total_bytes),
            human(plan.steps * r.bytes_sent(r.train)),
        )
        for r in plan.ranks
    ]
    return ["ranks", *table(("rank", "rows", "nonzeros", "arena", "predicted peak", "sent per epoch"), rows)]


def _tiles(plan: RunPlan) -> list[str]:
    if isinstance(plan.stats, CutStats):
        return _cut(plan.stats)
    statistics = row_stats(plan.stats).tiles
    kind = "counted" if statistics.exact else "expected"
    lines = [
        f"tiles ({kind}): the busiest ranks of the stages take {statistics.critical_path_over_ideal:.3f} times an even "
        f"share; the largest tile has {statistics.nnz.max():,} nonzeros"
    ]
    if len(plan.ranks) > SHOWN_TILES:
        return lines
    names = ["rows of \\ from", *(f"rank {r.rank}" for r in plan.ranks)]
    for title, matrix in (("nonzeros", statistics.nnz), ("rows needed", statistics.rows_needed)):
        rows = [(f"rank {i}", *(f"{int(n):,}" for n in row)) for i, row in enumerate(matrix)]
        lines += [f"  {title}", *table(names, rows)]
    return lines


def _cut(stats: CutStats) -> list[str]:
    """Statistics of the vertex cut."""
    kind = "counted" if stats.exact else "expected"
    lines = [
        f"vertex cut ({kind}): {stats.replication:.3f} copies of a vertex on average, {stats.split_share:.1%} of the "
        f"vertices are split, fullest part over the average {stats.edge_balance:.4f}"
    ]
    leaves = stats.leaves.sum(0)
    if len(leaves) > SHOWN_TILES:
        return lines
    names = ["leaves of \\ root on", *(f"rank {rank}" for rank in range(len(leaves)))]
    rows = [(f"rank {rank}", *(f"{int(n):,}" for n in row)) for rank, row in enumerate(leaves)]
    return [*lines, "  leaves", *table(names, rows)]


def verdict(plan: RunPlan, limit: int, room: Room | None = None) -> str:
    """Say whether every rank fits into `limit` bytes, the smallest number of ranks that does, or what would fit."""
    need = plan.largest.total_bytes
    if lacking := lacking_space(plan):
        return f"does not fit: {lacking}"
    if need > limit:
        return f"does not fit: {human(need)} of {human(limit)} per rank; {advice(plan, limit, room)}"
    least = smallest_ranks(plan, limit)
    fewest = f"; {least} with as much memory each would do" if least < len(plan.ranks) else ""
    elsewhere = f", with {plan.elsewhere}" if plan.elsewhere else ""
    return f"fits: {human(need)} of {human(limit)} per rank{elsewhere}{fewest}"
