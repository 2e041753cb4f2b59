"""State of Adam, AdamW and SGD for the planned weights, and the learning rate of an epoch.

The backend makes the step itself, with everything else that ends an epoch (backend/epoch_end.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mggcn.backend.epoch_end import Step, Weight
from mggcn.config import TrainConfig
from mggcn.train.checkpoint import Progress
from mggcn.train.learned import LearnedRows
from mggcn.train.runtime import Weights

FIRST = "layers.1.weight"
"""The matrix that decays under weight_decay_on = "first"."""


class Optimizer:
    """The state of an optimiser, allocated once: up to two flat tensors shaped as the weights, and counts of steps.

    learned: rows that move with the weights, and have their own state.
    Source: Kingma and Ba 2015 (adam, with L2 in the gradient), Loshchilov and Hutter 2019 (adamw).
    """

    def __init__(self, config: TrainConfig, weights: Weights, learned: LearnedRows | None = None) -> None:
        kinds = ("exp_avg", "exp_avg_sq") if config.optimizer != "sgd" else ("momentum",) if config.momentum else ()
        moments = {kind: torch.zeros_like(weights.trained) for kind in kinds}
        trained = weights.views_of(weights.trained)
        steps = torch.zeros(len(trained), dtype=torch.float32, device=weights.flat.device)
        self._state = {kind: weights.views_of(flat) for kind, flat in moments.items()}
        self._steps = dict(zip(trained, steps, strict=True)) if len(kinds) == 2 else {}
        self._flat = (*moments.values(), steps)
        whole: list[Weight] = []
        if learned is not None and not learned.in_batches:
            whole.append(learned.weight(config.weight_decay if config.weight_decay_on == "all" else 0.0))
        self.step: Step = Step(
            config.optimizer,
            config.momentum,
            (
                *(
                    Weight(
                        view,
                        weights.grads[name],
                        tuple(views[name] for views in self._state.values()),
                        count,
                        weights.copies.get(name),
                        config.weight_decay if config.weight_decay_on == "all" or name == FIRST else 0.0,
                    )
                    for (name, view), count in zip(trained.items(), steps, strict=True)
                ),
                *whole,
            ),
            weights.trained,
            weights.grad,
            tuple(moments.values()),
            steps,
            weights.stored,
            config.clip_norm,
            learned.move if learned is not None and learned.in_batches else None,
        )

    def reset(self) -> None:
        """Forget all steps, in place."""
        for tensor in self._flat:
            tensor.zero_()

    def tensors(self) -> dict[str, Tensor]:
        """Return copies of the state of every weight on the host, for a checkpoint."""
        kept = {**self._state, **({"step": self._steps} if self._steps else {})}
        return {f"{n}:{kind}": t.detach().cpu().clone() for kind, group in kept.items() for n, t in group.items()}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `tensors` returned. Raises: KeyError if it is the state of another model or optimiser."""
        for kind, group in {**self._state, "step": self._steps}.items():
            for name, tensor in group.items():
                tensor.copy_(tensors[f"{name}:{kind}"])


def learning_rate(config: TrainConfig, epoch: int, rate: float | None = None) -> float:
    """Return the learning rate of an epoch (from 0): schedule times linear warm-up, both from schedule_start on.

    rate: the learning rate that the plateau schedule has reached (Progress.rate).
    """
    factor, epoch = 1.0, max(epoch - config.schedule_start, 0)
    if config.schedule == "cosine":
        factor = 0.5 * (1.0 + math.cos(math.pi * epoch / max(config.epochs - config.schedule_start, 1)))
    elif config.schedule == "step":
        factor = config.schedule_gamma ** (epoch // config.schedule_step)
    if epoch < config.warmup:
        factor *= (epoch + 1) / config.warmup
    return (config.lr if rate is None else rate) * factor


def learning_rates(config: TrainConfig, epochs: range, rate: float | None = None) -> npt.NDArray[np.float64]:
    """Return the learning rates of some epochs, (len(epochs),), as `learning_rate`."""
    return np.array([learning_rate(config, epoch, rate) for epoch in epochs])


PLATEAU_RISE, PLATEAU_EPS = 1e-4, 1e-8
"""The relative improvement by which a score counts as better, and the smallest cut: defaults of torch's
ReduceLROnPlateau.
"""


def follow_plateau(config: TrainConfig, progress: Progress, score: float, *, lower: bool = False) -> bool:
    """Give the plateau schedule a validation score; return whether it has cut progress.rate. lower: scores are errors."""
    peak = progress.peak
    least = 0.0 if peak is None else PLATEAU_RISE * abs(peak)
    if peak is None or (score < peak - least if lower else score > peak + least):
        progress.peak, progress.stalled = score, 0
        return False
    progress.stalled += 1
    if progress.stalled <= config.schedule_patience:
        return False
    progress.stalled = 0
    before = config.lr if progress.rate is None else progress.rate
    after = before * config.schedule_gamma
    if before - after <= PLATEAU_EPS:
        return False
    progress.rate = after
    return True
