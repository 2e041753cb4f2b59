"""Partitions of every kind, read from where they are kept, or made and kept there: the files of each and its meta.json.

What is read is range-checked, since kernels follow it: a digest tells whether a file is as it was written, no more.

Libra: parts uint64 (N, W), owner uint16 (N,), edge_part uint8 or uint16 (E,), edge_part_t unless the graph is symmetric.
METIS, stream: owner uint16 (N,). Order by locality: owner uint16 (N,), local int32 (N,).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from mggcn.errors import StoreError
from mggcn.graph.csr import ArrayRows, Graph, Rows
from mggcn.graph.durable import alone
from mggcn.graph.layout import graph_sha256
from mggcn.graph.store import store_folder
from mggcn.graph.store_write import CUTS
from mggcn.host import user_cache
from mggcn.partition.cache.folder import (
    REMEDY,
    Form,
    read_cached,
    read_statistics,
    save_cached,
    statistics_meta,
)
from mggcn.partition.cut.libra import LibraSettings, libra
from mggcn.partition.cut.vertex_cut import CutStatistics, VertexCut, num_words, part_dtype
from mggcn.partition.locality.order import LocalityOrder, LocalitySettings, LocalityStatistics, locality
from mggcn.partition.metis.edge_cut import EdgeCut, EdgeCutStatistics
from mggcn.partition.metis.run import MetisSettings, metis
from mggcn.partition.order import MAX_RANKS, Assignment
from mggcn.partition.stream import StreamSettings, stream

C = TypeVar("C")
S = TypeVar("S", bound="Settings")
CHUNK = 1 << 18
"""Number of vertices that are checked at a time."""


@dataclass(frozen=True, slots=True)
class Stored(Generic[C]):
    """A cut, its folder, and the seconds that making it took; None if it was found there."""

    cut: C
    folder: Path
    seconds: float | None


def cuts_folder(store: Path) -> Path:
    """Return the folder of a store's cuts."""
    return store / CUTS


def users_cuts(graph: Graph) -> Path:
    """Return the folder of a graph's cuts in the user's cache folder."""
    return user_cache() / CUTS / graph_sha256(graph)[:32]


def kept_in(graph: Graph, name: str) -> Path | None:
    """Return the folder in which a run looks for a graph's cut, or saves it; None if there is none.

    A run writes nothing into a store: it reads what `mggcn partition` made there, and saves its own cuts in the user's
    cache folder, by the digest of the graph.
    """
    if (store := store_folder(graph)) is None:
        return None
    cache = users_cuts(graph)
    if (cuts_folder(store) / name).exists():
        return cuts_folder(store)
    with contextlib.suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
    return cache if (cache / name).exists() or os.access(cache, os.W_OK) else None


def is_kept(graph: Graph, name: str) -> bool:
    """Return whether a cut is saved beside the graph's store, or in the user's cache folder."""
    store = store_folder(graph)
    folders = [] if store is None else [cuts_folder(store), users_cuts(graph)]
    return any((folder / name).exists() for folder in folders)


class Settings(Protocol):
    """Settings that determine a cut: a dataclass."""

    @property
    def name(self) -> str: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind(Generic[S, C]):
    """How cuts of one kind are made, kept and read."""

    name: str
    make: Callable[[Graph, S], C]
    arrays: Callable[[C], dict[str, Rows]]
    read: Callable[[Path, Graph, Mapping[str, Any]], C]
    ratios: tuple[str, ...]
    """The statistics by which cuts are compared, in meta.json by name."""
    described: Callable[[Graph], Mapping[str, Any]] = lambda graph: {}
    """What a cut depends on besides its settings."""
    made_by: Callable[[], Mapping[str, Any]] = dict

    def find_or_make(self, graph: Graph, settings: S, folder: Path, force: bool = False) -> Stored[C]:
        """Return the cut that is kept in `folder`, a store's `cuts_folder`; if there is none, or by force, make and
        keep it.

        Cost: the digest of every file of the cut, or that of `make` and of writing it. Raises: StoreError if the kept
        cut is damaged or belongs to another graph, or if it cannot be written; what `make` does.
        """
        target = folder / settings.name
        # `settings` is a dataclass, which S does not say.
        described = {"kind": self.name, **dataclasses.asdict(settings), **self.described(graph)}  # type: ignore[call-overload]
        if target.exists() and not force:
            return Stored(self.read(target, graph, described), target, None)
        began = time.perf_counter()
        cut: Any = self.make(graph, settings)
        seconds = time.perf_counter() - began
        stats = statistics_meta(cut.statistics, self.ratios) | {"seconds": seconds, **self.made_by()}
        save_cached(target, graph, described, self.arrays(cut), stats)
        return Stored(cut, target, seconds)

    def for_run(self, graph: Graph, settings: S) -> C:
        """Return the cut of a run: as `find_or_make` where `kept_in` says, or made for this run alone.

        Of ranks and runs that lack it at once one makes it, and the others of its machine wait: each would need the memory.
        """
        folder = kept_in(graph, settings.name)
        if folder is None:
            return self.make(graph, settings)
        if (folder / settings.name).exists():
            return self.find_or_make(graph, settings, folder).cut
        with alone(folder / f".{settings.name}.lock"):
            return self.find_or_make(graph, settings, folder).cut


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
    _check_parts(folder, parts, owner, statistics.rows_per_part)
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
    owner = files["owner"].read(0, graph.num_vertices)
    _check_owners(folder, owner, statistics.rows_per_part)
    return EdgeCut(num_parts, owner, statistics)


