"""A sweep: trials over settings on one store, several at once, each in a process that keeps what the next one shares."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import queue
import re
import subprocess
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mggcn.assemble.plan import Group, check_available, groups_of
from mggcn.comm.failure import Interrupted, signal_of
from mggcn.config import Config
from mggcn.config.files import from_toml, setting_name, to_tables
from mggcn.errors import ConfigError, RunError, one_line
from mggcn.files import open_log, read_bytes, read_object, reason, write_text
from mggcn.graph.csr import Graph
from mggcn.graph.store import graph_sha256, open_store
from mggcn.host import python
from mggcn.planning.task import LOWER_IS_BETTER, resolve_task
from mggcn.runs.folder import make_run_folder
from mggcn.runs.occupied import occupied
from mggcn.runs.result import read_result
from mggcn.runs.sweep_folder import FILE, TABLE, trial_folder
from mggcn.runs.sweep_space import MAX_TRIALS, Space, naming_trial, with_trial
from mggcn.runs.sweep_study import Settings, add_finished, drawn, require_optuna, steps_of, study_of
from mggcn.train.log import read_history, write_json

SCORES = ("val", "test")
DAMAGED = "damaged: "
"""How the error of a trial begins whose files cannot be read: it is not trained again over them."""
PRUNED = "pruned: "
"""How the error of a trial begins that was stopped because it was behind others: it is not trained again."""


@dataclass(frozen=True, slots=True)
class Job:
    """How the trials of a sweep are trained: all that its record holds besides the trials."""

    store: str
    graph_sha256: str
    at_once: int
    space: Space


@dataclass(slots=True)
class Trial:
    """One point of a sweep. result: its result.json, once it is complete; error: why it failed, else empty."""

    number: int
    settings: Settings
    result: dict[str, Any] | None = None
    error: str = ""
    seconds: float | None = None

    @property
    def damaged(self) -> bool:
        """Whether its files cannot be read, or were made with other settings."""
        return self.error.startswith(DAMAGED)

    @property
    def pruned(self) -> int:
        """The epoch after which it was pruned because it was behind earlier trials; 0: it was not pruned."""
        found = re.match(rf"{PRUNED}.* after (\d+) epochs", self.error)
        return int(found[1]) if found else 0

    @property
    def sampled(self) -> int:
        """In-neighbours of a row over which its scores are SAMPLED (train.evaluate sampled); 0: they are exact."""
        return int((self.result or {}).get("evaluated_fanout", 0))

    @property
    def scores(self) -> dict[str, float | None]:
        """Scores at the best validation; of several repeats their means."""
        if self.result is None:
            return dict.fromkeys(SCORES)
        found = self.result["mean"]["best"] if "mean" in self.result else self.result["best"]
        return {name: found[name] for name in SCORES}

    def row(self, metric: str) -> dict[str, Any]:
        """Return the trial as a row of the table, whose scores are those of a metric."""
        failed = "damaged" if self.damaged else "pruned" if self.pruned else "failed"
        state = failed if self.error else "done" if self.result else "not run"
        ends = {
            "metric": metric,
            "epochs": (self.result or {}).get("epochs"),
            "seconds": self.seconds,
            "state": state,
            "reason": self.error,
        }
        return {"trial": self.number} | self.settings | self.scores | ends


@dataclass(slots=True)
class Sweep:
    """A sweep's folder and trials, and the metric that compares them. Notebooks show it as a table.

    planned: trials in all; those of a TPE search join `trials` as they are drawn.
    """

    folder: Path
    trials: list[Trial] = field(default_factory=list)
    metric: str = ""
    planned: int = 0

    @property
    def ranked(self) -> list[Trial]:
        """The trials, best scores first."""
        return sorted(self.trials, key=_rank)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One for each trial: number, settings, scores, metric, epochs, seconds, state and reason; best scores first."""
        return [trial.row(self.metric) for trial in self.ranked]

    @property
    def sampling(self) -> str:
        """Which trials have SAMPLED scores, as a sentence without its full stop; "" if none has."""
        numbers = [trial.number for trial in self.trials if trial.sampled]
        if not numbers:
            return ""
        scored = sum(trial.result is not None for trial in self.trials)
        which = f"trial{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
        of = "" if len(numbers) == scored else f" of {which}"
        fanout = max(trial.sampled for trial in self.trials)
        return f"scores{of} are SAMPLED over {fanout} in-neighbours a row: for a comparison, and not exact"

    @property
    def best(self) -> Trial | None:
        """The trial with the best validation score; None if none has one."""
        scored = [trial for trial in self.trials if trial.scores["val"] is not None]
        return min(scored, key=_rank, default=None)

    @property
    def best_folder(self) -> Path | None:
        """The run folder of `best`, for `mggcn predict` and `report`."""
        return None if self.best is None else trial_folder(self.folder, self.best.number)

    def __repr__(self) -> str:
        """Return the table as text."""
        rows = [{name: _text(value) for name, value in row.items()} for row in self.rows]
        names = [name for name in rows[0] if name not in ("metric", "reason")] if rows else []
        heads = {name: f"{name} {self.metric}" if name in SCORES else name for name in names}
        widths = {name: max(len(heads[name]), *(len(row[name]) for row in rows)) for name in names}
        lines = ["  ".join(f"{row[name]:<{widths[name]}}" for name in names) + f"  {row['reason']}" for row in rows]
        head = "  ".join(f"{heads[name]:<{widths[name]}}" for name in names)
        return "\n".join(line.rstrip() for line in [head, *lines, *filter(None, [self.sampling])])


