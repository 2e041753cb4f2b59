"""Numbers drawn by name on the host: Philox4x32-10, as cpu/philox.h has it (Salmon et al., SC'11).

A draw depends on its key and counter alone, so that neither ranks, threads nor the order of draws change it. Streams
are told apart by the first number of a counter: dropout and the sampler have those below 0xC0000000, behind which begin
negatives of training links (feed/pairs.py), at 0xD0000000 pushed rows (feed/history.py), at 0xE0000000 fixed negatives
(graph/links.py), and at 0xF0000000 starts of learned rows (train/learned.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

CACHED = 8192
"""Counters at a time, whose words stay in the cache: a third of the time of half a million (NumPy 2.4, Xeon)."""
_KEYS = 0x9E3779B9, 0xBB67AE85
_FACTORS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
Words = npt.NDArray[np.uint64]


def philox(key: tuple[int, int], counter: Words) -> Words:
    """Return four words of 32 bits for each counter; numbers of key and counter are below 2^32, too.

    Shapes: counter (4, n), result alike. Cost: some 80 passes over n numbers.
    """
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(10):
        p0, p1 = _FACTORS[0] * c0, _FACTORS[1] * c2
        c0, c2 = (p1 >> _HALF) ^ c1 ^ np.uint64(k0), (p0 >> _HALF) ^ c3 ^ np.uint64(k1)
        c1, c3 = p1 & _LOW, p0 & _LOW
        k0, k1 = (k0 + _KEYS[0]) & 0xFFFFFFFF, (k1 + _KEYS[1]) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3])


def draw_below(
    bound: int | npt.NDArray[np.int64],
    key: tuple[int, int],
    items: npt.NDArray[Any],
    count: int,
    *,
    stream: int,
    salt: int = 0,
) -> npt.NDArray[np.int64]:
    """Return `count` uniform whole numbers in [0, bound) for each item, (n, count): draw j of item e has a name of its own.

    Counter: (stream + j // 2, e low, e high, salt), of which streams are apart. bound: at most 2^31, one for all or (n,).
    Numbers are the high part of 64 random bits times bound.
    """
    blocks, drawn = -(-count // 2), np.empty((items.size, count), np.int64)
    bounds = np.broadcast_to(np.asarray(bound, np.uint64), items.shape)
    step = max(1, CACHED // blocks)
    for start in range(0, items.size, step):
        some = items[start : start + step].astype(np.uint64)
        e = np.repeat(some, blocks)
        number = np.tile(np.arange(blocks, dtype=np.uint64), some.size) + np.uint64(stream)
        words = philox(key, np.stack([number, e & _LOW, e >> _HALF, np.full(e.size, salt, np.uint64)]))
        high, low = words.T.reshape(-1, 2).T
        times = np.repeat(bounds[start : start + step], 2 * blocks)
        below = (high * times + (low * times >> _HALF)) >> _HALF
        drawn[start : start + step] = below.reshape(some.size, 2 * blocks)[:, :count]
    return drawn
