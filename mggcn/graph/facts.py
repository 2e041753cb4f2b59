"""Facts of a graph beyond its extents, and remarks on those that may be mistakes.

Shapes: N vertices, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mggcn.errors import printable
from mggcn.graph.csr import CSR, WINDOW, Array, Graph, Rows, Task, windows

MIN_EDGES = 16
"""With fewer edges, that none has its reverse means nothing."""
ROWS = 1 << 16
"""Most vertices whose edges are looked at together for reverses."""
SHOWN = 5
"""Classes that a remark lists one by one."""
MOST_NAMES = 64
"""Names of classes that are listed."""
MAX_CLASSES = 1 << 20
"""With more classes than that, none are counted."""
MANY = 16
"""Fewer classes than that are never too many."""
MOST_COLUMNS = 1 << 10
"""Columns of labels of which those with one value are named."""
ONE_WAY = "no edge has its reverse: undirected edges need both directions (--symmetrize, GraphOptions(symmetrize=True))"


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphFacts:
    """Result of `describe`; `str` gives the extents and the remarks, one line each."""

    summary: str
    """The extents in words."""
    header: str = ""
    """Line of names that was skipped in the edge list, empty without one."""
    column_numbers: str = ""
    """First edge of the list, if it looks like the header that pandas writes over columns without names."""
    read: tuple[str, ...] = ()
    """What the reader of the source had to say."""
    num_merged: int = 0
    """Edges of the list that were merged with an equal one listed before, or, if `symmetrized`, with its reverse."""
    summed: bool = False
    """Whether their weights were added up; else one of them was kept."""
    symmetrized: bool = False
    """Whether reverses of edges were added when the list was merged."""
    weights: tuple[float, float] | None = None
    """Lowest and highest weight of an edge, None if edges have no weights."""
    num_self_loops: int = 0
    """Edges from a vertex to itself."""
    num_isolated: int = 0
    """Vertices without any edge, a self-loop being one."""
    first_isolated: bool = False
    """Whether vertex 0 is one of them."""
    one_way: bool = False
    """Whether no edge has its reverse, as if undirected ones were listed once; False for fewer than 16 edges."""
    empty_classes: tuple[int, ...] = ()
    """Classes without a vertex, ascending."""
    class_names: tuple[str, ...] = ()
    """Names of the classes, or of the columns of labels, in order; () without any."""
    metrics: tuple[str, ...] = ()
    """Scores that joined graphs name, if they name several: then the graph names none."""
    unread: tuple[str, ...] = ()
    """Names of data beside edges and vertices that the source holds and nothing reads."""
    notes: tuple[str, ...] = ()
    """What else is to be said of the source."""
    num_zero_weights: int = 0
    """Edges of weight 0, which sums do not see, and attention and maxima do."""
    whole_floats: bool = False
    """Whether classes were given as floating-point numbers, all of them whole."""
    one_value: tuple[int, ...] = ()
    """Columns of labels in which all that is known is the same; classes are column 0. Empty for numbers of columns above
    1024."""
    task: Task = "classes"
    """What labels are."""
    many_classes: bool = False
    """Whether there are 16 classes or more that vertices have, and more than half as many as labelled vertices."""
    one_hot: bool = False
    """Whether no vertex has more than one of several labels."""

    def remarks(self) -> list[str]:
        """Return a line for each unusual property; none for a plain graph."""
        return [*self._of_input(), *self._of_edges(), *self._of_vertices()]

    def __str__(self) -> str:
        return "\n".join([self.summary, *self.remarks()])

    def _of_input(self) -> list[str]:
        lines = [f"a header was skipped: {self.header[:80]!r}"] if self.header else []
        if self.column_numbers:
            lines.append(
                f"the first line, {self.column_numbers!r}, was read as an edge: if it is the header that pandas writes "
                "over columns without names, leave it out (header=False)"
            )
        lines += self.read
        if self.num_merged:
            what = "repeated or reversed edge" if self.symmetrized else "repeated edge"
            done = "added to the weight" if self.summed else "merged into the first"
            lines.append(f"{_counted(self.num_merged, what)} {done} of its kind")
        if self.unread:
            shown = ", ".join(self.unread[:SHOWN]) + (", ..." if len(self.unread) > SHOWN else "")
            lines.append(f"not read: {shown}")
        if self.metrics:
            lines.append(several_metrics(self.metrics))
        return [*lines, *self.notes]

    def _of_edges(self) -> list[str]:
        lines = []
        if self.weights is not None:
            lines.append(f"weights from {self.weights[0]:g} to {self.weights[1]:g}")
            if self.weights[0] < 0:
                lines[-1] += ": normalisation refuses vertices whose in-edges sum to less than 0"
        if self.num_zero_weights:
            are = "is" if self.num_zero_weights == 1 else "are"
            lines.append(
                f"{_counted(self.num_zero_weights, 'edge')} of weight 0 {are} stored: attention and maxima read such an "
                "edge like any other"
            )
        if self.num_self_loops:
            lines.append(f"{_counted(self.num_self_loops, 'self-loop')} stored")
        if self.one_way:
            lines.append(ONE_WAY)
        return lines

    def _of_vertices(self) -> list[str]:
        lines = []
        if self.num_isolated:
            lines.append(f"{_counted(self.num_isolated, 'vertex', 'vertices')} without any edge")
        if self.first_isolated:
            lines.append(
                "vertex 0 has no edge: if ids start at 1, subtract 1, as row 0 of features and labels is its own"
            )
        if self.empty_classes:
            shown = ", ".join(map(self._class, self.empty_classes[:SHOWN])) + (
                ", ..." if self.empty_classes[SHOWN:] else ""
            )
            lines.append(f"{_counted(len(self.empty_classes), 'class', 'classes')} without a vertex: {shown}")
            if self.empty_classes[0] == 0:
                lines[-1] += "; if labels start at 1, subtract 1"
        if self.class_names:
            shown = ", ".join(map(printable, self.class_names[:MOST_NAMES]))
            rest = len(self.class_names) - MOST_NAMES
            lines.append(f"named in the order of their numbers: {shown}" + (f" and {rest} more" if rest > 0 else ""))
        return [*lines, *self._of_labels()]

    def _of_labels(self) -> list[str]:
        lines = []
        if self.whole_floats:
            lines.append(
                "labels are whole floating-point numbers and are read as classes: if they are numbers to predict, say "
                "task='numbers' (--task numbers)"
            )
        if self.one_value == (0,) and not self.one_hot and self.task == "classes":
            lines.append("all labelled vertices are of the same class, so that any model scores 1: check the labels")
        elif self.one_value:
            shown = ", ".join(map(str, self.one_value[:SHOWN])) + (", ..." if self.one_value[SHOWN:] else "")
            lines.append(f"all known labels of {_counted(len(self.one_value), 'column')} are the same: {shown}")
        if self.one_hot:
            lines.append(
                "no vertex has more than one label, as if classes were one-hot: numpy.argmax(labels, axis=1) makes classes "
                "of them, with another loss and score"
            )
        if self.many_classes:
            lines.append(
                "there are more classes than half of the labelled vertices: if labels are numbers to predict, say "
                "task='numbers' (--task numbers)"
            )
        return lines

    def _class(self, number: int) -> str:
        return f"{number} ({printable(self.class_names[number])})" if self.class_names else str(number)


def describe(graph: Graph) -> GraphFacts:
    """Find what a graph's extents do not show: self-loops, vertices without edges, merged edges, empty classes.

    `mggcn prepare` prints it. The header and merged edges come from `graph.meta`; classes are not counted if there are
    more than 2^20. Cost: one pass over the column indices, the weights, both row pointers and the labels, in windows of
    bounded size, and C bytes; for a directed graph, that of `is_one_way`.

    Examples:
        >>> graph = mggcn.load(np.array([[0, 1], [1, 1]]), num_vertices=3)
        >>> print(mggcn.describe(graph))
        3 vertices, 2 stored edges, directed, no features, 0 classes, splits none
        1 self-loop stored
        1 vertex without any edge
    """
    notes = graph.meta.get("input")
    notes, options = notes if isinstance(notes, dict) else {}, graph.meta.get("options")
    num_merged, header, numbers = (notes.get(name) for name in ("num_merged", "header", "column_numbers"))
    num_isolated, first_isolated = _isolated(graph)
    classes = graph.labels if graph.task == "classes" else None
    weights = None if graph.adj.values is None else _range(graph.adj.values)
    return GraphFacts(
        summary=graph.summary(),
        header=header if isinstance(header, str) else "",
        column_numbers=numbers if isinstance(numbers, str) else "",
        read=tuple(map(str, remarks)) if isinstance(remarks := notes.get("remarks"), list) else (),
        num_merged=num_merged if isinstance(num_merged, int) else 0,
        summed=isinstance(options, dict) and options.get("duplicates") == "sum",
        symmetrized=notes.get("symmetrized") is True,
        weights=None if weights is None else weights[:2],
        num_zero_weights=0 if weights is None else weights[2],
        num_self_loops=sum(int(np.count_nonzero(rows == cols)) for rows, cols, _, _ in windows(graph.adj)),
        num_isolated=num_isolated,
        first_isolated=first_isolated,
        one_way=is_one_way(graph),
        empty_classes=() if classes is None else _empty_classes(classes, graph.num_classes),
        class_names=graph.class_names,
        metrics=_strings(graph.meta.get("joined_metrics")),
        unread=_strings(notes.get("unread")),
        notes=_strings(notes.get("notes")),
        whole_floats=notes.get("whole_floats") is True,
        task=graph.task,
        **({} if graph.labels is None else _label_facts(graph.labels)),
    )


def _strings(told: object) -> tuple[str, ...]:
    return tuple(map(str, told)) if isinstance(told, list) else ()


def several_metrics(metrics: Sequence[str]) -> str:
    """Return a remark if joined graphs name different scores."""
    return f"the joined graphs name several scores, {' and '.join(metrics)}: none is kept, choose one with train.metric"


def is_one_way(graph: Graph) -> bool:
    """Return whether a graph has MIN_EDGES edges that are no self-loops, and none of them has its reverse.

    Cost: usually the first 2^16 vertices, at most a pass over the column indices of both directions, in windows of bounded
    size.
    """
    if graph.symmetric:
        return False
    count = start = 0
    while start < graph.num_vertices:
        stop = _few_edges(graph, start)
        forward, backward = (_keys(matrix, start, stop) for matrix in (graph.adj, graph.adj_t))
        if np.intersect1d(forward, backward, assume_unique=True).size:
            return False
        count += forward.size
        start = stop
    return count >= MIN_EDGES


def _few_edges(graph: Graph, start: int) -> int:
    """Return where vertices from `start` on end: ROWS of them, or WINDOW edges either way, or one vertex."""
    ends = []
    for matrix in (graph.adj, graph.adj_t):
        indptr = matrix.read_pointers(start, min(start + ROWS, graph.num_vertices) + 1)
        ends.append(start + int(np.searchsorted(indptr, int(indptr[0]) + WINDOW, side="right")) - 1)
    return max(start + 1, min(ends))


def _keys(matrix: CSR, start: int, stop: int) -> Array:
    """Return u * N + v for the entries (u, v) of rows [start, stop), those of the diagonal left out."""
    indptr = matrix.read_pointers(start, stop + 1)
    cols = matrix.indices.read(int(indptr[0]), int(indptr[-1]))
    rows = np.repeat(np.arange(start, stop, dtype=np.int64), np.diff(indptr))
    proper: Array = (rows * matrix.num_cols + cols)[rows != cols]
    return proper


def _range(values: Rows) -> tuple[float, float, int] | None:
    """Return the lowest and the highest weight, and how many are 0."""
    lowest, highest, zeros = np.inf, -np.inf, 0
    for start in range(0, values.shape[0], WINDOW):
        part = values.read(start, start + WINDOW)
        lowest, highest = min(lowest, float(part.min())), max(highest, float(part.max()))
        zeros += part.size - int(np.count_nonzero(part))
    return (lowest, highest, zeros) if values.shape[0] else None


def _isolated(graph: Graph) -> tuple[int, bool]:
    """Count vertices with neither out- nor in-edges; say whether vertex 0 is one."""
    count, first = 0, False
    for start in range(0, graph.num_vertices, WINDOW):
        stop = min(start + WINDOW, graph.num_vertices)
        alone = np.diff(graph.adj.read_pointers(start, stop + 1)) == 0
        if not graph.symmetric:
            alone &= np.diff(graph.adj_t.read_pointers(start, stop + 1)) == 0
        count += int(np.count_nonzero(alone))
        first = first or (start == 0 and bool(alone[0]))
    return count, first


def _empty_classes(labels: Rows, num_classes: int) -> tuple[int, ...]:
    if num_classes > MAX_CLASSES:
        return ()
    used = np.zeros(num_classes, dtype=np.bool_)
    for start in range(0, labels.shape[0], WINDOW):
        part = labels.read(start, start + WINDOW)
        used[part[part >= 0]] = True
    return tuple(np.flatnonzero(~used).tolist())


def _label_facts(labels: Rows) -> dict[str, Any]:
    """Return the fields of GraphFacts that labels tell: one pass in windows of bounded size."""
    columns = labels.shape[1] if len(labels.shape) == 2 else 1
    numbers, step = labels.dtype.kind == "f", max(1, WINDOW // columns)
    least, most = np.full(columns, np.inf), np.full(columns, -np.inf)
    count, several = np.zeros(columns, np.int64), numbers
    seen: Array = np.empty(0, np.int64)
    for start in range(0, labels.shape[0], step):
        part = labels.read(start, start + step).reshape(-1, columns)
        known = ~np.isnan(part) if numbers else part >= 0
        count += known.sum(0)
        least = np.minimum(least, np.where(known, part, np.inf).min(0, initial=np.inf))
        most = np.maximum(most, np.where(known, part, -np.inf).max(0, initial=-np.inf))
        several = several or (columns > 1 and bool(((part > 0).sum(1) > 1).any()))
        if columns == 1 and labels.dtype == np.int64:
            seen = np.union1d(seen, part[known])
    alike = np.flatnonzero((count > 1) & (least == most))
    return {
        "one_value": tuple(alike.tolist()) if columns <= MOST_COLUMNS else (),
        "one_hot": columns > 1 and not several and int(count.sum()) > 0 and bool(most.max() > 0),
        "many_classes": seen.size >= MANY and 2 * seen.size > int(count[0]),
    }


def _counted(count: int, one: str, many: str = "") -> str:
    return f"{count:,} {one if count == 1 else many or one + 's'}"
