"""Partitions of every kind, read from beside a store or made and cached there: the files of each and its meta.json.

Libra: parts uint64 (N, W), owner uint16 (N,), edge_part uint8 or uint16 (E,), edge_part_t unless the graph is symmetric.
METIS: owner uint16 (N,). Order by locality: owner uint16 (N,), local int32 (N,).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from mggcn.graph.csr import ArrayRows, Graph, Rows
from mggcn.graph.store_write import CUTS
from mggcn.partition.cache.folder import Form, read_cached, read_statistics, save_cached, statistics_meta
from mggcn.partition.cut.libra import LibraSettings, libra
from mggcn.partition.cut.vertex_cut import CutStatistics, VertexCut, num_words, part_dtype
from mggcn.partition.locality.order import LocalityOrder, LocalitySettings, LocalityStatistics, locality
from mggcn.partition.metis.edge_cut import EdgeCut, EdgeCutStatistics
from mggcn.partition.metis.run import MetisSettings, metis
from mggcn.partition.order import Assignment

C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class Stored(Generic[C]):
    """A cut, the folder where it lies, and how long it took if it was made now, else None."""

    cut: C
    folder: Path
    seconds: float | None


StoredCut = Stored[VertexCut]
StoredEdgeCut = Stored[EdgeCut]
StoredLocality = Stored[LocalityOrder]


def cuts_folder(store: Path) -> Path:
    """Return the folder of a store's cuts."""
    return store / CUTS


def find_or_make_cut(graph: Graph, settings: LibraSettings, folder: Path, force: bool = False) -> StoredCut:
    """Return Libra's cut that lies in `folder`, a store's `cuts_folder`; make and keep it there without one, or by force.

    Cost: the digest of every file of the cut, or that of `libra` and of writing it.
    Raises: StoreError if what lies there is damaged or of another graph, or if it cannot be written.
    """
    target, described = folder / settings.name, {"kind": "libra", **dataclasses.asdict(settings)}
    if target.exists() and not force:
        return Stored(_read_vertex_cut(target, graph, described), target, None)
    began = time.perf_counter()
    cut = libra(graph, settings)
    seconds = time.perf_counter() - began
    names = ("replication", "edge_balance", "row_balance", "split_share")
    stats = statistics_meta(cut.statistics, names) | {"seconds": seconds}
    save_cached(target, graph, described, _vertex_cut_arrays(cut), stats)
    return Stored(cut, target, seconds)


def find_or_make_edge_cut(graph: Graph, settings: MetisSettings, folder: Path, force: bool = False) -> StoredEdgeCut:
    """Return METIS's cut, as `find_or_make_cut`; `.cut.assignment()` says which rank owns which row.

    Cost: the digest of 2 N bytes, or that of `metis` and of writing them. Raises: StoreError, and what `metis` does.
    """
    target, described = folder / settings.name, {"kind": "metis", **dataclasses.asdict(settings)}
    if target.exists() and not force:
        return Stored(_read_edge_cut(target, graph, described), target, None)
    began = time.perf_counter()
    cut = metis(graph, settings)
    seconds = time.perf_counter() - began
    names = ("cut_share", "nonzero_balance", "row_balance", "halo_share")
    stats = statistics_meta(cut.statistics, names) | {"seconds": seconds, "pymetis": metadata.version("pymetis")}
    save_cached(target, graph, described, {"owner": ArrayRows(cut.owner)}, stats)
    return Stored(cut, target, seconds)


def find_or_make_locality(
    graph: Graph, settings: LocalitySettings, folder: Path, force: bool = False
) -> StoredLocality:
    """Return the order by locality that is kept in `folder`, or compute and keep it there.

    force: compute it even if one is kept. Cost: reading 6 N bytes and their digest; if it must be computed, that of
    `locality` and of writing 6 N bytes. Raises: StoreError if the kept one is damaged.
    """
    target, described = folder / settings.name, {"kind": "locality", **dataclasses.asdict(settings)}
    if target.exists() and not force:
        return Stored(_read_locality(target, graph, described), target, None)
    began = time.perf_counter()
    found = locality(graph, settings)
    seconds = time.perf_counter() - began
    names = ("inside_share", "gap", "nonzero_balance", "row_balance", "critical_path")
    stats = statistics_meta(found.statistics, names) | {"seconds": seconds}
    arrays: dict[str, Rows] = {"owner": ArrayRows(found.owners.owner), "local": ArrayRows(found.owners.local)}
    save_cached(target, graph, described, arrays, stats)
    return Stored(found, target, seconds)


def _vertex_cut_arrays(cut: VertexCut) -> dict[str, Rows]:
    arrays: dict[str, Rows] = {"parts": ArrayRows(cut.parts), "owner": ArrayRows(cut.owner), "edge_part": cut.edge_part}
    return arrays if cut.edge_part_t is cut.edge_part else arrays | {"edge_part_t": cut.edge_part_t}


def _read_vertex_cut(folder: Path, graph: Graph, settings: Mapping[str, Any]) -> VertexCut:
    """Open a cut: part sets and owners in memory, the parts of the edges as files."""
    num_parts = int(settings["parts"])
    edges: Form = (np.dtype(part_dtype(num_parts)), (graph.num_edges,))
    forms: dict[str, Form] = {
        "parts": (np.dtype(np.uint64), (graph.num_vertices, num_words(num_parts))),
        "owner": (np.dtype(np.uint16), (graph.num_vertices,)),
        "edge_part": edges,
    }
    if not graph.symmetric:
        forms["edge_part_t"] = edges
    meta, files = read_cached(folder, graph, settings, forms)
    parts, owner = (files[name].read(0, graph.num_vertices) for name in ("parts", "owner"))
    edge_part = files["edge_part"]
    statistics = read_statistics(folder, meta.get("statistics"), CutStatistics, num_parts)
    return VertexCut(
        num_parts=num_parts,
        parts=parts,
        owner=owner,
        edge_part=edge_part,
        edge_part_t=files.get("edge_part_t", edge_part),
        statistics=statistics,
    )


def _read_edge_cut(folder: Path, graph: Graph, settings: Mapping[str, Any]) -> EdgeCut:
    num_parts = int(settings["parts"])
    forms: dict[str, Form] = {"owner": (np.dtype(np.uint16), (graph.num_vertices,))}
    meta, files = read_cached(folder, graph, settings, forms)
    statistics = read_statistics(folder, meta.get("statistics"), EdgeCutStatistics, num_parts)
    return EdgeCut(num_parts, files["owner"].read(0, graph.num_vertices), statistics)


def _read_locality(folder: Path, graph: Graph, settings: Mapping[str, Any]) -> LocalityOrder:
    num = graph.num_vertices
    forms: dict[str, Form] = {"owner": (np.dtype(np.uint16), (num,)), "local": (np.dtype(np.int32), (num,))}
    meta, files = read_cached(folder, graph, settings, forms)
    statistics = read_statistics(folder, meta.get("statistics"), LocalityStatistics, int(settings["parts"]))
    owner, local = (files[name].read(0, num) for name in ("owner", "local"))
    return LocalityOrder(Assignment(owner, local, statistics.rows_per_part), statistics)
