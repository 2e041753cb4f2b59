from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mggcn.errors import GraphError, StoreError
from mggcn.graph import durable
from mggcn.graph.csr import CSR, ArrayRows, Graph
from mggcn.graph.layout import graph_arrays, graph_sha256
from mggcn.graph.store import is_store, open_store, store_folder
from mggcn.graph.store_write import write_store
from tests.graph.small import small_graph

REAL = """
acm actor amazon_computers amazon_photo blogcatalog chameleon_filtered citeseer cnr_2000 coauthor_cs cora cora_ml
dblp dblp_2010 facebook_pages mesh_4elt minesweeper polblogs squirrel_filtered twitch_de uai2010 usa_airports""".split()


def assert_same(left: Graph, right: Graph) -> None:
    """Every array equal in name, type and content, and every extent."""
    arrays, others = graph_arrays(left), graph_arrays(right)
    assert arrays.keys() == others.keys()
    for name, rows in arrays.items():
        assert rows.dtype == others[name].dtype
        np.testing.assert_array_equal(rows.array(), others[name].array(), err_msg=name)
    assert (left.symmetric, left.num_classes) == (right.symmetric, right.num_classes)
    if isinstance(left.features, CSR):
        assert isinstance(right.features, CSR)
        assert left.features.num_cols == right.features.num_cols


@pytest.mark.parametrize("name", REAL)
def test_opens_every_real_graph_as_it_is(data_root: Path, name: str) -> None:
    """Compares with meta.json and with the files as NumPy loads them."""
    graph = open_store(data_root / name)
    meta = json.loads((data_root / name / "meta.json").read_text())
    assert graph.name == name
    assert graph.symmetric
    assert (graph.num_vertices, graph.num_edges) == (meta["n"], meta["nnz_directed"])
    assert graph.num_classes == meta["num_classes"]
    assert graph.meta["licence"] == meta["licence"]
    for stem, rows in graph_arrays(graph).items():
        loaded = np.load(data_root / name / f"{stem}.npy", allow_pickle=False)
        np.testing.assert_array_equal(
            rows.read(0, rows.shape[0]), np.atleast_2d(loaded) if stem in graph.splits else loaded
        )
    assert len(graph_arrays(graph)) == len(list((data_root / name).glob("*.npy")))


@pytest.mark.parametrize("name", ["cora", "amazon_photo", "minesweeper", "cnr_2000"])
def test_round_trip_of_real_graphs(data_root: Path, tmp_path: Path, name: str) -> None:
    graph = open_store(data_root / name)
    write_store(graph, tmp_path / "store")
    again = open_store(tmp_path / "store", verify=True)
    assert_same(graph, again)
    assert graph_sha256(again) == graph_sha256(graph)
    assert again.meta["reference_results"] == graph.meta["reference_results"]
    assert is_store(tmp_path / "store")


def directed() -> Graph:
    edges = np.array([[0, 0, 1, 3, 4, 4], [1, 2, 2, 3, 0, 1]])
    weights = np.array([1, 2, 0.5, 4, -1, 0])
    splits = {"train": np.eye(5, dtype=bool)[:2], "val": np.eye(5, dtype=bool)[2:4], "alt_train": [2]}
    return small_graph(edges=edges, weights=weights, splits=splits)


@pytest.mark.parametrize(
    "graph",
    [
        small_graph(),
        directed(),
        small_graph(edges=np.empty((2, 0))),
        small_graph(features=None, labels=None, splits=None),
        small_graph(edges=[[0], [0]], num_vertices=1, features=[[1.0]], labels=[0], splits={"train": [0]}),
    ],
    ids=["small", "directed", "no edges", "structure only", "one vertex"],
)
def test_round_trip(tmp_path: Path, graph: Graph) -> None:
    write_store(graph, tmp_path / "new" / "store")
    again = open_store(tmp_path / "new" / "store", verify=True)
    assert_same(graph, again)
    assert graph_sha256(again) == graph_sha256(graph)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["store"]


