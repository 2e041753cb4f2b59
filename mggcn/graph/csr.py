"""Compressed sparse rows, the checks every one must pass, and the in-memory graph that all sources give.

Shapes: N vertices, D features, C classes, S splits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from mggcn.errors import GraphError
from mggcn.html import html_table

Array = npt.NDArray[Any]

WINDOW = 1 << 20
"""Elements that a pass over a matrix holds at once: about 50 MB with all temporaries."""


class Rows(Protocol):
    """An array that is read by row ranges, so that a file larger than memory never becomes resident.

    `ArrayRows` (below) over a NumPy array, `FileRows` (graph/file_rows.py) over an `.npy` file, `JoinedRows`
    (graph/join.py) over several of them, one after the other.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...

    def read(self, start: int, stop: int) -> Array:
        """Return rows [start, stop) as a fresh, contiguous array that the caller may change."""
        ...

    def array(self) -> Array:
        """Return the whole as one read-only array or memmap; nothing is copied, unless `copied`."""
        ...

    @property
    def copied(self) -> bool:
        """Whether `array` makes an array: of parts that are joined, or rows that are converted."""
        ...

    def take(self, ids: npt.NDArray[np.int64]) -> Array:
        """Return rows by number as a fresh array. Cost: a random access for each, and a map of each file."""
        ...

    def in_place(self) -> Rows:
        """Return the same rows for many calls of `take`, with one map of each file: a page counts once for each map that
        reads it.
        """
        ...


@dataclass(frozen=True, slots=True)
class ArrayRows:
    """Rows of an array in memory."""

    data: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.data.dtype

    copied = False

    def read(self, start: int, stop: int) -> Array:
        return np.array(self.data[start:stop], order="C")

    def array(self) -> Array:
        return self.data

    def take(self, ids: npt.NDArray[np.int64]) -> Array:
        rows: Array = self.data[ids]
        return rows

    def in_place(self) -> ArrayRows:
        return self


@dataclass(frozen=True, slots=True)
class CSR:
    """A sparse matrix by rows: row v holds columns indices[indptr[v]:indptr[v + 1]], ascending and unique.

    indptr int64 [rows + 1], indices int32 [nnz], values float32 [nnz] or None (all ones).
    types uint8 or uint16 [nnz] or None: relation of each edge; a column may then repeat with ascending types.
    type_degrees float32 [nnz], given with types: sum of the weights of the in-edges of this relation at the edge's
    destination, the edge itself among them, which a mean over the neighbours of a relation divides by.
    """

    indptr: Rows
    indices: Rows
    values: Rows | None
    num_cols: int
    types: Rows | None = field(default=None, kw_only=True)
    type_degrees: Rows | None = field(default=None, kw_only=True)

    @property
    def num_rows(self) -> int:
        return self.indptr.shape[0] - 1

    @property
    def nnz(self) -> int:
        return self.indices.shape[0]

    @property
    def copied_bytes(self) -> int:
        """The bytes that arrays of the matrix take where files cannot be mapped as they are, as of joined graphs."""
        parts = (self.indptr, self.indices, self.values, self.types, self.type_degrees)
        copied = (rows for rows in parts if rows is not None and rows.copied)
        return sum(rows.shape[0] * rows.dtype.itemsize for rows in copied)

    def in_place(self) -> CSR:
        """Return the same matrix with one map of each file. Memory: `copied_bytes`."""
        parts = ("indptr", "indices", "values", "types", "type_degrees")
        given = {name: getattr(self, name) for name in parts}
        arrays: Any = {name: ArrayRows(rows.array()) for name, rows in given.items() if rows is not None}
        return replace(self, **arrays)

    def untyped(self) -> CSR:
        """Return the same matrix without relations: edges of several relations between two vertices are then parallel."""
        return self if self.types is None else replace(self, types=None, type_degrees=None)

    def read_pointers(self, start: int, stop: int) -> Array:
        """Return indptr[start:stop], checked so that kernels can follow it: the pointers of rows start .. stop - 2.

        Raises: GraphError if they do not ascend within the stored entries, as in a damaged store.
        """
        indptr: Array = self.indptr.read(start, stop)
        if indptr.size and (indptr[0] < 0 or indptr[-1] > self.nnz or falls(indptr).any()):
            raise GraphError(
                f"row pointers {start} .. {stop - 1} must ascend from 0 to the {self.nnz} stored entries and do not; "
                "the matrix is damaged: copy or prepare it again"
            )
        return indptr

    def read_columns(self, start: int, stop: int) -> Array:
        """Return indices[start:stop], checked so that kernels can follow them. Raises: GraphError if one is outside."""
        indices: Array = self.indices.read(start, stop)
        if indices.size and (indices.min() < 0 or indices.max() >= self.num_cols):
            place = int(np.flatnonzero((indices < 0) | (indices >= self.num_cols))[0])
            raise GraphError(
                f"column ids must lie in [0, {self.num_cols}), entry {start + place} is {indices[place]}; "
                "the matrix is damaged: copy or prepare it again"
            )
        return indices


