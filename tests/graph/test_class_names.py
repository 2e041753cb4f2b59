"""Names of classes from lists, files, labels and other libraries, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mggcn
from mggcn.cli.entry import main
from mggcn.errors import GraphError, StoreError
from mggcn.graph.class_names import read_class_names
from mggcn.graph.csr import Graph

EDGES = np.array([[0, 1, 2, 2], [1, 2, 0, 1]])


def load(**arrays: Any) -> Graph:
    return mggcn.load(EDGES, **arrays)


def labels_of(graph: Graph) -> list[Any]:
    assert graph.labels is not None
    found: list[Any] = graph.labels.array().tolist()
    return found


@pytest.mark.parametrize(
    ("labels", "names", "expected"),
    [
        (["b", "a", "b"], None, (("a", "b"), [1, 0, 1])),
        (["b", "a", ""], None, (("a", "b"), [1, 0, -1])),
        (["b", None, float("nan")], None, (("b",), [0, -1, -1])),
        (np.array(["10", "9", "10"]), None, (("10", "9"), [0, 1, 0])),
        (np.array(["ü", "x y", "ü"], object), ["ü", "x y", "z"], (("ü", "x y", "z"), [0, 1, 0])),
        (np.array([["b"], ["a"], ["b"]]), None, (("a", "b"), [1, 0, 1])),
        ([1, 0, -1], ["no", "yes"], (("no", "yes"), [1, 0, -1])),
        ([0, 0, 0], ("no", "yes"), (("no", "yes"), [0, 0, 0])),
        (np.array([[0, 1], [1, 1], [0, 0]]), np.array(["a", "b"]), (("a", "b"), [[0, 1], [1, 1], [0, 0]])),
        ([0, 1, 1], None, ((), [0, 1, 1])),
    ],
)
def test_names_belong_to_the_numbers(labels: Any, names: Any, expected: tuple[Any, Any]) -> None:
    """Fails if a name stands for another class, a missing label becomes a class, or a class without vertices is lost."""
    graph = load(labels=labels, class_names=names)
    assert (graph.class_names, labels_of(graph)) == expected
    assert graph.num_classes == (len(expected[0]) or 2)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"labels": [0, 1, 2], "class_names": ["a", "b"]}, "class_names has 2 names, but the labels have 3"),
        ({"labels": ["a", "b", "c"], "class_names": ["a", "b"]}, "labels name 'c', which class_names do not have"),
        ({"labels": ["a", "b", 3]}, "vertex 2 is int"),
        ({"labels": np.array(["a", 2.5, "b"], object)}, "vertex 1 is float"),
        ({"labels": ["a", "b", "a"], "task": "numbers"}, "the task is numbers"),
        ({"labels": [0, 1, 0], "class_names": ["a", "a"]}, "'a' stands for two classes"),
        ({"labels": [0, 1, 0], "class_names": ["a", " "]}, "number 1 is ' '"),
        ({"labels": [0, 1, 0], "class_names": ["a", "b\x1b[2J"]}, r"b\\x1b"),
        ({"labels": [0, 1, 0], "class_names": ["a", "b" * 201]}, "1 to 200 characters"),
        ({"labels": [0, 1, 0], "class_names": [0, 1]}, "number 0 is int"),
        ({"labels": [0, 1, 0], "class_names": {"a": 1, "b": 0}}, "got dict"),
        ({"labels": [0, 1, 0], "class_names": {"a", "b"}}, "got set"),
        ({"labels": np.zeros((3, 2), int), "class_names": ["a", "b", "c"]}, "have 2 classes or columns"),
    ],
)
def test_names_that_do_not_fit_are_refused(arrays: dict[str, Any], message: str) -> None:
    """Fails if names in an order that nobody gave, or of other classes, are taken."""
    with pytest.raises(GraphError, match=message):
        load(**arrays)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"a\nb c\n", ("a", "b c")),
        ("\ufeffa\r\nb\r\n\n".encode(), ("a", "b")),
        (b"a\n\nb\n", "number 1 is ''"),
        (b"a\n\xff\n", "no UTF-8 text"),
        (b"a\na\n", "stands for two"),
    ],
)
def test_files_of_names(content: bytes, expected: Any, tmp_path: Path) -> None:
    """Fails if a line moves to another class, or a damaged file ends in a traceback."""
    path = tmp_path / "names.txt"
    path.write_bytes(content)
    if isinstance(expected, tuple):
        assert read_class_names(path) == expected
    else:
        with pytest.raises(GraphError, match=expected):
            read_class_names(path)
    with pytest.raises(GraphError, match="cannot read"):
        read_class_names(tmp_path / "absent.txt")


def test_stores_keep_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a store, a copy of it or what looks at it loses names, or names change the graph's digest."""
    np.save(tmp_path / "y.npy", np.array(["red", "blue", "red", ""]))
    (tmp_path / "names.txt").write_text("blue\ngreen\nred\n")
    (tmp_path / "e.txt").write_text("0 1\n1 2\n2 3\n3 0\n")
    command = ["prepare", tmp_path / "e.txt", tmp_path / "s", "--labels", tmp_path / "y.npy"]
    assert main([*map(str, command), "--classes", str(tmp_path / "names.txt")]) == 0
    assert "1 class without a vertex: 1 (green)" in capsys.readouterr().out
    assert main(["store", "info", str(tmp_path / "s")]) == 0
    assert "named in the order of their numbers: blue, green, red\n" in capsys.readouterr().out
    graph = mggcn.load(tmp_path / "s")
    assert (graph.class_names, labels_of(graph)) == (("blue", "green", "red"), [2, 0, 2, -1])
    again = mggcn.save(mggcn.load(tmp_path / "s", class_names=["a", "b", "c"]), tmp_path / "t")
    assert again.class_names == ("a", "b", "c")
    assert again.meta["class_names"] == ["a", "b", "c"]
    with pytest.raises(GraphError, match="class_names has 2 names"):
        mggcn.load(tmp_path / "s", class_names=["a", "b"])


