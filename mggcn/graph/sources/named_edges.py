"""Edge lists whose ids are names: each becomes a number in the order of appearance, and the names are kept.

The form is that of edge_list.py, with names instead of numbers. They may hold blanks where the first edge has tabs or
commas between them, and anything in double quotes, which RFC 4180 doubles within. A comment begins the line, or follows
a blank. N vertices.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mggcn.errors import GraphError
from mggcn.graph.build.build import Tell, silent
from mggcn.graph.build.staging import Column, InMemory, Staging
from mggcn.graph.csr import Array
from mggcn.graph.edges import Edges
from mggcn.graph.sources.edge_header import (
    MARKS,
    NO_LINE_END,
    SEPARATE,
    Header,
    check_names,
    column_numbers,
    refuse_marks,
    says_places,
)
from mggcn.graph.sources.edge_list import LONGEST_LINE, PLAIN, EdgeList, blocks

KINDS = {"w": "a weight", "t": "a type"}
LONG_NAME = 256
"""Letters of a name that may always be kept."""
MOST_BYTES = 256 << 20
"""Most that names take with one that is longer, as each takes the width of the longest."""
MOST_WAITING = 1 << 16
"""Edges that are written at once."""
COMMENT = re.compile(r"\s[#%]")
QUOTED = re.compile(r'(?:^|(?<=[,\s]))"(?:[^"]|"")*"')
_QUOTE = r'"((?:[^"]|"")*)"'
FIELD: dict[str | None, re.Pattern[str]] = {
    ",": re.compile(rf'\s*(?:{_QUOTE}\s*|((?!\s*")[^,]*))(,|\Z)'),
    "\t": re.compile(rf'[^\S\t]*(?:{_QUOTE}[^\S\t]*|((?![^\S\t]*")[^\t]*))(\t|\Z)'),
    None: re.compile(rf'(?:{_QUOTE}|((?!")\S+))(\s+|\Z)'),
}
"""By separator, None for blanks: a field, and what ends it."""
OPENED = re.compile(r'\s*"(?:[^"]|"")*\Z')
MORE_THAN_NUMBERS = re.compile(r"[+-]?[0-9][0-9.eE+-]*")


def read_named_edges(
    path: Path, staging: Staging | None = None, tell: Tell = silent, *, text: bool = False
) -> EdgeList:
    """Read edges between names, their weights or types as `read_edge_list` does, and a header that says source and target.

    Names that all are whole numbers, in quotes, are numbers unless `text` says that they are names.
    Cost: about a million lines a second, and a dictionary of the names. Raises: GraphError that names the line.
    """
    reader = _Names(path, staging or InMemory())
    try:
        for block, first_line, _ in blocks(path, 1, 0, tell):
            for number, line in enumerate(_decoded(path, block, first_line).removesuffix("\n").split("\n"), first_line):
                reader.take(line, number)
    except (OSError, EOFError, zlib.error) as error:
        raise GraphError(f"cannot read the edge list {path}: {error}; is it cut short or no text?") from error
    return reader.finish(text)


def _decoded(path: Path, block: bytes, first_line: int) -> str:
    try:
        return block.decode()
    except UnicodeDecodeError as error:
        number = first_line + block.count(b"\n", 0, error.start)
        raise GraphError(f"{path}, line {number}: names must be UTF-8; convert the file") from error


def fields_of(record: str, separator: str | None) -> list[str] | None:
    """Return the fields of a record, None if a quote in it is still open. Raises: ValueError for text after a quote."""
    if '"' not in record:
        return [field.strip() for field in record.split(separator)]
    found, at = [], 0
    while True:
        match = FIELD[separator].match(record, at)
        if match is None and OPENED.match(record, at):
            return None
        if match is None:
            raise ValueError("there is text after a closing quote")
        found.append(match[2].strip() if match[1] is None else match[1].replace('""', '"'))
        at = match.end()
        if not match[3]:
            return found


def separator_of(record: str) -> str | None:
    """Return what separates the fields of a first record: a tab, a comma, or None for blanks."""
    bare = QUOTED.sub('""', record).strip()
    if "\t" in bare and not any(field.strip(" ").endswith(",") for field in bare.split("\t")):
        return "\t"
    return "," if "," in bare else None


class Numbering:
    """Numbers names in the order of appearance."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def of(self, name: str) -> int:
        """Return the number of a name."""
        return self.numbers.setdefault(name, len(self.numbers))

    def names(self, source: Path) -> Array:
        """Return the names, each as wide as the longest. Raises: GraphError if that is out of proportion."""
        longest = max(self.numbers, key=len)
        nbytes = 4 * len(longest) * len(self.numbers)
        if len(longest) > LONG_NAME and nbytes > MOST_BYTES:
            raise GraphError(
                f"{source}: all {len(self.numbers):,} names would take the {len(longest):,} letters of the longest, "
                f"{longest[:40]!r}..., {nbytes / 2**30:.1f} GiB; shorten names of more than {LONG_NAME} letters"
            )
        return np.array(list(self.numbers), np.str_)

    def remarks(self) -> Iterator[str]:
        """Yield remarks on names that look like numbers."""
        odd = (name for name in self.numbers if MORE_THAN_NUMBERS.fullmatch(name) and not PLAIN.fullmatch(name))
        if name := next(odd, ""):
            yield f"ids are names, as {name[:40]!r} is one: each counts as it is written, so that 7, 07 and 7.0 are three"


