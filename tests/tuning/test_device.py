"""What `mggcn tune` measures of cores and memory; `tests/commands/test_tune.py` reads its file back."""

from __future__ import annotations

import itertools

from mggcn.tuning.device import fastest


def test_the_fastest_try_counts() -> None:
    """Fails if the warm-up or a slow try decides, or fewer than three tries are made."""
    clock = itertools.count()
    calls: list[int] = []
    assert fastest(lambda: calls.append(next(clock)), 0.0) < 0.1
    assert len(calls) == 4
