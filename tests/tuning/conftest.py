"""What tests of tuning share."""

from __future__ import annotations

import math

import pytest

from mggcn.backend.cpu import spmm as cpu_spmm
from mggcn.tuning.exploration import Exploration, Trial


@pytest.fixture
def blocks_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks take half of what other variants take, whatever a clock would say, and all variants are tried."""
    original = Exploration.add

    def add(self: Exploration, trial: Trial, variant: int, seconds: float) -> None:
        assert seconds > 0
        original(self, trial, variant, 1e-9 if trial.variants[variant].way == "blocks" else 2e-9)

    monkeypatch.setattr(Exploration, "add", add)
    monkeypatch.setattr(cpu_spmm, "HOPELESS", math.inf)
