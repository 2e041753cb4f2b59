"""The end of an epoch on a GPU: the launches of cuda/epoch_end.cu, and which block moves which weights.

Two launches: the norm of the gradient, which says whether it is finite and by what to clip it, then everything else.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from mggcn.backend.cuda.kernels import Kernels
from mggcn.backend.epoch_end import BETA1, BETA2, CLIP_EPS, EPS, Books, Step, Weight

THREADS = 256
PART = 4 * THREADS
"""Weights of a block: a few for each thread."""
RULES = {"adam": 0, "adamw": 1, "sgd": 2}


def epoch_end(
    kernels: Kernels, upload: Callable[[npt.NDArray[Any]], Tensor], step: Step, books: Books
) -> Callable[[], None]:
    """Return a callable that launches the kernels. A counter on the device tells which block is the last."""
    table = np.array([row for weight in step.weights for row in _parts(weight)], np.int64)
    parts, arrived = upload(table), upload(np.zeros(1, np.int32))
    launch = functools.partial(kernels.launch, "epoch_end")
    first, second = (*step.moments, None, None)[:2]
    factor, squares = upload(np.ones(1)), upload(np.zeros(len(table)))
    limits = (step.clip_norm or math.inf, CLIP_EPS)
    end = functools.partial(
        launch,
        "end_epoch",
        (len(table),),
        (THREADS,),
        step.values,
        step.grads,
        factor,
        first,
        second,
        step.operands,
        parts,
        RULES[step.kind],
        max(weight.decay for weight in step.weights),
        step.momentum,
        BETA1,
        BETA2,
        EPS,
        step.steps,
        len(step.weights),
        books.rates,
        books.own,
        books.signals,
        books.signals.numel(),
        books.history,
        books.history.shape[0],
        books.clock,
        books.halted,
        arrived,
    )

    def checked() -> None:
        launch("clip_factor", (len(table),), (THREADS,), step.grads, parts, *limits, squares, factor, arrived)
        end()

    return checked


def _parts(weight: Weight) -> Iterator[tuple[int, ...]]:
    """Each block's share of a weight: begin, end, columns, first column, place and stride of its operand, decay, 0."""
    start, count, cols = int(weight.value.storage_offset()), weight.value.numel(), weight.value.shape[-1]
    for begin in range(0, count, PART):
        end = min(begin + PART, count)
        row, column = divmod(begin, cols)
        place, stride = -1, 0
        if weight.operand is not None:
            stride = weight.operand.stride(0)
            place = int(weight.operand.storage_offset()) + row * stride
        yield start + begin, start + end, cols, column, place, stride, int(weight.decay != 0), 0
