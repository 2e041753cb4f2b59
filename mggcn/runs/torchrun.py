"""Training under torchrun, which starts ranks on one machine or several, and starts them again when one is lost.

Rank 0 plans and writes the run folder, which all machines must see. Each machine may have a store of its own. Before
anything is planned the ranks tell each other what they found, so that all refuse alike what only one of them lacks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mggcn.assemble.plan import bind_process, check_available
from mggcn.comm.rank import all_here, telling_ranks, torchrun_env, torchrun_main
from mggcn.config import Config
from mggcn.config.files import to_tables
from mggcn.config.values import setting
from mggcn.errors import ConfigError, MggcnError, RunError, StoreError, printable
from mggcn.files import read_bytes
from mggcn.graph.csr import Graph
from mggcn.graph.layout import graph_digests
from mggcn.graph.store import open_store
from mggcn.memory.device import DEVICES
from mggcn.runs.began import differing_parts
from mggcn.runs.folder import (
    MACHINE,
    discarded_if_refused,
    is_run,
    naming_checkpoint,
    read_run,
    reopen,
    require_graph,
    saved_text,
)
from mggcn.runs.occupied import occupied
from mggcn.runs.regroup import regrouped, with_ranks
from mggcn.runs.result import read_result
from mggcn.runs.train import PlannedRun, announce, prepare_run, train_worker
from mggcn.train.heartbeat import boot_id, started_at
from mggcn.train.log import read_record, write_json

if TYPE_CHECKING:
    from torch import Tensor

    from mggcn.comm.base import Communicator

SEEN_S: Final = 10.0
"""Seconds in which a run folder must show on every machine: network file systems remember what was not there."""
LOOK_S: Final = 0.1
SEEN: Final = ("config.toml", "plan.json", "job.json", "checkpoints/latest")
"""Files by which a machine knows a run folder."""
LAUNCHERS: Final = "launchers"
"""Field of job.json: the processes that started the ranks which were last at work."""
ASKED: Final = "asked"
"""Field of job.json: the settings that the command named, by name, apart from those in ELSEWHERE."""
ELSEWHERE: Final = frozenset({"run.ranks", "run.transport", *(setting("run", name) for name in MACHINE)})
"""Settings that a run may have otherwise when torchrun starts its ranks again."""
SHOWN: Final = 4
"""Settings that a refusal names."""
Said = Mapping[str, Any]
"""What a rank says of itself: its host and launcher, and the path and digests of its store, or the problem with it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What the command asks of a rank. store: finds the store of this machine; it may raise."""

    config: Config
    store: Callable[[], Path]
    out: Path | None = None
    resume: Path | None = None
    start: Mapping[str, Tensor] | None = None
    """The weights to begin with, on rank 0; None: random ones."""
    quiet: bool = False


def train_under_torchrun(request: Request) -> tuple[int, dict[str, Any] | None]:
    """Train as one rank of torchrun. Returns its exit code, and the result on rank 0.

    Ranks that torchrun has started again go on from the last checkpoint in `out`, however many they are now.
    Raises: ConfigError, BackendError before the ranks meet, of which those on other machines hear; later errors end the
    process, on all ranks.
    """
    found = torchrun_env()
    if found is None:
        raise ConfigError(
            "torchrun's environment is missing; start with torchrun --nproc-per-node P -m mggcn train ..."
        )
    rank, size, _ = found
    with telling_ranks(request.config.run.timeout_s):
        config = _with_size(request, size)
        check_available(config)
        if not DEVICES[config.run.device].is_host:  # ranks on CPUs under torchrun: the launcher decides where they run
            bind_process(config, rank)
    started = time.perf_counter()
    # Before the ranks meet, after which they wait for each other: a data set may have to be downloaded.
    opened = _open(request.store)
    result: list[dict[str, Any]] = []

    def body(comm: Communicator) -> None:
        store, graph, everyone = _same_graph(comm, opened)
        with contextlib.ExitStack() as held:
            folder, planned = request.resume, None
            if comm.rank == 0:
                folder, planned = _begin(request, config, store, graph, everyone, held)
            shared = _seen_folder(comm, folder, everyone, config.run.timeout_s)
            with naming_checkpoint(shared):
                train_worker(comm, shared, request.quiet, started, planned, graph)
            if comm.rank == 0:
                result.append({"folder": str(shared), **read_result(shared)})

    code = torchrun_main(config.run.timeout_s, body, config.run.transport)
    return code, result[0] if result else None


def _with_size(request: Request, size: int) -> Config:
    """Return the configuration for torchrun's number of ranks. Raises: ConfigError."""
    config, run = request.config, request.config.run
    new = request.resume is None
    if new and run.ranks not in (1, size):
        raise ConfigError(f"--ranks {run.ranks} differs from torchrun's {size} processes; leave --ranks out")
    if run.transport in ("single", "threads"):
        raise ConfigError(f"under torchrun run.transport must be auto, gloo or nccl, got {run.transport}")
    # A machine that joins has the ranks started again, which --max-restarts does not count.
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" or not all_here(size)
    if new and request.out is None and "TORCHELASTIC_RUN_ID" in os.environ and restarts:
        raise ConfigError(
            "torchrun may start these ranks again (--max-restarts, or a machine that joins), and without a folder to go on "
            "from they would begin anew; name one: --out DIR"
        )
    return _on_processes(config if new else with_ranks(config, size), size)


