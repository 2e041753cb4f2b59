"""Run folders: made, read, continued, tied to the graph that they were made for."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mggcn.assemble.plan import host_of, partition_graph, plan_recorded
from mggcn.backend.spmm_choice import NO_CHOICES, Choices
from mggcn.comm.failure import Interrupted
from mggcn.config import Config, TrainConfig, from_tables
from mggcn.config.files import from_toml, to_toml
from mggcn.config.values import with_new_names
from mggcn.errors import CommError, ConfigError, MggcnError, RunError, one_line, printable
from mggcn.files import write_text
from mggcn.graph.csr import Graph
from mggcn.graph.store import graph_sha256, store_folder
from mggcn.partition.base import Partition
from mggcn.planning.record import to_dict
from mggcn.planning.run import RunPlan
from mggcn.planning.select import Choice, choice_dict
from mggcn.planning.shape import GraphShape, check_shape
from mggcn.runs.began import beginnings, changed_parts, check_settings, record_change
from mggcn.runs.product_table import RUN_FILE, STORE_FILE, read_choices, write_choices
from mggcn.runs.sweep_folder import refuse_sweep
from mggcn.train.log import read_record, require_history, write_json
from mggcn.train.repeats import best_repeat, is_kept

if TYPE_CHECKING:
    from mggcn.train.checkpoint import Progress


SCHEDULE = ("lr", "schedule", "schedule_step", "schedule_gamma", "schedule_patience", "warmup")
"""Settings of [train] that make a schedule."""
CONTINUABLE = ("epochs", "patience", *SCHEDULE)
"""Settings of [train] with which a run may be continued."""
MACHINE = ("threads", "bind", "memory_limit", "capacity", "scratch", "log", "timeout_s")
"""Settings of [run] that belong to the machine and change no result: a run that continues may change them."""
FILES = ("config.toml", "plan.json", "job.json")
"""What every run folder has, also before its first epoch."""
START_ANEW = "put the file back, or start the run again"
ANOTHER = "name a folder that is new or empty: --out, in Python out="


def make_run_folder(config: Config, name: str, out: Path | None, made: list[Path] | None = None) -> Path:
    """Create the folder of a new run with its configuration: `out`, or runs/<name>-<time>.

    made: gets the folder before its first file, as `discarded_if_refused` takes it: a signal may come in between.
    Raises: RunError if `out` exists and is not empty: a run never overwrites another.
    """
    folder = _named_by_time(name) if out is None else out
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder} is a file, expected a folder for the run; {ANOTHER}")
    if folder.exists() and any(folder.iterdir()):
        resume = f", or continue that run: --resume {folder}, in Python Trainer.from_run" if is_run(folder) else ""
        raise RunError(f"{folder} exists and is not empty; {ANOTHER}{resume}")
    text, made = to_toml(config), [] if made is None else made
    new = out is None or not folder.exists()
    try:
        with discarded_if_refused(made=made):
            folder.mkdir(parents=True, exist_ok=out is None or not new)
            if new:
                made.append(folder)
            # Of two commands that found the folder empty, one makes the file, and the folder is its.
            with (folder / "config.toml").open("x", encoding="utf-8") as file:
                if not new:
                    made.append(folder)
                file.write(text)
    except FileExistsError:
        if folder in made:
            made.remove(folder)
        raise RunError(f"{folder} was taken by another run just now; {ANOTHER}") from None
    except OSError as error:
        raise RunError(f"the run folder {folder} cannot be written: {error.strerror}") from error
    return folder


def is_run(folder: Path) -> bool:
    """Return whether a folder is that of a run."""
    return all((folder / name).is_file() for name in FILES)


def looks_like_run(folder: Path) -> bool:
    """Return whether a folder looks like that of a run, even if files are damaged or missing."""
    return any(os.path.lexists(folder / name) for name in FILES[1:])


def _may_be_killed(folder: Path) -> bool:
    """Return whether a folder holds nothing but what a command writes before its run begins."""
    names = {path.name for path in folder.iterdir()}
    of_runs = {name.lstrip(".").partition(".")[0] for name in names} <= {"config", "plan", "job", "start", "products"}
    return of_runs and any(name.lstrip(".").startswith("config.toml") for name in names)


def _named_by_time(name: str) -> Path:
    """Make runs/<name>-<time>, with a number if another run took it in the same second.

    The name comes from a store's meta.json: of it letters, digits and "._-" are kept, so that no folder lies elsewhere.
    """
    name = re.sub(r"[^\w.-]+", "_", name).strip(".")[:80] or "graph"
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{k}" for k in range(2, 1000))):
        folder = Path("runs") / f"{name}-{stamp}{suffix}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise RunError(f"the run folder {folder} cannot be made: {error.strerror}; {ANOTHER}") from error
        return folder
    raise RunError(f"runs/{name}-{stamp} and 999 more exist; {ANOTHER}")


def continued(folder: Path, config: Config, changes: Mapping[str, Any]) -> Config:
    """Return the configuration with which a run continues: to its end or, with more epochs, beyond it.

    changes: settings of [train] in CONTINUABLE, of [run] in MACHINE. Without one of SCHEDULE the schedule continues,
    and the run ends as if it had never stopped; with one, a schedule of its own begins at the epoch that the run has
    reached.
    Raises: ConfigError for other settings, epochs that are trained already, or a schedule that depends on their number.
    """
    if strange := [name for name in changes if name not in (*CONTINUABLE, *MACHINE)]:
        raise ConfigError(
            f"a run that is continued keeps its settings, got {', '.join(strange)}; of [train] it may change "
            f"{', '.join(CONTINUABLE)}, of [run] what belongs to the machine: {', '.join(MACHINE)}"
        )
    config = from_tables({"run": {name: changes[name] for name in MACHINE if name in changes}}, config)
    wanted = from_tables({"train": {name: changes[name] for name in CONTINUABLE if name in changes}}, config)
    if wanted == config:
        return config
    done, before, after = epochs_done(folder, config), config.train, wanted.train
    if before.repeat > 1:
        raise ConfigError(
            f"{folder} repeats its run, and all repeats need the same settings; leave train.epochs and others as they are"
        )
    progress = _saved_progress(folder)
    if after.epochs < done + bool(progress and progress.step):
        raise ConfigError(f"{folder} has trained {saved_text(folder, config)} already, got train.epochs {after.epochs}")
    if is_complete(folder):
        _require_more(folder, before, after, done)
    if any(name in changes for name in SCHEDULE):
        return from_tables({"train": {"schedule_start": done}}, wanted)
    if after.epochs != before.epochs and before.schedule == "cosine":
        raise ConfigError(
            f"{folder} has a cosine schedule, which depends on the epochs; leave train.epochs as it is, or "
            f"begin a new schedule at epoch {done}: name train.schedule (constant, cosine, step, plateau), and train.lr"
        )
    return wanted


def _require_more(folder: Path, before: TrainConfig, after: TrainConfig, done: int) -> None:
    """Refuse changes that would leave a complete run as it is."""
    progress = _saved_progress(folder)
    if progress and after.patience and progress.waited >= after.patience:
        raise ConfigError(
            f"the run in {folder} stopped after {done} epochs, {progress.waited} evaluations after its best one; "
            "train.patience 0, or a larger number, lets it continue"
        )
    if after.epochs <= done:
        raise ConfigError(f"the run in {folder} is complete after {done} epochs; a larger train.epochs extends it")


def epochs_done(folder: Path, config: Config) -> int:
    """Return the epochs of all repeats that a resumed run does not train again. Raises: RunError if that is damaged."""
    if (progress := _saved_progress(folder)) is None:
        return 0
    begun = progress.epoch if progress.run < config.train.repeat else 0
    return begun + sum(int(run["epochs"]) for run in progress.finished)


def saved_text(folder: Path, config: Config) -> str:
    """Say what a resumed run does not train again: "3 epochs", or "3 epochs and 20 steps"; "" for nothing."""
    done, progress = epochs_done(folder, config), _saved_progress(folder)
    step = progress.step if progress else 0
    return f"{done} epochs" + (f" and {step} steps" if step else "") if done or step else ""


@contextlib.contextmanager
def naming_checkpoint(folder: Path, way: str | None = "") -> Iterator[None]:
    """Add to a CommError how much is saved, and the `way` to continue: "" for the command, None for no hint."""
    try:
        yield
    except CommError as error:
        done = ""
        with contextlib.suppress(MggcnError):  # the first error is the one to tell
            done = "" if way is None else saved_text(folder, read_run(folder)[0])
        if done:
            way = way or f"mggcn train --resume {printable(shlex.quote(str(folder)))}"
            raise CommError(f"{error}; {done} are saved, continue with: {way}") from error
        raise


def is_complete(folder: Path) -> bool:
    """Return whether a run has come to its end."""
    return (folder / "result.json").exists()


def seed_of_weights(folder: Path, config: Config, seed: int | None = None) -> int | None:
    """Return the seed of the complete repeat whose weights a run is scored with: the requested one, or the best.

    None: its weights are those of the checkpoint, of a run without repeats, without a complete one, or of an earlier
    version, which kept the last one's alone. Raises: ConfigError for a seed whose weights are not there; RunError if the
    checkpoint is damaged.
    """
    progress = _saved_progress(folder) if config.train.repeat > 1 else None
    finished = progress.finished if progress else []
    kept = [run for run in finished if is_kept(folder, run["seed"])]
    seeds = [int(run["seed"]) for run in kept or finished[-1:]] or [config.train.seed]
    if seed is not None and seed not in seeds:
        raise ConfigError(f"--seed expects one of {', '.join(map(str, seeds))}, whose weights are there, got {seed}")
    if not kept:
        return None
    return int(best_repeat(kept, config.train.metric)["seed"]) if seed is None else seed


def _saved_progress(folder: Path) -> Progress | None:
    """What the checkpoint of a run says of its progress; None without one."""
    from mggcn.train.checkpoint import read_progress  # loads torch

    found = read_progress(folder / "checkpoints")
    return found[0] if found else None


def reopen(folder: Path, config: Config) -> None:
    """Let a run continue with another configuration. If the process is killed in here, the run counts as incomplete.

    Raises: RunError if its history lacks epochs.
    """
    if (progress := _saved_progress(folder)) is not None:
        require_history(folder, progress.history_lines)
    (folder / "result.json").unlink(missing_ok=True)
    record_change(folder, config)
    write_text(folder / "config.toml", to_toml(config))


def move_store(folder: Path, store: Path) -> None:
    """Record the store that now holds the graph of a run: a graph in memory is written again for every trainer."""
    job = read_record(folder / "job.json")
    write_json(folder / "job.json", job | {"store": str(store.resolve())})


def read_run(folder: Path) -> tuple[Config, dict[str, Any], dict[str, Any]]:
    """Return configuration, plan and job (the store's path) of a run folder. Raises: RunError if it is not one."""
    if not folder.is_dir():
        raise RunError(f"there is no run folder {folder}; mggcn train makes one and prints its name")
    refuse_sweep(folder)
    if absent := [name for name in FILES if not os.path.lexists(folder / name)]:
        killed = "; a command that was killed in set-up leaves one: remove it, and start the run again"
        raise RunError(
            f"{folder} is not the folder of a run: it lacks {', '.join(absent)}{killed if _may_be_killed(folder) else ''}"
        )
    plan = read_record(folder / "plan.json", "graph", "per_rank")
    job = read_record(folder / "job.json", "store", "graph_sha256")
    _check_plan(folder / "plan.json", plan)
    if not isinstance(job["store"], str | None) or "\0" in (job["store"] or ""):
        raise RunError(f"{folder / 'job.json'} is damaged: store must be a path, got {job['store']!r}; {START_ANEW}")
    config = from_toml(folder / "config.toml", saved=True)
    check_settings(folder, config, job)
    return config, plan, job


def _check_plan(path: Path, plan: dict[str, Any]) -> None:
    """Refuse a plan without the sizes that every reader takes from it; make the graph's name one to print."""
    try:
        shape, ranks = GraphShape(**plan["graph"]), plan["per_rank"]
        check_shape(shape)
        plan["graph"]["name"] = one_line(str(shape.name))
        sizes = [(rank["total_bytes"], rank["regions"]["runtime"]) for rank in ranks]
        if not sizes or any(type(size) is not int for pair in sizes for size in pair):
            raise ValueError("per_rank must hold the bytes of each rank")
    except (LookupError, TypeError, ValueError, AttributeError, MggcnError) as error:
        raise RunError(f"{path} is damaged: {type(error).__name__} {one_line(str(error))}; {START_ANEW}") from error


@contextlib.contextmanager
def discarded_if_refused(*new: Path, made: Sequence[Path] = ()) -> Iterator[None]:
    """Remove a new run folder if bad input, such as a missing split, or a signal comes before the first epoch.

    made: folders that are made meanwhile: a signal may come before their maker has returned them.
    """
    try:
        yield
    except (MggcnError, KeyboardInterrupt) as error:
        refused = not isinstance(error, MggcnError) or isinstance(error, Interrupted) or error.exit_code == 2
        for folder in (*new, *made) if refused else ():
            if (folder / "history.jsonl").exists():
                continue
            # Of torchrun's ranks, another may write its last sign of life while this one removes the folder.
            for _ in range(10):
                shutil.rmtree(folder, ignore_errors=True)
                if not folder.exists():
                    break
            with contextlib.suppress(OSError):
                Path("runs").rmdir()  # which it may have been the first in
        raise


def write_plan(
    folder: Path, plan: RunPlan, partition: Partition, store: Path | None, graph: Graph, choice: Choice | None = None
) -> None:
    """Record the plan, the store and the digests of graph and partition in a run folder, for its ranks and for later.

    choice: what `auto` chose from, if it chose. Variants of sparse products that were measured are copied.
    Raises: StoreError if their file is damaged; the folder, which is new, is then removed.
    """
    beside = store_folder(graph)
    if beside is not None:
        host = host_of(plan.config)
        with discarded_if_refused(folder):
            measured = read_choices(beside / STORE_FILE, host)
        if measured:
            write_choices(folder / RUN_FILE, host, measured)
    names = {"class_names": list(graph.class_names)} if graph.class_names else {}
    write_json(
        folder / "plan.json", to_dict(plan) | names | ({} if choice is None else {"choice": choice_dict(choice)})
    )
    job = {
        "store": None if store is None else str(store.resolve()),
        "began": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "owners_sha256": partition.digest(),
    }
    write_json(
        folder / "job.json", job | {"assignment": _assignment(plan.config)} | beginnings(folder, plan.config, graph)
    )


def measured_products(folder: Path, config: Config) -> Choices:
    """Return the measured variants of sparse products that a run was started with, if they are this machine's.

    Raises: StoreError if their file is damaged.
    """
    path = folder / RUN_FILE
    return read_choices(path, host_of(config)) if path.exists() else NO_CHOICES


def _assignment(config: Config) -> dict[str, Any]:
    """The settings that decide which rank owns which vertex, and what it keeps from epoch to epoch."""
    run = config.run
    return {
        "ranks": run.ranks,
        "strategy": run.strategy,
        "delay": run.delay,
        "stale_aggregates": run.stale_aggregates,
        "order": run.order,
        "seed": config.train.seed,
    }


def _named(settings: dict[str, Any], names: list[str]) -> str:
    return ", ".join(f"{name} {settings[name]}" for name in names)


def known_plan(folder: Path, config: Config, graph: Graph) -> tuple[RunPlan, Partition]:
    """Return the plan in a run folder, without another pass over the graph, and the partition of the rows.

    Raises: RunError if the graph or the settings are not those that the run was planned for, or another version planned it.
    """
    plan, _ = recorded_plan(folder, config, graph)
    _, _, job = read_run(folder)
    partition = partition_graph(config, graph)
    if partition.digest() != job.get("owners_sha256"):
        raise RunError(
            f"the run in {folder} was planned for a different partition of {job['store'] or graph.name}, which another "
            "version of mggcn has since rebuilt; start a new run, or score it with mggcn predict --store"
        )
    return plan, partition


def require_planned(folder: Path, plan: Mapping[str, Any]) -> None:
    """Refuse a run of a user's own module, whose code is not in the folder. Raises: RunError."""
    if "module" in plan:
        raise RunError(
            f"the run in {folder} trains a module of its own, {plan['module'].get('module')}, whose code is not in the "
            "folder; continue in Python: Trainer.from_run(folder, graph, module, ...) with the same loss and optimizer"
        )


def require_graph(folder: Path, graph: Graph) -> None:
    """Refuse a graph other than the one that a run was made for. Raises: RunError."""
    job = read_run(folder)[2]
    if job["graph_sha256"] != graph_sha256(graph):
        parts = changed_parts(job, graph)
        raise RunError(
            f"{job['store'] or graph.name} is not the graph that the run in {folder} was made for: it has changed since"
            f"{f' ({parts})' if parts else ''}; "
            "start a new run, or score it with mggcn predict --store"
        )


def recorded_plan(folder: Path, config: Config, graph: Graph) -> tuple[RunPlan, str]:
    """Return the plan in a run folder, and why `auto` chose it ("" if it did not). Raises: as `known_plan`."""
    _, content, job = read_run(folder)
    require_planned(folder, content)
    require_graph(folder, graph)
    planned, asked = job.get("assignment"), _assignment(config)
    planned = with_new_names("run", planned) if isinstance(planned, dict) else {}
    if planned.keys() != asked.keys() or "partition" not in content:
        raise RunError(
            f"the plan of the run in {folder} was recorded by another version of mggcn, and this one cannot continue it; "
            "use that version, or start a new run"
        )
    if changed := [name for name in asked if asked[name] != planned[name]]:
        raise RunError(
            f"config.toml in {folder} asks for {_named(asked, changed)}, the run was planned for "
            f"{_named(planned, changed)}; put it back, or start a new run"
        )
    try:
        return plan_recorded(config, content), one_line(str(content.get("choice", {}).get("reason", "")))
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise RunError(
            f"{folder / 'plan.json'} is damaged: {type(error).__name__} {one_line(str(error))}; {START_ANEW}"
        ) from error
