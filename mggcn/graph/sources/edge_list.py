"""Edge lists as text: one edge `u v [weight] [type]` a line, separated by blanks or commas, comments after # or %.

A third column is the weight unless the header says that it is the type; of four the header says which is which. A kernel
parses blocks of lines into columns; the line that it stops at is looked at again, to say what is wrong with it.
"""

from __future__ import annotations

import ctypes
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mggcn.errors import GraphError
from mggcn.graph.build.build import Tell, silent
from mggcn.graph.build.staging import Column, InMemory, Staging
from mggcn.graph.csr import Array
from mggcn.graph.edges import Edges
from mggcn.graph.sources.edge_header import (
    Header,
    NamesError,
    advice,
    check_header,
    column_numbers,
    content,
    is_number,
    refuse_marks,
    split,
    split_header,
)
from mggcn.graph.sources.packed import open_text, skip
from mggcn.native import EdgeTextArgs, kernel

BLOCK_BYTES = 1 << 24
LONGEST_LINE = 1 << 16
THREADS = 2
"""Threads that parse a block: reading and writing take as long as two."""
SAVE_EVERY = 64
"""Blocks between two places from which parsing can continue."""
PLAIN = re.compile(r"0|-?[1-9][0-9]{0,18}")
"""Whole numbers that are told by their value alone; 007, +7 and -0 are not."""

MARK = re.compile(r"(?:^|\s)[#%]")
"""What begins a comment between names."""


class EdgeList(NamedTuple):
    """Contents of a file of edges."""

    edges: Edges
    """Ids int64, weights float64 and types int64 where there are such columns."""
    header: str
    """The line of names that was skipped, empty without one."""
    names: Array | None = None
    """The ids that the numbers in the edges stand for, if ids may be strings and some are; else ids are whole numbers."""
    column_numbers: str = ""
    """The first edge, if it looks like the header that pandas writes over columns without names."""
    remarks: tuple[str, ...] = ()
    """What else there is to say of how the file was read."""


def read_edge_list(path: Path, staging: Staging | None = None, tell: Tell = silent, *, plain: bool = False) -> EdgeList:
    """Read the edges of a text file, their weights if there is a third column, and the header; `.gz`, `.zst` are unpacked.

    One header line (no number in it) may precede the edges; `check_header` refuses one whose names contradict the
    order source, target, weight. Ids must be whole; `build_adjacency` checks their range. staging: where the columns lie,
    and from where an interrupted parse continues. plain: whether an id that is more than its number, such as 007, ends it.
    tell: hears how much of the file has been read.
    Cost: 0.14 us of processor time a line on two threads, unpacking aside; a block of 16 MiB and its
    columns, 100 MB.
    Raises: GraphError that names the first line which is not an edge, or says why the file cannot be read; NamesError if
    that is for its ids, and if `plain` says so.
    """
    reader = _Reader(path, staging or InMemory(), plain)
    try:
        for text, first_line, after in blocks(path, reader.line, reader.offset, tell):
            reader.parse(text, first_line)
            reader.note(first_line + text.count(b"\n"), after)
        return reader.finish()
    except NamesError:
        reader.forget()
        raise
    except (OSError, EOFError, zlib.error) as error:
        raise GraphError(f"cannot read the edge list {path}: {error}; is it cut short or no text?") from error


