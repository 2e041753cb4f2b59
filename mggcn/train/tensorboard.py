"""A run's history as TensorBoard reads it: scalars of every epoch and the configuration as text."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mggcn.config import Config
from mggcn.config.files import to_toml
from mggcn.errors import ConfigError

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FOLDER = "tensorboard"
"""In the run folder; each repeat of a run has a folder of its own in it."""
FLUSH_S = 10
"""Seconds after which a reader sees an epoch."""


def require_tensorboard() -> None:
    """Raise ConfigError if a run cannot be logged, before it starts."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            "run.log tensorboard needs the package tensorboard, which is not installed: pip install tensorboard, "
            "or leave --log out; history.jsonl is written either way"
        )


def log_trial(folder: Path, settings: Mapping[str, Any], scores: Mapping[str, float | None]) -> None:
    """Add what a trial of a sweep set, and its best scores, to its run folder: TensorBoard's table of hyperparameters."""
    from torch.utils.tensorboard import SummaryWriter
    from torch.utils.tensorboard.summary import hparams

    values = {
        name: value if isinstance(value, bool | int | float | str) else ",".join(map(str, value))
        for name, value in settings.items()
    }
    found = {f"best/{name}": score for name, score in scores.items() if score is not None}
    with SummaryWriter(str(folder / FOLDER)) as writer:
        for summary in hparams(values, found):
            writer.file_writer.add_summary(summary)
        for name, score in found.items():
            writer.add_scalar(name, score)


class TensorBoard:
    """Writes the rows of the history as they arrive. Epochs that a resumed run repeats hide the earlier entries.

    Raises: ConfigError, when made, if the package is missing.
    """

    def __init__(self, config: Config, folder: Path, on_epoch: Callable[[dict[str, Any]], None] | None) -> None:
        require_tensorboard()
        self._config = config
        self._folder = folder / FOLDER
        self._on_epoch = on_epoch
        self._writer: SummaryWriter | None = None
        self._run: int | None = None

    def __call__(self, row: dict[str, Any]) -> None:
        """Add an epoch, then pass it on."""
        run, epoch = row.get("run", 0), row["epoch"]
        if self._writer is None or run != self._run:
            self.close()
            self._writer, self._run = self._start(run, epoch), run
        for key, value in row.items():
            if value is None or key in ("run", "epoch"):
                continue
            name = f"{self._config.train.metric}/{key}" if key in ("train", "val", "test") else key
            several = (
                {f"{name}/{k}": one for k, one in enumerate(value, 1)} if isinstance(value, list) else {name: value}
            )
            for name, one in several.items():
                if one is not None:
                    self._writer.add_scalar(name, one, epoch)
        if self._on_epoch is not None:
            self._on_epoch(row)

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _start(self, run: int, epoch: int) -> SummaryWriter:
        from torch.utils.tensorboard import SummaryWriter

        train = self._config.train
        folder = self._folder / f"seed-{train.seed + run}" if train.repeat > 1 else self._folder
        writer = SummaryWriter(str(folder), purge_step=epoch, flush_secs=FLUSH_S)
        writer.add_text("config", f"```toml\n{to_toml(self._config)}```", epoch - 1)
        return writer
