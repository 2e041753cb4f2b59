"""Features of any vertices, in every type, from dense and sparse sources: as the reader's own path gives them."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from mggcn.blocks.block import RowSet
from mggcn.blocks.sampler import BatchTooLargeError
from mggcn.blocks.sparse_rows import SparseRowsPlan
from mggcn.errors import GraphError
from mggcn.feed import gather
from mggcn.feed.features import VertexFeatures
from mggcn.feed.gather import GatheredRows, GatheredSparse
from mggcn.graph.csr import CSR, ArrayRows
from mggcn.memory.arena import BufferSpec
from mggcn.partition.rows.tiles import Tile
from mggcn.train.runtime import DTYPES
from tests.backend.cases import BATTERY, Case
from tests.graphs import csr, make_graph, pattern
from tests.reference import dense_features


def reader_of(*, sparse: bool, normalised: bool, values: bool = True) -> VertexFeatures:
    graph = make_graph(
        pattern("directed", 40, 1), num_features=11, num_classes=3, sparse=sparse, weighted=False, seed=1
    )
    if isinstance(graph.features, CSR) and not values:
        graph = dataclasses.replace(graph, features=dataclasses.replace(graph.features, values=None))
    return VertexFeatures(graph, normalised)


@pytest.mark.parametrize("dtype", ["fp32", "fp64", "bf16"])
@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("source", ["dense", "sparse", "ones"])
@pytest.mark.parametrize("planned", [True, False])
def test_rows_are_those_of_the_vertices(
    source: str, normalised: bool, dtype: str, planned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a row is another vertex's, an earlier call's entries stay, a row is divided by another sum, or memory that
    is not planned is given twice.
    """
    reader = reader_of(sparse=source != "dense", normalised=normalised, values=source != "ones")
    monkeypatch.setattr(gather, "THREAD_BYTES", 100)  # so that 3 threads gather the longer ones
    memory = GatheredRows(reader, BufferSpec("", 12, 11, dtype) if planned else None, DTYPES[dtype], threads=3)
    exact: Any = dense_features(reader.graph).astype(np.float64)
    if normalised:
        sums = np.abs(exact).sum(1, keepdims=True)
        exact = exact / np.where(sums == 0, 1, sums)
    earlier = memory.gather(np.arange(12))
    kept = earlier.clone()
    for ids in (np.array([5, 3, 3, 39, 0]), np.arange(12), np.zeros(0, np.int64)):
        found = memory.gather(ids.astype(np.int64))
        assert found.dtype == DTYPES[dtype]
        assert tuple(found.shape) == (ids.size, 11)
        tolerance = {"fp32": 1e-6, "fp64": 1e-6, "bf16": 1e-2}[dtype]
        torch.testing.assert_close(found.double(), torch.from_numpy(exact[ids]), rtol=tolerance, atol=tolerance)
        if not normalised and dtype != "bf16":
            assert (found.double().numpy() == exact[ids]).all()
        assert planned or (found.is_contiguous() and torch.equal(earlier, kept))


def test_a_column_that_is_none_is_refused() -> None:
    """Fails if a damaged store makes the gather write outside of a row."""
    reader = reader_of(sparse=True, normalised=False)
    features = reader.graph.features
    assert isinstance(features, CSR)
    for column in (11, -1):
        indices = features.indices.array().copy()
        indices[0] = column
        damaged = dataclasses.replace(features, indices=ArrayRows(indices))
        odd = dataclasses.replace(reader, graph=dataclasses.replace(reader.graph, features=damaged))
        memory = GatheredRows(odd, BufferSpec("", 40, 11, "fp32"), torch.float32)
        with pytest.raises(GraphError, match=f"11 columns, entry 0 is in column {column}"):
            memory.gather(np.arange(40))


INPUT, TARGETS = RowSet("input"), RowSet("targets")
WAYS: dict[str, dict[str, bool]] = {
    "plain": {},
    "ones": {"ones": True},
    "normalised": {"normalised": True},
    "normalised ones": {"normalised": True, "ones": True},
    "scaled": {"scaled": True},
    "everything": {"normalised": True, "scaled": True, "dropped": True},
}


