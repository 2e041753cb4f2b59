"""Columns of tables that are not features: indexes, ids, labels and splits. For files and for data frames in memory."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from mggcn.errors import GraphError

INDEX = re.compile(r"|index|unnamed: \d+|__index_level_\d+__", re.IGNORECASE)
"""Names of the column of an index."""
ROWS = frozenset({"node", "vertex", "nodes", "vertices", "nid", "vid", "uid", "idx"})
"""Names of columns that name rows, beside those of an index and of ids."""
ANSWERS = frozenset(
    "label labels class category target split fold train test train_mask val_mask valid_mask test_mask is_train is_val "
    "is_valid is_test".split()
)
"""Names of columns that say what is to be predicted, or where."""


def names_rows(name: str) -> bool:
    """Return whether a column's name is that of an index or id, such as index, id, paper_id, userId or vertex."""
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)
    return bool(INDEX.fullmatch(name)) or name.lower() in ROWS or (bool(words) and words[-1].lower() in ("id", "ids"))


def check_rows(values: Any, ids: Any, start: int, what: str, todo: str) -> None:
    """Compare entries that name rows, from row `start`, with the ids of the vertices (N,), or with 0, 1, ....

    Raises: GraphError.
    """
    expected = np.arange(start, start + len(values)) if ids is None else np.asarray(ids)[start : start + len(values)]
    if not _alike(values, expected):
        order = "0, 1, 2, ..." if ids is None else "ids"
        raise GraphError(f"{what}, and its entries are not those of the vertices in their order ({order}): {todo}")


def refuse_answers(names: list[str], where: str) -> None:
    """Refuse labels and splits among features. Raises: GraphError."""
    answers = ANSWERS | ({"y"} if "x" not in map(str.lower, names) else set())
    if found := [name for name in names if name.lower() in answers]:
        raise GraphError(
            f"{where}: column {found[0]!r} is named as a label or a split, which is no feature: leave it out and give it "
            "by itself, or rename it"
        )


def _alike(values: Any, expected: Any) -> bool:
    """Return whether ids are equal as they are written; numbers may be of any type."""
    if len(values) != len(expected):
        return False
    if {values.dtype.kind, expected.dtype.kind} <= set("iuf"):
        return bool(np.array_equal(values, expected))
    return all(str(value) == str(other) for value, other in zip(values, expected, strict=True))


def check_frame(values: Any, what: str, ids: Any, *, table: bool = False) -> None:
    """Refuse a pandas Series or DataFrame whose index is not that of the vertices, because rows are read in order.

    An index is that of the vertices if it is 0, 1, ..., or their ids. table: whether columns are features, as those of a
    table of any library are; one that is named as an id, a label or a split is refused. Raises: GraphError.
    """
    index = getattr(values, "index", None)
    if index is not None and hasattr(index, "to_numpy"):
        rows = np.asarray(index.to_numpy())
        todo = "sort the rows as the vertices are, then .reset_index(drop=True)"
        if not _alike(rows, np.arange(len(rows))):
            check_rows(rows, ids, 0, f"the index of {what} names rows", todo)
    if table:
        columns = getattr(values, "column_names", getattr(values, "columns", ()))
        names = [name for name in columns if isinstance(name, str)]
        refuse_answers(names, what)
        if found := [name for name in names if names_rows(name)]:
            raise GraphError(
                f"{what}: column {found[0]!r} is named as an index or id: leave it out, or rename it if it is a feature "
                "(.to_numpy() takes all columns as they are)"
            )
