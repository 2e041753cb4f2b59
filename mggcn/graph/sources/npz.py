"""Graphs in `.npz` archives, in four layouts. Nothing is ever unpickled.

Shapes: N vertices, E edges, D features.
"""

from __future__ import annotations

import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from mggcn.errors import GraphError, StoreError
from mggcn.graph.build.room import IN_MEMORY, Room
from mggcn.graph.check import SPLIT_NAME, canonical_split
from mggcn.graph.csr import Array, ArrayRows
from mggcn.graph.edges import Edges, Entries, RowIds
from mggcn.graph.file_rows import FileRows
from mggcn.graph.sources.archive import large_member
from mggcn.graph.sources.binary_edges import edges_of_rows
from mggcn.graph.sources.edge_data import Beside, is_weight


def read_npz(path: Path, room: Room = IN_MEMORY) -> dict[str, Any]:
    """Read the arguments of `from_arrays` from one of four layouts, distinguished by their keys.

    Cost: large columns of edges and dense features go through files of the room, other arrays are held.
    Raises: GraphError, StoreError if the disk has too little space.
    """
    try:
        if not zipfile.is_zipfile(path):
            raise ValueError("it is not a zip file, or it is truncated")
        with np.load(path, allow_pickle=False) as archive:
            members = _Members(path, archive, room)
            if {"format", "data", "shape"} <= members.keys:
                return {"adj": _scipy_matrix(members)}
            if "adj_indptr" in members.keys:
                return members.with_unread(_graph_data(members))
            if "indptr" in members.keys:
                return members.with_unread(_own_layout(members))
            if {"edges", "edge_index"} & members.keys:
                return members.with_unread(_edge_layout(members))
            keys = ", ".join(sorted(members.keys))
    except (GraphError, StoreError):
        raise
    except Exception as error:  # a hostile zip folder or array header raises nearly anything
        raise GraphError(f"{path} is not a valid .npz archive: {error}; fix or re-export it") from error
    raise GraphError(
        f"{path} holds {keys}; expected scipy.sparse.save_npz, or the keys indptr, indices (values, features, labels, "
        "train, val, test), or adj_indptr, adj_indices, adj_data, adj_shape, or edge_index"
    )


