"""Folders of OGB's node-property data sets, written here in both layouts."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mggcn.api.load import load_source
from mggcn.cli.entry import main
from mggcn.errors import GraphError
from mggcn.graph.csr import Graph
from mggcn.graph.options import GraphOptions
from mggcn.graph.sources.ogb import is_ogb

N = 9
EDGES = np.array([[0, 1, 2, 5, 8, 3], [1, 2, 0, 3, 0, 3]])
LABELS = np.array([[0], [1], [2], [1], [0], [2], [1], [0], [2]])
FEATURES = np.random.default_rng(4).standard_normal((N, 3)).astype(np.float32)
SPLIT = {"train": [4, 0, 7], "valid": [1, 2], "test": [8, 3]}


def write_table(path: Path, table: np.ndarray | list[int]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = np.asarray(table).reshape(len(table), -1)
    with gzip.open(path, "wt") as file:
        file.writelines(",".join(map(repr, row.tolist())) + "\n" for row in rows)


def text_layout(folder: Path) -> None:
    write_table(folder / "raw" / "edge.csv.gz", EDGES.T)
    write_table(folder / "raw" / "node-feat.csv.gz", FEATURES)
    write_table(folder / "raw" / "node-label.csv.gz", LABELS)
    write_table(folder / "raw" / "num-node-list.csv.gz", [N])
    write_table(folder / "raw" / "num-edge-list.csv.gz", [EDGES.shape[1]])
    write_table(folder / "raw" / "node_year.csv.gz", [2015] * N)


def binary_layout(folder: Path) -> None:
    (folder / "raw").mkdir(parents=True)
    counts = {"num_nodes_list": np.array([N]), "num_edges_list": np.array([EDGES.shape[1]])}
    years = np.full((N, 1), 2015)
    np.savez(folder / "raw" / "data.npz", edge_index=EDGES, node_feat=FEATURES, node_year=years, **counts)
    labels = LABELS.astype(np.float32)
    labels[6] = np.nan  # most of ogbn-papers100M has no label
    np.savez(folder / "raw" / "node-label.npz", node_label=labels)


LAYOUTS: dict[str, Callable[[Path], None]] = {"text": text_layout, "binary": binary_layout}


@pytest.fixture(params=LAYOUTS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "ogbn_small"
    LAYOUTS[request.param](path)
    for name, ids in SPLIT.items():
        write_table(path / "split" / "time" / f"{name}.csv.gz", ids)
    return path


def pairs(graph: Graph) -> set[tuple[int, int]]:
    indptr, indices = graph.adj.indptr.array(), graph.adj.indices.array()
    return set(zip(np.repeat(np.arange(N), np.diff(indptr)).tolist(), indices.tolist(), strict=True))


def test_both_layouts_are_read(folder: Path) -> None:
    """Fails if an edge turns round, a feature or label moves to another vertex, or validation is no split any more."""
    graph = load_source(folder)
    assert graph.name == "ogbn_small"
    assert pairs(graph) == set(map(tuple, EDGES.T.tolist()))
    assert graph.features is not None
    assert graph.labels is not None
    assert np.array_equal(graph.features.read(0, N), FEATURES)  # type: ignore[union-attr]
    expected = LABELS[:, 0].copy()
    expected[6] = -1 if (folder / "raw" / "data.npz").exists() else expected[6]
    assert np.array_equal(graph.labels.read(0, N), expected)
    for name, ids in SPLIT.items():
        mask = graph.splits["val" if name == "valid" else name].read(0, 1)[0]
        assert np.flatnonzero(mask).tolist() == sorted(ids)


def test_edges_of_one_direction_are_symmetrised(folder: Path) -> None:
    """Fails if options do not reach a folder."""
    graph = load_source(folder, options=GraphOptions(symmetrize=True))
    assert pairs(graph) == set(map(tuple, EDGES.T.tolist())) | set(map(tuple, EDGES[::-1].T.tolist()))


def test_the_command_line_leads_to_a_store(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if training on a folder is refused without the command that helps, or that command does not help."""
    assert main(["train", str(folder)]) == 2
    command = capsys.readouterr().err.split("make one from it with: mggcn ")[1].split()
    store = str(tmp_path / "store")
    assert main([store if word == "STORE" else word for word in command]) == 0
    assert main(["train", store, "--epochs", "2", "--threads", "1", "--out", str(tmp_path / "run")]) == 0
    assert "accuracy" in capsys.readouterr().out


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def recount(folder: Path, edges: int | list[int] | None) -> None:
    """Change the count of edges, or leave it out."""
    archive, text = folder / "raw" / "data.npz", folder / "raw" / "num-edge-list.csv.gz"
    if archive.exists():
        arrays = dict(np.load(archive))
        del arrays["num_edges_list"]
        np.savez(archive, **arrays, **({} if edges is None else {"num_edges_list": np.atleast_1d(edges)}))
    elif edges is None:
        text.unlink()
    else:
        write_table(text, np.atleast_1d(edges))


