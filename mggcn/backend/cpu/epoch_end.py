"""The end of an epoch on a CPU, by torch.optim's fused functional forms.

The optimiser classes use the same kernels, but their constructors would load torch's compiler (70 MiB and 1.8 s in every
rank) for nothing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from mggcn.backend.epoch_end import BETA1, BETA2, CLIP_EPS, EPS, LOSS, STOP, Books, Step, Weight


class CpuEpochEnd:
    """Updates the weights and the epoch's records; weights with the same decay are updated together. Twin:
    cuda/epoch_end.cu.
    """

    def __init__(self, step: Step, books: Books) -> None:
        self._step = step
        self._books = books
        self._rate = books.rates[:1].clone()
        self._factor = step.grads.new_empty(())
        decays = dict.fromkeys(weight.decay for weight in step.weights)
        self._groups = [(decay, [w for w in step.weights if w.decay == decay]) for decay in decays]

    def __call__(self) -> None:
        books = self._books
        epoch = int(books.clock[1])
        row = epoch % books.history.shape[0]
        books.history[row].copy_(books.signals)
        if bool(books.halted) or not self._finite():
            books.history[row, STOP] = math.nan
            if not books.halted:
                books.halted.fill_(epoch + 1)
        else:
            self._rate.copy_(books.rates[row : row + 1])
            self._move()
        books.clock[1:].add_(1)
        books.signals.copy_(books.own)

    def _finite(self) -> bool:
        """Whether the loss and all gradients are finite: a NaN is both the least and the greatest, infinity one of them."""
        least, greatest = torch.aminmax(self._step.grads)
        return bool(torch.isfinite(self._books.signals[LOSS] + least.double() + greatest.double()))

    def _move(self) -> None:
        """Move all weights, and their copies for products."""
        if self._step.clip_norm:
            self._clip()
        for decay, weights in self._groups:
            if self._step.kind == "sgd":
                self._sgd(weights, decay)
            else:
                self._adam(weights, decay)
        for weight in self._step.weights:
            if weight.operand is not None:
                weight.operand.copy_(weight.value)
        if self._step.rows is not None:
            self._step.rows(float(self._rate))

    def _clip(self) -> None:
        """Scale the gradients down to the largest norm allowed."""
        factor = torch.linalg.vector_norm(self._step.grads, out=self._factor)
        torch.div(self._step.clip_norm, factor.add_(CLIP_EPS), out=factor)
        self._step.grads.mul_(factor.clamp_(max=1.0))

    def _adam(self, weights: list[Weight], decay: float) -> None:
        update = adam if self._step.kind == "adam" else adamw
        update(
            [w.value for w in weights],
            [w.grad for w in weights],
            exp_avgs=[w.moments[0] for w in weights],
            exp_avg_sqs=[w.moments[1] for w in weights],
            max_exp_avg_sqs=[],
            state_steps=[w.steps for w in weights],
            fused=True,
            capturable=True,
            amsgrad=False,
            beta1=BETA1,
            beta2=BETA2,
            lr=self._rate[0],
            weight_decay=decay,
            eps=EPS,
            maximize=False,
        )

    def _sgd(self, weights: list[Weight], decay: float) -> None:
        # Momentum starts at zero: with dampening 0 the first step then is the gradient, as in torch.optim.SGD.
        buffers: list[Tensor | None] = [w.moments[0] if w.moments else None for w in weights]
        sgd(
            [w.value for w in weights],
            [w.grad for w in weights],
            buffers,
            fused=True,
            weight_decay=decay,
            momentum=self._step.momentum,
            lr=self._rate[0],  # type: ignore[arg-type]  # fused forms take a tensor
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
