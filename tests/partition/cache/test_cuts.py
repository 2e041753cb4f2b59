"""Cuts on the disk: the same cut comes back, and only for its own graph and undamaged."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mggcn.errors import StoreError
from mggcn.graph import durable
from mggcn.graph.csr import ArrayRows, Graph
from mggcn.graph.file_rows import FileRows
from mggcn.graph.store import open_store
from mggcn.graph.store_write import write_store
from mggcn.partition.cache import folder as cache
from mggcn.partition.cache.cuts import EDGE_CUTS, LOCALITY_ORDERS, VERTEX_CUTS, Stored, cuts_folder
from mggcn.partition.cache.folder import list_cached
from mggcn.partition.cut.libra import LibraSettings
from mggcn.partition.cut.partition import CutPartition, cut_stats
from mggcn.partition.cut.tiles import cut_tile
from mggcn.partition.cut.vertex_cut import VertexCut
from mggcn.partition.locality.order import LocalitySettings
from mggcn.partition.metis.edge_cut import EdgeCut
from mggcn.partition.metis.run import MetisSettings
from tests.partition.cut.test_libra import dense_of, graph_of, same
from tests.partition.metis.test_run import needs_pymetis

SETTINGS = LibraSettings(parts=5, seed=2718)


def stored(kind: str, folder: Path, settings: LibraSettings = SETTINGS) -> tuple[Graph, Stored[VertexCut]]:
    """A graph as a store, and its cut, made just now."""
    write_store(graph_of(dense_of(kind)), folder)
    graph = open_store(folder)
    return graph, VERTEX_CUTS.find_or_make(graph, settings, cuts_folder(folder))


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


@pytest.mark.parametrize("kind", ["random", "loops", "directed", "weighted", "empty"])
@pytest.mark.parametrize("parts", [1, 5, 70, 300])
def test_a_cut_comes_back(kind: str, parts: int, tmp_path: Path) -> None:
    """Fails if an array or a figure changes on the way, the folder has another name, or the cut is made twice."""
    settings = LibraSettings(parts=parts, seed=99, edges="stored")
    graph, made = stored(kind, tmp_path / "store", settings)
    assert made.seconds is not None
    assert made.folder == tmp_path / "store" / "partitions" / f"libra-{parts}-99-stored"
    again = VERTEX_CUTS.find_or_make(graph, settings, cuts_folder(tmp_path / "store"))
    assert again.seconds is None
    assert again.folder == made.folder
    assert same(again.cut, made.cut)
    assert isinstance(again.cut.edge_part, FileRows)
    assert (again.cut.edge_part_t is again.cut.edge_part) == graph.symmetric
    files = ["edge_part.npy", "meta.json", "owner.npy", "parts.npy"]
    assert names(made.folder) == files if graph.symmetric else sorted([*files, "edge_part_t.npy"])
    assert names(made.folder.parent) == [made.folder.name]


def test_what_meta_says(tmp_path: Path) -> None:
    """Fails if the figures that people compare cuts by are not in meta.json, or not those of the cut."""
    _, made = stored("random", tmp_path / "store")
    meta = json.loads((made.folder / "meta.json").read_text())
    statistics = made.cut.statistics
    assert meta["settings"] == {"kind": "libra", "parts": 5, "seed": 2718, "edges": "shuffled"}
    assert meta["replication"] == statistics.replication > 1
    assert meta["edge_balance"] == statistics.edge_balance
    assert meta["split_share"] == statistics.split_share
    assert meta["seconds"] == made.seconds > 0
    assert meta["statistics"]["edges_per_part"] == list(statistics.edges_per_part)


def test_a_store_with_cuts_is_still_a_store(tmp_path: Path) -> None:
    """Fails if the folder of cuts is taken for a part of the graph."""
    graph, _ = stored("random", tmp_path / "store")
    again = open_store(tmp_path / "store", verify=True)
    assert again.meta["sha256"] == graph.meta["sha256"]


def test_a_cut_of_another_graph_is_refused(tmp_path: Path) -> None:
    """Fails if a graph that has changed, at equal sizes, is trained with the cut of what it was."""
    graph, made = stored("random", tmp_path / "store")
    indices = graph.adj.indices.array().copy()
    order = np.random.default_rng(7).permutation(graph.num_vertices)
    relabelled = graph_of(dense_of("random")[np.ix_(order, order)])
    assert relabelled.num_edges == graph.num_edges
    assert not np.array_equal(relabelled.adj.indices.array(), indices)
    with pytest.raises(StoreError, match=r"was built from a different version of graph small .* --force"):
        VERTEX_CUTS.find_or_make(relabelled, SETTINGS, made.folder.parent)
    replaced = VERTEX_CUTS.find_or_make(relabelled, SETTINGS, made.folder.parent, force=True)
    assert replaced.seconds is not None
    assert same(VERTEX_CUTS.find_or_make(relabelled, SETTINGS, made.folder.parent).cut, replaced.cut)
    assert names(made.folder.parent) == [made.folder.name]
    with pytest.raises(StoreError, match="different version of graph"):
        VERTEX_CUTS.find_or_make(graph, SETTINGS, made.folder.parent)


def cut_short(folder: Path) -> None:
    path = folder / "edge_part.npy"
    os.truncate(path, path.stat().st_size - 3)


def flip(folder: Path) -> None:
    with (folder / "owner.npy").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))


def remove(folder: Path) -> None:
    (folder / "parts.npy").unlink()


def other_type(folder: Path) -> None:
    np.save(folder / "owner.npy", np.load(folder / "owner.npy").astype(np.int64))


def other_shape(folder: Path) -> None:
    np.save(folder / "edge_part.npy", np.load(folder / "edge_part.npy")[:-1])


def no_meta(folder: Path) -> None:
    (folder / "meta.json").unlink()


def edit(folder: Path, key: str, value: Any) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    meta[key] = value
    del meta["meta_sha256"]
    (folder / "meta.json").write_text(json.dumps(meta))


def flip_meta(folder: Path) -> None:
    text = (folder / "meta.json").read_text()
    (folder / "meta.json").write_text(text.replace('"seed": ', '"reed": '))


DAMAGES = {
    "is not as it was written": flip_meta,
    "announces": cut_short,
    "SHA-256": flip,
    "expected a readable .npy file": remove,
    "holds int64": other_type,
    "expected uint8": other_shape,
    "cannot be read": no_meta,
    "not a cut of format 1": lambda folder: edit(folder, "format_version", 2),
    "was made with": lambda folder: edit(folder, "settings", {"kind": "libra", "parts": 4}),
    "does not match meta.json": lambda folder: edit(folder, "sha256", {}),
    "statistics are damaged": lambda folder: edit(folder, "statistics", {"edges_per_part": [1]}),
    "statistics are not of 5 parts": lambda folder: edit(
        folder,
        "statistics",
        {"num_connected": 1, "num_copies": 1, "num_split": 0, "edges_per_part": [1], "rows_per_part": [1]},
    ),
}


@pytest.mark.parametrize("text", DAMAGES)
def test_a_damaged_cut_is_refused(text: str, tmp_path: Path) -> None:
    """Fails if damage gets through, is answered with a traceback, or --force does not mend it."""
    graph, made = stored("random", tmp_path / "store")
    DAMAGES[text](made.folder)
    with pytest.raises(StoreError, match=text):
        VERTEX_CUTS.find_or_make(graph, SETTINGS, made.folder.parent)
    if (made.folder / "owner.npy").exists():
        VERTEX_CUTS.find_or_make(graph, SETTINGS, made.folder.parent, force=True)
        assert same(VERTEX_CUTS.find_or_make(graph, SETTINGS, made.folder.parent).cut, made.cut)


def test_what_is_in_the_way_stays(tmp_path: Path) -> None:
    """Fails if --force removes a folder that is no cut."""
    write_store(graph_of(dense_of("path")), tmp_path / "store")
    graph = open_store(tmp_path / "store")
    place = tmp_path / "out" / SETTINGS.name
    place.mkdir(parents=True)
    (place / "thesis.tex").write_text("years of work")
    with pytest.raises(StoreError, match="not replaced"):
        VERTEX_CUTS.find_or_make(graph, SETTINGS, tmp_path / "out", force=True)
    assert (place / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize("step", ["write_array", "write_meta", "sync_folder", "os.rename"])
def test_a_failed_write_leaves_what_was(step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if an error on the way leaves half a cut, loses the old one, or leaves a temporary folder."""
    graph, made = stored("random", tmp_path / "store")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    other = LibraSettings(parts=3, seed=5)
    with monkeypatch.context() as patch:
        patch.setattr(*((os, "rename") if step == "os.rename" else (cache, step)), full)
        if step == "os.rename":
            patch.setattr(durable, "exchange", full)
        for settings in (SETTINGS, other):
            with pytest.raises(StoreError, match="No space left on device; free some space"):
                VERTEX_CUTS.find_or_make(graph, settings, made.folder.parent, force=True)
    assert names(made.folder.parent) == [made.folder.name]
    assert same(VERTEX_CUTS.find_or_make(graph, SETTINGS, made.folder.parent).cut, made.cut)