def test_digest_sees_every_part(tmp_path: Path) -> None:
    """Fails if a changed array inherits the digest of the stored one."""
    write_store(small_graph(), tmp_path / "store")
    graph = open_store(tmp_path / "store")
    changed = [
        replace(graph, labels=ArrayRows(np.array([0, 1, 2, 1, -1]))),
        replace(graph, features=ArrayRows(np.zeros((5, 2), np.float32))),
        replace(graph, splits={**graph.splits, "val": graph.splits["test"]}),
        replace(graph, num_classes=4),
        replace(graph, adj_t=replace(graph.adj)),
    ]
    assert len({graph_sha256(other) for other in [graph, *changed]}) == 6


def test_meta_is_kept_and_completed(tmp_path: Path) -> None:
    write_store(replace(small_graph(), meta={"licence": "MIT", "extra": [1], "num_edges": 99}), tmp_path / "store")
    meta = open_store(tmp_path / "store").meta
    assert (meta["licence"], meta["extra"], meta["num_edges"]) == ("MIT", [1], 8)
    assert meta["format_version"] == 1
    assert meta["symmetric"] is True
    assert set(meta["sha256"]) == {path.name for path in (tmp_path / "store").glob("*.npy")}


def edit_meta(store: Path, **changes: object) -> None:
    meta = json.loads((store / "meta.json").read_text())
    meta.update({"meta_sha256": None} | changes)
    (store / "meta.json").write_text(json.dumps({key: value for key, value in meta.items() if value is not None}))


def flip(store: Path, name: str) -> None:
    data = bytearray((store / name).read_bytes())
    data[-1] ^= 1
    (store / name).write_bytes(data)


def rename_in_meta(store: Path, old: str, new: str) -> None:
    digests: dict[str, str] = json.loads((store / "meta.json").read_text())["sha256"]
    edit_meta(store, sha256={name.replace(f"{old}.npy", f"{new}.npy"): digest for name, digest in digests.items()})


def truncate(store: Path) -> None:
    data = (store / "indices.npy").read_bytes()
    (store / "indices.npy").write_bytes(data[:-1])


