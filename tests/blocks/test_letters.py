"""Letters: arrays in words, and how many words they take."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mggcn.blocks.letters import AnswerPlan, Letter, num_stages, packed, request_words, row_request_words


@pytest.mark.parametrize("sizes", [(0,), (1, 0, 3), (4, 7, 2), (9, 1, 1)])
def test_what_is_read_is_what_was_written(sizes: tuple[int, ...]) -> None:
    """Fails if an array is cut, moved or filled up with something else than zeros."""
    rng = np.random.default_rng(sum(sizes))
    types: list[Any] = [np.int32, np.float64, np.uint8]
    arrays = [rng.integers(0, 200, size).astype(kind) for size, kind in zip(sizes, types, strict=False)]
    words = packed(*arrays)
    letter = Letter(words)
    for array, kind in zip(arrays, types, strict=False):
        found = letter.take(kind, array.size)
        assert found.dtype == kind
        np.testing.assert_array_equal(found, array)
    assert words.nbytes == sum(-(-array.nbytes // 8) * 8 for array in arrays)
    assert words.view(np.uint8).sum() == sum(array.view(np.uint8).sum(dtype=np.int64) for array in arrays)


@pytest.mark.parametrize("told", [{}, {"degrees": True}, {"value_bytes": 4}, {"value_bytes": 8, "type_bytes": 2}])
@pytest.mark.parametrize(("vertices", "edges"), [(0, 0), (1, 0), (3, 7), (4, 8)])
def test_words_are_those_of_the_letters(told: dict[str, Any], vertices: int, edges: int) -> None:
    """Fails if a plan counts other words than letters have, one by one or many at a time."""
    plan = AnswerPlan(**told)
    parts = [np.zeros(vertices, np.int32), np.zeros(edges, np.int32)]
    parts += [np.zeros(vertices, np.int32)] * plan.degrees
    parts += [np.zeros(edges, f"{kind}{of}") for kind, of in (("f", plan.value_bytes), ("u", plan.type_bytes)) if of]
    assert plan.words(vertices, edges) == packed(*parts).size
    assert plan.words(np.array([vertices, 5]), np.array([edges, 9])).tolist() == [
        plan.words(vertices, edges),
        plan.words(5, 9),
    ]
    assert plan.held_bytes(vertices, edges) == 8 * (1 + vertices) + packed(*parts).nbytes
    counts = np.zeros(3, np.int32)
    assert request_words(3, vertices) == packed(np.concatenate([counts, parts[0]])).size
    number = np.zeros(1, np.int32)
    assert row_request_words(7, vertices) == packed(np.zeros(7), np.concatenate([number, parts[0]])).size


def test_letters_of_a_batch() -> None:
    """Fails if a batch is said to take other letters than ids and edges a hop, and ids and rows."""
    assert [num_stages(hops) for hops in (1, 2, 3)] == [4, 6, 8]