@pytest.mark.parametrize("names", [["a"], ["a", 2], "/dev/zero", {"a": 0, "b": 1}, ["a", "b\n"]])
def test_a_store_with_odd_names_is_refused(names: Any, tmp_path: Path) -> None:
    """Fails if meta.json that is not ours brings names of other classes, or has a file read."""
    mggcn.save(load(labels=[0, 1, 0]), tmp_path / "s")
    meta = json.loads((tmp_path / "s" / "meta.json").read_text())
    del meta["meta_sha256"]
    (tmp_path / "s" / "meta.json").write_text(json.dumps(meta | {"class_names": names}))
    with pytest.raises(StoreError, match="class_names"):
        mggcn.load(tmp_path / "s")


def test_joined_graphs_number_classes_alike() -> None:
    """Fails if one number stands for two names, or names are lost where all agree."""
    few, all_three, others = (
        load(labels=[0, 1, 0], class_names=["a", "b"]),
        load(labels=[0, 1, 2], class_names=["a", "b", "c"]),
        load(labels=[0, 1, 0], class_names=["b", "a"]),
    )
    assert mggcn.load([few, all_three]).class_names == ("a", "b", "c")
    assert mggcn.load([few, load(labels=[0, 1, 0])]).class_names == ("a", "b")
    assert mggcn.load([few, load(labels=[0, 1, 2])]).class_names == ()
    with pytest.raises(GraphError, match="class 0 is 'b' in graph 2 and 'a' in another"):
        mggcn.load([few, others])


def test_names_of_a_pyg_data() -> None:
    """Fails if the list of a Data is not read, or an attribute of another kind is."""
    data = {"edge_index": EDGES, "num_nodes": 3, "y": np.array([0, 1, 0])}
    assert mggcn.load(SimpleNamespace(**data, class_names=["a", "b"])).class_names == ("a", "b")
    assert mggcn.load(SimpleNamespace(**data, class_names="names.txt")).class_names == ()
    assert mggcn.load(SimpleNamespace(**data), class_names=["a", "b"]).class_names == ("a", "b")
