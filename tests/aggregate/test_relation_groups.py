"""Relations that share launches: which, in which rows, and what an epoch launches."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from mggcn.aggregate import relations
from mggcn.aggregate.relations import upload_tile
from mggcn.backend.base import Sparse
from mggcn.backend.cpu.backend import CpuBackend
from mggcn.graph.convert import from_arrays
from mggcn.graph.csr import Graph
from mggcn.partition.rows.tiles import Tile
from tests.backend.emulated import emulated_backend
from tests.emulator.launches import CountingDevice
from tests.train.test_launches import epoch_nodes

VERTICES = 90


def tile_of(num_relations: int, edges: int) -> Tile:
    """A tile with edges of random relations, relation 0 at every vertex."""
    rng = np.random.default_rng(29)
    targets = np.sort(np.append(np.arange(VERTICES), rng.integers(0, VERTICES, edges)))
    types = rng.integers(1, num_relations, targets.size).astype(np.uint8)
    types[np.flatnonzero(np.diff(targets, prepend=-1))] = 0
    indptr = np.searchsorted(targets, np.arange(VERTICES + 1)).astype(np.int64)
    values = rng.random(targets.size).astype(np.float32)
    return Tile(indptr, rng.integers(0, VERTICES, targets.size).astype(np.int32), values, types)


def dense(matrix: Sparse, num_relations: int) -> np.ndarray:
    """The entries by relation, (R, V, V)."""
    found = np.zeros((num_relations, VERTICES, VERTICES))
    for part in matrix.relations:
        of = part.matrix
        assert of.values is not None
        for relation, first, last in part.spans:
            for place in range(first, last):
                entries = slice(int(of.indptr[place]), int(of.indptr[place + 1]))
                np.add.at(
                    found[relation, int(part.rows[place])], of.indices[entries].numpy(), of.values[entries].numpy()
                )
    return found


@pytest.mark.parametrize("block_rows", [1 << 14, 70])
def test_groups_hold_every_entry(block_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if an entry is lost or counts for another relation or row, or a group has no room or a relation twice."""
    monkeypatch.setattr(relations, "BLOCK_ROWS", block_rows)
    monkeypatch.setattr(relations, "GROUPED_ROWS", 60)
    alone, together = (
        upload_tile(backend, tile_of(13, 300))
        for backend in (CpuBackend(torch.float32, 1), emulated_backend(torch.float32, 0))
    )
    assert np.array_equal(dense(alone, 13), dense(together, 13))
    assert all(part.group is None and len(part.spans) == 1 for part in alone.relations)
    assert any(part.group is not None for part in together.relations)
    for part in together.relations:
        names = [relation for relation, _, _ in part.spans]
        assert len(set(names)) == len(names)
        assert part.rows.shape[0] <= min(VERTICES, block_rows)
        assert part.group is None or part.group.longest <= 60
    assert (0 not in (name for part in together.relations if part.group for name, _, _ in part.spans)) == (
        block_rows > VERTICES
    )


def typed(num_relations: int) -> Graph:
    """A graph with one edge from each vertex, of one of many relations."""
    rng, n = np.random.default_rng(3), 200
    return from_arrays(
        edges=np.stack([np.arange(n), rng.permutation(n)]),
        edge_types=np.arange(n) % num_relations,
        num_relations=num_relations,
        num_vertices=n,
        features=rng.normal(size=(n, 5)).astype(np.float32),
        labels=rng.integers(0, 3, n),
        splits={"train": np.ones(n, bool)},
    )


def test_launches_do_not_grow_with_relations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if relations of few rows have launches of their own: three forwards, five backwards, three where rows need no
    gradient.
    """

    def nodes(count: int) -> Counter[str]:
        model = {"kind": "rgcn", "hidden": (6,), "bases": 2}
        return epoch_nodes(typed(count), CountingDevice(3), "fp32", {}, **model)

    few, many = nodes(4), nodes(40)
    assert few == many
    assert (many["relation_products"], many["relation_gradients"], many["scatter_add_chains"]) == (3, 2, 3)
    monkeypatch.setattr(relations, "GROUPED_ROWS", 0)
    apart = nodes(40)
    # Of two layers: two sums and one gradient of rows; 40 products, sums, and weights' gradients (two nodes) for each.
    assert apart["scatter_add_rows"] == 3 * 40
    assert apart.total() - many.total() > 11 * 39
