"""Text and TOML values as the types of settings (Literal, tuples of integers, bool, int, float, str), and their checks."""

from __future__ import annotations

import dataclasses
import math
import operator
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from mggcn.errors import ConfigError


def require(condition: bool, message: str) -> None:
    """Raise ConfigError with a message unless a condition holds."""
    if not condition:
        raise ConfigError(message)


def settle(table: Any, name: str) -> None:
    """Bring every field of a table to its declared type, also when Python rather than TOML filled it.

    Raises: ConfigError as `parse_field`.
    """
    hints = typing.get_type_hints(type(table))
    for item in dataclasses.fields(table):
        object.__setattr__(table, item.name, _parsed(hints, name, item.name, getattr(table, item.name)))


def parse_field(kind: type, table: str, key: str, value: Any) -> Any:
    """Convert text or a TOML value to the type of the field `key` of a table's class.

    Raises: ConfigError if there is no such field, or the value does not fit its type.
    """
    return _parsed(typing.get_type_hints(kind), table, key, value)


def _parsed(hints: Mapping[str, Any], table: str, key: str, value: Any) -> Any:
    if key not in hints:
        raise ConfigError(f"unknown setting {table}.{key}; known in [{table}] are {', '.join(hints)}")
    try:
        return convert(hints[key], value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{table}.{key} expects {type_name(hints[key])}, got {value!r}") from error


def type_name(hint: Any) -> str:
    origin = typing.get_origin(hint)
    if origin is Literal:
        return "one of " + ", ".join(typing.get_args(hint))
    if origin is tuple:
        return "integers separated by commas, such as 64,64"
    return {bool: "true or false", int: "an integer", float: "a finite number", str: "text"}.get(hint, str(hint))


def convert(hint: Any, value: Any) -> Any:
    """Convert text or a TOML value to a field's type; ValueError, TypeError or OverflowError if it does not fit."""
    origin = typing.get_origin(hint)
    if origin is Literal:
        return value if isinstance(value, str) and value in typing.get_args(hint) else _bad(value)
    if origin is tuple:
        return tuple(convert(int, part) for part in _parts(value))
    if hint is bool:
        if isinstance(value, str):
            return {"true": True, "false": False}[value.lower()] if value.lower() in ("true", "false") else _bad(value)
        return value if isinstance(value, bool) else _bad(value)
    if isinstance(value, bool):
        return _bad(value)
    if hint is int:
        if isinstance(value, float):
            return int(value) if value.is_integer() else _bad(value)
        return int(value) if isinstance(value, str) else operator.index(value)
    if hint is str:
        return str(value)
    number = float(value)
    return number if math.isfinite(number) else _bad(value)


def _parts(value: Any) -> Sequence[Any]:
    """Split what may stand for a tuple: `64,64`, one number or a sequence. One comma may trail."""
    if isinstance(value, str):
        parts = value.strip().split(",")
        return parts if parts[-1] else parts[:-1]
    if isinstance(value, list | tuple):
        return value
    return [value]


def _bad(value: Any) -> Any:
    raise ValueError(value)


RENAMED: dict[tuple[str, str], tuple[str, dict[str, str]]] = {
    ("run", "between"): ("stale_aggregates", {"local": "discard", "last": "reuse"}),
}
"""Settings of earlier versions: the name that each has now, and its values."""


def with_new_names(table: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a table that an earlier version saved under the names and values that they have now."""
    found = dict(settings)
    for (owner, old), (new, values) in RENAMED.items():
        if owner == table and old in found:
            value = found.pop(old)
            found[new] = values.get(value, value)
    return found
