"""The end of an epoch on a CPU, by torch.optim's fused functional forms.

The optimiser classes use the same kernels, but their constructors would load torch's compiler (70 MiB and 1.8 s in every
rank) for nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from mggcn.backend.epoch_end import BETA1, BETA2, CLIP_EPS, EPS, Books, Step, Weight


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
        epoch = books.clock[1:]
        books.history.index_copy_(0, epoch, books.signals.view(1, -1))
        torch.index_select(books.rates, 0, epoch, out=self._rate)
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
        epoch.add_(1)
        books.signals.copy_(books.own)

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
