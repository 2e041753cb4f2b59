"""Tests that pass, each with a fault that one mode of tests.emulator.checked alone sees: the command is given this file."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator.test_checked import sum_of_blocks
from tests.emulator.test_emulator import run


@pytest.mark.emulated
def test_memory() -> None:
    """A kernel reads behind its tensor."""
    run("shifted", 1, 32, np.zeros(32, np.float32), np.zeros(32, np.float32), np.int32(1))


@pytest.mark.emulated
def test_races() -> None:
    """A block reads what others wrote, without a fence."""
    found, right = sum_of_blocks(1, 0)
    assert found == right


@pytest.mark.emulated
def test_fused() -> None:
    """A product that is subtracted from itself."""
    x, y = np.random.default_rng(3).standard_normal((2, 32)).astype(np.float32)
    kept, out = np.zeros((2, 32), np.float32)
    run("difference", 1, 32, x, y, kept, out)
    assert not out.any()
