"""The one rule that tells weights of edges from other data of a source, whatever their names.

Data is read as weights if it is called so and has one number per edge. What may be weights under another name is refused,
and so are features of edges, which no model reads; of anything else that is left the name is kept for a note.

Shapes: E edges, N vertices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mggcn.errors import GraphError
from mggcn.graph.vertex_data import as_array, to_numpy

WEIGHTS = frozenset({"weight", "weights", "w"})
"""Names that mean weights of edges, also with edge_ before them."""


def is_weight(name: str) -> bool:
    """Return whether a name means weights of edges."""
    return name.lower().removeprefix("edge_") in WEIGHTS


@dataclass(frozen=True, slots=True)
class Beside:
    """Data of a source, by name, that is neither ends nor types of edges nor otherwise read.

    access: how a user writes a name of it, such as "data.{}". of_edges: whether all of it is known to be of edges. in_file:
    whether it lies in a file, so that nobody can pass it on. as_argument: how it is passed as weights, if not by access.
    """

    columns: Mapping[str, Any]
    access: str = "{}"
    of_edges: bool = False
    in_file: bool = False
    as_argument: str = ""

    def weights(self, count: int, num_vertices: int, *, chosen: bool) -> tuple[Any, list[str]]:
        """Return the weights, None without any, and the names of all that nothing reads. count: E.

        chosen: the caller gives weights, or says that there are none: then nothing is read or refused.
        Raises: GraphError for data of edges that may be weights, several numbers per edge, and weights that contradict.
        """
        weights: dict[str, Any] = {}
        unread = []
        for key, value in self.columns.items():
            column = _column(value)
            if column is None:
                if value is None or not (self.of_edges or key.lower().startswith("edge_")):
                    continue
                if is_weight(key) and not chosen:
                    raise GraphError(
                        f"{self.access.format(key)} must hold a weight for each of {count} edges, got "
                        f"{type(value).__name__}; {self._way_out(key)}"
                    )
                unread.append(self.access.format(key))
                continue
            if not chosen and self._is_of_edges(key, column, count, num_vertices):
                self._check(key, column)
                if is_weight(key):
                    weights[key] = value
                    continue
            unread.append(self.access.format(key))
        first = next(iter(weights), "")
        for other in weights:
            if other != first and not np.array_equal(_flat(weights[first]), _flat(weights[other])):
                raise GraphError(
                    f"{self.access.format(first)} and {self.access.format(other)} both hold weights of edges, and differ; "
                    f"{self._way_out(first)}"
                )
        return weights.get(first), unread

    def _is_of_edges(self, key: str, column: Any, count: int, num_vertices: int) -> bool:
        """Tell data of edges from that of vertices, by name and length. Raises: GraphError where both fit."""
        by_name = self.of_edges or key.lower().startswith("edge")
        if column.shape[0] == count and (by_name or count != num_vertices):
            return True
        if is_weight(key) and (by_name or column.shape[0] == count):
            expected = f"a weight for each of {count} edges"
            if not by_name:
                expected += f", and cannot tell them from the {num_vertices} vertices"
            raise GraphError(
                f"{self.access.format(key)} has shape {tuple(column.shape)}, expected {expected}; {self._way_out(key)}"
            )
        return False

    def _check(self, key: str, column: Any) -> None:
        """Refuse data of edges that may not be left out in silence, or that cannot be weights."""
        name, one = self.access.format(key), tuple(column.shape[1:]) in ((), (1,))
        if not one and column.dtype.kind in "iuf" and 0 not in column.shape:
            raise GraphError(
                f"{name} of shape {tuple(column.shape)} holds {column.shape[1]} numbers per edge, and no model reads "
                f"features of edges; {self._way_out(key, one=False)}"
            )
        if is_weight(key) and (not one or column.dtype.kind not in "iufb"):
            raise GraphError(f"{name} must hold one number per edge, got {column.dtype}; {self._way_out(key)}")
        if one and column.dtype.kind == "f" and not is_weight(key) and column.shape[0]:
            raise GraphError(f"{name} holds one number per edge, which may be its weight; {self._way_out(key)}")

    def _way_out(self, key: str, *, one: bool = True) -> str:
        name = (self.as_argument or self.access).format(key)
        if self.in_file:
            named = "" if not one else "name it edge_weight to weigh the edges with it, or "
            return f"{named}leave it out of the file (in Python weights=None does)"
        if one:
            return f"give weights={name} to weigh the edges with it, or weights=None to leave it out"
        return f"give one column as weights={name}[:, 0], or weights=None to leave them out"


def _column(value: Any) -> Any:
    """Return what has a shape and a type, a list as an array; None for what is no data of vertices or edges."""
    if isinstance(value, list | tuple):
        try:
            value = np.asarray(value)
        except (ValueError, TypeError, RuntimeError):
            value = np.empty(len(value), object)
    value = to_numpy(value)
    known = isinstance(getattr(value, "dtype", None), np.dtype) and len(getattr(value, "shape", ()))
    return value if known else None


def _flat(value: Any) -> Any:
    return as_array(to_numpy(value), "weights").reshape(-1)
