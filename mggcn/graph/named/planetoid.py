"""The citation graphs of Planetoid (Yang, Cohen and Salakhutdinov, ICML 2016), as published: pickles of Python 2.

There is no other form of them. They are read only after their SHA-256 was checked, and nothing of what they name is called.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import scipy.sparse as sp

from mggcn.files import open_file, read_text
from mggcn.graph.csr import Array

PARTS: Final = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")
"""What a file holds, by the end of its name: features and labels to train on (x, y), to test (tx, ty), and all others."""
VALIDATION: Final = 500
"""Vertices behind those to train on."""
_KNOWN: Final = {
    ("collections", "defaultdict"): defaultdict,
    ("__builtin__", "list"): list,
    ("__builtin__", "object"): object,
    ("copy_reg", "_reconstructor"): lambda kind, *_: kind(),
    ("scipy.sparse.csr", "csr_matrix"): SimpleNamespace,
    ("numpy.core.multiarray", "_reconstruct"): lambda *_: np.empty(0),
    ("numpy", "ndarray"): "what _reconstruct is told to make",
    ("numpy", "dtype"): lambda code, *_: np.dtype(code, copy=True),
}


class _Unpickler(pickle.Unpickler):
    """Makes arrays, the attributes of sparse matrices, lists and dictionaries, and calls nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which could execute code")
        return _KNOWN[module, name]


def read_planetoid(folder: Path) -> dict[str, Any]:
    """Return the arguments of `from_arrays` from the published files `ind.NAME.x`, ... of a folder.

    Edges come once for each direction that is listed, without duplicates and loops. Vertices of citeseer that no file
    describes have features of zero and no label. Splits are the public ones: 20 a class, 500 and those of test.index.
    Cost: some copies of the files. Raises: whatever Python, NumPy and SciPy do for files that were not published, OSError.
    """
    files = {path.name.split(".", 2)[-1]: path for path in folder.glob("ind.*")}
    test = np.array(read_text(files["test.index"]).split(), np.int64)
    known, tested = (_features(files[part]) for part in ("allx", "tx"))
    known_labels, tested_labels = (_classes(files[part]) for part in ("ally", "ty"))
    num_known, num_train = known.shape[0], len(_load(files["y"]))
    num_vertices = max(num_known, int(test.max()) + 1)
    places = np.concatenate([np.arange(num_known), test])
    labels = np.full(num_vertices, -1, np.int64)
    labels[places] = np.concatenate([known_labels, tested_labels])
    rows = sp.csr_matrix(
        (np.ones(len(places), np.float32), (places, np.arange(len(places)))), (num_vertices, len(places))
    )
    return {
        "edges": _edges(_load(files["graph"]), num_vertices),
        "features": (rows @ sp.vstack([known, tested], "csr")).astype(np.float32),
        "labels": labels,
        "splits": {
            "train": np.arange(num_train),
            "val": np.arange(num_train, min(num_train + VALIDATION, num_known)),
            "test": np.sort(test),
        },
    }


def _load(path: Path) -> Any:
    with open_file(path) as file:
        return _Unpickler(file, encoding="latin1").load()


def _features(path: Path) -> sp.csr_matrix:
    found = _load(path)
    return sp.csr_matrix((found.data, found.indices, found.indptr), found._shape)


def _classes(path: Path) -> Array:
    found = _load(path)
    return np.where(found.any(1), found.argmax(1), -1)


def _edges(neighbours: dict[int, list[int]], num_vertices: int) -> Array:
    """Return the edges (2, E) of lists of neighbours."""
    sources = np.repeat(np.array(list(neighbours), np.int64), [len(part) for part in neighbours.values()])
    targets = np.array([v for part in neighbours.values() for v in part], np.int64)
    kept = np.unique(sources * num_vertices + targets)
    edges = np.stack(np.divmod(kept, num_vertices))
    return edges[:, edges[0] != edges[1]]
