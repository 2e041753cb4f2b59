"""Links: the edges of a graph that are to be predicted, split into those that train, validate and test.

N vertices, T training links, M links that are scored, K negatives of each: destinations to which its source has no edge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mggcn.errors import ConfigError, GraphError
from mggcn.graph.check import check_graph
from mggcn.graph.csr import CSR, ArrayRows, Graph, mix, windows
from mggcn.graph.philox import draw_below

NEGATIVES = 20
"""Negatives of a link that is scored: of 10,000 links they take 0.8 MB, and their scores a pass over 40,000 rows."""
STREAM = 0xE0000000
"""First counter of fixed negatives (graph/philox.py has the streams)."""
TRIES = 16
"""Draws of a negative before it is chosen from all that are left: 2^-16 are if a vertex has edges to half of all."""
DRAWN_AT_ONCE = 1 << 20
Ids = npt.NDArray[np.int64]
Hash = npt.NDArray[np.uint64]
Parts = npt.NDArray[np.uint8]


def split_links(graph: Graph, shares: Sequence[float], *, negatives: int = NEGATIVES, seed: int = 1) -> Graph:
    """Return the graph for predicting its links: its edges are split, and those to be scored are taken out.

    A hash of seed and both ends decides, whichever comes first: an edge and its reverse belong together, and validation and
    test links are no edges of the result in either direction. Edges of the result are its training links; self-loops stay,
    and are not links. An undirected edge is one link, whose source is either end. Every validation and test link gets
    `negatives` destinations, drawn uniformly by name of those that are not the source and have no edge to or from it, of
    any part. Where a source has edges to or from all others, the other end of an undirected link is its source; a link for
    which that does not help is left out, and `describe` says how many are. Labels and splits of vertices are left out.
    Cost: two passes over the edges, which are held in memory, and 24 bytes an edge, of directed graphs twice.

    Args:
        graph: A graph from `load`.
        shares: Of the links, those that train, validate and test, such as (0.8, 0.1, 0.1); their sum is 1.
        negatives: Of each link to be scored.
        seed: Another one splits otherwise.

    Raises:
        ConfigError: Shares are not three that add up to 1, or `negatives` or `seed` is no number that fits.
        GraphError: The graph has types, is split already, or has no link for a share above 0.

    Examples:
        >>> ring = mggcn.load(np.array([[0, 1, 2, 3], [1, 2, 3, 0]]), options=mggcn.GraphOptions(symmetrize=True))
        >>> graph = mggcn.split_links(ring, (0.5, 0.25, 0.25), negatives=1)
        >>> graph.task, graph.num_edges, graph.links["test"].shape
        ('links', 4, (1, 3))
    """
    _, *scored = _checked(shares)
    if not _whole(negatives) or not 1 <= negatives < 2**16:
        raise ConfigError(f"negatives must be 1 .. 65535 for each link that is scored, got {negatives!r}")
    if not _whole(seed) or not 0 <= seed < 2**32:
        raise ConfigError(f"the seed of links must be a whole number in [0, 2^32), got {seed!r}")
    if graph.links:
        raise GraphError(f"{graph.name} has been split into links already; prepare it from its source")
    if graph.num_relations:
        raise GraphError(
            f"{graph.name} has edges of {graph.num_relations} relations, and links of typed edges are not supported; load "
            "it without edge_types"
        )
    bounds = _bounds(graph, seed, scored)
    adj, links = _split(graph.adj, graph.symmetric, seed, bounds)
    train, *others = links
    if not train.size:
        raise GraphError(f"{graph.name} has no link to train on: {graph.num_edges} edges are too few for these shares")
    found, known, left_out = {"train": ArrayRows(train)}, _known(graph), 0
    for part, (name, some, share) in enumerate(zip(("val", "test"), others, scored, strict=True), start=1):
        kept = _with_negatives(some, known, graph, negatives, seed, part)
        left_out += some.shape[0] - kept.shape[0]
        if share and not kept.size:
            why = f"the share {share:g} of its {sum(map(len, links))} links is too few"
            why = "their sources have edges to or from all other vertices" if some.size else why
            raise GraphError(
                f"{graph.name} has no link for {name} that can be scored: {why}; choose another share, or 0"
            )
        found |= {name: ArrayRows(kept)} if kept.size else {}
    adj_t = adj if graph.symmetric else _split(graph.adj_t, False, seed, bounds)[0]
    stale = ("format_version", "sha256", "metric", "class_names")
    meta = {key: value for key, value in graph.meta.items() if key not in stale}
    meta["links"] = {"shares": list(map(float, shares)), "negatives": int(negatives), "seed": int(seed)}
    if left_out:
        told = dict(meta.get("input") or {})
        note = f"{left_out} links are not scored, because their sources have edges to or from all other vertices"
        meta["input"] = told | {"notes": [*(told.get("notes") or ()), note]}
    result = replace(
        graph, adj=adj, adj_t=adj_t, labels=None, splits={}, num_classes=0, class_names=(), meta=meta, links=found
    )
    check_graph(result)
    return result


def _whole(number: object) -> bool:
    return isinstance(number, int | np.integer) and not isinstance(number, bool)


def _checked(shares: Any) -> tuple[float, ...]:
    try:
        found = tuple(map(float, () if isinstance(shares, str) else shares))
    except (TypeError, ValueError):
        found = ()
    if not found:
        raise ConfigError(f"links need three shares as numbers, such as (0.8, 0.1, 0.1); got {shares!r}")
    if len(found) != 3 or not all(0 <= share <= 1 for share in found) or abs(sum(found) - 1) > 1e-6 or not found[0]:
        raise ConfigError(
            f"links need three shares that add up to 1, of training, validation and test, such as 0.8,0.1,0.1; got "
            f"{','.join(f'{share:g}' for share in found)}"
        )
    return found


def _hashes(rows: Ids, cols: Ids, seed: int) -> Hash:
    """64 random bits of each edge, the same for its reverse."""
    pairs = np.minimum(rows, cols) << 32 | np.maximum(rows, cols)
    return mix(mix(pairs, 1) ^ mix(np.array([seed]), 2), 3)


def _bounds(graph: Graph, seed: int, scored: Sequence[float]) -> tuple[int, int]:
    """Return the hashes below which a link is a test link, and below which it is one of both."""
    found = [
        _hashes(rows[mine], cols[mine], seed)
        for rows, cols, _, _ in windows(graph.adj)
        for mine in [rows < cols if graph.symmetric else rows != cols]
    ]
    hashes = np.concatenate([np.empty(0, np.uint64), *found])
    num_val, num_test = (round(share * hashes.size) for share in scored)
    least: list[int] = []
    for count in (num_test, num_test + num_val):
        within = 0 < count < hashes.size
        least.append(int(np.partition(hashes, count)[count]) if within else 2**64 * (count > 0))
    return least[0], least[1]


def _part(hashes: Hash, bounds: tuple[int, int]) -> Parts:
    """Part of each link: 0 train, 1 val, 2 test."""
    test, scored = ((hashes <= np.uint64(bound - 1)) if bound else np.zeros(hashes.size, np.bool_) for bound in bounds)
    return np.where(test, 2, scored.astype(np.uint8)).astype(np.uint8)


def _split(matrix: CSR, symmetric: bool, seed: int, bounds: tuple[int, int]) -> tuple[CSR, list[npt.NDArray[np.int32]]]:
    """Return a matrix without the entries that are scored, and the links of each part, int32 (n, 2)."""
    counts = np.zeros(matrix.num_rows + 1, np.int64)
    indices, values, links = list[Any](), list[Any](), tuple(list[Any]() for _ in range(3))
    for rows, cols, first, stop in windows(matrix):
        hashes = _hashes(rows, cols, seed)
        part = np.where(rows == cols, np.uint8(0), _part(hashes, bounds))
        stays = part == 0
        below = int(rows[0])  # the rows of a window follow each other
        of_each = np.bincount(rows[stays] - below)
        counts[below + 1 : below + 1 + of_each.size] += of_each
        indices.append(cols[stays].astype(np.int32))
        if matrix.values is not None:
            values.append(matrix.values.read(first, stop)[stays])
        proper = rows < cols if symmetric else rows != cols
        turned = symmetric & (hashes & np.uint64(1)).astype(np.bool_)
        ends = np.stack([np.where(turned, cols, rows), np.where(turned, rows, cols)], 1).astype(np.int32)
        for number, found in enumerate(links):
            found.append(ends[proper & (part == number)])
    joined = [np.concatenate([np.empty((0, 2), np.int32), *found]) for found in links]
    kept = CSR(
        ArrayRows(np.cumsum(counts)),
        ArrayRows(np.concatenate([np.empty(0, np.int32), *indices])),
        None if matrix.values is None else ArrayRows(np.concatenate([np.empty(0, np.float32), *values])),
        matrix.num_cols,
    )
    return kept, joined


def _known(graph: Graph) -> Ids:
    """Return the pairs that are no negatives, u N + v, ascending: each edge, its reverse, and each vertex with itself."""
    n = graph.num_vertices
    matrices = (graph.adj,) if graph.symmetric else (graph.adj, graph.adj_t)
    keys = [np.arange(n) * (n + 1), *(rows * n + cols for matrix in matrices for rows, cols, _, _ in windows(matrix))]
    # A few ascending runs: a stable sort only merges them.
    found = np.sort(np.concatenate(keys), kind="stable")
    once: Ids = found[np.concatenate([[True], found[1:] != found[:-1]])]
    return once


def _with_negatives(
    links: npt.NDArray[np.int32], known: Ids, graph: Graph, count: int, seed: int, part: int
) -> npt.NDArray[np.int32]:
    """Return links with their negatives (M, 2 + count), without those that have none. known: as `_known`."""
    n = graph.num_vertices
    starts = np.searchsorted(known, np.arange(n + 1) * n)
    room = n - np.diff(starts)
    turned = graph.symmetric & (room[links[:, 0]] == 0)
    links = np.where(turned[:, None], links[:, ::-1], links)
    links = links[room[links[:, 0]] > 0]
    out = np.empty((links.shape[0], count), np.int32)
    step = max(1, DRAWN_AT_ONCE // count)
    for start in range(0, links.shape[0], step):
        items = np.arange(start, min(start + step, links.shape[0]))
        sources = links[items, 0].astype(np.int64)
        drawn = np.empty((items.size, count), np.int64)
        wrong = np.ones(drawn.shape, np.bool_)
        for salt in range(TRIES):
            again = np.flatnonzero(wrong.any(1))
            if not again.size:
                break
            new = draw_below(n, (seed, part), items[again], count, stream=STREAM, salt=salt)
            drawn[again] = np.where(wrong[again], new, drawn[again])
            keys = sources[:, None] * n + drawn
            wrong = known[np.minimum(np.searchsorted(known, keys), known.size - 1)] == keys
        again = np.flatnonzero(wrong.any(1))
        new = draw_below(room[sources[again]], (seed, part), items[again], count, stream=STREAM, salt=TRIES)
        for source in np.unique(sources[again]):
            taken = known[starts[source] : starts[source + 1]] - source * n
            mine = sources[again] == source
            # Number r of those that are left has as many taken ones before it as are at most r when those are not counted.
            new[mine] += np.searchsorted(taken - np.arange(taken.size), new[mine], side="right")
        drawn[again] = np.where(wrong[again], new, drawn[again])
        out[items] = drawn
    return np.concatenate([links, out], 1)
