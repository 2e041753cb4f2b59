"""Several graphs as one block-diagonal graph: vertices of the first come first, and no edge leads from one to another.

Shapes: N vertices of all graphs, D features, S splits. Arrays that are as large as edges or features stay where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from mggcn.errors import GraphError
from mggcn.graph.check import check_graph, known_labels
from mggcn.graph.class_names import joined_names
from mggcn.graph.csr import CSR, Array, ArrayRows, Graph, Rows, columns
from mggcn.graph.ids import of_one_type
from mggcn.graph.nonzeros import as_csr, features_nnz


@dataclass(frozen=True, slots=True)
class JoinedRows:
    """Arrays joined end to end, in the widest type, read by ranges; added: the number added to each part's entries."""

    parts: tuple[Rows, ...]
    added: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.result_type(*(part.dtype for part in self.parts))

    def read(self, start: int, stop: int) -> Array:
        first, last, _ = slice(start, stop).indices(self.shape[0])
        out = np.empty((max(0, last - first), *self.shape[1:]), self.dtype)
        bounds = accumulate((part.shape[0] for part in self.parts), initial=0)
        for number, (part, (low, high)) in enumerate(zip(self.parts, pairwise(bounds), strict=True)):
            a, b = max(first, low), min(last, high)
            if a < b:
                rows = part.read(a - low, b - low)
                out[a - first : b - first] = rows + rows.dtype.type(self.added[number]) if self.added else rows
        return out

    def array(self) -> Array:
        return self.read(0, self.shape[0])

    copied = True

    def take(self, ids: npt.NDArray[np.int64]) -> Array:
        starts = np.cumsum([0, *(part.shape[0] for part in self.parts)])
        part_of = np.searchsorted(starts, ids, side="right") - 1
        out = np.empty((ids.size, *self.shape[1:]), self.dtype)
        for number in np.unique(part_of):
            mine = np.flatnonzero(part_of == number)
            rows = self.parts[number].take(ids[mine] - starts[number])
            out[mine] = rows + rows.dtype.type(self.added[number]) if self.added else rows
        return out

    def in_place(self) -> JoinedRows:
        return JoinedRows(tuple(part.in_place() for part in self.parts), self.added)


def join(graphs: Sequence[Graph], parts: Sequence[str] = (), *, name: str = "graphs") -> Graph:
    """Join graphs into one, in their order; meta["graphs"] lists the name and the first vertex of each.

    parts: for each graph "" if its own splits count, or the part of the split, such as "train", to which all its labelled
    vertices belong. Classes and relations of equal numbers are the same; graphs without labels are unlabelled.
    meta["metric"] is the score that the graphs name; if they name several, they are in meta["joined_metrics"].
    Cost: the row pointers, labels and splits of all, then the checks of `check_graph`; the rest is read when it is needed.
    Raises: GraphError for graphs whose features, types, labels or splits do not go together, or none.
    """
    if not graphs:
        raise GraphError("expected at least one graph to join, got none")
    if any(graph.links for graph in graphs):
        raise GraphError(
            "graphs whose links are to be predicted cannot be joined; join them first, then split the links"
        )
    _expect_alike(graphs)
    parts = parts or [""] * len(graphs)
    starts = list(accumulate((graph.num_vertices for graph in graphs), initial=0))
    adj = _joined([graph.adj for graph in graphs], starts)
    symmetric = all(graph.symmetric for graph in graphs)
    labels = None if all(graph.labels is None for graph in graphs) else _labels(graphs)
    joined = Graph(
        name=name,
        adj=adj,
        adj_t=adj if symmetric else _joined([graph.adj_t for graph in graphs], starts),
        features=_features(graphs),
        labels=labels,
        splits=_splits(graphs, parts, starts),
        num_classes=max(graph.num_classes for graph in graphs),
        class_names=joined_names(graphs),
        ids=_ids(graphs),
        num_relations=max(graph.num_relations for graph in graphs),
        meta={
            "source": f"{len(graphs)} graphs",
            "graphs": [[graph.name, start] for graph, start in zip(graphs, starts, strict=False)],
            **_metric(graphs),
            **_repeats(graphs),
        },
    )
    check_graph(joined)
    return joined


def _expect_alike(graphs: Sequence[Graph]) -> None:
    one_task = (
        "prepare or load both with labels of one task (--task, task=) and equally many columns, or one without labels"
    )
    of_all = (
        ("features", [_width(graph) for graph in graphs], "give all of them the same features, or none"),
        (
            "edges",
            ["types" if graph.num_relations else "no types" for graph in graphs],
            "give types to all edges, or to none",
        ),
        ("labels", [_kind_of_labels(graph) for graph in graphs], one_task),
    )
    for what, has, todo in of_all:
        known = [(number, kind) for number, kind in enumerate(has, start=1) if kind]
        for number, kind in known[1:]:
            one, like = known[0]
            if kind != like:
                first = "the first" if one == 1 else f"number {one}"
                raise GraphError(
                    f"graphs to be joined must have alike {what}: {first} has {like}, number {number} has {kind}; {todo}"
                )


