"""A rank's features: dense blocks, sparse rows, their transpose, and A_hat X."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import scipy.sparse as sp

from mggcn.config import ModelConfig
from mggcn.feed import features as features_module
from mggcn.feed.features import FeatureReader, aggregated, transposed
from mggcn.graph.csr import CSR, Graph
from mggcn.partition import sweep as sweep_module
from mggcn.partition.order import assign
from mggcn.partition.rows.tiles import Tile, degrees, scales
from tests.graphs import csr, make_graph, pattern
from tests.reference import dense_features, normalized


def graph_with(sparse: bool, kind: str = "directed") -> Graph:
    """Vertices 2, 3 and the last have no features."""
    weighted = kind == "weighted"
    graph = make_graph(pattern(kind, 31, 4), num_features=9, num_classes=3, sparse=sparse, weighted=weighted, seed=5)
    if sparse:
        x = dense_features(graph)
        x[[2, 3, 30]] = 0
        graph = dataclasses.replace(graph, features=csr(x.astype(np.float32), True))
    return graph


def dense_of(tile: Tile, cols: int) -> np.ndarray:
    return sp.csr_matrix((tile.values, tile.indices, tile.indptr), (tile.indptr.size - 1, cols)).toarray()


def expected_rows(graph: Graph, ids: np.ndarray, row_normalize: bool) -> np.ndarray:
    x = dense_features(graph)[ids]
    sums = np.abs(x).sum(1, keepdims=True)
    return x / np.where(sums > 0, sums, 1) if row_normalize else x


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("row_normalize", [False, True])
def test_rows_go_to_their_owner(sparse: bool, row_normalize: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a block's rows are misplaced, read twice, an empty row divides by zero, or order permute mixes them up."""
    monkeypatch.setattr(features_module, "BLOCK_BYTES", 5 * 9 * 4)
    monkeypatch.setattr(sweep_module.sweep, "__defaults__", (17, 8))
    graph = graph_with(sparse)
    for order, ranks in itertools.product(("random", "permute", "none"), (1, 3)):
        owners = assign(31, ranks, order, 8)
        for rank in range(ranks):
            ids = owners.owned(rank)
            reader = FeatureReader(graph, owners, rank, row_normalize)
            got = np.full((ids.size, 9), np.nan)
            for local, block in reader.dense():
                assert block.dtype == np.float32
                assert np.isnan(got[local]).all()
                got[local] = block
            np.testing.assert_allclose(got, expected_rows(graph, ids, row_normalize), rtol=1e-6, atol=1e-7)
            if sparse:
                scale = np.random.default_rng(rank).random(ids.size)
                tile = reader.sparse(np.float64, scale)
                required = expected_rows(graph, ids, row_normalize) * scale[:, None]
                np.testing.assert_allclose(dense_of(tile, 9), required, rtol=1e-12)
                assert tile.nnz == np.count_nonzero(required)


def test_features_without_any_entry() -> None:
    """Fails if sparse features without entries, or a rank without rows, break the row sums."""
    graph = dataclasses.replace(graph_with(True), features=csr(np.zeros((31, 9), np.float32), True))
    for ranks in (1, 40):
        owners = assign(31, ranks, "random", 3)
        for rank in (0, ranks - 1):
            tile = FeatureReader(graph, owners, rank, True).sparse(np.float32, None)
            assert (tile.nnz, tile.indptr.size) == (0, owners.counts[rank] + 1)


def test_transpose_knows_where_its_entries_come_from() -> None:
    """Fails if the values of the two orders go apart when they are rewritten."""
    graph = graph_with(True)
    tile = FeatureReader(graph, assign(31, 2, "permute", 8), 1, False).sparse(np.float32, None)
    turned, position = transposed(tile, 9)
    rows = tile.indptr.size - 1
    assert np.array_equal(dense_of(turned, rows), dense_of(tile, 9).T)
    assert np.array_equal(turned.values, tile.values[position])  # type: ignore[index]
    assert position.dtype == turned.indices.dtype == np.int32
    assert turned.indptr.dtype == np.int64


@pytest.mark.parametrize("kind", ["random", "directed", "weighted", "empty"])
@pytest.mark.parametrize("loops", [False, True])
def test_aggregated_equals_dense(kind: str, loops: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if A_hat X misses a neighbour, a self-loop or a scale, or belongs to other rows."""
    monkeypatch.setattr(sweep_module.sweep, "__defaults__", (17, 8))
    graph = graph_with(True, kind)
    assert isinstance(graph.features, CSR)
    whole = assign(31, 1, "none", 1)
    for norm, order, rank in itertools.product(("mean", "symmetric"), ("random", "permute"), (0, 2)):
        owners = assign(31, 3, order, 8)
        ids = owners.owned(rank)
        row, col = scales(degrees(graph.adj_t, whole, 0, self_loops=loops, threads=1), norm)
        reader = FeatureReader(graph, owners, rank, False)
        tile = aggregated(reader, (row[ids], col), self_loops=loops, dtype=np.float64)
        expected = normalized(graph, ModelConfig(norm=norm, self_loops=loops)) @ dense_features(graph)  # type: ignore[arg-type]
        np.testing.assert_allclose(dense_of(tile, 9), expected[ids], rtol=1e-6, atol=1e-9)
