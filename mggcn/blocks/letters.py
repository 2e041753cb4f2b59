"""Letters: what ranks tell each other of a batch's edges and rows, in words of 8 bytes, and how many words that takes.

A letter is a run of arrays, each filled up to whole words, so that its bytes follow from counts alone. T vertices, E edges.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

WORD: Final = 8
Words = npt.NDArray[np.int64]
Array = npt.NDArray[Any]
ID_BYTES: Final = 4
"""Of an id, of a row's number of edges, and of its degree."""


def num_words(nbytes: Any) -> Any:
    """Return the words that so many bytes take; a number, or an array of them."""
    return -(-nbytes // WORD)


def packed(*arrays: Array) -> Words:
    """Return a letter with these arrays, one behind the other."""
    sizes = [int(num_words(array.nbytes)) for array in arrays]
    out, at = np.zeros(sum(sizes), np.int64), 0
    for array, size in zip(arrays, sizes, strict=True):
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        out[at : at + size].view(np.uint8)[: flat.size] = flat
        at += size
    return out


class Letter:
    """A letter that is read from its beginning."""

    def __init__(self, words: Words) -> None:
        self._words, self._at = words, 0

    def take(self, dtype: npt.DTypeLike, count: int) -> Array:
        """Return the next array, so many numbers of a type: a view."""
        nbytes = np.dtype(dtype).itemsize * count
        size = int(num_words(nbytes))
        part = self._words[self._at : self._at + size]
        self._at += size
        array: Array = part.view(np.uint8)[:nbytes].view(dtype)
        return array


def num_stages(hops: int) -> int:
    """Return the letters that follow each other until a batch is here: two a hop, and two for rows."""
    return 2 * hops + 2


def lead(stages: int, ahead: int) -> int:
    """Return how many messages before its batch is read a macrobatch begins; 0 where nothing is made beside the step.

    A letter takes three: it is announced, sent, and answered while the next one is under way.
    """
    return 3 * stages + 1 if ahead else 0


def request_words(steps: Any, ids: Any) -> Any:
    """Return the words of a request: how many vertices of each step, then all their ids."""
    return num_words(ID_BYTES * (steps + ids))


def row_request_words(counts: int, ids: Any) -> Any:
    """Return the words of a request for rows: so many counts of 8 bytes, the number of ids, and these."""
    return counts + num_words(ID_BYTES * (1 + ids))


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerPlan:
    """What the owner of vertices tells of the edges that it has drawn around them, beside their other ends.

    degrees: how many in-edges each vertex has, from which whoever asks finds what edges count. value_bytes: of what an edge
    counts, 0 where degrees say it, or nothing reads it; type_bytes: of its relation, 0 where nothing reads that.
    """

    degrees: bool = False
    value_bytes: int = 0
    type_bytes: int = 0

    def words(self, vertices: Any, edges: Any) -> Any:
        """Return the words of a step's part of an answer: numbers, or arrays of them."""
        rows, ids = num_words(ID_BYTES * vertices), num_words(ID_BYTES * edges)
        return (
            rows * (1 + self.degrees) + ids + num_words(self.value_bytes * edges) + num_words(self.type_bytes * edges)
        )

    def held_bytes(self, vertices: int, edges: int) -> int:
        """Return the bytes of a hop's drawn edges while a batch is on its way: pointers beside what came."""
        return WORD * (1 + vertices + int(self.words(vertices, edges)))