def _kind_of_labels(graph: Graph) -> str:
    """What labels of two graphs must have in common, in words; nothing without labels."""
    if graph.labels is None:
        return ""
    return "one class a vertex" if graph.task == "classes" else columns(graph.task, graph.labels.shape[1])


def _metric(graphs: Sequence[Graph]) -> dict[str, Any]:
    """The score that graphs name, if they agree; else all that are named, for a note."""
    named = list(dict.fromkeys(str(graph.meta["metric"]) for graph in graphs if graph.meta.get("metric")))
    if len(named) > 1:
        return {"joined_metrics": named}
    return {"metric": named[0]} if named else {}


def _repeats(graphs: Sequence[Graph]) -> dict[str, Any]:
    """What values of all graphs say of repeated edges: numbers of edges only if those of each are."""
    found = {graph.repeats for graph in graphs if graph.adj.values is not None}
    if not found - {""}:
        return {}
    return {"input": {"repeats": "counted" if found == {"counted"} else "summed"}}


def _width(graph: Graph) -> str:
    if graph.features is None:
        return "none"
    return str(graph.num_features)


def _joined(matrices: Sequence[CSR], starts: Sequence[int] | None) -> CSR:
    """Matrices below each other; starts: the column at which each begins, None if all have the same columns."""
    pointers, entries = [np.zeros(1, np.int64)], 0
    for matrix in matrices:
        pointers.append(matrix.read_pointers(1, matrix.num_rows + 1) + entries)
        entries += matrix.nnz
    weighted = any(matrix.values is not None for matrix in matrices)
    values = [matrix.values or ArrayRows(np.ones(matrix.nnz, np.float32)) for matrix in matrices] if weighted else []
    types = [matrix.types for matrix in matrices if matrix.types is not None]
    degrees = [matrix.type_degrees for matrix in matrices if matrix.type_degrees is not None]
    return CSR(
        ArrayRows(np.concatenate(pointers)),
        JoinedRows(tuple(matrix.indices for matrix in matrices), tuple(starts or ())[: len(matrices)]),
        JoinedRows(tuple(values)) if weighted else None,
        matrices[0].num_cols if starts is None else starts[-1],
        types=JoinedRows(tuple(types)) if types else None,
        type_degrees=JoinedRows(tuple(degrees)) if degrees else None,
    )


def _features(graphs: Sequence[Graph]) -> Rows | CSR | None:
    if graphs[0].features is None:
        return None
    found = [graph.features for graph in graphs if graph.features is not None]
    dense = [features for features in found if not isinstance(features, CSR)]
    if len(dense) == len(found):
        return JoinedRows(tuple(dense))
    # Of the same source one graph may have few nonzeros and another many.
    return _joined([f if isinstance(f, CSR) else as_csr(f, features_nnz(f, "sparse") or 0) for f in found], None)


def _labels(graphs: Sequence[Graph]) -> Rows:
    like = next(graph.labels for graph in graphs if graph.labels is not None)
    shape, missing = like.shape[1:], np.asarray(-1 if like.dtype.kind == "i" else np.nan).astype(like.dtype)
    return JoinedRows(
        tuple(graph.labels or ArrayRows(np.full((graph.num_vertices, *shape), missing)) for graph in graphs)
    )


def _splits(graphs: Sequence[Graph], parts: Sequence[str], starts: Sequence[int]) -> dict[str, Rows]:
    """Every graph's own splits, or all labelled vertices of one in a part."""
    found: dict[str, dict[int, Array]] = {}
    for number, (graph, part) in enumerate(zip(graphs, parts, strict=True)):
        for split, mask in ({part: _labelled(graph)} if part else graph.splits).items():
            found.setdefault(split, {})[number] = mask.array()
    counts = sorted({mask.shape[0] for masks in found.values() for mask in masks.values()})
    if len(counts) > 1:
        raise GraphError(
            f"graphs to be joined must have equally many splits, got {counts}; prepare each from its "
            "source with as many, or join whole graphs as parts (train=A --join test=B, or a mapping)"
        )
    whole: dict[str, Rows] = {}
    for split, masks in found.items():
        every = np.zeros((counts[0], starts[-1]), np.bool_)
        for number, own in masks.items():
            every[:, starts[number] : starts[number + 1]] = own
        whole[split] = ArrayRows(every)
    return whole


def _labelled(graph: Graph) -> Rows:
    """A split of the vertices with a label, all if no vertex of the graph has one."""
    if graph.labels is None:
        return ArrayRows(np.ones((1, graph.num_vertices), np.bool_))
    return ArrayRows(known_labels(graph.labels.array())[np.newaxis])


def _ids(graphs: Sequence[Graph]) -> Rows | None:
    """Ids of all vertices if the graphs have some; two graphs may have equal ones."""
    known = [graph.ids.array() for graph in graphs if graph.ids is not None]
    if known and len(known) < len(graphs):
        raise GraphError(f"{len(known)} of {len(graphs)} graphs to join have ids; load all of them with ids=, or none")
    known = of_one_type(known) if all(ids.dtype.kind in "iu" for ids in known) else known
    return ArrayRows(np.concatenate(known)) if known else None
