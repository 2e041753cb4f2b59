"""What a worker of a comparison reads from a store's folder, whatever its library: NumPy arrays alone.

N vertices, D features.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

SAMPLED = 256
SEED = 90217


def with_loops(store: Path) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """CSR of the graph with a self-loop in every row that has none, columns ascending; kept beside the store."""
    kept = store.with_name(f"{store.name}-loops.npz")
    if not kept.exists():
        indptr, indices = _add_loops(np.load(store / "indptr.npy"), np.load(store / "indices.npy"))
        temporary = kept.with_name(f".{kept.name}.{os.getpid()}.npz")
        np.savez(temporary, indptr=indptr, indices=indices)
        temporary.replace(kept)
    with np.load(kept) as arrays:
        return arrays["indptr"], arrays["indices"]


def _add_loops(
    indptr: npt.NDArray[np.int64], indices: npt.NDArray[np.int32]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    n = indptr.size - 1
    keys = np.repeat(np.arange(n), np.diff(indptr))
    keys *= n
    keys += indices
    keys = np.unique(np.concatenate([keys, np.arange(n) * (n + 1)]))
    counts = np.bincount(keys // n, minlength=n)
    return np.concatenate([[0], np.cumsum(counts)]), (keys % n).astype(np.int32)


def scales(indptr: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """The -1/2-th power of every degree: the normalisation of a symmetric graph on either side."""
    return (np.diff(indptr) ** -0.5).astype(np.float32)


def edge_values(indptr: npt.NDArray[np.int64], indices: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    """The normalised weight of every entry."""
    scale = scales(indptr)
    return np.repeat(scale, np.diff(indptr)) * scale[indices]


def dense_features(store: Path) -> npt.NDArray[np.float32]:
    """The features as a dense matrix, however they are stored."""
    if (store / "features.npy").exists():
        found: npt.NDArray[np.float32] = np.load(store / "features.npy")
        return found
    parts = (np.load(store / f"features_{name}.npy") for name in ("indptr", "indices", "data"))
    indptr, indices, data = parts
    x = np.zeros((indptr.size - 1, int(indices.max()) + 1), np.float32)
    x[np.repeat(np.arange(indptr.size - 1), np.diff(indptr)), indices] = data
    return x


def targets(store: Path, of: str = "train") -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Ids of the training vertices of the first split, or of others of it, and their labels."""
    mask, labels = np.load(store / f"{of}.npy"), np.load(store / "labels.npy")
    ids = np.flatnonzero(mask.reshape(-1, labels.size)[0])
    return ids, labels[ids]


def operand(rows: int, width: int) -> npt.NDArray[np.float32]:
    """The dense matrix that every library multiplies by the graph."""
    return np.random.default_rng(SEED).standard_normal((rows, width), np.float32)


def sample_of(matrix: Any) -> list[float]:
    """Numbers of a matrix at places drawn once for its shape, by which results are compared."""
    rng = np.random.default_rng(SEED)
    rows, cols = (rng.integers(extent, size=SAMPLED) for extent in matrix.shape)
    return [float(value) for value in matrix[rows, cols]]


def normalised_dense(store: Path) -> npt.NDArray[np.float64]:
    """The normalised adjacency of a small graph as a dense matrix."""
    indptr, indices = with_loops(store)
    n = indptr.size - 1
    dense = np.zeros((n, n))
    dense[np.repeat(np.arange(n), np.diff(indptr)), indices] = edge_values(indptr, indices)
    return dense
