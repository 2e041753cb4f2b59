"""Adam, AdamW and SGD on the planned weights, and the learning rate as a pure function of the epoch.

The steps are torch.optim's fused functional forms: the same kernels as its classes, whose constructors would load torch's
compiler (70 MiB and 1.8 s in every rank) to no end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from mggcn.config import TrainConfig
from mggcn.train.runtime import Weights

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8
FIRST = "layers.1.weight"
"""The matrix that decays under weight_decay_on = "first"."""


class Optimizer:
    """Steps all weights of a model; its state is one tensor or more per weight, allocated once.

    Source: Kingma and Ba 2015 (adam, with L2 in the gradient), Loshchilov and Hutter 2019 (adamw).
    """

    def __init__(self, config: TrainConfig, weights: Weights) -> None:
        self._config = config
        self._weights = weights
        names = list(weights.views)
        decays = [n for n in names if config.weight_decay_on == "all" or n == FIRST]
        self._groups = [
            (group, decay)
            for group, decay in ((decays, config.weight_decay), ([n for n in names if n not in decays], 0.0))
            if group
        ]
        kinds = ("exp_avg", "exp_avg_sq") if config.optimizer != "sgd" else ("momentum",) if config.momentum else ()
        self._state = {kind: {n: torch.zeros_like(v) for n, v in weights.views.items()} for kind in kinds}
        device = weights.flat.device
        self._steps = {n: torch.zeros((), dtype=torch.float32, device=device) for n in names} if len(kinds) == 2 else {}

    def step(self, lr: Tensor) -> None:
        """Move every weight against its gradient; lr () lies on the weights' device, as KernelBackend.rate_dtype.

        Cost: one pass over weights, gradients and state; allocates nothing and never waits for the device.
        """
        for names, decay in self._groups:
            params = [self._weights.views[n] for n in names]
            grads = [self._weights.grads[n] for n in names]
            if self._config.optimizer == "sgd":
                self._sgd(names, params, grads, lr, decay)
            else:
                update = adam if self._config.optimizer == "adam" else adamw
                update(
                    params,
                    grads,
                    exp_avgs=[self._state["exp_avg"][n] for n in names],
                    exp_avg_sqs=[self._state["exp_avg_sq"][n] for n in names],
                    max_exp_avg_sqs=[],
                    state_steps=[self._steps[n] for n in names],
                    fused=True,
                    capturable=True,
                    amsgrad=False,
                    beta1=BETA1,
                    beta2=BETA2,
                    lr=lr,
                    weight_decay=decay,
                    eps=EPS,
                    maximize=False,
                )
        self._weights.refresh()

    def _sgd(self, names: list[str], params: list[Tensor], grads: list[Tensor], lr: Tensor, decay: float) -> None:
        # Momentum starts at zero: with dampening 0 the first step then is the gradient, as in torch.optim.SGD.
        buffers: list[Tensor | None] = [self._state["momentum"][n] if self._config.momentum else None for n in names]
        sgd(
            params,
            grads,
            buffers,
            fused=True,
            weight_decay=decay,
            momentum=self._config.momentum,
            lr=lr,  # type: ignore[arg-type]  # fused forms take a tensor
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )

    def reset(self) -> None:
        """Forget all steps, in place."""
        for group in (*self._state.values(), self._steps):
            for tensor in group.values():
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
    """Return the learning rate of an epoch (from 0): schedule times linear warm-up."""
    factor = 1.0
    if config.schedule == "cosine":
        factor = 0.5 * (1.0 + math.cos(math.pi * epoch / config.epochs))
    elif config.schedule == "step":
        factor = config.schedule_gamma ** (epoch // config.schedule_step)
    if epoch < config.warmup:
        factor *= (epoch + 1) / config.warmup
    return config.lr * factor