def _rank(trial: Trial) -> tuple[bool, float, bool, int]:
    """Order of the table: by validation score, then failures, then what was not run."""
    score = trial.scores["val"]
    if score is None:
        return trial.result is None, math.inf, not trial.error, trial.number
    lower = trial.result is not None and trial.result["metric"] in LOWER_IS_BETTER
    return trial.result is None, score if lower else -score, not trial.error, trial.number


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def make_sweep(space: Space, base: Config, graph: Graph, store: Path, out: Path | None, at_once: int = 0) -> Sweep:
    """Write the folder of a new sweep.

    Raises: ConfigError for settings that do not exist, or do not fit the graph or each other; BackendError; RunError.
    """
    require_optuna()
    check_available(base)
    found = space.settings(base)
    metric = _metric_of(found, base, graph)
    groups, config = groups_of(base, at_once)
    if len(groups) > space.num_trials:  # fewer trials than cores: each has several
        groups, config = groups_of(base, space.num_trials)
    if space.search == "tpe":
        found = drawn(space.candidates, space.seed, len(groups))
    folder = make_run_folder(config, f"sweep-{graph.name}", out)
    trials = [Trial(number, settings) for number, settings in enumerate(found, start=1)]
    sweep = Sweep(folder, trials, metric, space.num_trials)
    _save(sweep, asdict(Job(str(store.resolve()), graph_sha256(graph), len(groups), space)))
    return sweep


def _metric_of(trials: Iterable[Settings], base: Config, graph: Graph) -> str:
    """Return the metric of all trials. Raises: ConfigError if they have several, or a trial does not fit the graph."""
    metrics: dict[str, None] = {}
    for settings in trials:
        config = with_trial(base, settings)
        with naming_trial(settings):
            metrics[resolve_task(config.train, graph).metric] = None
    if len(metrics) > 1:
        first = next(iter(metrics))
        raise ConfigError(
            f"trials are compared by {' and '.join(metrics)}; name one for all of them: train.metric={first}"
        )
    return next(iter(metrics))


def read_sweep(folder: Path) -> tuple[Sweep, Job]:
    """Return the sweep of a folder, and how its trials are trained. Raises: RunError, ConfigError."""
    try:
        content = read_object(folder / FILE)
        trials = [Trial(**trial) for trial in content["trials"]]
        _check_trials(trials)
        space = Space(**content.get("space", {"candidates": {}}))  # an earlier version had none: all trials are there
        job = Job(str(content["store"]), str(content["graph_sha256"]), int(content["at_once"]), space)
        space.check()
        planned = max(space.num_trials, len(trials)) if space.search == "tpe" else len(trials)
        sweep = Sweep(folder, trials, one_line(str(content.get("metric", ""))), planned)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise RunError(
            f"{folder} is not the folder of a sweep: it lacks a readable {FILE} ({one_line(reason(error))})"
        ) from error
    base = from_toml(folder / "config.toml", saved=True)
    for trial in trials:
        try:
            config = with_trial(base, trial.settings)
            trial.result = _result_of(trial_folder(folder, trial.number), config, trial.settings)
        except (ConfigError, RunError) as error:
            trial.error = f"{DAMAGED}{error}"
    return sweep, job


