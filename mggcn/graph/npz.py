"""Graphs in `.npz` archives, in four layouts. Nothing is ever unpickled.

Shapes: N vertices, E edges, D features.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from mggcn.errors import GraphError, StoreError
from mggcn.graph.archive import large_member
from mggcn.graph.binary_edges import edges_of_rows
from mggcn.graph.check import SPLIT_NAME
from mggcn.graph.csr import Array, ArrayRows
from mggcn.graph.edges import Edges, Entries, RowIds
from mggcn.graph.file_rows import FileRows
from mggcn.graph.room import IN_MEMORY, Room


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
                return _graph_data(members)
            if "indptr" in members.keys:
                return _own_layout(members)
            if {"edges", "edge_index"} & members.keys:
                return _edge_layout(members)
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

    def _load(self, name: str) -> Array:
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


def _own_layout(members: _Members) -> dict[str, Any]:
    adj: Any = members.entries("indptr", "indices", "values", members.need("indptr").size - 1)
    if adj is None:
        values = members.get("values")
        adj = (members.need("indptr"), members.need("indices"), *([] if values is None else [values]))
    return {
        "adj": adj,
        "features": members.matrix("features_") if "features_indptr" in members.keys else members.rows("features"),
        "labels": members.get("labels"),
        "splits": {key: members.get(key) for key in sorted(members.keys) if SPLIT_NAME.fullmatch(key)},
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
    masks = {part: members.get(f"{part}_masks", f"{part}_mask", part) for part in ("train", "val", "test")}
    if isinstance(edges, FileRows):
        if len(edges.shape) != 2 or edges.shape[0] != 2:
            raise GraphError(f"{members.path}: edge_index must have shape [2, E], got {edges.shape}; transpose it")
        edges = edges_of_rows(edges)
    feature = next((name for name in ("node_features", "node_feat", "x", "features") if name in members.keys), "")
    return {
        "edges": edges,
        "weights": members.get("edge_weight"),
        "edge_types": members.get("edge_type"),
        "features": members.rows(feature),
        "labels": members.get("node_labels", "y", "labels"),
        "splits": {part: mask for part, mask in masks.items() if mask is not None},
    }