def test_a_graph_in_memory_finds_the_cut_of_its_store(tmp_path: Path) -> None:
    """Fails if the digest tells a stored graph from the same graph in memory."""
    graph, made = stored("random", tmp_path / "store")
    held = graph_of(dense_of("random"))
    assert isinstance(held.adj.indices, ArrayRows)
    assert VERTEX_CUTS.find_or_make(held, SETTINGS, made.folder.parent).seconds is None
    assert graph.num_edges == held.num_edges


METIS = MetisSettings(parts=5, seed=31)


def stored_edge_cut(kind: str, folder: Path) -> tuple[Graph, Stored[EdgeCut]]:
    """A graph as a store, and its edge cut, made just now."""
    write_store(graph_of(dense_of(kind)), folder)
    graph = open_store(folder)
    return graph, EDGE_CUTS.find_or_make(graph, METIS, cuts_folder(folder))


@needs_pymetis
@pytest.mark.parametrize("kind", ["random", "directed", "empty"])
def test_an_edge_cut_comes_back(kind: str, tmp_path: Path) -> None:
    """Fails if an array or a figure changes on the way, the folder has another name, or the cut is made twice."""
    graph, made = stored_edge_cut(kind, tmp_path / "store")
    assert made.seconds is not None
    assert made.folder == tmp_path / "store" / "partitions" / "metis-5-31"
    again = EDGE_CUTS.find_or_make(graph, METIS, cuts_folder(tmp_path / "store"))
    assert again.seconds is None
    assert np.array_equal(again.cut.owner, made.cut.owner)
    assert again.cut.statistics == made.cut.statistics
    assert again.cut.assignment().counts == made.cut.statistics.rows_per_part
    assert names(made.folder) == ["meta.json", "owner.npy"]
    meta = json.loads((made.folder / "meta.json").read_text())
    assert meta["settings"] == {"kind": "metis", "parts": 5, "seed": 31}
    assert meta["cut_share"] == made.cut.statistics.cut_share
    assert meta["nonzero_balance"] == made.cut.statistics.nonzero_balance
    assert meta["row_balance"] == made.cut.statistics.row_balance
    assert meta["halo_share"] == made.cut.statistics.halo_share
    assert meta["statistics"]["halo_per_part"] == list(made.cut.statistics.halo_per_part)
    assert meta["pymetis"]


