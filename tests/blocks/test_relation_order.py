"""Edges by relation in planned memory: those of a stable sort by type, part by part."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from mggcn.blocks.relation_order import RelationOrder, RelationPlan


def parts_of(indptr: Any, indices: Any, values: Any, types: Any, block_rows: int) -> list[Any]:
    """Relation, rows, row pointers, indices and values of each part, from the definition alone."""
    found = []
    targets = np.repeat(np.arange(indptr.size - 1), np.diff(indptr))
    for relation in np.unique(types):
        mine = np.flatnonzero(types == relation)
        rows = np.unique(targets[mine])
        for first in range(0, rows.size, block_rows):
            some = rows[first : first + block_rows]
            entries = mine[np.isin(targets[mine], some)]
            counts = [(targets[entries] == row).sum() for row in some]
            pointers = np.append(0, np.cumsum(counts))
            found.append((relation, some, pointers, indices[entries], None if values is None else values[entries]))
    return found


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("real", [np.float32, np.float64])
def test_parts_are_those_of_a_stable_sort(real: Any, dtype: Any) -> None:
    """Fails if an edge is lost or in another relation, row or place, or a part has other row pointers."""
    rng = np.random.default_rng(6)
    for relations, rows, block_rows in itertools.product((1, 3, 250), (0, 1, 40), (1, 7, 100)):
        plan = RelationPlan(edges=300, relations=relations, block_rows=block_rows, real=real)
        order = RelationOrder(plan, dtype)
        assert plan.nbytes == sum(array.nbytes for array in order._arrays.values())
        for degree, valued in ((0, True), (7, True), (7, False)):
            indptr = np.append(0, np.cumsum(rng.integers(0, degree + 1, rows))).astype(np.int64)
            count = int(indptr[-1])
            types, indices = rng.integers(0, relations, count), rng.integers(0, 99, count).astype(np.int32)
            values = rng.random(count).astype(real) if valued else None
            order.types[:count] = types
            found, wanted = order.of(indptr, indices, values), parts_of(indptr, indices, values, types, block_rows)
            assert len(found) == len(wanted)
            for part, expected in zip(found, wanted, strict=True):
                both: list[Any] = [*zip(part, expected, strict=True)]
                assert all(one is other or np.array_equal(one, other) for one, other in both)
