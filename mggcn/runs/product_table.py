"""Measured variants of sparse products in a JSON file, a table for each host: beside a store and in a run folder.

On a CPU every variant gives the same bits: a table changes how long a product takes and nothing else. Imports no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any, get_args

from mggcn.backend.cpu.machine import Host
from mggcn.backend.spmm_choice import Choices, SpmmChoice, SpmmKey, SpmmVariant
from mggcn.errors import StoreError
from mggcn.files import new_file, read_json, reason

FORMAT_VERSION = 5
"""Raised when the file's form, a sparse kernel or the model of variants changes: what was measured before is ignored."""
STORE_FILE = "tuned.json"
"""Beside the arrays of a store."""
RUN_FILE = "products.json"
"""In a run folder: what the run was started with."""
REMEDY = "measure again with mggcn tune --store, or remove the file"


def read_choices(path: Path, host: Host) -> Choices:
    """Return the choices measured on this host; none if there is no file, or it has no table of this host.

    A file of another version is ignored (`outdated`). Raises: StoreError if the file cannot be understood.
    """
    return _choices(path, _tables(path), host)


def write_choices(path: Path, host: Host, choices: Choices) -> None:
    """Write choices to the file in one step; they replace older ones for the same products.

    Tables of other hosts stay. What is damaged or another version's is replaced. Of two who write at the same time, what
    one of them adds may be lost; a reader always sees a whole file. Raises: StoreError if the file cannot be written.
    """
    tables: list[dict[str, Any]] = []
    with contextlib.suppress(StoreError):
        tables = _tables(path)
        choices = {**_choices(path, tables, host), **choices}
    products = [
        {"product": dataclasses.asdict(key), "way": dataclasses.asdict(choices[key])}
        for key in sorted(choices, key=dataclasses.astuple)
    ]
    here = dataclasses.asdict(host)
    others = [table for table in tables if table["host"] != here]
    content = {"format_version": FORMAT_VERSION, "tables": [*others, {"host": here, "products": products}]}
    _write(path, json.dumps(content, indent=1) + "\n", keep=True)


def check_writable(path: Path) -> None:
    """Refuse a path that cannot be written to, before anything is measured. Raises: StoreError."""
    _write(path, "", keep=False)


def outdated(path: Path) -> str:
    """Return a text saying that another version wrote the file; "" if this one did, or it is damaged or missing."""
    try:
        version = _read(path).get("format_version", FORMAT_VERSION)
    except StoreError:
        return ""
    if version == FORMAT_VERSION:
        return ""
    return f"{path} holds measured products of format {version}, not {FORMAT_VERSION} as this version: they are ignored"


def _write(path: Path, text: str, *, keep: bool) -> None:
    """Write a file beside `path`, and let it take its place if it is to be kept."""
    try:
        with new_file(path, keep=keep) as file:
            file.write(text.encode())
    except OSError as error:
        raise StoreError(
            f"the measured products cannot be written to {path}: {error.strerror}; name a copy of the store, in a "
            "folder of your own"
        ) from error


def _read(path: Path) -> dict[str, Any]:
    """The content of a file of any version; empty if there is none."""
    try:
        content = read_json(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise StoreError(f"{path} cannot be read ({reason(error)}); {REMEDY}") from error
    if not isinstance(content, dict) or type(content.get("format_version")) is not int:
        raise StoreError(f"{path} holds no measured products; {REMEDY}")
    return content


def _tables(path: Path) -> list[dict[str, Any]]:
    """The tables of this version, one for each host."""
    content = _read(path)
    tables = content.get("tables") if content.get("format_version") == FORMAT_VERSION else []
    if not isinstance(tables, list) or any(not isinstance(t, dict) or t.keys() != {"host", "products"} for t in tables):
        raise StoreError(f"{path} holds no tables of a host and its products; {REMEDY}")
    return tables


def _choices(path: Path, tables: list[dict[str, Any]], host: Host) -> Choices:
    """The host's table among those of a file."""
    products = next((table["products"] for table in tables if table["host"] == dataclasses.asdict(host)), ())
    try:
        return {_key(row["product"]): _variant(row["way"]) for row in products}
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(f"{path}: a measured product is damaged ({error}); {REMEDY}") from error


def _key(plain: dict[str, Any]) -> SpmmKey:
    key = SpmmKey(**plain)
    _check_numbers(key, rows=0, columns=0, nnz=0, width=0, item=0)
    if not isinstance(key.summed, bool) or not isinstance(key.pattern, str):
        raise ValueError(f"summed must be true or false and pattern a text, got {key.summed!r} and {key.pattern!r}")
    return key


def _variant(plain: dict[str, Any]) -> SpmmChoice:
    variant = SpmmChoice(**plain)
    if variant.way not in get_args(SpmmVariant):
        raise ValueError(f"way must be one of {', '.join(get_args(SpmmVariant))}, got {variant.way!r}")
    # No blocks at all would compute nothing.
    _check_numbers(variant, panel=0, blocks=1, ahead=0)
    if (variant.panel > 0) != (variant.way == "panels") or (variant.blocks > 1) != (variant.way == "blocks"):
        raise ValueError(f"{variant.way} do not go with panels of {variant.panel} columns and {variant.blocks} blocks")
    return variant


def _check_numbers(record: object, **least: int) -> None:
    """Check the numbers of a file: kernels take 64 bits without a look at them."""
    for name, lowest in least.items():
        value = getattr(record, name)
        if type(value) is not int or not lowest <= value < 2**31:
            raise ValueError(f"{name} must be a whole number in {lowest} .. 2^31 - 1, got {value!r}")
