"""What generated graphs have beside their edges: labels, features, splits and where they come from.

Shapes: N vertices, D features, C classes.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from mggcn.errors import GraphError
from mggcn.graph.csr import ArrayRows, Rows, Task

Ints = npt.NDArray[np.int64]
TrainBy = Literal["random", "community", "degree"]
"""Training vertices: any; those of the newest communities, as papers of the latest years; or those of highest degree, as
products that sell best."""
TRAIN_BY: tuple[TrainBy, ...] = get_args(TrainBy)
NEWEST = 0.05
"""Share of the communities that are the newest: those of the highest numbers."""


def check_extents(num_vertices: int, num_edges: int, num_features: int, num_classes: int) -> None:
    """Refuse numbers that no graph has. Raises: GraphError."""
    if not 1 <= num_vertices < 2**31 or min(num_edges, num_features, num_classes) < 0 or num_classes > num_vertices:
        raise GraphError(
            "expected 1 <= num_vertices < 2^31, num_edges and num_features >= 0 and 0 <= num_classes <= num_vertices, "
            f"got {num_vertices}, {num_edges}, {num_features} and {num_classes}"
        )


def check_shares(**shares: float) -> None:
    """Refuse shares by name that are none. Raises: GraphError."""
    for what, share in shares.items():
        if not 0.0 <= share <= 1.0 + 1e-9:
            raise GraphError(f"{what} must lie in [0, 1], got {share}")


def labels_of_task(classes: Ints, num_classes: int, task: Task, rng: np.random.Generator) -> npt.NDArray[Any]:
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


def drawn_features(
    labels: Ints, num_features: int, num_classes: int, signal: float, rng: np.random.Generator
) -> ArrayRows | None:
    """Return the mean of each vertex's class plus unit noise, (N, D); None if D is 0. signal: distance of two means."""
    if num_features == 0:
        return None
    # Two random means of variance s^2 are s sqrt(2 D) apart on average.
    scale = signal / np.sqrt(2 * num_features)
    means = (rng.standard_normal((num_classes, num_features)) * scale).astype(np.float32)
    features = rng.standard_normal((labels.size, num_features), dtype=np.float32)
    for start in range(0, labels.size, 1 << 14):
        features[start : start + (1 << 14)] += means[labels[start : start + (1 << 14)]]
    return ArrayRows(features)


def training_order(
    train_by: TrainBy, train: float, labels: Ints, degrees: Ints, num_classes: int, rng: np.random.Generator
) -> Ints:
    """Return the vertices in an order whose first ones train, and the next validate. labels: communities, (N,).

    Raises: GraphError if the newest communities have too few vertices for the share `train`.
    """
    order: Ints = rng.permutation(labels.size)
    if train_by == "random":
        return order
    if train_by == "degree":
        ranked: Ints = order[np.argsort(-degrees[order], kind="stable")]
        return ranked
    newest = num_classes - max(1, round(NEWEST * num_classes))
    places = np.flatnonzero(labels[order] >= newest)
    count = max(1, round(train * labels.size))
    if places.size < count:
        raise GraphError(
            f"the newest {num_classes - newest} of {num_classes} communities have {places.size:,} vertices, and "
            f"{count:,} are to train; ask for a smaller share (--train) or more classes"
        )
    first = np.zeros(labels.size, np.bool_)
    first[places[:count]] = True
    return np.concatenate([order[first], order[~first]])


def splits_of(order: Ints, train: float, val: float) -> dict[str, Rows]:
    """Return disjoint splits in an order of the vertices; train has one vertex at least, test takes the rest."""
    first = max(1, round(train * order.size))
    second = min(order.size, first + round(val * order.size))
    splits: dict[str, Rows] = {}
    for part, ids in [("train", order[:first]), ("val", order[first:second]), ("test", order[second:])]:
        mask = np.zeros((1, order.size), dtype=np.bool_)
        mask[0, ids] = True
        splits[part] = ArrayRows(mask)
    return splits


def meta_of(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the meta data of a graph that was made from these parameters."""
    return {
        "source": "synthetic, mggcn.graph.generate",
        "licence": "CC0-1.0",
        "metric": {"labels": "micro_f1", "numbers": "rmse"}.get(parameters.get("task", ""), "accuracy"),
        "options": parameters,
    }
