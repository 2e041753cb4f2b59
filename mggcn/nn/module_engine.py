"""A user's own module on one rank, as the epoch loop asks (train/engine.py): forward, loss, backward, sum, step, scores.

N vertices, V rows of this rank, C columns of scores.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mggcn.backend.epoch_end import STOP
from mggcn.errors import ConfigError
from mggcn.files import parse_object
from mggcn.nn.link_goal import LinkGoal
from mggcn.nn.module_parts import (
    Recipe,
    Schedule,
    arguments_of,
    check_mean,
    make_optimizer,
    named_loss,
    own_loss,
    split_score,
)
from mggcn.nn.pairs import users_module
from mggcn.nn.partitioned import PartitionedGraph
from mggcn.train.engine import Scores
from mggcn.train.metrics import SPLITS

MEANS_LOOKED_AT = 3
"""Steps after which a loss that gave nothing to tell by counts as a mean."""
OTHERS = "others"
"""Name of the tensor that holds, as JSON, what an optimiser keeps besides tensors."""


class ModuleEngine:
    """Trains a copy of a user's module; it implements `Engine` of train/engine.py."""

    queue_s: float = 0.0
    steps: int = 1
    compare_every: int = 0

    def __init__(self, recipe: Recipe, part: PartitionedGraph) -> None:
        self._recipe = recipe
        self._part = part
        self.rank: int = part.rank
        self.size: int = part.num_ranks
        self.metric: str = recipe.metric_name
        self.lower_is_better: bool = recipe.lower_is_better
        self._train = recipe.config.train
        self._seed = self._train.seed
        self._goal: Goal = LinkGoal(recipe, part) if recipe.task == "links" else VertexGoal(recipe, part)
        self._signals = [0.0, 0.0]
        self._stepped = 0
        self._best: dict[str, Tensor] = {}
        self._make()

    def _make(self) -> None:
        self.module: torch.nn.Module = copy.deepcopy(self._recipe.module).to(self._part.device)
        self._optimizer = make_optimizer(self.module, self._recipe)
        self._schedule = Schedule(self._optimizer, self._recipe)
        self._plateau: float | None = None
        self._rate = 0.0

    def start(self, seed: int, step: int, rate: float | None) -> None:
        self._seed, self._plateau = seed, rate
        self._schedule.start(step)

    def set_rate(self, rate: float | None) -> None:
        self._plateau = rate

    def rate_of(self, epoch: int, rate: float | None) -> float:
        return self._rate

    def set_signals(self, stop: float, seconds: float) -> None:
        self._signals = [stop, seconds]

    def window_end(self, step: int) -> int:
        return step + 1

    def advance(self, first: int, last: int) -> npt.NDArray[np.float64]:
        return np.stack([self._step(epoch) for epoch in range(first, last)])

    def _step(self, epoch: int) -> npt.NDArray[np.float64]:
        """Train one epoch; an epoch that is not finite moves no weight, and its STOP is NaN."""
        part = self._part
        self._rate = self._schedule.set(epoch, self._plateau)
        part.start_epoch(epoch, self._seed)
        # What torch draws follows from seed and epoch, so that a resumed run draws it again.
        torch.manual_seed((self._seed << 20) + epoch)
        drawn = self._random_state()
        self.module.train()
        self._optimizer.zero_grad()
        looks = self._stepped < MEANS_LOOKED_AT and self.size > 1
        loss = self._goal.loss(self.module, forward(self.module, part), self._seed, epoch, looks=looks)
        # In the first step alone: later other threads of the process may draw, on_epoch for example.
        if self._stepped == 0 and self.size > 1 and not torch.equal(drawn, self._random_state()):
            name = type(users_module(self.module)).__name__
            raise ConfigError(
                f"{name} or its loss draws torch's random numbers, which ranks that are threads share and others repeat; "
                "take mggcn.nn.dropout(x, part, p, self.training), or a torch.Generator of its own for numbers that do not "
                "depend on rows, or train on one rank"
            )
        self._stepped += 1
        signals = torch.tensor([0.0, *self._signals], dtype=torch.float64, device=part.device)
        signals[0] = loss.detach()
        loss.backward()
        part.sum_gradients(self.module)
        found: npt.NDArray[np.float64] = part.sum_over_ranks(signals).cpu().numpy()
        grads = [p.grad for p in self.module.parameters() if p.grad is not None]
        if not math.isfinite(found[0]) or not all(bool(grad.isfinite().all()) for grad in grads):
            found[STOP] = math.nan
            return found
        if self._train.clip_norm:
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), self._train.clip_norm)
        self._optimizer.step()
        self._schedule.end_epoch()
        return found

    def _random_state(self) -> Tensor:
        """Return the state of torch's generators; equal on all ranks, as threads share one, until one of them draws."""
        device = self._part.device
        of_device = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
        return torch.cat([torch.get_rng_state(), *of_device])

    def evaluate(self) -> Scores:
        return self._goal.evaluate(self.module, self._embeddings())

    def _embeddings(self) -> Tensor:
        """Return what the module gives for this rank's rows (V, C), without dropout. Collective."""
        with torch.no_grad():
            return forward(self.module.eval(), self._part)

    def links(self, state: Mapping[str, Tensor]) -> dict[str, Mapping[str, float | None]]:
        """Return every score of links with these weights; the module keeps its own. {} of other tasks. Collective."""
        if not isinstance(self._goal, LinkGoal):
            return {}
        before = _copies(self.module)
        self.module.load_state_dict(dict(state))
        found = self._goal.every(self.module, self._embeddings())
        self.module.load_state_dict(before)
        return found

    def compare(self, epoch: int) -> dict[str, float | None]:
        return {}

    def batch_counts(self, epoch: int) -> dict[str, Any]:
        return {}

    def keep_best(self) -> None:
        self._best = _copies(self.module)

    def restart(self, seed: int) -> None:
        self._make()

    def state(self) -> Mapping[str, Tensor]:
        return {}

    def weights(self, *, best: bool) -> dict[str, Mapping[str, Tensor]]:
        return {"weights": _copies(self.module), "best": self._best if best else {}}

    def optimizer_state(self) -> Mapping[str, Tensor]:
        found: dict[str, Tensor] = {}
        others: dict[str, Any] = {}
        for number, parameter in enumerate(self._parameters()):
            for name, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    found[f"{number}:{name}"] = value.detach().cpu().clone()
                else:
                    others[f"{number}:{name}"] = value
        try:
            text = json.dumps(others).encode()
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"the state of {type(self._optimizer).__name__} cannot be saved: {error}; checkpoints keep tensors and "
                "numbers"
            ) from error
        return found | {OTHERS: torch.frombuffer(bytearray(text), dtype=torch.uint8)}

    def load(self, parts: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.module.load_state_dict(dict(parts["weights"]))
        self._best = dict(parts.get("best", {}))
        saved = dict(parts["optimizer"])
        others: dict[str, Any] = parse_object(bytes(saved.pop(OTHERS).tolist()))
        parameters = self._parameters()
        for key, value in (*saved.items(), *others.items()):
            number, _, name = key.partition(":")
            parameter = parameters[int(number)]
            # Not by load_state_dict, which would bring every tensor to its parameter's type.
            self._optimizer.state[parameter][name] = (
                _at_home(value, name, parameter) if isinstance(value, Tensor) else value
            )

    def _parameters(self) -> list[Tensor]:
        return list(itertools.chain.from_iterable(group["params"] for group in self._optimizer.param_groups))

    def remedy(self, step: int) -> str:
        return f"the learning rate (now {self._rate}) or check the features for huge values"

    def barrier(self) -> None:
        self._part.total(0.0)

    def peak_bytes(self) -> int:
        return self._part.peak_bytes()


class Goal(Protocol):
    """What a module is trained for, on one rank: the loss of what it gives for the rank's rows (V, C), and scores."""

    def loss(self, module: torch.nn.Module, rows: Tensor, seed: int, epoch: int, *, looks: bool) -> Tensor:
        """Return this rank's share of the loss, a mean over all ranks. looks: whether a user's function that returns one
        number is looked at. Raises: ConfigError.
        """
        ...

    def evaluate(self, module: torch.nn.Module, rows: Tensor) -> Scores:
        """Return the score of each split. Collective."""
        ...


class VertexGoal:
    """Labels of vertices: the loss is a mean over the training vertices of all ranks."""

    def __init__(self, recipe: Recipe, part: PartitionedGraph) -> None:
        self._recipe, self._part = recipe, part
        labels = part.labels()
        self._labels = labels.long() if recipe.task == "classes" else _entries(labels, part.dtype, recipe.task)
        self._masks = [self._split(name) for name in SPLITS]
        self._num_train = part.count(self._masks[0])
        self._every_label = part.gather(self._labels if recipe.task == "classes" else self._labels.double()).cpu()
        self._every_mask = [part.gather(mask.long()).bool().cpu() for mask in self._masks]
        self._entries: float | None = None
        self._is_mean = False

    def _split(self, name: str) -> Tensor:
        data = self._recipe.config.data
        name = name if data.splits == "main" else f"alt_{name}"
        if name.endswith("train") or name in self._part.splits:
            return self._part.split(name, data.split)
        return torch.zeros_like(self._part.owned)

    def loss(self, module: torch.nn.Module, rows: Tensor, seed: int, epoch: int, *, looks: bool) -> Tensor:
        recipe, mask = self._recipe, self._masks[0]
        scores, labels = self._checked(rows)[mask], self._labels[mask]
        if recipe.loss is None:
            total, entries = named_loss(recipe.config.train.loss, scores, labels)
            if self._entries is None:
                self._entries = max(float(self._part.total(float(entries))), 1.0)
            return total / self._entries
        total, mean = own_loss(recipe.loss, scores, labels)
        # A module may begin with equal scores, of which every mean is the same: then the next steps tell.
        if mean and not self._is_mean and looks:
            self._is_mean = check_mean(recipe.loss, scores.detach(), labels, self._part.rank)
        return total / self._num_train

    def _checked(self, scores: Tensor) -> Tensor:
        """Return the scores (V, C). Raises: ConfigError for fewer columns than classes."""
        if self._recipe.task == "classes" and self._recipe.loss is None:
            classes = int(self._every_label.max()) + 1
            if scores.shape[1] < classes:
                raise ConfigError(
                    f"the module returns {scores.shape[1]} columns, but the labels have {classes} classes"
                )
        return scores

    def evaluate(self, module: torch.nn.Module, rows: Tensor) -> Scores:
        whole = self._part.gather(rows)
        values = torch.zeros(3, 2, dtype=torch.float64, device=self._part.device)
        if self._part.rank == 0:  # once: a user's function need not give the same twice
            scores = whole.cpu()
            for number, mask in enumerate(self._every_mask):
                score = split_score(self._recipe, scores[mask], self._every_label[mask])
                if score is not None:
                    values[number] = torch.tensor([score, 1.0], dtype=torch.float64)
        found = self._part.sum_over_ranks(values).tolist()
        return {name: score if known else None for name, (score, known) in zip(SPLITS, found, strict=True)}


def forward(module: torch.nn.Module, part: PartitionedGraph) -> Tensor:
    """Return a module's scores (V, C) of a rank's rows. Raises: ConfigError if it returns something else."""
    module = users_module(module)
    scores = module(part.features, part) if arguments_of(module) == 2 else module(part)
    if not isinstance(scores, Tensor) or scores.dim() != 2 or len(scores) != part.num_rows:
        came = f"shape {tuple(scores.shape)}" if isinstance(scores, Tensor) else type(scores).__name__
        raise ConfigError(
            f"{type(module).__name__} must return scores (V, C), a row for each of the {part.num_rows} rows of its "
            f"part, got {came}"
        )
    return scores


def predicted(module: torch.nn.Module, part: PartitionedGraph) -> Tensor:
    """Return the scores (N, C) of all vertices, in the graph's order, on every rank, without dropout. Collective."""
    module = module.to(part.device).eval()
    with torch.no_grad():
        return part.gather(forward(module, part))


def _copies(module: torch.nn.Module) -> dict[str, Tensor]:
    """Return copies of all weights on the host; each its own, as files refuse tensors that share memory."""
    return {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}


def _at_home(value: Tensor, name: str, parameter: Tensor) -> Tensor:
    """Bring a tensor of the optimiser's state to where torch keeps it: counts of steps on the host."""
    return value if name == "step" else value.to(parameter.device)


def _entries(labels: Tensor, dtype: torch.dtype, task: str) -> Tensor:
    """Return several labels or numbers a vertex as (V, T) of the rows' type, NaN where unknown."""
    found = labels.to(dtype)
    return torch.where(labels < 0, torch.nan, found) if task == "labels" else found
