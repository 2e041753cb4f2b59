"""Folders of OGB's node-property data sets as their archives hold them, in both layouts. Nothing is unpickled.

    raw/edge.csv.gz, node-feat.csv.gz, node-label.csv.gz, num-node-list.csv.gz, num-edge-list.csv.gz   ogbn-arxiv, -products
    raw/data.npz (edge_index, node_feat, num_nodes_list, num_edges_list), node-label.npz               ogbn-papers100M
    split/<name>/train.csv.gz, valid.csv.gz, test.csv.gz                                               both
    mapping/labelidx2*.csv.gz                                                                          names of classes

Shapes: N vertices, E edges, D features.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mggcn.errors import GraphError, printable
from mggcn.files import open_file, reason, require_file
from mggcn.graph.build.room import IN_MEMORY, Room
from mggcn.graph.build.staging import Staging
from mggcn.graph.class_names import LONGEST
from mggcn.graph.csr import Array
from mggcn.graph.edges import Edges
from mggcn.graph.file_rows import FileRows
from mggcn.graph.sources.archive import large_member
from mggcn.graph.sources.binary_edges import edges_of_rows
from mggcn.graph.sources.edge_list import read_edge_list
from mggcn.graph.sources.packed import about_bytes, most_bytes, open_text
from mggcn.graph.vertex_data import as_single

PARTS = {"train": "train.csv.gz", "val": "valid.csv.gz", "test": "test.csv.gz"}
ROWS_AT_ONCE = 1 << 12
MOST_NAMES = 1 << 20
"""Bytes that are read of a file of names."""
DOWNLOAD = "download and unpack the archive again"


def is_ogb(path: Path) -> bool:
    """Return whether a folder is an unpacked archive of a node-property data set."""
    return any((path / "raw" / name).is_file() for name in ("edge.csv.gz", "data.npz", "triplet-type-list.csv.gz"))


def read_ogb(path: Path, room: Room = IN_MEMORY) -> dict[str, Any]:
    """Read the arguments of `from_arrays` that a folder holds: edges as published, features, labels and the split.

    Edges may be listed in one direction only (ogbn-products): symmetrise them. Years, species, features of edges are left.
    Cost: one pass over each file; large edges and features go where the room says, other arrays are held.
    Raises: GraphError for several or heterogeneous graphs, files that are missing or damaged, and fewer or more edges than
    are counted.
    """
    raw = path / "raw"
    if (raw / "triplet-type-list.csv.gz").is_file():
        raise GraphError(f"{path} holds vertices and edges of several kinds; mggcn reads one kind: export one relation")
    binary = (raw / "data.npz").is_file()
    found = _binary(raw, room) if binary else _text(raw, room)
    counts, edges = (found.pop(name).reshape(-1) for name in ("counts", "edge_counts"))
    if counts.size != 1 or edges.size != 1:
        raise GraphError(f"{path} holds {counts.size} graphs, expected one: node-property data sets have one")
    listed = found["edges"].count if isinstance(found["edges"], Edges) else np.shape(found["edges"])[-1]
    if listed != edges[0]:
        raise GraphError(
            f"{raw} lists {listed} edges, and its count of edges (num-edge-list, num_edges_list) says {edges[0]}: the "
            f"folder is not whole; {DOWNLOAD}"
        )
    whole = {**found, "num_vertices": int(counts[0]), "splits": _splits(path / "split")}
    return whole | class_names_of(path, found["labels"])


def _text(raw: Path, room: Room) -> dict[str, Any]:
    features, edges = raw / "node-feat.csv.gz", raw / "edge.csv.gz"
    return {
        "edges": read_edge_list(edges, room.for_list(edges, most_bytes(edges), about_bytes(edges))).edges,
        "features": _table(features, room) if features.exists() else None,
        "labels": _numbers(raw / "node-label.csv.gz", np.float64),
        "counts": _numbers(raw / "num-node-list.csv.gz", np.int64, 1),
        "edge_counts": _numbers(raw / "num-edge-list.csv.gz", np.int64, 1),
    }


def _binary(raw: Path, room: Room) -> dict[str, Any]:
    path = raw / "data.npz"
    with _archive(path) as data, _archive(raw / "node-label.npz") as label:
        edges = _read(path, lambda: large_member(path, "edge_index", room, "iu"))
        pair = edges is not None and len(edges.shape) == 2 and edges.shape[0] == 2
        features = _read(path, lambda: large_member(path, "node_feat", room))
        if features is None and "node_feat" in data.files:
            features = _member(data, path, "node_feat")
        return {
            "edges": edges_of_rows(edges) if pair else _member(data, path, "edge_index"),
            "features": features,
            "labels": _member(label, raw / "node-label.npz", "node_label"),
            "counts": _member(data, path, "num_nodes_list"),
            "edge_counts": _member(data, path, "num_edges_list"),
        }


def _table(path: Path, room: Room) -> Any:
    """Read a packed table of features, float32 (rows, columns), by blocks of rows."""
    return _read(path, lambda: _rows_of(path, room.for_rows(path, most_bytes(path))))


def _rows_of(path: Path, staging: Staging) -> Any:
    column, count, width = staging.column("features", np.float32, 0), 0, 0
    with open_text(path) as lines:
        while block := list(itertools.islice(lines, ROWS_AT_ONCE)):
            table = as_single(
                np.loadtxt(block, np.float64, delimiter=",", comments=None, ndmin=2), f"numbers of {path}"
            )
            width = width or table.shape[1]
            if table.shape[1] != width:
                raise ValueError(f"rows of {width} and of {table.shape[1]} numbers")
            column.write(count, table.reshape(-1))
            count += table.size
    rows = column.rows(count)
    shape = (count // max(width, 1), width)
    return replace(rows, shape=shape) if isinstance(rows, FileRows) else rows.array().reshape(shape)


def _splits(folder: Path) -> dict[str, Array]:
    names = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    if len(names) != 1:
        came = ", ".join(names) or "none"
        raise GraphError(f"{folder} must hold one folder with {', '.join(PARTS.values())}, got {came}; {DOWNLOAD}")
    return {part: _numbers(folder / names[0] / file, np.int64, 1)[:, 0] for part, file in PARTS.items()}


def class_names_of(path: Path, labels: Array) -> dict[str, Any]:
    """Return the names of classes of a folder's mapping, if it names all that occur in one column of labels."""
    files = sorted((path / "mapping").glob("labelidx2*.csv.gz"))
    if len(files) != 1 or labels.dtype.kind not in "iuf" or labels.shape[1:] not in ((), (1,)):
        return {}
    names: dict[int, str] = _read(files[0], lambda: _mapping(files[0]))
    known = labels[~np.isnan(labels)] if labels.dtype.kind == "f" else labels
    complete = sorted(names) == list(range(len(names))) and len(names) > max(known.max(initial=-1), 0)
    return {"class_names": [names[number] for number in sorted(names)]} if complete else {}


