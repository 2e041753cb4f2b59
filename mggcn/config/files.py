"""Settings from files, texts and keywords, and back: TOML, `--set table.key=value`, and lr=0.01 for train.lr in Python."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import sys
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from mggcn.config import PARTS, Config, ModelConfig, from_tables, parse_tables, with_parts
from mggcn.config.model import ignored_settings
from mggcn.config.values import DEBUG, DROPPED, RENAMED, fields_of, setting, type_name, with_new_names
from mggcn.errors import ConfigError, did_you_mean
from mggcn.files import read_toml, reason

T = TypeVar("T")
Parts: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Settings by the part of the configuration that reads them."""


def from_toml(path: Path, base: Config | None = None, *, saved: bool = False) -> Config:
    """Read a TOML file over `base`. Raises: ConfigError if it is missing, not TOML or holds an unknown setting.

    saved: whether a run saved the file, perhaps with an earlier version, whose names are then translated.
    """
    tables = read_tables(path, "configuration")
    try:
        if saved:
            tables = as_saved(tables)
        return from_tables(tables, base)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def read_tables(path: Path, what: str) -> dict[str, Any]:
    """Read a TOML file. what: it holds. Raises: ConfigError if it is missing or not TOML."""
    try:
        return read_toml(path)
    except OSError as error:
        raise ConfigError(f"cannot read the {what} {path}: {reason(error)}; name a TOML file") from error
    except ValueError as error:  # of the TOML, of its encoding, or of the path
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def by_table(settings: Mapping[str, T]) -> dict[str, dict[str, T]]:
    """Return values by table.key as tables of them."""
    tables: dict[str, dict[str, T]] = {}
    for name, value in settings.items():
        table, _, key = name.partition(".")
        tables.setdefault(table, {})[key] = value
    return tables


