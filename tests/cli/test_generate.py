from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from mggcn.graph.store import open_store
from tests.cli.runs import refused, run_main


def test_bter_says_what_it_takes_and_repeats(
    community: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if a plan is not said before, a name under --root is not found, or another --memory changes a byte."""
    for place, memory in (("a", "1GiB"), ("b", "256MiB")):
        arguments = ("--like", community.name, "--root", community.parent, "--factor", 3, "--features", 5)
        assert run_main("generate", "bter", tmp_path / place / "g", *arguments, "--memory", memory) == 0
        said = capsys.readouterr()
        assert re.match(r"300 vertices, 4,\d{3} edges: planned peak memory .*pairing ends .*features", said.err)
        assert re.search(r"g: 300 vertices, [89],\d{3} stored edges, 5 features, 10 classes", said.out)
        assert [path.name for path in (tmp_path / place).iterdir()] == ["g"]
    files = [{file.name: file.read_bytes() for file in (tmp_path / place / "g").iterdir()} for place in "ab"]
    assert files[0] == files[1]


def test_bter_needs_a_graph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main("generate", "bter", tmp_path / "new") == 2
    assert "--like" in capsys.readouterr().err
    assert "there is no" in refused(capsys, "generate", "bter", tmp_path / "new", "--like", tmp_path / "none")
    assert run_main("generate", "rmat", tmp_path / "old", "--scale", 8, "--seed", 12) == 0
    command = ("generate", "bter", tmp_path / "old", "--like", "old", "--root", tmp_path, "--force")
    assert "itself, which would be lost" in refused(capsys, *command)


@pytest.mark.parametrize(
    ("options", "share"), [(("--train-by", "community"), 0.02), (("--train-by", "degree"), 0.08), ((), 0.08)]
)
def test_graphs_of_the_papers(tmp_path: Path, options: tuple[str, ...], share: float) -> None:
    """Fails if training vertices are others than those asked for."""
    sizes = ("--vertices", 2000, "--edges", 9000, "--classes", 40, "--features", 0)
    store = tmp_path / "g"
    assert run_main("generate", "community", store, *sizes, "--train", share, *options) == 0
    graph = open_store(store)
    train = np.flatnonzero(graph.splits["train"].array()[0])
    labels, degrees = graph.labels.array(), np.diff(graph.adj.indptr.array())  # type: ignore[union-attr]  # it has some
    assert train.size == share * 2000
    assert (set(labels[train].tolist()) <= {38, 39}) == ("community" in options)
    assert (degrees[train].min() >= np.sort(degrees)[-train.size]) == ("degree" in options)
    val = np.flatnonzero(graph.splits["val"].array()[0])
    assert len(set(labels[val].tolist())) > 20
    assert graph.num_features == 0


def test_relations_fall_as_zipf_says(tmp_path: Path) -> None:
    """Fails if edges keep both directions, or relations are as large as each other."""
    sizes = ("--vertices", 3000, "--edges", 20_000, "--relations", 133, "--features", 0)
    assert run_main("generate", "community", tmp_path / "g", *sizes) == 0
    graph = open_store(tmp_path / "g")
    assert (graph.num_relations, graph.num_edges, graph.symmetric) == (133, 20_000, False)
    counts = np.bincount(graph.adj.types.array(), minlength=133)  # type: ignore[union-attr]  # edges have types
    expected = 20_000 / np.arange(1, 134) / (1 / np.arange(1, 134)).sum()
    np.testing.assert_allclose(counts[:5], expected[:5], rtol=0.1)
