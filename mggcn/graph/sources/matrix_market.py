"""MatrixMarket files of entries (`coordinate`) as edges u -> v for entry (u, v), read block by block from any bytes.

Source: Boisvert, Pozo and Remington, "The Matrix Market exchange formats", NISTIR 5935, 1996.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np

from mggcn.errors import GraphError
from mggcn.graph.build.build import Tell, silent
from mggcn.graph.build.staging import Column, InMemory, Staging
from mggcn.graph.check import MAX_VERTICES
from mggcn.graph.csr import Array, Rows
from mggcn.graph.edges import Edges, Entries
from mggcn.graph.join import JoinedRows
from mggcn.graph.sources.edge_list import blocks, parse_block

FIELDS = {"real": "w", "double": "w", "integer": "w", "pattern": ""}
SYMMETRIES = ("general", "symmetric", "skew-symmetric", "hermitian")
MAX_HEAD = 1 << 20
"""Most bytes before the line of extents."""


def read_matrix_market(path: Path, staging: Staging | None = None, tell: Tell = silent) -> Entries:
    """Read a square matrix; a symmetric one holds one triangle, and its mirrored entries follow. Packed ones are unpacked.

    Cost: as `read_edge_list`. Raises: GraphError that names the line, for dense, complex or rectangular matrices, entries
    outside the matrix, more or fewer of them than announced, and files that cannot be read.
    """
    reader: _Reader | None = None
    head = b""
    try:
        for text, line, _ in blocks(path, 1, 0, tell):
            if reader is None:
                head += text
                found = _split_head(path, head)
                if found is None:
                    continue
                reader, text, line = _Reader(path, *found[0], staging or InMemory()), *found[1:]
            reader.add(text, line)
    except (OSError, EOFError, zlib.error) as error:
        raise _invalid(path, f"it cannot be read ({error})") from error
    if reader is None:
        raise _invalid(path, "it has no line of rows, columns and entries")
    return reader.finish()


def _split_head(path: Path, head: bytes) -> tuple[tuple[str, str, int, int], bytes, int] | None:
    """Return field, symmetry, vertices and entries, the text behind them and its line; None if more must be read."""
    lines = head.split(b"\n")
    words = lines[0].decode("latin-1").lower().split()
    if len(words) != 5 or words[:2] != ["%%matrixmarket", "matrix"]:
        raise _invalid(path, "line 1 must read: %%MatrixMarket matrix coordinate real general")
    if words[2] == "array":
        raise GraphError(f"{path} holds a dense matrix, expected `coordinate`: an entry for each edge; convert it")
    if words[2] != "coordinate" or words[3] not in FIELDS or words[4] not in SYMMETRIES:
        known = f"coordinate, {', '.join(FIELDS)}, {', '.join(SYMMETRIES)}"
        raise _invalid(path, f"line 1 names {' '.join(words[2:])[:80]!r}; expected {known}")
    for number, line in enumerate(lines[1:], start=2):
        content = line.strip()
        if not content or content.startswith(b"%"):
            continue
        return _extents(path, words, line, number), b"\n".join(lines[number:]), number + 1
    if len(head) > MAX_HEAD:
        raise _invalid(path, "it has no line of rows, columns and entries in its first MiB")
    return None


def _extents(path: Path, words: list[str], line: bytes, number: int) -> tuple[str, str, int, int]:
    fields = line.split()
    if len(fields) != 3 or not all(field.isdigit() and len(field) < 19 for field in fields):
        shown = line.decode("latin-1")[:80]
        raise _invalid(path, f"line {number}: expected rows, columns and entries, got {shown!r}")
    rows, columns, entries = map(int, fields)
    if rows != columns:
        raise GraphError(
            f"{path} holds {rows} rows and {columns} columns, expected a square matrix: entry (u, v) stands for u -> v"
        )
    if rows > MAX_VERTICES:
        raise GraphError(f"{path} has {rows} rows, expected 1 to {MAX_VERTICES} vertices; drop unused ones")
    return words[3], words[4], rows, entries


class _Reader:
    """Appends entries to columns, mirrored ones to columns of their own."""

    def __init__(self, path: Path, field: str, symmetry: str, rows: int, entries: int, staging: Staging) -> None:
        self.path, self.symmetry, self.rows, self.entries = path, symmetry, rows, entries
        self.kinds = "ii" + FIELDS[field]
        dtypes = dict(zip("uvw", (np.int64, np.int64, np.float64), strict=False))
        self.columns: dict[str, dict[str, Column]] = {
            place: {name: staging.column(f"{place}_{name}", dtypes[name], 0) for name in "uvw"[: len(self.kinds)]}
            for place in ("listed", "mirrored")
        }
        self.counts = dict.fromkeys(self.columns, 0)

    def add(self, text: bytes, line: int) -> None:
        """Take whole lines. Raises: GraphError at the first that is no entry of the matrix."""
        found, bad, _ = parse_block(text, self.kinds, comma=False)
        u, v = found[0] - 1, found[1] - 1
        outside = np.flatnonzero((u < 0) | (v < 0) | (u >= self.rows) | (v >= self.rows))
        if bad >= 0:
            wanted = "row, column and value" if len(self.kinds) == 3 else "row and column"
            shown = text[bad : bad + 200].split(b"\n")[0].decode("latin-1")[:80]
            number = line + text.count(b"\n", 0, bad)
            raise _invalid(self.path, f"line {number}: expected {wanted}, got {shown!r}")
        if outside.size:
            at = int(outside[0])
            raise _invalid(
                self.path,
                f"entry {self.counts['listed'] + at + 1} is ({u[at] + 1}, {v[at] + 1}), expected 1 to {self.rows}",
            )
        self._append("listed", [u, v, *found[2:]])
        if self.symmetry != "general":
            proper = u != v
            sign = -1.0 if self.symmetry == "skew-symmetric" else 1.0
            self._append("mirrored", [v[proper], u[proper], *(sign * column[proper] for column in found[2:])])

    def _append(self, place: str, arrays: list[Array]) -> None:
        for column, array in zip(self.columns[place].values(), arrays, strict=True):
            column.write(self.counts[place], array)
        self.counts[place] += arrays[0].size

    def finish(self) -> Entries:
        """Return the matrix. Raises: GraphError if entries are missing, or too many."""
        if self.counts["listed"] != self.entries:
            raise _invalid(self.path, f"{self.entries} entries are announced, but {self.counts['listed']} are there")
        parts = [
            {name: column.rows(self.counts[place]) for name, column in self.columns[place].items()}
            for place in self.counts
        ]
        whole: dict[str, Rows] = {name: JoinedRows(tuple(part[name] for part in parts)) for name in parts[0]}
        return Entries(Edges(whole["u"], whole["v"], whole.get("w")), self.rows)


def _invalid(path: Path, what: str) -> GraphError:
    return GraphError(f"{path} is not a valid MatrixMarket file: {what}; fix or re-export it")
