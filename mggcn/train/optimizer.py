"""State of Adam, AdamW and SGD for the planned weights, and the learning rate as a pure function of the epoch.

The step itself is the backend's, with all else that ends an epoch (backend/epoch_end.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from mggcn.backend.epoch_end import Step, Weight
from mggcn.config import TrainConfig
from mggcn.train.runtime import Weights

FIRST = "layers.1.weight"
"""The matrix that decays under weight_decay_on = "first"."""


class Optimizer:
    """The state of an optimiser: one flat tensor or two like the weights, and counts of steps, allocated once.

    Source: Kingma and Ba 2015 (adam, with L2 in the gradient), Loshchilov and Hutter 2019 (adamw).
    """

    def __init__(self, config: TrainConfig, weights: Weights) -> None:
        kinds = ("exp_avg", "exp_avg_sq") if config.optimizer != "sgd" else ("momentum",) if config.momentum else ()
        moments = {kind: torch.zeros_like(weights.flat) for kind in kinds}
        steps = torch.zeros(len(weights.views), dtype=torch.float32, device=weights.flat.device)
        self._state = {kind: weights.views_of(flat) for kind, flat in moments.items()}
        self._steps = dict(zip(weights.views, steps, strict=True)) if len(kinds) == 2 else {}
        self._flat = (*moments.values(), steps)
        self.step = Step(
            config.optimizer,
            config.momentum,
            tuple(
                Weight(
                    view,
                    weights.grads[name],
                    tuple(views[name] for views in self._state.values()),
                    count,
                    weights.copies.get(name),
                    config.weight_decay if config.weight_decay_on == "all" or name == FIRST else 0.0,
                )
                for (name, view), count in zip(weights.views.items(), steps, strict=True)
            ),
            weights.flat,
            weights.grad,
            tuple(moments.values()),
            steps,
            weights.stored,
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


def learning_rate(config: TrainConfig, epoch: int) -> float:
    """Return the learning rate of an epoch (from 0): schedule times linear warm-up, both from schedule_start on."""
    factor, epoch = 1.0, max(epoch - config.schedule_start, 0)
    if config.schedule == "cosine":
        factor = 0.5 * (1.0 + math.cos(math.pi * epoch / max(config.epochs - config.schedule_start, 1)))
    elif config.schedule == "step":
        factor = config.schedule_gamma ** (epoch // config.schedule_step)
    if epoch < config.warmup:
        factor *= (epoch + 1) / config.warmup
    return config.lr * factor
