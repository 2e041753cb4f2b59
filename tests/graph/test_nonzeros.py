"""Dense features with many zeros: counted, converted, trained on as if they had come sparse; features made from edges."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

import mggcn
from mggcn.assemble.plan import plan_graph, resolve
from mggcn.config import Config
from mggcn.config.files import with_named
from mggcn.errors import GraphError, GraphWarning
from mggcn.graph import nonzeros
from mggcn.graph.convert import from_arrays
from mggcn.graph.csr import CSR, ArrayRows, Graph, Rows
from mggcn.graph.facts import ONE_WAY, describe
from mggcn.graph.nonzeros import csr_if_sparse, features_nnz
from mggcn.graph.store import open_store
from mggcn.graph.vertex_data import csr_from_scipy
from tests.cli.runs import run_main
from tests.graph.small import dense

RING = np.stack([np.arange(40), np.roll(np.arange(40), 1)])


def random_rows(share: float, rows: int = 300, cols: int = 20) -> np.ndarray:
    rng = np.random.default_rng(6113)
    return np.where(rng.random((rows, cols)) < share, rng.standard_normal((rows, cols)), 0).astype(np.float32)


def made_dense(graph: Graph) -> Graph:
    """The same graph with its sparse features as dense rows, as an older store has them."""
    assert isinstance(graph.features, CSR)
    return replace(graph, features=ArrayRows(dense(graph.features).astype(np.float32)))


@pytest.mark.parametrize("window", [70, 1 << 20])
def test_counts_and_conversion(monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    """Fails if a block's border loses a nonzero, or `auto` converts what is not sparse."""
    monkeypatch.setattr(nonzeros, "WINDOW", window)
    few, many = random_rows(0.1), random_rows(0.5)
    few[[0, 17, 299]] = 0
    exact = int(np.count_nonzero(few))
    found = csr_if_sparse(ArrayRows(few))
    assert isinstance(found, CSR)
    assert found.nnz == exact == features_nnz(ArrayRows(few)) == features_nnz(ArrayRows(few), "sparse")
    assert np.array_equal(dense(found), few)
    expected = csr_from_scipy(sp.csr_array(few))
    assert np.array_equal(found.indices.array(), expected.indices.array())
    assert csr_if_sparse(ArrayRows(many)) == ArrayRows(many)
    assert features_nnz(ArrayRows(many)) is None
    assert features_nnz(ArrayRows(many), "sparse") == np.count_nonzero(many)
    assert features_nnz(ArrayRows(few), "dense") is None
    assert features_nnz(found, "dense") == exact


def test_a_sample_that_misleads_changes_nothing() -> None:
    """Fails if zeros where the sample looked make dense features sparse, or dense ones are read whole."""
    rows = np.ones((64 * 64, 4), np.float32)
    for start in np.linspace(0, rows.shape[0] - 16, 64).astype(np.int64):
        rows[start : start + 16] = 0
    assert features_nnz(ArrayRows(rows)) is None

    class Counted:
        def __init__(self, data: np.ndarray) -> None:
            self.data, self.shape, self.dtype, self.read_rows = data, data.shape, data.dtype, 0

        def read(self, start: int, stop: int) -> np.ndarray:
            self.read_rows += stop - start
            return self.data[start:stop].copy()

        def array(self) -> np.ndarray:
            return self.data

        copied = False

        def take(self, ids: np.ndarray) -> np.ndarray:
            rows: np.ndarray = self.data[ids]
            return rows

        def in_place(self) -> Counted:
            return self

    counted: Rows = Counted(np.ones((100_000, 4), np.float32))
    assert features_nnz(counted) is None
    assert counted.read_rows == 1024  # type: ignore[attr-defined]


def test_a_row_with_nan_is_named() -> None:
    """Fails if features that are not finite are converted, so that the message no longer names the vertex."""
    few = random_rows(0.05)
    few[7, 3] = np.nan
    with pytest.raises(GraphError, match=r"entry \(7, 3\) is NaN"):
        from_arrays(edges=RING, features=few)


def config_of(features: str = "auto") -> Config:
    return with_named(Config(), {"hidden": (16,), "epochs": 2, "threads": 1, "features": features})


