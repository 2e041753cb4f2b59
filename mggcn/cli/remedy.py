"""Suggests corrections for a command line that argparse refuses: a setting, a flag, a command or a value."""

from __future__ import annotations

import re
from collections.abc import Collection

from mggcn.config import Config
from mggcn.config.files import to_tables
from mggcn.config.values import DROPPED
from mggcn.errors import did_you_mean

WISHES = {
    "gpu": "--device cuda",
    "cuda": "--device cuda",
    "cpu": "--device cpu",
    "gpus": "--device cuda --ranks {value}",
    "ranks": "--parts {value}",
    "num_parts": "--parts {value}",
    "nparts": "--parts {value}",
    "world_size": "--ranks {value}",
    "num_epochs": "--epochs {value}",
    "n_epochs": "--epochs {value}",
    "learning_rate": "--set train.lr={value}",
    "wd": "--set train.weight_decay={value}",
    "hidden_channels": "--set model.hidden={value}",
    "hidden_dim": "--set model.hidden={value}",
    "num_hidden": "--set model.hidden={value}",
    "n_hidden": "--set model.hidden={value}",
    "num_layers": "--set model.hidden=WIDTH,WIDTH, a width for each hidden layer",
    "n_layers": "--set model.hidden=WIDTH,WIDTH, a width for each hidden layer",
    "num_heads": "--set model.heads={value}",
    "model": "--set model.kind={value}",
    "runs": "--repeat {value}",
    "num_workers": "--threads {value}",
    "output": "--out {value}",
    "amp": "--precision bf16",
    "fp16": "--precision bf16",
    "tensorboard": "--log tensorboard",
    "nodes": "--vertices {value}",
    "overwrite": "--force",
}
"""Flags of other programs for graphs, and what a command here that has the flag takes instead."""


def remedy(message: str, flags: Collection[str]) -> str:
    """Return a suggestion for an unknown argument, as the end of a sentence; "" if the command has nothing similar.

    message: argparse's. flags: of the command at hand.
    """
    kind, _, rest = message.partition(": ")
    if kind == "unrecognized arguments":
        return _of_flag(rest.split(), flags)
    if choice := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message):
        return did_you_mean(choice[1], re.findall(r"[\w.-]+", choice[2]))
    return ""


def _of_flag(words: list[str], flags: Collection[str]) -> str:
    """A flag that is a setting is set with --set; others may be misspelt, or another program's."""
    flag, _, value = next((word for word in words if word.startswith("--")), "").partition("=")
    if not flag:
        return ""
    value = value or next((word for word in words if not word.startswith("-")), "VALUE")
    name = flag.lstrip("-").replace("-", "_").lower()
    tables = to_tables(Config()) if "--set" in flags else {}
    settings = {key: f"--set {table}.{key}={value}" for table, keys in tables.items() for key in keys}
    if name in settings:
        return f"; use {settings[name]}"
    if tables and ("run", name) in DROPPED:
        return f"; {DROPPED['run', name]}"
    if (wish := WISHES.get(name, "")).partition(" ")[0] in flags:
        return f"; use {wish.format(value=value)}"
    known = {f"--{key}".replace("_", "-"): text for key, text in settings.items()} | {
        one: one for one in flags if one.startswith("--")
    }
    found = re.search(r"mean (\S+)\?", did_you_mean(flag, known))
    return f"; did you mean {known[found[1]]}?" if found else ""
