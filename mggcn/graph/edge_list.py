"""Edge lists as text: one edge `u v [weight] [type]` a line, separated by blanks or commas, comments after # or %.

A third column is the weight unless the header says that it is the type; of four the header says which is which.
"""

from __future__ import annotations

import gzip
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from mggcn.errors import GraphError
from mggcn.graph.csr import Array
from mggcn.graph.edge_header import Header, advice, check_header, content, split_header

BLOCK_BYTES = 1 << 24
LONGEST_LINE = 1 << 16


class EdgeList(NamedTuple):
    """Contents of a file of edges."""

    edges: Array
    """int64 [2, E], row 0 the sources."""
    weights: Array | None
    """float64 [E], None without a column of weights."""
    header: str
    """The line of names that was skipped, empty without one."""
    types: Array | None = None
    """int64 [E], None without a column of types."""


def read_edge_list(path: Path) -> EdgeList:
    """Read the edges of a text file, their weights if there is a third column, and the header; `.gz` is unpacked.

    One header line (no number in it) may precede the edges; `check_header` refuses one whose names contradict the
    order source, target, weight. Ids must be whole; `build_adjacency` checks their range.
    Cost: about 2 million lines a second; memory for the edges and one block of 16 MiB.
    Raises: GraphError that names the first line which is not an edge, or says why the file cannot be read.
    """
    edges: list[Array] = []
    weights: list[Array] = []
    types: list[Array] = []
    parser: _Parser | None = None
    header: Header | None = None
    try:
        for text, first_line in _blocks(path):
            if parser is None:
                text, header = split_header(text, first_line) if header is None else (text, header)
                first_edge = next(filter(None, map(content, text.split("\n"))), "")
                parser = _Parser(first_edge, header, path) if first_edge else None
            if parser is not None:
                block = parser.parse(text, path, first_line)
                edges.append(np.stack([block["u"], block["v"]]))
                weights.extend([block["w"]] if "w" in parser.more else [])
                types.extend([block["t"]] if "t" in parser.more else [])
    except (OSError, EOFError) as error:
        raise GraphError(f"cannot read the edge list {path}: {error}; is it cut short or no text?") from error
    skipped = "" if header is None else header.text
    if not edges and skipped:
        raise GraphError(f"{path}: expected lines of two vertex ids, found only {skipped[:80]!r}; is it an edge list?")
    if not edges:
        return EdgeList(np.empty((2, 0), dtype=np.int64), None, skipped)
    found = (np.concatenate(parts) if parts else None for parts in (weights, types))
    return EdgeList(np.concatenate(edges, axis=1), next(found), skipped, next(found))


class _Parser:
    """Parses blocks of lines that all look like the first one."""

    def __init__(self, first_edge: str, header: Header | None, path: Path) -> None:
        self.first_edge = first_edge
        self.delimiter = "," if "," in first_edge else None
        num_columns = len(first_edge.split(self.delimiter))
        self.more: tuple[str, ...] = ("w",) if num_columns > 2 else ()
        """Columns behind the ids: "w" the weight, "t" the type."""
        if header is not None:
            self.more = check_header(header, first_edge, num_columns, path)
        kinds = {"w": np.float64, "t": np.int64}
        self.columns = [("u", np.int64), ("v", np.int64), *((name, kinds[name]) for name in self.more)]

    def parse(self, text: str, path: Path, first_line: int) -> Array:
        lines = text.replace("%", "#").split("\n")
        with warnings.catch_warnings():
            # NumPy only warns about 1.5 as an integer; an empty block is fine.
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", message=".*input contained no data")
            try:
                return np.loadtxt(lines, np.dtype(self.columns), comments="#", delimiter=self.delimiter, ndmin=1)
            except (ValueError, DeprecationWarning) as error:
                raise self._locate(lines, path, first_line) from error

    def _locate(self, lines: list[str], path: Path, first_line: int) -> GraphError:
        """Find the line that NumPy refused; its own message counts without comments and from the block's start."""
        for number, line in enumerate(lines, first_line):
            fields = content(line).split(self.delimiter)
            try:
                if any(fields):
                    [int(field) for field in fields[:2]]
                    [int(field) if kind == "t" else float(field) for kind, field in zip(self.more, fields[2:])]  # noqa: B905
                proper = len(fields) == len(self.columns) or not any(fields)
            except ValueError:
                proper = False
            if not proper:
                words = ("two vertex ids", *({"w": "a weight", "t": "a type"}[name] for name in self.more))
                wanted = ", ".join(words[:-1]) + " and " + words[-1] if len(words) > 1 else words[0]
                known = "" if content(line) == self.first_edge else " as in the first edge"
                todo = advice(line)
                return GraphError(f"{path}, line {number}: expected {wanted}{known}, got {line[:80]!r}; {todo}")
        return GraphError(f"{path}: a number after line {first_line} cannot be stored; ids must lie below 2^31")


def _blocks(path: Path) -> Iterator[tuple[str, int]]:
    """Yield blocks of whole lines and the number of the first line of each."""
    number = 1
    with _open(path) as file:
        while block := file.read(BLOCK_BYTES):
            block += file.readline(LONGEST_LINE)
            text = block.decode("latin-1").removeprefix("\u00ef\u00bb\u00bf")
            yield text, number
            number += text.count("\n")


def _open(path: Path) -> BinaryIO:
    packed: BinaryIO = gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # type: ignore[assignment]
    return packed
