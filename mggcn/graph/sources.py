"""Graphs from files: stores, OGB folders, `.npz` archives, MatrixMarket and edge lists. Nothing is ever unpickled.

Shapes: N vertices, E edges, D features, S splits.
"""

from __future__ import annotations

import contextlib
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from mggcn.errors import GraphError, StoreError, did_you_mean, no_regular_file
from mggcn.graph.binary_edges import RAW, read_npy, read_raw
from mggcn.graph.check import SPLIT_NAME
from mggcn.graph.convert import PARTS, from_arrays, from_object, from_pyg, with_features, with_options
from mggcn.graph.csr import Array, Graph
from mggcn.graph.datasets import DATASETS, data_folder, obtain
from mggcn.graph.edge_list import EdgeList, read_edge_list
from mggcn.graph.edges import Edges
from mggcn.graph.file_rows import FileRows
from mggcn.graph.ids import numbered_columns
from mggcn.graph.join import join
from mggcn.graph.matrix_market import read_matrix_market
from mggcn.graph.named_edges import holds_names, read_named_edges
from mggcn.graph.ogb import is_ogb, read_ogb
from mggcn.graph.options import DEFAULT_OPTIONS, GraphOptions
from mggcn.graph.packed import PACKED, most_bytes
from mggcn.graph.parquet import num_rows, read_parquet_edges, read_parquet_features
from mggcn.graph.room import IN_MEMORY, Room
from mggcn.graph.saved_pyg import read_data
from mggcn.graph.store import EXPECTED, open_store
from mggcn.graph.vertex_data import MADE

DATA = ".pt"
EDGE_LISTS = (".txt", ".tsv", ".csv", ".edges", ".el", ".edgelist")
KNOWN = (
    "a store, a folder of OGB's, .npz, .npy, .i32, .i64, .parquet, .pt, .mtx or an edge list "
    f"({' '.join(EDGE_LISTS)}), the last two also with .gz or .zst"
)


def load_source(
    source: str | Path,
    *,
    root: str | Path | None = None,
    options: GraphOptions = DEFAULT_OPTIONS,
    verify: bool = False,
    name: str | None = None,
    room: Room = IN_MEMORY,
    **arrays: Any,
) -> Graph:
    """Load a graph from a path, or from a name under `root`: a store, a folder of OGB's, or a file by content and suffix.

    `arrays` complete a file and override what it holds: num_vertices, num_classes, num_relations, and as arrays or paths of
    `.npy` (or SciPy `.npz`) files features [N, D] (or "identity", "degree"), labels [N], edge_types [E], ids [N] (or
    "edges", see `numbered`) and splits, a mapping from train, val, test to masks or id lists.
    Cost: a store opens lazily; edges of text and binary files go where `room` says, other files are read into memory.
    Raises: StoreError or GraphError, which say what was expected.
    """
    path = find_source(source, root)
    if path.is_dir() and not is_ogb(path):
        made = arrays.pop("features") if _is_made(arrays.get("features")) else None
        if arrays:
            raise GraphError(
                f"{path} is a store and complete, {', '.join(sorted(arrays))} cannot be added; leave it out"
            )
        return with_options(with_features(open_store(path, verify), made), options, room)
    if path.suffix.lower() == DATA and path.is_file():
        kept = {key: _load_companion(value) for key, value in arrays.items() if value is not None}
        about = {"name": name or path.stem, "meta": {"source": str(path.resolve())}}
        return from_pyg(read_data(path), **kept, **about, options=options, room=room)
    ids = _load_companion(arrays.pop("ids", None))
    found = read_ogb(path) if path.is_dir() else _read_file(path, room, ids is not None)
    made = {"features": arrays.pop("features")} if _is_made(arrays.get("features")) else {}
    if "features" in arrays:
        arrays["features"] = _load_features(arrays["features"])
    found |= made | {key: _load_companion(value) for key, value in arrays.items() if value is not None}
    meta = {"source": str(path.resolve())} | found.pop("meta", {})
    names = found.pop("names", None)
    if ids is not None:
        if not isinstance(found.get("edges"), Edges):
            raise GraphError(f"{path} numbers its vertices itself; ids (--ids) belong to edge lists: leave them out")
        found = numbered_columns(found["edges"], names, ids, {key: found[key] for key in found if key != "edges"})
    return from_arrays(**found, options=options, name=name or path.name.split(".")[0], meta=meta, room=room)


