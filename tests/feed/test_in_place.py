"""Files that batches read in place: rows of converted and joined files are taken one by one, never read whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mggcn.nn
from mggcn.config import Config, ModelConfig, RunConfig, SampleConfig, TrainConfig
from mggcn.graph.csr import Graph, Rows
from mggcn.graph.edges import ColumnOf, RowIds
from mggcn.graph.file_rows import FileRows
from mggcn.graph.join import JoinedRows
from mggcn.graph.vertex_data import MappedRows
from mggcn.planning.shape import graph_shape
from tests.feed.test_gather import reader_of
from tests.graphs import on_ranks, pattern
from tests.reference import dense_csr

N, D = 60, 5


def arrays(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "edges": np.argwhere(pattern("directed", N, seed)).T,
        "features": rng.normal(size=(N, D)),
        "labels": rng.integers(0, 3, N),
        "splits": {"train": np.arange(0, N, 2), "val": np.arange(1, N, 2)},
    }


def load(folder: Path, dtype: str, **options: Any) -> tuple[Graph, Graph]:
    """A graph with features in a file of this type, and the same in memory."""
    given = arrays(3)
    edges, features = given.pop("edges"), given.pop("features").astype(dtype)
    np.save(folder / "x.npy", features)
    np.savetxt(folder / "edges.txt", edges.T, "%d")
    return (
        mggcn.load(folder / "edges.txt", features=folder / "x.npy", **given, **options),
        mggcn.load(edges, features=features, **given, **options),
    )


def joined(folder: Path) -> tuple[Graph, Graph]:
    """Two stores as one graph, and the same from memory."""
    parts = []
    for seed in (3, 4):
        given = arrays(seed)
        parts.append(mggcn.load(given.pop("edges"), **given))
        mggcn.save(parts[-1], folder / str(seed))
    return mggcn.load([folder / "3", folder / "4"]), mggcn.load(parts)


SOURCES: dict[str, Callable[[Path], tuple[Graph, Graph]]] = {
    "float32": lambda folder: load(folder, "float32"),
    "float64": lambda folder: load(folder, "float64"),
    "normalised": lambda folder: load(folder, "float32", options=mggcn.GraphOptions(row_normalize=True)),
    "joined": joined,
}


@pytest.fixture
def maps(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were mapped; converted and joined dense rows are never read whole."""
    found, array = list[Path](), FileRows.array

    def noted(self: FileRows) -> Any:
        found.append(self.path)
        return array(self)

    def refused(rows: Any) -> Callable[[Any], Any]:
        whole = rows.array

        def array_of(self: Any) -> Any:
            assert len(self.shape) == 1, f"{self} is read whole"
            assert self.dtype != np.int64, f"{self} is read whole"
            return whole(self)

        return array_of

    monkeypatch.setattr(FileRows, "array", noted)
    for rows in (MappedRows, JoinedRows):
        monkeypatch.setattr(rows, "array", refused(rows))
    return found


def config() -> Config:
    sample, train = SampleConfig(batch=7, fanout=(3, 2)), TrainConfig(seed=5, epochs=2)
    return Config(
        model=ModelConfig(hidden=(6,)), train=train, sample=sample, run=RunConfig(threads=1, precision="fp64")
    )


@pytest.mark.parametrize("source", SOURCES)
def test_files_are_mapped_once_by_all_that_reads_batches(source: str, tmp_path: Path, maps: list[Path]) -> None:
    """Fails if a rank reads a file of features or labels whole, maps one for each step, or takes other rows from it."""
    graph, expected = SOURCES[source](tmp_path)
    losses = []
    for one in (graph, expected):
        maps.clear()
        losses.append(on_ranks(config(), one, lambda rank: [rank.trainer.step(epoch) for epoch in range(2)])[0])
        assert len(maps) == len(set(maps))
    assert losses[0] == losses[1]
    found = []
    for one in (graph, expected):
        maps.clear()
        loader = mggcn.nn.batches(one, "train", fanout=(3, 2), batch=7, precision="fp64")
        found.append([(batch.x, batch.y) for _ in range(2) for batch in loader])
        assert len(maps) == len(set(maps))
    assert all(bool((a == b).all()) for one, two in zip(*found, strict=True) for a, b in zip(one, two, strict=True))


def test_scores_of_some_vertices_map_files_once(tmp_path: Path, maps: list[Path]) -> None:
    """Fails if each call of predict maps features again, or a file is read whole for some of its rows."""
    graph, _ = SOURCES["float64"](tmp_path)
    trainer = mggcn.Trainer(graph, ModelConfig(hidden=(6,)), threads=1, epochs=1, precision="fp64")
    trainer.fit()
    everything = trainer.predict()
    for vertices in ([3, 50], [7], list(range(N))):
        maps.clear()
        np.testing.assert_allclose(trainer.predict(vertices=vertices), everything[vertices], rtol=1e-10, atol=1e-12)
        assert len(maps) == len(set(maps))


def test_matrices_of_joined_graphs_are_planned(tmp_path: Path) -> None:
    """Fails if the edges of joined stores, which no file holds as they are, are read outside of the plan."""
    graph, _ = joined(tmp_path)
    shape = graph_shape(graph, config())
    assert shape.copied_bytes == 4 * graph.num_edges
    assert graph_shape(SOURCES["float64"](tmp_path)[0], config()).copied_bytes == 0
    assert dense_csr(graph.adj_t.in_place()).sum() == graph.num_edges


def kinds(folder: Path) -> dict[str, Rows]:
    np.save(folder / "a.npy", np.random.default_rng(1).normal(size=(9, 3)))
    file = FileRows.open(folder / "a.npy")
    numbers = mggcn.load(np.array([[0, 1, 3, 3], [1, 3, 0, 2]])).adj
    return {
        "file": file,
        "mapped": MappedRows(file, lambda rows: (2 * rows).astype(np.float32)),
        "joined": JoinedRows((file, file.in_place(), file)),
        "added": JoinedRows((numbers.indices, numbers.indices), (0, 4)),
        "array": file.in_place(),
        "row ids": RowIds(numbers.indptr.array()),
        "column": ColumnOf(file, 1),
    }


@pytest.mark.parametrize("name", ["file", "mapped", "joined", "added", "array", "row ids", "column"])
def test_rows_by_number(name: str, tmp_path: Path) -> None:
    """Fails if rows by number are others than those of a range, in another type, or not the caller's to change."""
    rows = kinds(tmp_path)[name]
    whole = rows.read(0, rows.shape[0])
    ids = np.array([rows.shape[0] - 1, 0, 2, 2, rows.shape[0] // 2])
    for one in (rows, rows.in_place()):
        for some in (ids, ids[:0]):
            found = one.take(some)
            np.testing.assert_array_equal(found, whole[some])
            assert found.dtype == rows.dtype
            found[...] = 0
        np.testing.assert_array_equal(one.read(0, rows.shape[0]), whole)


def test_a_reader_of_files_takes_rows_of_every_type(tmp_path: Path) -> None:
    """Fails if features of a joined graph are gathered in another order than asked for."""
    reader = reader_of(sparse=False, normalised=True)
    ids = np.array([5, 1, 5])
    np.testing.assert_allclose(np.abs(reader.gather(ids)).sum(1), 1, rtol=1e-6)
