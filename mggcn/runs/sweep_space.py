"""What a sweep varies: settings with their candidates, searched as a grid, at random or by TPE; from TOML or Python."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mggcn.config import TABLES, Config, from_tables, parse_value
from mggcn.config.files import Parts, by_table, parts_of, read_tables, setting_name
from mggcn.errors import ConfigError, did_you_mean
from mggcn.runs.sweep_study import Settings, drawn

MAX_TRIALS = 100_000
EXAMPLES = 1000
"""Combinations that a TPE search checks before it trains any."""
SEARCHES = ("grid", "random", "tpe")
PRUNERS = ("none", "median")
OPTIONS: dict[str, type[int] | type[str]] = {"trials": int, "seed": int, "search": str, "pruner": str}
"""Of [sweep]: fields of `Space`."""


@dataclass(frozen=True, slots=True)
class Space:
    """Candidates of each setting that varies: a list of values, or the ends of a range to draw from.

    trials: number of draws; None: the whole grid. seed: of the draws. source: how errors name the candidates. search: one
    of SEARCHES; "": random with a number of trials, else the grid. pruner: one of PRUNERS, which stops trials early.
    """

    candidates: Mapping[str, Any]
    trials: int | None = None
    seed: int = 1
    source: str = "grid"
    search: str = field(default="", kw_only=True)
    pruner: str = field(default="none", kw_only=True)

    @property
    def num_points(self) -> float:
        """Number of different points; infinite with a range."""
        return math.prod(math.inf if isinstance(found, Mapping) else len(found) for found in self.candidates.values())

    @property
    def num_trials(self) -> int:
        """Number of trials."""
        return int(min(self.num_points, self.trials or MAX_TRIALS))

    @property
    def shortage(self) -> str:
        """A warning that there are fewer points than trials; "" if there are not."""
        if self.trials is None or self.trials <= self.num_points:
            return ""
        points = f"{self.num_points} point{'s' * (self.num_points > 1)}"
        return f"the grid has {points}, fewer than {self.trials} trials: each point is trained once"

    @property
    def learns(self) -> bool:
        """Whether finished trials influence later ones, which then run in rounds."""
        return self.search == "tpe" or self.pruner != "none"

    def settings(self, base: Config) -> list[Settings]:
        """Return the settings of every trial, each point once; for TPE, which draws later, combinations it may draw.

        Trials of a grid whose graphs are ordered alike follow each other. Raises: ConfigError for a setting, value or
        combination that is not valid, for equal values, or for a range in a grid.
        """
        if not self.candidates:
            raise ConfigError(
                'a sweep needs a table [grid] of settings with lists of values, such as "train.lr" = [0.1]'
            )
        try:
            self.check()
            found = self._points()
            for settings in found:
                if with_trial(base, settings).train.repeat > 1 and self.pruner != "none":
                    raise ConfigError(f"sweep.pruner {self.pruner} compares single runs; leave train.repeat at 1")
        except ConfigError as error:
            raise ConfigError(f"{self.source}: {error}") from error
        return found

    def base(self, make: Callable[[Settings], Config]) -> Config:
        """Return the settings of all trials. make: checks them together, and with some of what varies.

        They need not go together without what varies, such as a batch without fan-outs: the first point, which every trial
        replaces, then stands for it. Raises: ConfigError.
        """
        try:
            return make({})
        except ConfigError as error:
            alone = error
        try:
            self.check()
            first = self._points()[0]
            with naming_trial(first):
                return make(first)
        except ConfigError as error:
            # What is wrong without the grid, too, is no fault of a trial.
            raise alone if str(alone) in str(error) else ConfigError(f"{self.source}: {error}") from error

    def check(self) -> None:
        """Refuse options, settings or candidates that are not valid. Raises: ConfigError."""
        if not isinstance(self.candidates, Mapping):
            raise ConfigError(f"the candidates must be a table, got {self.candidates!r}")
        for name, kind in OPTIONS.items():
            if (value := getattr(self, name)) is not None and type(value) is not kind:
                expected = "an integer" if kind is int else "a word"
                raise ConfigError(f"sweep.{name} expects {expected}, got {value!r}")
        for name, value, known in (("search", self.search, ("", *SEARCHES)), ("pruner", self.pruner, PRUNERS)):
            if value not in known:
                raise ConfigError(f"sweep.{name} must be one of {', '.join(filter(None, known))}, got {value!r}")
        if self.trials is not None and self.trials not in range(1, MAX_TRIALS + 1):
            raise ConfigError(f"sweep.trials must lie in 1 .. {MAX_TRIALS}, got {self.trials}")
        if (self.trials is None) != (self.search in ("", "grid")) and self.search:
            needs = "takes no number of trials" if self.search == "grid" else "needs a number of trials: trials = 50"
            raise ConfigError(f"the search {self.search} {needs}")
        for name, candidates in self.candidates.items():
            _check(name, candidates)

    def _points(self) -> list[Settings]:
        lists = self.candidates
        if self.search == "tpe":  # the ends stand for a range
            lists = {name: next(iter(c.values())) if isinstance(c, Mapping) else c for name, c in lists.items()}
        elif self.trials is not None and self.trials < self.num_points:
            return drawn(self.candidates, self.seed, self.trials)
        elif ranges := [name for name, candidates in lists.items() if isinstance(candidates, Mapping)]:
            raise ConfigError(
                f"the range of {ranges[0]} needs a number of draws: trials = 50 in [sweep], or --trials 50"
            )
        elif self.num_points > MAX_TRIALS:
            raise ConfigError(
                f"the grid has {self.num_points:,} points, at most {MAX_TRIALS:,} are tried; draw some: trials = 50"
            )
        # What epochs alone read varies fastest.
        names = sorted(lists, key=lambda name: (name.startswith("train."), "dropout" in name))
        points = itertools.product(*(lists[name] for name in names))
        most = EXAMPLES if self.search == "tpe" else MAX_TRIALS
        return [dict(zip(names, values, strict=True)) for values in itertools.islice(points, most)]


def with_trial(base: Config, settings: Settings) -> Config:
    """Return the configuration of a trial. Raises: ConfigError, which names the trial."""
    with naming_trial(settings):
        return from_tables(by_table(settings), base)


@contextlib.contextmanager
def naming_trial(settings: Settings) -> Iterator[None]:
    """Add to a ConfigError which trial is refused."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"the trial {as_text(settings)} is refused: {error}") from error


