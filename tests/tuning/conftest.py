"""What tests of tuning share."""

from __future__ import annotations

from typing import Any

import pytest

from mggcn.config import Config
from mggcn.tuning import epochs
from mggcn.tuning.exploration import Exploration, Limits, Trial


@pytest.fixture
def blocks_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks take half of what other variants take, whatever a clock would say, and the best of each way is tried."""
    original, limits_of = Exploration.add, epochs.limits_of

    def add(self: Exploration, trial: Trial, kind: Any, variant: int, seconds: float, *, again: bool) -> None:
        assert seconds > 0
        original(self, trial, kind, variant, 1e-9 if trial.variants[variant].way == "blocks" else 2e-9, again=again)

    def limits(config: Config) -> Limits | None:
        return Limits(slowest=1e9) if limits_of(config) == Limits() else limits_of(config)

    monkeypatch.setattr(Exploration, "add", add)
    monkeypatch.setattr(epochs, "limits_of", limits)
