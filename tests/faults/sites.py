"""Where a single fault can be planted: an operator, a constant or a statement, in Python by ast, in C++ by tokens."""

from __future__ import annotations

import ast
import itertools
import random
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

AREAS = {"mggcn": 3, "cpu": 1, "cuda": 1}
"""Folders of the sources, and their shares of the faults."""
SUFFIXES = {".py", ".cpp", ".h", ".cu", ".cuh"}
COMPARED = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In},
}
COMPUTED = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult},
    **{ast.Mod: ast.FloorDiv, ast.LShift: ast.RShift, ast.RShift: ast.LShift},
}
SWAPPED = {
    **{b"+": b"-", b"-": b"+", b"*": b"+", b"/": b"*", b"+=": b"-=", b"-=": b"+=", b"<<": b">>", b">>": b"<<"},
    **{b"<": b"<=", b"<=": b"<", b">": b">=", b">=": b">", b"==": b"!=", b"!=": b"==", b"&&": b"||", b"||": b"&&"},
}
# clang-format puts spaces around operators of two operands, and none around those of types.
OPERATOR = re.compile(rb"(?<= )(\+=|-=|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/<>])(?= )")
NUMBER = re.compile(rb"(?<![\w.])\d+(?![\w.])")
STATEMENT = re.compile(rb"^ +([\w\[\].>*()-]+ [-+*|]?= [^;{}]*;|[\w:.>-]+\([^;{}]*\);)$", re.MULTILINE)
PASSED_OVER = re.compile(
    rb'//[^\n]*|/\*.*?\*/|^\s*#(?:[^\n\\]|\\.)*|"[^"\n]*"|^[^\n]*\btemplate\b[^\n]*', re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True, slots=True, order=True)
class Fault:
    """`after` in place of the bytes from `start` to `end` of a file."""

    path: str
    start: int
    end: int
    kind: str
    after: bytes

    def planted(self, text: bytes) -> bytes:
        return text[: self.start] + self.after + text[self.end :]

    def said(self, text: bytes) -> str:
        """Return the place and the change, in one line."""
        before = b" ".join(text[self.start : self.end].split())
        line = text.count(b"\n", 0, self.start) + 1
        return f"{self.path}:{line}: {before.decode()} -> {self.after.decode()}"


def draw(
    root: Path, count: int, seed: int, valid: Callable[[Fault], bool], areas: Collection[str] = tuple(AREAS)
) -> list[Fault]:
    """Return `count` faults of a checkout that leave valid programs, by area; of all areas, or of some their share."""
    drawn: list[Fault] = []
    for number, (area, share) in enumerate(AREAS.items()):
        if area not in areas:
            continue
        files = sorted(path for path in (root / area).rglob("*") if path.suffix in SUFFIXES)
        found = [fault for path in files for fault in faults_of(path.relative_to(root).as_posix(), path.read_bytes())]
        random.Random(seed + number).shuffle(found)
        wanted = count * share // sum(AREAS.values()) if number else count - count * 2 // sum(AREAS.values())
        drawn += itertools.islice(filter(valid, found), wanted)
    return drawn


def faults_of(path: str, text: bytes) -> list[Fault]:
    """Return all faults of a file, in the order of their places."""
    return sorted(_python(path, text) if path.endswith(".py") else _cpp(path, text))


def _python(path: str, text: bytes) -> Iterator[Fault]:
    starts = [0, *(match.end() for match in re.finditer(rb"\n", text))]
    for node in _nodes(ast.parse(text)):
        first = starts[node.lineno - 1] + node.col_offset
        last = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        for kind, after in _changes(node):
            yield Fault(path, first, last, kind, after.encode())


def _nodes(node: ast.AST) -> Iterator[Any]:
    """Go through what runs: neither annotations nor texts; of an error only that it is raised."""
    for name, field in ast.iter_fields(node):
        for child in field if isinstance(field, list) else [field]:
            if isinstance(child, ast.AST) and name not in ("annotation", "returns", "decorator_list"):
                if hasattr(child, "lineno"):
                    yield child
                if not isinstance(child, ast.JoinedStr | ast.Raise):
                    yield from _nodes(child)


def _changes(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Return kinds of faults of a node, each with the text in its place."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in COMPARED:
            yield "operator", f"({ast.unparse(ast.Compare(node.left, [COMPARED[type(op)]()], node.comparators))})"
        case ast.BinOp(op=op) if type(op) in COMPUTED and not _of_text(node):
            yield "operator", f"({ast.unparse(ast.BinOp(node.left, COMPUTED[type(op)](), node.right))})"
        case ast.BoolOp(op=op):
            other = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield "operator", f"({ast.unparse(ast.BoolOp(other, node.values))})"
        case ast.UnaryOp(op=ast.Not()):
            yield "operator", f"({ast.unparse(node.operand)})"
        case ast.Constant(value=bool(value)):
            yield "constant", str(not value)
        case ast.Constant(value=int() | float() as value):
            yield "constant", f"({value + 1})"
        case ast.Raise() | ast.AugAssign() | ast.Expr(value=ast.Call()):
            yield "statement", "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "statement", "pass"


def _of_text(node: ast.BinOp) -> bool:
    parts = (node.left, node.right)
    return any(
        isinstance(p, ast.JoinedStr) or (isinstance(p, ast.Constant) and isinstance(p.value, str)) for p in parts
    )


def _cpp(path: str, text: bytes) -> Iterator[Fault]:
    code = PASSED_OVER.sub(lambda match: re.sub(rb"[^\n]", b"#", match[0]), text)
    for match in OPERATOR.finditer(code):
        yield Fault(path, match.start(), match.end(), "operator", SWAPPED[match[0]])
    for match in NUMBER.finditer(code):
        yield Fault(path, match.start(), match.end(), "constant", b"%d" % (int(match[0]) + 1))
    for match in STATEMENT.finditer(code):
        yield Fault(path, match.start(1), match.end(1), "statement", b";")
