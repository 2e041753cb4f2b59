"""Cached partitions: folders of `.npy` files and a meta.json, in a store (STORE/partitions/NAME) or the user's cache.

A folder appears complete or not at all, and is valid only for the graph that it was made from. cuts.py knows the files
of each kind.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mggcn.errors import StoreError
from mggcn.files import open_file, parse_json, read_bytes, reason
from mggcn.graph.csr import Graph, Rows
from mggcn.graph.digests import unsealed
from mggcn.graph.durable import move_folder, new_folder, sync_folder, write_array, write_meta
from mggcn.graph.file_rows import FileRows
from mggcn.graph.layout import graph_sha256
from mggcn.version import __version__

FORMAT_VERSION = 1
REMEDY = "make it again with mggcn partition --force"
Form = tuple[np.dtype[Any], tuple[int, ...]]
"""Type and shape of an array."""
S = TypeVar("S")


def save_cached(
    folder: Path, graph: Graph, settings: Mapping[str, Any], arrays: Mapping[str, Rows], stats: Mapping[str, Any]
) -> None:
    """Write a cut of a graph to a temporary folder, flush it to the disk, and move it into place of any older one.

    stats: further entries of meta.json.
    Raises: StoreError if the disk is full or not writable, or something other than a cut is in the way; nothing is left.
    """
    if folder.exists() and not (folder / "owner.npy").is_file():
        raise StoreError(f"{folder} is not the folder of a cut, so it is not replaced; choose another place")
    meta = {
        "format_version": FORMAT_VERSION,
        "settings": dict(settings),
        "graph": graph.name,
        "graph_sha256": graph_sha256(graph),
        **stats,
        "created_by": f"mggcn {__version__}",
    }
    try:
        with new_folder(folder) as temporary:
            ordered = sorted(arrays.items())
            meta["sha256"] = {
                f"{name}.npy": write_array(temporary / f"{name}.npy", rows).sha256 for name, rows in ordered
            }
            write_meta(temporary / "meta.json", meta)
            sync_folder(temporary)
            move_folder(temporary, folder, overwrite=True)
    except OSError as error:
        raise StoreError(
            f"cannot write {folder}: {error.strerror or error}; free some space or choose another place (--out)"
        ) from error


def read_cached(
    folder: Path, graph: Graph, settings: Mapping[str, Any], forms: Mapping[str, Form]
) -> tuple[dict[str, Any], dict[str, FileRows]]:
    """Open a cut: return the content of meta.json, and the arrays by name.

    Cost: every file is read once, to compare its SHA-256.
    Raises: StoreError if the folder is not a cut with these settings, is damaged, or was made of another graph.
    """
    meta = read_meta(folder)
    if meta.get("graph_sha256") != graph_sha256(graph):
        raise StoreError(
            f"{folder} was built from a different version of graph {graph.name} (digests differ); {REMEDY}, "
            "or choose another place (--out)"
        )
    if meta.get("settings") != dict(settings):
        raise StoreError(f"{folder} was made with {meta.get('settings')}, expected {dict(settings)}; {REMEDY}")
    digests = meta.get("sha256")
    return meta, {name: _open(folder, name, *form, digests) for name, form in forms.items()}


def read_meta(folder: Path) -> dict[str, Any]:
    """Return the content of a cut's meta.json. Raises: StoreError if it cannot be read."""
    try:
        meta = parse_json(unsealed(read_bytes(folder / "meta.json"), folder / "meta.json"))
    except (OSError, ValueError) as error:
        raise StoreError(f"{folder / 'meta.json'} cannot be read: {reason(error)}; {REMEDY}") from error
    if not isinstance(meta, dict) or meta.get("format_version") != FORMAT_VERSION or "settings" not in meta:
        raise StoreError(f"{folder} is not a cut of format {FORMAT_VERSION}; {REMEDY}")
    return meta


def read_statistics(folder: Path, came: object, kind: type[S], num_parts: int) -> S:
    """Return the statistics of a cut, a dataclass whose tuples have an entry per part. Raises: StoreError."""
    try:
        fields = dict(came)  # type: ignore[call-overload]
        per_part = [name for name in fields if name.endswith("_per_part")]
        for name in per_part:
            fields[name] = tuple(int(count) for count in fields[name])
        statistics = kind(**fields)
    except (TypeError, ValueError, KeyError) as error:
        raise StoreError(f"{folder / 'meta.json'}: the statistics are damaged ({error}); {REMEDY}") from error
    if {len(fields[name]) for name in per_part} != {num_parts}:
        raise StoreError(f"{folder / 'meta.json'}: the statistics are not of {num_parts} parts; {REMEDY}")
    return statistics


def statistics_meta(statistics: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return statistics as meta.json stores them: the counts, and the ratios by which cuts are compared."""
    return {"statistics": dataclasses.asdict(statistics), **{name: getattr(statistics, name) for name in names}}


def _open(folder: Path, name: str, dtype: np.dtype[Any], shape: tuple[int, ...], digests: object) -> FileRows:
    path = folder / f"{name}.npy"
    rows = FileRows.open(path)
    if rows.dtype != dtype or rows.shape != shape:
        raise StoreError(f"{path} holds {rows.dtype} {rows.shape}, expected {dtype} {shape}; {REMEDY}")
    with open_file(path) as file:
        came = hashlib.file_digest(file, "sha256").hexdigest()
    if not isinstance(digests, dict) or digests.get(path.name) != came:
        raise StoreError(f"{path}: its SHA-256 does not match meta.json: one of them is damaged; {REMEDY}")
    return rows


@dataclass(frozen=True, slots=True)
class CachedPartition:
    """A cached partition; meta is empty if it cannot be read, which `state` says."""

    folder: Path
    meta: Mapping[str, Any]
    nbytes: int
    state: str
    """The reason why the cut cannot be used, "" if it can; the digests of its files are not checked."""


def list_cached(folder: Path, graph: Graph) -> list[CachedPartition]:
    """List the cached partitions of a store by kind, parts and seed.

    Cost: the meta.json of each. Raises: StoreError if the folder cannot be read.
    """
    try:
        found = [e for e in folder.iterdir() if e.is_dir() and not e.name.startswith(".")]
        return [_read_entry(entry, graph) for entry in sorted(found, key=_by_number)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(f"cannot list {folder}: {error.strerror}; choose a folder of cuts (--out)") from error


def _by_number(folder: Path) -> list[int | str]:
    """libra-8 comes before libra-16."""
    return [int(piece) if piece.isdigit() else piece for piece in re.split(r"(\d+)", folder.name)]


def _read_entry(folder: Path, graph: Graph) -> CachedPartition:
    nbytes = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    try:
        meta = read_meta(folder)
    except StoreError:
        return CachedPartition(folder, {}, nbytes, "damaged, or not a cut")
    same = meta.get("graph_sha256") == graph_sha256(graph)
    return CachedPartition(folder, meta, nbytes, "" if same else "of another graph")
