"""Reads a run folder into a RunRecord; errors name the part that is missing or damaged.

config.toml, history.jsonl and plan.json must be there. result.json is written last: without it the run was interrupted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mggcn.config import Config, RunConfig
from mggcn.config.files import as_saved, to_tables
from mggcn.errors import RunError
from mggcn.files import LARGEST_HISTORY, parse_object, read_object, read_text, read_toml, reason
from mggcn.planning.task import LOSSES, METRICS
from mggcn.runs.sweep_folder import refuse_sweep

Json = dict[str, Any]

_NEEDED = ("config.toml", "history.jsonl", "plan.json")
_PLAN_KEYS = (
    "ranks",
    "device",
    "precision",
    "strategy",
    "order",
    "graph.name",
    "graph.num_vertices",
    "graph.num_edges",
    "reasons",
    "programs.train",
    "per_rank",
    "partition.nnz",
)
_RANK_KEYS = ("rank", "rows", "nnz", "arena_bytes", "regions", "total_bytes", "buffers")
_BUFFER_KEYS = ("program", "name", "rows", "cols", "dtype", "lifetime", "nbytes", "offset", "first", "last")
_EPOCH_KEYS = ("epoch", "loss", "train", "val", "test")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """The files of a run."""

    path: Path
    config: Json
    """config.toml, as nested tables."""
    runs: dict[int, list[Json]]
    """Epochs of each repeat in order; a run without repeats has the key 0 alone."""
    result: Json | None
    """result.json; None if the run was interrupted."""
    plan: Json
    job: Json
    """job.json: the store, and when the run began; empty if it is missing or damaged."""
    notes: list[str]
    """Remarks for the reader of the report on missing pieces."""

    @property
    def metric(self) -> str:
        """Name of the score in the history."""
        asked = self.config.get("train", {}).get("metric", "auto")
        return str((self.result or {}).get("metric") or ("score" if asked == "auto" else asked))


def read_run(run: Path) -> RunRecord:
    """Read the run folder `run`. Raises: RunError naming the file or key that is missing or damaged."""
    if not run.is_dir():
        raise RunError(f"{run} is not a run folder; expected the folder that `mggcn train --out` wrote")
    refuse_sweep(run)
    absent = [name for name in _NEEDED if not (run / name).exists()]
    if absent:
        raise RunError(
            f"{run} is not a complete run folder: {', '.join(absent)} missing; expected {', '.join(_NEEDED)}"
        )
    with _reading(run / "config.toml", "TOML"):
        config = read_toml(run / "config.toml")
    if not isinstance(config.get("train", {}), Mapping):
        raise RunError(f"{run / 'config.toml'}: train must be a table such as [train]")
    interrupted = not (run / "result.json").exists()
    runs, torn = _read_history(run / "history.jsonl", interrupted)
    result = None if interrupted else _read_result(run / "result.json")
    notes = ["The last line of history.jsonl is incomplete and was left out."] if torn else []
    if config.get("train", {}).get("evaluate") == "sampled":
        notes.append("Scores are SAMPLED, over some in-neighbours of each row alone: for a comparison, and not exact.")
    if interrupted:
        notes.insert(0, _interruption(run, config, runs))
    plan = _read_plan(run / "plan.json")
    return RunRecord(path=run, config=config, runs=runs, result=result, plan=plan, job=_read_job(run), notes=notes)


def changed_settings(record: RunRecord) -> dict[str, Any]:
    """Return the settings, as table.key, that are neither the defaults nor what `auto` stands for in this run."""
    recorded = record.plan["graph"].get("task", "classes")
    plain = {f"train.{key}": names[0] for key, known in (("loss", LOSSES), ("metric", METRICS))
             for task, names in known.items() if task == recorded}  # fmt: skip
    plain["run.transport"] = (
        "single" if record.plan["ranks"] == 1 else RunConfig(device=_device(record)).process_transport
    )
    changed = {}
    for table, defaults in to_tables(Config()).items():
        found = as_saved(record.config).get(table)
        saved = found if isinstance(found, Mapping) else {}
        for key, default in defaults.items():
            value, name = saved.get(key, default), f"{table}.{key}"
            if value not in (default, plain.get(name, default)):
                changed[name] = value
    return changed


def _device(record: RunRecord) -> Literal["cpu", "cuda"]:
    return "cuda" if record.plan["device"] == "cuda" else "cpu"


def _read_job(run: Path) -> Json:
    """Read job.json, which a report can do without."""
    try:
        return _read_json(run / "job.json")
    except RunError:
        return {}


def _interruption(run: Path, config: Json, runs: dict[int, list[Json]]) -> str:
    planned = config.get("train", {}).get("epochs", "?")
    last = max(runs)
    where = f" of run {last}" if last else ""
    return (
        f"This run was interrupted: result.json is missing. The curves end at epoch {runs[last][-1]['epoch']}{where}; "
        f"{planned} epochs were requested. `mggcn train --resume {run}` continues from the last checkpoint."
    )


@contextlib.contextmanager
def _reading(path: Path, form: str) -> Iterator[None]:
    """Have an error name the file, and what it should hold."""
    try:
        yield
    except OSError as error:
        raise RunError(f"cannot read {path}: {reason(error)}") from error
    except ValueError as error:
        raise RunError(f"{path} is not valid {form}: {error}; was the run cut off while writing it?") from error


def _read_json(path: Path) -> Json:
    with _reading(path, "JSON"):
        return read_object(path)


def _require(value: Any, keys: tuple[str, ...], where: str) -> None:
    """Check that every dotted key exists; a key that is absent is named with its place."""
    for key in keys:
        inner = value
        for part in key.split("."):
            if not isinstance(inner, Mapping) or part not in inner:
                raise RunError(f"{where} lacks {key!r}; was it written by another version of mggcn?")
            inner = inner[part]


def _read_history(path: Path, interrupted: bool) -> tuple[dict[int, list[Json]], bool]:
    """Read the epochs by run; the last line of an interrupted run may be torn, later lines replace earlier ones."""
    runs: dict[int, dict[int, Json]] = {}
    with _reading(path, "text"):
        text = read_text(path, LARGEST_HISTORY)
    lines = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    torn = False
    for number, line in lines:
        try:
            epoch = parse_object(line)
        except ValueError as error:
            if interrupted and number == lines[-1][0]:
                torn = True
                continue
            raise RunError(f"{path} line {number} is not valid JSON: {error}") from error
        _require(epoch, _EPOCH_KEYS, f"{path} line {number}")
        runs.setdefault(int(epoch.get("run", 0)), {})[epoch["epoch"]] = epoch
    if not runs:
        raise RunError(f"{path} has no completed epoch; the run ended during its first one")
    return {run: [epochs[number] for number in sorted(epochs)] for run, epochs in sorted(runs.items())}, torn


def _read_result(path: Path) -> Json:
    result = _read_json(path)
    _require(result, ("metric",), str(path))
    if "runs" not in result:
        _require(result, ("best.epoch", "final"), str(path))
    return result


def _read_plan(path: Path) -> Json:
    plan = _read_json(path)
    _require(plan, _PLAN_KEYS, str(path))
    ranks = plan["ranks"]
    if not plan["per_rank"] or len(plan["per_rank"]) != ranks:
        raise RunError(f"{path}: per_rank must hold one entry for each of {ranks} ranks, got {len(plan['per_rank'])}")
    for entry in plan["per_rank"]:
        _require(entry, _RANK_KEYS, f"{path}: per_rank")
        for buffer in entry["buffers"]:
            _require(buffer, _BUFFER_KEYS, f"{path}: per_rank buffers")
    partition = plan["partition"]
    cut = partition.get("kind") == "cut"
    _require(partition, ("leaves", "replication") if cut else ("critical_path_over_ideal",), f"{path}: partition")
    tiles = partition["nnz"]
    if len(tiles) != ranks or (not cut and any(len(row) != ranks for row in tiles)):
        raise RunError(f"{path}: partition.nnz must be {ranks} x {ranks}, one row and column for each rank")
    return plan
