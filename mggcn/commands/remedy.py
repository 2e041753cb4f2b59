"""Suggests corrections for a command line that argparse refuses: a setting, a flag, a command or a value."""

from __future__ import annotations

import re
from collections.abc import Iterable

from mggcn.config import Config
from mggcn.config_files import to_tables
from mggcn.errors import did_you_mean


def remedy(message: str, flags: Iterable[str]) -> str:
    """Return what to write instead, as the end of a sentence; "" if nothing similar is known.

    message: argparse's. flags: of all commands.
    """
    kind, _, rest = message.partition(": ")
    if kind == "unrecognized arguments":
        return _of_flag(rest.split(), flags)
    if choice := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message):
        return did_you_mean(choice[1], re.findall(r"[\w.-]+", choice[2]))
    return ""


def _of_flag(words: list[str], flags: Iterable[str]) -> str:
    """A flag that is a setting is set with --set; others may be misspelt."""
    flag, _, value = next((word for word in words if word.startswith("--")), "").partition("=")
    if not flag:
        return ""
    value = value or next((word for word in words if not word.startswith("-")), "VALUE")
    settings = {key: f"--set {table}.{key}={value}" for table, keys in to_tables(Config()).items() for key in keys}
    name = flag.lstrip("-").replace("-", "_")
    if name in settings:
        return f"; use {settings[name]}"
    known = {f"--{key}".replace("_", "-"): text for key, text in settings.items()} | {one: one for one in flags}
    found = re.search(r"mean (\S+)\?", did_you_mean(flag, known))
    return f"; did you mean {known[found[1]]}?" if found else ""