def _check_trials(trials: list[Trial]) -> None:
    """Refuse a record that no sweep wrote. Raises: ValueError."""
    numbers = [trial.number for trial in trials]
    if not numbers or any(type(number) is not int or number < 1 for number in numbers):
        raise ValueError("its trials must be numbered from 1")
    if repeated := [number for number in set(numbers) if numbers.count(number) > 1]:
        raise ValueError(f"trial {repeated[0]} occurs {numbers.count(repeated[0])} times")
    for trial in trials:
        known = isinstance(trial.settings, dict) and isinstance(trial.seconds, int | float | None)
        if not known or not isinstance(trial.error, str):
            raise ValueError(f"trial {trial.number} must have settings, an error and seconds")
        trial.error = "" if trial.damaged else one_line(trial.error)
    if any(trial.settings.keys() != trials[0].settings.keys() for trial in trials):
        raise ValueError("its trials vary different settings")


def _result_of(folder: Path, config: Config, settings: Settings) -> dict[str, Any] | None:
    """Return the result of a trial that is complete, None without one.

    Raises: RunError if it is damaged, or the trial was trained with other settings than these.
    """
    if not os.path.lexists(folder / "result.json"):
        return None
    result = read_result(folder)
    trained, asked = to_tables(from_toml(folder / "config.toml", saved=True)), to_tables(config)
    for name in settings:
        table, _, key = setting_name(name).partition(".")
        said, came = asked[table][key], trained[table][key]
        if said not in (came, "auto"):  # what auto stood for is in the trial's configuration
            raise RunError(
                f"{FILE} says {name} {said!r}, trial {folder.name} was trained with {came!r}; put it back, or delete "
                f"{folder} to have it trained again"
            )
    return result


def run_sweep(folder: Path, on_trial: Callable[[Trial], None] | None = None) -> Sweep:
    """Train the trials that a sweep has not trained yet or that failed, and return it. on_trial: called as each ends.

    A failed trial is a row of the table. Raises: Interrupted after Ctrl-C, once running trials are saved; RunError.
    """
    require_optuna()
    with occupied(folder):
        return _run_sweep(folder, on_trial or (lambda trial: None))


def _run_sweep(folder: Path, on_trial: Callable[[Trial], None]) -> Sweep:
    sweep, job = read_sweep(folder)
    base = from_toml(folder / "config.toml", saved=True)
    graph = open_store(Path(job.store))
    if graph_sha256(graph) != job.graph_sha256:
        raise RunError(f"{job.store} has changed since the sweep in {folder} began; start a new sweep")
    if not sweep.metric:  # an earlier version did not write it
        sweep.metric = _metric_of((trial.settings for trial in sweep.trials), base, graph)
    groups, _ = groups_of(base, job.at_once)
    workers = [
        Worker(folder, job, sum(other.gpus == group.gpus for other in groups), group, k)
        for k, group in enumerate(groups)
    ]
    try:
        with closing(_trained(workers, _rounds(sweep, job, base))) as ended:
            for trial in ended:
                _save(sweep, asdict(job))
                on_trial(trial)
    except KeyboardInterrupt as stop:
        raise Interrupted(signal_of(stop)) from None
    return sweep


def _trained(workers: Sequence[Worker], rounds: Iterable[list[Trial]]) -> Generator[Trial, None, None]:
    """Yield trials as they end, a round after the other; when this is closed, running trials are saved."""
    free: queue.LifoQueue[Worker] = queue.LifoQueue()  # one that has begun is taken before another one begins
    for worker in reversed(workers):
        free.put(worker)

    def train(trial: Trial) -> Trial:
        worker = free.get()
        try:
            worker.train(trial)
        finally:
            free.put(worker)
        return trial

    pool = ThreadPoolExecutor(len(workers))
    try:
        for trials in rounds:
            for ended in as_completed([pool.submit(train, trial) for trial in trials]):
                yield ended.result()
    finally:
        for worker in workers:
            worker.stop()
        pool.shutdown(cancel_futures=True)
        for worker in workers:
            worker.end()


