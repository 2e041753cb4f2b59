"""Measured ways of sparse products in a JSON file: a table for each host, beside a store and in a run folder.

Every way gives the same bits, so a table changes how long a product takes and nothing else. Needs no torch.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import secrets
from pathlib import Path
from typing import Any, get_args

from mggcn.backend.cpu.machine import Host
from mggcn.backend.cpu.variants import NO_CHOICES, Choices, SpmmChoice, SpmmKey, Way
from mggcn.errors import StoreError

FORMAT_VERSION = 4
"""Raised when the file's form, a sparse kernel or the model of ways changes: what was measured before is left aside."""
STORE_FILE = "tuned.json"
"""Beside the arrays of a store."""
RUN_FILE = "products.json"
"""In a run folder: what the run was started with, and what it found out."""
REMEDY = "measure again with mggcn tune --store, or remove the file"


def read_choices(path: Path, host: Host) -> Choices:
    """Return what was measured on this host; nothing if there is no file, or none of its tables is this host's.

    A file of another version is as good as none (`outdated`). Raises: StoreError if the file cannot be understood.
    """
    return _choices(path, _tables(path), host)


def write_choices(path: Path, host: Host, choices: Choices) -> None:
    """Put choices into the file, in one step, in the place of older ones for the same products.

    Tables of other hosts stay. What is damaged or another version's is replaced. Of two who write at the same time, what
    one of them adds may be lost; a reader always sees a whole file. Raises: StoreError if the file cannot be written.
    """
    try:
        tables = _tables(path)
    except StoreError:
        tables = []
    try:
        known = {**_choices(path, tables, host), **choices}
    except StoreError:
        known = dict(choices)
    products = [
        {"product": dataclasses.asdict(key), "way": dataclasses.asdict(way)}
        for key, way in sorted(known.items(), key=lambda item: dataclasses.astuple(item[0]))
    ]
    others = [table for table in tables if table["host"] != _plain(host)]
    content = {"format_version": FORMAT_VERSION, "tables": [*others, {"host": _plain(host), "products": products}]}
    _write(path, json.dumps(content, indent=1) + "\n", keep=True)


def check_writable(path: Path) -> None:
    """Refuse a place for the file before anything is measured. Raises: StoreError."""
    _write(path, "", keep=False)


def outdated(path: Path) -> str:
    """Return that the file is another version's, in words; "" if it is this one's, damaged, or not there."""
    try:
        version = _read(path).get("format_version", FORMAT_VERSION)
    except StoreError:
        return ""
    if version == FORMAT_VERSION:
        return ""
    return (
        f"{path} holds measured products of format {version}, not {FORMAT_VERSION} as this version: they are left aside"
    )


def damage_of(path: Path, host: Host) -> str:
    """Return what is wrong with a file, "" if nothing is or none is there: what `write_choices` would replace."""
    try:
        read_choices(path, host)
    except StoreError as error:
        return str(error)
    return ""


def _write(path: Path, text: str, *, keep: bool) -> None:
    """Write a file beside `path`, of a name that no other writer has, and let it take its place if it is to be kept."""
    temporary = _temporary(path)
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        try:
            temporary.write_text(text, encoding="utf-8")
            if keep:
                temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(
            f"the measured products cannot be written to {path}: {error.strerror}; copy the store to a folder of your own"
        ) from error


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(8)}.tmp")


def _choices(path: Path, tables: list[dict[str, Any]], host: Host) -> Choices:
    """The host's table among those of a file."""
    table = next((t for t in tables if t["host"] == _plain(host)), None)
    if table is None:
        return NO_CHOICES
    try:
        return {_key(row["product"]): _way(row["way"]) for row in table["products"]}
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(f"{path}: a measured product is damaged ({error}); {REMEDY}") from error


def _key(plain: dict[str, Any]) -> SpmmKey:
    key = SpmmKey(**plain)
    for name in ("rows", "columns", "nnz", "width", "item"):
        _at_least(0, name, getattr(key, name))
    if not isinstance(key.summed, bool) or not isinstance(key.pattern, str):
        raise ValueError(f"summed must be true or false and pattern a text, got {key.summed!r} and {key.pattern!r}")
    return key


def _way(plain: dict[str, Any]) -> SpmmChoice:
    way = SpmmChoice(**plain)
    if way.way not in get_args(Way):
        raise ValueError(f"way must be one of {', '.join(get_args(Way))}, got {way.way!r}")
    # No blocks at all would compute nothing.
    for name, least in (("panel", 0), ("blocks", 1), ("ahead", 0)):
        _at_least(least, name, getattr(way, name))
    if (way.panel > 0) != (way.way == "panels") or (way.blocks > 1) != (way.way == "blocks"):
        raise ValueError(f"{way.way} do not go with panels of {way.panel} columns and {way.blocks} blocks")
    return way


def _at_least(least: int, name: str, value: Any) -> None:
    """Check a number of a file: kernels take 64 bits without a look at them."""
    if type(value) is not int or not least <= value < 2**31:
        raise ValueError(f"{name} must be a whole number in {least} .. 2^31 - 1, got {value!r}")


def _plain(host: Host) -> dict[str, Any]:
    return dataclasses.asdict(host)


def _read(path: Path) -> dict[str, Any]:
    """The content of a file of any version; empty if there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise StoreError(f"{path} cannot be read ({error}); {REMEDY}") from error
    if not isinstance(content, dict) or type(content.get("format_version")) is not int:
        raise StoreError(f"{path} holds no measured products; {REMEDY}")
    return content


def _tables(path: Path) -> list[dict[str, Any]]:
    """The tables of this version."""
    content = _read(path)
    if content.get("format_version") != FORMAT_VERSION:
        return []
    tables = content.get("tables")
    if not isinstance(tables, list):
        raise StoreError(f"{path} holds no measured products; {REMEDY}")
    if not all(isinstance(table, dict) and table.keys() == {"host", "products"} for table in tables):
        raise StoreError(f"{path}: a table lacks its host or its products; {REMEDY}")
    return tables
