"""Headers of edge lists: find one, compare its names with the columns, say what to mend."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from mggcn.errors import GraphError
from mggcn.graph.table_columns import INDEX

WORDS = (frozenset({"start", "origin", "sender", "u"}), frozenset({"to", "end", "receiver", "v"}), frozenset[str]())
BEGINNINGS = (("src", "source", "from"), ("dst", "dest", "target"), ("weight",))
"""Words, and how words begin, that say source, target and weight: such a name stands over its own column only."""
WEIGHTS = frozenset({"w", "value", "values", "val", "count", "counts", "score", "strength", "similarity"})
"""Names of a third column that mean weight; elsewhere these words mean nothing."""
TYPES = frozenset({"type", "types", "relation", "relations", "rel", "etype", "predicate"})
"""Names of a column of types, the third or the fourth."""
NUMBER_THEM = (
    'ids must be integers from 0: fix that line, or have names numbered by --ids edges (in Python ids="edges")'
)
MARKS = {";": "semicolons", "|": "bars (|)", ":": "colons", '"': "double quotes", "'": "single quotes"}
"""Separators and quotes that other programs write."""
SEPARATE = "put commas or tabs between columns, and points into numbers (pandas: sep=',', decimal='.')"
NO_LINE_END = "a carriage return alone ends no line: end lines with line feeds (tr '\\r' '\\n' does)"


class NamesError(GraphError):
    """The ids of an edge list are names, not numbers."""


@dataclass(frozen=True, slots=True)
class Header:
    """The first line of an edge list that is neither comment nor edge, and its number."""

    text: str
    line: int


def content(line: str) -> str:
    """Return a line without its comment and the blanks around it."""
    return line.replace("%", "#").split("#")[0].strip()


def split(line: str) -> list[str]:
    """Return the fields of a line: at commas where there are any, else at blanks."""
    return line.split("," if "," in line else None)


def split_header(text: str, first_line: int) -> tuple[str, Header | None]:
    """Turn a first line without numbers into a comment, which keeps line numbers right, and return it as well.

    A line of numbers between other separators or in quotes is not a header: parsing it says what is wrong.
    """
    lines = text.split("\n")
    for at, line in enumerate(lines):
        found = content(line)
        if found and not any(map(is_number, split(found))) and not _all_numbers(found):
            # Blanks before the first name may stand for the nameless column of an index.
            header = Header(line.replace("%", "#").split("#")[0].rstrip(), first_line + at)
            return "\n".join([*lines[:at], "#" + line, *lines[at + 1 :]]), header
        if found:
            break
    return text, None


def check_header(header: Header, first_edge: str, num_columns: int, path: Path) -> tuple[str, ...]:
    """Return which columns follow the ids: "w" the weight, "t" the type.

    Ids are read by their place: source, target. As many names must stand over the columns; one that says source, target or
    weight must stand there, none may be that of an index, and a third and fourth must say weight or type.
    Raises: GraphError for a header that names other columns; NamesError for one that is an edge between names.
    """
    if not any(map(is_number, _pieces(first_edge))):
        raise NamesError(
            f"{path}, line {header.line}: expected two vertex ids, got {header.text[:80]!r}; {NUMBER_THEM}"
        )
    return check_names(header, num_columns, path)


def check_names(header: Header, num_columns: int, path: Path) -> tuple[str, ...]:
    """Return which columns follow ids of any kind. Raises: GraphError for a header that names other columns."""
    names = _names(header.text)
    why = _contradiction(names, num_columns)
    more = tuple("t" if TYPES.intersection(_words(name)) else "w" for name in names[2:])
    if why:
        places = "source, target" if num_columns == 2 else "source, target, weight or type"
        raise GraphError(
            f"{path}, line {header.line}: columns are read as {places}, but in the header {header.text[:80]!r} {why}; "
            "write those columns alone, in that order (pandas: index=False), or drop the header if they are right"
        )
    return more


def refuse_marks(path: Path, header: Header, first_edge: str) -> None:
    """Refuse semicolons or bars between the columns of a header and of what follows. Raises: GraphError."""
    for mark in ";|":
        if mark in header.text and mark in first_edge:
            raise GraphError(f"{path}, line {header.line}: {MARKS[mark]} are not read: {SEPARATE}")


def says_places(line: str) -> bool:
    """Return whether the first two fields read source and target, in either order, so that they are not vertices."""
    return sorted(str(_place(name, set())) for name in _names(line)[:2]) == ["0", "1"]


def column_numbers(header: Header | None, first_edge: str) -> str:
    """Return a first line of numbers, as pandas writes it above columns without names; empty for any other line."""
    return first_edge if header is None and first_edge in ("0,1", "0,1,2") else ""


def advice(line: str) -> str:
    """Return what to do about a line that is not an edge."""
    if "\r" in line.rstrip():
        return NO_LINE_END
    found = content(line)
    fields = split(found)
    marks = [name for mark, name in MARKS.items() if mark in found]
    if marks and _all_numbers(found):
        return f"{' and '.join(marks)} are not read: put blanks or commas between plain numbers"
    if not fields[0].strip():
        return "give the missing id, or leave out the index of a data frame (pandas: index=False)"
    if not all(field.strip().lstrip("+-").isdigit() for field in fields[:2]):
        return NUMBER_THEM
    return "leave further columns out" if len(fields) > 3 else "fix that line"


def _contradiction(names: list[str], num_columns: int) -> str:
    """Say what contradicts the order source, target, weight; nothing if nothing does."""
    if len(names) != num_columns:
        return f"{len(names)} names stand over {num_columns} columns"
    # Of names such as v1,v2 the common word says nothing.
    shared = set(_words(names[0])).intersection(*map(_words, names[1:2])) if len(names) > 1 else set()
    for at, name in enumerate(names):
        if INDEX.fullmatch(name):
            return f"column {at + 1} is named {name!r}, as that of an index is"
        place = _place(name, shared)
        relation = at == 1 and not shared and TYPES.intersection(_words(name))
        if relation or (place not in (None, at) and not (place == 2 and at == 3)):
            return f"column {at + 1} is named {name!r}"
    typed = [at for at in range(2, num_columns) if TYPES.intersection(_words(names[at]))]
    for at in range(2, num_columns):
        if at not in typed and _place(names[at], set()) != 2 and not WEIGHTS.intersection(_words(names[at])):
            return f"column {at + 1} is named {names[at]!r}, not weight or type"
    if num_columns > 4 or len(typed) > 1 or num_columns - 2 - len(typed) > 1:
        return "more than one column each of weights and types is named"
    return ""


def _names(header: str) -> list[str]:
    """Split at the header's own separator; an empty name counts."""
    separator = "," if "," in header else "\t" if "\t" in header else None
    return [name.strip().strip("\"'") for name in header.split(separator)]


def _place(name: str, but_for: set[str]) -> int | None:
    """Return 0 for a name that says source, 1 for target, 2 for weight, None for any other; some words say nothing."""
    for word in _words(name):
        if word in but_for:
            continue
        for place, (known, beginnings) in enumerate(zip(WORDS, BEGINNINGS, strict=True)):
            if word in known or word.startswith(beginnings):
                return place
    return None


def _words(name: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)]


def _pieces(line: str) -> list[str]:
    """Split at everything that separates columns anywhere."""
    return [piece for piece in re.split(r"[\s,;|:\"']+", line) if piece]


def _all_numbers(line: str) -> bool:
    return all(map(is_number, _pieces(line)))


def is_number(field: str) -> bool:
    """Return whether a field is a number as `parse_block` reads it, or nearly."""
    try:
        float(field)
    except ValueError:
        return False
    return True