def reader_of_matrix(matrix: Any, *, normalised: bool = False, ones: bool = False) -> VertexFeatures:
    """A reader of a graph whose features are a given matrix."""
    graph = dataclasses.replace(reader_of(sparse=True, normalised=False).graph, features=csr(matrix, not ones))
    return VertexFeatures(graph, normalised)


def plan_of(rows: tuple[int, int], nonzeros: tuple[int, int], cols: int, real: str, **of: bool) -> SparseRowsPlan:
    """Room for so many rows and nonzeros of the input and of targets."""
    sizes = ((INPUT, rows[0], nonzeros[0]), (TARGETS, rows[1], nonzeros[1]))
    return SparseRowsPlan(sizes=sizes, cols=cols, real=real, **{"dropped": False, "scaled": False} | of)


def dense_of(tile: Tile, cols: int) -> Any:
    return sp.csr_array((tile.values, tile.indices, tile.indptr), (tile.indptr.size - 1, cols)).toarray()


@pytest.mark.parametrize("case", BATTERY, ids=lambda case: case.name)
@pytest.mark.parametrize("real", ["float32", "float64"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.covering(2)
def test_sparse_rows_and_their_transposes(case: Case, real: str, way: str) -> None:
    """Fails if a row is another vertex's, is divided or scaled by another's number, an entry of a transpose is out of order
    or another one's, or anything is written behind an end.
    """
    of = WAYS[way]
    normalised, ones, scaled = (of.get(name, False) for name in ("normalised", "ones", "scaled"))
    matrix = sp.csr_matrix(case.adj.astype(np.float32))
    count, cols = matrix.shape
    rng = np.random.default_rng(60821)
    exact = matrix.toarray().astype(np.float64)
    exact = (exact != 0).astype(np.float64) if ones else exact
    if normalised:
        sums = np.abs(exact).sum(1, keepdims=True)
        exact = exact / np.where(sums == 0, 1, sums)
    lengths, spare = np.diff(matrix.indptr), 3
    for size in (count, max(count // 2, 0), min(count, 1)):
        ids = rng.permutation(count)[:size].astype(np.int64)
        targets = ids[: size // 3]
        nonzeros = tuple(int(lengths[some].sum()) + spare for some in (ids, targets))
        plan = plan_of((count, count), nonzeros, cols, real, scaled=scaled, dropped=of.get("dropped", False))
        memory = GatheredSparse(reader_of_matrix(matrix, normalised=normalised, ones=ones), plan)
        for array in memory._arrays.values():
            array.fill(77)
        scale = rng.random(size).astype(real)
        found = memory.gather({INPUT: ids, TARGETS: targets}, scale)
        for number, (name, some) in enumerate(((INPUT, ids), (TARGETS, targets))):
            features = found[name]
            wanted = exact[some] * (scale[: some.size, None] if scaled else 1)
            rtol = 1e-6 if real == "float32" else 1e-14
            assert features.rows.values is not None
            assert features.rows_t.values is not None
            assert features.rows.values.dtype == features.rows_t.values.dtype == np.dtype(real)
            np.testing.assert_allclose(dense_of(features.rows, cols), wanted, rtol=rtol)
            np.testing.assert_array_equal(dense_of(features.rows_t, some.size), dense_of(features.rows, cols).T)
            assert features.rows_t.indptr.size == cols + 1
            for start, stop in itertools.pairwise(features.rows_t.indptr):
                assert (np.diff(features.rows_t.indices[start:stop]) > 0).all()
            assert (features.order is not None) == plan.dropped
            if features.order is not None:
                np.testing.assert_array_equal(features.rows.values[features.order], features.rows_t.values)
            assert features.rows.nnz == nonzeros[number] - spare
            for array in (memory._arrays[f"{what}_t{number}"] for what in ("indices", "values")):
                assert (array[-spare:] == 77).all()
        assert (memory._arrays["indices"][-spare:] == 77).all()
        assert (memory._arrays["values"][-spare:] == 77).all()
        assert sum(array.nbytes for array in memory._arrays.values()) == plan.nbytes


@pytest.mark.parametrize(("left_out", "ends"), [((0, 0), False), ((1, 0), True), ((0, 1), True)])
def test_more_nonzeros_than_planned_are_refused(left_out: tuple[int, int], ends: bool) -> None:
    """Fails if a batch is written behind the end of its memory, or refused though it fits exactly."""
    matrix = sp.random(40, 11, 0.3, "csr", random_state=np.random.default_rng(5), dtype=np.float32)
    ids = np.arange(40)
    nonzeros = int(matrix.nnz) - left_out[0], int(matrix.indptr[15]) - left_out[1]
    memory = GatheredSparse(reader_of_matrix(matrix), plan_of((40, 15), nonzeros, 11, "float32"))
    if not ends:
        assert memory.gather({INPUT: ids, TARGETS: ids[:15]}, None)[INPUT].rows.nnz == matrix.nnz
        return
    with pytest.raises(BatchTooLargeError, match=f"the {nonzeros[bool(left_out[1])]} nonzeros of features that were"):
        memory.gather({INPUT: ids, TARGETS: ids[:15]}, None)


@pytest.mark.parametrize("column", [11, -1])
def test_a_column_that_is_none_is_refused_in_sparse_rows(column: int) -> None:
    """Fails if a damaged store makes a transpose write outside of its memory."""
    reader = reader_of(sparse=True, normalised=False)
    features = reader.graph.features
    assert isinstance(features, CSR)
    indices = features.indices.array().copy()
    indices[7] = column
    damaged = dataclasses.replace(features, indices=ArrayRows(indices))
    odd = dataclasses.replace(reader, graph=dataclasses.replace(reader.graph, features=damaged))
    memory = GatheredSparse(odd, plan_of((40, 40), (features.nnz, features.nnz), 11, "float32"))
    with pytest.raises(GraphError, match=f"11 columns, entry 7 is in column {column}"):
        memory.gather({INPUT: np.arange(40), TARGETS: np.arange(40)}, None)


@pytest.mark.parametrize("room", [1, 1000])
def test_a_row_longer_than_the_columns_is_refused_in_sparse_rows(room: int) -> None:
    """Fails if a damaged row is taken for a batch that is too large, whose halves would be tried, or is gathered."""
    indptr, indices = np.array([0, 2, 2, 6, 7]), np.array([0, 2, 0, 1, 1, 2, 1], np.int32)
    matrix = CSR(ArrayRows(indptr), ArrayRows(indices), None, 3)
    reader = reader_of(sparse=True, normalised=False)
    odd = dataclasses.replace(reader, graph=dataclasses.replace(reader.graph, features=matrix))
    memory = GatheredSparse(odd, plan_of((3, 3), (2 + room, 2 + room), 3, "float32"))
    ids = np.array([0, 2, 3])
    with pytest.raises(
        GraphError, match="the features of vertex 2 have 4 entries in 3 columns, so that a column is there"
    ):
        memory.gather({INPUT: ids, TARGETS: ids}, None)
    assert memory.gather({INPUT: ids[:1], TARGETS: ids[:1]}, None)[INPUT].rows.nnz == 2


@pytest.mark.parametrize("pointer", [-3, 10**9])
def test_pointers_that_do_not_ascend_are_refused_in_sparse_rows(pointer: int) -> None:
    """Fails if a damaged store makes the gather read outside of the features."""
    reader = reader_of(sparse=True, normalised=False)
    features = reader.graph.features
    assert isinstance(features, CSR)
    indptr = features.indptr.array().copy()
    indptr[9] = pointer
    damaged = dataclasses.replace(features, indptr=ArrayRows(indptr))
    odd = dataclasses.replace(reader, graph=dataclasses.replace(reader.graph, features=damaged))
    memory = GatheredSparse(odd, plan_of((40, 40), (features.nnz, features.nnz), 11, "float32"))
    with pytest.raises(GraphError, match=r"row pointers of the features of vertex [89] must ascend .* damaged"):
        memory.gather({INPUT: np.arange(40), TARGETS: np.arange(40)}, None)


def test_a_plan_of_sparse_rows_refuses_dense_features() -> None:
    """Fails if a run that goes on over a store with dense features reads them as sparse ones."""
    with pytest.raises(GraphError, match="planned with sparse features, and the graph's are dense"):
        GatheredSparse(reader_of(sparse=False, normalised=False), plan_of((1, 1), (1, 1), 11, "float32"))
