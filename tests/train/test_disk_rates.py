"""Rates of a disk, measured in about a second."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mggcn.memory.pages import PIECE_BYTES
from mggcn.train import disk_rates
from mggcn.train.disk_rates import measure_disk


def test_rates_are_those_of_the_calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fails if a slow disk is measured for long, rates are not those of its calls, or something is left behind."""

    def slowed(call: Callable[..., int], seconds: float) -> Callable[..., int]:
        return lambda *arguments: (time.sleep(seconds), call(*arguments))[1]

    monkeypatch.setattr(disk_rates, "MATRIX_BYTES", 2**25)
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


def test_a_disk_in_memory() -> None:
    """Fails if a file system without a disk cannot be measured."""
    folder = Path("/dev/shm")
    if not folder.is_dir() or shutil.disk_usage(folder).free < 4 * disk_rates.MATRIX_BYTES:
        pytest.skip("no file system in memory with room for it")
    rates = measure_disk(folder)
    assert min(rates.read, rates.write, rates.both) > 50e6
