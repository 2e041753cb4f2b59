"""Parquet tables: edges by batches, features as a matrix. Columns of edges count by place, as in a text."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mggcn.errors import GraphError
from mggcn.graph.csr import WINDOW, Array
from mggcn.graph.edge_header import Header, check_header
from mggcn.graph.edges import Edges
from mggcn.graph.staging import Column, InMemory, Staging

POOL = "ARROW_DEFAULT_MEMORY_POOL"


def num_rows(path: Path) -> int:
    """Return the rows of a table. Raises: GraphError as `read_parquet_edges`."""
    return int(_open(path).metadata.num_rows)


def read_parquet_edges(path: Path, staging: Staging | None = None) -> Edges:
    """Read source, target and, if the name of the column says so, weight or type of every row.

    Cost: one pass in batches of bounded size; columns of 8 bytes a number go where `staging` says.
    Raises: GraphError without pyarrow, for a damaged file, other columns than these, and columns that are
    no numbers or lack some.
    """
    file, staging = _open(path), staging or InMemory()
    names = list(file.schema_arrow.names)
    zeros = ",".join("0" * len(names))
    if len(names) < 2:
        raise GraphError(f"{path} has {len(names)} columns, expected source, target and perhaps weight or type")
    kinds = ("i", "i", *check_header(Header(",".join(names), 1), zeros, len(names), path))
    dtypes: list[npt.DTypeLike] = [np.float64 if kind == "w" else np.int64 for kind in kinds]
    columns: list[Column] = [
        staging.column(f"table_{at}", dtype, file.metadata.num_rows) for at, dtype in enumerate(dtypes)
    ]
    count = 0
    for batch in _batches(path, file):
        for name, kind, column, array in zip(names, kinds, columns, batch, strict=True):
            if array.dtype.kind not in ("iufb" if kind == "w" else "iu"):
                expected = "numbers" if kind == "w" else "whole numbers"
                raise GraphError(f"{path}: column {name!r} must hold {expected}, got {array.dtype}; number names first")
            column.write(count, array)
        count += batch[0].size
    _arrow().default_memory_pool().release_unused()
    rows = [column.rows(count) for column in columns]
    named = dict(zip(kinds[2:], rows[2:], strict=True))
    return Edges(rows[0], rows[1], named.get("w"), named.get("t"))


def read_parquet_features(path: Path) -> npt.NDArray[np.float32]:
    """Return all columns as float32 [N, D], in their order. Cost: 4 N D bytes and a batch. Raises: GraphError as above."""
    file = _open(path)
    names = list(file.schema_arrow.names)
    table = np.empty((file.metadata.num_rows, len(names)), np.float32)
    count = 0
    for batch in _batches(path, file):
        for at, array in enumerate(batch):
            if array.dtype.kind not in "iufb":
                raise GraphError(f"{path}: column {names[at]!r} must hold numbers, got {array.dtype}; leave it out")
            with np.errstate(over="ignore"):
                table[count : count + array.size, at] = array
        count += batch[0].size if batch else 0
    return table


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


def _batches(path: Path, file: Any) -> Iterator[list[Array]]:
    """Yield the columns of some rows. Raises: GraphError for missing entries and damage."""
    try:
        for batch in file.iter_batches(batch_size=WINDOW):
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
