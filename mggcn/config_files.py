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
from typing import Any, Literal

from mggcn.config import TABLES, Config, ModelConfig, from_tables
from mggcn.config_model import ignored_settings
from mggcn.config_values import RENAMED, SIZES, type_name, with_new_names
from mggcn.errors import ConfigError, did_you_mean
from mggcn.files import read_toml, reason


def from_toml(path: Path, base: Config | None = None, *, saved: bool = False) -> Config:
    """Read a TOML file over `base`. Raises: ConfigError if it is missing, not TOML or holds an unknown setting.

    saved: whether a run saved the file, perhaps with an earlier version, whose names are then translated.
    """
    try:
        tables = read_toml(path)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {reason(error)}; name a TOML file") from error
    except ValueError as error:  # of the TOML, of its encoding, or of the path
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    try:
        if saved:
            tables = as_saved(tables)
        return from_tables(tables, base)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def as_saved(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables that a run saved, perhaps with an earlier version, as this one takes them.

    Names are the new ones; what the kind of model ignores, and an earlier version saved all the same, is left out.
    """
    now = {name: with_new_names(name, table) if isinstance(table, dict) else table for name, table in tables.items()}
    if isinstance(model := now.get("model"), dict):
        ignored = ignored_settings(str(model.get("kind", ModelConfig().kind)))
        now["model"] = {key: value for key, value in model.items() if key not in ignored}
    return now


def to_tables(config: Config) -> dict[str, dict[str, Any]]:
    """Return the settings as nested plain values, as they go into config.toml."""
    return {
        name: {key: list(value) if isinstance(value, tuple) else value for key, value in table.items()}
        for name, table in dataclasses.asdict(config).items()
    }


def to_toml(config: Config) -> str:
    """Return the complete configuration as TOML."""
    import tomli_w

    return tomli_w.dumps(to_tables(config))


def with_settings(config: Config, settings: Sequence[str]) -> Config:
    """Apply `table.key=value` texts; of two for one setting the last wins, and ranges are checked once, at the end.

    Raises: ConfigError if one is malformed, unknown or out of range.
    """
    tables: dict[str, dict[str, str]] = {}
    for text in settings:
        left, equals, value = text.partition("=")
        table, dot, key = left.strip().partition(".")
        if not (equals and dot):
            owner = next(
                (name for name, kind in TABLES.items() if table in {f.name for f in dataclasses.fields(kind)}), ""
            )
            meant = f"; did you mean {owner}.{table}={value}?" if owner else ""
            raise ConfigError(f"--set expects table.key=value such as model.hidden=16,16, got {text!r}{meant}")
        tables.setdefault(table, {})[key] = value.strip()
    return from_tables(tables, config)


def with_model(config: Config | None, model: ModelConfig | None) -> Config:
    """Return the configuration with the model in it. Raises: ConfigError if either has another type, such as a name."""
    if not isinstance(config, Config | None):
        raise ConfigError(f"config must be a mggcn.Config, got {type(config).__name__}")
    if not isinstance(model, ModelConfig | None):
        raise ConfigError(
            "model must be mggcn.GCN(...), or SAGE, GIN, GAT, GATv2, SGC, APPNP, RGCN, MLP, or for Trainer a torch module "
            f"(docs/own-models.md), got {type(model).__name__}"
        )
    base = config or Config()
    return base if model is None else dataclasses.replace(base, model=model)


def with_named(config: Config, settings: Mapping[str, Any]) -> Config:
    """Lay single settings over a configuration; each belongs to the one table that has it.

    Raises: ConfigError for an unknown setting (the known ones are listed) or a value that does not fit.
    """
    tables: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        table, _, name = setting_name(key).partition(".")
        tables.setdefault(table, {})[name] = value
    return from_tables(tables, config)


def setting_name(key: str) -> str:
    """Return a setting as table.key, "train.lr" for "lr". Raises: ConfigError if no table has it; known ones are listed."""
    if "." in key:
        return key
    fields = {
        f.name: {g.name for g in dataclasses.fields(getattr(Config(), f.name))} for f in dataclasses.fields(Config)
    }
    owners = [table for table, names in fields.items() if key in names]
    owners = owners or [table for table, old in RENAMED if old == key]
    if not owners:
        known = sorted(set().union(*fields.values()))
        raise ConfigError(f"unknown setting {key!r}{did_you_mean(key, known)}; known are {', '.join(known)}")
    return f"{owners[0]}.{key}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A setting as `mggcn settings` describes it."""

    name: str
    """As table.key."""
    type: str
    """What it takes, in words."""
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
    for table, kind in TABLES.items():
        meanings, hints = _meanings(kind), typing.get_type_hints(kind)
        for key, default in to_tables(Config())[table].items():
            values = typing.get_args(hints[key]) if typing.get_origin(hints[key]) is Literal else ()
            words = "bytes such as 512MiB or 80GiB" if key in SIZES else type_name(hints[key])
            found.append(
                Setting(
                    name=f"{table}.{key}", type=words, values=values, default=default, meaning=meanings.get(key, "")
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