def _read_locality(folder: Path, graph: Graph, settings: Mapping[str, Any]) -> LocalityOrder:
    num = graph.num_vertices
    forms: dict[str, Form] = {"owner": (np.dtype(np.uint16), (num,)), "local": (np.dtype(np.int32), (num,))}
    meta, files = read_cached(folder, graph, settings, forms)
    statistics = read_statistics(folder, meta.get("statistics"), LocalityStatistics, int(settings["parts"]))
    owner, local = (files[name].read(0, num) for name in ("owner", "local"))
    _check_owners(folder, owner, statistics.rows_per_part)
    _check_rows(folder, owner, local, statistics.rows_per_part)
    return LocalityOrder(Assignment(owner, local, statistics.rows_per_part), statistics)


def _check_owners(folder: Path, owner: npt.NDArray[np.uint16], rows_per_part: tuple[int, ...]) -> None:
    """Refuse parts that do not exist, and parts of other sizes than meta.json says. Raises: StoreError."""
    came = np.zeros(MAX_RANKS + 1, np.int64)
    for start in range(0, owner.shape[0], CHUNK):
        came += np.bincount(owner[start : start + CHUNK], minlength=came.size)
    num_parts = len(rows_per_part)
    if came[num_parts:].any() or came[:num_parts].tolist() != list(rows_per_part):
        raise _damaged(folder, f"owner.npy gives vertices to parts beyond the {num_parts} that meta.json counts")


def _check_rows(
    folder: Path, owner: npt.NDArray[np.uint16], local: npt.NDArray[np.int32], rows_per_part: tuple[int, ...]
) -> None:
    """Refuse rows outside their part, and rows of two vertices; the parts were checked. Raises: StoreError."""
    sizes = np.array(rows_per_part, np.int64)
    starts = np.cumsum(sizes) - sizes
    taken = np.zeros(owner.shape[0], np.bool_)
    for start in range(0, owner.shape[0], CHUNK):
        part, row = owner[start : start + CHUNK], local[start : start + CHUNK]
        if (row < 0).any() or (row >= sizes[part]).any():
            raise _damaged(folder, "local.npy has rows that their part does not")
        taken[starts[part] + row] = True
    if not taken.all():  # as many rows as vertices: one that nobody took means one taken twice
        raise _damaged(folder, "local.npy gives a row to two vertices")


def _check_parts(
    folder: Path, parts: npt.NDArray[np.uint64], owner: npt.NDArray[np.uint16], rows_per_part: tuple[int, ...]
) -> None:
    """Refuse owners that are none of their vertex's parts, and part sets of other sizes than meta.json says.

    Cost: P passes over chunks of N words. Raises: StoreError.
    """
    num_parts = len(rows_per_part)
    came = [0] * num_parts
    for start in range(0, owner.shape[0], CHUNK):
        words, own = parts[start : start + CHUNK], owner[start : start + CHUNK].astype(np.int64)
        if (own >= num_parts).any():
            raise _damaged(folder, f"owner.npy names parts beyond the {num_parts} that exist")
        held = np.take_along_axis(words, own[:, np.newaxis] // 64, 1)[:, 0] >> (own % 64).astype(np.uint64)
        if not (held & np.uint64(1)).all():
            raise _damaged(folder, "owner.npy gives a vertex to a part that it does not lie in")
        if num_parts % 64 and (words[:, -1] >> np.uint64(num_parts % 64)).any():
            raise _damaged(folder, f"parts.npy names parts beyond the {num_parts} that exist")
        for part in range(num_parts):
            came[part] += int(np.count_nonzero(words[:, part // 64] & np.uint64(1 << part % 64)))
    if came != list(rows_per_part):
        raise _damaged(folder, "parts.npy has other numbers of vertices in its parts than meta.json counts")


def _damaged(folder: Path, what: str) -> StoreError:
    return StoreError(f"{folder}: {what}; the files are damaged, or not of one cut: {REMEDY}")


VERTEX_CUTS: Final[Kind[LibraSettings, VertexCut]] = Kind(
    name="libra",
    make=lambda graph, settings: libra(graph, settings),
    arrays=_vertex_cut_arrays,
    read=_read_vertex_cut,
    ratios=("replication", "edge_balance", "row_balance", "split_share"),
    described=lambda graph: {"parallel_edges": "together"} if graph.num_relations else {},  # older cuts could part them
)
EDGE_CUTS: Final[Kind[MetisSettings, EdgeCut]] = Kind(
    name="metis",
    make=lambda graph, settings: metis(graph, settings),
    arrays=lambda cut: {"owner": ArrayRows(cut.owner)},
    read=_read_edge_cut,
    ratios=("cut_share", "nonzero_balance", "row_balance", "halo_share"),
    made_by=lambda: {"pymetis": metadata.version("pymetis")},
)
STREAM_CUTS: Final[Kind[StreamSettings, EdgeCut]] = Kind(
    name="stream",
    make=lambda graph, settings: stream(graph, settings),
    arrays=EDGE_CUTS.arrays,
    read=_read_edge_cut,
    ratios=EDGE_CUTS.ratios,
)
LOCALITY_ORDERS: Final[Kind[LocalitySettings, LocalityOrder]] = Kind(
    name="locality",
    make=lambda graph, settings: locality(graph, settings),
    arrays=lambda found: {"owner": ArrayRows(found.owners.owner), "local": ArrayRows(found.owners.local)},
    read=_read_locality,
    ratios=("inside_share", "gap", "nonzero_balance", "row_balance", "critical_path"),
)
