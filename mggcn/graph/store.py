"""Graph stores: folders of `meta.json` and `.npy` files that open lazily and know their own checksums.

Files: indptr indices [values] [types type_degrees], the same with _t unless symmetric, features or
features_{indptr,indices,data}, labels, one bool mask file per split. A folder without `format_version` in its meta.json is
somebody else's: it is checked in full when it opens.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, final

import numpy as np

from mggcn.errors import GraphError, StoreError, one_line
from mggcn.files import open_file, parse_json, read_bytes, reason
from mggcn.graph.check import SPLIT_NAME, canonical_split, check_graph, index_mask
from mggcn.graph.class_names import as_class_names, check_count
from mggcn.graph.csr import CSR, WINDOW, ArrayRows, Graph, Rows, check_layout
from mggcn.graph.digests import REMEDY, stored_digests, unsealed
from mggcn.graph.file_rows import FileRows
from mggcn.graph.ids import as_ids
from mggcn.graph.layout import (
    ADJ_FILES,
    ADJ_T_FILES,
    FEATURE_FILES,
    FORMAT_VERSION,
    graph_arrays,
    graph_sha256,
    is_own,
)
from mggcn.graph.splits import SPLITS
from mggcn.graph.store_write import write_store
from mggcn.graph.trusted import Trusted

__all__ = [
    "EXPECTED",
    "FileRows",
    "graph_sha256",
    "has_checksums",
    "is_store",
    "open_store",
    "store_folder",
    "write_store",
]

EXPECTED = (
    "a graph store is a folder with meta.json, indptr.npy, indices.npy and, where there are any, features.npy, "
    "labels.npy, train.npy, val.npy, test.npy; make one with `mggcn prepare SOURCE STORE` or `mggcn generate`"
)


def is_store(path: str | Path) -> bool:
    """Return whether a path looks like a graph store."""
    return (Path(path) / "meta.json").is_file() and (Path(path) / "indptr.npy").is_file()


def has_checksums(path: str | Path) -> bool:
    """Return whether a path is a store that mggcn wrote, with checksums that `open_store` can compare."""
    return is_store(path) and is_own(_read_meta(Path(path)))


def open_store(path: str | Path, verify: bool = False) -> Graph:
    """Open a folder as a graph without reading its arrays into memory.

    Cost: a few reads for each file. With `verify`, or for a folder that mggcn did not write, every file is read and
    checked in bounded memory; `verify` also compares the SHA-256 of every file with the one in meta.json.
    Raises: StoreError if the folder is not a store, is damaged or is replaced meanwhile, GraphError if it does not hold a
    valid graph.
    """
    folder = Path(path)
    identity = _identity(folder)
    meta = _read_meta(folder)
    names = _file_names(folder, meta)
    if verify:
        _compare_checksums(folder, meta)
    # Files that were compared as a whole need no comparison of their blocks.
    digests = stored_digests(folder, meta) if is_own(meta) and not verify else {}
    files = _Files(folder, digests, meta.get("sha256", {}))
    adj = _csr(files, names, ADJ_FILES, None)
    symmetric = "indptr_t" not in names
    labels = files.open("labels") if "labels" in names else None
    graph = Graph(
        name=one_line(str(meta.get("name", folder.name))),
        adj=adj,
        adj_t=adj if symmetric else _csr(files, names, ADJ_T_FILES, None),
        features=_features(files, names, meta),
        labels=labels,
        splits={name: _split(files, name, adj.num_rows) for name in names if SPLIT_NAME.fullmatch(name)},
        num_classes=_num_classes(meta, labels),
        meta=meta,
        class_names=_class_names(folder, meta, labels),
        ids=_ids(files, meta) if "ids" in names else None,
        links={part: files.open(f"{part}_links") for part in SPLITS if f"{part}_links" in names},
        num_relations=0 if adj.types is None else _count(meta, "num_relations") or _highest(adj.types) + 1,
    )
    if is_own(meta):
        _compare_names(folder, names, graph)
    _compare_extents(graph, folder)
    files.check_headers()
    if verify or not is_own(meta):
        check_graph(graph)
    if _identity(folder) != identity:
        raise StoreError(f"{folder} was replaced while it was opened; start again")
    return graph


def _identity(folder: Path) -> tuple[int, int] | None:
    """Return what tells a folder from another one of its name, None if there is none."""
    with contextlib.suppress(OSError):
        found = folder.stat()
        return found.st_dev, found.st_ino
    return None


def store_folder(graph: Graph) -> Path | None:
    """Return the folder that holds exactly this graph, or None if any part of it is in memory, exchanged or left out."""
    arrays = graph_arrays(graph)
    places = {
        rows.path.parent if isinstance(rows, FileRows) and rows.path.stem == name else None
        for name, rows in arrays.items()
    }
    folder = places.pop()
    if folder is None or places or set(_file_names(folder, graph.meta)) != arrays.keys():
        return None
    same = graph.num_classes == _num_classes(graph.meta, graph.labels)
    return folder if same and graph.class_names == _class_names(folder, graph.meta, graph.labels) else None


def _read_meta(folder: Path) -> dict[str, Any]:
    path = folder / "meta.json"
    try:
        meta = parse_json(unsealed(read_bytes(path), path))
    except OSError as error:
        if path.exists():
            raise StoreError(f"cannot read {path}: {reason(error)}; {REMEDY}") from error
        came = "is a folder without a readable meta.json" if folder.is_dir() else "is not a folder"
        raise StoreError(f"{folder} {came}; {EXPECTED}") from error
    except ValueError as error:
        raise StoreError(f"{path} is not valid JSON ({error}); prepare the graph again") from error
    if not isinstance(meta, dict):
        raise StoreError(f"{path} must hold a JSON object, got {type(meta).__name__}; {EXPECTED}")
    version = meta.get("format_version", FORMAT_VERSION)
    if version != FORMAT_VERSION:
        raise StoreError(
            f"{folder} has store format {version!r}, this mggcn reads {FORMAT_VERSION}; "
            "upgrade mggcn or prepare the graph again"
        )
    return meta


def _file_names(folder: Path, meta: Mapping[str, Any]) -> list[str]:
    """List the arrays of a store: those that meta.json records, or every .npy file of a foreign folder."""
    if not is_own(meta):
        stems = sorted(file.stem for file in folder.glob("*.npy"))
        if odd := [
            stem for stem in stems if canonical_split(stem) != stem and SPLIT_NAME.fullmatch(canonical_split(stem))
        ]:
            raise StoreError(f"{folder} holds {odd[0]}.npy; call it {canonical_split(odd[0])}.npy, as which it is read")
        return stems
    recorded = meta.get("sha256")
    names = sorted(str(name).removesuffix(".npy") for name in recorded) if isinstance(recorded, dict) else []
    odd = [name for name in names if not name.replace("_", "").isalnum()]
    if odd or "indptr" not in names or meta.get("symmetric") != ("indptr_t" not in names):
        raise StoreError(
            f"{folder / 'meta.json'}: `sha256` lists other arrays than `symmetric` says there are; prepare the graph again"
        )
    return names


def _compare_names(folder: Path, names: list[str], graph: Graph) -> None:
    """Refuse arrays that nothing reads, in meta.json or in the folder: a changed letter would take one away in silence."""
    unread = sorted(set(names) - graph_arrays(graph).keys())
    if unread:
        raise StoreError(
            f"{folder / 'meta.json'} names {', '.join(unread)}, which no graph has, or which lacks its other half; "
            "prepare it again"
        )
    unknown = sorted({file.stem for file in folder.glob("*.npy")} - set(names))
    if unknown:
        raise StoreError(
            f"{folder} holds {', '.join(f'{name}.npy' for name in unknown)}, of which meta.json knows nothing; move what "
            "is not the store's elsewhere, or prepare it again"
        )


def _compare_checksums(folder: Path, meta: Mapping[str, Any]) -> None:
    if not is_own(meta):
        return
    stored_digests(folder, meta)
    trusted = Trusted(folder)
    for name, expected in meta["sha256"].items():
        FileRows.open(folder / name)  # compares its size with its header: a digest would read whatever is behind
        try:
            state = trusted.state(name)
            with open_file(folder / name) as file:
                came = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise StoreError(f"{folder / name} cannot be read: {reason(error)}; copy or prepare it again") from error
        if came != expected:
            raise StoreError(
                f"{folder / name} has SHA-256 {came}, meta.json expects {expected}; "
                "the file is damaged or was edited: copy or prepare it again"
            )
        trusted.add(name, state, expected)


@final
class _Files:
    """The arrays of a folder as they are opened, with the digests of their blocks by file name."""

    def __init__(self, folder: Path, digests: Mapping[str, tuple[int, bytes]], sha256: Mapping[str, str]) -> None:
        self.folder, self._digests, self._opened = folder, digests, list[FileRows]()
        self._sha256, self._trusted = sha256, Trusted(folder)
        self._known = self._trusted.known() if digests else {}

    def open(self, stem: str, *, one_row: bool = False) -> FileRows:
        """Open one; a file that was compared before, and has not changed, is trusted. Raises: StoreError."""
        name = f"{stem}.npy"
        rows = FileRows.open(self.folder / name, one_row=one_row, digests=self._digests.get(name))
        if (checked := rows.checked) is not None:
            # Looked at after the file was opened: one that replaces it meanwhile is in no record.
            state = self._state(name)
            if self._known.get(name) == [*state, self._sha256[name]]:
                rows = replace(rows, checked=None)
            else:
                checked.complete = partial(self._trusted.add, name, state, self._sha256[name])
        self._opened.append(rows)
        return rows

    def _state(self, name: str) -> list[int]:
        try:
            return self._trusted.state(name)
        except OSError:  # which opening it will tell
            return []

    def check_headers(self) -> None:
        """Compare the blocks that have the headers of all files. Raises: StoreError."""
        for rows in self._opened:
            rows.check_start()


def _csr(files: _Files, names: list[str], stems: tuple[str, ...], num_cols: int | None) -> CSR:
    """Open a matrix; without `num_cols` it is square."""
    indptr, indices = (files.open(stem) for stem in stems[:2])
    values, *types = (files.open(stem) if stem in names else None for stem in stems[2:])
    typed = dict(zip(("types", "type_degrees"), types, strict=False))
    csr = CSR(indptr, indices, values, indptr.shape[0] - 1 if num_cols is None else num_cols, **typed)
    check_layout(csr, str(files.folder / stems[0]))
    return csr


def _features(files: _Files, names: list[str], meta: Mapping[str, Any]) -> Rows | CSR | None:
    if "features" in names:
        return files.open("features")
    if "features_indptr" not in names:
        return None
    num_cols = _count(meta, "num_features")
    if num_cols is None:
        num_cols = _highest(files.open("features_indices")) + 1
    return _csr(files, names, FEATURE_FILES, num_cols)


def _ids(files: _Files, meta: Mapping[str, Any]) -> Rows:
    """Open names of vertices; those of a folder that mggcn did not write are checked. Raises: GraphError."""
    rows = files.open("ids")
    if is_own(meta):
        return rows
    known = as_ids(rows.array())
    return rows if known.dtype == rows.dtype else ArrayRows(known)


def _split(files: _Files, name: str, num_vertices: int) -> Rows:
    rows = files.open(name, one_row=True)
    if rows.dtype.kind not in "iu":
        return rows
    return ArrayRows(index_mask(rows.read(0, 1)[0], num_vertices, f"{files.folder / name}.npy")[np.newaxis])


def _num_classes(meta: Mapping[str, Any], labels: Rows | None) -> int:
    count = _count(meta, "num_classes")
    if count is None:
        if labels is not None and len(labels.shape) == 2:
            return labels.shape[1]
        return 0 if labels is None else _highest(labels) + 1
    return count


def _class_names(folder: Path, meta: Mapping[str, Any], labels: Rows | None) -> tuple[str, ...]:
    """Names of classes that meta.json holds, one for each. Raises: StoreError."""
    try:
        names = as_class_names(meta.get("class_names", ()))
        check_count(names, _num_classes(meta, labels))
        return names
    except GraphError as error:
        raise StoreError(f"{folder / 'meta.json'}: {error}; prepare the graph again") from error


def _count(meta: Mapping[str, Any], key: str) -> int | None:
    count = meta.get(key)
    if count is None or (type(count) is int and count >= 0):
        return count
    raise StoreError(f"meta.json: {key} must be a whole number, got {count!r}; prepare the graph again")


def _highest(rows: Rows) -> int:
    """Largest entry of an integer vector, -1 if there is none; others are refused later."""
    if rows.dtype.kind not in "iu":
        return -1
    return max((int(rows.read(i, i + WINDOW).max()) for i in range(0, rows.shape[0], WINDOW)), default=-1)


def _label_type(graph: Graph) -> tuple[type[np.generic], int]:
    """Type and dimensions of the labels of the task that meta.json names; one that does not is of classes, or foreign."""
    types: dict[str, tuple[type[np.generic], int]] = {"labels": (np.int8, 2), "numbers": (np.float32, 2)}
    task = graph.meta.get("task", "classes" if is_own(graph.meta) else graph.task)
    return types.get(task, (np.int64, 1))


def _compare_extents(graph: Graph, folder: Path) -> None:
    """Compare headers alone: exchanged or outdated files show here at no cost."""
    num_vertices = graph.num_vertices
    nnz = int(graph.adj.indptr.read(num_vertices, num_vertices + 1)[0])
    expected = dict.fromkeys((*ADJ_FILES, *ADJ_T_FILES), nnz) | {"indptr_t": num_vertices + 1}
    del expected["indptr"]
    expected |= {
        "features": num_vertices,
        "features_indptr": num_vertices + 1,
        "labels": num_vertices,
        "ids": num_vertices,
    }
    expected |= dict.fromkeys(graph.splits, num_vertices)
    types = {"features": (np.float32, 2), "labels": _label_type(graph)} | dict.fromkeys(graph.splits, (np.bool_, 2))
    types |= dict.fromkeys((f"{part}_links" for part in graph.links), (np.int32, 2))
    for name, rows in graph_arrays(graph).items():
        dtype, ndim = types.get(name, (rows.dtype, 1))
        came = rows.shape[-1] if name in graph.splits else rows.shape[0]
        if rows.dtype != dtype or len(rows.shape) != ndim or came != expected.get(name, came):
            raise StoreError(
                f"{folder / name}.npy holds {rows.dtype} {rows.shape}; a graph of {num_vertices} vertices and {nnz} "
                f"edges needs {np.dtype(dtype)} with {expected.get(name, came)} entries: the files belong to different "
                "graphs, or need conversion"
            )
    counts = [("n", num_vertices), ("num_vertices", num_vertices), ("nnz_directed", nnz), ("num_edges", nnz)]
    for key, came in counts:
        if graph.meta.get(key, came) != came:
            raise StoreError(
                f"{folder}: meta.json says {key} = {graph.meta[key]}, the files hold {came}; prepare it again"
            )
