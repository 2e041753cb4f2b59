"""Text and TOML values as the types of settings (Literal, tuples of integers, bool, int, float, str), and their checks."""

from __future__ import annotations

import functools
import math
import operator
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from mggcn.errors import ConfigError, did_you_mean

SIZES = ("memory_limit",)
"""Settings that are a number of bytes, with a unit in text."""
ALL: Final = {"batch": 0, "fanout": -1}
"""Settings that take the word "all", and the number that stands for it."""
ELSE: Final = "else"
"""The word for all relations that are not named beside it, in numbers by relation."""


DEBUG: Final = {
    "splits": "data",
    "concat_heads": "model",
    "weight_decay_on": "train",
    "schedule_start": "train",
    **dict.fromkeys(("bind", "spmm", "stale_aggregates", "products", "features", "prune"), "run"),
}
"""Settings that tests, measurements and resumed runs set, and hardly a user: in files and on the command line they stand
in table [debug], in Python in the part of the configuration that reads them, which is named here."""


@dataclass(frozen=True, slots=True)
class Range:
    """Bounds of a setting's number, or of each in its list, as an annotation: Annotated[float, Range(0, below=1)]."""

    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    below: float = math.inf

    def __contains__(self, value: float) -> bool:
        return self.least <= value <= self.most and self.above < value < self.below

    def __str__(self) -> str:
        if self.most == self.below == math.inf:
            return "positive" if self.above == 0 else f"{self.least} or more"
        if self.above == -math.inf and self.below == math.inf:
            return f"in {self.least} .. {self.most}"
        low = f"({self.above}" if self.above > -math.inf else f"[{self.least}"
        return f"in {low}, {self.below})" if self.below < math.inf else f"in {low}, {self.most}]"


def require(condition: bool, message: str) -> None:
    """Raise ConfigError with a message unless a condition holds."""
    if not condition:
        raise ConfigError(message)


def setting(table: str, key: str) -> str:
    """Return the name of a setting in files and on the command line."""
    return f"debug.{key}" if DEBUG.get(key) == table else f"{table}.{key}"


def settle(table: Any, name: str) -> None:
    """Bring every field of a table to its declared type, also when Python rather than TOML filled it; check its range.

    Raises: ConfigError as `parse_field`, or for a number out of range.
    """
    kind: Any = type(table)
    for key, (_, bounds) in fields_of(kind).items():
        value = parse_field(kind, name, key, getattr(table, key))
        object.__setattr__(table, key, value)
        several = isinstance(value, tuple)
        # Text in a list is numbers by relation, whose own reader has checked them.
        numbers = [number for number in (value if several else (value,)) if not isinstance(number, str)]
        if bounds is not None and not all(number in bounds for number in numbers):
            of, must = "each number of " * several, "lie" if str(bounds).startswith("in ") else "be"
            raise ConfigError(f"{of}{setting(name, key)} must {must} {bounds}, got {value}")


@functools.cache
def fields_of(kind: type) -> Mapping[str, tuple[Any, Range | None]]:
    """Return types and bounds of the fields of a class; cached, since finding them takes milliseconds."""
    found = {}
    for key, hint in typing.get_type_hints(kind, include_extras=True).items():
        bounded = typing.get_origin(hint) is Annotated
        found[key] = typing.get_args(hint)[:2] if bounded else (hint, None)
    return found


def parse_field(kind: type, table: str, key: str, value: Any) -> Any:
    """Convert text or a TOML value to the type of the field `key` of a table's class.

    Raises: ConfigError if there is no such field, or the value does not fit its type.
    """
    fields = fields_of(kind)
    if key not in fields:
        meant = did_you_mean(key, fields, f"{table}.")
        raise ConfigError(f"unknown setting {table}.{key}{meant}; known in [{table}] are {', '.join(fields)}")
    hint, size = fields[key][0], key in SIZES
    if key in ALL:
        value = _with_all(value, ALL[key])
    try:
        return parse_bytes(value) if size and isinstance(value, str) else convert(hint, value)
    except (TypeError, ValueError, OverflowError) as error:
        known = typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
        meant = f", which {error}" if isinstance(error, _RepeatedError) else did_you_mean(str(value), known)
        raise ConfigError(f"{setting(table, key)} expects {type_name(key, hint)}, got {value!r}{meant}") from error


def _with_all(value: Any, number: int) -> Any:
    """Replace the word "all", alone or in a list, by the number that stands for it."""
    if isinstance(value, str):
        return ",".join(str(number) if part.strip() == "all" else part for part in value.split(","))
    return [number if part == "all" else part for part in value] if isinstance(value, list | tuple) else value


def parse_bytes(text: str) -> int:
    """Return a number of bytes from text such as 512MiB, 80GiB, 32GB or 1000000. Raises: ValueError for other text."""
    units = {"": 1, "b": 1}
    for power, letter in enumerate("kmgt", start=1):
        units |= {letter: 1024**power, f"{letter}ib": 1024**power, f"{letter}b": 1000**power}
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)", text.strip().replace("_", "").lower())
    if found is None or found[2] not in units:
        raise ValueError(f"expected bytes such as 512MiB, 80GiB or 32GB, got {text!r}")
    return int(float(found[1]) * units[found[2]])