def _mapping(path: Path) -> dict[int, str]:
    """Read names by number. Raises: OSError, ValueError."""
    with open_file(path) as packed, gzip.open(packed) as file:
        text = file.read(MOST_NAMES + 1)
    if len(text) > MOST_NAMES:
        raise ValueError(f"it holds more than {MOST_NAMES} bytes of names")
    names, seen = dict[int, str](), set[str]()
    try:
        rows = [row for row in csv.reader(text.decode().splitlines()[1:]) if len(row) == 2]
    except csv.Error as error:
        raise ValueError(str(error)) from error
    for number, name in rows:
        if number.strip().isdecimal() and len(number) < 10:
            called = printable(" ".join(name.split()))[: LONGEST - 20] or f"class {number}"
            called = f"{called} ({number})" if called in seen else called
            seen.add(called)
            names[int(number)] = called
    return names


def _numbers(path: Path, dtype: npt.DTypeLike, columns: int | None = None) -> Array:
    """Read a packed table of numbers without a header, (rows, columns)."""
    table: Array = _read(path, lambda: np.loadtxt(require_file(path), dtype, delimiter=",", comments=None, ndmin=2))
    if columns is not None and table.shape[1] != columns:
        raise GraphError(f"{path} must have {columns} columns, got {table.shape[1]}; {DOWNLOAD}")
    return table


def _archive(path: Path) -> Any:
    if path.is_file() and not zipfile.is_zipfile(path):  # NumPy would leave the file open
        raise GraphError(f"cannot read {path}: it is not a zip file, or is truncated; {DOWNLOAD}")
    return _read(path, lambda: np.load(require_file(path), allow_pickle=False))


def _member(archive: Any, path: Path, name: str) -> Array:
    if name not in archive.files:
        raise GraphError(f"{path}: expected the key {name}, got {', '.join(archive.files)}; {DOWNLOAD}")
    array: Array = _read(path, lambda: archive[name])
    return array


def _read(path: Path, reader: Callable[[], Any]) -> Any:
    try:
        return reader()
    except (OSError, EOFError, ValueError, zlib.error, zipfile.BadZipFile) as error:
        raise GraphError(f"cannot read {path}: {reason(error)}; {DOWNLOAD}") from error
