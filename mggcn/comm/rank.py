"""The frame of a rank that is a process: it joins the others, works, and leaves a report if it fails.

No torch is imported here before a rank connects.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Final, NoReturn

from mggcn.comm.failure import STOP_CODES, STOPS, Interrupted, Report, out_of_memory, signal_of, stops
from mggcn.errors import BackendError, CommError, ConfigError, MggcnError, one_line, printable, shown
from mggcn.host import die_with_parent, settle_malloc

if TYPE_CHECKING:
    from mggcn.comm.base import Communicator

TORCHRUN: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun tells its processes; the first three are numbers."""
COUNTS: Final = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
"""Where srun and mpirun say how many processes they started. A batch script of several tasks has none of them."""
HEARD_S: Final = 0.6
"""Seconds that a failing rank 0 of torchrun lives on: its process may hold the store, where the others read why."""


def rank_main(
    rank: int,
    size: int,
    rendezvous: Path,
    timeout_s: float,
    folder: Path,
    body: Callable[[Communicator], None],
    transport: str = "gloo",
) -> int:
    """Connect a rank that `run_ranks` started, and run `body`. Returns 0; after a failure the process ends in here.

    The exception is left in folder/rank-R.error.json for the parent. To stop early, `body` raises Interrupted on all
    ranks: they meet once more, and leave with its exit code. With transport nccl, body calls `use_stream`.
    """
    die_with_parent(int(parent_path(rendezvous.parent).read_text()))
    settle_malloc()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)

    def join() -> Communicator:
        from mggcn.comm.distributed import connect

        comm = connect(rank, size, f"file://{rendezvous}", timeout_s, True, transport)
        up_path(rendezvous.parent, rank).touch()
        return comm

    return _run(rank, folder, join, body)


def torchrun_main(timeout_s: float, body: Callable[[Communicator], None], transport: str = "gloo") -> int:
    """Do as `rank_main` for a rank that torchrun started; a failure is printed, because torchrun reads no reports."""
    rank, _, _ = _require_torchrun()
    die_with_parent(os.getppid())
    return _run(rank, None, lambda: connect_torchrun(timeout_s, transport), body)


@contextlib.contextmanager
def telling_ranks(timeout_s: float) -> Iterator[None]:
    """Tell ranks of torchrun on several machines why this one fails before they meet: they would wait their time limit.

    The error is raised again once the others have come, or after `timeout_s`.
    """
    try:
        yield
    except (MggcnError, OSError) as error:
        found = torchrun_env()
        if found is not None and not all_here(found[1]) and found[1] > 1:
            from mggcn.comm.control_store import meet

            die_with_parent(os.getppid())
            with contextlib.suppress(CommError):  # that some did not come, or what this rank has said itself
                meet(found[0], found[1], "env://", timeout_s, one_line(str(error)))
        raise


def ready_for_signals() -> None:
    """Let SIGINT, SIGTERM and SIGHUP end this rank at once, but cleanly: before training there is nothing to save.

    Its launcher blocks them while Python starts, and sends them to all ranks.
    """

    def leave(number: int, _frame: FrameType | None) -> None:
        os._exit(128 + number)

    for number in stops():
        signal.signal(number, leave)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


def gpu_index(rank: int, num_gpus: int) -> int:
    """Return the index of this process's GPU among those that it sees: torchrun's local rank, else the rank.

    A launcher may show each process a GPU of its own (Slurm's --gpus-per-task, CUDA_VISIBLE_DEVICES): then it is that one,
    and whether two processes see the same shows once they have met (comm/gather.py: refuse_shared).
    Raises: BackendError if there are not that many.
    """
    found = torchrun_env()
    index = rank if found is None else found[2]
    if found is not None and num_gpus == 1:
        return 0
    if index >= num_gpus:
        where = "" if found is None else f" (local rank {index})"
        raise BackendError(
            f"rank {rank}{where} needs its own GPU, but this machine shows {num_gpus}; start fewer ranks, use "
            "--transport threads for several ranks on one GPU, or look at CUDA_VISIBLE_DEVICES"
        )
    return index


def num_gpus_used(ranks: int, transport: str) -> int:
    """Return how many GPUs of this machine a run uses, counted from the first that is visible; one if ranks are
    threads.
    """
    if ranks == 1 or transport in ("single", "threads"):
        return 1
    return ranks_here(ranks)


