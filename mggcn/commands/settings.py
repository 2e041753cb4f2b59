"""The flags that set a configuration: --config FILE, --set table.key=value, and one flag per setting that scripts use."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mggcn.config import Config, from_tables, from_toml, with_settings
from mggcn.errors import ConfigError
from mggcn.plan.machine import parse_bytes

# Flag -> (table, key, help).
FLAGS = {
    "--ranks": ("run", "ranks", "number of ranks P that share the graph"),
    "--threads": ("run", "threads", "threads per rank; 0: an equal share of the cores"),
    "--transport": ("run", "transport", "auto, single, threads, gloo or nccl"),
    "--device": ("run", "device", "cpu or cuda"),
    "--precision": ("run", "precision", "fp32 or fp64"),
    "--order": ("run", "order", "which rank owns which vertex: random, permute or none"),
    "--strategy": ("run", "strategy", "broadcast"),
    "--memory-limit": ("run", "memory_limit", "bytes per rank, such as 80GiB; default: what is free"),
    "--epochs": ("train", "epochs", "number of epochs"),
    "--seed": ("train", "seed", "seed of weights, dropout and partition"),
    "--repeat": ("train", "repeat", "number of runs with seeds SEED, SEED + 1, ..."),
    "--split": ("data", "split", "which split of the store, from 0"),
}


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a configuration."""
    group = parser.add_argument_group("settings", "later ones win: --config, then --set, then the flags below")
    group.add_argument("--config", type=Path, metavar="FILE", help="TOML file of settings")
    group.add_argument(
        "--set", action="append", default=[], metavar="TABLE.KEY=VALUE", help="any setting, such as model.hidden=16,16"
    )
    for flag, (_, key, text) in FLAGS.items():
        group.add_argument(flag, dest=f"setting_{key}", metavar=key.upper(), help=text)


def read_settings(arguments: argparse.Namespace) -> Config:
    """Return the configuration that the flags describe. Raises: ConfigError."""
    config = Config() if arguments.config is None else from_toml(arguments.config)
    config = with_settings(config, arguments.set)
    tables: dict[str, dict[str, Any]] = {}
    for flag, (table, key, _) in FLAGS.items():
        value = getattr(arguments, f"setting_{key}")
        if value is not None:
            tables.setdefault(table, {})[key] = _bytes(flag, value) if key == "memory_limit" else value
    return from_tables(tables, config)


def _bytes(flag: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from error
