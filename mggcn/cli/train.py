"""Train on a store, evaluate, checkpoint and log; --resume continues or extends a run.

The same command under `torchrun --nproc-per-node P -m mggcn train ...` is one rank of P.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mggcn.api.load import find_source
from mggcn.cli.answer import add_json
from mggcn.cli.colour import painted
from mggcn.cli.settings import add_settings, read_settings
from mggcn.comm.failure import Interrupted
from mggcn.comm.rank import all_here, telling_ranks, torchrun_env
from mggcn.config import Config, RunConfig, from_tables
from mggcn.config.files import setting_name, with_settings
from mggcn.config.values import setting
from mggcn.errors import ConfigError, RunError, printable
from mggcn.graph.sources.ogb import is_ogb
from mggcn.graph.store import is_store, open_store
from mggcn.memory.units import human
from mggcn.runs import folder as run_folders
from mggcn.runs import train as training
from mggcn.runs.occupied import occupied
from mggcn.runs.regroup import limit_now, regrouped, with_ranks
from mggcn.runs.result import read_result
from mggcn.runs.torchrun import Request, train_under_torchrun
from mggcn.runs.weights import weights_of_run

if TYPE_CHECKING:
    from torch import Tensor


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "store",
        nargs="?",
        help="store folder, its name under --root, or the name of a data set (mggcn datasets lists them), of which a store "
        "is made the first time; not with --resume",
    )
    parser.add_argument("--root", type=Path, metavar="DIR", help="folder in which names of stores are looked up")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the run; default: runs/<graph>-<time>")
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="DIR",
        help="continue a run, also on another number of --ranks, another --transport, within another --memory-limit, or on "
        "another rung or disk (--set run.capacity, run.scratch); with a larger --epochs also a complete one; --set "
        "train.lr, train.schedule, ... begin a new schedule where it stands, --set train.patience goes on after an early "
        "stop",
    )
    parser.add_argument(
        "--start-from",
        type=Path,
        metavar="RUN",
        help="begin with the best weights of another run of the same model, on this graph or another, not with random ones",
    )
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    add_json(parser)
    add_settings(parser)


def run(arguments: argparse.Namespace) -> int:
    """Train and print the scores."""
    _check_which(arguments)
    if torchrun_env() is not None:
        return _under_torchrun(arguments)
    folder = arguments.resume
    if folder is not None:
        with occupied(arguments.resume) if arguments.resume.is_dir() else contextlib.nullcontext():
            result = _resume(arguments)
    else:
        store = store_path(arguments.store, arguments.root)
        graph = open_store(store)
        settings, start, made = read_settings(arguments), _start(arguments), list[Path]()
        with run_folders.discarded_if_refused(made=made), contextlib.ExitStack() as held:
            planned = training.prepare_run(settings, graph, store, arguments.out, start, made=made)
            try:
                held.enter_context(occupied(planned.folder))
            except RunError:
                made.clear()  # another command is at work there
                raise
            if not arguments.quiet:
                training.announce(planned.plan, store, planned.reason)
            folder = planned.folder
            train = functools.partial(training.run_training, planned, graph, quiet=arguments.quiet)
            result = _train(planned.folder, arguments.quiet, train)
    arguments.answer = {"folder": folder, **result}
    if not arguments.quiet:
        print(summary(result))
    return 0


def _check_which(arguments: argparse.Namespace) -> None:
    """Refuse a command that neither starts nor continues a run, or both."""
    store, resume = arguments.store, arguments.resume
    if store is None and resume is None:
        raise ConfigError("mggcn train needs a STORE to start a run, or --resume DIR to continue one; give one of them")
    if store is not None and resume is not None:
        raise ConfigError(
            f"mggcn train got both the STORE {store}, to start a run, and --resume {resume}, to continue one; give one of "
            "them: a resumed run knows its store"
        )
    if resume is not None and arguments.out is not None:
        raise ConfigError(
            f"--resume {resume} continues in that folder, got --out {arguments.out} as well; remove --out"
        )
    if resume is not None and arguments.start_from is not None:
        raise ConfigError(f"--resume {resume} continues with its own weights; remove --start-from, or start a new run")


def _resume(arguments: argparse.Namespace) -> dict[str, Any]:
    """Continue a run, or extend a complete one; without changes a complete one stays as it is."""
    folder, quiet, (config, store) = arguments.resume, arguments.quiet, resumed(arguments)
    before = run_folders.read_run(folder)[0]
    if run_folders.is_complete(folder) and config.train == before.train:
        if not quiet:
            done = f"the run in {printable(folder)} is complete{_unused(before, config)}"
            print(f"{done}; --epochs with a larger number extends it")
        return read_result(folder)
    graph = open_store(store)
    config = regrouped(folder, config, graph, store)
    plan, reason = run_folders.recorded_plan(folder, config, graph)
    run_folders.reopen(folder, config)
    if not quiet:
        if not (folder / "checkpoints" / "latest").exists():
            print(f"{printable(folder)} holds no checkpoint: the run starts again", flush=True)
        training.announce(plan, store, reason, run_folders.epochs_done(folder, config), limit_now(config))
    return _train(folder, quiet, functools.partial(training.resume_training, folder, config, graph, quiet=quiet))


def _unused(before: Config, config: Config) -> str:
    """Say which settings of [run] are of no use to a run that has nothing left to train; "" for none."""
    # Another number of ranks chooses a transport of its own.
    other = {"transport"} if before.run.ranks != config.run.ranks else set()
    names = [one.name for one in dataclasses.fields(RunConfig) if one.name not in other]
    changed = [setting("run", name) for name in names if getattr(before.run, name) != getattr(config.run, name)]
    return f", and another {', '.join(changed)} would change nothing" if changed else ""


def _train(folder: Path, quiet: bool, train: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        with run_folders.naming_checkpoint(folder):
            return train()
    except Interrupted:
        if not quiet and (folder / "checkpoints" / "latest").exists():
            print(f"saved; resume with: mggcn train --resume {printable(folder)}", flush=True)
        raise


def store_path(name: str, root: Path | None) -> Path:
    """Return the folder of a store. Raises: StoreError or ConfigError that says how to make one."""
    path = find_source(name, root)
    if path.is_dir() and not is_store(path) and not is_ogb(path):
        inside = sorted(entry.name for entry in path.iterdir() if entry.is_dir() and is_store(entry))
        hint = f"; it holds the stores {', '.join(inside[:8])}" if inside else ""
        raise ConfigError(f"{path} is not a store: it lacks meta.json or indptr.npy{hint}")
    if not is_store(path):
        options = " --symmetrize" if is_ogb(path) else ""
        raise ConfigError(f"{path} is not a store; make one from it with: mggcn prepare {path} STORE{options}")
    return path


CHANGEABLE = {"setting_epochs", "setting_ranks", "setting_transport"}
"""Flags that a resumed run takes: how its ranks run and how long it continues, not what it computes. So are those of
MACHINE."""


def resumed(arguments: argparse.Namespace) -> tuple[Config, Path]:
    """Return store and configuration of a run to continue, its changes applied. Raises: ConfigError, RunError."""
    config, _, job = run_folders.read_run(arguments.resume)
    given = [k for k, v in vars(arguments).items() if k.startswith("setting_") and v is not None]
    named = [setting_name(text.partition("=")[0].strip()) for text in arguments.set]
    machine = [setting("run", name) for name in run_folders.MACHINE]
    known = [f"train.{name}" for name in run_folders.CONTINUABLE]
    flags = CHANGEABLE | {f"setting_{name}" for name in run_folders.MACHINE}
    if arguments.config is not None or not set(named) <= {*known, *machine} or set(given) - flags:
        raise ConfigError(
            "--resume keeps the run's own settings; only --epochs may be given with it, --ranks, --transport, and --set "
            f"{', '.join(known[1:])}, or what belongs to the machine: {', '.join(machine)}"
        )
    if job["store"] is None:
        raise RunError(
            f"{arguments.resume} was trained on a graph in memory; continue it in Python: "
            "mggcn.Trainer.from_run(folder, graph).resume()"
        )
    wanted = with_settings(config, arguments.set)
    changes = {name: getattr(wanted.train, name) for name in run_folders.CONTINUABLE if f"train.{name}" in named}
    changes |= {name: getattr(wanted.run, name) for name in run_folders.MACHINE if setting("run", name) in named}
    changes |= {
        name: getattr(arguments, f"setting_{name}") for name in run_folders.MACHINE if f"setting_{name}" in given
    }
    if arguments.setting_epochs is not None:
        changes["epochs"] = arguments.setting_epochs
    config = run_folders.continued(arguments.resume, config, changes)
    ranks = config.run.ranks if arguments.setting_ranks is None else arguments.setting_ranks
    run = from_tables({"run": {"ranks": ranks, "transport": arguments.setting_transport or "auto"}}).run
    config = with_ranks(config, run.ranks)
    if arguments.setting_transport is not None:
        config = dataclasses.replace(config, run=dataclasses.replace(config.run, transport=run.transport))
    return config, Path(job["store"])


def _start(arguments: argparse.Namespace) -> Mapping[str, Tensor] | None:
    """Return the weights that a run begins with, None for random ones. Raises: RunError, ConfigError."""
    return None if arguments.start_from is None else weights_of_run(arguments.start_from)


def _under_torchrun(arguments: argparse.Namespace) -> int:
    """Train as one rank of torchrun; rank 0 prints."""
    with telling_ranks(RunConfig().timeout_s):  # the run's own is not known yet
        if arguments.resume is not None:
            config, recorded = _resumed_here(arguments)
            find = functools.partial(Path, recorded)
        else:
            config, find = read_settings(arguments), functools.partial(store_path, arguments.store, arguments.root)
        start = _start(arguments) if os.environ["RANK"] == "0" else None
    request = Request(
        config=config,
        store=find,
        out=arguments.out,
        resume=arguments.resume,
        start=start,
        quiet=arguments.quiet,
    )
    code, result = train_under_torchrun(request)
    arguments.answer = result
    if result is not None and not arguments.quiet:
        print(summary(result))
    return code


def _resumed_here(arguments: argparse.Namespace) -> tuple[Config, Path]:
    """Return `resumed` of a rank of torchrun. Raises: RunError that says what several machines need."""
    try:
        return resumed(arguments)
    except RunError as error:
        if all_here(int(os.environ["WORLD_SIZE"])):
            raise
        raise RunError(f"{error}; every machine must see the run folder") from error


def _scores(line: str, kind: str) -> str:
    """A line of scores as it is printed: those of the best epoch stand out."""
    return painted(line, "bold", sys.stdout) if kind == "best" else line


def summary(result: dict[str, Any]) -> str:
    """Return the scores, times and memory of a run as text."""
    metric = result["metric"]
    lines = []
    if "mean" in result:
        for kind, title in (("final", "last epoch"), ("best", "best validation")):
            mean, std = result["mean"][kind], result["std"][kind]
            if kind == "best" and mean["val"] is None:
                continue  # nothing was validated
            scores = ", ".join(f"{s} {mean[s]:.4f} +- {std[s]:.4f}" for s in mean if mean[s] is not None)
            lines.append(_scores(f"{metric} of {len(result['runs'])} runs, {title}: {scores}", kind))
    else:
        for kind, title in (("final", "last epoch"), ("best", "best validation")):
            scores = result[kind]
            if kind == "best" and scores["val"] is None:
                continue  # nothing was validated
            text = ", ".join(f"{s} {scores[s]:.4f}" for s in ("train", "val", "test") if scores[s] is not None)
            lines.append(_scores(f"{metric}, {title} ({scores['epoch']}): {text}", kind))
    epoch = result["seconds_per_epoch"]
    seconds = "no epoch was left to run" if epoch is None else f"{epoch:.4f} s per epoch (median)"
    lines.append(
        f"{seconds}, set-up {result['setup_seconds']:.2f} s, peak memory "
        f"{human(result['measured_peak_bytes'])} (planned {human(result.get('planned_peak_bytes', 0))})"
    )
    if nccl := result.get("nccl"):
        lines.append(f"NCCL took {human(nccl['measured_bytes'])} of it ({human(nccl['planned_bytes'])} planned)")
    return "\n".join(lines)
