"""Ids of vertices that are no row numbers: strings, or whole numbers with gaps. Edges are numbered by them, once.

N vertices, E edges.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from mggcn.errors import ConfigError, GraphError
from mggcn.graph.csr import WINDOW, Array, Graph
from mggcn.graph.edges import Edges
from mggcn.graph.vertex_data import MappedRows, as_array

SHOWN = 3
"""Number of ids shown in an error message."""
LARGEST = np.iinfo(np.int64).max


def ids_of(graph: Graph) -> Array:
    """Return the id of every vertex, (N,): those that the graph was given, else row numbers."""
    ids: Array = np.arange(graph.num_vertices) if graph.ids is None else graph.ids.array()
    return ids


def rows_of(graph: Graph, vertices: Any, given: str = "vertices") -> Array:
    """Return the rows of some vertices, int64 (K,), in the order given: of their ids, or of a mask, bool (N,).

    Text stands for whole numbers where the graph's ids are whole numbers, as those of a command line. given: the argument
    that errors name.
    Raises: ConfigError for an id that no vertex has, or anything that is not a list of ids.
    """
    wanted = np.asarray(vertices)
    if wanted.dtype.kind == "O" and all(isinstance(value, str) for value in wanted.flat):
        wanted = wanted.astype(np.str_)
    is_mask = wanted.dtype == np.bool_ and wanted.shape == (graph.num_vertices,)
    if not (wanted.any() if is_mask else wanted.size):
        raise ConfigError(f"{given} names none; give one or more")
    if is_mask:
        return np.flatnonzero(wanted)
    ids = ids_of(graph)
    whole, what = ids.dtype.kind != "U", "row numbers" if graph.ids is None else "ids of the graph"
    if wanted.ndim != 1 or wanted.dtype.kind not in ("iuU" if whole else "U"):
        raise ConfigError(
            f"{given} expects a list of {what}, {'whole numbers' if whole else 'text'}, or a mask of "
            f"{graph.num_vertices:,} vertices, got {wanted.dtype} of shape {wanted.shape}"
        )
    names = wanted
    if whole:
        wanted = _whole(wanted, f"{given} expects {what}, whole numbers")
        names = wanted.astype(ids.dtype)
    if graph.ids is None:
        rows: Array = np.clip(names, 0, ids.size - 1)
    else:
        # Those that are named alone are sorted.
        order = np.flatnonzero(np.isin(ids, names))
        order = order[np.argsort(ids[order], kind="stable")] if order.size else np.zeros(1, np.int64)
        rows = order[np.minimum(np.searchsorted(ids[order], names), order.size - 1)]
    if (missing := np.unique(wanted[(ids[rows] != names) | (names != wanted)])).size:
        known = f"0 to {ids.size - 1}" if graph.ids is None else f"such as {_shown(ids)}"
        raise ConfigError(f"{given} names {_shown(missing)}, but no vertex has such an id; {what} are {known}")
    return rows


def _whole(wanted: Array, expected: str) -> Array:
    """Return whole numbers, also of text, as 64-bit ones. Raises: ConfigError, which begins with what was expected."""
    numbers = list[int]()
    for one in wanted.tolist():
        try:
            # Python reads 1_0 as 10, but nobody writes ids so: it may be the name of another graph's vertex.
            numbers.append(int(one.replace("_", "?") if isinstance(one, str) else one))
        except ValueError:
            raise ConfigError(f"{expected}, got {one!r}" if one else f"{expected}, one of them is empty") from None
    # A 64-bit number is not to pass through float64, nor to wrap.
    least, most = 0 if max(numbers) > LARGEST else -LARGEST, np.iinfo(np.uint64).max
    if wrong := [one for one in numbers if not least <= one <= most]:
        raise ConfigError(f"{expected} of 64 bits, got {wrong[0]}")
    return np.array(numbers, np.int64 if max(numbers) <= LARGEST else np.uint64)


def numbered(edges: Any, ids: Any, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a graph with row numbers instead of ids, in edges and in splits that are lists.

    edges (2, E), of strings or whole numbers. ids: (N,), those of the rows of features, labels and masks, in order;
    "edges" for those that occur in the edges, ascending; None: whole numbers are rows, strings are taken as "edges".
    Cost: sorts of N ids or of 2 E. Raises: ConfigError, GraphError for ids that repeat, are not known, or cannot be paired.
    """
    names = _as_names(edges, "edges")
    if ids is None and names.dtype.kind != "U":
        return {**arrays, "edges": edges}
    if ids is None or (isinstance(ids, str) and ids == "edges"):
        _refuse_rows(arrays)
        known, numbers = np.unique(names, return_inverse=True)
        rows, order = numbers.reshape(names.shape), np.arange(known.size)
    else:
        known = as_ids(ids)
        order = np.argsort(known, kind="stable")
        rows = _rows(names, known, order, "edges")
    return {**_completed(arrays, known, order), "edges": rows}


