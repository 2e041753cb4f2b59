"""The parts of a run of a user's own module: its loss, optimiser, schedule and score, checked before anything trains.

V rows of this rank, n training rows of it, C columns of scores, T columns of labels.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.nn import functional as F  # noqa: N812  as everybody calls it
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from mggcn.config import Config, TrainConfig
from mggcn.errors import ConfigError
from mggcn.graph.csr import Task
from mggcn.nn.pairs import users_module
from mggcn.nn.sharing import Sharing
from mggcn.planning.task import COUNTED, LOWER_IS_BETTER
from mggcn.train.metrics import counted, gathered_score, label_score
from mggcn.train.optimizer import learning_rate

LossFunction = Callable[[Tensor, Tensor], Tensor]
MetricFunction = Callable[[Tensor, Tensor], float]
OPTIMIZERS: Mapping[str, type[Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A module and how it is trained; it travels to ranks that are processes."""

    module: Module
    config: Config
    sharing: Sharing
    task: Task
    loss: LossFunction | None = None
    metric: MetricFunction | None = None
    optimizer: Any = None
    schedule: Any = None

    @property
    def metric_name(self) -> str:
        """Name of the score in the history; a function's own."""
        return self.config.train.metric if self.metric is None else name_of(self.metric)

    @property
    def lower_is_better(self) -> bool:
        """Whether the score is an error; a function's is not."""
        return self.metric is None and self.config.train.metric in LOWER_IS_BETTER

    def names(self) -> dict[str, str]:
        """Return what identifies this recipe in a run folder: names, and shapes of parameters."""
        train = self.config.train
        shapes = {name: list(tensor.shape) for name, tensor in self.module.state_dict().items()}
        return {
            "module": name_of(type(users_module(self.module))),
            "loss": train.loss if self.loss is None else name_of(self.loss),
            "metric": self.metric_name,
            "optimizer": train.optimizer if self.optimizer is None else name_of(self.optimizer),
            "schedule": "by its settings" if self.schedule is None else name_of(self.schedule),
            "weights": ", ".join(f"{name} {shape}" for name, shape in shapes.items()),
        }


def name_of(part: Any) -> str:
    """Return the name of a function, class or partial."""
    inner = part.func if isinstance(part, functools.partial) else part
    return str(getattr(inner, "__qualname__", type(inner).__name__)).rpartition("<locals>.")[2]


def check_module(module: Module, config: Config, dtype: torch.dtype) -> None:
    """Refuse a module that cannot be trained, saved or shared among ranks. Raises: ConfigError."""
    if any(isinstance(p, torch.nn.parameter.UninitializedParameter) for p in module.parameters()):
        raise ConfigError("the module has layers without weights before its first call; call it once, or give sizes")
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    if not trained:
        raise ConfigError(f"{type(module).__name__} has no parameters to train; expected some with requires_grad")
    if odd := next(((name, p.dtype) for name, p in trained if p.dtype != dtype), None):
        raise ConfigError(
            f"{odd[0]} of the module is {odd[1]}, but precision {config.run.precision} has rows of {dtype}; convert the "
            f"module, module.to({dtype}), or choose another precision"
        )
    for name, value in module.state_dict().items():
        if not isinstance(value, Tensor):
            raise ConfigError(f"{name} of the module's state_dict is not a tensor, and checkpoints hold only tensors")
    arguments_of(users_module(module))
    if config.run.ranks > 1:
        _refuse_rows_apart(module)
    try:
        copy.deepcopy(module)
    except Exception as error:
        raise ConfigError(
            f"the module cannot be copied, and every rank trains a copy: {error}; make copy.deepcopy(module) work"
        ) from error


def _refuse_rows_apart(module: Module) -> None:
    """Refuse layers of torch's that would see one rank's rows alone."""
    for name, part in module.named_modules():
        if isinstance(part, torch.nn.modules.batchnorm._BatchNorm):
            raise ConfigError(
                f"{name} is a {type(part).__name__}, which would see each rank's rows alone; take mggcn.nn.BatchNorm, "
                "whose result does not depend on the number of ranks"
            )
        if isinstance(part, torch.nn.modules.dropout._DropoutNd) and part.p > 0:
            raise ConfigError(
                f"{name} is a {type(part).__name__}, whose mask would depend on the ranks; take "
                "mggcn.nn.dropout(x, part, p, self.training)"
            )


