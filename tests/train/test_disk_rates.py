"""Rates of a disk, measured by gigabytes."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from mggcn.errors import PlanError
from mggcn.memory.pages import PIECE_BYTES, PagePlan, PageSpec, plan_pages
from mggcn.train import disk_rates
from mggcn.train.disk_rates import measure_disk


def test_rates_are_those_of_the_calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fails if a slow disk is measured for long, rates are not those of its calls, or something is left behind."""

    def slowed(call: Callable[..., int], seconds: float) -> Callable[..., int]:
        return lambda *arguments: (time.sleep(seconds), call(*arguments))[1]

    monkeypatch.setattr(disk_rates, "MATRIX_BYTES", 2**25)
    monkeypatch.setattr(disk_rates, "LEAST_BYTES", 2**25)
    monkeypatch.setattr(disk_rates, "LIMIT_S", 0.4)
    monkeypatch.setattr(disk_rates, "WINDOW_BYTES", PIECE_BYTES)
    monkeypatch.setattr(os, "pwritev", slowed(os.pwritev, 0.1))
    monkeypatch.setattr(os, "preadv", slowed(os.preadv, 0.05))
    begin = time.monotonic()
    rates = measure_disk(tmp_path)
    assert time.monotonic() - begin < 10
    # A window is one call of 0.05 s or 0.1 s at least, one at a time; side by side, each as long as the slower.
    assert PIECE_BYTES / 1 < rates.write <= PIECE_BYTES / 0.1
    assert PIECE_BYTES / 1 < rates.read <= PIECE_BYTES / 0.05
    assert PIECE_BYTES / 1 < rates.both <= 2 * PIECE_BYTES / 0.1
    assert [*tmp_path.iterdir()] == []


def test_a_test_moves_what_caches_do_not_hold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fails if a disk is measured by what caches hold, or beyond half of what is free on it."""
    found = []

    def planned(specs: Iterable[tuple[PageSpec, int, int]]) -> PagePlan:
        found.append(plan_pages(specs))
        raise PlanError("enough")

    monkeypatch.setattr(disk_rates, "plan_pages", planned)
    usage = shutil.disk_usage(tmp_path)
    for free in (2**36, 2**32, 0):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        with pytest.raises(PlanError, match="enough"):
            measure_disk(tmp_path)
    assert [plan.nbytes for plan in found] == [2**33, 2**31, 2**28]
