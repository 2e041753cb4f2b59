"""Scores that are handed over some rows at a time, whether memory holds all of them or not.

C classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from mggcn.model.kinds.ends import Score
from mggcn.model.runtime import Runtime
from mggcn.model.values import Op
from mggcn.train.runtime import After

TakeScores = Callable[[int, torch.Tensor], object]
"""Gets the number of a first row, and the logits (rows, C) of some rows from there on."""
SCORED_ROWS: Final = 1 << 14
"""Rows of scores that are handed over at a time: what is made of them takes little memory."""


def behind_scores(take: TakeScores) -> After:
    """Return what hands over the logits of each window of rows of a program in stages."""
    first = 0

    def after(op: Op, part: Runtime, last: bool) -> None:
        nonlocal first
        if isinstance(op.kind, Score):
            logits = op.tensor(part, 0)
            in_parts(first, logits, take)
            first += len(logits)

    return after


def in_parts(first: int, logits: torch.Tensor, take: TakeScores) -> None:
    """Hand over logits whose first row has this number, some rows at a time."""
    for start in range(0, len(logits), SCORED_ROWS):
        take(first + start, logits[start : start + SCORED_ROWS])
