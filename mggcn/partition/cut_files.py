"""Vertex cuts as folders of `.npy` files and a meta.json, kept beside the graph they cut: STORE/partitions/NAME.

Files: parts uint64 (N, W), owner uint16 (N,), edge_part uint8 or uint16 (E,), edge_part_t unless the graph is symmetric.
A folder appears whole or not at all, and is used only for the graph that it was made of.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import secrets
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mggcn.errors import StoreError
from mggcn.graph.csr import ArrayRows, Graph, Rows
from mggcn.graph.durable import move_folder, sync_folder, write_array, write_meta
from mggcn.graph.file_rows import FileRows
from mggcn.graph.layout import graph_sha256
from mggcn.graph.store_write import CUTS
from mggcn.partition.libra import LibraSettings, libra
from mggcn.partition.vertex_cut import CutStatistics, VertexCut, num_words, part_dtype
from mggcn.version import __version__

FORMAT_VERSION = 1
REMEDY = "make it again with mggcn partition --force"


@dataclass(frozen=True, slots=True)
class StoredCut:
    """A cut, the folder where it lies, and how long it took if it was made now, else None."""

    cut: VertexCut
    folder: Path
    seconds: float | None


def cuts_folder(store: Path) -> Path:
    """Return the folder of a store's cuts."""
    return store / CUTS


def find_or_make_cut(graph: Graph, settings: LibraSettings, folder: Path, force: bool = False) -> StoredCut:
    """Return the cut that lies in `folder`, a store's `cuts_folder`; make and keep it there if there is none, or by force.

    Cost: the digest of every file of the cut, or that of `libra` and of writing it.
    Raises: StoreError if what lies there is damaged or of another graph, or if it cannot be written.
    """
    target = folder / settings.name
    described = {"kind": "libra", **dataclasses.asdict(settings)}
    if target.exists() and not force:
        return StoredCut(read_cut(target, graph, described), target, None)
    began = time.perf_counter()
    cut = libra(graph, settings)
    seconds = time.perf_counter() - began
    write_cut(cut, target, graph, described, seconds)
    return StoredCut(cut, target, seconds)


def write_cut(cut: VertexCut, folder: Path, graph: Graph, settings: Mapping[str, Any], seconds: float) -> None:
    """Write a cut of a graph beside its place, flush it to the disk, and put it there instead of an older one.

    Raises: StoreError if the disk is full or not writable, or something else than a cut is in the way; nothing is left.
    """
    if folder.exists() and not (folder / "owner.npy").is_file():
        raise StoreError(f"{folder} is not the folder of a vertex cut, so it is not replaced; choose another place")
    meta = {
        "format_version": FORMAT_VERSION,
        "settings": dict(settings),
        "graph": graph.name,
        "graph_sha256": graph_sha256(graph),
        "statistics": dataclasses.asdict(cut.statistics),
        **figures(cut.statistics),
        "seconds": seconds,
        "created_by": f"mggcn {__version__}",
    }
    temporary = folder.parent / f".{folder.name}.{secrets.token_hex(4)}.tmp"
    try:
        temporary.mkdir(parents=True)
        arrays = sorted(_arrays(cut).items())
        meta["sha256"] = {f"{name}.npy": write_array(temporary / f"{name}.npy", rows) for name, rows in arrays}
        write_meta(temporary / "meta.json", meta)
        sync_folder(temporary)
        move_folder(temporary, folder, overwrite=True)
    except OSError as error:
        raise StoreError(
            f"cannot write {folder}: {error.strerror or error}; free some space or choose another place (--out)"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def figures(statistics: CutStatistics) -> dict[str, float]:
    """Return the figures that one compares cuts by."""
    names = ("replication", "edge_balance", "row_balance", "split_share")
    return {name: getattr(statistics, name) for name in names}


def read_cut(folder: Path, graph: Graph, settings: Mapping[str, Any]) -> VertexCut:
    """Open a cut: part sets and owners in memory, the parts of the edges as files.

    Cost: every file is read once, to compare its SHA-256.
    Raises: StoreError if the folder is no cut by these settings, is damaged, or was made of another graph.
    """
    meta = _read_meta(folder)
    if meta.get("graph_sha256") != graph_sha256(graph):
        raise StoreError(
            f"{folder} was made of another graph than {graph.name} is now (its digest differs); {REMEDY}, "
            "or choose another place (--out)"
        )
    if meta.get("settings") != dict(settings):
        raise StoreError(f"{folder} was made with {meta.get('settings')}, expected {dict(settings)}; {REMEDY}")
    num_parts = int(settings["parts"])
    part = np.dtype(part_dtype(num_parts))
    expected: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {
        "parts": (np.dtype(np.uint64), (graph.num_vertices, num_words(num_parts))),
        "owner": (np.dtype(np.uint16), (graph.num_vertices,)),
        "edge_part": (part, (graph.num_edges,)),
    }
    if not graph.symmetric:
        expected["edge_part_t"] = expected["edge_part"]
    digests = meta.get("sha256")
    files = {name: _open(folder, name, *form, digests) for name, form in expected.items()}
    parts, owner = (files[name].read(0, graph.num_vertices) for name in ("parts", "owner"))
    edge_part = files["edge_part"]
    statistics = _statistics(folder, meta.get("statistics"), num_parts)
    return VertexCut(num_parts, parts, owner, edge_part, files.get("edge_part_t", edge_part), statistics)


def _arrays(cut: VertexCut) -> dict[str, Rows]:
    arrays: dict[str, Rows] = {"parts": ArrayRows(cut.parts), "owner": ArrayRows(cut.owner), "edge_part": cut.edge_part}
    return arrays if cut.edge_part_t is cut.edge_part else arrays | {"edge_part_t": cut.edge_part_t}


def _read_meta(folder: Path) -> dict[str, Any]:
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise StoreError(f"{folder / 'meta.json'} cannot be read ({error}); {REMEDY}") from error
    if not isinstance(meta, dict) or meta.get("format_version") != FORMAT_VERSION:
        raise StoreError(f"{folder} is not a vertex cut of format {FORMAT_VERSION}; {REMEDY}")
    return meta


def _open(folder: Path, name: str, dtype: np.dtype[Any], shape: tuple[int, ...], digests: object) -> FileRows:
    path = folder / f"{name}.npy"
    rows = FileRows.open(path)
    if rows.dtype != dtype or rows.shape != shape:
        raise StoreError(f"{path} holds {rows.dtype} {rows.shape}, expected {dtype} {shape}; {REMEDY}")
    with path.open("rb") as file:
        came = hashlib.file_digest(file, "sha256").hexdigest()
    if not isinstance(digests, dict) or digests.get(path.name) != came:
        raise StoreError(f"{path} has not the SHA-256 that meta.json says: one of them is damaged; {REMEDY}")
    return rows


def _statistics(folder: Path, came: object, num_parts: int) -> CutStatistics:
    try:
        fields = dict(came)  # type: ignore[call-overload]
        for name in ("edges_per_part", "rows_per_part"):
            fields[name] = tuple(int(count) for count in fields[name])
        statistics = CutStatistics(**fields)
    except (TypeError, ValueError, KeyError) as error:
        raise StoreError(f"{folder / 'meta.json'}: the statistics are damaged ({error}); {REMEDY}") from error
    if {len(statistics.edges_per_part), len(statistics.rows_per_part)} != {num_parts}:
        raise StoreError(f"{folder / 'meta.json'}: the statistics are not of {num_parts} parts; {REMEDY}")
    return statistics
