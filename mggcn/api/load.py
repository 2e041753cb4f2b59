"""Graphs from files: stores, OGB folders, `.npz` archives, MatrixMarket and edge lists. Nothing is ever unpickled.

Shapes: N vertices, E edges, D features, S splits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from mggcn.errors import GraphError, StoreError, did_you_mean
from mggcn.files import no_regular_file, open_file
from mggcn.graph.build.room import IN_MEMORY, Room
from mggcn.graph.check import canonical_split
from mggcn.graph.class_names import given_names, with_class_names
from mggcn.graph.convert import from_arrays, with_features, with_options, with_task
from mggcn.graph.csr import Graph
from mggcn.graph.edges import Edges
from mggcn.graph.file_rows import FileRows
from mggcn.graph.ids import numbered, numbered_columns
from mggcn.graph.join import join
from mggcn.graph.named.catalogue import DATASETS, dataset_named, read_elsewhere
from mggcn.graph.named.datasets import data_folder, obtain
from mggcn.graph.options import DEFAULT_OPTIONS, GraphOptions
from mggcn.graph.sources.binary_edges import RAW, read_npy, read_raw
from mggcn.graph.sources.edge_header import NamesError
from mggcn.graph.sources.edge_list import EdgeList, read_edge_list
from mggcn.graph.sources.matrix_market import read_matrix_market
from mggcn.graph.sources.named_edges import read_named_edges
from mggcn.graph.sources.npz import read_npz
from mggcn.graph.sources.ogb import is_ogb, read_ogb
from mggcn.graph.sources.packed import PACKED, about_bytes, most_bytes
from mggcn.graph.sources.parquet import num_rows, read_parquet_column, read_parquet_edges, read_parquet_features
from mggcn.graph.sources.saved_pyg import read_data
from mggcn.graph.store import EXPECTED, open_store
from mggcn.graph.vertex_data import MADE, as_array
from mggcn.interop.objects import PARTS, from_object, from_pyg, with_weights

DATA = ".pt"
FILES = frozenset({"features", "labels", "weights", "edge_types", "splits"})
"""Arguments that may be names of files."""
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
    if arrays.get("class_names") is not None:
        arrays["class_names"] = given_names(arrays["class_names"])
    by_name = {name: value for name in ("ids", "edge_types") if isinstance(value := arrays.get(name), str | Path)}
    room = room.based_on(source=path, **by_name)
    if path.is_dir() and not is_ogb(path):
        made = arrays.pop("features") if _is_made(arrays.get("features")) else None
        names = arrays.pop("class_names", None)
        task = arrays.pop("task", None)
        if arrays:
            raise GraphError(f"{path} is a complete store: {', '.join(sorted(arrays))} cannot be added; leave it out")
        graph = with_task(with_features(open_store(path, verify), made), task)
        graph = with_options(with_class_names(graph, names), options, room)
        return graph if name is None else replace(graph, name=name)
    ids = _load_companion(arrays.pop("ids", None))
    remarks: list[str] = []
    given = _load_companions(arrays, ids, remarks)
    if path.suffix.lower() == DATA and path.is_file():
        given |= {} if ids is None else {"ids": ids}
        meta = {"source": str(path.resolve())} | ({"input": {"remarks": remarks}} if remarks else {})
        return from_pyg(read_data(path), **given, name=name or path.stem, meta=meta, options=options, room=room)
    found = (read_ogb(path, room) if path.is_dir() else _read_file(path, room, ids)) | given
    if "beside" in found:
        found = with_weights(found, given, found.pop("beside"))
    if "weights" in given and given["weights"] is None and isinstance(found.get("edges"), Edges):
        found["edges"] = replace(found["edges"], weights=None)
    meta = {"source": str(path.resolve())} | found.pop("meta", {})
    if remarks:
        notes = meta.get("input", {})
        meta |= {"input": notes | {"remarks": [*notes.get("remarks", []), *remarks]}}
    names = found.pop("names", None)
    if ids is not None:
        if found.get("edges") is None:
            raise GraphError(f"{path} numbers its vertices itself; ids (--ids) belong to edge lists: leave them out")
        rest = {key: found[key] for key in found if key != "edges"}
        listed = isinstance(found["edges"], Edges)
        found = numbered_columns(found["edges"], names, ids, rest) if listed else numbered(found["edges"], ids, rest)
    return from_arrays(**found, options=options, name=name or path.name.split(".")[0], meta=meta, room=room)


def _load_companions(arrays: Mapping[str, Any], ids: Any, remarks: list[str]) -> dict[str, Any]:
    """Return what is given beside a file, loaded where it is the name of one; `remarks` is added to."""
    found = {key: value for key, value in arrays.items() if value is not None or key == "weights"}
    features = found.get("features")
    if isinstance(features, str | Path) and Path(features).suffix == ".parquet":
        found["features"], said = read_parquet_features(Path(features), None if isinstance(ids, str) else ids)
        remarks += said
    elif "features" in found and not _is_made(features):
        found["features"] = _load_features(features)
    loaded = found.keys() & FILES if not _is_made(features) else (found.keys() & FILES) - {"features"}
    return found | {key: _load_companion(found[key]) for key in loaded}


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
    if unknown := sorted(part for part in map(str, sources) if canonical_split(part) not in PARTS):
        raise GraphError(f"graphs belong to {', '.join(PARTS)}, got {', '.join(unknown)}; name one of these")
    lists: dict[str, list[Any]] = {}
    for part, some in sources.items():
        lists.setdefault(canonical_split(part), []).extend(some if isinstance(some, list) else [some])
    return [(part, source) for part, some in lists.items() for source in some]


def find_source(source: str | Path, root: str | Path | None) -> Path:
    """Return the path of a source: a path, a name under `root`, or a data set's name (datasets.py), then its store.

    Raises: GraphError if there is none, or it cannot be downloaded.
    """
    candidates = [Path(source)] if root is None else [Path(source), Path(root) / source]
    for path in candidates:
        if path.exists():
            return path
    if (dataset := dataset_named(str(source))) is not None:
        return obtain(dataset, data_folder(root))
    near = {entry.name: entry for path in candidates if path.parent.is_dir() for entry in path.parent.iterdir()}
    meant = read_elsewhere(str(source)) or did_you_mean(Path(source).name, [*near, *DATASETS])
    names = ", ".join(str(path) for path in candidates) + meant
    raise GraphError(f"there is no {names}; expected {KNOWN}, or a name that `mggcn datasets` lists. {EXPECTED}")


def _read_file(path: Path, room: Room, ids: Any) -> dict[str, Any]:
    """Read the arguments of `from_arrays` that a file holds, recognised by its first bytes, then by its suffix."""
    if kind := no_regular_file(path):
        raise GraphError(f"{path} is {kind}, expected {KNOWN}; save its output to a file first")
    with open_file(path) as file:
        start = file.read(16)
    suffixes = path.suffixes[-2:] if path.suffix in PACKED else path.suffixes[-1:]
    kind = next((kind for magic, kind in _MAGIC.items() if start.startswith(magic)), (suffixes or [""])[0].lower())
    if ids is not None and kind in EDGE_LISTS:
        return _found(_read_by_ids(path, room, ids))
    if ids is not None and kind == ".parquet":
        return _read_parquet(path, room, named=True)
    if kind in _STREAMED:
        return _STREAMED[kind](path, room)
    if kind not in READERS:
        raise GraphError(f"cannot recognise {path}; expected {KNOWN}: rename or convert it")
    return READERS[kind](path)


def _read_edges(path: Path, room: Room) -> dict[str, Any]:
    return _found(read_edge_list(path, room.for_list(path, most_bytes(path), about_bytes(path)), room.tell))


def _read_by_ids(path: Path, room: Room, ids: Any) -> EdgeList:
    """Read edges between ids: whole numbers if all are, and those that are given are not strings, else names."""
    staging = room.for_list(path, most_bytes(path), about_bytes(path))
    text = not isinstance(ids, str) and as_array(ids, "ids").dtype.kind in "UO"
    if not text:
        with contextlib.suppress(NamesError):
            return read_edge_list(path, staging, room.tell, plain=True)
    return read_named_edges(path, staging, room.tell, text=text)


def _found(text: EdgeList) -> dict[str, Any]:
    notes = {"header": text.header, "column_numbers": text.column_numbers, "remarks": list(text.remarks)}
    meta = {"input": {name: note for name, note in notes.items() if note}} if any(notes.values()) else {}
    return {"edges": text.edges, "meta": meta, "names": text.names}


def _read_matrix_market(path: Path, room: Room) -> dict[str, Any]:
    return {"adj": read_matrix_market(path, room.for_list(path, most_bytes(path), about_bytes(path)), room.tell)}


def _read_parquet(path: Path, room: Room, named: bool = False) -> dict[str, Any]:
    staging = room.for_list(path, 32 * num_rows(path), 16 * num_rows(path))
    return _found(read_parquet_edges(path, staging, named=named))


READERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    ".npy": lambda path: {"edges": read_npy(path)},
    **dict.fromkeys(RAW, lambda path: {"edges": read_raw(path)}),
}
"""By suffix: returns the arguments of `from_arrays` that a file holds. Raises: GraphError."""
_STREAMED: dict[str, Callable[[Path, Room], dict[str, Any]]] = {
    ".mtx": _read_matrix_market,
    ".npz": read_npz,
    ".parquet": _read_parquet,
    **dict.fromkeys(EDGE_LISTS, _read_edges),
}
"""By suffix, those whose edges go where the room says."""
_MAGIC = {b"PK": ".npz", b"%%MatrixMarket": ".mtx"}


def _load_features(value: Any) -> Any:
    """Leave dense features of a plain `.npy` file in it, to be read by ranges; anything else as `_load_companion`."""
    if not isinstance(value, str | Path) or Path(value).suffix != ".npy" or no_regular_file(Path(value)):
        return value
    with contextlib.suppress(StoreError):  # others are named by _load_companion
        rows = FileRows.open(Path(value))
        return rows if len(rows.shape) == 2 and rows.dtype.kind in "iufb" else value
    return value


def _load_companion(value: Any) -> Any:
    """Load the array at a path, or each of a mapping; anything else is returned as it is."""
    if isinstance(value, Mapping):
        return {key: _load_companion(item) for key, item in value.items()}
    if not isinstance(value, str | Path) or value == "edges":
        return value
    path = Path(value)
    if kind := no_regular_file(path):
        raise GraphError(f"cannot load {path}: it is {kind}; save its output to a file first")
    if path.suffix == ".parquet":
        return read_parquet_column(path)
    if path.suffix in (DATA, ".pth"):
        raise GraphError(
            f"cannot load {path}: what torch.save writes is pickled, and never unpickled here because that can execute "
            f"code; numpy.save({path.stem + '.npy'!r}, tensor.numpy()) writes a file that is read"
        )
    if path.suffix in EDGE_LISTS:
        raise GraphError(
            f"cannot load {path}: arrays are not read from text; numpy.save({path.stem + '.npy'!r}, "
            "numpy.loadtxt(...)) writes a file that is read, or give a Parquet table or an array"
        )
    try:
        loaded = sp.load_npz(path) if path.suffix == ".npz" else np.load(path, allow_pickle=False)
        if isinstance(loaded, np.lib.npyio.NpzFile):
            loaded.close()
            raise ValueError("it is an archive of several arrays")
        return loaded
    except Exception as error:  # a hostile header raises nearly anything
        pickled = "it is text, or holds pickled objects, which can execute code and are never loaded"
        raise GraphError(
            f"cannot load {path}: {pickled if 'allow_pickle' in str(error) else error}; expected a plain .npy file as "
            "numpy.save writes it (numpy.loadtxt reads text), or a .npz file of scipy.sparse.save_npz"
        ) from error