Task = Literal["classes", "labels", "numbers", "links"]
COLUMNS: Mapping[Task, str] = MappingProxyType(
    {
        "classes": "classes",
        "labels": "labels a vertex",
        "numbers": "numbers a vertex",
        "links": "columns of an embedding",
    }
)
"""What the columns of scores are, by task."""


Repeats = Literal["", "counted", "summed"]
"""counted: values are numbers of parallel edges; summed: sums of the weights of parallel edges, whose number is not known;
"": no edge repeats, or repeated ones are one edge."""
REPEATS: tuple[Repeats, ...] = ("counted", "summed")


def columns(task: Task, count: int) -> str:
    """Return the number of columns of a task in words, such as "3 classes"."""
    one = {
        "classes": "class",
        "labels": "label a vertex",
        "numbers": "number a vertex",
        "links": "column of an embedding",
    }
    return f"{count} {one[task] if count == 1 else COLUMNS[task]}"


def _family_and_part(name: str) -> tuple[str, int]:
    """Return where a split stands among others: alt_train after the main test, val after train."""
    family, _, part = name.rpartition("_")
    return family, ("train", "val", "test").index(part)


@dataclass(frozen=True, kw_only=True, slots=True)
class Graph:
    """A graph as `load` returns it, whatever the source: global ids, in host memory or files.

    Self-loops may be stored; the model's `self_loops` only inserts missing ones.

    Attributes:
        name: Name for run folders and messages.
        adj: Row u lists the out-neighbours v of u, for edges u -> v.
        adj_t: Row v lists the in-neighbours of v; the same object as `adj` if the graph is symmetric.
        features: Rows float32 [N, D], a CSR [N, D], or None.
        labels: Rows int64 [N], -1 for unlabelled; int8 [N, T] of 0, 1 and -1 for unknown, several labels a vertex; float32
            [N, T], NaN for unknown, numbers to be predicted; or None.
        splits: From a name ("train", "val", "test", "alt_train", ...) to Rows bool [S, N], always two-dimensional.
        num_classes: Number of classes, C, or of columns of the labels, T.
        num_relations: Number of relations if edges have types, else 0.
        class_names: Names of classes, or of columns of the labels, in order; () where none were given.
        ids: Rows [N] of int64, uint64 or strings: how the source names vertices, None if by their rows.
        links: Of a graph whose links are to be predicted, from "train", "val" and "test" to Rows int32: source and
            destination [T, 2] of training links, which are edges; of the others [M, 2 + K], with K negatives, destinations
            to which the source has no edge.
        meta: Content of meta.json: licence, provenance, published results, SHA-256 of every file.
    """

    name: str
    adj: CSR
    adj_t: CSR
    features: Rows | CSR | None
    labels: Rows | None
    splits: Mapping[str, Rows]
    num_classes: int
    meta: Mapping[str, Any] = field(default_factory=dict)
    num_relations: int = 0
    ids: Rows | None = None
    class_names: tuple[str, ...] = ()
    links: Mapping[str, Rows] = field(default_factory=dict)

    def __repr__(self) -> str:
        """One line of extents; `mggcn.describe` looks at the content."""
        return f"<Graph {self.name}: {self.summary()}>"

    def _repr_html_(self) -> str:
        """Return a table for notebooks. Cost: as `summary`."""
        return html_table(
            f"Graph {self.name}", {"extents": self.summary(), "read from": str(self.meta.get("source", "-"))}
        )

    @property
    def num_vertices(self) -> int:
        """Number of vertices, N."""
        return self.adj.num_rows

    @property
    def num_features(self) -> int:
        """Number of features of a vertex, D; 0 without any."""
        if self.features is None:
            return 0
        return self.features.num_cols if isinstance(self.features, CSR) else self.features.shape[1]

    @property
    def num_edges(self) -> int:
        """Number of stored directed edges, both directions of an undirected one counting."""
        return self.adj.nnz

    def untyped(self) -> Graph:
        """Return the same graph without relations: edges of several relations between two vertices are then parallel."""
        if not self.num_relations:
            return self
        return replace(self, adj=self.adj.untyped(), adj_t=self.adj_t.untyped(), num_relations=0)

    @property
    def task(self) -> Task:
        """What to predict: links, if there are any, else what follows from the labels' type and shape: one class, several
        labels, or numbers.
        """
        if self.links:
            return "links"
        if self.labels is None or len(self.labels.shape) == 1:
            return "classes"
        return "labels" if self.labels.dtype == np.int8 else "numbers"

    @property
    def repeats(self) -> Repeats:
        """What the values mean for edges that the source lists several times."""
        told, options = self.meta.get("input"), self.meta.get("options")
        if self.adj.values is None or not isinstance(told, Mapping):
            return ""
        for known in REPEATS:
            if told.get("repeats") == known:
                return known
        if "repeats" in told:
            return ""
        # Stores of earlier versions do not say whether values were weights before they were added up.
        added = isinstance(options, Mapping) and options.get("duplicates") == "sum" and told.get("num_merged")
        return "summed" if added else ""

    @property
    def symmetric(self) -> bool:
        """Whether every edge is stored in both directions with equal weights."""
        return self.adj_t is self.adj

    def summary(self) -> str:
        """Return the extents in words. Cost: none, nothing is read."""
        kind = ("symmetric" if self.symmetric else "directed") + ("" if self.adj.values is None else ", weighted")
        kind += f", {self.num_relations} relation{'s' * (self.num_relations > 1)}" if self.num_relations else ""
        width = self.num_features
        features = f"{width:,} {'sparse ' if isinstance(self.features, CSR) else ''}feature" if width else "no feature"
        features += "" if width == 1 else "s"
        # A store lists them by the alphabet; readers expect train, val, test, and then those of other families (alt_train).
        ordered = sorted(self.splits, key=_family_and_part)
        counts = {name: self.splits[name].shape[0] for name in ordered}
        if len(set(counts.values())) == 1 and 1 not in counts.values():
            splits = f"{counts[ordered[0]]} splits into {', '.join(ordered)}"
        else:
            several = [f"{name} ({count})" if count > 1 else name for name, count in counts.items()]
            splits = f"splits {', '.join(several) or 'none'}"
        predicted = f"{columns(self.task, self.num_classes)}, {splits}"
        if self.links:
            predicted = "links: " + ", ".join(f"{rows.shape[0]:,} {name}" for name, rows in self.links.items())
        return f"{self.num_vertices:,} vertices, {self.num_edges:,} stored edges, {kind}, {features}, {predicted}"


