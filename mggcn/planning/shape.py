"""Sizes of a graph and of its partition that a plan is made from."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from mggcn.config import Config
from mggcn.errors import GraphError
from mggcn.graph.check import refuse_summed
from mggcn.graph.csr import CSR, WINDOW, Graph, Repeats, Task, most_own_entries
from mggcn.graph.nonzeros import features_nnz
from mggcn.graph.splits import evaluated_rows, training_rows
from mggcn.model.builder import Network
from mggcn.model.network import NETWORKS, num_aggregations
from mggcn.partition.base import Partition, PartitionStats
from mggcn.partition.make import stats_of
from mggcn.partition.statistics import estimate_aggregated_nnz
from mggcn.planning.shared import Shared, partition_key


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphShape:
    """Sizes of a graph in a plan: a bare shape, or the counts of a store."""

    name: str
    num_vertices: int
    num_edges: int
    num_features: int
    num_classes: int
    symmetric: bool
    weighted: bool = False
    feature_nnz: int | None = None
    """Nonzeros of sparse features; None: dense."""
    aggregated_nnz: int = 0
    """Estimated nonzeros of A_hat X for sparse features."""
    num_relations: int = 0
    """Relations of the edges; 0: they have no types."""
    repeats: Repeats = ""
    """What values say of repeated edges: numbers of parallel edges, sums of their weights, or nothing."""
    task: Task = "classes"
    """Whether the columns of scores are of classes, several labels a vertex, or numbers."""
    num_training: int | None = None
    """Number of vertices that the loss reads, of a bare shape, or where batches are made of them; None: not known, or read
    from the graph itself. For links, the number of training links."""
    num_scored: int = 0
    """Links of the larger of validation and test."""
    num_scored_pairs: int = 0
    """Validation and test links and all their negatives."""
    copied_bytes: int = 0
    """Bytes of the matrices that batches read and that no file holds as they are, such as those of joined graphs: each rank
    has them in memory of its own."""
    num_evaluated: int | None = None
    """Vertices of any split, whose scores an evaluation by blocks keeps, where batches are made; None: all."""
    longest_row: int | None = None
    """In-edges of the vertex that has most, where an evaluation by blocks is planned; None: not known."""
    in_place: bool | None = None
    """Whether features are rows that can be read where they are stored; None, of a bare shape or without
    batches: where they are dense."""
    own_entries: int = 1
    """The most entries of its own vertex that a row of a batch has under model.self_loops: more than 1 where edges have
    types and a vertex several self-loops; not known of a bare shape."""


REUSE_EDGES = 1 << 26
"""Edges up to which the plan of a run on batches estimates how local the whole graph's gathers are, in some tenths of a
second: only its evaluation has them. Beyond, they count as random."""


def graph_shape(graph: Graph, config: Config) -> GraphShape:
    """Return the sizes of a graph that a plan needs.

    Cost: as `features_nnz`, and for sparse features a sample of A_hat X; for batches of a graph with types of edges and
    self-loops a pass over the edges. Raises: GraphError for a graph without features, unless rows are learned.
    """
    features, learned = graph.features, config.data.learned
    if features is None and not learned:
        raise GraphError(
            f"{graph.name} has no features; give it some: prepare it with --features FILE, degree or identity (in Python: "
            'mggcn.load(..., features="degree")), or learn a row for each vertex: train it with --features learned:64'
        )
    if config.model.attends:
        refuse_summed(graph)
    model = config.model
    nnz = None if features is None or learned else features_nnz(features, config.run.features)
    aggregates = model.aggregates and not model.input_dropout
    training = training_rows(graph, config.data.splits, config.data.split) if config.sample.batch else None
    scored = [rows.shape for name, rows in graph.links.items() if name != "train"]
    if graph.links and training is None:
        num_training: int | None = graph.links["train"].shape[0]
    else:
        num_training = None if training is None else int(training.sum())
    shape = GraphShape(
        name=graph.name,
        num_vertices=graph.num_vertices,
        num_edges=graph.num_edges,
        num_features=learned or graph.num_features,
        num_classes=config.links.embedding if graph.links else graph.num_classes,
        symmetric=graph.symmetric,
        weighted=graph.adj.values is not None,
        num_relations=graph.num_relations,
        repeats=graph.repeats,
        task=graph.task,
        num_training=num_training,
        num_scored=max((rows for rows, _ in scored), default=0),
        num_scored_pairs=sum(rows * (columns - 1) for rows, columns in scored),
        feature_nnz=nnz,
        aggregated_nnz=0
        if nnz is None or not aggregates
        else estimate_aggregated_nnz(graph, self_loops=model.self_loops),
    )
    if not config.sample.batch:
        return shape
    if model.self_loops:
        shape = replace(shape, own_entries=most_own_entries(graph.adj_t))
    return _read_in_place(shape, replace(graph, features=None) if learned else graph, typed=model.typed)


def _read_in_place(shape: GraphShape, graph: Graph, *, typed: bool) -> GraphShape:
    """Return the sizes, with what is known of matrices and features that are read where they are stored."""
    features = graph.features
    copied = (graph if typed else graph.untyped()).adj_t.copied_bytes
    copied += features.copied_bytes if isinstance(features, CSR) else 0
    in_place = features is not None and not isinstance(features, CSR) and not features.copied
    return replace(shape, copied_bytes=copied, in_place=in_place)


def in_blocks(shape: GraphShape, graph: Graph, config: Config) -> GraphShape:
    """Return the sizes that an evaluation by blocks is planned from, beside those of `graph_shape`.

    Cost: a pass over the row pointers, and the splits' masks.
    """
    longest = max(
        (
            int(np.diff(graph.adj_t.read_pointers(row, row + WINDOW + 1)).max(initial=0))
            for row in range(0, graph.num_vertices, WINDOW)
        ),
        default=0,
    )
    evaluated = None
    if not graph.links:  # any vertex may be the end of a link
        evaluated = int(np.count_nonzero(evaluated_rows(graph, config.data.splits, config.data.split)))
    shape = replace(shape, longest_row=longest, num_evaluated=evaluated)
    return _read_in_place(shape, graph, typed=config.model.typed)


def partition_stats(
    config: Config,
    graph: Graph,
    shape: GraphShape,
    partition: Partition,
    network: Network | None = None,
    shared: Shared | None = None,
) -> PartitionStats:
    """Return the sizes of a partition and, if training epochs may skip rows, the rows that they need.

    shape: the graph's. Cost: a few sweeps over the edges, unless an earlier run has shared them.
    """
    model, data = config.model, config.data
    # A sparse input is never A X, nor is a learned one.
    sparse = shape.feature_nnz is not None or config.data.learned > 0
    sizes = (shape.num_features, shape.num_classes, graph.num_relations)
    depth = num_aggregations(network or NETWORKS[model.kind], model, *sizes, sparse=sparse)
    # Links read all vertices, and batches are pruned by themselves.
    pruned = config.run.prune == "auto" and depth > 0 and shape.task != "links" and not config.sample.batch

    def count() -> PartitionStats:
        training = training_rows(graph, data.splits, data.split) if pruned else None
        return stats_of(graph, partition, self_loops=model.self_loops, training=training, depth=depth, reuse=reuse)

    reuse = not config.sample.batch or graph.num_edges <= REUSE_EDGES
    key = partition_key(config), model.self_loops, depth, (data.splits, data.split) if pruned else None, reuse
    return (shared or Shared()).found("statistics", key, count)


def check_shape(shape: GraphShape) -> None:
    """Raise GraphError for counts that are impossible for a graph to train on."""
    if not 1 <= shape.num_vertices < 2**31:
        raise GraphError(f"{shape.name} must have 1 .. 2^31 - 1 vertices (32-bit ids), got {shape.num_vertices:,}")
    most = shape.num_vertices**2 * max(shape.num_relations, 1)
    if not 0 <= shape.num_edges <= most:
        raise GraphError(f"{shape.num_vertices:,} vertices have at most {most:,} edges, got {shape.num_edges:,}")
    if shape.feature_nnz is not None and not 0 <= shape.feature_nnz <= shape.num_vertices * shape.num_features:
        raise GraphError(
            f"{shape.num_vertices:,} x {shape.num_features:,} features have at most "
            f"{shape.num_vertices * shape.num_features:,} nonzeros, got {shape.feature_nnz:,}"
        )
    most = shape.num_edges if shape.task == "links" else shape.num_vertices
    if shape.num_training is not None and not 0 < shape.num_training <= most:
        raise GraphError(f"1 .. {shape.num_vertices:,} of the vertices can train, got {shape.num_training:,}")
    for name in ("num_features", "num_classes"):
        if getattr(shape, name) < 1:
            raise GraphError(
                f"{shape.name} has {name} = {getattr(shape, name)}, training needs at least 1; add "
                f"{'features' if name == 'num_features' else 'labels'} when you prepare the graph"
            )
