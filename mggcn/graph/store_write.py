"""Write a graph store so that either the whole folder appears under its name or nothing does.

Everything goes to a temporary folder beside the target, is flushed to the disk and then renamed.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mggcn.errors import StoreError, printable
from mggcn.files import write_bytes
from mggcn.graph.check import check_graph
from mggcn.graph.csr import CSR, Graph, Rows, rows_with_loops
from mggcn.graph.digests import BLOCKS_FILE, FileDigest, digests_meta
from mggcn.graph.durable import move_folder, new_folder, sync_folder, write_array, write_meta
from mggcn.graph.layout import FORMAT_VERSION, graph_arrays, npy_nbytes
from mggcn.version import __version__

CUTS = "partitions"
"""Folder of a store that may hold cuts of its graph (partition/cache/folder.py)."""
LOOPS = "rows_with_loops"
"""Entry of meta.json: how many vertices have a self-loop, so that a plan need not look through the edges."""
OF_FILES = ("sha256", "blocks", "meta_sha256")
"""Entries of meta.json that belong to the files beside it, not to the graph."""


def write_store(graph: Graph, path: str | Path, overwrite: bool = False) -> None:
    """Check a graph and write it as a store; keys of graph.meta that the store does not set itself are kept.

    Cost: the checks of `check_graph` and a count of self-loops, then one pass over all arrays in pieces of about 16 MiB.
    Raises: GraphError if the graph is malformed; StoreError if the path exists (unless `overwrite`, which replaces
    graph stores only) or the disk is full or not writable. After an error nothing is left behind.
    """
    target = Path(os.path.abspath(path))
    refuse_existing(target, overwrite)
    check_graph(graph)
    try:
        with new_folder(target) as temporary:
            digests = {f"{name}.npy": write_array(temporary / f"{name}.npy", rows) for name, rows in _sorted(graph)}
            write_digests(temporary, _meta(graph), digests)
            sync_folder(temporary)
            move_folder(temporary, target, overwrite)
    except OSError as error:
        need = sum(npy_nbytes(rows) for rows in graph_arrays(graph).values())
        room = "; free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "; check the path and its rights"
        raise StoreError(f"cannot write {target} ({need / 2**20:.1f} MiB): {error.strerror or error}{room}") from error


def refuse_source(path: str | Path, source: Path) -> None:
    """Refuse a path for a store that is, by whatever name, the store it is made from, or lies in it: not even force
    replaces that.

    Raises: StoreError.
    """
    if os.path.exists(path) and os.path.samefile(path, source):
        raise StoreError(
            f"{printable(path)} is the store {printable(source)} itself, which would be lost; choose another name"
        )
    if source.resolve() in Path(path).resolve().parents:
        raise StoreError(f"{printable(path)} lies in the store {printable(source)}; choose a name beside it")


def refuse_existing(path: str | Path, overwrite: bool) -> None:
    """Refuse a path for a store if it exists and may not be replaced; raises StoreError."""
    target = Path(os.path.abspath(path))
    if not os.path.lexists(target):
        return
    if not overwrite:
        raise StoreError(f"{target} exists already; choose another name or pass overwrite (--force)")
    files = {file.name for file in target.iterdir()} if target.is_dir() and not target.is_symlink() else {""}
    files -= {CUTS, BLOCKS_FILE} if (target / CUTS).is_dir() else {BLOCKS_FILE}
    if files and ("meta.json" not in files or any(not name.endswith((".npy", ".json")) for name in files)):
        raise StoreError(f"{target} is not a graph store, so it is not overwritten; choose another name")


def _sorted(graph: Graph) -> list[tuple[str, Rows]]:
    return sorted(graph_arrays(graph).items())


def write_digests(folder: Path, meta: Mapping[str, Any], digests: Mapping[str, FileDigest]) -> None:
    """Write meta.json, and the digests of blocks beside it, for the arrays in a folder. Raises: OSError."""
    entries, blocks = digests_meta(digests)
    if blocks:
        write_bytes(folder / BLOCKS_FILE, blocks)
    write_meta(folder / "meta.json", {**meta, **entries})


def _meta(graph: Graph) -> dict[str, Any]:
    features = graph.features
    num_features = 0 if features is None else features.num_cols if isinstance(features, CSR) else features.shape[1]
    own = {
        "format_version": FORMAT_VERSION,
        "name": graph.name,
        "n": graph.num_vertices,
        "num_vertices": graph.num_vertices,
        "num_edges": graph.num_edges,
        "nnz_directed": graph.num_edges,
        "num_features": num_features,
        "num_classes": graph.num_classes,
        "symmetric": graph.symmetric,
        LOOPS: rows_with_loops(graph.adj_t),
        "created_by": f"mggcn {__version__}",
    }
    if graph.task != "classes":
        own["task"] = graph.task
    if graph.num_relations:
        own["num_relations"] = graph.num_relations
    if graph.class_names:
        own["class_names"] = list(graph.class_names)
    kept = {key: value for key, value in graph.meta.items() if key not in (*OF_FILES, "class_names")}
    return {"licence": "not stated", "source": "not stated"} | kept | own