class _Reader:
    """Parses blocks of lines that all look like the first edge, and keeps what has been parsed."""

    def __init__(self, path: Path, staging: Staging, plain: bool) -> None:
        self.path, self.staging, self.plain = path, staging, plain
        state: dict[str, Any] = {
            "line": 1,
            "offset": 0,
            "count": 0,
            "blocks": 0,
            "header": None,
            "first": "",
            "odd": "",
        }
        if (saved := staging.load()).get("plain") == plain:
            state |= saved
        self.line, self.offset, self.count = state["line"], state["offset"], state["count"]
        self.num_blocks: int = state["blocks"]
        self.first_edge: str = state["first"]
        self.odd: str = state["odd"]
        self.header = None if state["header"] is None else Header(*state["header"])
        self.columns: dict[str, Column] = {}
        self.comma = False
        self.kinds: tuple[str, ...] = ("i", "i")
        if self.first_edge:
            self._begin()

    def _begin(self) -> None:
        """Take the first edge as the form of all."""
        self.comma = "," in self.first_edge
        num_columns = len(split(self.first_edge))
        more: tuple[str, ...] = ("w",) if num_columns > 2 else ()
        if self.plain and self.header is not None and _holds_names(self.first_edge):
            raise NamesError(f"{self.path}: {self.first_edge[:80]!r} is an edge between names")
        if self.header is not None:
            refuse_marks(self.path, self.header, self.first_edge)
            more = check_header(self.header, self.first_edge, num_columns, self.path)
        self.kinds = ("i", "i", *more)
        kinds: dict[str, npt.DTypeLike] = {"w": np.float64, "t": np.int64, "i": np.int64}
        names = ("u", "v", *more)
        self.dtypes = dict(zip(names, (kinds[kind] for kind in self.kinds), strict=True))
        self.columns = {name: self.staging.column(f"list_{name}", dtype, 0) for name, dtype in self.dtypes.items()}

    def parse(self, text: bytes, first_line: int) -> None:
        """Append the edges of whole lines. Raises: GraphError at the first line that is none."""
        if not self.first_edge:
            if len(text) > LONGEST_LINE:  # Python takes seconds to find nothing in a block of comments alone
                found, bad, _ = parse_block(text, "ii", comma=False)
                if bad < 0 and not found[0].size:
                    return
            lines = text.decode("latin-1")
            lines, self.header = split_header(lines, first_line) if self.header is None else (lines, self.header)
            self.first_edge = next(filter(None, map(content, lines.split("\n"))), "")
            text = lines.encode("latin-1")
            if self.first_edge:
                self._begin()
        found, bad, odd = parse_block(text, "".join(self.kinds), self.comma)
        if bad >= 0:
            raise self._error(text, bad, first_line)
        if odd >= 0 and not self.odd:
            self._take_odd(text, odd, first_line)
        if not self.first_edge:
            return
        for array, column in zip(found, self.columns.values(), strict=True):
            column.write(self.count, array)
        self.count += found[0].size

    def note(self, line: int, offset: int) -> None:
        """Keep the place, now and then."""
        self.num_blocks += 1
        if self.num_blocks % SAVE_EVERY == 0:
            self._save(line, offset)

    def _save(self, line: int, offset: int) -> None:
        header = None if self.header is None else [self.header.text, self.header.line]
        state = {"line": line, "offset": offset, "count": self.count, "blocks": self.num_blocks}
        self.staging.save(state | {"header": header, "first": self.first_edge, "odd": self.odd, "plain": self.plain})

    def forget(self) -> None:
        """Give up what has been parsed."""
        for column in self.columns.values():
            column.drop()
        self.staging.save({})

    def _take_odd(self, text: bytes, at: int, first_line: int) -> None:
        """Keep a line with an id such as 007. Raises, if such ids are names: NamesError; GraphError for one like 7#x."""
        number, line = _line_at(text, at, first_line)
        fields = [field.strip() for field in split(content(line))[:2]]
        marked = all(map(PLAIN.fullmatch, fields))
        if marked and self.plain:
            raise GraphError(
                f"{self.path}: expected two names, or two numbers, got {line[:80].strip()!r}, which may be either; put a "
                "blank before # or % if it begins a comment, else quote these names"
            )
        if self.plain:
            raise NamesError(f"{self.path}, line {number}: {line[:80]!r} is an edge between names")
        self.odd = "" if marked else f"{content(line)[:40]!r} in line {number}"

    def _error(self, text: bytes, at: int, first_line: int) -> GraphError:
        """Say what is wrong with the line that begins at a byte."""
        number, line = _line_at(text, at, first_line)
        line = line[1:] if self.header is not None and number == self.header.line else line  # split_header marked it
        fields = content(line).split("," if self.comma else None)
        try:
            [int(field) for field in fields[:2]]
            [int(field) if kind == "t" else float(field) for kind, field in zip(self.kinds[2:], fields[2:])]  # noqa: B905
            proper = len(fields) == len(self.kinds)
        except ValueError:
            proper = False
        if proper:
            said = "a number cannot be stored; ids must lie below 2^31, or be read as names (--ids edges)"
            return NamesError(f"{self.path}, line {number}: {said}")
        words = ("two vertex ids", *({"w": "a weight", "t": "a type"}[kind] for kind in self.kinds[2:]))
        wanted = ", ".join(words[:-1]) + " and " + words[-1] if len(words) > 1 else words[0]
        known = "" if content(line) == self.first_edge else " as in the first edge"
        kind = NamesError if _holds_names(MARK.split(line)[0].strip()) else GraphError
        return kind(f"{self.path}, line {number}: expected {wanted}{known}, got {line[:80]!r}; {advice(line)}")

    def finish(self) -> EdgeList:
        """Return all edges. Raises: GraphError for a header alone."""
        skipped = "" if self.header is None else self.header.text
        if not self.count and skipped:
            raise NamesError(
                f"{self.path}: expected lines of two vertex ids, found only {skipped[:80]!r}; is it an edge list?"
            )
        if not self.count:
            nothing = InMemory().column("", np.int64, 0).rows(0)
            return EdgeList(Edges(nothing, nothing), skipped)
        self._save(-1, -1)
        rows = {name: column.rows(self.count) for name, column in self.columns.items()}
        edges = Edges(rows["u"], rows["v"], rows.get("w"), rows.get("t"))
        remarks = (f"ids such as {self.odd} were read as numbers: --ids edges reads names",) if self.odd else ()
        return EdgeList(edges, skipped, None, column_numbers(self.header, self.first_edge), remarks)


