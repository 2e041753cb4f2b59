"""The shard: what one rank holds of the graph, as host arrays with local ids.

V rows of this rank, P ranks, C classes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mggcn.errors import GraphError
from mggcn.graph.check import known_labels
from mggcn.graph.csr import Graph
from mggcn.partition.base import Partition
from mggcn.partition.order import Assignment
from mggcn.partition.rows.tiles import RowColumnMask, Tile, build_tiles, degrees, scales
from mggcn.partition.rows.typed import typed_tiles

SPLITS = ("train", "val", "test")
"""Bit s of a vertex's mask says whether it belongs to split SPLITS[s]."""
ROWS = 1 << 20
"""Vertices whose labels are read at a time: 8 MiB."""


def split_name(splits: str, name: str) -> str:
    """Return the store's name of a split: "val" of the main family, "alt_val" of the second."""
    return name if splits == "main" else f"alt_{name}"


def training_rows(graph: Graph, splits: str, split: int) -> npt.NDArray[np.bool_] | None:
    """Return which vertices train, bool (N,); None if the graph has no such split. Cost: reads N bytes."""
    rows = graph.splits.get(split_name(splits, "train"))
    if rows is None or split >= rows.shape[0]:
        return None
    return np.ascontiguousarray(rows.read(split, split + 1)[0], np.bool_)


