"""Graphs from arrays in memory and from SciPy matrices. Objects of graph libraries: objects.py.

torch is not imported: its tensors are read through the few attributes that `to_numpy` names.
Shapes: N vertices, E edges, D features, S splits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from operator import index
from typing import Any

import numpy as np
import scipy.sparse as sp

from mggcn.errors import ConfigError, GraphError
from mggcn.graph.build.room import IN_MEMORY, Room
from mggcn.graph.check import check_graph
from mggcn.graph.class_names import check_count, given_names, numbered_labels
from mggcn.graph.csr import COLUMNS, Array, ArrayRows, Graph, Repeats, Task
from mggcn.graph.edges import Edges, Entries, Survey, of_matrix
from mggcn.graph.file_rows import FileRows
from mggcn.graph.ids import as_ids, check_ids
from mggcn.graph.options import DEFAULT_OPTIONS, GraphOptions
from mggcn.graph.structure import build_adjacency, check_columns, edges_of
from mggcn.graph.table_columns import check_frame
from mggcn.graph.vertex_data import (
    as_array,
    as_features,
    as_labels,
    as_splits,
    is_sparse,
    made_features,
    normalized_rows,
    to_numpy,
    with_unknown,
)

COMPLETING = (
    "features",
    "labels",
    "splits",
    "weights",
    "edge_types",
    "num_vertices",
    "num_classes",
    "class_names",
    "num_relations",
    "task",
    "options",
    "name",
)
"""Arguments of the public API that complete a source."""


def check_arguments(arguments: Mapping[str, Any], more: tuple[str, ...] = ()) -> None:
    """Refuse arguments beside a source that are unknown or of the wrong kind; arrays are checked where they are read.

    Raises: ConfigError, which lists the known ones.
    """
    known = (*COMPLETING, *more)
    if unknown := sorted(arguments.keys() - set(known)):
        raise ConfigError(f"load() has no argument {', '.join(unknown)}; known are {', '.join(known)}")
    options, splits = arguments.get("options", DEFAULT_OPTIONS), arguments.get("splits")
    if arguments.get("task") not in (None, *COLUMNS):
        raise ConfigError(f"task must be one of {', '.join(COLUMNS)}, got {arguments['task']!r}; or leave it out")
    if not isinstance(options, GraphOptions):
        raise ConfigError(f"options must be mggcn.GraphOptions(...), got {type(options).__name__}")
    if splits is not None and not (isinstance(splits, Mapping) and all(isinstance(name, str) for name in splits)):
        raise ConfigError(f'splits must be a mapping from names, as {{"train": mask}}, got {type(splits).__name__}')
    check_ids(arguments.get("ids"))
    for name in ("num_vertices", "num_classes", "num_relations"):
        try:
            index(0 if arguments.get(name) is None else arguments[name])
        except TypeError as error:
            raise ConfigError(f"{name} must be an integer, got {arguments[name]!r}") from error


def from_arrays(
    *,
    edges: Any = None,
    weights: Any = None,
    edge_types: Any = None,
    adj: Any = None,
    num_vertices: int | None = None,
    num_relations: int | None = None,
    features: Any = None,
    labels: Any = None,
    splits: Mapping[str, Any] | None = None,
    num_classes: int | None = None,
    class_names: Any = None,
    task: Task | None = None,
    options: GraphOptions = DEFAULT_OPTIONS,
    name: str = "graph",
    meta: Mapping[str, Any] | None = None,
    ids: Any = None,
    room: Room = IN_MEMORY,
) -> Graph:
    """Make a graph from arrays. Give either `edges` (and `weights`, `edge_types`) or `adj`.

    ids: names (N,) of the rows, kept with the graph; edges hold row numbers all the same.
    Shapes: edges integers [2, E], row 0 sources, row 1 targets; weights [E] or [E, 1]; edge_types [E], the number of each
    edge's relation from 0, of `num_relations` (default: the highest and one); adj a square SciPy matrix or array, or a
    tuple (indptr, indices[, values]), with adj[u, v] for the edge u -> v, values of repeated entries added up; features
    dense or sparse [N, D], or "identity" or "degree" (`made_features`); labels [N] or [N, T], -1 or NaN for unlabelled,
    as `as_labels` reads them for a task;
    class_names: of the C classes or columns of labels in order; labels [N] may be names themselves (`numbered_labels`);
    splits: name -> bool [N] or [S, N], or a list of vertex ids. Each may be a torch tensor. `num_vertices` is inferred
    where it is not given: from adj, features or labels, else the largest id + 1.
    Cost: some sorts of E 8-byte keys, then the checks of `check_graph`.
    Raises: GraphError on anything malformed: ids, lengths, NaN, labels, splits that overlap or cannot be trained on.
    """
    if (edges is None) == (adj is None):
        raise GraphError("give either edges of shape [2, E] or adj, a square SciPy matrix; exactly one of them")
    if adj is not None:
        if weights is not None:
            raise GraphError("weights belong to edges, adj holds its own as values; leave weights out")
        if edge_types is not None:
            raise GraphError(
                "edge_types belong to edges, a matrix has one edge between two vertices; give edges [2, E]"
            )
        edges, weights, num_vertices = _from_matrix(to_numpy(adj), num_vertices)
    columns = _columns(edges, weights, edge_types)
    check_columns(columns)
    survey = columns.survey()
    # A pattern says which entries there are, not how often: those that repeat are one.
    entries = adj is not None and columns.weights is not None and options.duplicates == "auto"
    check_frame(features, "features", ids, table=True)
    check_frame(labels, "labels", ids)
    for part, split in (splits or {}).items():
        if getattr(split, "dtype", None) == np.bool_:
            check_frame(split, f"split {part!r}", ids)
    features, labels, options = to_numpy(features), with_unknown(to_numpy(labels)), options.resolved(counted=entries)
    origin = ""
    made = features if isinstance(features, str) else ""
    features = None if made else features
    if num_vertices is None:
        num_vertices, origin = _infer_num_vertices(survey, features, labels)
    both, relations = build_adjacency(
        columns, num_vertices, options, num_relations, origin, room, survey, entries=entries
    )
    labels, names = numbered_labels(labels, given_names(class_names), task)
    label_rows, count = as_labels(labels, num_vertices, num_classes, task)
    if num_classes is None and (label_rows is None or len(label_rows.shape) == 1):
        count = max(count, len(names))
    check_count(names, count)
    floats = task is None and label_rows is not None and label_rows.dtype == np.int64 and _are_floats(labels)
    rows = (
        made_features(made, both.adj, both.adj_t)
        if made
        else as_features(features, num_vertices, options.row_normalize)
    )
    graph = Graph(
        name=name,
        adj=both.adj,
        adj_t=both.adj_t,
        features=rows,
        labels=label_rows,
        splits=as_splits({part: to_numpy(split) for part, split in (splits or {}).items()}, num_vertices),
        num_classes=count,
        class_names=tuple(names),
        meta=_meta(
            meta,
            options,
            both.num_merged,
            whole_floats=floats,
            repeats=None if adj is not None else _repeats(options, both.num_merged, columns.weights is not None),
        ),
        num_relations=relations,
        ids=None if ids is None else ArrayRows(as_ids(to_numpy(ids))),
    )
    check_graph(graph)
    return graph


def _columns(edges: Any, weights: Any, types: Any) -> Edges:
    """Return the columns of arrays [2, E], [E] or [E, 1], and [E]; edges may be columns already."""
    types = None if types is None else as_array(to_numpy(types), "edge_types")
    if isinstance(edges, Edges):
        given = {"weights": _as_weights(weights), "types": types}
        return replace(edges, **{name: ArrayRows(column) for name, column in given.items() if column is not None})
    array = as_array(to_numpy(edges), "edges")
    array = array if array.size else np.empty((2, 0), dtype=np.int64)
    return edges_of(array, _as_weights(weights), types)


def from_scipy(adj: Any, **arrays: Any) -> Graph:
    """Make a graph from a square SciPy matrix; `arrays` are the other arguments of `from_arrays`."""
    if not is_sparse(adj):
        raise GraphError(
            f"expected a SciPy sparse matrix, got {type(adj).__name__}; scipy.sparse.csr_array(...) makes one"
        )
    return from_arrays(adj=adj, **({"meta": {"source": "SciPy matrix"}} | arrays))


def with_features(graph: Graph, kind: Any) -> Graph:
    """Return a graph without features with those of `made_features`; kind None: the graph as it is.

    Raises: GraphError if it has features, or `kind` is an array.
    """
    if kind is None:
        return graph
    if not isinstance(kind, str) or graph.features is not None:
        has = "has features" if graph.features is not None else "is complete"
        raise GraphError(
            f"{graph.name} {has}, others cannot be added; leave features (--features) out, or prepare it from its source"
        )
    meta = {key: value for key, value in graph.meta.items() if key not in ("format_version", "sha256")}
    return replace(graph, features=made_features(kind, graph.adj, graph.adj_t), meta=meta)


def with_task(graph: Graph, task: Task | None) -> Graph:
    """Return a graph whose labels are read for a task; None: the graph as it is.

    Raises: GraphError for a graph without labels, for classes with names or of which some are unknown, and as `as_labels`.
    """
    if task in (None, graph.task if graph.labels is not None else ""):
        return graph
    if graph.labels is None:
        raise GraphError(f"{graph.name} has no labels for a task (--task) to apply to; leave it out")
    labels = graph.labels.array()
    again = f"make {graph.name} from its source with task={task!r} (--task {task})"
    if graph.class_names:
        raise GraphError(f"the labels of {graph.name} are names of classes, numbered in their order: {again}")
    if labels.dtype.kind == "i" and bool((labels < 0).any()):
        raise GraphError(
            f"{graph.name} was read as classes, where -1 is an unknown label; as {task} it may be a value: {again}"
        )
    rows, count = as_labels(labels, graph.num_vertices, None, task)
    meta = {key: value for key, value in graph.meta.items() if key not in ("format_version", "sha256", "metric")}
    changed = replace(graph, labels=rows, num_classes=count, class_names=(), meta=meta)
    check_graph(changed)
    return changed


def with_options(graph: Graph, options: GraphOptions, room: Room = IN_MEMORY) -> Graph:
    """Return the graph as `options` ask for it; what they do not touch stays where it is (in files, say)."""
    changes: dict[str, Any] = {}
    options = options.resolved()
    if (options.symmetrize and not graph.symmetric) or options.self_loops != "keep":
        if graph.links:
            raise GraphError(f"the edges of {graph.name} are split into links; change them first, then split (--links)")
        (adj, adj_t, merged), _ = build_adjacency(
            of_matrix(graph.adj), graph.num_vertices, options, graph.num_relations or None, room=room
        )
        changes |= {"adj": adj, "adj_t": adj_t}
    if options.row_normalize and graph.features is not None:
        changes["features"] = normalized_rows(graph.features)
    if not changes:
        return graph
    stale = {"format_version", "sha256", "symmetric"}
    meta = {key: value for key, value in graph.meta.items() if key not in stale} | {"options": asdict(options)}
    repeats = graph.repeats
    if "adj" in changes:
        repeats = repeats or _repeats(options, merged, graph.adj.values is not None)
    told = {key: value for key, value in dict(meta.get("input") or {}).items() if key != "repeats"}
    told |= {"repeats": repeats} if repeats or told else {}
    meta = {key: value for key, value in meta.items() if key != "input"} | ({"input": told} if told else {})
    return replace(graph, **changes, meta=meta)


def _as_weights(weights: Any) -> Array | None:
    """Convert weights [E] or [E, 1]."""
    if weights is None:
        return None
    array = as_array(to_numpy(weights), "weights")
    return array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array


def _from_matrix(adj: Any, num_vertices: int | None) -> tuple[Array | Edges, Array | None, int]:
    if isinstance(adj, Entries):
        _expect_rows(num_vertices, adj.num_vertices)
        return adj.edges, None, adj.num_vertices
    pattern = isinstance(adj, tuple) and len(adj) == 2
    if isinstance(adj, tuple):
        adj = _matrix_from_triple(adj)
    if not is_sparse(adj) or adj.ndim != 2 or adj.shape[0] != adj.shape[1]:
        raise GraphError(
            f"adj must be a square SciPy matrix or (indptr, indices[, values]), got {type(adj).__name__} "
            f"of shape {np.shape(adj)}; adj[u, v] stands for the edge u -> v"
        )
    _expect_rows(num_vertices, int(adj.shape[0]))
    coo = sp.coo_array(adj, copy=adj.dtype == np.bool_)
    if coo.dtype == np.bool_:
        coo.sum_duplicates()  # two of them are True, not 2
    return np.stack([coo.row, coo.col]), None if pattern else coo.data, int(adj.shape[0])


def _expect_rows(num_vertices: int | None, rows: int) -> None:
    if num_vertices not in (None, rows):
        raise GraphError(f"num_vertices is {num_vertices}, adj has {rows} rows; leave num_vertices (--vertices) out")


def _matrix_from_triple(triple: tuple[Any, ...]) -> Any:
    indptr, indices = as_array(triple[0], "indptr"), as_array(triple[1], "indices")
    values: Any = _as_weights(triple[2]) if len(triple) > 2 else np.ones(indices.size, dtype=np.float32)
    num_vertices = indptr.size - 1
    try:
        matrix = sp.csr_array((values, indices, indptr), shape=(num_vertices, num_vertices))
        matrix.check_format(full_check=True)
    except (ValueError, TypeError) as error:
        raise GraphError(
            f"(indptr, indices[, values]) is not a CSR matrix: {error}; see scipy.sparse.csr_array"
        ) from error
    return matrix


def _infer_num_vertices(survey: Survey, features: Any, labels: Any) -> tuple[int, str]:
    """Return the number of vertices and, for a message, what it comes from if not from the edges."""
    for rows, what in ((features, "features"), (labels, "labels")):
        if rows is not None:
            shape = (
                rows.shape
                if is_sparse(rows) or isinstance(rows, FileRows)
                else as_array(rows, what, missing=True).shape
            )
            count = int(shape[0]) if shape else 1  # as_features or as_labels names what is wrong
            return count, f", since the {what} have {count} rows"
    return survey.highest + 1, ""


def _are_floats(labels: Any) -> bool:
    return as_array(labels, "labels").dtype.kind == "f"


def _repeats(options: GraphOptions, num_merged: int, weighted: bool) -> Repeats:
    """Say what values are where edges repeat: numbers of edges if these have no weights."""
    if options.duplicates != "sum" or not num_merged:
        return ""
    return "summed" if weighted else "counted"


def _meta(
    given: Mapping[str, Any] | None,
    options: GraphOptions,
    num_merged: int,
    *,
    whole_floats: bool = False,
    repeats: Repeats | None = None,
) -> dict[str, Any]:
    """Say where a graph came from; `input` holds what its files cannot show later, and is absent if that is nothing."""
    meta = {"source": "arrays"} | dict(given or {}) | {"options": asdict(options)}
    notes = dict(meta.get("input", {}))
    if num_merged:
        notes |= {"num_merged": num_merged} | ({"symmetrized": True} if options.symmetrize else {})
    notes |= {"whole_floats": True} if whole_floats else {}
    if num_merged and options.duplicates == "sum":
        notes["repeats"] = repeats or ""  # entries of a matrix: each is one edge, whose weight is the sum
    return meta | ({"input": notes} if notes else {})
