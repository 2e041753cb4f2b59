"""Features of any vertices, in every type, from dense and sparse sources: as the reader's own path gives them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from mggcn.errors import GraphError
from mggcn.feed import gather
from mggcn.feed.features import VertexFeatures
from mggcn.feed.gather import GatheredRows
from mggcn.graph.csr import CSR, ArrayRows
from mggcn.memory.arena import BufferSpec
from mggcn.train.runtime import DTYPES
from tests.graphs import make_graph, pattern
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
