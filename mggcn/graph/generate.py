"""Synthetic graphs: communities that a GCN can learn, and R-MAT for speed. Both repeat exactly for one seed.

Graphs like a given one are bter.py's.

Shapes: N vertices, D features, C classes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mggcn.errors import GraphError
from mggcn.graph.csr import CSR, ArrayRows, Graph, Rows, Task
from mggcn.graph.options import DEFAULT_OPTIONS
from mggcn.graph.pairs import Keys, csr_from_keys, distinct, draw_distinct, fill_uniformly, mirror, num_pairs, pair_keys
from mggcn.graph.structure import MAX_RELATIONS, build_adjacency, edges_of
from mggcn.graph.synthetic import (
    TrainBy,
    check_extents,
    check_shares,
    drawn_features,
    labels_of_task,
    meta_of,
    splits_of,
    training_order,
)

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def community(
    num_vertices: int,
    num_edges: int,
    num_features: int,
    num_classes: int,
    *,
    seed: int,
    homophily: float = 0.7,
    power: float = 2.6,
    train: float = 0.1,
    val: float = 0.1,
    feature_signal: float = 2.0,
    task: Task = "classes",
    train_by: TrainBy = "random",
    num_relations: int = 0,
    name: str | None = None,
) -> Graph:
    """Make a degree-corrected planted partition whose classes are its communities.

    Exactly `num_edges` undirected edges, a share `homophily` of them inside classes; expected degrees follow a power
    law with exponent `power`; class sizes fall as rank^-1/2; ids are random. Features are class means plus unit noise;
    `feature_signal` is the mean distance between two class means. A vertex alone shows little of its class, the average
    over its neighbours much. task: labels are the classes themselves; or C labels a vertex, its class's own and those of
    some other classes, one in twenty wrong and one in twenty unknown; or one number, its class's own plus noise.
    train_by: which vertices train. num_relations: if not 0, every edge has one of its two directions, drawn, and a
    relation, whatever its ends; relation r has a share in proportion to 1 / (r + 1).
    Cost: some ten sorts of the edges and one pass over N D features; memory about 60 bytes an edge and 4 N D bytes.
    Raises: GraphError if an argument is out of range or so many edges do not fit.
    Source: Karrer and Newman, "Stochastic blockmodels and community structure in networks", 2011.
    """
    check_extents(num_vertices, num_edges, num_features, num_classes)
    check_shares(homophily=homophily, train=train, val=val, train_plus_val=train + val)
    if not 0 <= num_relations <= MAX_RELATIONS:
        raise GraphError(f"expected 0 to {MAX_RELATIONS:,} relations, got {num_relations}")
    if power <= 1.0 or feature_signal < 0.0:
        raise GraphError(f"expected power > 1 and feature_signal >= 0, got {power} and {feature_signal}")
    rng = np.random.Generator(np.random.PCG64(seed))
    classes = _class_of_each(num_vertices, num_classes, rng)
    weights = _power_law(num_vertices, num_edges, power, rng)
    ids = rng.permutation(num_vertices)
    keys = _community_keys(classes, weights, num_edges, homophily, rng)
    labels = np.empty(num_vertices, dtype=np.int64)
    labels[ids] = classes
    adj = csr_from_keys(_renumber(keys, ids, directed=False), num_vertices)
    features = drawn_features(labels, num_features, max(num_classes, 1), feature_signal, rng)
    splits = dict[str, Rows]()
    if num_classes:
        degrees = np.diff(adj.indptr.array())
        splits = splits_of(training_order(train_by, train, labels, degrees, num_classes, rng), train, val)
    rows = labels_of_task(labels, num_classes, task, rng)
    adj, adj_t = _typed(keys, ids, num_relations, rng) if num_relations else (adj, adj)
    parameters = {"kind": "community", "seed": seed, "homophily": homophily, "power": power}
    parameters |= {"task": task} if task != "classes" else {}
    parameters |= {"train_by": train_by} if train_by != "random" else {}
    parameters |= {"relations": num_relations} if num_relations else {}
    return Graph(
        name=name or f"community_{num_vertices}_{num_edges}",
        adj=adj,
        adj_t=adj_t,
        features=features,
        labels=ArrayRows(rows) if num_classes else None,
        splits=splits,
        num_classes=num_classes if rows.ndim == 1 else rows.shape[1],
        meta=meta_of(parameters | {"train": train, "val": val, "feature_signal": feature_signal}),
        num_relations=num_relations,
    )


def rmat(
    scale: int,
    edge_factor: int,
    *,
    seed: int,
    a: float = 0.57,
    b: float = 0.19,
    c: float = 0.19,
    symmetric: bool = True,
    num_features: int = 0,
    num_classes: int = 0,
    train: float = 0.1,
    val: float = 0.1,
    name: str | None = None,
) -> Graph:
    """Make an R-MAT graph of 2^scale vertices and exactly edge_factor * 2^scale distinct edges without self-loops.

    Edges are undirected if `symmetric`; ids are random. Features and labels, if requested, are noise: this is a graph
    for measuring time and memory, nothing can be learned from it.
    Cost: `scale` random numbers an edge, some ten sorts of the edges.
    Raises: GraphError if an argument is out of range or so many edges do not fit.
    Source: Chakrabarti, Zhan and Faloutsos, "R-MAT", 2004; defaults of Graph500.
    """
    if not 0 <= scale <= 30:
        raise GraphError(f"expected 0 <= scale <= 30, got {scale}; 2^scale vertices must fit 32-bit ids")
    num_vertices = 1 << scale
    check_extents(num_vertices, edge_factor * num_vertices, num_features, num_classes)
    check_shares(a=a, b=b, c=c, a_plus_b_plus_c=a + b + c, train=train, val=val, train_plus_val=train + val)
    rng = np.random.Generator(np.random.PCG64(seed))
    ids = rng.permutation(num_vertices)

    def draw(count: int) -> Keys:
        u, v = _rmat_ends(count, scale, (a, b, c), rng)
        return pair_keys(u, v, num_vertices, not symmetric)

    keys = draw_distinct(draw, edge_factor * num_vertices, rng)
    keys = fill_uniformly(keys, edge_factor * num_vertices, num_vertices, not symmetric, rng)
    keys = _renumber(keys, ids, directed=not symmetric)
    adj = csr_from_keys(keys, num_vertices)
    parameters = {"kind": "rmat", "seed": seed, "a": a, "b": b, "c": c, "scale": scale, "edge_factor": edge_factor}
    return Graph(
        name=name or f"rmat_{scale}_{edge_factor}",
        adj=adj,
        adj_t=adj if symmetric else csr_from_keys(mirror(keys, num_vertices), num_vertices),
        features=drawn_features(np.zeros(num_vertices, dtype=np.int64), num_features, 1, 0.0, rng),
        labels=ArrayRows(rng.integers(num_classes, size=num_vertices)) if num_classes else None,
        splits=splits_of(rng.permutation(num_vertices), train, val) if num_classes else {},
        num_classes=num_classes,
        meta=meta_of(parameters | {"train": train, "val": val}),
    )


def _class_of_each(num_vertices: int, num_classes: int, rng: np.random.Generator) -> Ints:
    """Ascending classes, none empty; class c has a share in proportion to (c + 1)^-1/2."""
    shares = np.arange(1, max(num_classes, 1) + 1) ** -0.5
    drawn = rng.choice(shares.size, size=num_vertices - shares.size, p=shares / shares.sum())
    return np.sort(np.concatenate([np.arange(shares.size), drawn]))


def _power_law(num_vertices: int, num_edges: int, power: float, rng: np.random.Generator) -> Floats:
    """Weights in proportion to expected degrees, none above an eighth of the vertices."""
    weights = (1.0 - rng.random(num_vertices)) ** (-1.0 / (power - 1.0))
    degrees = weights * (2 * num_edges / weights.sum())
    capped: Floats = np.minimum(degrees, max(num_vertices / 8, 2 * num_edges / num_vertices)) + 1e-9
    return capped


def _community_keys(classes: Ints, weights: Floats, num_edges: int, homophily: float, rng: np.random.Generator) -> Keys:
    """Draw edges within classes and edges across, both by weight; fill up uniformly where a kind has no pairs left."""
    num_vertices = classes.size
    total = np.concatenate([[0.0], np.cumsum(weights)])
    starts = np.searchsorted(classes, np.arange(classes[-1] + 2))
    below, above = total[starts[classes]], total[starts[classes + 1]]

    def pick(low: Floats | float, high: Floats | float, count: int) -> Ints:
        positions = low + rng.random(count) * (high - low)
        return np.minimum(np.searchsorted(total, positions, side="right") - 1, num_vertices - 1)

    def inside(count: int) -> Keys:
        u = pick(0.0, total[-1], count)
        v = pick(below[u], above[u], count)
        return pair_keys(u, v, num_vertices, directed=False)

    def across(count: int) -> Keys:
        u, v = pick(0.0, total[-1], count), pick(0.0, total[-1], count)
        other = classes[u] != classes[v]
        return pair_keys(u[other], v[other], num_vertices, directed=False)

    if num_edges > num_pairs(num_vertices, directed=False):
        return fill_uniformly(np.empty(0, dtype=np.int64), num_edges, num_vertices, False, rng)
    num_inside = num_edges if classes[-1] == 0 else round(homophily * num_edges)
    parts = [draw_distinct(inside, num_inside, rng), draw_distinct(across, num_edges - num_inside, rng)]
    # Rounding at a class border may put one pair into both kinds.
    return fill_uniformly(distinct(np.concatenate(parts)), num_edges, num_vertices, False, rng)


def _rmat_ends(
    count: int, scale: int, corner: tuple[float, float, float], rng: np.random.Generator
) -> tuple[Ints, Ints]:
    a, b, c = corner
    u, v = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    for _ in range(scale):
        drawn = rng.random(count, dtype=np.float32)
        lower = drawn >= a + b
        right = ((drawn >= a) & ~lower) | (drawn >= a + b + c)
        u, v = 2 * u + lower, 2 * v + right
    return u, v


def _renumber(keys: Keys, ids: Ints, *, directed: bool) -> Keys:
    """Give the vertices their random ids; the result holds both directions of an undirected edge, sorted."""
    u, v = ids[keys // ids.size], ids[keys % ids.size]
    return np.sort(u * ids.size + v if directed else np.concatenate([u * ids.size + v, v * ids.size + u]))


def _typed(keys: Keys, ids: Ints, num_relations: int, rng: np.random.Generator) -> tuple[CSR, CSR]:
    """Return both matrices of edges that have one direction and a relation, drawn by Zipf's law."""
    u, v = ids[keys // ids.size], ids[keys % ids.size]
    turned = rng.random(keys.size) < 0.5
    shares = 1 / np.arange(1, num_relations + 1)
    types = rng.choice(num_relations, size=keys.size, p=shares / shares.sum())
    edges = edges_of(np.stack([np.where(turned, v, u), np.where(turned, u, v)]), types=types)
    built, _ = build_adjacency(edges, ids.size, DEFAULT_OPTIONS, num_relations)
    return built.adj, built.adj_t
