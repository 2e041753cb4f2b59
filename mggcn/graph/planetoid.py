"""The citation graphs of Planetoid (Yang, Cohen and Salakhutdinov, ICML 2016), as published: pickles of Python 2."""

from __future__ import annotations

import pickle
import re
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

import numpy as np
import scipy.sparse as sp

from mggcn.files import open_file, read_bytes
from mggcn.graph.csr import Array

PARTS: Final = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")
"""What a file holds, by the end of its name: features and labels to train on (x, y), to test (tx, ty), and all others."""
VALIDATION: Final = 500
"""Vertices behind those to train on."""


class _Matrix:
    """Takes the attributes of a pickled csr_matrix; SciPy's own class would act on them unchecked."""


def _made(kind: type, *_: object) -> object:
    if kind is not _Matrix:
        raise pickle.UnpicklingError(f"it asks for an object of {kind}")
    return _Matrix()


class _Dtype:
    """Takes the code of a pickled dtype, such as f4, and its order of bytes; NumPy's own follows whatever state it gets."""

    def __init__(self, code: object, *_: object) -> None:
        self.code, self.order = code, "<"

    def __setstate__(self, state: Any) -> None:
        self.order = state[1]


class _Array:
    """Takes the state of a pickled array, from which NumPy would make one that reads anywhere."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def numbers(self) -> Array:
        """Return the array. Raises: ValueError unless it is of one or two dimensions, of numbers that are all there."""
        try:
            _, shape, kind, by_columns, content = self.state
            dtype = np.dtype(f"{'>' if kind.order == '>' else '<'}{kind.code}")
            content = content.encode("latin1") if isinstance(content, str) else content
            if not re.fullmatch(r"[iuf][1248]", kind.code) or not 1 <= len(shape) <= 2:
                raise ValueError(f"of type {kind.code} and shape {shape}")
            flat = np.frombuffer(content, dtype)
            return flat.reshape(shape, order="F" if by_columns else "C").astype(dtype.newbyteorder("="))
        except (TypeError, AttributeError, OverflowError, UnicodeError) as error:
            raise ValueError(f"it is no array ({error})") from error


def _array(*_: object) -> _Array:
    return _Array()


_KNOWN: Final = {
    ("collections", "defaultdict"): defaultdict,
    ("__builtin__", "list"): list,
    ("__builtin__", "object"): object,
    ("copy_reg", "_reconstructor"): _made,
    ("scipy.sparse.csr", "csr_matrix"): _Matrix,
    ("numpy.core.multiarray", "_reconstruct"): _array,
    ("numpy", "ndarray"): "what _reconstruct is told to make",
    ("numpy", "dtype"): _Dtype,
}


class _Unpickler(pickle.Unpickler):
    """Makes arrays, sparse matrices, lists and dictionaries, and calls nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which could execute code")
        return _KNOWN[module, name]


def read_planetoid(folder: Path) -> dict[str, Any]:
    """Return the arguments of `from_arrays` that the files `ind.NAME.x`, ... of a folder hold.

    Edges come once for each direction that is listed, without duplicates and loops. Vertices of citeseer that no file
    describes have features of zero and no label. Splits are the public ones: 20 a class, 500 and those of test.index.
    Cost: some copies of the files. Raises: ValueError for content that is not Planetoid's, OSError.
    """
    files = {path.name.split(".", 2)[-1]: path for path in folder.glob("ind.*")}
    if missing := [part for part in PARTS if part not in files]:
        raise ValueError(f"there is no file ind.*.{' or '.join(missing)}")
    test = _test_index(files["test.index"])
    known, tested = (_features(files[part]) for part in ("allx", "tx"))
    known_labels, tested_labels = (_classes(files[part]) for part in ("ally", "ty"))
    num_vertices, num_train = max(known.shape[0], int(test.max()) + 1), len(_classes(files["y"]))
    if known.shape[1] != tested.shape[1] or (len(known_labels), len(tested_labels), len(test)) != (
        known.shape[0],
        *(tested.shape[0],) * 2,
    ):
        raise ValueError("features, labels and test.index are not of the same vertices")
    if test.min() < known.shape[0] or len(np.unique(test)) != len(test):
        raise ValueError("test.index names a vertex twice, or one of those to train on")
    places = np.concatenate([np.arange(known.shape[0]), test])
    labels = np.full(num_vertices, -1, np.int64)
    labels[places] = np.concatenate([known_labels, tested_labels])
    rows = sp.csr_matrix(
        (np.ones(len(places), np.float32), (places, np.arange(len(places)))), (num_vertices, len(places))
    )
    validation = np.arange(num_train, min(num_train + VALIDATION, known.shape[0]))
    return {
        "edges": _edges(files["graph"], num_vertices),
        "features": (rows @ sp.vstack([known, tested], "csr")).astype(np.float32),
        "labels": labels,
        "splits": {"train": np.arange(num_train), "val": validation, "test": np.sort(test)},
    }


def _load(path: Path) -> Any:
    """Return what a pickle holds. Raises: ValueError for what is none, or asks for anything but the kinds above."""
    try:
        with open_file(path) as file:
            return _Unpickler(file, encoding="latin1").load()
    except OSError:
        raise
    except Exception as error:  # a hostile pickle raises nearly anything
        raise ValueError(f"{path.name} is no pickle of arrays ({type(error).__name__}: {error})") from error


def _test_index(path: Path) -> Array:
    words = read_bytes(path).decode("ascii", "replace").split()
    if not words or not all(re.fullmatch(r"\d{1,9}", word) for word in words):
        raise ValueError(f"{path.name} is not a list of vertices")
    return np.array(words, np.int64)


def _features(path: Path) -> sp.csr_matrix:
    found = _load(path)
    if not isinstance(found, _Matrix):
        raise ValueError(f"{path.name} holds {type(found).__name__}, expected a sparse matrix")
    *parts, shape = (vars(found).get(name) for name in ("data", "indices", "indptr", "_shape"))
    arrays = [part.numbers() for part in parts if isinstance(part, _Array)]
    if len(arrays) != len(parts):
        raise ValueError(f"{path.name} lacks an array of its sparse matrix")
    matrix: sp.csr_matrix = sp.csr_matrix(tuple(arrays), shape)
    matrix.check_format(full_check=True)
    return matrix


def _classes(path: Path) -> Array:
    found = _load(path)
    found = found.numbers() if isinstance(found, _Array) else np.empty(0)
    if found.ndim != 2 or not found.shape[1]:
        raise ValueError(f"{path.name} does not hold an array of a column for each class")
    return np.where(found.any(1), found.argmax(1), -1)


def _edges(path: Path, num_vertices: int) -> Array:
    """Return the edges (2, E) of lists of neighbours."""
    found = _load(path)
    if not isinstance(found, dict) or not all(isinstance(part, list) for part in found.values()):
        raise ValueError(f"{path.name} does not hold a list of neighbours for each vertex")
    try:
        sources = np.repeat(np.array(list(found), np.int64), [len(part) for part in found.values()])
        targets = np.array([v for part in found.values() for v in part], np.int64)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"{path.name} names a vertex that is no number of 64 bits ({error})") from error
    if sources.size and not 0 <= min(sources.min(), targets.min()) <= max(sources.max(), targets.max()) < num_vertices:
        raise ValueError(f"{path.name} names a vertex outside 0 .. {num_vertices - 1}")
    kept = np.unique(sources * num_vertices + targets)
    edges = np.stack(np.divmod(kept, num_vertices))
    return edges[:, edges[0] != edges[1]]