def without(store: Path, name: str) -> dict[str, str]:
    digests: dict[str, str] = json.loads((store / "meta.json").read_text())["sha256"]
    return {key: digest for key, digest in digests.items() if key != name}


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no meta": (lambda store: (store / "meta.json").unlink(), "without a readable meta.json"),
    "no JSON": (lambda store: (store / "meta.json").write_text("{"), "not valid JSON"),
    "deep JSON": (lambda store: (store / "meta.json").write_text("[" * 100_000), "not valid JSON"),
    "a list": (lambda store: (store / "meta.json").write_text("[]"), "must hold a JSON object"),
    "newer": (lambda store: edit_meta(store, format_version=2), "store format 2, this mggcn reads 1"),
    "no checksums": (lambda store: edit_meta(store, sha256=None), "lists other arrays than"),
    "path as name": (
        lambda store: edit_meta(store, sha256={"indptr.npy": "", "../x.npy": ""}),
        "lists other arrays than",
    ),
    "not symmetric": (lambda store: edit_meta(store, symmetric=False), "lists other arrays than"),
    "other count": (lambda store: edit_meta(store, num_edges=9), "num_edges = 9, the files hold 8"),
    "odd count": (lambda store: edit_meta(store, num_classes="three"), "num_classes must be a whole number"),
    "float labels": (lambda store: np.save(store / "labels.npy", np.zeros(5)), "needs int64 with 5 entries"),
    "flat features": (lambda store: np.save(store / "features.npy", np.zeros(5, np.float32)), "needs float32"),
    "truncated": (truncate, "header announces"),
    "missing": (lambda store: (store / "labels.npy").unlink(), "labels.npy"),
    "pickled": (lambda store: np.save(store / "labels.npy", np.array([{}])), "pickled"),
    "exchanged": (lambda store: np.save(store / "labels.npy", np.zeros(4, np.int64)), "different graphs"),
    "changed name": (lambda store: rename_in_meta(store, "labels", "lobels"), "names lobels, which no graph has"),
    "forgotten": (
        lambda store: edit_meta(store, sha256=without(store, "val.npy")),
        "holds val.npy, of which meta.json",
    ),
    "half": (lambda store: np.save(store / "values_t.npy", np.ones(8, np.float32)), "holds values_t.npy"),
    "short split": (lambda store: np.save(store / "val.npy", np.zeros((1, 4), bool)), "different graphs"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_shows_without_verify(tmp_path: Path, case: str) -> None:
    damage, message = DAMAGE[case]
    write_store(small_graph(), tmp_path / "store")
    damage(tmp_path / "store")
    with pytest.raises(StoreError, match=message):
        open_store(tmp_path / "store")


@pytest.mark.parametrize("name", sorted(graph_arrays(small_graph())))
def test_one_flipped_bit_is_found(tmp_path: Path, name: str) -> None:
    """Fails if a bit of a small file flips unseen, whether the store is opened or verified."""
    write_store(small_graph(), tmp_path / "store")
    flip(tmp_path / "store", f"{name}.npy")
    for verify, words in ((True, "has SHA-256"), (False, "is damaged")):
        with pytest.raises(StoreError, match=rf"{name}\.npy {words}"):
            open_store(tmp_path / "store", verify=verify)


def test_every_byte_of_meta_json_is_checked(tmp_path: Path) -> None:
    """Fails if a byte of meta.json can change and the store opens as something else."""
    write_store(directed(), tmp_path / "store")
    path, sound = tmp_path / "store" / "meta.json", open_store(tmp_path / "store")
    content = path.read_bytes()
    mark = content.index(b"meta_sha256")
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        if place in range(
            mark, mark + len("meta_sha256")
        ):  # without its name the digest is gone, all else is as it was
            assert_same(open_store(tmp_path / "store"), sound)
            continue
        with pytest.raises(StoreError):
            open_store(tmp_path / "store")


def make_foreign(store: Path) -> None:
    edit_meta(store, format_version=None, sha256=None, symmetric=None, num_classes=None)


@pytest.mark.parametrize("indptr", [np.zeros((6, 1), np.int64), np.zeros(0, np.int64), np.zeros(6, np.float64)])
def test_odd_row_pointers_are_refused(tmp_path: Path, indptr: np.ndarray) -> None:
    write_store(small_graph(), tmp_path / "store")
    np.save(tmp_path / "store" / "indptr.npy", indptr)
    with pytest.raises(GraphError, match="indptr"):
        open_store(tmp_path / "store")


FOREIGN: dict[str, tuple[str, np.ndarray, str]] = {
    "asymmetric": ("indices", np.array([1, 2, 0, 2, 0, 1, 3, 4], np.int32), "counts as symmetric"),
    "out of range": ("indices", np.array([1, 2, 0, 2, 0, 1, 9, 2], np.int32), "row 2 holds column 9"),
    "bad indptr": ("indptr", np.array([0, 4, 2, 7, 8, 8]), "must not decrease"),
    "NaN": ("features", np.full((5, 2), np.nan, np.float32), "NaN"),
    "bad label": ("labels", np.array([0, 1, -3, 0, 0]), "vertex 2 has -3"),
    "ids": ("train", np.array([0, 7]), "vertex ids"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_foreign_folders_are_checked_in_full(tmp_path: Path, case: str) -> None:
    name, array, message = FOREIGN[case]
    write_store(small_graph(), tmp_path / "store")
    make_foreign(tmp_path / "store")
    assert_same(open_store(tmp_path / "store"), small_graph())
    np.save(tmp_path / "store" / f"{name}.npy", array)
    with pytest.raises(GraphError, match=message):
        open_store(tmp_path / "store")


def test_foreign_split_may_be_a_list_of_ids(tmp_path: Path) -> None:
    write_store(small_graph(), tmp_path / "store")
    make_foreign(tmp_path / "store")
    np.save(tmp_path / "store" / "train.npy", np.array([1, 0]))
    assert_same(open_store(tmp_path / "store"), small_graph())


@pytest.mark.parametrize("name", ["missing", "file", "folder"])
def test_no_store_says_what_a_store_is(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    assert not is_store(tmp_path / name)
    with pytest.raises(StoreError, match=r"indptr\.npy.*mggcn prepare"):
        open_store(tmp_path / name)


def test_existing_paths_are_left_alone(tmp_path: Path) -> None:
    store = tmp_path / "store"
    write_store(small_graph(), store)
    with pytest.raises(StoreError, match="exists already"):
        write_store(directed(), store)
    write_store(directed(), store, overwrite=True)
    assert_same(open_store(store, verify=True), directed())
    write_store(open_store(store), store, overwrite=True)
    assert_same(open_store(store, verify=True), directed())
    (store / "thesis.tex").write_text("three years")
    with pytest.raises(StoreError, match="not a graph store"):
        write_store(small_graph(), store, overwrite=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="not a graph store"):
        write_store(small_graph(), tmp_path / "file", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "store"]


def test_malformed_graph_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(GraphError):
        write_store(replace(small_graph(), labels=ArrayRows(np.full(5, 9))), tmp_path / "store")
    assert not list(tmp_path.iterdir())


OPERATIONS = ["posix_fallocate", "fsync", "rename", "open"]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_failure_at_any_step_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    """Makes the n-th call fail for each n: the old store survives whole, no temporary folder stays."""
    store, real = tmp_path / "store", getattr(os, operation)
    write_store(small_graph(), store)
    for failing in range(1000):
        calls = 0

        def fail(*args: object, failing: int = failing, **kwargs: object) -> object:
            nonlocal calls
            calls += 1
            if calls == failing + 1:
                raise OSError(28, "No space left on device")
            return real(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(os, operation, fail)
            if operation == "rename":
                patch.setattr(durable, "exchange", lambda *_: False)
            try:
                write_store(directed(), store, overwrite=True)
                break
            except StoreError as error:
                message = str(error)
        assert "No space left" in message
        assert "free some space" in message
        assert [path.name for path in tmp_path.iterdir()] == ["store"]
        assert open_store(store, verify=True).num_edges in (6, 8)
    assert failing >= 1
    assert_same(open_store(store, verify=True), directed())


def test_interrupt_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_store(small_graph(), tmp_path / "store")
    assert not list(tmp_path.iterdir())


def test_unwritable_parent(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot write"):
        write_store(small_graph(), tmp_path / "file" / "store")


def test_moved_store_opens(tmp_path: Path) -> None:
    write_store(small_graph(), tmp_path / "store")
    shutil.move(tmp_path / "store", tmp_path / "moved")
    assert_same(open_store(tmp_path / "moved", verify=True), small_graph())


def test_store_folder_is_given_for_the_unchanged_graph_alone(tmp_path: Path) -> None:
    """Fails if ranks that open the folder would train on anything but this graph."""
    assert store_folder(small_graph()) is None
    write_store(small_graph(), tmp_path / "store")
    graph = open_store(tmp_path / "store")
    assert store_folder(graph) == tmp_path / "store"
    for changed in [
        replace(graph, splits={**graph.splits, "train": graph.splits["val"]}),
        replace(graph, splits={"train": graph.splits["train"]}),
        replace(graph, labels=None),
        replace(graph, labels=ArrayRows(np.zeros(5, np.int64))),
        replace(graph, num_classes=4),
    ]:
        assert store_folder(changed) is None


@pytest.mark.parametrize(
    ("ids", "refused"),
    [
        (np.array([30, 10, 20], np.int32), ""),
        (np.array(["b", "a", "ü"]), ""),
        (np.array([2**62, 5, -1], np.int64), ""),
        (np.array([1, 1, 2]), "1 repeats"),
        (np.array([0.5, 1, 2]), "strings or whole numbers"),
        (np.array([1, 2]), "belong to different graphs"),
    ],
)
def test_ids_of_a_folder_that_mggcn_did_not_write(tmp_path: Path, ids: Any, refused: str) -> None:
    """Fails if ids.npy of a plain folder is passed over, or taken unchecked."""
    (tmp_path / "meta.json").write_text("{}")
    arrays = {"indptr": np.array([0, 1, 2, 2]), "indices": np.array([1, 0], np.int32), "ids": ids}
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    if refused:
        with pytest.raises((GraphError, StoreError), match=refused):
            open_store(tmp_path)
        return
    graph = open_store(tmp_path)
    assert graph.ids is not None
    assert graph.ids.read(0, 3).tolist() == ids.tolist()