def numbered_columns(edges: Edges, names: Array | None, ids: Any, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a graph with row numbers instead of ids, as `numbered`, for edges of any number.

    names: what the numbers in the columns stand for, distinct; None: themselves. Columns are changed when they are read.
    Cost: for "edges" without names a pass over the edges; memory for the ids. Raises: as `numbered`; for missing ids
    once they are read.
    """
    change: Callable[[Array], Array]
    if isinstance(ids, str):
        check_ids(ids)
        _refuse_rows(arrays)
        known = _occurring(edges) if names is None else np.sort(names)
        order = np.arange(known.size)
    else:
        known = as_ids(ids)
        order = np.argsort(known, kind="stable")
    if names is None:
        change = partial(_rows, known=known, order=order, what="edges")
    else:
        change = _rows(names, known, order, "edges").__getitem__
    columns = (MappedRows(column, change, np.dtype(np.int64)) for column in (edges.src, edges.dst))
    numbers = replace(edges, src=next(columns), dst=next(columns))
    return {**_completed(arrays, known, order), "edges": numbers}


def _occurring(edges: Edges) -> Array:
    """Return the ids in the edges, ascending."""
    known: Array = np.empty(0, np.int64)
    for start in range(0, edges.count, WINDOW):
        ends = [column.read(start, start + WINDOW) for column in (edges.src, edges.dst)]
        known, found = of_one_type([known, np.unique(np.concatenate(of_one_type(ends)))])
        place = np.minimum(np.searchsorted(known, found), max(known.size - 1, 0))
        fresh = found[known[place] != found] if known.size else found
        if fresh.size:
            known = np.sort(np.concatenate([known, fresh]))
    return known


def _completed(arrays: Mapping[str, Any], known: Array, order: Array) -> dict[str, Any]:
    """Return arguments with lists of ids in splits as rows, and the ids themselves."""
    splits = {name: _numbered_split(split, known, order, name) for name, split in (arrays.get("splits") or {}).items()}
    if arrays.get("num_vertices") not in (None, known.size):
        raise GraphError(
            f"num_vertices is {arrays['num_vertices']}, there are {known.size} ids; leave num_vertices out"
        )
    return {**arrays, "ids": known, "splits": splits, "num_vertices": known.size}


def as_ids(ids: Any) -> Array:
    """Return ids of vertices (N,), strings or int64, uint64 if some are 2^63 or more.

    Raises: GraphError if they are neither, or repeat.
    """
    known = _as_names(ids, "ids")
    if known.ndim != 1 or known.dtype.kind not in "iuU":
        raise GraphError(
            f"ids must be strings or whole numbers, one for each vertex, got {known.dtype} of shape {known.shape}; or "
            'ids="edges" for those that occur in the edges'
        )
    values, counts = np.unique(known, return_counts=True)
    if (counts > 1).any():
        raise GraphError(f"ids must be distinct, {_shown(values[counts > 1])} repeats; give every vertex one row")
    return known if known.dtype.kind == "U" else of_one_type([known])[0]


def of_one_type(numbers: Sequence[Array]) -> list[Array]:
    """Return whole numbers as int64, all as uint64 if some are 2^63 or more. Raises: GraphError if others are negative."""
    kind: type = np.int64
    if any(array.dtype.kind == "u" and array.size and int(array.max()) > LARGEST for array in numbers):
        kind = np.uint64
        if any(array.dtype.kind == "i" and array.size and int(array.min()) < 0 for array in numbers):
            raise GraphError(
                "some ids are negative and others 2^63 or more, which no type of whole numbers holds; give all as strings"
            )
    return [array.astype(kind, copy=False) for array in numbers]


def _as_names(values: Any, what: str) -> Array:
    """Return strings as NumPy's fixed width, as which they are stored; anything else as it is."""
    array = as_array(values, what)
    if array.dtype.kind == "O" and all(isinstance(value, str) for value in array.flat):
        return array.astype(np.str_)
    if array.dtype.kind in "OS":
        raise GraphError(
            f"{what} must be all strings or all whole numbers, got {array.dtype}; astype(str) makes strings"
        )
    return array


def _refuse_rows(arrays: Mapping[str, Any]) -> None:
    """Refuse rows whose vertices nobody named. Raises: GraphError."""
    if given := [name for name in ("features", "labels") if arrays.get(name) is not None]:
        raise GraphError(
            f"rows of {' and '.join(given)} belong to vertices, and the edges name vertices by ids; give ids=, the id of "
            "each row in order"
        )


def _rows(names: Array, known: Array, order: Array, what: str) -> Array:
    """Return the numbers of the rows of ids. Raises: GraphError that shows those that have none."""
    if names.size and (names.dtype.kind == "U") != (known.dtype.kind == "U"):
        raise GraphError(
            f"{what} hold {names.dtype}, ids {known.dtype}; give both as strings, or both as whole numbers"
        )
    outside: Array = np.zeros(names.shape, np.bool_)
    if {names.dtype.kind, known.dtype.kind} == {"i", "u"}:  # NumPy compares them as floating-point numbers
        outside = names < 0 if known.dtype.kind == "u" else names > LARGEST
        names, given = names.astype(known.dtype), names
    else:
        given = names
    place = np.minimum(np.searchsorted(known, names, sorter=order), max(known.size - 1, 0))
    rows: Array = order[place] if known.size else np.zeros(names.shape, np.int64)
    missing = given[outside | (known[rows] != names)] if known.size else given
    if missing.size:
        raise GraphError(
            f"{what} hold {_shown(np.unique(missing))}, which ids do not have ({np.unique(missing).size} in all); add them "
            "to ids, with rows of features and labels, or leave their edges out"
        )
    return rows


def _numbered_split(split: Any, known: Array, order: Array, name: str) -> Any:
    """Return a list of ids as row numbers; a mask stays."""
    names = _as_names(split, f"split {name!r}")
    return split if names.dtype == np.bool_ else _rows(names, known, order, f"split {name!r}")


def _shown(values: Array) -> str:
    return ", ".join(repr(value) for value in values[:SHOWN].tolist())


def check_ids(ids: Any) -> None:
    """Refuse text other than "edges". Raises: ConfigError."""
    if isinstance(ids, str) and ids != "edges" and not ids.endswith((".npy", ".parquet")):
        raise ConfigError(f'ids must be an array of N ids, or "edges" for those that occur in the edges, got {ids!r}')
