"""Folders of OGB's node-property data sets as their archives hold them, in both layouts. Nothing is unpickled.

    raw/edge.csv.gz, node-feat.csv.gz, node-label.csv.gz, num-node-list.csv.gz     ogbn-arxiv, ogbn-products
    raw/data.npz (edge_index, node_feat, num_nodes_list), node-label.npz           ogbn-papers100M
    split/<name>/train.csv.gz, valid.csv.gz, test.csv.gz                           both

Shapes: N vertices, E edges, D features.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mggcn.errors import GraphError
from mggcn.graph.csr import Array

PARTS = {"train": "train.csv.gz", "val": "valid.csv.gz", "test": "test.csv.gz"}
DOWNLOAD = "download and unpack the archive again"


def is_ogb(path: Path) -> bool:
    """Tell whether a folder is an unpacked archive of a node-property data set."""
    return any((path / "raw" / name).is_file() for name in ("edge.csv.gz", "data.npz", "triplet-type-list.csv.gz"))


def read_ogb(path: Path) -> dict[str, Any]:
    """Read the arguments of `from_arrays` that a folder holds: edges as published, features, labels and the split.

    Edges may be listed in one direction only (ogbn-products): symmetrise them. Years, species, features of edges are left.
    Cost: of text, about 7 million ids or 2 million features a second; memory for all arrays twice. Raises: GraphError for
    several or heterogeneous graphs, files that are missing or damaged.
    """
    raw = path / "raw"
    if (raw / "triplet-type-list.csv.gz").is_file():
        raise GraphError(f"{path} holds vertices and edges of several kinds; mggcn reads one kind: export one relation")
    binary = (raw / "data.npz").is_file()
    found = _binary(raw) if binary else _text(raw)
    counts = found.pop("counts").reshape(-1)
    if counts.size != 1:
        raise GraphError(f"{path} holds {counts.size} graphs, expected one: node-property data sets have one")
    return {**found, "num_vertices": int(counts[0]), "splits": _splits(path / "split")}


def _text(raw: Path) -> dict[str, Any]:
    features = raw / "node-feat.csv.gz"
    return {
        "edges": np.ascontiguousarray(_numbers(raw / "edge.csv.gz", np.int64, 2).T),
        "features": _numbers(features, np.float32) if features.is_file() else None,
        "labels": _numbers(raw / "node-label.csv.gz", np.float64),
        "counts": _numbers(raw / "num-node-list.csv.gz", np.int64, 1),
    }


def _binary(raw: Path) -> dict[str, Any]:
    with _archive(raw / "data.npz") as data, _archive(raw / "node-label.npz") as label:
        return {
            "edges": _member(data, raw / "data.npz", "edge_index"),
            "features": _member(data, raw / "data.npz", "node_feat") if "node_feat" in data.files else None,
            "labels": _member(label, raw / "node-label.npz", "node_label"),
            "counts": _member(data, raw / "data.npz", "num_nodes_list"),
        }


def _splits(folder: Path) -> dict[str, Array]:
    names = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    if len(names) != 1:
        came = ", ".join(names) or "none"
        raise GraphError(f"{folder} must hold one folder with {', '.join(PARTS.values())}, got {came}; {DOWNLOAD}")
    return {part: _numbers(folder / names[0] / file, np.int64, 1)[:, 0] for part, file in PARTS.items()}


def _numbers(path: Path, dtype: npt.DTypeLike, columns: int | None = None) -> Array:
    """Read a packed table of numbers without a header, (rows, columns)."""
    table: Array = _read(path, lambda: np.loadtxt(path, dtype, delimiter=",", comments=None, ndmin=2))
    if columns is not None and table.shape[1] != columns:
        raise GraphError(f"{path} must have {columns} columns, got {table.shape[1]}; {DOWNLOAD}")
    return table


def _archive(path: Path) -> Any:
    if path.is_file() and not zipfile.is_zipfile(path):  # NumPy would leave the file open
        raise GraphError(f"cannot read {path}: it is no zip file, or truncated; {DOWNLOAD}")
    return _read(path, lambda: np.load(path, allow_pickle=False))


def _member(archive: Any, path: Path, name: str) -> Array:
    if name not in archive.files:
        raise GraphError(f"{path}: expected the key {name}, got {', '.join(archive.files)}; {DOWNLOAD}")
    array: Array = _read(path, lambda: archive[name])
    return array


def _read(path: Path, reader: Callable[[], Any]) -> Any:
    try:
        return reader()
    except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
        raise GraphError(f"cannot read {path}: {error}; {DOWNLOAD}") from error
