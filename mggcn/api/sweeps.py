"""Sweeps in Python: `mggcn.sweep`."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Unpack

import numpy as np

from mggcn.api.graphs import load
from mggcn.config import Config, ModelConfig
from mggcn.config.files import setting_name, with_model
from mggcn.errors import ConfigError
from mggcn.files import temporary_folder
from mggcn.graph.csr import Graph
from mggcn.graph.store import open_store, store_folder, write_store
from mggcn.runs.sweep import Sweep, make_sweep, run_sweep
from mggcn.runs.sweep_space import Space, by_name, refuse_both
from mggcn.settings import SweepSettings, refusing_functions


def sweep(
    graph: Any,
    grid: Mapping[str, Any],
    model: ModelConfig | None = None,
    *,
    trials: int | None = None,
    search: Literal["", "grid", "random", "tpe"] = "",
    pruner: Literal["none", "median"] = "none",
    out: str | Path | None = None,
    at_once: int = 0,
    config: Config | None = None,
    **settings: Unpack[SweepSettings],
) -> Sweep:
    """Train every point of a grid of settings, or draws from it, on one graph; return the trials with their scores.

    Trials run in processes, one for each core (or `threads` of them) or GPU, which share the opened store and its order. A
    trial that fails is a row. Needs Optuna: `pip install "mggcn[sweep]"`.

    Args:
        graph: A graph from `load`, or anything that `load` takes; one in memory is written to a temporary store.
        grid: Lists or arrays of values by the name of a setting, such as `{"lr": [0.01, 0.1], "hidden": [16, (64, 64)]}`;
            with `trials` also ranges, `{"lr": {"log": [1e-4, 0.1]}, "dropout": {"uniform": [0, 0.8]}}`.
        model: `GCN(...)` or another of this module's models; default `GCN()`.
        trials: Number of different settings drawn, by `train.seed`; default: the whole grid.
        search: How: "random", or "tpe", which learns from the scores of the trials before; "": at random with `trials`.
        pruner: "median" stops trials whose validation score is behind the median of those before.
        out: Folder of the sweep; each trial is a run folder in it. Default: `runs/sweep-<graph>-<time>`.
        at_once: Trials trained at the same time; 0: as many as there are cores or GPUs for.
        config: Settings of all trials; `model` and `settings` override it.
        **settings: Single settings of all trials by name, as for `Trainer`.

    Returns:
        A `Sweep`: `rows` for a table, such as `pandas.DataFrame(found.rows)`, `best` and `best_folder`.

    Raises:
        ConfigError: A setting is unknown, varied twice, or also given for all trials; a value does not fit; or trials would
            be compared by different metrics.
        RunError: `out` exists and is not empty.
        BackendError: Optuna is not installed, or the machine lacks a GPU.

    Warns:
        UserWarning: There are fewer settings than `trials`; each is trained once.
    """
    named = refusing_functions({**settings})
    if not isinstance(grid, Mapping) or not all(isinstance(name, str) for name in grid):
        raise ConfigError(
            f'grid must be a dict of settings and their values, such as {{"lr": [0.1, 0.01]}}, got {grid!r}'
        )
    candidates = by_name((setting_name(name), _plain(values)) for name, values in grid.items())
    refuse_both(candidates, map(setting_name, settings))
    space = Space(candidates, _plain(trials), search=search, pruner=pruner)
    base = space.base(lambda point: with_model(config, model, {**named, **point}))
    space = dataclasses.replace(space, seed=base.train.seed)
    found: Graph = graph if isinstance(graph, Graph) else load(graph)
    with temporary_folder() as temporary:
        store = store_folder(found)
        if store is None:
            store = temporary / "graph"
            write_store(found, store)
            found = open_store(store)
        made = make_sweep(space, base, found, store, None if out is None else Path(out), at_once)
        if space.shortage:
            warnings.warn(space.shortage, stacklevel=2)
        return run_sweep(made.folder)


def _plain(values: Any) -> Any:
    """Return values with Python's numbers and lists instead of NumPy's, which no file of a sweep could hold."""
    if isinstance(values, np.ndarray | np.generic):
        return values.tolist()
    if isinstance(values, Mapping):
        return {name: _plain(value) for name, value in values.items()}
    return type(values)(map(_plain, values)) if isinstance(values, list | tuple) else values