EDGE_CUT_DAMAGES = {
    "holds int64": other_type,
    "was made with": lambda folder: edit(folder, "settings", {"kind": "libra", "parts": 5, "seed": 31}),
    "statistics are damaged": lambda folder: edit(folder, "statistics", {"rows_per_part": [1] * 5}),
}


@needs_pymetis
@pytest.mark.parametrize("text", EDGE_CUT_DAMAGES)
def test_a_damaged_edge_cut_is_refused(text: str, tmp_path: Path) -> None:
    """Fails if damage gets through or is answered with a traceback."""
    graph, made = stored_edge_cut("random", tmp_path / "store")
    EDGE_CUT_DAMAGES[text](made.folder)
    with pytest.raises(StoreError, match=text):
        EDGE_CUTS.find_or_make(graph, METIS, made.folder.parent)


@needs_pymetis
def test_an_edge_cut_of_another_graph_is_refused(tmp_path: Path) -> None:
    """Fails if rows are dealt by the cut of another graph of equal size."""
    _, made = stored_edge_cut("random", tmp_path / "store")
    other = graph_of(dense_of("path"))
    with pytest.raises(StoreError, match=r"was built from a different version of graph small .* --force"):
        EDGE_CUTS.find_or_make(other, METIS, made.folder.parent)
    assert EDGE_CUTS.find_or_make(other, METIS, made.folder.parent, force=True).seconds is not None


LOCALITY = LocalitySettings(parts=3, seed=17)


def forge(folder: Path, name: str, change: Callable[[Any], Any]) -> None:
    """Change an array and its digest alike."""
    path = folder / f"{name}.npy"
    array = np.load(path)
    change(array)
    np.save(path, array)
    digests = json.loads((folder / "meta.json").read_text())["sha256"]
    edit(folder, "sha256", digests | {path.name: hashlib.sha256(path.read_bytes()).hexdigest()})


def put(place: Any, value: Any) -> Callable[[Any], None]:
    def change(array: Any) -> None:
        array[place] = value

    return change


def swap_owner(owner: Any) -> None:
    owner[np.flatnonzero(owner == 0)[0]] = 1


def repeat_row(local: Any) -> None:
    local[np.flatnonzero(local == 0)[0]] = 1


