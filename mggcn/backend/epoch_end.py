"""The end of a training step, once gradients are summed: the weights move, and the step is recorded.

An epoch of the whole graph is one step. W weights in one flat tensor, S matrices and vectors among them, K signals, a
window of E steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

LOSS, STOP, SECONDS = range(3)
"""Columns of the signals and of their history."""
BETA1, BETA2, EPS = 0.9, 0.999, 1e-8
CLIP_EPS = 1e-6
"""Added to the norm that a gradient is divided by, as torch.nn.utils.clip_grad_norm_ does."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One matrix or vector of the model: views into the tensors of its Step, except for the operand.

    moments: Adam's two averages, or SGD's momentum if it has one; steps float32 (): number of steps made so far.
    operand: the copy that products read, in the type of activations and perhaps with padded rows; None if they read
    `value`.
    """

    value: Tensor
    grad: Tensor
    moments: tuple[Tensor, ...]
    steps: Tensor
    operand: Tensor | None
    decay: float


@dataclass(frozen=True, slots=True)
class Step:
    """One step of all weights, as torch.optim's Adam, AdamW or SGD makes it.

    values, grads, moments: (W,), elements that no weight covers stay zero; steps float32 (S,); operands: as values, or
    None. clip_norm: grads of a larger norm are scaled down to it, as by torch.nn.utils.clip_grad_norm_; 0: never.
    Afterwards grads may hold either the original or the scaled gradients. rows: moves learned rows that a batch has read,
    given the learning rate; learned rows that all move are a weight of their own memory. Both on a CPU alone.
    """

    kind: Literal["adam", "adamw", "sgd"]
    momentum: float
    weights: tuple[Weight, ...]
    values: Tensor
    grads: Tensor
    moments: tuple[Tensor, ...]
    steps: Tensor
    operands: Tensor | None
    clip_norm: float
    rows: Callable[[float], None] | None = None


@dataclass(frozen=True, slots=True)
class Books:
    """The records of a step: everything except weights that its end reads and writes. Steps count over all epochs.

    clock int64 (2,): seed and step; rates float64 (E,): learning rates; signals float64 (K,): those of the step, summed
    over ranks; history float64 (E, K): those of the last E steps, step e in row e % E, as its rate is rates[e % E];
    own float64 (K,): what the next step's start from; halted int64 (1,): 0, or, once the loss or a gradient was not
    finite, one more than the step; weights then stay as they were before it, and STOP of its row and of those after it
    is NaN, until halted is 0 again.
    """

    clock: Tensor
    rates: Tensor
    signals: Tensor
    own: Tensor
    history: Tensor
    halted: Tensor
