from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mggcn
from mggcn.graph import csr, facts
from mggcn.graph.convert import from_arrays
from mggcn.graph.facts import GraphFacts, describe
from mggcn.graph.options import GraphOptions
from mggcn.graph.store import open_store
from mggcn.graph.store_write import write_store
from tests.graph.small import small_graph

PLAIN: dict[str, Any] = {"edges": np.array([[0, 1, 2], [1, 2, 0]])}


def test_nothing_is_said_about_a_plain_graph() -> None:
    """Fails if a remark comes up without a reason."""
    found = describe(from_arrays(**PLAIN, labels=[0, 1, -1], features=np.ones((3, 1))))
    assert found == GraphFacts(summary="3 vertices, 3 stored edges, directed, 1 feature, 2 classes, splits none")
    assert str(found) == found.summary


@pytest.mark.parametrize("window", [1, 2, 1 << 20])
def test_facts_against_a_dense_count(monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    """Fails if a window's border loses or repeats a vertex, an edge, a weight or a class."""
    monkeypatch.setattr(facts, "WINDOW", window)
    monkeypatch.setattr(csr.windows, "__defaults__", (window,))
    rng = np.random.default_rng(8117)
    dense = np.where(rng.random((23, 23)) < 0.04, rng.standard_normal((23, 23)), 0)
    dense[0] = dense[:, 0] = 0
    dense[7, 7] = dense[22, 22] = 1.5
    labels = np.where(rng.random(23) < 0.3, -1, rng.choice([1, 4, 6], 23))
    found = describe(from_arrays(edges=np.stack(np.nonzero(dense)), weights=dense[dense != 0], num_vertices=23))
    alone = ~(dense != 0).any(0) & ~(dense != 0).any(1)
    assert found.num_isolated == alone.sum() > 1
    assert found.first_isolated
    assert not describe(from_arrays(edges=np.array([[0], [1]]), num_vertices=23)).first_isolated
    assert found.num_self_loops == np.count_nonzero(np.diag(dense))
    assert found.weights == (dense[dense != 0].astype(np.float32).min(), dense.astype(np.float32).max())
    labelled = describe(from_arrays(**PLAIN, num_vertices=23, labels=labels, num_classes=9))
    assert labelled.empty_classes == tuple(sorted(set(range(9)) - set(labels.tolist())))


def test_remarks_say_what_to_do(tmp_path: Path) -> None:
    """Fails if ids or labels from 1, repeats, self-loops or negative weights pass without a word, or in a store only."""
    edges = np.array([[1, 1, 2, 2, 3], [2, 2, 1, 2, 1]])
    graph = from_arrays(edges=edges, weights=[1, 1, 1, -2, 4], labels=[1, 1, 2, 3])
    said = [
        "1 repeated edge merged into the first of its kind",
        "weights from -2 to 4: normalisation refuses vertices whose in-edges sum to less than 0",
        "1 self-loop stored",
        "1 vertex without any edge",
        "vertex 0 has no edge: if ids start at 1, subtract 1, as row 0 of features and labels is its own",
        "1 class without a vertex: 0; if labels start at 1, subtract 1",
    ]
    assert describe(graph).remarks() == said
    write_store(graph, tmp_path / "store")
    assert str(mggcn.describe(mggcn.load(tmp_path / "store"))).splitlines()[1:] == said
    mirrored = from_arrays(edges=edges[:, :3], options=GraphOptions(symmetrize=True))
    summed = from_arrays(edges=edges[:, :3], options=GraphOptions(duplicates="sum"))
    assert describe(summed).remarks()[0] == "1 repeated edge added to the weight of its kind"
    assert describe(mirrored).remarks()[0] == "2 repeated or reversed edges merged into the first of its kind"
    many = describe(from_arrays(**PLAIN, labels=[0, 0, 0], num_classes=9)).remarks()
    assert many[0] == "8 classes without a vertex: 1, 2, 3, 4, 5, ..."


def test_a_strange_meta_does_no_harm(tmp_path: Path) -> None:
    """Fails if what somebody else wrote into meta.json, or a huge number of classes, breaks the description."""
    for told in ("text", {"header": 5, "num_merged": "many"}, None):
        assert describe(replace(small_graph(), meta={"input": told})).header == ""
    assert describe(replace(small_graph(), num_classes=10**15)).empty_classes == ()


def test_repr_is_one_line_that_reads_nothing(tmp_path: Path) -> None:
    """Fails if the repr of a graph prints arrays, or reads files that are gone."""
    write_store(small_graph(), tmp_path / "store")
    graph = open_store(tmp_path / "store")
    for file in (tmp_path / "store").iterdir():
        file.unlink()
    shown = "5 vertices, 8 stored edges, symmetric, 2 features, 3 classes, splits train, val, test"
    assert repr(graph) == f"<Graph small: {shown}>"
    assert "directed, weighted, no features, 0 classes" in repr(from_arrays(**PLAIN, weights=[1, 2, 3]))


@pytest.mark.parametrize(
    ("labels", "task", "words"),
    [
        ([0.0, 1.0, 2.0], None, ["whole floating-point numbers", "task='numbers' (--task numbers)"]),
        ([0.0, np.nan, 1.0], None, ["whole floating-point numbers"]),
        ([0, 0, 0], None, ["all labelled vertices are of the same class"]),
        ([1, 1, -1], None, ["all labelled vertices are of the same class", "without a vertex: 0"]),
        (np.eye(3, dtype=int), None, ["one-hot", "numpy.argmax"]),
        (np.eye(3, dtype=bool), None, ["one-hot"]),
        (np.array([[1.0, 0], [0, 1], [0, 0]]), None, ["one-hot"]),
        (np.array([[1, 1], [0, 1], [0, 1]]), None, ["all known labels of 1 column are the same: 1"]),
        (np.array([[0.5, 2], [0.5, np.nan], [0.5, 1]]), None, ["all known labels of 1 column are the same: 0"]),
        (np.array([[1, 1], [0, 1], [0, 0]]), None, []),
        ([0, 1, 2], None, []),
        ([0.0, 1.0, 2.0], "classes", []),
        ([0.0, 1.0, 2.0], "numbers", []),
    ],
    ids=str,
)
def test_labels_that_may_mean_something_else(labels: Any, task: Any, words: list[str], tmp_path: Path) -> None:
    """Fails if labels that may be of another task, or have one value, get no note, or plain ones get one."""
    graph = from_arrays(**PLAIN, labels=labels, task=task)
    said = "\n".join(describe(graph).remarks())
    assert all(word in said for word in words)
    assert bool(said) == bool(words)
    write_store(graph, tmp_path / "store")
    assert "\n".join(describe(open_store(tmp_path / "store")).remarks()) == said


def test_classes_that_look_like_numbers_get_a_note() -> None:
    """Fails if counts of which nearly every vertex has its own pass as classes without a word, or 40 classes get one."""
    ring = np.stack([np.arange(100), np.roll(np.arange(100), 1)])
    draw = np.random.default_rng(7713)
    counts = from_arrays(edges=ring, labels=draw.permutation(100))
    assert "more classes than half of the labelled vertices" in str(describe(counts))
    assert "more classes" not in str(describe(from_arrays(edges=ring, labels=np.arange(100) % 40)))


def test_edges_of_weight_zero_are_counted() -> None:
    """Fails if an edge that sums do not see is stored without a word."""
    graph = from_arrays(**PLAIN, weights=[0.0, -0.0, 2.0])
    assert "2 edges of weight 0 are stored" in str(describe(graph))


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (("test", "val", "train"), "splits train, val, test"),
        (("val", "test"), "splits val, test"),
        (("alt_test", "test", "alt_train", "train"), "splits train, test, alt_train, alt_test"),
        ((), "splits none"),
    ],
)
def test_splits_have_one_order(names: tuple[str, ...], shown: str) -> None:
    """Fails if the order of a file or of the alphabet decides in which order splits are listed."""
    graph = small_graph()
    rows = next(iter(graph.splits.values()))
    assert replace(graph, splits=dict.fromkeys(names, rows)).summary().endswith(shown)
    several = replace(graph, splits=dict.fromkeys(names, np.repeat(rows, 3, axis=0))).summary()
    assert several.endswith(shown.replace("splits", "3 splits into") if names else shown)
