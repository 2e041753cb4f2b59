"""Edge lists whose ids are names: each becomes a number in the order of appearance, and the names are kept.

The form is that of edge_list.py, except that a comment begins the line or follows a blank; a name is any text without
blanks, or without commas where these separate. N vertices.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mggcn.errors import GraphError
from mggcn.graph.csr import Array
from mggcn.graph.edge_header import (
    Header,
    check_names,
    column_numbers,
    content,
    content_of_names,
    says_places,
    split,
)
from mggcn.graph.edge_list import EdgeList, blocks
from mggcn.graph.edges import Edges
from mggcn.graph.staging import Column, InMemory, Staging

MARKS = ("'", '"')
KINDS = {"w": "a weight", "t": "a type"}
LONG_NAME = 256
"""Letters of a name that may always be kept."""
MOST_BYTES = 256 << 20
"""Most that names take with one that is longer, as each takes the width of the longest."""


def holds_names(path: Path) -> bool:
    """Return whether the second line with content, or the only one, does not begin with two whole numbers.

    Raises: GraphError if # or % stands right behind a number, where it begins a comment unless these are names.
    """
    lines = (content_of_names(line) for text, _ in _texts(path) for line in text.split("\n"))
    found = list(islice(filter(None, lines), 2))
    named = bool(found) and not _two_numbers(found[-1])
    if named and _two_numbers(content(found[-1])):
        raise GraphError(
            f"{path}: expected two names, or two numbers, got {found[-1][:80]!r}, which may be either; put a blank before "
            "# or % if it begins a comment, else number these names first"
        )
    return named


def _two_numbers(line: str) -> bool:
    fields = [field.strip().lstrip("+-") for field in split(line)[:2]]
    return len(fields) == 2 and all(map(str.isdigit, fields))


def read_named_edges(path: Path, staging: Staging | None = None) -> EdgeList:
    """Read edges between names, their weights or types as `read_edge_list` does, and a header that says source and target.

    Cost: about a million lines a second, and a dictionary of the names. Raises: GraphError that names the line.
    """
    reader = _Names(path, staging or InMemory())
    for text, first_line in _texts(path):
        for number, line in enumerate(text.split("\n"), first_line):
            if found := content_of_names(line):
                reader.add(found, number)
        reader.flush()
    return reader.finish()


def _texts(path: Path) -> Iterator[tuple[str, int]]:
    """Yield text and the number of its first line. Raises: GraphError for what is no UTF-8, or cannot be read."""
    try:
        for block, first_line, _ in blocks(path, 1, 0):
            try:
                yield block.decode(), first_line
            except UnicodeDecodeError as error:
                number = first_line + block.count(b"\n", 0, error.start)
                raise GraphError(f"{path}, line {number}: names must be UTF-8; convert the file") from error
    except (OSError, EOFError, zlib.error) as error:
        raise GraphError(f"cannot read the edge list {path}: {error}; is it cut short or no text?") from error


class _Names:
    """Takes lines and gives names their numbers."""

    def __init__(self, path: Path, staging: Staging) -> None:
        self.path, self.staging = path, staging
        self.header: Header | None = None
        self.comma = False
        self.column_numbers = ""
        self.kinds: tuple[str, ...] = ()
        self.numbers: dict[str, int] = {}
        self.waiting: list[list[float]] = []
        self.columns: list[Column] = []
        self.count = 0

    def add(self, line: str, number: int) -> None:
        """Take a line with content. Raises: GraphError if it has not the form of the first edge."""
        if not self.columns:
            if self.header is None and says_places(line):
                self.header = Header(line, number)
                return
            self._begin(line)
        fields = [field.strip() for field in line.split("," if self.comma else None)]
        try:
            if len(fields) != len(self.kinds) or not all(fields) or any(mark in line for mark in MARKS):
                raise ValueError
            numbers = zip(self.kinds[2:], fields[2:], strict=True)
            more = [int(field) if kind == "t" else float(field) for kind, field in numbers]
        except ValueError as error:
            wanted = " and ".join(["two names", *(KINDS[kind] for kind in self.kinds[2:])])
            raise GraphError(
                f"{self.path}, line {number}: expected {wanted} as in the first edge, no quotes, got {line[:80]!r}; fix it"
            ) from error
        for column, name in zip(self.waiting, fields[:2], strict=False):
            column.append(self.numbers.setdefault(name, len(self.numbers)))
        for column, value in zip(self.waiting[2:], more, strict=True):
            column.append(value)

    def _begin(self, first_edge: str) -> None:
        self.comma, width = "," in first_edge, len(split(first_edge))
        self.column_numbers = column_numbers(self.header, first_edge)
        more: tuple[str, ...] = ("w",) if width == 3 else ()
        if self.header is not None:
            more = check_names(self.header, width, self.path)
        self.kinds = ("i", "i", *more)
        self.waiting = [[] for _ in self.kinds]
        dtypes: list[npt.DTypeLike] = [np.float64 if kind == "w" else np.int64 for kind in self.kinds]
        self.columns = [self.staging.column(f"names_{at}", dtype, 0) for at, dtype in enumerate(dtypes)]

    def flush(self) -> None:
        """Write what is waiting."""
        for waiting, column in zip(self.waiting, self.columns, strict=True):
            column.write(self.count, np.array(waiting))
        self.count += len(self.waiting[0]) if self.waiting else 0
        self.waiting = [[] for _ in self.kinds]

    def finish(self) -> EdgeList:
        """Return edges, header and names. Raises: GraphError if there is no edge."""
        if not self.columns:
            raise GraphError(f"{self.path}: expected lines of two names, found none; is it an edge list?")
        rows = [column.rows(self.count) for column in self.columns]
        named = dict(zip(self.kinds[2:], rows[2:], strict=True))
        names = self._as_array()
        header = "" if self.header is None else self.header.text
        edges = Edges(rows[0], rows[1], named.get("w"), named.get("t"))
        return EdgeList(edges, header, names, self.column_numbers)

    def _as_array(self) -> Array:
        """Return the names in their order, each as wide as the longest. Raises: GraphError if that is out of proportion."""
        longest = max(self.numbers, key=len)
        nbytes = 4 * len(longest) * len(self.numbers)
        if len(longest) > LONG_NAME and nbytes > MOST_BYTES:
            raise GraphError(
                f"{self.path}: all {len(self.numbers):,} names would take the {len(longest):,} letters of the longest, "
                f"{longest[:40]!r}..., {nbytes / 2**30:.1f} GiB; shorten names of more than {LONG_NAME} letters"
            )
        return np.array(list(self.numbers), np.str_)