def _holds_names(line: str) -> bool:
    """Return whether a line with content has fields that are no numbers, or ids that are more than theirs."""
    fields = [field.strip() for field in split(line)]
    return not all(map(is_number, fields)) or not all(map(PLAIN.fullmatch, fields[:2]))


def _line_at(text: bytes, at: int, first_line: int) -> tuple[int, str]:
    """Return the number and the text of the line that begins at a byte."""
    line = text[at : at + LONGEST_LINE].split(b"\n")[0].decode("latin-1")
    return first_line + text.count(b"\n", 0, at), line


def parse_block(text: bytes, kinds: str, comma: bool) -> tuple[list[Array], int, int]:
    """Return the columns of whole lines, and the bytes at which two lines begin, -1 if there are none.

    The first is that of the first line that has not these columns, which ends the work; the second that of the first edge
    with an id that is more than its number, such as 007 or 7#.

    kinds: "i" or "t" whole numbers as int64, "w" numbers as float64, two to four of them.
    """
    room = text.count(b"\n") + 1
    found = [np.empty(room, np.float64 if kind == "w" else np.int64) for kind in kinds]
    work = EdgeTextArgs(nbytes=len(text), columns=len(found), comma=comma, kinds=kinds.encode())
    work.text = ctypes.cast(ctypes.c_char_p(text), ctypes.c_void_p)
    for number, array in enumerate(found):
        work.out[number] = array.ctypes.data
    kernel("mggcn_parse_edges")(ctypes.byref(work), THREADS)
    return [array[: work.edges] for array in found], int(work.bad), int(work.odd)


def blocks(path: Path, number: int, offset: int, tell: Tell = silent) -> Iterator[tuple[bytes, int, int]]:
    """Yield blocks of whole lines that are not all blank, the number of the first line of each, and the byte after it."""
    if offset < 0:
        return
    with open_text(path) as file:
        size = os.fstat(file.fileno()).st_size
        skip(file, offset)
        while block := file.read(BLOCK_BYTES):
            block += file.readline(LONGEST_LINE)
            if offset == 0 and block.startswith((b"\xff\xfe", b"\xfe\xff")):
                raise GraphError(f"{path} is in UTF-16, expected UTF-8: convert it (iconv -f UTF-16 -t UTF-8 does)")
            text = block.removeprefix(b"\xef\xbb\xbf") if offset == 0 else block
            offset += len(block)
            if not text.isspace():
                yield text, number, offset
            number += text.count(b"\n")
            if len(block) >= BLOCK_BYTES:
                tell(f"reading {path.name}", os.lseek(file.fileno(), 0, os.SEEK_CUR), size)
