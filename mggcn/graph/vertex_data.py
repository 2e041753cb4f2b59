"""Features, labels and splits from outside: any array-like in, the types that `Graph` promises out.

Shapes: N vertices, D features, S splits. Content is checked afterwards, by `check_graph`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from mggcn.errors import GraphError
from mggcn.graph.check import canonical_split, index_mask
from mggcn.graph.csr import CSR, Array, ArrayRows, Rows, Task
from mggcn.graph.file_rows import FileRows
from mggcn.graph.nonzeros import csr_if_sparse

ROWS_AT_ONCE = 1 << 14
SINGLE: np.dtype[Any] = np.dtype(np.float32)
MADE = ("identity", "degree")
"""Names of features that are made from the vertices or edges of a graph."""


def to_numpy(tensor: Any) -> Any:
    """Convert a torch tensor (dense, COO or CSR, on any device) to NumPy or SciPy; anything else passes through."""
    if not callable(getattr(tensor, "to_sparse_coo", None)):
        return tensor
    tensor = tensor.detach().cpu()
    if str(tensor.dtype) in ("torch.bfloat16", "torch.float16"):
        tensor = tensor.float()
    if str(tensor.layout) == "torch.strided":
        return tensor.numpy()
    coo = tensor.to_sparse_coo().coalesce()
    indices = coo.indices().numpy()
    return sp.coo_array((coo.values().numpy(), (indices[0], indices[1])), shape=tuple(tensor.shape))


def as_array(values: Any, what: str, *, missing: bool = False) -> Array:
    """Convert what is array-like. Raises: GraphError if rows differ in length, or entries are missing, unless `missing`."""
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, RuntimeError) as error:
        raise GraphError(f"{what} cannot be read as an array: {error}; give a NumPy array or a torch tensor") from error
    lacking = missing_entries(values, array)
    if not missing and lacking.any():
        raise GraphError(
            f"{what}: {int(lacking.sum())} entries are missing (masked, or NA), the first at "
            f"{tuple(int(i) for i in np.argwhere(lacking)[0])}; fill them or drop them"
        )
    return array


def missing_entries(values: Any, array: Array) -> npt.NDArray[np.bool_]:
    """Return which entries are masked, or None or pandas's NA among objects: bool, in the shape of `array`.

    Cost: nothing, except for masked arrays, lists of them and arrays of objects; then bool () that is False.
    """
    if isinstance(values, np.ma.MaskedArray):
        return np.ma.getmaskarray(values)
    if isinstance(values, list | tuple) and any(isinstance(row, np.ma.MaskedArray) for row in values):
        rows = [
            np.ma.getmaskarray(row) if isinstance(row, np.ma.MaskedArray) else np.zeros_like(row, np.bool_)
            for row in values
        ]
        return (
            np.stack(np.broadcast_arrays(*rows)) if array.dtype.kind != "O" else np.array([row.any() for row in rows])
        )
    if array.dtype.kind != "O":
        return np.zeros((), np.bool_)
    found = [value is None or type(value).__name__ in ("NAType", "NaTType") for value in array.flat]
    return np.array(found, np.bool_).reshape(array.shape)


def with_unknown(labels: Any) -> Any:
    """Return labels whose missing entries are -1, or NaN among floating-point numbers; others as they are."""
    try:
        array: Array = np.asarray([] if labels is None else labels)
    except (ValueError, TypeError, RuntimeError):  # which as_array says
        return labels
    lacking = missing_entries(labels, array)
    if not lacking.any():
        return labels
    if array.dtype.kind == "U":
        return np.where(lacking, "", array)
    if array.dtype.kind == "O":
        try:
            return np.where(lacking, np.nan, np.where(lacking, 0, array).astype(np.float64))
        except (ValueError, TypeError):  # names, which as_labels refuses
            return labels
    return np.where(
        lacking, np.nan if array.dtype.kind == "f" else -1, array.astype(np.promote_types(array.dtype, np.int8))
    )


def as_single(array: Array, what: str) -> npt.NDArray[np.float32]:
    """Return numbers as float32, the same array if it is float32. Raises: GraphError for one that is too large."""
    with np.errstate(over="ignore"):
        single = array.astype(np.float32, copy=False)
    if single is not array and array.dtype.kind == "f" and np.isinf(single).any():
        lost = np.isinf(single) & np.isfinite(array)
        if lost.any():
            raise GraphError(
                f"{what} hold {array[lost].flat[0]:g}, too large for float32, which holds numbers up to 3.4e38; scale them "
                "down"
            )
    return single


def is_sparse(array: Any) -> bool:
    """Return whether a value is a SciPy sparse matrix or array."""
    return bool(sp.issparse(array))


def as_features(features: Any, num_vertices: int, row_normalize: bool) -> Rows | CSR | None:
    """Convert a dense array or SciPy matrix [N, D] to float32 rows or a CSR; a float32 array is shared, not copied.

    A dense array with few nonzeros becomes a CSR (graph/nonzeros.py).

    Raises: GraphError on a wrong shape or type, NaN, or numbers that float32 cannot hold.
    """
    if features is None:
        return None
    in_file = isinstance(features, FileRows)
    if not is_sparse(features) and not in_file:
        features = as_array(features, "features")
    if features.dtype.kind not in "iufb" or len(features.shape) != 2 or features.shape[0] != num_vertices:
        raise GraphError(
            f"features must be real numbers of shape [{num_vertices}, D], got {features.dtype} of shape "
            f"{features.shape}; give one row per vertex, or leave features out"
        )
    rows: Rows | CSR
    if is_sparse(features):
        rows = csr_from_scipy(features)
    elif in_file:
        rows = csr_if_sparse(MappedRows(features, _single))
        if row_normalize and not isinstance(rows, CSR):
            return MappedRows(rows, _normalized)
    else:
        rows = csr_if_sparse(ArrayRows(np.ascontiguousarray(as_single(features, "features"))))
    return normalized_rows(rows) if row_normalize else rows


def made_features(kind: str, adj: CSR, adj_t: CSR) -> Rows | CSR:
    """Return features that need no source: "identity", a CSR [N, N] of ones on the diagonal, or "degree", [N, 1] or [N, 2].

    Degree: log(1 + number of in-edges), and in a directed graph log(1 + number of out-edges) in a second column.
    Raises: GraphError for another name.
    """
    if kind not in MADE:
        raise GraphError(f"features must be an array, a file, or one of {', '.join(MADE)}, got {kind!r}")
    if kind == "identity":
        indptr = np.arange(adj.num_rows + 1, dtype=np.int64)
        return CSR(ArrayRows(indptr), ArrayRows(indptr[:-1].astype(np.int32)), None, adj.num_rows)
    matrices = [adj_t] if adj is adj_t else [adj_t, adj]
    degrees = [np.diff(matrix.read_pointers(0, matrix.num_rows + 1)) for matrix in matrices]
    return ArrayRows(np.log1p(np.stack(degrees, axis=1)).astype(np.float32))


def csr_from_scipy(matrix: Any) -> CSR:
    """Convert a SciPy matrix to a CSR: duplicates summed, zeros dropped, columns sorted."""
    csr = sp.csr_array(matrix, copy=True)
    csr.sum_duplicates()
    csr.eliminate_zeros()
    indptr, indices = csr.indptr.astype(np.int64), csr.indices.astype(np.int32)
    return CSR(ArrayRows(indptr), ArrayRows(indices), ArrayRows(as_single(csr.data, "features")), int(csr.shape[1]))


def normalized_rows(features: Rows | CSR) -> Rows | CSR:
    """Divide every row by the sum of its absolute values; rows of zeros stay. The result is in memory."""
    if not isinstance(features, CSR):
        dense = features.read(0, features.shape[0])
        for start in range(0, dense.shape[0], ROWS_AT_ONCE):
            dense[start : start + ROWS_AT_ONCE] = _normalized(dense[start : start + ROWS_AT_ONCE])
        return ArrayRows(dense)
    indptr = features.indptr.array()
    values = np.ones(features.nnz, np.float32) if features.values is None else features.values.read(0, features.nnz)
    row_of = np.repeat(np.arange(features.num_rows), np.diff(indptr))
    sums = np.bincount(row_of, weights=np.abs(values), minlength=features.num_rows)
    values = (values / np.where(sums > 0, sums, 1.0)[row_of]).astype(np.float32)
    return CSR(features.indptr, features.indices, ArrayRows(values), features.num_cols)


@dataclass(frozen=True, slots=True)
class MappedRows:
    """Rows that a function converts, one by one, to float32 or another type when they are read."""

    rows: Rows
    change: Callable[[Array], Array]
    dtype: np.dtype[Any] = SINGLE

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rows.shape

    def read(self, start: int, stop: int) -> Array:
        return self.change(self.rows.read(start, stop))

    def array(self) -> Array:
        return self.read(0, self.shape[0])

    copied = True

    def take(self, ids: npt.NDArray[np.int64]) -> Array:
        return self.change(self.rows.take(ids))

    def in_place(self) -> MappedRows:
        return MappedRows(self.rows.in_place(), self.change, self.dtype)


def _single(rows: Array) -> Array:
    return as_single(rows, "features")


def _normalized(rows: Array) -> Array:
    """Divide every row, in place, by the sum of its absolute values."""
    sums = np.abs(rows).sum(axis=1, dtype=np.float64, keepdims=True)
    rows /= np.where(sums > 0, sums, 1.0).astype(np.float32)
    return rows


def as_labels(
    labels: Any, num_vertices: int, num_classes: int | None, task: Task | None = None
) -> tuple[Rows | None, int]:
    """Convert labels to those of a task (Graph.labels); -1 or NaN means unlabelled.

    Whole numbers [N] or [N, 1] are classes, False and True being 0 and 1; 0 and 1 [N, T] several labels; other numbers, [N]
    or [N, T], what is to be predicted. Floating-point numbers are whole where all of them are. task: says which of these,
    where numbers alone do not: whole ones that are to be predicted as numbers, or one column of 0 and 1.

    Entries that are masked, or NA in pandas, are unlabelled, too.

    Returns: the labels and the number of classes, or of columns.

    Raises: GraphError on another length, numbers that are not finite, or far too large for class numbers.
    """
    if labels is None:
        return None, num_classes or 0
    array = as_array(with_unknown(labels), "labels")
    if task != "classes" and (matrix := _as_entries(array, num_vertices, task)) is not None:
        if num_classes not in (None, matrix.shape[1]):
            raise GraphError(
                f"labels have {matrix.shape[1]} columns, but num_classes is {num_classes}; leave num_classes out"
            )
        return ArrayRows(matrix), matrix.shape[1]
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.shape != (num_vertices,) or array.dtype.kind not in "iufb":
        todo = "give each vertex a label, -1 for unlabelled"
        if array.ndim == 1 and array.dtype.kind not in "iufb":
            todo = "number the classes from 0 (numpy.unique(labels, return_inverse=True) does)"
        raise GraphError(
            f"labels must be one number, or one row of them, for each of {num_vertices} vertices, got {array.dtype} of "
            f"shape {np.shape(labels)}; {todo}"
        )
    if array.dtype.kind == "f":
        array = np.where(np.isnan(array), -1, array)
        if not np.array_equal(array, np.rint(array)) or not np.isfinite(array).all():
            raise GraphError("classes must be whole numbers, or NaN for unlabelled; give other numbers task='numbers'")
    highest = int(array.max()) if array.size else -1
    if highest >= 2**31 or (num_classes is None and highest >= max(num_vertices, 2)):
        shown = str(highest) if highest < 2**63 else f"{float(highest):g}"
        raise GraphError(
            f"the largest label is {shown} for {num_vertices} vertices; number classes from 0 (from Python, num_classes "
            "allows more), or say task='numbers' (--task numbers) if they are numbers to predict"
        )
    return ArrayRows(array.astype(np.int64)), highest + 1 if num_classes is None else num_classes


def _as_entries(array: Array, num_vertices: int, task: Task | None) -> Array | None:
    """Return labels that are no classes: int8 [N, T] of 0, 1, -1, or float32 [N, T] with NaN; None for others."""
    if array.dtype.kind not in "iufb" or array.ndim not in (1, 2) or array.shape[0] != num_vertices or not array.size:
        return None
    columns = 1 if array.ndim == 1 else array.shape[1]
    known = array[~np.isnan(array)] if array.dtype.kind == "f" else array
    whole = array.dtype.kind != "f" or bool((known == np.rint(known)).all())
    if task is None and whole and columns == 1:
        return None
    binary = whole and known.size and known.min() >= -1 and known.max() <= 1
    if task == "labels" and not binary:
        raise GraphError("several labels a vertex must be 0, 1, or -1 or NaN for unknown; give numbers another task")
    if binary and task != "numbers":
        filled = np.where(np.isnan(array), -1, array) if array.dtype.kind == "f" else array
        return filled.astype(np.int8).reshape(num_vertices, columns)
    if task is None and array.dtype.kind != "f":
        raise GraphError(
            f"labels of {columns} columns must be 0, 1 or -1 for unknown, got {known.min()} to {known.max()}; for "
            "numbers that are to be predicted, say task='numbers' (--task numbers)"
        )
    return as_single(array, "labels").reshape(num_vertices, columns)


def as_splits(splits: Mapping[str, Any] | None, num_vertices: int) -> dict[str, Rows]:
    """Convert each split, a bool mask [N] or [S, N] or a list of vertex ids, to a bool array [S, N]; valid stands for val.

    Raises: GraphError on other shapes or types and on ids that repeat or lie outside [0, N).
    """
    arrays: dict[str, Array] = {}
    for given, split in (splits or {}).items():
        name = canonical_split(given)
        if name in arrays:
            raise GraphError(f"splits hold {name!r} twice, as {given!r} and under another name; leave one of them out")
        arrays[name] = as_array(split, f"split {given!r}")
    return {name: ArrayRows(_masks(split, num_vertices, name)) for name, split in arrays.items()}


def _masks(split: Array, num_vertices: int, name: str) -> Array:
    if split.dtype == np.bool_ and split.ndim in (1, 2) and split.shape[-1] == num_vertices:
        return np.ascontiguousarray(np.atleast_2d(split))
    if split.ndim == 1 and (split.dtype.kind in "iu" or split.size == 0):
        return index_mask(split.astype(np.int64), num_vertices, f"split {name!r}")[np.newaxis]
    raise GraphError(
        f"split {name!r} must be bool of shape [{num_vertices}] or [S, {num_vertices}], or a list of vertex ids, "
        f"got {split.dtype} of shape {split.shape}; transpose or convert it"
    )
