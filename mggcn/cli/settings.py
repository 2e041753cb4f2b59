"""List the settings, or describe one of them, or a table: type, default and meaning.

Every setting is given to other commands as --set TABLE.KEY=VALUE, or by table in the TOML file of --config. Those of
[debug], which tests and measurements set, are listed by `mggcn settings debug` alone.
"""

# The flags that set a configuration are here, too: --config FILE, --set table.key=value, and those of single settings.

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mggcn.cli.answer import add_json
from mggcn.config import PARTS, TABLES, Config, parse_value
from mggcn.config.files import Parts, Setting, described, layered, parts_of, read_tables, setting_name, to_tables
from mggcn.config.values import DEBUG, fields_of, parse_bytes, parse_count

# Flag -> (table, key, help).
FLAGS = {
    "--ranks": ("run", "ranks", "number of ranks P that share the graph"),
    "--threads": ("run", "threads", "threads per rank; 0: an equal share of the cores"),
    "--transport": (
        "run",
        "transport",
        "auto, single, threads, gloo or nccl; auto: from 2 ranks on gloo, on GPUs nccl",
    ),
    "--device": ("run", "device", "cpu or cuda"),
    "--precision": (
        "run",
        "precision",
        "fp32, fp64, bf16 or mixed; on a GPU also tf32. On GPUs of capability 9.0 with Triton, layers of fp32 and mixed "
        "are products on tensor cores, each as three of TF32 (tf32x3); elsewhere, and for gradients of weights, they are "
        "cuBLAS's without tensor cores",
    ),
    "--order": (
        "run",
        "order",
        "which rank owns which vertex: random, permute, none, ranges, metis, metis-balanced, stream, locality or auto",
    ),
    "--strategy": ("run", "strategy", "how neighbours' rows arrive: broadcast, halo, slice, delayed or auto"),
    "--delay": (
        "run",
        "delay",
        "epochs that a message of the delayed strategy takes: none (it is never sent), 0 (exact) or more",
    ),
    "--memory-limit": ("run", "memory_limit", "bytes per rank, such as 80GiB; 0: what is free"),
    "--log": ("run", "log", "where the history goes beside history.jsonl: none or tensorboard"),
    "--features": (
        "data",
        "inputs",
        "what is read of each vertex: stored, or learned:D, a row of D numbers trained with the weights",
    ),
    "--epochs": ("train", "epochs", "number of epochs"),
    "--batch": ("sample", "batch", "training vertices of a step; all: the whole graph"),
    "--fanout": (
        "sample",
        "fanout",
        "in-neighbours drawn in each layer, that next to the output first, such as 15,10,5",
    ),
    "--compare-gradient": (
        "sample",
        "compare_gradient",
        "epochs after which a step's gradient is compared with the whole graph's; 0: never",
    ),
    "--seed": ("train", "seed", "seed of weights, dropout and partition"),
    "--repeat": ("train", "repeat", "number of runs with seeds SEED, SEED + 1, ..."),
    "--split": ("data", "split", "which split of the store, from 0"),
    "--spmm": ("debug", "spmm", ""),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `mggcn settings`."""
    parser.add_argument(
        "key", nargs="?", metavar="KEY", help="a setting, such as train.lr or lr, or a table, such as train"
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print one line about each setting, or everything about one."""
    key, settings = arguments.key, described()
    if key is not None and key not in TABLES:
        name = setting_name(key)
        table, _, field = name.partition(".")
        settings = [setting for setting in settings if setting.name == name]
        if not settings:
            parse_value(table, field, None)  # which says what is known
    else:
        shown = [table for table in TABLES if table == (key or table) and (key or table != "debug")]
        settings = [setting for setting in settings if setting.name.partition(".")[0] in shown]
    arguments.answer = {"settings": settings}
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    for setting in settings:
        print("\n".join(_described(setting, width, whole=len(settings) == 1)))
    if not settings[0].meaning:
        print("this installation lacks the source files that describe settings; see docs/settings.md")
    return 0


def _described(setting: Setting, width: int, *, whole: bool) -> list[str]:
    """A setting in lines: name, default and type, and below them its meaning."""
    head = f"{setting.name}={_text(setting.default)}  ({setting.type})"
    meaning = setting.meaning if whole else setting.line
    return [
        *textwrap.wrap(head, width, subsequent_indent="    ", break_on_hyphens=False),
        *textwrap.wrap(meaning, width, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False),
    ]


def add_settings(parser: argparse.ArgumentParser, without: str = "") -> None:
    """Add the flags of a configuration. without: a flag that the command has with a meaning of its own."""
    defaults = to_tables(Config())
    group = parser.add_argument_group("settings", "the flags below override --set, which overrides --config")
    group.add_argument("--config", type=Path, metavar="FILE", help="TOML file of settings")
    group.add_argument(
        "--set", action="append", default=[], metavar="TABLE.KEY=VALUE", help="any setting, such as model.hidden=16,16"
    )
    for flag, (table, key, text) in FLAGS.items():
        if flag == without:
            parser.set_defaults(**{f"setting_{key}": None})
            continue
        metavar = flag.lstrip("-").rpartition("-")[2].upper()
        text += f" ({_range(table, key, '{}, ')}default: {defaults[table][key]})"
        shown = text if table != "debug" else argparse.SUPPRESS
        group.add_argument(flag, dest=f"setting_{key}", metavar=metavar, help=shown)
    group.add_argument(
        "--timeline",
        dest="setting_timeline",
        action="store_true",
        default=None,
        help="record when every op of a few epochs ran",
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _all_settings(defaults)


def _all_settings(defaults: dict[str, dict[str, Any]]) -> str:
    """Return every setting but those of [debug] with default and range, as --set takes it, wrapped by table."""
    lines = ["every setting, for --set and, by table, for --config, with its default (and range):"]
    for table in PARTS:
        items = " ".join(
            f"{table}.{key}={_text(value)}{_range(table, key, ' ({})')}".replace(" ", "\xa0")
            for key, value in defaults[table].items()
        )
        lines += textwrap.wrap(items, 100, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(lines).replace("\xa0", " ")


def _range(table: str, key: str, form: str) -> str:
    """Return the range of a setting in a form such as "({})"; "" without one."""
    _, bounds = fields_of(PARTS[DEBUG[key] if table == "debug" else table])[key]
    return "" if bounds is None else form.format(bounds)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def whole(text: str) -> int:
    """Return a whole number written as 1000, 1_000, 1e9 or 111M."""
    return parse_count(text)


whole.__name__ = "whole number"  # argparse names the type in its message

LEAST_MEMORY = 256 << 20
"""Least of --memory: windows of edges and their temporaries take half of it."""


def memory(text: str) -> int:
    """Return the bytes that --memory grants for sorting edges."""
    nbytes = parse_bytes(text)
    if nbytes < LEAST_MEMORY:
        raise argparse.ArgumentTypeError(f"expected at least 256MiB, got {text!r}")
    return nbytes


memory.__name__ = "size"


def _flagged() -> list[tuple[str, str]]:
    """The settings that have a flag, as table and key."""
    return [*((table, key) for table, key, _ in FLAGS.values()), ("run", "timeline")]


def read_settings(
    arguments: argparse.Namespace, below: Mapping[Path, Parts] | None = None, above: Mapping[str, Any] | None = None
) -> Config:
    """Return the configuration that the flags describe. below: settings of files that all of them override; above: by
    table.key, which override them. Raises: ConfigError.
    """
    files = dict(below or {})
    if arguments.config is not None:
        files[arguments.config] = parts_of(read_tables(arguments.config, "configuration"), arguments.config)
    flags = {f"{table}.{key}": getattr(arguments, f"setting_{key}") for table, key in _flagged()}
    named = {name: value for name, value in flags.items() if value is not None}
    return layered(files, arguments.set, {**named, **(above or {})})


def given_settings(arguments: argparse.Namespace) -> set[str]:
    """Return the settings that --set and flags name, as table.key."""
    named = {f"{table}.{key}" for table, key in _flagged() if getattr(arguments, f"setting_{key}") is not None}
    return named | {setting_name(text.partition("=")[0].strip()) for text in arguments.set}