FORGED = {
    "libra": [
        ("owner", put(7, 5), "owner.npy names parts beyond the 5"),
        ("owner", put(7, 65535), "owner.npy names parts beyond the 5"),
        ("parts", put((7, 0), 0), "gives a vertex to a part that it does not lie in"),
        ("parts", put((7, 0), 2**64 - 1), "parts.npy names parts beyond the 5"),
        ("parts", put(np.s_[:], 31), "parts.npy has other numbers of vertices"),
    ],
    "metis": [("owner", put(7, 5), "owner.npy gives vertices"), ("owner", swap_owner, "owner.npy gives vertices")],
    "locality": [
        ("local", put(5, 2**30), "rows that their part does not"),
        ("local", put(5, -1), "rows that their part does not"),
        ("local", repeat_row, "a row to two vertices"),
        ("owner", put(5, 3), "owner.npy gives vertices"),
        ("owner", swap_owner, "owner.npy gives vertices"),
    ],
}


@pytest.mark.parametrize("kind", ["libra", pytest.param("metis", marks=needs_pymetis), "locality"])
def test_what_kernels_follow_is_checked_whatever_the_digests_say(kind: str, tmp_path: Path) -> None:
    """Fails if a vertex is given to a rank or a row that is not there, or a row to two: kernels would write beside it."""
    write_store(graph_of(dense_of("random")), tmp_path / "store")
    graph, folder = open_store(tmp_path / "store"), cuts_folder(tmp_path / "store")
    find: dict[str, Callable[[bool], Any]] = {
        "libra": lambda force: VERTEX_CUTS.find_or_make(graph, SETTINGS, folder, force),
        "metis": lambda force: EDGE_CUTS.find_or_make(graph, METIS, folder, force),
        "locality": lambda force: LOCALITY_ORDERS.find_or_make(graph, LOCALITY, folder, force),
    }
    for name, change, text in FORGED[kind]:
        made = find[kind](True)
        forge(made.folder, name, change)
        with pytest.raises(StoreError, match=f"{text}.*--force"):
            find[kind](False)


def test_parts_of_edges_are_checked_as_they_are_read(tmp_path: Path) -> None:
    """Fails if an edge is left out, or lies in a part of which one of its ends has no row there."""
    graph, made = stored("random", tmp_path / "store")
    assert graph.symmetric
    folder = made.folder.parent

    def tiles() -> None:
        partition = CutPartition(VERTEX_CUTS.find_or_make(graph, SETTINGS, folder).cut)
        for rank in range(5):
            held, part = partition.local_index(rank), partition.cut.edge_part_t
            cut_tile(graph.adj_t, part, partition, held, rank, self_loops=True, dtype="f4")

    tiles()
    forge(made.folder, "edge_part", put(3, 5))
    with pytest.raises(StoreError, match=r"names part 5 for an edge, but has 5 parts; .* --force"):
        tiles()
    with pytest.raises(StoreError, match="names part 5 for an edge"):
        cut_stats(graph, CutPartition(VERTEX_CUTS.find_or_make(graph, SETTINGS, folder).cut), self_loops=True)
    VERTEX_CUTS.find_or_make(graph, SETTINGS, folder, force=True)
    held_by = np.load(made.folder / "parts.npy")[:, 0]
    rows = np.repeat(np.arange(graph.num_vertices), np.diff(graph.adj.indptr.array()))
    entry = int(np.flatnonzero(held_by[rows] != 0b11111)[0])
    away = next(part for part in range(5) if not int(held_by[rows[entry]]) >> part & 1)
    forge(made.folder, "edge_part", put(entry, away))
    with pytest.raises(StoreError, match=f"in part {away} with an endpoint outside"):
        tiles()


def test_what_is_kept(tmp_path: Path) -> None:
    """Fails if a cut is missing, out of order, said to be usable when it is not, or hides the others."""
    graph, made = stored("random", tmp_path / "store")
    folder = made.folder.parent
    for parts in (16, 4, 7):
        VERTEX_CUTS.find_or_make(graph, LibraSettings(parts=parts), folder)
    VERTEX_CUTS.find_or_make(graph_of(dense_of("path")), LibraSettings(parts=6), folder)
    no_meta(folder / "libra-7-1-shuffled")
    (folder / ".libra-8-1-shuffled.0a0a0a0a.tmp").mkdir()
    (folder / "notes.txt").write_text("not a cut")
    kept_cuts = list_cached(folder, graph)
    assert [(cut.folder.name, cut.state) for cut in kept_cuts] == [
        ("libra-4-1-shuffled", ""),
        ("libra-5-2718-shuffled", ""),
        ("libra-6-1-shuffled", "of another graph"),
        ("libra-7-1-shuffled", "damaged, or not a cut"),
        ("libra-16-1-shuffled", ""),
    ]
    assert kept_cuts[1].nbytes == sum(file.stat().st_size for file in made.folder.iterdir())
    assert kept_cuts[1].meta["replication"] == made.cut.statistics.replication
    assert list_cached(tmp_path / "nowhere", graph) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot list"):
        list_cached(tmp_path / "file", graph)
