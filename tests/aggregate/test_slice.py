"""How feature slices deal columns and share two buffers. Their sums are held by test_contract.py."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mggcn.aggregate.base import Matrix
from mggcn.aggregate.slice import UNIT_BYTES, Deal, SlicePlan, SliceStrategy
from mggcn.config import RunConfig
from mggcn.errors import GraphError
from mggcn.partition.parts import RowFigures
from mggcn.plan.memory import ALIGNMENT, ITEM_BYTES
from mggcn.plan.steps import Await, Copy, Multiply, Send
from tests.aggregate.test_contract import aggregate, graph_of, summed
from tests.devices import WHERE, Where
from tests.reference import dense_csr


@pytest.mark.parametrize("dtype", ["fp32", "fp64", "bf16"])
def test_every_column_is_dealt_once(dtype: str) -> None:
    """Fails if a column is lost or comes twice, a slice is uneven by two units, or starts where no vector load may."""
    item = ITEM_BYTES[dtype]
    for cols, ranks in itertools.product((1, 2, 3, 4, 5, 11, 16, 41, 128, 130), (2, 3, 5, 8)):
        deal = Deal.of(cols, ranks, item)
        slices = deal.slices()
        assert [column for part in slices for column in range(part.start, part.stop)] == list(range(cols))
        assert max(deal.units) - min(deal.units) <= 1
        assert sum(deal.units) == -(-cols * item // UNIT_BYTES)
        assert all(part.start * item % UNIT_BYTES == 0 for part in slices if part.stop > part.start)
        assert all(part.stop - part.start <= units * deal.unit for part, units in zip(slices, deal.units, strict=True))
        each = [(sum(deal.units), units, c.stop - c.start) for units, c in zip(deal.units, slices, strict=True)]
        assert [Deal.part(cols, ranks, item, rank) for rank in range(ranks)] == each


def test_a_narrower_width_fits_the_slots_of_a_wider_one() -> None:
    """Fails if the last panel of set-up, which is narrower than the others, needs more than was planned for them."""
    for ranks, item in itertools.product((2, 3, 5, 7), (2, 4, 8)):
        before = (0,) * ranks
        for cols in range(1, 200):
            units = Deal.of(cols, ranks, item).units
            assert all(a <= b for a, b in zip(before, units, strict=True))
            before = units


def test_a_plan_by_hand() -> None:
    """Fails if the plan forgets that every rank holds the whole matrix, or a byte of what travels or is held."""
    plans = [SlicePlan(rank, (7, 5, 6), 100, True) for rank in range(3)]
    assert [plan.matrices for plan in plans] == [(Matrix(18, 100),)] * 3
    assert plans[0].matrices_t == ()
    assert SlicePlan(0, (7, 5, 6), 100, False).matrices_t == (Matrix(18, 100),)
    # 17 columns of float32 are 5 units: ranks have 2, 2 and 1 of them, and 8, 8 and 1 columns.
    for plan, rows, units, width in zip(plans, (7, 5, 6), (2, 2, 1), (8, 8, 1), strict=True):
        away, here = 16 * rows * (5 - units), 16 * (18 - rows) * units
        steps = (Copy(rows, 17), Send("all_to_all", away, here), Await(0), Multiply(18, 18, 100, width))
        assert plan.steps(17, "fp32", False) == (*steps, Send("all_to_all", here, away), Await(1), Copy(rows, 17))
        held = 16 * max(rows * (5 - units), 18 * units)
        assert [b.nbytes for b in plan.buffers("x", 17, "fp32")] == [-(-held // ALIGNMENT) * ALIGNMENT] * 2
        assert all(b.cols == b.ld for b in plan.buffers("x", 17, "fp32"))
    # One unit: only rank 0 multiplies.
    assert [any(isinstance(s, Multiply) for s in plan.steps(3, "fp32", True)) for plan in plans] == [True, False, False]
    alone = SlicePlan(0, (18,), 100, True)
    assert alone.steps(17, "fp32", False) == (Multiply(18, 18, 100, 17),)
    assert alone.buffers("x", 17, "fp32") == ()


def test_more_nonzeros_than_a_matrix_may_have() -> None:
    """Fails if a matrix that cannot be addressed is planned, or more ranks are advised, which would not help."""
    figures = RowFigures.expected(10**8, 3 * 10**9, 8, self_loops=True)
    with pytest.raises(GraphError, match=r"nonzeros exceed the limit .*; choose halo or broadcast"):
        SliceStrategy().plan(RunConfig(ranks=8), figures, 0, True, True)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(("ranks", "cols"), [(5, 1), (5, 2), (5, 3), (7, 11), (3, 6), (2, 17)])
def test_fewer_units_than_ranks(where: Where, ranks: int, cols: int) -> None:
    """Fails if a rank without columns skips a message or multiplies, or a last unit that is not full spoils a column."""
    graph = graph_of("directed", 23)
    rng = np.random.default_rng(cols)
    h, g, bias = rng.normal(size=(23, cols)), rng.normal(size=(23, cols)), rng.normal(size=cols)
    adj = dense_csr(graph.adj)
    np.fill_diagonal(adj, 1.0)
    results = aggregate("slice", graph, ranks, "permute", h, g, bias, where)
    forward, backward = summed(results, 23)
    np.testing.assert_allclose(forward, adj.T @ h + bias, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(backward, adj @ g, rtol=1e-12, atol=1e-12)
    assert all(result.sent == result.planned for result in results)


def test_any_row_stride_is_read() -> None:
    """Fails if rows that lie apart in a wider tensor than planned for are taken for padded ones."""
    graph = graph_of("weighted", 37)
    rng = np.random.default_rng(8)
    h, g, bias = rng.normal(size=(37, 11)), rng.normal(size=(37, 11)), rng.normal(size=11)
    adj = dense_csr(graph.adj)
    np.fill_diagonal(adj, np.where(np.diagonal(adj) == 0, 1.0, np.diagonal(adj)))
    forward, backward = summed(aggregate("slice", graph, 3, "random", h, g, bias, source_cols=50), 37)
    np.testing.assert_allclose(forward, adj.T @ h + bias, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(backward, adj @ g, rtol=1e-12, atol=1e-12)