def test_labels_of_a_folder_as_numbers(folder: Path) -> None:
    """Fails if a task does not reach the labels of a folder."""
    graph = load_source(folder, task="numbers")
    assert (graph.task, graph.labels.shape if graph.labels else None) == ("numbers", (N, 1))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (lambda folder: cut(folder / "split" / "time" / "train.csv.gz"), "cannot read .*train.csv.gz"),
    "no split": (lambda folder: (folder / "split" / "time").rename(folder / "elsewhere"), "must hold one folder"),
    "two splits": (lambda folder: (folder / "split" / "other").mkdir(), "got other, time"),
    "words": (lambda folder: write_table(folder / "split" / "time" / "test.csv.gz", np.array(["a"])), "cannot read"),
    "two columns": (lambda folder: write_table(folder / "split" / "time" / "test.csv.gz", EDGES.T), "1 columns, got 2"),
    "an id too far": (lambda folder: write_table(folder / "split" / "time" / "test.csv.gz", [N]), "vertex ids in"),
    "fewer edges": (lambda folder: recount(folder, 7), "lists 6 edges, and its count of edges .* says 7"),
    "more edges": (lambda folder: recount(folder, 5), "lists 6 edges, and its count of edges .* says 5"),
    "no count": (lambda folder: recount(folder, None), "num-edge-list.csv.gz|num_edges_list"),
    "two counts": (lambda folder: recount(folder, [3, 3]), "graphs, expected one"),
    "kinds": (lambda folder: write_table(folder / "raw" / "triplet-type-list.csv.gz", [1]), "several kinds"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_what_is_wrong_is_named(folder: Path, case: str) -> None:
    damage, message = DAMAGE[case]
    damage(folder)
    assert is_ogb(folder)
    with pytest.raises(GraphError, match=message):
        load_source(folder)


def test_archives_that_lack_something() -> None:
    """Fails if a store is taken for a folder of OGB's."""
    assert not is_ogb(Path(__file__).parent)


@pytest.mark.parametrize("name", ["data.npz", "node-label.npz"])
@pytest.mark.parametrize("damage", ["cut", "keys", "pickled", "several"])
def test_damaged_archives(tmp_path: Path, name: str, damage: str) -> None:
    """Fails if half an archive is read, one is unpickled, or the first of several graphs is taken for all."""
    binary_layout(tmp_path)
    for part, ids in SPLIT.items():
        write_table(tmp_path / "split" / "time" / f"{part}.csv.gz", ids)
    path = tmp_path / "raw" / name
    arrays = dict(np.load(path))
    if damage == "cut":
        cut(path)
    elif damage == "keys":
        np.savez(path, other=np.zeros(3))
    elif damage == "pickled":
        np.savez(path, **{key: np.array([{}]) for key in arrays})
    else:
        np.savez(
            tmp_path / "raw" / "data.npz", **(dict(np.load(tmp_path / "raw" / "data.npz")) | {"num_nodes_list": [4, 5]})
        )
    with pytest.raises(GraphError, match=r"cannot read|expected the key|holds 2 graphs"):
        load_source(tmp_path)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (["0,arxiv cs na", "1,arxiv cs lg", "2,b"], ("arxiv cs na", "arxiv cs lg", "b")),
        (["2,x", '0,"Home, Kitchen"', "1,x"], ("Home, Kitchen", "x (1)", "x")),
        (["0,a", "1,", "2,c", "3,d"], ("a", "class 1", "c", "d")),
        (["0,a\x1b[2J", "1,b", "2," + "c" * 300], ("a\\x1b[2J", "b", "c" * 180)),
        (["0,a", "1,b"], ()),  # the labels have three classes
        (["0,a", "2,b", "3,c"], ()),
    ],
)
def test_the_mapping_names_classes(rows: list[str], expected: tuple[str, ...], folder: Path) -> None:
    """Fails if a name of the mapping goes to another class, or a mapping of other classes is taken."""
    (folder / "mapping").mkdir()
    with gzip.open(folder / "mapping" / "labelidx2category.csv.gz", "wt") as file:
        file.write("\n".join(["label idx,category", *rows, ""]))
    graph = load_source(folder)
    assert graph.class_names == expected
    assert graph.num_classes == max(3, len(expected))


@pytest.mark.parametrize(
    "content",
    [
        b"label idx,category\n0,a\n",
        gzip.compress(b"label idx,category\n0,\xff\n"),
        gzip.compress(b"label idx,category\n" + b"a" * (1 << 18)),
        gzip.compress(b"label idx,category\n" * (1 << 17)),
    ],
    ids=["not packed", "no text", "one long field", "large"],
)
def test_a_damaged_mapping_is_named(content: bytes, folder: Path) -> None:
    """Fails if a mapping that is no packed text of names ends in a traceback, or in names."""
    (folder / "mapping").mkdir()
    (folder / "mapping" / "labelidx2category.csv.gz").write_bytes(content)
    with pytest.raises(GraphError, match=r"labelidx2category.csv.gz.*again"):
        load_source(folder)