def as_saved(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the tables that a run saved, perhaps with an earlier version, for this version.

    Names and tables are the new ones; what this version has no more, and what the kind of model ignores and an earlier
    version saved all the same, is left out.
    """
    now = {name: with_new_names(name, table) if isinstance(table, dict) else table for name, table in tables.items()}
    if isinstance(model := now.get("model"), dict):
        ignored = ignored_settings(str(model.get("kind", ModelConfig().kind)))
        now["model"] = {key: value for key, value in model.items() if key not in ignored}
    return _with_debug(now)


def _with_debug(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables with the settings of [debug] taken out of those of the parts that read them."""
    found = {name: dict(table) if isinstance(table, dict) else table for name, table in tables.items()}
    debug = {
        key: owner.pop(key)
        for key, part in DEBUG.items()
        if isinstance(owner := found.get(part), dict) and key in owner
    }
    if debug and isinstance(stated := found.get("debug", {}), dict):
        found["debug"] = debug | stated
    return found


def to_tables(config: Config) -> dict[str, dict[str, Any]]:
    """Return the settings as nested plain values, as they go into config.toml."""
    return _with_debug(
        {
            name: {key: list(value) if isinstance(value, tuple) else value for key, value in table.items()}
            for name, table in dataclasses.asdict(config).items()
        }
    )


def to_toml(config: Config) -> str:
    """Return the complete configuration as TOML."""
    import tomli_w

    return tomli_w.dumps(to_tables(config))


def with_settings(config: Config, settings: Sequence[str]) -> Config:
    """Apply `table.key=value` texts; of two for one setting the last wins, and ranges are checked once, at the end.

    Raises: ConfigError if one is malformed, unknown or out of range.
    """
    return from_tables(_set_tables(settings), config)


def layered(files: Mapping[Path, Parts], settings: Sequence[str], named: Mapping[str, Any]) -> Config:
    """Return the defaults with the settings of files, then of `table.key=value` texts, then of values by table.key.

    They are checked together, once: one may need what a later one gives. files: as `parts_of` reads them.
    Raises: ConfigError as `with_settings`; it names the file whose settings alone are refused.
    """
    later = parse_tables(_set_tables(settings)), parse_tables(by_table(named))
    try:
        return with_parts(Config(), *files.values(), *later)
    except ConfigError as error:
        for path, parts in files.items():
            _blame(path, parts, error)
        raise


def parts_of(tables: Mapping[str, Any], path: Path) -> Parts:
    """Return the settings that a file holds as `parse_tables`. Raises: ConfigError, which names the file."""
    try:
        return parse_tables(tables)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _blame(path: Path, parts: Parts, error: ConfigError) -> None:
    """Raise an error with the name of a file if its settings are refused without any others, too."""
    try:
        with_parts(Config(), parts)
    except ConfigError as alone:
        if str(alone) == str(error):
            raise ConfigError(f"{path}: {error}") from error


def _set_tables(settings: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return `table.key=value` texts as tables; of two for one setting the last wins. Raises: ConfigError."""
    tables: dict[str, dict[str, str]] = {}
    for text in settings:
        left, equals, value = text.partition("=")
        table, dot, key = left.strip().partition(".")
        if not (equals and dot):
            owner = next((name for name, kind in PARTS.items() if table in fields_of(kind)), "")
            meant = f"; did you mean {setting(owner, table)}={value}?" if owner else ""
            raise ConfigError(f"--set expects table.key=value such as model.hidden=16,16, got {text!r}{meant}")
        tables.setdefault(table, {})[key] = value.strip()
    return tables


def with_model(config: Config | None, model: ModelConfig | None, settings: Mapping[str, Any]) -> Config:
    """Return the configuration with this model and single settings by name, which are checked together.

    Raises: ConfigError if either has the wrong type, such as a name; else as `with_named`.
    """
    if not isinstance(config, Config | None):
        raise ConfigError(f"config must be a mggcn.Config, got {type(config).__name__}")
    if not isinstance(model, ModelConfig | None):
        raise ConfigError(
            "model must be mggcn.GCN(...), or SAGE, GIN, GAT, GATv2, SGC, APPNP, RGCN, MLP, or for Trainer a torch module "
            f"(docs/own-models.md), got {type(model).__name__}"
        )
    return with_parts(config or Config(), _named_parts(settings), model=model)


def with_named(config: Config, settings: Mapping[str, Any]) -> Config:
    """Override single settings of a configuration; each belongs to the one table that has it.

    Raises: ConfigError for an unknown setting (the known ones are listed) or a value that does not fit.
    """
    return with_parts(config, _named_parts(settings))


def _named_parts(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return parse_tables(by_table({setting_name(key): value for key, value in settings.items()}))


def setting_name(key: str) -> str:
    """Return a setting as table.key, "train.lr" for "lr". Raises: ConfigError if no table has it; known ones are listed."""
    if "." in key:
        table, _, name = key.partition(".")
        return setting(table, name)
    owners = [part for part, kind in PARTS.items() if key in fields_of(kind)]
    owners = owners or [table for table, old in (*RENAMED, *DROPPED) if old == key]
    if not owners:
        known = sorted(name for kind in PARTS.values() for name in fields_of(kind))
        raise ConfigError(f"unknown setting {key!r}{did_you_mean(key, known)}; known are {', '.join(known)}")
    return setting(owners[0], key)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A setting as `mggcn settings` describes it."""

    name: str
    """As table.key."""
    type: str
    """What it takes, in words, with its range."""
    values: tuple[str, ...]
    """Those that it may have, where they are listed."""
    default: Any
    meaning: str
    """Its docstring; "" where the installation holds no sources."""

    @property
    def line(self) -> str:
        """The first sentence of the meaning."""
        return re.split(r"(?<!\bal)(?<!\beq)\.\s", self.meaning, maxsplit=1)[0].rstrip(".")


def described() -> list[Setting]:
    """Return every setting, by table. Cost: two files are parsed."""
    found = []
    meanings = {part: _meanings(kind) for part, kind in PARTS.items()}
    for table, defaults in to_tables(Config()).items():
        for key, default in defaults.items():
            part = DEBUG[key] if table == "debug" else table
            hint, bounds = fields_of(PARTS[part])[key]
            values = typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
            each = "each " * (typing.get_origin(hint) is tuple)
            words = type_name(key, hint) + ("" if bounds is None else f", {each}{bounds}")
            found.append(
                Setting(
                    name=f"{table}.{key}",
                    type=words,
                    values=values,
                    default=default,
                    meaning=meanings[part].get(key, ""),
                )
            )
    return found


def _meanings(kind: type) -> dict[str, str]:
    """The docstrings of a class's fields. Python keeps none of them: they are read from the source, also in a zip file."""
    try:
        source = inspect.getsource(sys.modules[kind.__module__])
    except OSError:
        return {}
    classes = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    body = next((node.body for node in classes if node.name == kind.__name__), [])
    meanings = {}
    for item, after in itertools.pairwise(body):
        text = after.value if isinstance(after, ast.Expr) else None
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and isinstance(text, ast.Constant):
            meanings[item.target.id] = " ".join(str(text.value).split())
    return meanings
