"""Edge cuts: local ids in the original order, and figures against the definitions on dense matrices."""

from __future__ import annotations

import numpy as np
import pytest

from mggcn.partition.metis.edge_cut import by_owner, edge_cut
from mggcn.partition.order import assign
from tests.partition.cut.test_libra import KINDS, dense_of, graph_of


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 70])
def test_local_ids_keep_the_original_order(ranks: int) -> None:
    """Fails if a row is lost, a part's rows are out of order, or the type of an array differs from other orders'."""
    for num_vertices in (0, 1, 41, 500):
        expected = assign(num_vertices, ranks, "random", 8117)
        got = by_owner(expected.owner_of(slice(None)), ranks)
        assert got.counts == expected.counts
        assert np.array_equal(got.local, expected.local_of(slice(None)))
        assert (got.owner.dtype, got.local.dtype) == (np.uint16, np.int32)
        assert all(np.array_equal(got.owned(rank), np.flatnonzero(got.owner == rank)) for rank in range(ranks))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parts", [1, 2, 5, 70])
def test_figures(kind: str, parts: int) -> None:
    """Fails if a cut edge, a nonzero or a halo row is counted twice, left out, or of the wrong direction."""
    stored = dense_of(kind) != 0
    n = stored.shape[0]
    graph = graph_of(dense_of(kind))
    owner = np.random.default_rng(parts + 60).integers(0, parts, n).astype(np.uint16)
    s = edge_cut(graph, owner, parts).statistics
    edges = stored & ~np.eye(n, dtype=bool)
    apart = owner[:, None] != owner[None]
    once = 2 if graph.symmetric else 1
    assert (s.num_edges, s.num_cut) == (edges.sum() // once, (edges & apart).sum() // once)
    assert s.cut_share == (s.num_cut / s.num_edges if s.num_edges else 0)
    assert s.rows_per_part == tuple(np.bincount(owner, minlength=parts))
    work = (stored | np.eye(n, dtype=bool)).sum(0)
    work = work if graph.symmetric else work + (stored | np.eye(n, dtype=bool)).sum(1)
    assert s.nonzeros_per_part == tuple(np.bincount(owner, work, parts))
    for part in range(parts):
        mine = owner == part
        assert s.halo_per_part[part] == (edges[:, mine].any(1) & ~mine).sum()
        assert s.halo_t_per_part[part] == (edges[mine].any(0) & ~mine).sum()
    assert s.halo_share == sum(s.halo_per_part) / n
    assert s.nonzero_balance == pytest.approx(max(s.nonzeros_per_part) * parts / sum(s.nonzeros_per_part))
    assert s.row_balance == pytest.approx(max(s.rows_per_part) * parts / n)