def _is_made(features: Any) -> bool:
    return isinstance(features, str) and features in MADE


def load_joined(
    sources: Sequence[Any] | Mapping[str, Any],
    *,
    root: str | Path | None = None,
    options: GraphOptions = DEFAULT_OPTIONS,
    name: str = "graphs",
    verify: bool = False,
    room: Room = IN_MEMORY,
) -> Graph:
    """Load several sources as one block-diagonal graph.

    sources: a list, of which each keeps its own splits, or a mapping from "train", "val" and "test" to a source or a list,
    all labelled vertices of which belong to that part. Each is a path, or an object as `from_object` takes it.
    Raises: GraphError as `join`; as what loads each, with its number.
    """
    listed = _listed(sources)
    graphs = []
    for number, (_, source) in enumerate(listed, start=1):
        try:
            if isinstance(source, str | Path):
                graphs.append(
                    load_source(source, root=root, options=options, verify=verify, room=room.part(str(number)))
                )
            else:
                graphs.append(from_object(source, options=options))
        except GraphError as error:
            raise GraphError(f"graph {number} of {len(listed)}: {error}") from error
    return join(graphs, [part for part, _ in listed], name=name)


def _listed(sources: Sequence[Any] | Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Sources with the part of each, "" if its own splits count."""
    if not isinstance(sources, Mapping):
        return [("", source) for source in sources]
    if unknown := sorted(set(sources) - set(PARTS)):
        raise GraphError(f"graphs belong to {', '.join(PARTS)}, got {', '.join(map(str, unknown))}; name one of these")
    lists = {part: some if isinstance(some, list | tuple) else [some] for part, some in sources.items()}
    return [(part, source) for part, some in lists.items() for source in some]


def find_source(source: str | Path, root: str | Path | None) -> Path:
    """Return the path of a source: a path, a name under `root`, or a data set's name (datasets.py), then its store.

    Raises: GraphError if there is none, or it cannot be downloaded.
    """
    candidates = [Path(source)] if root is None else [Path(source), Path(root) / source]
    for path in candidates:
        if path.exists():
            return path
    if str(source) in DATASETS:
        return obtain(DATASETS[str(source)], data_folder(root))
    near = {entry.name: entry for path in candidates if path.parent.is_dir() for entry in path.parent.iterdir()}
    meant = did_you_mean(Path(source).name, [*near, *DATASETS])
    names = ", ".join(str(path) for path in candidates) + meant
    raise GraphError(f"there is no {names}; expected {KNOWN}, or a name that `mggcn datasets` lists. {EXPECTED}")


def _read_file(path: Path, room: Room, named: bool) -> dict[str, Any]:
    """Read the arguments of `from_arrays` that a file holds, told apart by its first bytes, then by its suffix."""
    if kind := no_regular_file(path):
        raise GraphError(f"{path} is {kind}, expected {KNOWN}: write what it gives to a file")
    with path.open("rb") as file:
        start = file.read(16)
    suffixes = path.suffixes[-2:] if path.suffix in PACKED else path.suffixes[-1:]
    kind = next((kind for magic, kind in _MAGIC.items() if start.startswith(magic)), (suffixes or [""])[0].lower())
    if named and kind in EDGE_LISTS and holds_names(path):
        return _found(read_named_edges(path, room.for_list(path, most_bytes(path))))
    if kind in _STREAMED:
        return _STREAMED[kind](path, room)
    if kind not in READERS:
        raise GraphError(f"cannot recognise {path}; expected {KNOWN}: rename or convert it")
    return READERS[kind](path)


def _read_edges(path: Path, room: Room) -> dict[str, Any]:
    return _found(read_edge_list(path, room.for_list(path, most_bytes(path))))


def _found(text: EdgeList) -> dict[str, Any]:
    meta = {"input": {"header": text.header}} if text.header else {}
    return {"edges": text.edges, "meta": meta, "names": text.names}


def _read_matrix_market(path: Path, room: Room) -> dict[str, Any]:
    return {"adj": read_matrix_market(path, room.for_list(path, most_bytes(path)))}


def _read_parquet(path: Path, room: Room) -> dict[str, Any]:
    return {"edges": read_parquet_edges(path, room.for_list(path, 32 * num_rows(path)))}


def _read_npz(path: Path) -> dict[str, Any]:
    """Read one of four layouts, distinguished by their keys."""
    try:
        if not zipfile.is_zipfile(path):
            raise ValueError("it is not a zip file, or it is truncated")
        with np.load(path, allow_pickle=False) as archive:
            members = _Members(path, archive)
            if {"format", "data", "shape"} <= members.keys:
                return {"adj": sp.load_npz(path)}
            if "adj_indptr" in members.keys:
                return _graph_data(members)
            if "indptr" in members.keys:
                return _own_layout(members)
            if {"edges", "edge_index"} & members.keys:
                return _edge_layout(members)
            keys = ", ".join(sorted(members.keys))
    except GraphError:
        raise
    except Exception as error:  # a hostile zip folder or array header raises nearly anything
        raise GraphError(f"{path} is not a valid .npz archive: {error}; fix or re-export it") from error
    raise GraphError(
        f"{path} holds {keys}; expected scipy.sparse.save_npz, or the keys indptr, indices (values, features, labels, "
        "train, val, test), or adj_indptr, adj_indices, adj_data, adj_shape, or edge_index"
    )


READERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    ".npz": _read_npz,
    ".npy": lambda path: {"edges": read_npy(path)},
    **dict.fromkeys(RAW, lambda path: {"edges": read_raw(path)}),
}
"""By suffix: returns the arguments of `from_arrays` that a file holds. Raises: GraphError."""
_STREAMED: dict[str, Callable[[Path, Room], dict[str, Any]]] = {
    ".mtx": _read_matrix_market,
    ".parquet": _read_parquet,
    **dict.fromkeys(EDGE_LISTS, _read_edges),
}
"""By suffix, those whose edges go where the room says."""
_MAGIC = {b"PK": ".npz", b"%%MatrixMarket": ".mtx"}


class _Members:
    """The arrays of an archive, loaded one by one: those that nobody asks for may be pickled."""

    def __init__(self, path: Path, archive: Any) -> None:
        self.path = path
        self.archive = archive
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
    values = members.get("values")
    return {
        "adj": (members.need("indptr"), members.need("indices"), *([] if values is None else [values])),
        "features": members.matrix("features_") if "features_indptr" in members.keys else members.get("features"),
        "labels": members.get("labels"),
        "splits": {key: members.get(key) for key in sorted(members.keys) if SPLIT_NAME.fullmatch(key)},
    }


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
    edges = members.get("edge_index") if "edge_index" in members.keys else members.need("edges").T
    masks = {part: members.get(f"{part}_masks", f"{part}_mask", part) for part in ("train", "val", "test")}
    return {
        "edges": edges,
        "weights": members.get("edge_weight"),
        "edge_types": members.get("edge_type"),
        "features": members.get("node_features", "node_feat", "x", "features"),
        "labels": members.get("node_labels", "y", "labels"),
        "splits": {part: mask for part, mask in masks.items() if mask is not None},
    }


def _load_features(value: Any) -> Any:
    """Leave dense features of a plain `.npy` file in it, to be read by ranges; anything else as `_load_companion`."""
    if not isinstance(value, str | Path) or Path(value).suffix != ".npy" or no_regular_file(Path(value)):
        return value
    with contextlib.suppress(StoreError):  # others are named by _load_companion
        rows = FileRows.open(Path(value))
        return rows if len(rows.shape) == 2 and rows.dtype.kind in "iufb" else value
    return value


def _load_companion(value: Any) -> Any:
    """Load the array behind a path, each of a mapping; anything else is taken as it is."""
    if isinstance(value, Mapping):
        return {key: _load_companion(item) for key, item in value.items()}
    if not isinstance(value, str | Path) or value == "edges":
        return value
    path = Path(value)
    if kind := no_regular_file(path):
        raise GraphError(f"cannot load {path}: it is {kind}; write what it gives to a file")
    if path.suffix == ".parquet":
        return read_parquet_features(path)
    try:
        return sp.load_npz(path) if path.suffix == ".npz" else np.load(path, allow_pickle=False)
    except Exception as error:  # a hostile header raises nearly anything
        pickled = "it is text, or holds pickled objects, which can execute code and are never loaded"
        raise GraphError(
            f"cannot load {path}: {pickled if 'allow_pickle' in str(error) else error}; expected a plain .npy file as "
            "numpy.save writes it (numpy.loadtxt reads text), or a .npz file of scipy.sparse.save_npz"
        ) from error
