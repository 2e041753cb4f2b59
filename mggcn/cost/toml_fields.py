"""Typed, strict access to a TOML file: every key must be known, of its type and in its range, or an error says what is
wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from mggcn.errors import ConfigError

S = TypeVar("S", bound=str)


class Fields:
    """One table of a file, read key by key; `finish` refuses keys that were not read.

    Raises, in every method: ConfigError that names the file, the key, what was expected and what came.
    """

    def __init__(self, table: Mapping[str, Any], where: str) -> None:
        self._table = table
        self._asked: list[str] = []
        self.where = where

    def has(self, key: str) -> bool:
        """Return whether an optional key is there."""
        self._asked.append(key)
        return key in self._table

    def text(self, key: str) -> str:
        found: str = self._get(key, "text", lambda value: isinstance(value, str))
        return found

    def choice(self, key: str, known: Sequence[S]) -> S:
        found: S = self._get(key, f"one of {', '.join(known)}", known.__contains__)
        return found

    def flag(self, key: str) -> bool:
        found: bool = self._get(key, "true or false", lambda value: isinstance(value, bool))
        return found

    def whole(self, key: str, least: int) -> int:
        expected = f"a whole number from {least} on"
        found: int = self._get(key, expected, lambda value: type(value) is int and value >= least)
        return found

    def number(self, key: str, least: float | None = None, most: float = math.inf) -> float:
        """Return a number above zero, or from `least` to `most`."""
        end = f" to {most:g}" if math.isfinite(most) else " on"
        expected = "a number above 0" if least is None else f"a number from {least:g}{end}"
        return float(self._get(key, expected, lambda value: _is_number(value, least, most)))

    def named_numbers(self, key: str, names: Sequence[S], some: bool = False) -> dict[S, float]:
        """Return a table of numbers above zero, one for each of the `names`, or, with `some`, for one or more of them."""
        inner = self.table(key)
        found = {name: inner.number(name) for name in names if inner.has(name) or not some}
        inner.finish()
        if not found:
            raise self._wrong(key, f"numbers for some of {', '.join(names)}", {})
        return found

    def pairs(self, key: str) -> list[tuple[float, float]]:
        """Return a list of one pair of numbers above zero or more."""
        expected = "pairs of numbers above 0 such as [[1e6, 5e10], [1e9, 1e10]]"
        pairs = self._get(key, expected, lambda value: isinstance(value, list) and value)
        for pair in pairs:
            if not isinstance(pair, list) or len(pair) != 2 or not all(map(_is_number, pair)):
                raise self._wrong(key, expected, pair)
        return [(float(first), float(second)) for first, second in pairs]

    def named_pairs(self, key: str, names: Sequence[S]) -> dict[S, list[tuple[float, float]]]:
        """Return a table of lists as of `pairs`, for one or more of the `names`."""
        inner = self.table(key)
        found = {name: inner.pairs(name) for name in names if inner.has(name)}
        inner.finish()
        if not found:
            raise self._wrong(key, f"lists of pairs for some of {', '.join(names)}", {})
        return found

    def named_lists(self, key: str, names: Sequence[S], count: int) -> dict[S, list[float]]:
        """Return a table of lists of `count` numbers from 0 on, for one or more of the `names`."""

        def fits(value: Any) -> bool:
            return isinstance(value, list) and len(value) == count and all(_is_number(one, 0.0) for one in value)

        inner, expected = self.table(key), f"{count} numbers from 0 on"
        found = {name: list(map(float, inner._get(name, expected, fits))) for name in names if inner.has(name)}
        inner.finish()
        if not found:
            raise self._wrong(key, f"lists of {expected} for some of {', '.join(names)}", {})
        return found

    def table(self, key: str) -> Fields:
        found = self._get(key, f"a table [{key}]", lambda value: isinstance(value, dict))
        return Fields(found, f"{self.where}: [{key}]")

    def tables(self, key: str) -> list[Fields]:
        """Return one table [[key]] or more."""

        def are_tables(value: Any) -> bool:
            return isinstance(value, list) and bool(value) and all(isinstance(entry, dict) for entry in value)

        found = self._get(key, f"tables [[{key}]]", are_tables)
        return [Fields(entry, f"{self.where}: [[{key}]] number {n}") for n, entry in enumerate(found, start=1)]

    def finish(self) -> None:
        """Refuse keys that were never read."""
        if unknown := sorted(set(self._table) - set(self._asked)):
            raise ConfigError(f"{self.where}: unknown key {unknown[0]!r}; known are {', '.join(self._asked)}")

    def _get(self, key: str, expected: str, fits: Callable[[Any], object]) -> Any:
        self._asked.append(key)
        if key not in self._table:
            raise ConfigError(f"{self.where}: {key} is missing; expected {expected}")
        if not fits(self._table[key]):
            raise self._wrong(key, expected, self._table[key])
        return self._table[key]

    def _wrong(self, key: str, expected: str, value: Any) -> ConfigError:
        return ConfigError(f"{self.where}: {key} expects {expected}, got {value!r}")


def _is_number(value: Any, least: float | None = None, most: float = math.inf) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return False
    return value > 0 if least is None else least <= value <= most