@pytest.mark.parametrize("name", ["squirrel_filtered", pytest.param("coauthor_cs", marks=pytest.mark.full)])
def test_dense_sources_cost_what_sparse_ones_do(data_root: Path, name: str) -> None:
    """Fails if features with many zeros are planned dense because of how they were given, loaded or at run time."""
    graph = open_store(data_root / name)
    given = made_dense(graph)
    config = resolve(config_of(), graph)
    plan, as_dense = plan_graph(config, graph)[0], plan_graph(config, given)[0]
    assert as_dense.shape == plan.shape
    assert as_dense.largest.total_bytes == plan.largest.total_bytes
    loaded = from_arrays(edges=RING, num_vertices=graph.num_vertices, features=given.features.array())  # type: ignore[union-attr]
    assert isinstance(loaded.features, CSR)
    assert loaded.features.nnz == plan.shape.feature_nnz


@pytest.mark.parametrize("settings", [{}, {"input_dropout": 0.5}, {"ranks": 3, "transport": "threads"}])
def test_the_same_bits_however_features_are_given(data_root: Path, settings: dict[str, object]) -> None:
    """Fails if the nonzeros of dense rows come in another order, or to another rank, than those of a CSR."""
    graph = open_store(data_root / "cora")
    losses = [
        [row["loss"] for row in mggcn.Trainer(one, config=with_named(config_of("sparse"), settings)).fit()]
        for one in (graph, made_dense(graph))
    ]
    assert losses[0] == losses[1]


def test_sparse_by_setting() -> None:
    """Fails if run.features sparse is ignored for features with few zeros."""
    graph = from_arrays(
        edges=RING, features=random_rows(0.9, 40, 5), labels=np.arange(40) % 3, splits={"train": [0, 1]}
    )
    assert not isinstance(graph.features, CSR)
    assert mggcn.Trainer(graph, config=config_of("sparse")).plan.run.ranks[0].input.sparse
    assert not mggcn.Trainer(graph, config=config_of()).plan.run.ranks[0].input.sparse


def test_features_that_need_no_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if identity or degree features are others than their names say, or replace those that a graph has."""
    edges = np.array([[0, 0, 0, 3], [1, 2, 0, 1]])
    identity = mggcn.load(edges, features="identity", num_vertices=5)
    assert np.array_equal(dense(identity.features), np.eye(5))  # type: ignore[arg-type]
    degree = mggcn.load(mggcn.load(edges, num_vertices=5), features="degree").features
    expected = np.log1p([[1, 3], [2, 0], [1, 0], [0, 1], [0, 0]])
    np.testing.assert_allclose(degree.array(), expected, rtol=1e-6)  # type: ignore[union-attr]
    path, store = tmp_path / "edges.txt", tmp_path / "store"
    path.write_text("0 1\n1 2\n")
    assert run_main("prepare", path, store, "--symmetrize", "--features", "degree") == 0
    np.testing.assert_allclose(open_store(store).features.array(), np.log1p([[1], [2], [1]]), rtol=1e-6)  # type: ignore[union-attr]
    assert run_main("prepare", path, tmp_path / "bare") == 0
    assert run_main("prepare", tmp_path / "bare", tmp_path / "again", "--features", "identity") == 0
    assert "3 sparse features" in capsys.readouterr().out
    assert run_main("prepare", store, tmp_path / "more", "--features", "degree") == 2
    assert "has features, others cannot be added" in capsys.readouterr().err
    with pytest.raises(GraphError, match="identity, degree, got 'degrees'"):
        mggcn.load(edges, features="degrees")


def test_undirected_edges_listed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if undirected edges that were listed once pass without a word, or a reverse far behind is not found."""
    with pytest.warns(GraphWarning, match="no edge has its reverse"):
        graph = mggcn.load(RING)
    assert ONE_WAY in describe(graph).remarks()
    path = tmp_path / "ring.txt"
    path.write_text("\n".join(f"{u} {v}" for u, v in RING.T))
    assert run_main("prepare", path, tmp_path / "store") == 0
    assert f"note: {ONE_WAY}" in capsys.readouterr().out
    mggcn.load(tmp_path / "store")  # `prepare` has said it
    mggcn.load(RING, options=mggcn.GraphOptions(symmetrize=True))
    mggcn.load(np.concatenate([RING, [[38], [39]]], axis=1))
    mggcn.load(np.stack([RING[0][:5], RING[1][:5]]))