def _on_processes(config: Config, size: int) -> Config:
    run = dataclasses.replace(config.run, ranks=size, transport=config.run.process_transport)
    return dataclasses.replace(config, run=run)


def _open(find: Callable[[], Path]) -> tuple[Path, Graph] | MggcnError | OSError:
    """Return the store of this machine, or the error that all ranks are to hear of."""
    try:
        store = find()
        return store, open_store(store)
    except (MggcnError, OSError) as error:
        return error


def _same_graph(
    comm: Communicator, opened: tuple[Path, Graph] | MggcnError | OSError
) -> tuple[Path, Graph, list[Said]]:
    """Return this machine's store and graph, and what every rank said of itself. Collective.

    Raises: StoreError, alike on all ranks, if a machine lacks the store or has that of another graph.
    """
    from mggcn.comm.gather import gather_texts  # loads torch

    said: dict[str, Any] = {"host": platform.node(), "launcher": _launcher()}
    if isinstance(opened, MggcnError | OSError):
        said["problem"] = str(opened)
    else:
        said |= {"store": str(opened[0].resolve()), "graph": graph_digests(opened[1])}
    everyone: list[Said] = [json.loads(text) for text in gather_texts(comm, json.dumps(said))]
    refuse_other_graphs(everyone)
    if isinstance(opened, MggcnError | OSError):  # refused, as every problem
        raise opened
    return *opened, everyone


def refuse_other_graphs(everyone: Sequence[Said]) -> None:
    """Refuse a rank without a store, or with another graph than rank 0 has. Raises: StoreError that names its machine."""
    first = everyone[0]
    for rank, one in enumerate(everyone):
        if "problem" in one:
            raise StoreError(f"rank {rank} on {one['host']} cannot open its store: {one['problem']}")
    for rank, one in enumerate(everyone):
        if one["graph"] != first["graph"]:
            raise StoreError(
                f"rank {rank} on {one['host']} has another graph in {one['store']} than rank 0 on {first['host']} has in "
                f"{first['store']} ({differing_parts(first['graph'], one['graph'])}); copy the store of one machine to "
                "the others, or name one that they share"
            )


def _launcher() -> str:
    """Return what no other torchrun has, on any machine: it stays, its ranks come and go. "": no torchrun."""
    if not (run_id := os.environ.get("TORCHELASTIC_RUN_ID")):
        return ""
    parent = os.getppid()
    return f"{platform.node()} {boot_id()} {parent} {started_at(parent)} {run_id}"


def _begin(
    request: Request,
    config: Config,
    store: Path,
    graph: Graph,
    everyone: Sequence[Said],
    held: contextlib.ExitStack,
) -> tuple[Path, PlannedRun | None]:
    """Plan a run on rank 0 and write its folder, or open the folder of one that goes on; return it, and a new plan.

    held: keeps other commands out until it ends.
    """
    launchers = [one["launcher"] for one in everyone]
    folder, planned = request.resume or request.out, None
    if folder is not None and (request.resume is not None or started_by(folder, launchers)):
        held.enter_context(occupied(folder))
        require_graph(folder, graph)
        if request.resume is None:
            refuse_other_settings(folder, request.config)
            size = config.run.ranks
            config = _on_processes(with_ranks(read_run(folder)[0], size), size)
            if not request.quiet:
                done = saved_text(folder, config) or "no epoch"
                print(f"started again: the run in {printable(folder)} goes on after {done}", flush=True)
        reopen(folder, regrouped(folder, config, graph, store))
    else:
        planned = prepare_run(config, graph, store, request.out, request.start)
        folder = planned.folder
        held.enter_context(occupied(folder))
        held.enter_context(discarded_if_refused(folder))
        if not request.quiet:
            announce(planned.plan, store, planned.reason)
    asked = {LAUNCHERS: launchers, ASKED: settings_asked(request.config)}
    write_json(folder / "job.json", read_record(folder / "job.json") | asked)
    return folder, planned


