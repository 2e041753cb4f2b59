"""Seconds of a run's epochs, for their median: evenly spread ones, so that memory does not grow with the epochs."""

from __future__ import annotations

from array import array
from typing import Final

import numpy as np

MOST: Final = 1 << 16
"""Epochs that are kept at most, 512 KiB; beyond, every second, fourth, ... epoch is."""


class EpochSeconds:
    """The seconds of epochs, of which at most MOST are stored."""

    def __init__(self) -> None:
        self._kept = array("d")
        self._stride = 1
        self._seen = 0

    def add(self, seconds: float) -> None:
        """Add the seconds of an epoch."""
        if self._seen % self._stride == 0:
            self._kept.append(seconds)
        self._seen += 1
        if len(self._kept) > MOST:
            self._kept = self._kept[::2]
            self._stride *= 2

    def median(self) -> float | None:
        """Return the median of the stored seconds; None before the first epoch."""
        return float(np.median(self._kept)) if self._kept else None