def _rounds(sweep: Sweep, job: Job, base: Config) -> Iterator[list[Trial]]:
    """Yield the trials to train at once, all of them where none learns from others; the study knows all rounds before.

    So the trials of a seed are the same, whichever of a round ends first, and whatever interrupts it.
    """
    space = job.space
    study = study_of(sweep.folder, "minimize" if sweep.metric in LOWER_IS_BETTER else "maximize")
    known = {trial.user_attrs.get("trial") for trial in study.get_trials(deepcopy=False)}
    size = job.at_once if space.learns else MAX_TRIALS
    left = [trial for trial in sweep.trials if trial.result is None and not trial.damaged and not trial.pruned]
    for trial in left:
        trial.error = ""
    while True:
        begun = (left[0].number - 1) // size * size if left else len(sweep.trials)
        for trial in sweep.trials[:begun]:
            score = trial.scores["val"]
            if space.candidates and trial.number not in known and (score is not None or trial.pruned):
                known.add(trial.number)
                epochs = with_trial(base, trial.settings).train.epochs
                # Nothing is learned from a trial without its history, or with settings that are no candidates any more.
                with suppress(RunError, ValueError):
                    rows = read_history(trial_folder(sweep.folder, trial.number))
                    # Ranks that are processes stop some epochs later, sooner or later by the clock.
                    steps = steps_of(rows[: trial.pruned or None], epochs)
                    add_finished(study, space.candidates, trial.number, trial.settings, score, steps)
        if not left:
            tried = [trial.settings for trial in sweep.trials]
            count = min(size, sweep.planned - len(tried))
            if count <= 0:
                return
            found = drawn(space.candidates, space.seed, count, tried, study)
            left = [Trial(number, settings) for number, settings in enumerate(found, start=len(tried) + 1)]
            sweep.trials += left
        trials = [trial for trial in left if trial.number <= begun + size]
        left = left[len(trials) :]
        yield trials


def _save(sweep: Sweep, job: dict[str, Any]) -> None:
    """Write the record, with its `job`, and the table."""
    trials = [
        {"number": t.number, "settings": t.settings, "error": t.error, "seconds": t.seconds} for t in sweep.trials
    ]
    write_json(sweep.folder / FILE, job | {"metric": sweep.metric, "trials": trials})
    text = io.StringIO()
    rows = sweep.rows
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _text(v) if isinstance(v, list) else v for name, v in row.items()} for row in rows)
    try:
        write_text(sweep.folder / TABLE, text.getvalue())
    except OSError as error:
        raise RunError(
            f"{sweep.folder / TABLE} could not be written: {reason(error)}; free space and resume"
        ) from error


class Worker:
    """A process that trains trials, seen from this one; if it is killed, another is started.

    sharing: processes that share its memory, the machine's or its GPUs'.
    """

    def __init__(self, folder: Path, job: Job, sharing: int, group: Group, number: int) -> None:
        self._log = folder / f"worker-{number}.log"
        self._pruner = job.space.pruner
        self._command = [*python("mggcn.runs.sweep_worker"), str(folder), job.store, "--sharing", str(sharing)]
        if group.cores:
            self._command += ["--cores", ",".join(map(str, group.cores))]
        self._env: Mapping[str, str] = {"CUDA_VISIBLE_DEVICES": ",".join(group.gpus)} if group.gpus else {}
        self._process: subprocess.Popen[str] | None = None
        self._stopped = False

    def train(self, trial: Trial) -> None:
        """Have a trial trained, and record its result or error; one that `stop` interrupts stays as it is."""
        if self._stopped:
            return
        process = self._process = self._process or self._start()
        order, line = {"number": trial.number, "settings": trial.settings, "pruner": self._pruner}, ""
        if process.stdin is not None and process.stdout is not None:
            with suppress(OSError, ValueError):  # it is gone, or its input was closed
                print(json.dumps(order), file=process.stdin, flush=True)
                line = process.stdout.readline()
        if line:
            answer = json.loads(line)
            trial.result, trial.error, trial.seconds = answer.get("result"), answer["error"], answer["seconds"]
        elif not self._stopped:
            code = self.end()
            lines = read_bytes(self._log).decode(errors="replace").split("\n") if self._log.exists() else []
            last = next((one_line(line) for line in reversed(lines) if line.strip()), "it printed nothing")
            trial.error = f"the process exited with code {code}: {last}"

    def _start(self) -> subprocess.Popen[str]:
        # A session of its own: a Ctrl-C of the terminal reaches the parent alone.
        with open_log(self._log) as log:
            return subprocess.Popen(
                self._command,
                env={**os.environ, **self._env},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )

    def stop(self) -> None:
        """End the input of the process, which then saves what it trains."""
        self._stopped = True
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def end(self) -> int:
        """End the process, if there is one, and return its exit code. An empty log is deleted."""
        code = 0
        if self._process is not None:
            with self._process as process:
                pass
            code, self._process = process.returncode, None
        if self._log.exists() and not self._log.stat().st_size:
            self._log.unlink()
        return code
