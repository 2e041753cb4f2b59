"""What a sweep varies: a grid, or a random draw, of settings; read from TOML or given in Python."""

from __future__ import annotations

import itertools
import math
import random
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mggcn.config import TABLES, Config, from_tables
from mggcn.errors import ConfigError

Settings = dict[str, Any]
"""What a trial changes: values by table.key."""
MAX_TRIALS = 100_000


@dataclass(frozen=True, slots=True)
class Space:
    """Candidates of each setting that varies: a list of values, or the ends of a range to draw from.

    trials: number of random draws; None: the whole grid. seed: of the draws.
    """

    candidates: Mapping[str, Any]
    trials: int | None = None
    seed: int = 1

    def settings(self, base: Config) -> list[Settings]:
        """Return what every trial changes; trials whose matrices are alike follow each other.

        Raises: ConfigError for a setting or value that is none, or a range in a grid.
        """
        if not self.candidates:
            raise ConfigError(
                'a sweep needs a table [grid] of settings with lists of values, such as "train.lr" = [0.1]'
            )
        # What epochs alone read varies fastest.
        names = sorted(self.candidates, key=lambda name: (name.startswith("train."), "dropout" in name))
        found = list(self._grid(names) if self.trials is None else self._drawn(names))
        for settings in found:
            with_trial(base, settings)
        return found

    def _grid(self, names: Sequence[str]) -> Iterator[Settings]:
        lists = [_values(name, self.candidates[name]) for name in names]
        if (count := math.prod(map(len, lists))) > MAX_TRIALS:
            raise ConfigError(
                f"the grid has {count:,} points, at most {MAX_TRIALS:,} are tried; draw some: trials = 50"
            )
        return (dict(zip(names, values, strict=True)) for values in itertools.product(*lists))

    def _drawn(self, names: Sequence[str]) -> Iterator[Settings]:
        if not 1 <= (self.trials or 0) <= MAX_TRIALS:
            raise ConfigError(f"sweep.trials must lie in 1 .. {MAX_TRIALS}, got {self.trials}")
        generator = random.Random(self.seed)
        drawn = [
            {name: _draw(name, self.candidates[name], generator) for name in names} for _ in range(self.trials or 0)
        ]
        return iter(sorted(drawn, key=lambda settings: [str(settings[name]) for name in names]))


def with_trial(base: Config, settings: Settings) -> Config:
    """Return the configuration of a trial. Raises: ConfigError."""
    tables: dict[str, Settings] = {}
    for name, value in settings.items():
        table, _, key = name.partition(".")
        tables.setdefault(table, {})[key] = value
    return from_tables(tables, base)


def read_space(path: Path) -> tuple[Space, Config]:
    """Read a sweep's file: [grid], [sweep] with trials and seed, and tables of settings that all trials have.

    Raises: ConfigError if it is missing, not TOML, or holds anything else.
    """
    try:
        tables = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the sweep {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    grid, options = tables.pop("grid", {}), tables.pop("sweep", {})
    for name, table in (("grid", grid), ("sweep", options)):
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {name} must be a table [{name}], got {table!r}")
    if unknown := sorted(set(options) - {"trials", "seed"}):
        raise ConfigError(f"{path}: unknown setting sweep.{unknown[0]}; known in [sweep] are trials, seed")
    for name, value in options.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigError(f"{path}: sweep.{name} expects an integer, got {value!r}")
    try:
        return Space(dict(_flat(grid)), options.get("trials"), options.get("seed", 1)), from_tables(tables)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _flat(grid: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Names such as "train.lr", however TOML groups them: quoted, dotted or as a table [grid.train]."""
    for name, value in grid.items():
        if isinstance(value, Mapping) and name in TABLES:
            yield from ((f"{name}.{key}", candidates) for key, candidates in value.items())
        else:
            yield name, value


def _values(name: str, candidates: Any) -> list[Any]:
    if isinstance(candidates, Mapping):
        raise ConfigError(f"the range of {name} needs a number of draws: trials = 50 in [sweep], or --trials 50")
    if not isinstance(candidates, list | tuple) or not candidates:
        raise ConfigError(f"{name} expects a list of values, such as [0.1, 0.01], got {candidates!r}")
    return list(candidates)


def _draw(name: str, candidates: Any, generator: random.Random) -> Any:
    """One of a list, or a number between the ends of {uniform = [low, high]} or, evenly over its logarithm, {log = ...}."""
    if not isinstance(candidates, Mapping):
        return generator.choice(_values(name, candidates))
    try:
        ((kind, (low, high)),) = candidates.items()
        if kind == "uniform":
            return generator.uniform(float(low), float(high))
        if kind == "log":
            return math.exp(generator.uniform(math.log(low), math.log(high)))
    except (TypeError, ValueError):
        pass
    raise ConfigError(f"{name} expects a list, {{uniform = [low, high]}} or {{log = [low, high]}}, got {candidates!r}")
