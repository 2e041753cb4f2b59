"""The losses and scores that fit a graph's labels, and those that `auto` stands for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from mggcn.config import CLASS_SETTINGS, TrainConfig
from mggcn.errors import ConfigError
from mggcn.graph.csr import Graph, Task, columns

LOSSES: Final[Mapping[Task, tuple[str, ...]]] = MappingProxyType(
    {"classes": ("cross_entropy",), "labels": ("bce",), "numbers": ("mse", "mae"), "links": ("bce",)}
)
HITS: Final = MappingProxyType({f"hits@{k}": k for k in (1, 3, 5, 10, 20, 50, 100)})
"""Scores of links that count those above the k-th best pair without a link, by name."""
COUNTED: Final = ("accuracy", "balanced_accuracy", "macro_f1", "micro_f1")
"""Metrics that follow from counts; others need the scores of all vertices in one place."""
METRICS: Final[Mapping[Task, tuple[str, ...]]] = MappingProxyType(
    {
        "classes": (*COUNTED, "roc_auc", "average_precision"),
        "labels": ("micro_f1", "accuracy", "balanced_accuracy", "macro_f1", "roc_auc", "average_precision"),
        "numbers": ("rmse", "mae", "r2"),
        "links": ("roc_auc", "mrr", *HITS),
    }
)
"""By task; the first is the default."""
LOWER_IS_BETTER: Final = ("mae", "rmse")
_NAMES = {"rocauc": "roc_auc", "ap": "average_precision", "acc": "accuracy", "f1": "micro_f1"}
"""Other names of scores in stores and data sets."""


def resolve_task(train: TrainConfig, graph: Graph) -> TrainConfig:
    """Replace `auto` in loss and metric. Raises: ConfigError if loss, metric or class weights do not fit the labels."""
    task, changes = graph.task, dict[str, Any]()
    if train.loss == "auto":
        changes["loss"] = LOSSES[task][0]
    elif train.loss not in LOSSES[task]:
        raise ConfigError(
            f"train.loss {train.loss} does not fit {graph.name}, {_predicted(graph)}; choose {' or '.join(LOSSES[task])}"
            + (", or prepare the labels as another task (--task)" if task != "links" else "")
        )
    if train.metric == "auto":
        default = "mae" if train.loss == "mae" else METRICS[task][0]
        named = str(graph.meta.get("metric", "")).lower().replace(" ", "_").replace("-", "_")
        named = _NAMES.get(named, named)
        changes["metric"] = named if named in METRICS[task] else default
    elif train.metric not in METRICS[task]:
        raise ConfigError(
            f"train.metric {train.metric} does not fit {graph.name}, {_predicted(graph)}; choose one of "
            f"{', '.join(METRICS[task])}"
        )
    _check_classes(train, graph)
    return dataclasses.replace(train, **changes) if changes else train


def check_shape_task(train: TrainConfig, num_classes: int) -> None:
    """Check settings for a bare shape, whose task follows from the loss: classes for auto. Raises: ConfigError."""
    task = next(task for task, losses in LOSSES.items() if train.loss in ("auto", *losses))
    if train.metric not in ("auto", *METRICS[task]):
        raise ConfigError(
            f"train.metric {train.metric} does not fit train.loss {train.loss}; choose one of "
            f"{', '.join(METRICS[task])}, or name the loss of another task"
        )
    _check_labels(train, num_classes, "the shape")


def _check_classes(train: TrainConfig, graph: Graph) -> None:
    """Refuse weights and ignored labels of classes that do not exist."""
    if graph.task != "classes":
        named = [f"train.{name}" for name, default in CLASS_SETTINGS.items() if getattr(train, name) != default]
        if named:
            one = len(named) == 1
            raise ConfigError(
                f"{', '.join(named)} belong{'s' * one} to classes, but {graph.name} {_has(graph)}; leave "
                f"{'it' if one else 'them'} out"
            )
        return
    _check_labels(train, graph.num_classes, graph.name, named=graph.labels is not None)


def _check_labels(train: TrainConfig, num_classes: int, name: str, *, named: bool = True) -> None:
    if train.class_weights not in ("none", "balanced"):
        came = len(train.weights_of_classes())
        if came != num_classes:
            raise ConfigError(f"train.class_weights must hold one number for each of {num_classes} classes, got {came}")
    unknown = [label for label in train.ignored_labels if label >= num_classes]
    if unknown and named:
        raise ConfigError(f"train.ignored_labels names {unknown[0]}, but {name} has the classes 0 .. {num_classes - 1}")


def _has(graph: Graph) -> str:
    """Return what is predicted of a graph, after its name."""
    if graph.task == "links":
        return "is split into links"
    return f"has {columns(graph.task, graph.num_classes)}"


def _predicted(graph: Graph) -> str:
    """Return the same as a clause that follows the name."""
    if graph.task == "links":
        return "which is split into links"
    return f"whose labels are {'one class a vertex' if graph.task == 'classes' else columns(graph.task, graph.num_classes)}"
