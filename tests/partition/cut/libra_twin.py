"""Libra written plainly, edge by edge in Python: what cpu/libra.cpp and cpu/vertex_cut.cpp must give, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

WORD = 2**64


def hash64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) % WORD
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB % WORD
    return x ^ x >> 31


def stream(seed: int, number: int) -> int:
    return hash64((hash64(seed) + number) % WORD)


def shuffled(count: int, key: int) -> list[int]:
    """The words of the first power of two from `count` on, permuted; those from `count` on are left in."""
    bits = max(1, (count - 1).bit_length())
    order = []
    for word in range(2**bits):
        x = word
        for r in range(3):
            x = (x + stream(key, 2 * r)) % 2**bits
            x = (x ^ x >> (bits + 1) // 2) * (stream(key, 2 * r + 1) | 1) % 2**bits
        order.append(x ^ x >> (bits + 1) // 2)
    return order


@dataclass
class Twin:
    parts: list[set[int]]
    owner: list[int]
    edge_part: dict[tuple[int, int], int]
    load: list[int]
    isolated: int


def cut_edges(dense: Any, symmetric: bool) -> list[tuple[int, int]]:
    """Edges of the cut in stored order."""
    return [(int(u), int(v)) for u, v in np.argwhere(dense != 0) if (u < v if symmetric else u != v)]


def libra_twin(dense: Any, symmetric: bool, num_parts: int, seed: int, order: str, limit: float) -> Twin:
    """Deal the edges of a small dense adjacency."""
    n, edges = dense.shape[0], cut_edges(dense, symmetric)
    degree = [0] * n
    for u, v in edges:
        degree[u] += 1
        degree[v] += 1
    load = [0] * num_parts
    parts: list[set[int]] = [set() for _ in range(n)]
    placed: dict[tuple[int, int], int] = {}
    numbers = [k for k in shuffled(len(edges), stream(seed, 0)) if k < len(edges)] if order == "shuffled" else None
    for k in range(len(edges)) if numbers is None else numbers:
        u, v = edges[k]
        drawn = hash64((stream(seed, 1) + k) % WORD)
        opened = {p for p in range(num_parts) if load[p] < limit}
        a, b = parts[u] & opened, parts[v] & opened
        lower = a if degree[u] < degree[v] or (degree[u] == degree[v] and drawn >> 63) else b
        among = a & b or (lower if a and b else a | b) or opened
        p = min(among, key=lambda p: (load[p], p ^ drawn % 1024))
        load[p] += 1
        parts[u].add(p)
        parts[v].add(p)
        placed[u, v] = p
    owner = [
        sorted(held)[hash64((stream(seed, 2) + v) % WORD) * len(held) >> 64] if held else -1
        for v, held in enumerate(parts)
    ]
    isolated = [v for v in range(n) if not parts[v]]
    rows = [sum(p in held for held in parts) for p in range(num_parts)]
    places: list[int] = []
    more = [0] * num_parts
    for _ in isolated:
        more[min(range(num_parts), key=lambda p: (rows[p] + more[p], rows[p], p))] += 1
    for p, count in enumerate(more):
        places += [p] * count
    permuted = shuffled(len(isolated), stream(seed, 3))
    for i, v in enumerate(isolated):
        place = permuted[i]
        while place >= len(isolated):
            place = permuted[place]
        owner[v] = places[place]
        parts[v] = {places[place]}
    return Twin(parts, owner, placed, load, len(isolated))
