"""Edges in binary files, read by ranges in place: `.npy` of shape [2, E] or [E, 2], and raw pairs of int32 or int64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mggcn.errors import GraphError
from mggcn.graph.edges import ColumnOf, Edges
from mggcn.graph.file_rows import FileRows

RAW: dict[str, np.dtype[Any]] = {".i32": np.dtype("<i4"), ".i64": np.dtype("<i8")}
"""By suffix: the type of source, target, source, target, ..., little-endian, without a header."""


def read_npy(path: Path) -> Edges:
    """Return the edges of an `.npy` file [2, E] (row 0 sources) or [E, 2]; one of shape [2, 2] counts as [2, E].

    Cost: one read of the header. Raises: StoreError if it is not a plain `.npy`; GraphError for another shape or type.
    """
    table = FileRows.open(path)
    if len(table.shape) == 2 and table.dtype.kind in "iu" and table.shape[0] == 2:
        return edges_of_rows(table)
    if len(table.shape) != 2 or table.dtype.kind not in "iu" or table.shape[1] != 2:
        raise GraphError(
            f"{path} must hold edges as integers of shape [2, E] (row 0 sources) or [E, 2], got {table.dtype} of shape "
            f"{table.shape}; convert it, and give weights and types as files of their own"
        )
    return Edges(ColumnOf(table, 0), ColumnOf(table, 1))


def edges_of_rows(table: FileRows) -> Edges:
    """Return the edges of a file of integers [2, E], row 0 sources."""
    count = table.shape[1]
    sources = replace(table, shape=(count,))
    return Edges(sources, replace(sources, offset=table.offset + count * table.dtype.itemsize))


def read_raw(path: Path) -> Edges:
    """Return the edges of a file of pairs (RAW). Raises: GraphError if it ends within a pair."""
    dtype, size = RAW[path.suffix.lower()], path.stat().st_size
    if size % (2 * dtype.itemsize):
        raise GraphError(
            f"{path} has {size} bytes, expected pairs of {dtype.name}, {2 * dtype.itemsize} bytes each; is it cut short?"
        )
    table = FileRows(path, (size // (2 * dtype.itemsize), 2), dtype, 0)
    return Edges(ColumnOf(table, 0), ColumnOf(table, 1))