def check_split(graph: Graph, splits: str, split: int) -> None:
    """Refuse a family without training vertices, or a split that it does not have. Raises: GraphError. Cost: none."""
    train = split_name(splits, "train")
    if train not in graph.splits:
        raise GraphError(
            f"{graph.name} has no split {train!r}; it has {', '.join(graph.splits) or 'no splits at all'}; add the masks "
            "when you prepare the graph"
        )
    for name in (split_name(splits, short) for short in SPLITS):
        if name in graph.splits and split >= graph.splits[name].shape[0]:
            raise GraphError(
                f"data.split must be below {graph.splits[name].shape[0]}, the number of {name!r} splits, got {split}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One rank's part of the graph.

    global_ids int64 (V,): original id of each row; owned bool (V,): rows whose vertex is this rank's own, None if all.
    row_scale, col_scale (V,) or None: S_r and S_c; labels int32 (V,), or real (V, T),
    NaN where unknown; mask uint8 (V,), 0 for copies; split_sizes: global.
    """

    rank: int
    global_ids: npt.NDArray[np.int64]
    owned: npt.NDArray[np.bool_] | None
    row_scale: npt.NDArray[Any] | None
    col_scale: npt.NDArray[Any] | None
    labels: npt.NDArray[Any]
    mask: npt.NDArray[np.uint8]
    split_sizes: tuple[int, int, int]

    @property
    def rows(self) -> int:
        return int(self.global_ids.shape[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardOptions:
    """The settings of a run on which a shard depends."""

    aggregates: bool
    norm: str
    self_loops: bool
    splits: str
    split: int
    dtype: str
    threads: int


def build_shard(
    graph: Graph, partition: Partition, rank: int, options: ShardOptions, local_index: Assignment | None = None
) -> Shard:
    """Build what a rank holds of the vertices; its matrices are its strategy's. local_index: the partition's, if known.

    Cost: one sweep over the edges for the degrees; memory is the shard, 6 N bytes of the assignment, N bytes per split
    and chunks of 8 MiB. Raises: GraphError for negative in-degrees, missing splits or labels.
    """
    owners, owned = local_index or partition.local_index(rank), partition.owned(rank)
    ids = owners.owned(rank)
    columns = () if graph.labels is None else graph.labels.shape[1:]
    labels = np.empty((ids.shape[0], *columns), options.dtype if columns else np.int32)
    for chunk, local in _owned_chunks(owners, rank, graph.num_vertices):
        if graph.labels is not None:
            labels[local] = graph.labels.read(chunk.start, chunk.stop)[owners.owner[chunk] == rank]
    if graph.task == "labels":
        labels[labels < 0] = np.nan
    mask, sizes = _split_mask(graph, ids, options)
    if owned is not None:
        mask[~owned] = 0
    _check_labels(graph, ids, labels, mask)
    row_scale = col_scale = None
    if options.aggregates:
        degree = degrees(graph.adj_t, owners, rank, self_loops=options.self_loops, threads=options.threads)
        row_scale, col_scale = scales(degree, options.norm)
        row_scale = row_scale.astype(options.dtype)
        col_scale = None if col_scale is None else row_scale
    return Shard(
        rank=rank,
        global_ids=ids,
        owned=owned,
        row_scale=row_scale,
        col_scale=col_scale,
        labels=labels,
        mask=mask,
        split_sizes=sizes,
    )


def row_tiles(
    graph: Graph, owners: Assignment, rank: int, options: ShardOptions, required: npt.NDArray[np.bool_] | None = None
) -> tuple[tuple[Tile, ...], tuple[Tile, ...]]:
    """Return a rank's rows of A^T, and of A, cut by the owners of the columns; the same tuple if the graph is symmetric.

    required: bool (N,), of A^T the rows, and of A the columns, that are taken: two matrices then, whatever the graph.
    Cost: two sweeps per direction. Raises: GraphError for a tile that is too large.
    """
    build = functools.partial(
        build_tiles,
        owners=owners,
        rank=rank,
        self_loops=options.self_loops,
        dtype=options.dtype,
        threads=options.threads,
    )
    if required is not None:
        rows, cols = RowColumnMask(rows=required), RowColumnMask(cols=required)
        return typed_tiles(functools.partial(build, only=rows), graph.adj_t), typed_tiles(
            functools.partial(build, only=cols), graph.adj
        )
    tiles = typed_tiles(build, graph.adj_t)
    return tiles, tiles if graph.symmetric else typed_tiles(build, graph.adj)


def _owned_chunks(owners: Assignment, rank: int, num_vertices: int) -> list[tuple[slice, npt.NDArray[np.int32]]]:
    """Ranges of ROWS vertices, each with the local ids of those that `rank` owns, in the original order."""
    ranges = [slice(start, min(start + ROWS, num_vertices)) for start in range(0, num_vertices, ROWS)]
    return [(chunk, owners.local[chunk][owners.owner[chunk] == rank]) for chunk in ranges]


def _split_mask(
    graph: Graph, ids: npt.NDArray[np.int64], options: ShardOptions
) -> tuple[npt.NDArray[np.uint8], tuple[int, int, int]]:
    """Read the chosen split: this rank's mask and the global sizes."""
    mask = np.zeros(ids.shape[0], np.uint8)
    sizes = [0, 0, 0]
    check_split(graph, options.splits, options.split)
    for bit, short in enumerate(SPLITS):
        name = split_name(options.splits, short)
        if name not in graph.splits:
            continue
        rows = graph.splits[name]
        chosen = rows.read(options.split, options.split + 1)[0]
        sizes[bit] = int(chosen.sum())
        mask |= chosen[ids].astype(np.uint8) << bit
    if not sizes[0]:
        raise GraphError(
            f"split {options.split} of {graph.name} has no training vertices; choose another with data.split"
        )
    return mask, (sizes[0], sizes[1], sizes[2])


def count_labels(graph: Graph, options: ShardOptions) -> npt.NDArray[np.int64]:
    """Return int64 (3, C): how many vertices of each split (train, val, test) have each class.

    For several labels or numbers per vertex, how many vertices have a known value in each column.

    Cost: one pass over labels and splits.
    """
    counts = np.zeros((3, graph.num_classes), np.int64)
    masks = [graph.splits.get(split_name(options.splits, name)) for name in SPLITS]
    chosen = [None if rows is None else rows.read(options.split, options.split + 1)[0] for rows in masks]
    for start in range(0, graph.num_vertices if graph.labels is not None else 0, ROWS):
        part = graph.labels.read(start, start + ROWS)  # type: ignore[union-attr]
        for count, rows in zip(counts, chosen, strict=True):
            if rows is None:
                continue
            mine = part[rows[start : start + ROWS]]
            if graph.task == "classes":
                count += np.bincount(mine[(mine >= 0) & (mine < graph.num_classes)], minlength=graph.num_classes)
            else:
                count += (mine >= 0 if graph.task == "labels" else ~np.isnan(mine)).sum(0)
    return counts


def _check_labels(
    graph: Graph, ids: npt.NDArray[np.int64], labels: npt.NDArray[Any], mask: npt.NDArray[np.uint8]
) -> None:
    """Training vertices need a label within the classes; others without one leave the mask: no score counts them."""
    if graph.labels is None:
        raise GraphError(
            f"{graph.name} has no labels, so nothing can be trained; add labels when you prepare the graph"
        )
    unlabelled = ~known_labels(labels)
    if graph.task == "classes":
        unlabelled |= labels >= graph.num_classes
    wrong = np.flatnonzero((mask & 1 != 0) & unlabelled)
    if wrong.size and graph.task != "classes":
        raise GraphError(
            f"every training vertex needs a label, vertex {ids[wrong[0]]} has none ({wrong.size} such on this rank); take "
            "them out of the training mask"
        )
    if wrong.size:
        raise GraphError(
            f"every training vertex needs a label in 0 .. {graph.num_classes - 1}, vertex {ids[wrong[0]]} has "
            f"{labels[wrong[0]]} ({wrong.size} such on this rank); take them out of the training mask"
        )
    mask[unlabelled] = 0