def ranks_here(ranks: int) -> int:
    """Return how many of a run's ranks are on this machine: all, unless torchrun says otherwise."""
    return min(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", ranks))) if torchrun_env() else ranks


def all_here(ranks: int) -> bool:
    """Return whether torchrun says that all of a run's ranks are on this machine."""
    return os.environ.get("LOCAL_WORLD_SIZE") == str(ranks)


def torchrun_env() -> tuple[int, int, int] | None:
    """Return (rank, size, local rank) if torchrun started this process, None if no launcher did.

    Raises: ConfigError if another launcher started it, or one that leaves something out: each process would train alone.
    """
    given = {name: os.environ[name] for name in TORCHRUN if os.environ.get(name)}
    numbers: dict[str, str] = {name: given[name] for name in TORCHRUN[:3] if name in given}
    if len(given) == len(TORCHRUN):
        here = os.environ.get("LOCAL_WORLD_SIZE", "1")
        if not here.isdecimal() or int(here) < 1:
            raise ConfigError(
                f"expected LOCAL_WORLD_SIZE to be how many ranks are on this machine, got {printable(here)!r}; start with "
                "torchrun, or unset it"
            )
        found = [int(text) if text.isdecimal() else -1 for text in numbers.values()]
        if min(found) < 0 or found[0] >= found[1]:
            raise ConfigError(
                f"expected RANK in 0 .. WORLD_SIZE - 1 and a LOCAL_RANK, as torchrun sets them, got {_listed(numbers)}; "
                "start with torchrun, or unset them"
            )
        return found[0], found[1], found[2]
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    if any(alone[name] != text for name, text in numbers.items()):
        missing = [name for name in TORCHRUN if name not in given]
        raise ConfigError(
            f"{_listed(numbers)} is set and {', '.join(missing)} is not: this process would train alone; start the ranks "
            f"with torchrun, which sets all of them, have the launcher set the rest, or unset {', '.join(numbers)}"
        )
    for name in COUNTS:
        size = os.environ.get(name, "")
        if size.isdecimal() and int(size) > 1 and not numbers:
            raise ConfigError(
                f"a launcher started {size} processes ({name}={size}), and each would train alone; start one process for "
                f"each machine, torchrun, which starts the ranks (docs/machines.md), or unset {name} if that is meant"
            )
    return None


def _listed(values: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={printable(text)}" for name, text in values.items())


def require_one_process(command: str) -> None:
    """Refuse a command that starts the ranks it needs, where torchrun or another launcher has started several of it.

    Raises: ConfigError.
    """
    alone = f"{command} runs in one process, which starts the ranks that it needs, and"
    for name in COUNTS:
        size = os.environ.get(name, "")
        if size.isdecimal() and int(size) > 1 and "WORLD_SIZE" not in os.environ:
            raise ConfigError(
                f"{alone} a launcher started {size} processes ({name}={size}); start one, on one machine, or unset {name} "
                "if that is meant"
            )
    found = torchrun_env()
    if found is not None and found[1] > 1:
        raise ConfigError(f"{alone} torchrun started {found[1]} processes; start it without torchrun, on one machine")


def connect_torchrun(timeout_s: float, transport: str = "gloo") -> Communicator:
    """Join the ranks of this torchrun. Raises: CommError if there is none or a rank does not come."""
    from mggcn.comm.distributed import connect

    rank, size, _ = _require_torchrun()
    # Messages of one machine stay on it, unless the user has named a network.
    inside = all_here(size) and "GLOO_SOCKET_IFNAME" not in os.environ
    return connect(rank, size, "env://", timeout_s, inside, transport)


def _require_torchrun() -> tuple[int, int, int]:
    found = torchrun_env()
    if found is None:
        raise CommError("expected RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT: start with torchrun")
    return found


def _run(rank: int, folder: Path | None, join: Callable[[], Communicator], body: Callable[[Communicator], None]) -> int:
    comm: Communicator | None = None
    try:
        comm = join()
        stopped = _stopped_by(body, comm)
        comm.close()
    except KeyboardInterrupt as stop:
        number = signal_of(stop)
        if folder is None and rank == 0:
            print(f"mggcn: {Interrupted(number)}", file=sys.stderr)
        if comm is not None:
            comm.abort(f"rank {rank} was {Interrupted(number)}")
        _leave(128 + number)
    except BaseException as error:
        report = _tell(rank, folder, error)
        if comm is not None:
            comm.abort(f"rank {rank} failed: {report.name}: {report.message}")
            if folder is None and rank == 0:
                time.sleep(HEARD_S)
        _leave(report.exit_code)
    if stopped is not None:
        _leave(stopped.exit_code)
    return 0


def _tell(rank: int, folder: Path | None, error: BaseException) -> Report:
    """Leave a report for the parent in `folder`; without one, or if it cannot be written, print the error."""
    report = Report.of(rank, error)
    try:
        if folder is not None:
            report.save(folder)
            return report
    except OSError as problem:
        print(f"cannot write the error report to {printable(folder)}: {one_line(str(problem))}", file=sys.stderr)
    if isinstance(error, MggcnError) or out_of_memory(error):
        print(f"mggcn: {one_line(str(report.error()))}", file=sys.stderr)
    else:
        print(shown(report.traceback), file=sys.stderr)
    return report


def _stopped_by(body: Callable[[Communicator], None], comm: Communicator) -> Interrupted | None:
    try:
        body(comm)
    except Interrupted as stop:
        return stop
    except SystemExit as leaving:
        if leaving.code not in STOP_CODES:
            raise
        return Interrupted(int(leaving.code) - 128)
    return None


def _leave(code: int) -> NoReturn:
    """End the process without joining threads: one of gloo may still wait for a rank that has gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def parent_path(private: Path) -> Path:
    """Return the file in which the parent of the ranks leaves its pid."""
    return private / "parent"


def up_path(private: Path, rank: int) -> Path:
    """Return the file that shows that a rank has connected."""
    return private / f"up-{rank}"
