"""Synthetic graphs: communities that a GCN can learn, and R-MAT for speed. Both repeat exactly for one seed.

Shapes: N vertices, D features, C classes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mggcn.errors import GraphError
from mggcn.graph.csr import ArrayRows, Graph, Rows, Task
from mggcn.graph.pairs import Keys, csr_from_keys, distinct, draw_distinct, fill_uniformly, mirror, num_pairs, pair_keys

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
    name: str | None = None,
) -> Graph:
    """Make a degree-corrected planted partition whose classes are its communities.

    Exactly `num_edges` undirected edges, a share `homophily` of them inside classes; expected degrees follow a power
    law with exponent `power`; class sizes fall as rank^-1/2; ids are random. Features are class means plus unit noise;
    `feature_signal` is the mean distance between two class means. A vertex alone shows little of its class, the average
    over its neighbours much. task: labels are the classes themselves; or C labels a vertex, its class's own and those of
    some other classes, one in twenty wrong and one in twenty unknown; or one number, its class's own plus noise.
    Cost: some ten sorts of the edges and one pass over N D features; memory about 60 bytes an edge and 4 N D bytes.
    Raises: GraphError if an argument is out of range or so many edges do not fit.
    Source: Karrer and Newman, "Stochastic blockmodels and community structure in networks", 2011.
    """
    _check_extents(num_vertices, num_edges, num_features, num_classes)
    _check_shares(homophily=homophily, train=train, val=val, train_plus_val=train + val)
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
    features = _features(labels, num_features, max(num_classes, 1), feature_signal, rng)
    splits = _splits(num_vertices, train, val, rng) if num_classes else {}
    rows = _labels_of_task(labels, num_classes, task, rng)
    parameters = {"kind": "community", "seed": seed, "homophily": homophily, "power": power}
    if task != "classes":
        parameters["task"] = task
    return Graph(
        name=name or f"community_{num_vertices}_{num_edges}",
        adj=adj,
        adj_t=adj,
        features=features,
        labels=ArrayRows(rows) if num_classes else None,
        splits=splits,
        num_classes=num_classes if rows.ndim == 1 else rows.shape[1],
        meta=_meta(parameters | {"train": train, "val": val, "feature_signal": feature_signal}),
    )


def _labels_of_task(classes: Ints, num_classes: int, task: Task, rng: np.random.Generator) -> npt.NDArray[Any]:
    """Return labels as Graph.labels has them, from the class of each vertex."""
    if task == "classes" or not num_classes:
        return classes
    if task == "numbers":
        values = rng.standard_normal(num_classes)[classes] + 0.3 * rng.standard_normal(classes.size)
        return values.astype(np.float32)[:, np.newaxis]
    sets = np.eye(num_classes, dtype=np.bool_) | (rng.random((num_classes, num_classes)) < 0.2)
    wrong, unknown = rng.random((2, classes.size, num_classes)) < 0.05
    entries = np.where(unknown, -1, sets[classes] ^ wrong).astype(np.int8)
    entries[:, 0] = np.abs(entries[:, 0])  # every vertex has a known label
    return entries


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
    _check_extents(num_vertices, edge_factor * num_vertices, num_features, num_classes)
    _check_shares(a=a, b=b, c=c, a_plus_b_plus_c=a + b + c, train=train, val=val, train_plus_val=train + val)
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
        features=_features(np.zeros(num_vertices, dtype=np.int64), num_features, 1, 0.0, rng),
        labels=ArrayRows(rng.integers(num_classes, size=num_vertices)) if num_classes else None,
        splits=_splits(num_vertices, train, val, rng) if num_classes else {},
        num_classes=num_classes,
        meta=_meta(parameters | {"train": train, "val": val}),
    )


def _check_extents(num_vertices: int, num_edges: int, num_features: int, num_classes: int) -> None:
    if not 1 <= num_vertices < 2**31 or min(num_edges, num_features, num_classes) < 0 or num_classes > num_vertices:
        raise GraphError(
            "expected 1 <= num_vertices < 2^31, num_edges and num_features >= 0 and 0 <= num_classes <= num_vertices, "
            f"got {num_vertices}, {num_edges}, {num_features} and {num_classes}"
        )


def _check_shares(**shares: float) -> None:
    for what, share in shares.items():
        if not 0.0 <= share <= 1.0 + 1e-9:
            raise GraphError(f"{what} must lie in [0, 1], got {share}")


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


def _features(
    labels: Ints, num_features: int, num_classes: int, signal: float, rng: np.random.Generator
) -> ArrayRows | None:
    if num_features == 0:
        return None
    # Two random means of variance s^2 are s sqrt(2 D) apart on average.
    scale = signal / np.sqrt(2 * num_features)
    means = (rng.standard_normal((num_classes, num_features)) * scale).astype(np.float32)
    features = rng.standard_normal((labels.size, num_features), dtype=np.float32)
    for start in range(0, labels.size, 1 << 14):
        features[start : start + (1 << 14)] += means[labels[start : start + (1 << 14)]]
    return ArrayRows(features)


def _splits(num_vertices: int, train: float, val: float, rng: np.random.Generator) -> dict[str, Rows]:
    """Random disjoint splits; train has one vertex at least, test takes the rest."""
    order = rng.permutation(num_vertices)
    first = max(1, round(train * num_vertices))
    second = min(num_vertices, first + round(val * num_vertices))
    splits: dict[str, Rows] = {}
    for part, ids in [("train", order[:first]), ("val", order[first:second]), ("test", order[second:])]:
        mask = np.zeros((1, num_vertices), dtype=np.bool_)
        mask[0, ids] = True
        splits[part] = ArrayRows(mask)
    return splits


def _meta(parameters: dict[str, Any]) -> dict[str, Any]:
    return {
        "source": "synthetic, mggcn.graph.generate",
        "licence": "CC0-1.0",
        "metric": {"labels": "micro_f1", "numbers": "rmse"}.get(parameters.get("task", ""), "accuracy"),
        "options": parameters,
    }
