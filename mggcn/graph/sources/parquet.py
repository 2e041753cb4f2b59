"""Parquet tables: edges by batches, features as a matrix. Columns of edges count by place, as in a text."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mggcn.errors import GraphError
from mggcn.graph.build.staging import Column, InMemory, Staging
from mggcn.graph.csr import WINDOW, Array
from mggcn.graph.edges import Edges
from mggcn.graph.sources.edge_header import NUMBER_THEM, Header, check_header
from mggcn.graph.sources.edge_list import EdgeList
from mggcn.graph.sources.named_edges import Numbering
from mggcn.graph.table_columns import check_rows, names_rows, refuse_answers
from mggcn.graph.vertex_data import as_single

POOL = "ARROW_DEFAULT_MEMORY_POOL"
PANDAS_INDEX = re.compile(r"__index_level_\d+__")
LEFT_OUT = "column {!r}, an index, was left out"


def num_rows(path: Path) -> int:
    """Return the rows of a table. Raises: GraphError as `read_parquet_edges`."""
    return int(_open(path).metadata.num_rows)


def read_parquet_edges(path: Path, staging: Staging | None = None, *, named: bool = False) -> EdgeList:
    """Read source, target and, if the name of the column says so, weight or type of every row.

    named: whether columns of text are names of vertices. The index that pandas keeps beside the columns is left out.
    Cost: one pass in batches of bounded size; columns of 8 bytes a number go where `staging` says; names are held.
    Raises: GraphError without pyarrow, for a damaged file, other columns than these, and columns that are
    no numbers or lack some.
    """
    file, staging = _open(path), staging or InMemory()
    index = [name for name in file.schema_arrow.names if PANDAS_INDEX.fullmatch(name)]
    names = [name for name in file.schema_arrow.names if name not in index]
    if len(names) < 2:
        raise GraphError(f"{path} has {len(names)} columns, expected source, target and perhaps weight or type")
    zeros = ",".join("0" * len(names))
    kinds = ("i", "i", *check_header(Header(",".join(names), 1), zeros, len(names), path))
    unsigned = [str(file.schema_arrow.field(name).type) == "uint64" for name in names]
    dtypes: list[npt.DTypeLike] = [
        np.float64 if kind == "w" else np.uint64 if wide else np.int64
        for kind, wide in zip(kinds, unsigned, strict=True)
    ]
    columns: list[Column] = [
        staging.column(f"table_{at}", dtype, file.metadata.num_rows) for at, dtype in enumerate(dtypes)
    ]
    numbering, count = Numbering(), 0
    for batch in _batches(path, file, names):
        if named and "O" in (kinds_of := {array.dtype.kind for array in batch[:2]}):
            if len(kinds_of) > 1:
                raise GraphError(
                    f"{path}: columns {names[0]!r} and {names[1]!r} must both hold text, or both whole numbers"
                )
            batch[:2] = [_numbered(path, name, array, numbering) for name, array in zip(names, batch[:2], strict=False)]
        for name, kind, column, array in zip(names, kinds, columns, batch, strict=True):
            if array.dtype.kind not in ("iufb" if kind == "w" else "iu"):
                expected = "numbers" if kind == "w" else "whole numbers"
                todo = "number relations first" if kind == "t" else NUMBER_THEM if kind == "i" else "convert it"
                raise GraphError(f"{path}: column {name!r} must hold {expected}, got {array.dtype}; {todo}")
            column.write(count, array)
        count += batch[0].size
    _arrow().default_memory_pool().release_unused()
    rows = [column.rows(count) for column in columns]
    more = dict(zip(kinds[2:], rows[2:], strict=True))
    remarks = tuple(LEFT_OUT.format(name) for name in index)
    found = numbering.names(path) if numbering.numbers else None
    return EdgeList(Edges(rows[0], rows[1], more.get("w"), more.get("t")), "", found, "", remarks)


def _numbered(path: Path, name: str, array: Array, numbering: Numbering) -> Array:
    """Return the numbers of names. Raises: GraphError for what is none."""
    texts = array.tolist()
    if not all(isinstance(text, str) and text and "\0" not in text for text in texts):
        raise GraphError(
            f"{path}: column {name!r} must hold names or whole numbers, some are empty or neither; fix these rows"
        )
    return np.fromiter(map(numbering.of, texts), np.int64, len(texts))


def read_parquet_features(path: Path, ids: Any = None) -> tuple[npt.NDArray[np.float32], list[str]]:
    """Return all columns as float32 [N, D], in their order, and remarks on columns left out.

    A column that names the rows is left out if it names them in the order of the vertices, by `ids` (N,) or as 0, 1, ....
    Cost: 4 N D bytes and a batch. Raises: GraphError as above, for rows in another order, and for labels and splits.
    """
    file = _open(path)
    names = list(file.schema_arrow.names)
    index = [name for name in names if name in _pandas_index(file) or names_rows(name)]
    data = [name for name in names if name not in index]
    refuse_answers(data, str(path))
    table = np.empty((file.metadata.num_rows, len(data)), np.float32)
    count = 0
    for batch in _batches(path, file, names):
        arrays = dict(zip(names, batch, strict=True))
        size = batch[0].size if batch else 0
        for name in index:
            _check_column(path, name, arrays[name], ids, count)
        for at, name in enumerate(data):
            if arrays[name].dtype.kind not in "iufb":
                raise GraphError(f"{path}: column {name!r} must hold numbers, got {arrays[name].dtype}; leave it out")
            table[count : count + size, at] = as_single(arrays[name], f"{path}: numbers of column {name!r}")
        count += size
    return table, [f"{path.name}: {LEFT_OUT.format(name)}" for name in index]


def read_parquet_column(path: Path) -> Array:
    """Return the only column of a table other than pandas's index, in its own type. Raises: GraphError as above."""
    file = _open(path)
    index = _pandas_index(file)
    names = [name for name in file.schema_arrow.names if name not in index]
    if len(names) != 1:
        raise GraphError(
            f"{path} has the columns {', '.join(map(repr, names))[:200]}, expected one; leave the others out"
        )
    rows = 0
    for name in index:
        for (part,) in _batches(path, file, [name]):
            _check_column(path, name, part, None, rows)
            rows += part.size
        rows = 0
    parts = [batch[0] for batch in _batches(path, file, names)]
    column: Array = np.concatenate(parts) if parts else np.empty(0)
    return column


