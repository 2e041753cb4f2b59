"""Rates of a disk, measured in about a second, or by gigabytes."""

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

    monkeypatch.setattr(disk_rates, "BRIEF", (2**25, 0.4))
    monkeypatch.setattr(disk_rates, "WINDOW_BYTES", PIECE_BYTES)
    monkeypatch.setattr(os, "pwritev", slowed(os.pwritev, 0.1))
    monkeypatch.setattr(os, "preadv", slowed(os.preadv, 0.05))
    begin = time.monotonic()
    rates = measure_disk(tmp_path, brief=True)
    assert time.monotonic() - begin < 10
    # A window is one call of 0.05 s or 0.1 s at least, one at a time; side by side, each as long as the slower.
    assert PIECE_BYTES / 1 < rates.write <= PIECE_BYTES / 0.1
    assert PIECE_BYTES / 1 < rates.read <= PIECE_BYTES / 0.05
    assert PIECE_BYTES / 1 < rates.both <= 2 * PIECE_BYTES / 0.1
    assert [*tmp_path.iterdir()] == []


def test_a_disk_in_memory() -> None:
    """Fails if a file system without a disk cannot be measured."""
    folder = Path("/dev/shm")
    if not folder.is_dir() or shutil.disk_usage(folder).free < 4 * disk_rates.BRIEF[0]:
        pytest.skip("no file system in memory with room for it")
    rates = measure_disk(folder, brief=True)
    assert min(rates.read, rates.write, rates.both) > 50e6


def test_a_long_test_moves_what_caches_do_not_hold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fails if a disk that is named is measured by as little as any, or beyond half of what is free on it."""
    found = []

    def planned(specs: Iterable[tuple[PageSpec, int, int]]) -> PagePlan:
        found.append(plan_pages(specs))
        raise PlanError("enough")

    monkeypatch.setattr(disk_rates, "plan_pages", planned)
    usage = shutil.disk_usage(tmp_path)
    for free, brief in ((2**36, True), (2**36, False), (2**32, False), (0, False)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        with pytest.raises(PlanError, match="enough"):
            measure_disk(tmp_path, brief=brief)
    assert [plan.nbytes for plan in found] == [2**28, 2**33, 2**31, 2**28]
