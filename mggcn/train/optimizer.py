"""torch.optim on the planned weights: parameter groups, and the learning rate as a pure function of the epoch."""

from __future__ import annotations

import math

import torch

from mggcn.config import TrainConfig
from mggcn.train.runtime import Weights


def make_optimizer(config: TrainConfig, weights: Weights) -> torch.optim.Optimizer:
    """Return Adam, AdamW or SGD (fused: no temporaries) with weight decay on all weights or on layer 1's matrix only."""
    first = "layers.1.weight"
    decayed = [v for n, v in weights.views.items() if config.weight_decay_on == "all" or n == first]
    free = [v for n, v in weights.views.items() if config.weight_decay_on != "all" and n != first]
    groups = [
        {"params": params, "weight_decay": decay}
        for params, decay in ((decayed, config.weight_decay), (free, 0.0))
        if params
    ]
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=True)
    kind = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
    return kind(groups, lr=config.lr, fused=True)


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


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Set the learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = value


def optimizer_tensors(optimizer: torch.optim.Optimizer, weights: Weights) -> dict[str, torch.Tensor]:
    """Return the state of every weight as named tensors, for a checkpoint."""
    tensors = {}
    for name, view in weights.views.items():
        for key, value in optimizer.state.get(view, {}).items():
            if isinstance(value, torch.Tensor):
                tensors[f"{name}:{key}"] = value.detach().cpu().clone()
    return tensors


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer, weights: Weights, tensors: dict[str, torch.Tensor]
) -> None:
    """Restore what `optimizer_tensors` returned."""
    for full, value in tensors.items():
        name, _, key = full.partition(":")
        view = weights.views[name]
        device = view.device if value.dim() else value.device
        optimizer.state[view][key] = value.clone().to(device)