def _check_column(path: Path, name: str, array: Array, ids: Any, start: int) -> None:
    """Compare a column that names rows with the ids of the vertices. Raises: GraphError."""
    what = f"{path}: column {name!r} is named as an index or id"
    check_rows(array, ids, start, what, "sort the rows, and leave the column out, or rename it if it is a feature")


def _pandas_index(file: Any) -> list[str]:
    """Return the columns that pandas wrote for the index of a data frame."""
    found: list[str] = []
    with contextlib.suppress(ValueError, TypeError, AttributeError, KeyError, RecursionError):  # anybody may write it
        found = [name for name in file.schema_arrow.pandas_metadata["index_columns"] if isinstance(name, str)]
    return found + [name for name in file.schema_arrow.names if PANDAS_INDEX.fullmatch(name)]


def _arrow() -> Any:
    """Import pyarrow with a memory pool that gives back what is freed, so that a plan can count on it.

    Which pool it is is settled when the first one is asked for; the user's choice stays.
    """
    chosen = os.environ.get(POOL)
    os.environ.setdefault(POOL, "system")
    try:
        arrow: Any = importlib.import_module("pyarrow")
        arrow.default_memory_pool()
    finally:
        if chosen is None:
            os.environ.pop(POOL, None)
    return arrow


def _open(path: Path) -> Any:
    try:
        _arrow()
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise GraphError(f"{path} needs pyarrow: pip install 'mggcn[parquet]', or convert it") from error
    try:
        file = parquet.ParquetFile(path)
        file.schema_arrow  # noqa: B018 - is converted now, and may be of no known type
        return file
    except (OSError, ValueError, NotImplementedError) as error:
        raise _invalid(path, error) from error


def _batches(path: Path, file: Any, names: list[str]) -> Iterator[list[Array]]:
    """Yield these columns of some rows. Raises: GraphError for missing entries and damage."""
    try:
        for found in file.iter_batches(batch_size=WINDOW, columns=names):
            batch = found.select(names)
            lacking = [
                name for name, column in zip(batch.schema.names, batch.columns, strict=True) if column.null_count
            ]
            if lacking:
                raise GraphError(f"{path}: column {lacking[0]!r} lacks entries; fill or drop these rows")
            yield [column.to_numpy(zero_copy_only=False) for column in batch.columns]
    except (OSError, ValueError, NotImplementedError) as error:
        raise _invalid(path, error) from error


def _invalid(path: Path, error: Exception) -> GraphError:
    said = " ".join(str(error).split())[:200]
    return GraphError(f"{path} is not a valid Parquet file: {said}; write it again")
