"""What successive runs on one graph share: the partition and its statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

from mggcn.config import Config

Purpose = Literal["partition", "statistics"]
T = TypeVar("T")


class Shared:
    """Caches the newest value for each purpose, for runs with the same key. For one graph and one thread at a time."""

    def __init__(self) -> None:
        self._kept: dict[Purpose, tuple[Any, Any]] = {}

    def found(self, purpose: Purpose, key: Any, make: Callable[[], T]) -> T:
        """Return the value cached for a key, or make and cache it."""
        if purpose not in self._kept or self._kept[purpose][0] != key:
            self._kept.pop(purpose, None)  # freed before the next is made
            self._kept[purpose] = key, make()
        value: T = self._kept[purpose][1]
        return value


def partition_key(config: Config) -> tuple[Any, ...]:
    """Return the settings that a partition depends on, besides the graph.

    On one rank a cached order has no seed.
    """
    run = config.run
    seed = None if run.ranks == 1 and run.order in ("random", "none") else config.train.seed
    return run.strategy, run.ranks, run.order, run.cut_bins, seed