class _Names:
    """Takes lines and gives names their numbers."""

    def __init__(self, path: Path, staging: Staging) -> None:
        self.path, self.staging = path, staging
        self.header: Header | None = None
        self.separator: str | None = None
        self.first = ""
        self.kinds: tuple[str, ...] = ()
        self.numbering = Numbering()
        self.waiting: list[list[float]] = []
        self.columns: list[Column] = []
        self.count = 0
        self.commented = ""
        """A line that begins with a mark and may have been an edge or a header, before the first edge."""
        self.begun: tuple[str, int] = ("", 0)
        """Lines of a record in which a quote is open, and the number of the first."""
        self.again = False
        """Whether a name of the first edge occurs again."""

    def take(self, line: str, number: int) -> None:
        """Take a line. Raises: GraphError if it has not the form of the first edge."""
        rest, first = self.begun
        record, number = (f"{rest}\n{line}", first) if first else (self._content(line, number), number)
        if not record:
            return
        separator = self.separator if self.columns else separator_of(record)
        record = record if separator else record.strip()
        try:
            fields = fields_of(record, separator)
        except ValueError as error:
            raise self._error(record, number, f": {error}") from error
        self.begun = (record, number) if fields is None else ("", 0)
        if fields is not None:
            self._add(fields, record, number)
        elif len(record) > LONGEST_LINE:
            raise self._unclosed()

    def _content(self, line: str, number: int) -> str:
        """Return a line without its comment. Raises: GraphError for what may be a comment or part of a name."""
        line = line.rstrip("\r").removeprefix("\ufeff")
        if "\0" in line or ("\r" in line and '"' not in line):
            wrong = "a name holds a zero byte; is it text?" if "\0" in line else NO_LINE_END
            raise GraphError(f"{self.path}, line {number}: {wrong}")
        found = line.lstrip()
        if found[:1] in ("#", "%"):
            self._comment(found, number)
            return ""
        if '"' in line or ("#" not in line and "%" not in line):
            return line if '"' in line else line.rstrip()
        mark = COMMENT.search(line)
        if mark is None:
            return line.rstrip()
        kept, behind = line[: mark.start()], line[mark.end() :]
        if behind[:1].strip() and (self.separator if self.columns else separator_of(kept)):
            raise self._either(line, number)
        return kept.rstrip()

    def _comment(self, line: str, number: int) -> None:
        """Look at a line that begins with a mark. Raises: GraphError if it may be an edge, whose first name begins so."""
        if line[1:2].strip("#% \t") and not self.columns:
            self.commented = line.rstrip()
        elif line[1:2].strip("#% \t") and len(line.split(self.separator)) == len(self.kinds):
            raise self._either(line, number)

    def _either(self, line: str, number: int) -> GraphError:
        return GraphError(
            f"{self.path}, line {number}: {line.strip()[:80]!r} may hold a comment or a name with # or %; put a blank "
            "after the mark if it begins a comment, else quote the name"
        )

    def _add(self, fields: list[str], record: str, number: int) -> None:
        """Take a record. Raises: GraphError if it has not the form of the first edge."""
        if not self.columns:
            if self.header is None and says_places(record):
                self.header = Header(record, number)
                return
            self._begin(fields, record, number)
        elif self.header is not None and record == self.header.text:
            raise GraphError(f"{self.path}, line {number}: the header stands here again; leave it out")
        try:
            if len(fields) != len(self.kinds) or not all(fields):
                raise ValueError
            more = [_number(field, kind) for kind, field in zip(self.kinds[2:], fields[2:], strict=True)]
        except ValueError as error:
            raise self._error(record, number, self._advice(fields)) from error
        for column, name in zip(self.waiting, fields[:2], strict=False):
            column.append(self.numbering.of(name))
        for column, value in zip(self.waiting[2:], more, strict=True):
            column.append(value)
        if len(self.waiting[0]) == MOST_WAITING:
            self.flush()

    def _begin(self, fields: list[str], record: str, number: int) -> None:
        """Take the first edge as the form of all."""
        if self.header is not None:
            refuse_marks(self.path, self.header, record)
        self.first, self.separator = record, separator_of(record)
        bare = QUOTED.sub("", record)
        for mark in ";|" if self.separator is None else ";" if self.separator == "," else "":
            if mark in bare and (len(fields) < 2 or fields[0].count(mark) != fields[1].count(mark)):
                raise GraphError(
                    f"{self.path}, line {number}: {MARKS[mark]} are not read: {SEPARATE}; quote names that hold some"
                )
        if self.header is None and self.commented and len(self.commented.split(self.separator)) == len(fields):
            self.header = Header(self.commented, number)
        more: tuple[str, ...] = ("w",) if len(fields) == 3 else ()
        if self.header is not None and self.header.text != self.commented:
            more = check_names(self.header, len(fields), self.path)
        self.kinds = ("i", "i", *more)
        self.waiting = [[] for _ in self.kinds]
        dtypes: list[npt.DTypeLike] = [np.float64 if kind == "w" else np.int64 for kind in self.kinds]
        self.columns = [self.staging.column(f"names_{at}", dtype, 0) for at, dtype in enumerate(dtypes)]

    def flush(self) -> None:
        """Write what is waiting."""
        ends = np.array(self.waiting[:2], np.int64)
        # The names of the first edge have the numbers 0 and 1, or 0 alone for a self-loop.
        self.again = self.again or bool((ends[:, 0 if self.count else 1 :] < 2).any())
        for waiting, column in zip(self.waiting, self.columns, strict=True):
            column.write(self.count, np.array(waiting))
        self.count += len(self.waiting[0])
        self.waiting = [[] for _ in self.kinds]

    def finish(self, text: bool) -> EdgeList:
        """Return edges, header and names. Raises: GraphError if there is no edge, or a quote is open."""
        if self.begun[1]:
            raise self._unclosed()
        if not self.columns:
            raise GraphError(f"{self.path}: expected lines of two names, found none; is it an edge list?")
        self.flush()
        rows = [column.rows(self.count) for column in self.columns]
        named = dict(zip(self.kinds[2:], rows[2:], strict=True))
        names = self.numbering.names(self.path)
        if not text and _all_plain(self.numbering.numbers):
            names = names.astype(np.int64)
        header = "" if self.header is None else self.header.text
        edges = Edges(rows[0], rows[1], named.get("w"), named.get("t"))
        first = column_numbers(self.header, self.first)
        return EdgeList(edges, header, names, first, tuple(self._remarks(text)))

    def _remarks(self, text: bool) -> Iterator[str]:
        if self.header is None and self.count > 1 and not self.again:
            yield (
                f"the first line, {self.first[:80]!r}, was read as an edge, but its names occur nowhere else: if it is a "
                "header, name its columns source and target, or leave it out"
            )
        if not text:
            yield from self.numbering.remarks()

    def _error(self, record: str, number: int, advice: str) -> GraphError:
        wanted = " and ".join(["two names", *(KINDS[kind] for kind in self.kinds[2:])])
        return GraphError(
            f"{self.path}, line {number}: expected {wanted} as in the first edge, got {record[:80]!r}{advice}; fix it"
        )

    def _advice(self, fields: list[str]) -> str:
        """Say what may be wrong with fields that are not an edge."""
        if len(fields) != 3 or self.kinds[2:] not in (("w",), ("t",)):
            return ""
        if self.kinds[2:] == ("t",):
            return ": types are whole numbers from 0, so number relations first"
        return (
            f": {fields[2][:40]!r} is not a number; of triples (subject, relation, object) write subject, object and the "
            "number of the relation under the header source,target,type"
        )

    def _unclosed(self) -> GraphError:
        record, number = self.begun
        return GraphError(
            f"{self.path}, line {number}: a double quote is not closed, in {record[:80]!r}; close or double it"
        )


def _number(field: str, kind: str) -> float:
    """Return a number as `parse_block` reads it. Raises: ValueError for what Python alone takes for one."""
    if "_" in field or not field.isascii():
        raise ValueError(field)
    return int(field) if kind == "t" else float(field)


def _all_plain(names: Iterable[str]) -> bool:
    """Return whether all names are whole numbers that int64 holds."""
    return all(PLAIN.fullmatch(name) and -(2**63) <= int(name) < 2**63 for name in names)
