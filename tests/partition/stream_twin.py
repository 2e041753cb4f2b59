"""The order `stream`, as its definition reads: a vertex after the other, every part scored."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def stream_twin(stored: Any, parts: int) -> list[int]:
    """Return the part of each vertex; stored bool (N, N): which entries A has."""
    n, symmetric = stored.shape[0], np.array_equal(stored, stored.T)
    both = [stored] if symmetric else [stored, stored.T]
    entries = [sum(int(matrix[v].sum()) for matrix in both) for v in range(n)]
    per_row = len(both)
    total = per_row * n + sum(entries)
    edges = sum(entries) / 2
    penalty = 1.5 * math.sqrt(parts) * edges / n**1.5
    load, owner = [0] * parts, list[int]()

    def score(v: int, p: int) -> tuple[float, int, int]:
        near = sum(int(matrix[v, u]) for matrix in both for u in range(v) if owner[u] == p)
        return near - penalty * math.sqrt(load[p] / (total / n)), -load[p], -p

    for v in range(n):
        weight = per_row + entries[v]
        least = load.index(min(load))
        room = [p for p in range(parts) if p == least or load[p] + weight <= total * 105 // (100 * parts)]
        best = max(room, key=lambda p: score(v, p))
        owner.append(best)
        load[best] += weight
    return owner