def falls(pointers: Array) -> npt.NDArray[np.bool_]:
    """Return where a number is less than the one before. They are compared, since differences of damaged ones wrap."""
    found: npt.NDArray[np.bool_] = pointers[1:] < pointers[:-1]
    return found


def windows(csr: CSR, size: int = WINDOW) -> Iterator[tuple[Array, Array, int, int]]:
    """Walk over all edges in order: (rows, cols, first, stop), where rows and cols belong to the edges [first, stop).

    Shapes: rows int64 and cols int64, both (stop - first,), stop - first <= size. Windows without edges are left out.
    Cost: one read of indptr and of indices; memory in proportion to `size`, whatever the matrix.
    Raises: GraphError as `CSR.read_pointers`.
    """
    for row in range(0, csr.num_rows, size):
        indptr = csr.read_pointers(row, min(row + size, csr.num_rows) + 1)
        for first in range(int(indptr[0]), int(indptr[-1]), size):
            stop = min(first + size, int(indptr[-1]))
            low = int(np.searchsorted(indptr, first, side="right")) - 1
            high = int(np.searchsorted(indptr, stop, side="left"))
            counts = np.diff(np.clip(indptr[low : high + 1], first, stop))
            rows = np.repeat(np.arange(row + low, row + high, dtype=np.int64), counts)
            yield rows, csr.indices.read(first, stop).astype(np.int64), first, stop