def started_by(folder: Path, launchers: Sequence[str]) -> bool:
    """Return whether a folder is that of a run whose ranks one of these launchers has started before."""
    known = read_record(folder / "job.json").get(LAUNCHERS) if is_run(folder) else None
    return isinstance(known, list) and any(one and one in known for one in launchers)


def settings_asked(config: Config) -> dict[str, Any]:
    """Return the settings of a command, by name, that are the same whenever torchrun starts its ranks again."""
    named = {f"{table}.{key}": value for table, keys in to_tables(config).items() for key, value in keys.items()}
    return {name: value for name, value in named.items() if name not in ELSEWHERE}


def refuse_other_settings(folder: Path, config: Config) -> None:
    """Refuse a command that is not the one that began the run of a folder: another run. Raises: ConfigError."""
    before, now = read_record(folder / "job.json").get(ASKED), settings_asked(config)
    before = before if isinstance(before, dict) else {}
    if differ := [name for name, value in now.items() if name not in before or before[name] != value]:
        more = f" and {len(differ) - SHOWN} more" if len(differ) > SHOWN else ""
        raise ConfigError(
            f"the run in {folder} began with other settings, {', '.join(differ[:SHOWN])}{more}; name another folder for a "
            f"new run, or continue that one: --resume {folder}"
        )


def _seen_folder(comm: Communicator, folder: Path | None, everyone: Sequence[Said], timeout_s: float) -> Path:
    """Return rank 0's run folder, once every rank has read the same files in it. Collective.

    Raises: RunError, alike on all ranks, naming a machine that sees another folder, or may not write where it must.
    """
    from mggcn.comm.gather import gather_texts  # loads torch

    mine = {} if folder is None else {"folder": str(folder.resolve()), "files": _files(folder)}
    told = json.loads(gather_texts(comm, json.dumps(mine))[0])
    shared = Path(told["folder"])
    problems = gather_texts(comm, _problem(shared, told["files"], min(SEEN_S, timeout_s / 2)))
    for rank, (one, problem) in enumerate(zip(everyone, problems, strict=True)):
        if problem:
            raise RunError(
                f"rank {rank} on {one['host']} {problem}; put it on a file system that all machines share (--out)"
            )
    return shared


def _files(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of files by which a machine knows a run folder, "" of those that it cannot read."""
    found = dict.fromkeys(SEEN, "")
    for name in SEEN:
        with contextlib.suppress(OSError):
            found[name] = hashlib.sha256(read_bytes(folder / name)).hexdigest()
    return found


def _problem(folder: Path, files: Mapping[str, str], patience_s: float) -> str:
    """Say what is wrong with a run folder on this machine, "" if nothing is. files: as rank 0 has them."""
    give_up_at = time.monotonic() + patience_s
    while _files(folder) != files:
        if time.monotonic() > give_up_at:
            what = "finds other files than rank 0 in" if folder.exists() else "does not see"
            return f"{what} the run folder {folder}"
        with contextlib.suppress(OSError):
            os.listdir(folder.parent)  # has a network file system ask again
        time.sleep(LOOK_S)
    if (what := _saved_by_each(read_run(folder)[0])) and not os.access(folder, os.W_OK):
        return f"may not write to the run folder {folder}, where each rank saves {what}"
    return ""


def _saved_by_each(config: Config) -> str:
    """Say what every rank saves in the run folder, "" if rank 0 alone does."""
    if config.run.strategy == "delayed" and config.run.delay_epochs:
        return "the messages that strategy delayed keeps"
    if config.reads_history:
        return "the rows and messages that sample.halo history keeps"
    return "its learned rows" if config.data.learned else ""
