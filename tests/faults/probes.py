"""Which tests run the place of a fault: probes beside every place, one run of the tests, and what the probes wrote.

A probe stands in the sources of a copy, so ranks and commands that are processes of their own run it as well. It costs a
look into a set; it says nothing of a constant's readers, only of where the constant is made: at import, for most tests.
"""

from __future__ import annotations

import ast
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.faults.sites import Fault

MODULE = "mggcn/fault_probes.py"
"""Where the copy has tests/faults/probe.py."""
PLUGIN = "mggcn.fault_probes"
CALL = f"__import__('{PLUGIN}', fromlist=['hit']).hit({{}})"


@dataclass(frozen=True, slots=True)
class Recorded:
    """What one run of the tests found: `tests` by fault ("" outside functions), seconds by test, those that failed.

    A place that runs once and is remembered (a cache, a fixture of many tests) is known of the first test only.
    """

    tests: dict[str, list[str]]
    seconds: dict[str, float]
    failed: list[str]

    def cheapest(self, fault: str, limit_s: float) -> list[str]:
        """Return tests that run a fault's place and pass without it, the shortest first, that take `limit_s` in all."""
        chosen, left = [], limit_s
        usable = set(self.tests[fault]).intersection(self.seconds).difference(self.failed)
        for test in sorted(usable, key=lambda test: (self.seconds[test], test)):
            left -= self.seconds[test]
            if left < 0 and chosen:
                break
            chosen.append(test)
        return chosen


def probed(text: bytes, faults: Iterable[tuple[int, Fault]]) -> bytes:
    """Return a module with a probe beside the place of each fault: before a statement, around an expression.

    Where the language takes no expression (a pattern of `match`), the probe stands before the statement; a default of an
    argument has its probe where the function begins.
    """
    put: list[tuple[int, int, bytes]] = []
    for number, fault in faults:
        call = CALL.format(number).encode()
        around = [(fault.start, -fault.end, b"(" + call + b" or ("), (fault.end, -len(text) - 1, b"))")]
        if (body := _body_of_default(text, fault)) is not None:
            around = [(body[0], -len(text) - 1, call + b"\n" + b" " * body[1])]
        elif fault.kind == "statement" or not _parses(_with(text, around)):
            start, indent = _statement(text, fault.start)
            around = [(start, -len(text) - 1, call + b"\n" + b" " * indent)]
        put += around
    return _with(text, put)


def _with(text: bytes, put: list[tuple[int, int, bytes]]) -> bytes:
    """Return a text with others put in, each before a place; at one place, those with lower numbers come first."""
    for place, _, new in sorted(put, reverse=True):
        text = text[:place] + new + text[place:]
    return text


def _body_of_default(text: bytes, fault: Fault) -> tuple[int, int] | None:
    """Return where the body of a function begins, and its indentation, if the fault is in a default of an argument."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            defaults = [default for default in (*node.args.defaults, *node.args.kw_defaults) if default is not None]
            if any(_start(text, d) <= fault.start and fault.end <= _start(text, d, end=True) for d in defaults):
                first = node.body[1:2] or node.body  # behind a docstring
                return _start(text, first[0]), first[0].col_offset
    return None


def _start(text: bytes, node: ast.expr | ast.stmt, *, end: bool = False) -> int:
    """Return where a node begins, or ends."""
    line, column = (node.end_lineno, node.end_col_offset) if end else (node.lineno, node.col_offset)
    return sum(map(len, text.splitlines(keepends=True)[: (line or 0) - 1])) + (column or 0)


def _statement(text: bytes, place: int) -> tuple[int, int]:
    """Return where the innermost statement around a place begins, and its indentation."""
    line = text.count(b"\n", 0, place) + 1
    statements = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt))
    found = max((s for s in statements if s.lineno <= line <= (s.end_lineno or 0)), key=lambda s: s.lineno)
    return _start(text, found), found.col_offset


def _parses(text: bytes) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def gathered(folder: Path, names: Sequence[str]) -> Recorded:
    """Return what a run of the tests wrote; `names` are the faults by number."""
    tests: defaultdict[str, set[str]] = defaultdict(set)
    (folder / "hits").touch()
    for line in (folder / "hits").read_text().splitlines():
        number, _, test = line.partition("\t")
        tests[names[int(number)]].add(test)
    results = [json.loads(line) for line in (folder / "tests").read_text().splitlines()]
    seconds = {result["test"]: 0.0 for result in results}
    for result in results:
        seconds[result["test"]] += result["seconds"]
    failed = sorted({result["test"] for result in results if not result["passed"]})
    return Recorded({name: sorted(tests[name]) for name in names}, seconds, failed)
