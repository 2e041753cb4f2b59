"""What tests of tuning share."""

from __future__ import annotations

import math

import pytest

from mggcn.backend.cpu import explore as cpu_explore
from mggcn.backend.cpu.explore import Exploration, Trial


@pytest.fixture
def blocks_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks take half of what other ways take, whatever a clock would say, and all ways are tried."""
    original = Exploration.took

    def took(self: Exploration, trial: Trial, turn: int, seconds: float) -> None:
        assert seconds > 0
        original(self, trial, turn, 1e-9 if trial.ways[turn].way == "blocks" else 2e-9)

    monkeypatch.setattr(Exploration, "took", took)
    monkeypatch.setattr(cpu_explore, "HOPELESS", math.inf)
