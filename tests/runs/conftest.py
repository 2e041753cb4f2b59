"""What tests of timed products share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mggcn.backend.spmm_choice import SpmmChoice
from mggcn.runs import tune_products
from mggcn.runs.tune_products import Call


@pytest.fixture
def blocks_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks take half of what other variants take, whatever the clock says."""
    original = tune_products.call_s

    def call_s(call: Call, choice: SpmmChoice, synchronize: Callable[[], None]) -> float:
        assert original(call, choice, synchronize) > 0
        return 1e-9 if choice.way == "blocks" else 2e-9

    monkeypatch.setattr(tune_products, "call_s", call_s)