def parse_count(text: str) -> int:
    """Return a whole number from text such as 1000, 1_000, 1.6e9, 111M or 1.5k. Raises: ValueError for other text."""
    powers = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}
    found = re.fullmatch(
        r"([+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?)\s*([kmgb]?)", text.strip().replace("_", "").lower()
    )
    if found is None:
        raise ValueError(f"expected a whole number such as 1000, 1.6e9 or 111M, got {text!r}")
    if found[1].lstrip("+-").isdigit():
        return int(found[1]) * powers[found[2]]
    number = float(found[1]) * powers[found[2]]
    if not number.is_integer():
        raise ValueError(f"expected a whole number, got {text!r}")
    return int(number)


def type_name(key: str, hint: Any) -> str:
    """Describe in words the values that a setting takes."""
    if key in SIZES:
        return "bytes such as 512MiB or 80GiB"
    origin = typing.get_origin(hint)
    if origin is Literal:
        return "one of " + ", ".join(typing.get_args(hint))
    if origin is tuple:
        shown = "15,10,all, or by relation, such as 0:15/3:all/else:5,10" if key in ALL else "64,64"
        return f"integers separated by commas, such as {shown}"
    if key in ALL:
        return "an integer, or all"
    return {bool: "true or false", int: "an integer", float: "a finite number", str: "text"}.get(hint, str(hint))


def convert(hint: Any, value: Any) -> Any:
    """Convert text or a TOML value to a field's type; ValueError, TypeError or OverflowError if it does not fit."""
    origin = typing.get_origin(hint)
    if origin is Literal:
        return value if isinstance(value, str) and value in typing.get_args(hint) else _bad(value)
    if origin is tuple:
        return tuple(convert(typing.get_args(hint)[0], part) for part in _parts(value))
    if hint == int | str:  # a number, or numbers by relation as text
        named = isinstance(value, Mapping) or (isinstance(value, str) and ":" in value)
        return _relations_text(value) if named else convert(int, value)
    if hint is bool:
        if isinstance(value, str):
            return {"true": True, "false": False}[value.lower()] if value.lower() in ("true", "false") else _bad(value)
        return value if isinstance(value, bool) else _bad(value)
    if isinstance(value, bool):
        return _bad(value)
    if hint is int:
        whole = int(value) if isinstance(value, float) and value.is_integer() else value
        whole = parse_count(whole) if isinstance(whole, str) else operator.index(whole)
        return whole if abs(whole) < 1 << 63 else _bad(value)
    if hint is str:
        return str(value)
    number = float(value)
    return number if math.isfinite(number) else _bad(value)


def _parts(value: Any) -> Sequence[Any]:
    """Split a value that may stand for a tuple: `64,64`, one number or a sequence. One trailing comma is allowed."""
    if isinstance(value, str):
        parts = value.strip().split(",")
        return parts if parts[-1] else parts[:-1]
    if isinstance(value, list | tuple):
        return value
    return [value]


class _RepeatedError(ValueError):
    """Numbers by relation that name one twice; the text says which."""


def numbers_by_relation(value: str | Mapping[Any, Any]) -> dict[int | None, int]:
    """Return numbers by relation, ascending, None: of all others, from text such as 0:15/3:all/else:5, or a mapping.

    Raises: ValueError, TypeError or OverflowError for what is no relation or no number, or a relation that is there twice.
    """
    pairs = value.items() if isinstance(value, Mapping) else [part.partition(":")[::2] for part in value.split("/")]
    found = dict[int | None, int]()
    for name, number in pairs:
        relation = None if str(name).strip() == ELSE else convert(int, name)
        count = ALL["fanout"] if str(number).strip() == "all" else convert(int, number)
        if relation in found:
            raise _RepeatedError(f"names {ELSE if relation is None else f'relation {relation}'} twice")
        if (relation or 0) < 0 or count < ALL["fanout"]:
            _bad(value)
        found[relation] = count
    if not found:
        _bad(value)
    return dict(sorted(found.items(), key=lambda pair: math.inf if pair[0] is None else pair[0]))


def _relations_text(value: str | Mapping[Any, Any]) -> str:
    """Return numbers by relation in the form in which settings keep them: relations ascending, the word else last."""
    numbers = numbers_by_relation(value).items()
    words = {ALL["fanout"]: "all"}
    return "/".join(f"{ELSE if name is None else name}:{words.get(number, number)}" for name, number in numbers)


def _bad(value: Any) -> Any:
    raise ValueError(value)


RENAMED: dict[tuple[str, str], tuple[str, dict[str, str]]] = {
    ("run", "between"): ("stale_aggregates", {"local": "discard", "last": "reuse"}),
}
"""Settings of earlier versions: the name that each has now, and its values."""
DROPPED: dict[tuple[str, str], str] = dict.fromkeys(
    (("run", "tune"), ("debug", "tune")),
    "a run takes the variants of its sparse products by the machine's figures, or as mggcn tune --store has measured them; "
    "remove it",
)
"""Settings of earlier versions that this one has not, and what takes their place. Saved ones are left out."""


def with_new_names(table: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the settings of a table that an earlier version saved to their present names and values."""
    found = {key: value for key, value in settings.items() if (table, key) not in DROPPED}
    for (owner, old), (new, values) in RENAMED.items():
        if owner == table and old in found:
            value = found.pop(old)
            found[new] = values.get(value, value)
    return found