def arguments_of(module: Module) -> int:
    """Return whether forward takes (x, part), 2, or (part), 1. Raises: ConfigError for anything else."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    signature = inspect.signature(module.forward)
    for given in (2, 1):
        try:
            signature.bind(*range(given))
            break
        except TypeError:
            continue
    else:
        given = 0
    needed = [p for p in signature.parameters.values() if p.kind in kinds and p.default is p.empty]
    if not given or len(needed) > given:
        raise ConfigError(
            f"{type(module).__name__}.forward{signature} cannot be called: expected forward(self, x, part), features and "
            "the rank's part of the graph (docs/own-models.md), or forward(self, part)"
        )
    return given


def check_parts(recipe: Recipe) -> float:
    """Refuse a loss, metric, optimiser or schedule that cannot work; return the largest learning rate of the optimiser."""
    for what, part in (("loss", recipe.loss), ("metric", recipe.metric)):
        if part is not None and not callable(part):
            raise ConfigError(f"{what} must be a function (scores, labels) or a name, got {part!r}")
    optimizer = make_optimizer(copy.deepcopy(recipe.module), recipe)
    Schedule(optimizer, recipe)
    return max(float(group["lr"]) for group in optimizer.param_groups)


def make_optimizer(module: Module, recipe: Recipe) -> Optimizer:
    """Return the optimiser of a module, given by name, by class (which gets the run's rate) or by a function.

    Raises: ConfigError if the class or function does not make an optimiser.
    """
    train, given = recipe.config.train, recipe.optimizer
    settings: dict[str, Any] = {"lr": train.lr} | ({"weight_decay": train.weight_decay} if train.weight_decay else {})
    if given is None:
        settings |= {"momentum": train.momentum} if train.momentum else {}
        return OPTIMIZERS[train.optimizer](module.parameters(), **settings)
    try:
        is_class = isinstance(given, type) and issubclass(given, Optimizer)
        made = given(module.parameters(), **(settings if is_class else {}))
    except TypeError as error:
        raise ConfigError(
            f"optimizer={name_of(given)} cannot be made from the module's parameters: {error}; give a class of "
            "torch.optim, or a function of the parameters, such as lambda p: torch.optim.SGD(p, lr=0.1)"
        ) from error
    if not isinstance(made, Optimizer):
        raise ConfigError(f"optimizer={name_of(given)} must make a torch.optim.Optimizer, got {type(made).__name__}")
    if not all("lr" in group for group in made.param_groups):
        raise ConfigError(f"{type(made).__name__} has no learning rate (lr) in its groups, and schedules set one")
    closure = inspect.signature(type(made).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ConfigError(
            f"{type(made).__name__} needs a closure that computes the loss again, and an epoch computes it once; choose "
            "another optimiser, or write the loop with mggcn.nn.run"
        )
    return made


class Schedule:
    """The learning rates of all groups of an optimiser, by settings, a function of the epoch, or a class of torch's."""

    def __init__(self, optimizer: Optimizer, recipe: Recipe) -> None:
        self._config: TrainConfig = recipe.config.train
        self._optimizer = optimizer
        self._base = [float(group["lr"]) for group in optimizer.param_groups]
        self._factor: Callable[[int], float] | None = None
        self._scheduler: LRScheduler | None = None
        given = recipe.schedule
        inner = given.func if isinstance(given, functools.partial) else given
        if isinstance(inner, type) and issubclass(inner, LRScheduler):
            if issubclass(inner, ReduceLROnPlateau):
                raise ConfigError(
                    'ReduceLROnPlateau follows scores: schedule="plateau" does it, with schedule_patience'
                )
            self._scheduler = self._made(given)
        elif given is not None:
            self._factor = self._checked(given)

    def _made(self, given: Any) -> LRScheduler:
        try:
            made: LRScheduler = given(self._optimizer)
            return made
        except TypeError as error:
            raise ConfigError(
                f"schedule={name_of(given)} cannot be made from the optimiser alone: {error}; give its settings, "
                "functools.partial(torch.optim.lr_scheduler.StepLR, step_size=30)"
            ) from error

    def _checked(self, given: Any) -> Callable[[int], float]:
        try:
            float(given(0))
        except Exception as error:
            raise ConfigError(
                f"schedule must be a name, a function from the epoch, from 0, to the factor of the learning rate, or a "
                "class of torch.optim.lr_scheduler or a functools.partial of one; schedule(0) raised "
                f"{type(error).__name__}: {error}"
            ) from error
        factor: Callable[[int], float] = given
        return factor

    def start(self, epoch: int) -> None:
        """Begin at an epoch, from 0; a class of torch's is stepped through those before it."""
        if self._scheduler is None:
            return
        if epoch:
            self._optimizer.zero_grad()
            self._optimizer.step()  # moves nothing without gradients; a schedule that is stepped before it would warn
        for _ in range(epoch):
            self._scheduler.step()

    def set(self, epoch: int, rate: float | None) -> float:
        """Set the rates of an epoch, from 0, and return the first group's. rate: that of the plateau schedule."""
        if self._scheduler is None:
            largest = max(self._base)
            if self._factor is not None:
                factor = float(self._factor(epoch))
            else:
                factor = learning_rate(self._config, epoch, rate) / largest if largest else 0.0
            for group, base in zip(self._optimizer.param_groups, self._base, strict=True):
                group["lr"] = base * factor
        return float(self._optimizer.param_groups[0]["lr"])

    def end_epoch(self) -> None:
        """Move on after the optimiser's step."""
        if self._scheduler is not None:
            self._scheduler.step()


def named_loss(name: str, scores: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """Return the sum of a named loss over rows (n, C), and how many entries it is of; unknown entries are left out."""
    if name == "cross_entropy":
        return F.cross_entropy(scores, labels, reduction="sum"), len(labels)
    if scores.shape != labels.shape:
        raise ConfigError(f"the module returns {scores.shape[1]} columns, but the labels have {labels.shape[1]}")
    known = ~labels.isnan()
    function: Any = {"bce": F.binary_cross_entropy_with_logits, "mse": F.mse_loss, "mae": F.l1_loss}[name]
    return function(scores[known], labels[known], reduction="sum"), int(known.sum())


def own_loss(loss: LossFunction, scores: Tensor, labels: Tensor) -> tuple[Tensor, bool]:
    """Return the sum over rows (n, C) of a user's loss function, and whether the function returned a mean, one number.

    Raises: ConfigError if it gives neither that nor a value for each row.
    """
    if not len(labels):
        return scores.sum(), False  # no row: 0, and a gradient of 0
    value: Any = loss(scores, labels)
    if not isinstance(value, Tensor) or not value.is_floating_point() or not value.requires_grad:
        raise ConfigError(
            f"loss={name_of(loss)} must return a tensor that depends on the scores: the mean over the rows, or a value for "
            f"each of them; got {value if isinstance(value, float | int | None) else type(value).__name__}"
        )
    if value.dim() == 0:
        return value * len(labels), True
    if value.shape[0] != len(labels):
        raise ConfigError(
            f"loss={name_of(loss)} must return one number, the mean over its {len(labels)} rows, or a value for each row; "
            f"got shape {tuple(value.shape)}"
        )
    return value.reshape(len(labels), -1).mean(1).sum(), False


def check_mean(loss: LossFunction, scores: Tensor, labels: Tensor, rank: int) -> bool:
    """Refuse one number that is not a mean over rows: ranks could not combine their parts.

    The rows are cut in two by their labels: a mean that weighs classes differs most there. Sums and means of a batch's
    statistics differ as well. Returns whether the halves have means that differ, as they do not where a module begins
    with equal scores: then nothing is known yet. Raises: ConfigError.
    """
    half = len(labels) // 2
    if not half:
        return True
    order = (labels if labels.dim() == 1 else labels[:, 0]).argsort()
    scores, labels = scores[order], labels[order]
    with torch.no_grad():
        value = loss(scores, labels)
        whole = float(value) * len(labels)
        low = float(loss(scores[:half], labels[:half])) * half
        high = float(loss(scores[half:], labels[half:])) * (len(labels) - half)
    # 200 units in the last place: far more than a pairwise sum loses over 1e9 rows; a loss may compute in float32 or less.
    eps = max(torch.finfo(dtype).eps for dtype in (scores.dtype, value.dtype))
    tolerance = min(max(200 * eps, 2e-5), 1e-2)
    # A half may be 0 / 0 where the whole is not: a class without weight, or labels that are unknown.
    if math.isfinite(whole) and not abs(whole - (low + high)) <= tolerance * (abs(low) + abs(high)):
        raise ConfigError(
            f"loss={name_of(loss)} returns one number that is not a mean over rows (on rank {rank} all rows give "
            f"{whole / len(labels):.6g}, the mean of two halves is {(low + high) / len(labels):.6g}), as a sum and a mean "
            "with weights of classes are not, and ranks cannot put such numbers together; return a value for each row "
            '(reduction="none"), or train on one rank'
        )
    return abs(low / half - high / (len(labels) - half)) > 1e-3 * abs(whole / len(labels))


def split_score(recipe: Recipe, scores: Tensor, labels: Tensor) -> float | None:
    """Return the score of the rows of a split: scores (n, C), labels (n,) or (n, T), on the host; None of no rows."""
    if not len(labels):
        return None
    if recipe.metric is not None:
        value = recipe.metric(scores, labels)
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"metric={name_of(recipe.metric)} must return a number, got {type(value).__name__}"
            ) from error
    metric, z = recipe.config.train.metric, scores.double().numpy()
    if metric not in COUNTED:
        two = recipe.task == "classes" and z.shape[1] == 2
        return gathered_score(metric, z[:, 1:] - z[:, :1] if two else z, labels.numpy())
    if recipe.task == "classes":
        counts = class_counts(z.argmax(1), labels.numpy(), z.shape[1])
        return counted(metric, np.stack([counts] * 3))["train"]
    known = ~labels.isnan().numpy()
    predicted, positive = (z > 0) & known, (labels.numpy() > 0.5) & known
    sums = np.stack([(predicted & positive).sum(0), predicted.sum(0), positive.sum(0)])
    return label_score(metric, sums, known.sum(0))


def class_counts(predicted: Any, labels: Any, classes: int) -> Any:
    """Return right predictions, predictions and vertices of each class, (3, C)."""
    found = [
        np.bincount(values, minlength=classes)[:classes] for values in (labels[labels == predicted], predicted, labels)
    ]
    return np.stack(found)
