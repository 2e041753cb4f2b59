"""How far the gradient of a step over a batch is from that of the whole graph, at the same weights and dropout."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mggcn.planning.regions import COMPARED
from mggcn.train.epoch import TrainingEpoch
from mggcn.train.runtime import RankRuntime


class Comparison:
    """Compares gradients on one rank. Memory: the exact gradient, and the statistics of norms."""

    def __init__(self, runtime: RankRuntime, epoch: TrainingEpoch) -> None:
        weights = runtime.weights
        self._runtime, self._epoch = runtime, epoch
        self._exact = torch.zeros_like(weights.grad)
        self._statistics = weights.flat[weights.trained.numel() :]
        self._before = torch.zeros_like(self._statistics)

    def run(self, seed: int, epoch: int) -> dict[str, float | None]:
        """Return cosine and ratio of norms of the gradient of an epoch's first step and the exact one, for the history.

        None where one of them is zero or not finite. Nothing is left behind but in `weights.grad`: neither weights nor
        statistics of norms move, and the step is the next one still. Collective.
        Cost: a training step over the whole graph, and one over the batch.
        """
        grad, step = self._runtime.weights.grad, epoch * self._epoch.steps
        self._before.copy_(self._statistics)
        self._epoch.start(seed, step)
        self._epoch.exact_gradients()
        self._exact.copy_(grad)
        # The clock stands still, so that both have the dropout of the step that follows.
        self._epoch.start(seed, step)
        self._runtime.begin_epoch(step)
        self._epoch.gradients(epoch)
        both, sampled, exact = _products(grad, self._exact).tolist()
        self._statistics.copy_(self._before)
        self._epoch.start(seed, step)
        norms = math.sqrt(sampled) * math.sqrt(exact)
        known = math.isfinite(norms) and exact > 0
        return {
            "gradient_cosine": both / norms if known and norms > 0 else None,
            "gradient_ratio": math.sqrt(sampled) / math.sqrt(exact) if known else None,
        }


def _products(one: Tensor, other: Tensor) -> Tensor:
    """Return <one, other>, <one, one> and <other, other>, summed in float64."""
    total = torch.zeros(3, dtype=torch.float64, device=one.device)
    for a, b in zip(one.split(COMPARED), other.split(COMPARED), strict=True):
        a, b = a.double(), b.double()
        total += torch.stack([a @ b, a @ a, b @ b])
    return total
