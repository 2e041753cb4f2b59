"""The files of a graph: their names, their exact bytes, and the digest over all of them."""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from mggcn.graph.csr import CSR, Graph, Rows
from mggcn.graph.file_rows import FileRows

FORMAT_VERSION = 1
CHUNK_BYTES = 1 << 24
ADJ_FILES = ("indptr", "indices", "values", "types", "type_degrees")
"""Files of a matrix: those of CSR, in order."""
ADJ_T_FILES = tuple(f"{name}_t" for name in ADJ_FILES)
FEATURE_FILES = ("features_indptr", "features_indices", "features_data")


def is_own(meta: Mapping[str, Any]) -> bool:
    """Return whether mggcn wrote the folder of this meta.json, so that it was checked and has checksums."""
    return "format_version" in meta


def graph_arrays(graph: Graph) -> dict[str, Rows]:
    """Return every array of a graph by the name of its file (without `.npy`)."""
    arrays = _csr_arrays(graph.adj, ADJ_FILES)
    if not graph.symmetric:
        arrays |= _csr_arrays(graph.adj_t, ADJ_T_FILES)
    if isinstance(graph.features, CSR):
        arrays |= _csr_arrays(graph.features, FEATURE_FILES)
    elif graph.features is not None:
        arrays["features"] = graph.features
    if graph.labels is not None:
        arrays["labels"] = graph.labels
    if graph.ids is not None:
        arrays["ids"] = graph.ids
    return arrays | dict(graph.splits) | {f"{part}_links": rows for part, rows in graph.links.items()}


def npy_nbytes(rows: Rows) -> int:
    """Return the size in bytes of the array as an `.npy` file."""
    return len(_npy_header(rows)) + math.prod(rows.shape) * rows.dtype.itemsize


def npy_chunks(rows: Rows) -> Iterator[bytes]:
    """Yield the array as an `.npy` file, in pieces of about 16 MiB (one row at least)."""
    yield _npy_header(rows)
    if row_bytes := math.prod(rows.shape[1:]) * rows.dtype.itemsize:
        step = max(1, CHUNK_BYTES // row_bytes)
        for start in range(0, rows.shape[0], step):
            yield rows.read(start, start + step).tobytes()


def graph_sha256(graph: Graph) -> str:
    """Return one digest of all that training can see: structure, features, labels, splits and extents.

    It does not depend on where the graph came from: a stored graph and the same graph in memory agree.
    Cost: none for a store (its per-file digests are trusted), else one pass over all arrays in bounded memory.
    """
    return digest_of(graph_digests(graph))


def digest_of(digests: Mapping[str, Any]) -> str:
    """Return one digest of all that `graph_digests` returns."""
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def graph_digests(graph: Graph) -> dict[str, Any]:
    """Return the input of `graph_sha256`: the digest of every array by name, and the extents. Cost: as there."""
    stored = graph.meta.get("sha256", {}) if is_own(graph.meta) else {}
    digests = {}
    for name, rows in graph_arrays(replace(graph, ids=None)).items():  # training sees no names
        # An array that replaced a stored one must not inherit its digest.
        from_store = isinstance(rows, FileRows) and rows.path.name == f"{name}.npy"
        digests[name] = (stored.get(f"{name}.npy") if from_store else None) or _npy_sha256(rows)
    num_features = graph.features.num_cols if isinstance(graph.features, CSR) else None
    content: dict[str, Any] = {"num_features": num_features, "num_classes": graph.num_classes, "files": digests}
    if graph.num_relations:
        content["num_relations"] = graph.num_relations
    return content


def _csr_arrays(csr: CSR, files: tuple[str, ...]) -> dict[str, Rows]:
    arrays = (csr.indptr, csr.indices, csr.values, csr.types, csr.type_degrees)
    return {name: rows for name, rows in zip(files, arrays, strict=False) if rows is not None}


def _npy_header(rows: Rows) -> bytes:
    header = io.BytesIO()
    descr = {"descr": np.lib.format.dtype_to_descr(rows.dtype), "fortran_order": False, "shape": rows.shape}
    np.lib.format.write_array_header_1_0(header, descr)
    return header.getvalue()


def _npy_sha256(rows: Rows) -> str:
    digest = hashlib.sha256()
    for piece in npy_chunks(rows):
        digest.update(piece)
    return digest.hexdigest()
