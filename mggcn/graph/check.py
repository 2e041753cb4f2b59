"""The checks a whole graph must pass before it is stored or trained: structure, features, labels and splits.

Shapes: N vertices, C classes, S splits.
"""

from __future__ import annotations

import re

import numpy as np

from mggcn.errors import GraphError
from mggcn.graph.csr import (
    CSR,
    WINDOW,
    Array,
    Graph,
    Rows,
    check_csr,
    check_finite,
    probably_symmetric,
    probably_transposed,
)

MAX_VERTICES = 2**31 - 1
SPLIT_NAME = re.compile(r"((?:[a-z0-9]+_)*)(train|val|test)")
_VALID = re.compile(r"valid(ation)?$")


def canonical_split(name: str) -> str:
    """Return a split's name with val for valid and validation, as OGB and others call it."""
    return _VALID.sub("val", name)


def check_graph(graph: Graph) -> None:
    """Check all that `Graph` promises and that training relies on.

    Cost: two passes over the edges (a third for a directed graph), one over features and labels, one over every split;
    memory is bounded by a window of edges and N bytes for each split of a family.
    Raises: GraphError at the first promise that does not hold.
    """
    check_structure(graph)
    if isinstance(graph.features, CSR):
        _expect_rows(graph.features.num_rows, graph, "features")
        check_csr(graph.features, "features")
    elif graph.features is not None:
        _check_dense(graph.features, graph)
    if graph.labels is not None:
        _check_labels(graph.labels, graph)
    if graph.ids is not None:
        _expect_rows(graph.ids.shape[0], graph, "ids")
    _check_splits(graph)
    if graph.links:
        _check_links(graph)


def check_structure(graph: Graph) -> None:
    """Check both adjacencies and that they are transposes of each other; raises GraphError."""
    if not 1 <= graph.num_vertices <= MAX_VERTICES:
        raise GraphError(
            f"expected 1 to {MAX_VERTICES} vertices, got {graph.num_vertices}; give num_vertices (--vertices), or drop "
            "unused ids"
        )
    for csr, what in [(graph.adj, "adjacency")] + ([] if graph.symmetric else [(graph.adj_t, "transposed adjacency")]):
        if (csr.num_rows, csr.num_cols) != (graph.num_vertices, graph.num_vertices):
            raise GraphError(
                f"{what} has {csr.num_rows} rows and {csr.num_cols} columns, expected {graph.num_vertices} of both; "
                "one index range must cover sources and targets"
            )
        check_csr(csr, what)
    if graph.symmetric and not probably_symmetric(graph.adj):
        raise GraphError(
            "the graph counts as symmetric (no indptr_t, indices_t) but its adjacency is not; "
            "store the transpose as well, or symmetrize it (`mggcn prepare --symmetrize`)"
        )
    if not graph.symmetric and not probably_transposed(graph.adj, graph.adj_t):
        raise GraphError("indptr_t, indices_t are not the transpose of indptr, indices; prepare the graph again")


def refuse_summed(graph: Graph) -> None:
    """Refuse a graph of which attention cannot know how many parallel edges there are. Raises: GraphError."""
    if graph.repeats == "summed":
        raise GraphError(
            f"edges of {graph.name} repeat, and attention counts each of them, as in PyG and DGL; but their weights were "
            "added up, which does not tell how many there were: load it with weights=None to count them (attention reads "
            'no weights), or with options=GraphOptions(duplicates="merge") where repeated edges are to be one'
        )


def read_split(rows: Rows, split: int) -> Array:
    """Return one split of a family as a bool vector [N]."""
    mask: Array = rows.read(split, split + 1)[0]
    return mask


def index_mask(indices: Array, num_vertices: int, what: str) -> Array:
    """Turn a list of distinct vertex ids into a bool mask [N]; raises GraphError."""
    # numpy.unique hashes and is far slower than a sort.
    ids = np.sort(indices)
    repeats = int(np.count_nonzero(ids[1:] == ids[:-1]))
    if ids.size and (int(ids[0]) < 0 or int(ids[-1]) >= num_vertices):
        raise GraphError(
            f"{what}: expected vertex ids in [0, {num_vertices}), got {ids[0]} to {ids[-1]}; "
            "check num_vertices (--vertices) and whether ids start at 0"
        )
    if repeats:
        raise GraphError(f"{what}: {repeats} vertex ids repeat; list each once (a mask must be bool, not integer)")
    mask = np.zeros(num_vertices, dtype=np.bool_)
    mask[ids] = True
    return mask


def _expect_rows(came: int, graph: Graph, what: str) -> None:
    if came != graph.num_vertices:
        raise GraphError(
            f"{what}: expected one row for each of {graph.num_vertices} vertices, got {came}; "
            "check num_vertices (--vertices) and the order of the file"
        )


def _check_dense(features: Rows, graph: Graph) -> None:
    if len(features.shape) != 2 or features.dtype != np.float32 or features.shape[1] == 0:
        raise GraphError(
            f"features must be float32 of shape [{graph.num_vertices}, D] with D > 0, got {features.dtype} "
            f"of shape {features.shape}; convert them, or leave them out"
        )
    _expect_rows(features.shape[0], graph, "features")
    check_finite(features, "features")


