"""Typed, strict access to a TOML file: every key must be known, of its type and in its range, or an error says what is
wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from mggcn import files
from mggcn.errors import ConfigError

S = TypeVar("S", bound=str)


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file. Raises: ConfigError if it is missing or not TOML."""
    try:
        return files.read_toml(path)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {files.reason(error)}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


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
        value = self._get(key, "text")
        if not isinstance(value, str):
            raise self._wrong(key, "text", value)
        return value

    def choice(self, key: str, known: Sequence[S]) -> S:
        expected = f"one of {', '.join(known)}"
        value = self._get(key, expected)
        if value not in known:
            raise self._wrong(key, expected, value)
        return known[known.index(value)]

    def flag(self, key: str) -> bool:
        value = self._get(key, "true or false")
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def whole(self, key: str, least: int) -> int:
        value = self._get(key, f"a whole number from {least} on")
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self._wrong(key, f"a whole number from {least} on", value)
        return value

    def number(self, key: str, least: float | None = None, most: float = math.inf) -> float:
        """Return a number above zero, or from `least` to `most`."""
        expected = "a number above 0" if least is None else f"a number from {least:g}" + _to(most)
        return self._number(key, self._get(key, expected), expected, least, most)

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
        value = self._get(key, expected)
        if not isinstance(value, list) or not value:
            raise self._wrong(key, expected, value)
        pairs = []
        for pair in value:
            if not isinstance(pair, list) or len(pair) != 2:
                raise self._wrong(key, expected, pair)
            first, second = (self._number(key, number, expected, None, math.inf) for number in pair)
            pairs.append((first, second))
        return pairs

    def table(self, key: str) -> Fields:
        value = self._get(key, f"a table [{key}]")
        if not isinstance(value, dict):
            raise self._wrong(key, f"a table [{key}]", value)
        return Fields(value, f"{self.where}: [{key}]")

    def tables(self, key: str) -> list[Fields]:
        """Return one table [[key]] or more."""
        value = self._get(key, f"tables [[{key}]]")
        if not isinstance(value, list) or not value or not all(isinstance(entry, dict) for entry in value):
            raise self._wrong(key, f"tables [[{key}]]", value)
        return [Fields(entry, f"{self.where}: [[{key}]] number {n}") for n, entry in enumerate(value, start=1)]

    def finish(self) -> None:
        """Refuse keys that were never read."""
        if unknown := sorted(set(self._table) - set(self._asked)):
            raise ConfigError(f"{self.where}: unknown key {unknown[0]!r}; known are {', '.join(self._asked)}")

    def _get(self, key: str, expected: str) -> Any:
        self._asked.append(key)
        if key not in self._table:
            raise ConfigError(f"{self.where}: {key} is missing; expected {expected}")
        return self._table[key]

    def _number(self, key: str, value: Any, expected: str, least: float | None, most: float) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._wrong(key, expected, value)
        if not (value > 0 if least is None else least <= value <= most):
            raise self._wrong(key, expected, value)
        return float(value)

    def _wrong(self, key: str, expected: str, value: Any) -> ConfigError:
        return ConfigError(f"{self.where}: {key} expects {expected}, got {value!r}")


def _to(most: float) -> str:
    return f" to {most:g}" if math.isfinite(most) else " on"