class _Members:
    """The arrays of an archive, loaded one by one: those that nobody asks for may be pickled."""

    def __init__(self, path: Path, archive: Any, room: Room) -> None:
        self.path, self.archive, self.room = path, archive, room
        self.keys: set[str] = set(archive.files)
        self._asked: set[str] = set()

    def get(self, *names: str) -> Any:
        """Load the first of these that exists, else None."""
        for name in names:
            if name in self.keys:
                return self._load(name)
        return None

    def need(self, name: str) -> Array:
        """Load an array that must be there."""
        if name not in self.keys:
            raise GraphError(f"{self.path}: expected the key {name}, got {', '.join(sorted(self.keys))}; add it")
        return self._load(name)

    def rows(self, name: str, kinds: str = "iuf") -> FileRows | Array | None:
        """Return an array in a file of the room if it is large, else load it if it exists."""
        if name not in self.keys:
            return None
        self._asked.add(name)
        rows = large_member(self.path, name, self.room, kinds)
        return self._load(name) if rows is None else rows

    def entries(self, indptr: str, indices: str, values: str, num_cols: int) -> Entries | None:
        """Return a square CSR whose columns are large, None for another or one that is no CSR."""
        columns, pointers = self.rows(indices, "iu"), self.need(indptr)
        if not isinstance(columns, FileRows) or pointers.shape != (num_cols + 1,) or len(columns.shape) != 1:
            return None
        if pointers.dtype.kind not in "iu" or pointers[0] or pointers[-1] != columns.shape[0]:
            return None
        if np.any(pointers[1:] < pointers[:-1]):
            return None
        found = self.rows(values)
        weights = ArrayRows(found) if isinstance(found, np.ndarray) else found
        return Entries(Edges(RowIds(pointers.astype(np.int64)), columns, weights), num_cols)

    def matrix(self, prefix: str) -> Any:
        """Load a CSR matrix stored as prefix + indptr, indices, data, shape; a missing shape is inferred."""
        data, indices, indptr = (self.need(f"{prefix}{part}") for part in ("data", "indices", "indptr"))
        shape: Any = self.get(f"{prefix}shape")
        if shape is None:
            shape = (indptr.size - 1, int(indices.max()) + 1 if indices.size else 0)
        matrix: Any = sp.csr_array((data, indices, indptr), shape=shape)
        matrix.check_format(full_check=True)
        return matrix

    def with_unread(self, found: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a graph with what nobody asked for beside them: weights as arrays, others by header."""
        columns = {name: self._column(name) for name in sorted(self.keys - self._asked)}
        return found | {"beside": Beside(columns, f"{{}} of {self.path.name}", in_file=True)}

    def _column(self, name: str) -> Any:
        """Return a member as its header describes it, loaded only if it is called weights."""
        if is_weight(name):
            return self._load(name)
        try:
            with self.archive.zip.open(f"{name}.npy") as file:
                version = np.lib.format.read_magic(file)
                read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                shape, _, dtype = read(file)
        except Exception:  # a hostile header raises nearly anything, and nothing of this member is read
            shape, dtype = (0,), np.dtype(object)
        return _Header(shape, dtype)

    def _load(self, name: str) -> Array:
        self._asked.add(name)
        try:
            array: Array = self.archive[name]
        except ValueError as error:
            if "allow_pickle" not in str(error):
                raise
            raise GraphError(
                f"{self.path}: {name} is pickled, and mggcn never unpickles because that can execute code; "
                "load the file where you trust it and save plain arrays (scipy.sparse.save_npz for matrices)"
            ) from error
        return array


@dataclass(frozen=True, slots=True)
class _Header:
    """What is known of a member that nobody loads."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def _own_layout(members: _Members) -> dict[str, Any]:
    weights = next(
        (name for name in ("values", "data", *sorted(filter(is_weight, members.keys))) if name in members.keys), ""
    )
    adj: Any = members.entries("indptr", "indices", weights, members.need("indptr").size - 1)
    if adj is None:
        values = members.get(weights)
        adj = (members.need("indptr"), members.need("indices"), *([] if values is None else [values]))
    return {
        "adj": adj,
        "features": members.matrix("features_") if "features_indptr" in members.keys else members.rows("features"),
        "labels": members.get("labels"),
        "splits": _splits(members),
    }


def _scipy_matrix(members: _Members) -> Any:
    """Return what `scipy.sparse.save_npz` wrote."""
    square = members.need("shape").tolist()
    if members.need("format").item() in (b"csr", "csr") and len(square) == 2 and square[0] == square[1]:
        entries = members.entries("indptr", "indices", "data", square[0])
        if entries is not None:
            return entries
    return sp.load_npz(members.path)


def _graph_data(members: _Members) -> dict[str, Any]:
    """Layout of Shchur's gnn-benchmark and of GraphData."""
    sparse = "attr_indptr" in members.keys
    return {
        "adj": members.matrix("adj_"),
        "features": members.matrix("attr_") if sparse else members.get("attr_matrix", "attr"),
        "labels": members.get("labels"),
    }


def _edge_layout(members: _Members) -> dict[str, Any]:
    """edge_index [2, E] as in PyG and OGB, or edges [E, 2] as in the heterophilous graphs of Platonov et al."""
    edges: Any = members.rows("edge_index", "iu") if "edge_index" in members.keys else members.need("edges").T
    if isinstance(edges, FileRows):
        if len(edges.shape) != 2 or edges.shape[0] != 2:
            raise GraphError(f"{members.path}: edge_index must have shape [2, E], got {edges.shape}; transpose it")
        edges = edges_of_rows(edges)
    feature = next((name for name in ("node_features", "node_feat", "x", "features") if name in members.keys), "")
    return {
        "edges": edges,
        "edge_types": members.get("edge_type"),
        "features": members.rows(feature),
        "labels": members.get("node_labels", "y", "labels"),
        "splits": _splits(members),
    }


def _splits(members: _Members) -> dict[str, Any]:
    """Return masks and lists of ids by the names of their splits: train, train_mask or train_masks."""
    named = {key: re.sub(r"_masks?$", "", key) for key in sorted(members.keys)}
    return {name: members.get(key) for key, name in named.items() if SPLIT_NAME.fullmatch(canonical_split(name))}
