"""Every setting as a named, typed keyword of `Trainer`, `sweep` and the models.

Meanings and defaults are those of mggcn/config/__init__.py, to whose classes tests/test_settings.py holds this list.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, TypeGuard

from mggcn.config import MetricName
from mggcn.errors import ConfigError
from mggcn.graph.csr import Task
from mggcn.graph.options import GraphOptions

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
    Metric: TypeAlias = Callable[[Tensor, Tensor], float]
    MakeOptimizer: TypeAlias = Callable[..., Optimizer]
    MakeSchedule: TypeAlias = Callable[[int], float] | Callable[..., LRScheduler]

Widths: TypeAlias = int | Sequence[int]
FanOut: TypeAlias = int | Literal["all"] | Mapping[Any, int | Literal["all"]]
MODELS = ("GCN", "SAGE", "GIN", "GAT", "GATv2", "SGC", "APPNP", "RGCN", "MLP")
PARTS = ("loss", "metric", "optimizer", "schedule")
"""What a user's own module may be trained with as a function or class rather than by its name."""


class ModelSettings(TypedDict, total=False):
    """Table [model], without what the models' functions have as parameters of their own."""

    aggregator: Literal["gcn", "mean", "max"]
    activation: Literal["relu", "elu", "leaky_relu", "gelu"]
    norm_layer: Literal["none", "layer", "batch"]
    residual: Literal["none", "linear", "identity"]
    jumping: Literal["last", "concat", "max"]
    head: Literal["convolution", "linear"]
    dense_before: Widths
    dense_between: bool
    dense_after: Widths
    dropout: float
    input_dropout: float
    concat_heads: bool
    out_heads: int
    attention_dropout: float
    norm: Literal["symmetric", "mean", "none"]
    self_loops: bool
    bias: bool
    init: Literal["glorot", "pyg"]
    bases: int


class Parts(TypedDict, total=False):
    """Loss, metric, optimiser and schedule: a name or, for a user's own module, a function or class."""

    loss: Literal["auto", "cross_entropy", "bce", "mse", "mae"] | Loss
    metric: MetricName | Metric
    optimizer: Literal["adam", "adamw", "sgd"] | MakeOptimizer
    schedule: Literal["constant", "cosine", "step", "plateau"] | MakeSchedule


class Continued(TypedDict, total=False):
    """Settings that a resumed run may change, except for the schedule."""

    lr: float
    schedule_step: int
    schedule_gamma: float
    schedule_patience: int
    warmup: int
    patience: int
    threads: int
    bind: Literal["auto", "off"]
    memory_limit: int | str
    capacity: Literal["auto", "memory", "host", "disk"]
    scratch: str
    log: Literal["none", "tensorboard"]
    timeout_s: float


class ScheduleSettings(Continued, total=False):
    """All settings that a resumed run may change."""

    schedule: Literal["constant", "cosine", "step", "plateau"]


class Settings(ModelSettings, Parts, Continued, total=False):
    """All settings except ranks."""

    kind: Literal["gcn", "sage", "gin", "gat", "gatv2", "sgc", "appnp", "rgcn", "mlp"]
    hidden: Widths
    hops: int
    teleport: float
    heads: int
    inputs: str
    row_normalize: bool
    splits: Literal["main", "alt"]
    split: int
    epochs: int
    row_optimizer: Literal["adam", "adagrad"]
    momentum: float
    weight_decay: float
    weight_decay_on: Literal["all", "first"]
    clip_norm: float
    schedule_start: int
    eval_every: int
    evaluate: Literal["auto", "whole", "blocks", "sampled"]
    class_weights: str | Sequence[float]
    label_smoothing: float
    ignored_labels: Widths
    seed: int
    repeat: int
    checkpoint_every: int
    checkpoint_minutes: float
    batch: int | Literal["all"]
    fanout: FanOut | Sequence[FanOut]
    draw: Literal["uniform", "replace", "weight", "labor", "labor-one"]
    by_type: bool
    weights: Literal["unbiased", "mean", "block"]
    first: Literal["drawn", "full"]
    drop_last: bool
    deal: Literal["global", "ranges", "by-class"]
    plan: Literal["auto", "bound", "run"]
    rows: Literal["mapped", "owners", "parts"]
    macro: int
    cache_rows: int
    ahead: int
    halo: Literal["exact", "history"]
    history_lines: int
    history_life: int
    history_rows: int
    history_delay: int
    history_ends: Literal["keep", "paper"]
    history_missing: Literal["rest", "zero"]
    compare_gradient: int
    embedding: int
    decoder: Widths
    negatives: int
    negatives_from: Literal["uniform", "in-batch"]
    transport: Literal["auto", "single", "threads", "gloo", "nccl"]
    device: Literal["cpu", "cuda"]
    precision: Literal["fp32", "tf32", "mixed", "bf16", "fp64"]
    order: Literal["random", "permute", "none", "ranges", "metis", "metis-balanced", "stream", "locality", "auto"]
    spmm: Literal["own", "cusparse"]
    strategy: Literal["broadcast", "halo", "slice", "delayed", "auto"]
    batches: Literal["independent", "cooperative", "auto"]
    delay: int | str
    stale_aggregates: Literal["discard", "reuse"]
    products: Literal["auto", "gemm-first", "aggregate-first"]
    features: Literal["auto", "dense", "sparse"]
    prune: Literal["auto", "off"]
    recompute: Literal["off", "on"]
    timeline: bool


class SweepSettings(Settings, total=False):
    """Settings of all trials of a sweep."""

    ranks: int


class LoadArguments(TypedDict, total=False):
    """Arguments of `load` besides a source."""

    features: Any
    labels: Any
    class_names: Sequence[str] | str | Path | None
    splits: Mapping[str, Any] | None
    weights: Any
    edge_types: Any
    ids: Any
    num_vertices: int | None
    num_classes: int | None
    num_relations: int | None
    task: Task | None
    name: str
    options: GraphOptions
    verify: bool


def is_module(model: object) -> TypeGuard[Module]:
    """Return whether an object is a torch module, without importing torch."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(model, torch.nn.Module)


def split_parts(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the parts that are functions or classes, and the settings that remain."""
    parts = {name: settings[name] for name in PARTS if name in settings and not isinstance(settings[name], str)}
    return parts, {name: value for name, value in settings.items() if name not in parts}


def refusing_functions(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of a planned model. Raises: ConfigError if a part is a function, which only modules take."""
    if odd := [name for name, value in split_parts(settings)[0].items() if callable(value)]:
        raise ConfigError(
            f"{', '.join(odd)} given as functions need a torch module, Trainer(graph, module, {odd[0]}=...), as "
            f"docs/own-models.md shows; the planned models ({', '.join(MODELS)}) take the names that docs/settings.md "
            "lists, since their epochs run without torch"
        )
    return settings