def as_text(settings: Settings) -> str:
    """Return settings as one line of text."""
    return " ".join(f"{name}={value}" for name, value in settings.items())


def refuse_both(varied: Iterable[str], given: Iterable[str]) -> None:
    """Refuse a setting that varies and is also given for all trials. Raises: ConfigError."""
    if both := sorted(set(varied) & set(given)):
        raise ConfigError(f"{both[0]} is varied by the grid and given for all trials, too; leave one of them out")


def read_space(path: Path) -> tuple[Space, Parts]:
    """Read a sweep's file: [grid], [sweep] with OPTIONS, and tables of settings that all trials have, which are not
    checked together yet.

    Raises: ConfigError if it is missing, not TOML, or holds anything else.
    """
    tables = read_tables(path, "sweep")
    grid, options = tables.pop("grid", {}), tables.pop("sweep", {})
    for name, table in (("grid", grid), ("sweep", options)):
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {name} must be a table [{name}], got {table!r}")
    if unknown := sorted(set(options) - set(OPTIONS)):
        raise ConfigError(f"{path}: unknown setting sweep.{unknown[0]}; known in [sweep] are {', '.join(OPTIONS)}")
    base = parts_of(tables, path)
    source = f"{path}, [grid]"
    try:
        candidates = by_name(_flat(grid))
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    return Space(candidates, source=source, **options), base


def by_name(items: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return candidates by the name of their setting. Raises: ConfigError if two have the same name."""
    found: dict[str, Any] = {}
    for name, candidates in items:
        if name in found:
            raise ConfigError(f"{name} is varied twice; join the two lists")
        found[name] = candidates
    return found


def _flat(grid: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Names such as "train.lr", however TOML groups them: quoted, dotted or as a table [grid.train]."""
    for name, value in grid.items():
        if isinstance(value, Mapping) and name in TABLES:
            yield from ((f"{name}.{key}", candidates) for key, candidates in value.items())
        elif "." in name:
            yield name, value
        else:
            raise ConfigError(f"expected table.key such as train.lr, got {name}{_meant(name)}")


def _meant(name: str) -> str:
    """Return "; did you mean X?" for a setting without its table, or a table that is none; "" if it is like neither."""
    try:
        return f"; did you mean {setting_name(name)}?"
    except ConfigError:
        return did_you_mean(name, TABLES)


def _check(name: str, candidates: Any) -> None:
    """Refuse what is neither a list of different values nor a range."""
    table, _, key = name.partition(".")
    if name == "train.metric":
        raise ConfigError('trials are compared by train.metric; name one for all of them, in [train]: metric = "..."')
    if isinstance(candidates, Mapping):
        _check_range(name, candidates)
        return
    if not isinstance(candidates, list | tuple) or not candidates:
        raise ConfigError(f"{name} expects a list of values, such as [0.1, 0.01], got {candidates!r}")
    values: dict[Any, Any] = {}
    for value in candidates:
        parsed = parse_value(table, key, value)
        if parsed in values:
            raise ConfigError(f"{name} lists {values[parsed]!r} and {value!r}, which are equal; leave one of them out")
        values[parsed] = value


def _check_range(name: str, candidates: Mapping[str, Any]) -> None:
    table, _, key = name.partition(".")
    try:
        ((kind, (low, high)),) = candidates.items()
        valid = kind in ("uniform", "log") and -math.inf < low < high < math.inf and (kind == "uniform" or low > 0)
    except (TypeError, ValueError):
        valid = False
    if not valid:
        raise ConfigError(
            f"{name} expects a list, {{uniform = [low, high]}} or {{log = [low, high]}} with low < high, and above 0 for "
            f"log, got {candidates!r}"
        )
    parse_value(table, key, low)
