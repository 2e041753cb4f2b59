"""What Optuna does in a sweep: draw settings, tell which trial is behind, and save finished trials to continue from.

Its storage is optuna.log in the sweep's folder, which one process writes: finished trials alone, each a line.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mggcn.errors import BackendError, RunError, one_line
from mggcn.files import LARGEST_HISTORY, open_file, reason

if TYPE_CHECKING:
    from optuna import Study

Settings = dict[str, Any]
"""What a trial changes: values by table.key."""
STORAGE, NAME = "optuna.log", "sweep"
STEPS = 10
"""Parts of a trial at whose ends, but the last, it is compared with those before it."""


def require_optuna() -> Any:
    """Return the module optuna. Raises: BackendError if it is not installed."""
    if importlib.util.find_spec("optuna") is None:
        raise BackendError('a sweep needs Optuna: pip install "mggcn[sweep]"')
    import optuna

    return optuna


def new_study(direction: str, storage: Any = None) -> Study:
    """Return a study in memory, or one in a storage, where it may exist already."""
    optuna = require_optuna()
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        study: Study = optuna.create_study(storage=storage, study_name=NAME, direction=direction, load_if_exists=True)
        return study
    finally:
        optuna.logging.set_verbosity(before)


def study_of(sweep: Path, direction: str = "") -> Study:
    """Return the study in a sweep's folder. direction: of a new study; "": the study must exist. Raises: RunError."""
    optuna, path = require_optuna(), sweep / STORAGE
    try:
        if path.exists() or not direction:
            open_file(path, LARGEST_HISTORY).close()
        storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(path)))
        study: Study = (
            new_study(direction, storage) if direction else optuna.load_study(study_name=NAME, storage=storage)
        )
        return study
    except Exception as error:  # what Optuna raises for a damaged file is its own affair
        raise RunError(
            f"{path} cannot be read: {one_line(reason(error))}; delete it, and it is written again from the trials"
        ) from error


def distributions_of(candidates: Mapping[str, Any]) -> dict[str, Any]:
    """Return candidates as Optuna's distributions: ranges, and values of lists as JSON text."""
    known, found = require_optuna().distributions, {}
    for name, values in candidates.items():
        if isinstance(values, Mapping):
            ((kind, (low, high)),) = values.items()
            found[name] = known.FloatDistribution(low, high, log=kind == "log")
        else:
            found[name] = known.CategoricalDistribution([json.dumps(value) for value in values])
    return found


def drawn(
    candidates: Mapping[str, Any], seed: int, count: int, tried: Sequence[Settings] = (), study: Study | None = None
) -> list[Settings]:
    """Draw the settings of the next trials: at random, or by TPE from the trials that a study knows.

    They follow from the seed, the numbers of the trials and the study alone. tried: the settings of the trials before; no
    point of lists alone is drawn again.
    """
    samplers, distributions = require_optuna().samplers, distributions_of(candidates)
    scratch = new_study("minimize" if study is None else study.direction.name.lower())
    scratch.add_trials([] if study is None else study.get_trials(deepcopy=False))
    finite = not any(isinstance(values, Mapping) for values in candidates.values())
    known, found = {json.dumps(settings) for settings in tried}, []
    for number in range(len(tried), len(tried) + count):
        for attempt in itertools.count():
            entropy = np.random.SeedSequence((seed % 2**32, number, attempt)).generate_state(1)
            sampler = samplers.RandomSampler if study is None or attempt else samplers.TPESampler
            scratch.sampler = sampler(seed=int(entropy[0]))
            params = scratch.ask(distributions).params
            settings = {name: json.loads(v) if isinstance(v := params[name], str) else v for name in candidates}
            if not finite or json.dumps(settings) not in known:
                break
        known.add(json.dumps(settings))
        found.append(settings)
    return found


def add_finished(
    study: Study,
    candidates: Mapping[str, Any],
    number: int,
    settings: Settings,
    score: float | None,
    steps: dict[int, float],
) -> None:
    """Add a finished trial to a study. score: None if it was pruned. steps: as returned by `steps_of`."""
    trial = require_optuna().trial
    study.add_trial(
        trial.create_trial(
            state=trial.TrialState.PRUNED if score is None else trial.TrialState.COMPLETE,
            value=score,
            params={n: v if isinstance(candidates[n], Mapping) else json.dumps(v) for n, v in settings.items()},
            distributions=distributions_of(candidates),
            user_attrs={"trial": number},
            intermediate_values=steps,
        )
    )


def steps_of(rows: Iterable[Mapping[str, Any]], epochs: int) -> dict[int, float]:
    """Return the first validation score of each part of a history but the first, by the part's number."""
    found: dict[int, float] = {}
    for row in rows:
        step = STEPS * row["epoch"] // epochs
        if row["val"] is not None and 0 < step < STEPS:
            found.setdefault(step, row["val"])
    return found


def is_behind(study: Study, steps: dict[int, float]) -> bool:
    """Return whether a trial's best score is worse than the median of five or more finished trials at its last step."""
    optuna = require_optuna()
    trial = optuna.trial.create_trial(state=optuna.trial.TrialState.RUNNING, intermediate_values=steps)
    return bool(optuna.pruners.MedianPruner().prune(study, trial))