def _check_labels(labels: Rows, graph: Graph) -> None:
    kind = {1: (np.int64,), 2: (np.int8, np.float32)}.get(len(labels.shape), ())
    if labels.dtype not in kind:
        raise GraphError(
            f"labels must be an int64 vector, or a matrix of int8 or float32, got {labels.dtype} of shape {labels.shape}; "
            "convert them"
        )
    _expect_rows(labels.shape[0], graph, "labels")
    if len(labels.shape) == 2:
        _check_entries(labels, graph)
        return
    for start in range(0, labels.shape[0], WINDOW):
        part = labels.read(start, start + WINDOW)
        bad = np.flatnonzero((part < -1) | (part >= graph.num_classes))
        if bad.size:
            todo = "renumber the classes from 0 or give num_classes"
            if part[bad[0]] < 0:
                todo = (
                    "renumber the classes from 0, or say task='numbers' (--task numbers) if they are numbers to predict"
                )
            raise GraphError(
                f"labels must lie in [0, {graph.num_classes}), or be -1 for unlabelled; vertex {start + int(bad[0])} "
                f"has {part[bad[0]]}; {todo}"
            )


def _check_entries(labels: Rows, graph: Graph) -> None:
    """Check a matrix of labels: 0, 1 or -1, or numbers and NaN, in as many columns as the graph says."""
    if labels.shape[1] != graph.num_classes or not labels.shape[1]:
        raise GraphError(
            f"labels have {labels.shape[1]} columns, but num_classes is {graph.num_classes}; leave num_classes out"
        )
    step = max(1, WINDOW // labels.shape[1])
    for start in range(0, labels.shape[0], step):
        part = labels.read(start, start + step)
        good = (part >= -1) & (part <= 1) if graph.task == "labels" else ~np.isinf(part)
        if not good.all():
            row, column = np.argwhere(~good)[0]
            expected = "0, 1 or -1 for unknown" if graph.task == "labels" else "finite, or NaN for unknown"
            raise GraphError(
                f"labels must be {expected}; column {column} of vertex {start + int(row)} holds {part[row, column]}"
            )


def _check_links(graph: Graph) -> None:
    """Check links: training ones, and equally many negatives of all others, between vertices of the graph."""
    if "train" not in graph.links or not graph.links["train"].shape[0]:
        raise GraphError(f"{graph.name} has links to score and none to train on; split its edges again (--links)")
    if graph.labels is not None or graph.splits or graph.num_relations:
        raise GraphError(
            f"{graph.name} has links to predict, and labels, splits or relations beside them; leave them out"
        )
    widths = {name: rows.shape[-1] for name, rows in graph.links.items()}
    scored = {width for name, width in widths.items() if name != "train"}
    if widths["train"] != 2 or len(scored) > 1 or min(scored, default=3) < 3:
        raise GraphError(
            f"links must be two vertices to train, and two and equally many negatives to validate and test, got rows of "
            f"{', '.join(f'{width} ({name})' for name, width in widths.items())}; split the edges again (--links)"
        )
    for name, rows in graph.links.items():
        if len(rows.shape) != 2 or rows.dtype != np.int32:
            raise GraphError(f"links must be int32 rows, {name} holds {rows.dtype} of shape {rows.shape}; convert them")
        step = max(1, WINDOW // rows.shape[1])
        for start in range(0, rows.shape[0], step):
            part = rows.read(start, start + step)
            if part.min() < 0 or part.max() >= graph.num_vertices:
                bad = start + int(np.flatnonzero(((part < 0) | (part >= graph.num_vertices)).any(1))[0])
                raise GraphError(
                    f"{name} link {bad} names a vertex outside 0 .. {graph.num_vertices - 1}; split the edges again "
                    "(--links)"
                )


def known_labels(part: Array) -> Array:
    """Return which rows of labels, of any task, have one that is known: bool (rows,)."""
    known = part >= 0 if part.dtype.kind == "i" else ~np.isnan(part)
    return np.asarray(known if part.ndim == 1 else known.any(1))


def _check_splits(graph: Graph) -> None:
    families: dict[str, dict[str, Rows]] = {}
    for name, rows in graph.splits.items():
        match = SPLIT_NAME.fullmatch(name)
        if match is None:
            raise GraphError(f"split {name!r}: expected train, val or test with an optional prefix such as alt_train")
        if len(rows.shape) != 2 or rows.dtype != np.bool_ or rows.shape[1] != graph.num_vertices or not rows.shape[0]:
            raise GraphError(
                f"split {name!r} must be bool of shape [S, {graph.num_vertices}], got {rows.dtype} "
                f"of shape {rows.shape}; give one mask entry per vertex, one row per split"
            )
        families.setdefault(match[1], {})[match[2]] = rows
    for prefix, family in families.items():
        counts = {rows.shape[0] for rows in family.values()}
        if len(counts) > 1:
            raise GraphError(f"splits {prefix}*: expected equally many of each, got {sorted(counts)}; drop the surplus")
        for split in range(counts.pop()):
            _check_family(
                {part: read_split(rows, split) for part, rows in family.items()},
                f"splits {prefix}train, {prefix}val, {prefix}test",
                split,
                graph,
            )


def _check_family(masks: dict[str, Array], what: str, split: int, graph: Graph) -> None:
    """Check one split: a train part that can be trained on and that shares no vertex with val and test."""
    train = masks.pop("train", None)
    if train is None:
        return
    if graph.labels is not None:
        if not train.any():
            raise GraphError(f"{what}, split {split}: expected train vertices, got none; drop this split")
        unlabelled = np.flatnonzero(train & ~known_labels(graph.labels.read(0, graph.num_vertices)))
        if unlabelled.size:
            raise GraphError(
                f"{what}, split {split}: {unlabelled.size} train vertices have no label, "
                f"the first is {unlabelled[0]}; take them out of the train split"
            )
    for part, mask in masks.items():
        shared = np.flatnonzero(train & mask)
        if shared.size:
            raise GraphError(
                f"{what}, split {split}: {shared.size} vertices are both in train and in {part}, "
                f"the first is {shared[0]}; a score on them would mean nothing: make the splits disjoint"
            )