def rows_with_loops(csr: CSR) -> int:
    """Return how many rows of a square matrix have an entry of their own column. Cost: as `windows`."""
    count, last = 0, -1
    for rows, cols, _, _ in windows(csr):
        loops = rows[rows == cols]
        if loops.size:  # parallel edges follow each other, perhaps into the next window
            count += 1 + int(np.count_nonzero(np.diff(loops))) - int(loops[0] == last)
            last = int(loops[-1])
    return count


def most_own_entries(csr: CSR) -> int:
    """Return the most entries of its own column that a row of a square matrix has once each has one: at least 1.

    Cost: as `windows`; none without types, where columns do not repeat.
    """
    if csr.types is None:
        return 1
    most, last, count = 1, -1, 0
    for rows, cols, _, _ in windows(csr):
        found, counts = np.unique(rows[rows == cols], return_counts=True)
        if found.size:  # a row may go on in the next window
            counts[0] += count if found[0] == last else 0
            most, last, count = max(most, int(counts.max())), int(found[-1]), int(counts[-1])
    return most


def check_csr(csr: CSR, what: str) -> None:
    """Check every property that `CSR` promises; `what` names the matrix in the message.

    Cost: one pass over indptr, indices and values in windows of bounded size.
    Raises: GraphError at the first row pointer, column or value that breaks the promise.
    """
    check_layout(csr, what)
    _check_indptr(csr, what)
    _check_indices(csr, what)
    if csr.values is not None:
        check_finite(csr.values, f"{what} values")


