"""Settings as the Python API takes them: a model, and single ones by their name alone (lr=0.01 stands for train.lr)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mggcn.config import Config, ModelConfig, from_tables
from mggcn.errors import ConfigError


def with_model(config: Config | None, model: ModelConfig | None) -> Config:
    """Return the configuration with the model in it. Raises: ConfigError if one is something else, such as a name."""
    if not isinstance(config, Config | None):
        raise ConfigError(f"config must be a mggcn.Config, got {type(config).__name__}")
    if not isinstance(model, ModelConfig | None):
        raise ConfigError(f"model must be mggcn.GCN(...), SAGE(...) or MLP(...), got {type(model).__name__}")
    base = config or Config()
    return base if model is None else dataclasses.replace(base, model=model)


def with_named(config: Config, settings: Mapping[str, Any]) -> Config:
    """Lay single settings over a configuration; each belongs to the one table that has it.

    Raises: ConfigError for an unknown setting (the known ones are listed) or a value that does not fit.
    """
    tables: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        owners = [
            f.name
            for f in dataclasses.fields(Config)
            if key in {g.name for g in dataclasses.fields(getattr(config, f.name))}
        ]
        if not owners:
            known = sorted(
                {g.name for f in dataclasses.fields(Config) for g in dataclasses.fields(getattr(config, f.name))}
            )
            raise ConfigError(f"unknown setting {key!r}; known are {', '.join(known)}")
        tables.setdefault(owners[0], {})[key] = value
    return from_tables(tables, config)
