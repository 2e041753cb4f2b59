"""Data that successive runs on one graph share: the partition, its statistics, and a rank's constant inputs and tiles."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from mggcn.config import Config

Purpose = Literal["partition", "statistics", "rank"]
T = TypeVar("T")

_EPOCHS_ALONE = {
    "model": {"hidden", "dropout", "bias"},
    "train": {
        *("epochs", "lr", "optimizer", "momentum", "weight_decay", "weight_decay_on", "clip_norm", "warmup"),
        *("schedule", "schedule_step", "schedule_gamma", "schedule_patience", "schedule_start", "patience"),
        *("eval_every", "metric", "seed", "repeat", "checkpoint_every", "checkpoint_minutes"),
    },
    "run": {"log", "memory_limit", "timeout_s", "tune"},
}
"""Settings that only epochs read. Any other setting is assumed to change the data that a rank holds."""


class Shared:
    """Keeps the newest value for every purpose, for runs with the same key. One graph and one thread at a time."""

    def __init__(self) -> None:
        self._kept: dict[Purpose, tuple[Any, Any]] = {}

    def find(self, purpose: Purpose, key: Any) -> Any:
        """Return the value kept for a key. If another key's value is kept, free it and return None."""
        if purpose in self._kept and self._kept[purpose][0] != key:
            del self._kept[purpose]
        return self._kept[purpose][1] if purpose in self._kept else None

    def keep(self, purpose: Purpose, key: Any, value: Any) -> None:
        """Keep a value for the next run."""
        self._kept[purpose] = key, value

    def found(self, purpose: Purpose, key: Any, make: Callable[[], T]) -> T:
        """Return the value kept for a key, or make and keep it."""
        value: T | None = self.find(purpose, key)
        if value is None:
            value = make()
            self.keep(purpose, key, value)
        return value


def partition_key(config: Config) -> tuple[Any, ...]:
    """Return the settings that a partition depends on, besides the graph. On one rank an order that is kept has no
    seed.
    """
    run = config.run
    seed = None if run.ranks == 1 and run.order in ("random", "none") else config.train.seed
    return run.strategy, run.ranks, run.order, run.cut_bins, seed


def held_key(config: Config) -> tuple[Any, ...]:
    """Return the settings that determine the data of a rank, except weights and the arena."""
    settings = tuple(
        (table, name, value)
        for table, content in dataclasses.asdict(config).items()
        for name, value in content.items()
        if name not in _EPOCHS_ALONE.get(table, ())
    )
    return partition_key(config), settings