def check_finite(rows: Rows, what: str) -> None:
    """Refuse NaN and infinity in an array that is read by bounded ranges of rows; raises GraphError."""
    step = max(1, WINDOW // max(1, int(np.prod(rows.shape[1:]))))
    for start in range(0, rows.shape[0], step):
        bad = np.argwhere(~np.isfinite(rows.read(start, start + step)))
        if bad.size:
            where = (start + int(bad[0][0]), *(int(i) for i in bad[0][1:]))
            raise GraphError(f"{what}: expected finite numbers, entry {where} is NaN or infinite; replace or drop it")


def probably_symmetric(csr: CSR) -> bool:
    """Return whether the matrix equals its transpose, values included; wrong with a probability of about 2^-60.

    Cost: one pass over the edges in windows of bounded size; nothing of the size of the graph is held.
    Source: Schwartz-Zippel: f^T (A - A^T) g = 0 mod 2^64 for random vectors f and g. The seed is fixed, so the answer
    repeats; it is a check against accidents, not against an adversary.
    """
    forward, backward = _edge_hashes(csr)
    return csr.num_rows == csr.num_cols and forward == backward


def probably_transposed(csr: CSR, csr_t: CSR) -> bool:
    """Return whether csr_t is the transpose of csr, values included; cost and certainty as `probably_symmetric`."""
    same_shape = (csr.num_rows, csr.num_cols) == (csr_t.num_cols, csr_t.num_rows)
    return same_shape and csr.nnz == csr_t.nnz and _edge_hashes(csr)[0] == _edge_hashes(csr_t)[1]


def check_layout(csr: CSR, what: str) -> None:
    """Check shapes and types alone, which costs nothing; raises GraphError."""
    expected: list[tuple[str, Rows, type[np.generic]]] = [
        ("indptr", csr.indptr, np.int64),
        ("indices", csr.indices, np.int32),
    ]
    if csr.values is not None:
        expected.append(("values", csr.values, np.float32))
    if csr.types is not None:
        expected.append(("types", csr.types, np.uint8 if csr.types.dtype == np.uint8 else np.uint16))
    if csr.type_degrees is not None:
        expected.append(("type_degrees", csr.type_degrees, np.float32))
    for name, rows, dtype in expected:
        if len(rows.shape) != 1 or rows.dtype != dtype:
            raise GraphError(
                f"{what}: {name} must be a one-dimensional {np.dtype(dtype)} array, "
                f"got {rows.dtype} of shape {rows.shape}; convert it before it is stored"
            )
    if csr.indptr.shape[0] == 0:
        raise GraphError(f"{what}: indptr must hold rows + 1 offsets, got none; an empty matrix has indptr = [0]")
    for name, _, _ in expected[2:]:
        rows = getattr(csr, name)
        if rows.shape != csr.indices.shape:
            raise GraphError(
                f"{what}: expected one value per index ({csr.nnz}), got {rows.shape[0]} {name}; the files belong to "
                "different graphs or one is cut short"
            )
    if (csr.types is None) != (csr.type_degrees is None):
        raise GraphError(f"{what}: types and type_degrees belong together, one is missing; prepare the graph again")


def _check_indptr(csr: CSR, what: str) -> None:
    previous = 0
    for start in range(0, csr.num_rows + 1, WINDOW):
        indptr = csr.indptr.read(start, start + WINDOW)
        if start == 0 and indptr[0] != 0:
            raise GraphError(f"{what}: indptr must start at 0, got {indptr[0]}; the row pointers are damaged")
        falling = np.flatnonzero(falls(np.concatenate([[previous], indptr])))
        if falling.size:
            raise GraphError(
                f"{what}: indptr must not decrease, it does at row {start + int(falling[0]) - 1}; "
                "the row pointers are damaged, prepare the graph again"
            )
        previous = int(indptr[-1])
    if previous != csr.nnz:
        raise GraphError(
            f"{what}: indptr ends at {previous} but there are {csr.nnz} indices; the files belong to different "
            "graphs or one is cut short"
        )


def _check_indices(csr: CSR, what: str) -> None:
    last_row, last_col = -1, -1
    for rows, cols, first, stop in windows(csr):
        outside = np.flatnonzero((cols < 0) | (cols >= csr.num_cols))
        if outside.size:
            edge = int(outside[0])
            raise GraphError(
                f"{what}: row {rows[edge]} holds column {cols[edge]}, expected 0 <= column < {csr.num_cols}; "
                "check the number of vertices and whether ids start at 0"
            )
        if csr.types is not None:
            # Edges of several relations between two vertices are told apart by their types.
            cols = cols << 16 | csr.types.read(first, stop)
        same_row = np.diff(rows, prepend=last_row) == 0
        falling = np.flatnonzero(same_row & (np.diff(cols, prepend=last_col) <= 0))
        if falling.size:
            raise GraphError(
                f"{what}: columns of row {rows[int(falling[0])]} are not strictly ascending; sort them and merge "
                "duplicates (sum_duplicates() of a SciPy matrix does both), then prepare the graph again"
            )
        last_row, last_col = int(rows[-1]), int(cols[-1])


def _edge_hashes(csr: CSR) -> tuple[int, int]:
    """Sum over edges (u, v, w) of f(u) g(v) h(w) and of g(u) f(v) h(w), modulo 2^64."""
    forward = backward = 0
    for rows, cols, first, stop in windows(csr):
        weight: npt.NDArray[np.uint64] | np.uint64 = np.uint64(1)
        if csr.values is not None:
            # Adding 0.0 turns -0.0 into 0.0, which compares equal but has other bits.
            weight = mix((csr.values.read(first, stop) + np.float32(0.0)).view(np.uint32), 3)
        if csr.types is not None and csr.type_degrees is not None:
            weight = weight * mix(csr.types.read(first, stop), 4)
            weight = weight * mix((csr.type_degrees.read(first, stop) + np.float32(0.0)).view(np.uint32), 5)
        forward += int(np.sum(mix(rows, 1) * mix(cols, 2) * weight))
        backward += int(np.sum(mix(rows, 2) * mix(cols, 1) * weight))
    return forward % 2**64, backward % 2**64


def mix(keys: Array, stream: int) -> npt.NDArray[np.uint64]:
    """SplitMix64 of integer keys: 64 random-looking bits for each."""
    x = keys.astype(np.uint64) + np.uint64(stream * 0x9E3779B97F4A7C15 % 2**64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
