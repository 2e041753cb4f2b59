"""Ranks as processes of this machine: the parent that starts and watches them, and what a rank does around its work.

No torch is imported here before a rank connects: the parent needs none.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Final, NoReturn, final

from mggcn.comm.failure import STOP_CODES, Ending, Interrupted, Report, first_error, log_path, log_tail, report_path
from mggcn.errors import CommError, MggcnError

if TYPE_CHECKING:
    from mggcn.comm.base import Communicator
    from mggcn.comm.distributed import DistributedCommunicator

__all__ = ["Interrupted", "connect_torchrun", "rank_main", "run_ranks", "torchrun_env", "torchrun_main"]

POLL_S: Final = 0.05
GRACE_S: Final = 2.0
"""After the first failure the other ranks have this long to report theirs."""
TERMINATE_S: Final = 3.0
"""Between SIGTERM and SIGKILL."""
IMPORT_S: Final = 15.0
"""What a rank may need, beside the time limit to connect, to start Python and import torch."""
PR_SET_PDEATHSIG: Final = 1


@final
@dataclass(slots=True)
class _Rank:
    """A rank as the parent sees it."""

    number: int
    process: subprocess.Popen[bytes]
    ending: Ending | None = None

    @property
    def running(self) -> bool:
        return self.process.poll() is None


def run_ranks(
    command: Sequence[str], size: int, folder: Path, *, timeout_s: float, env: Mapping[str, str] | None = None
) -> None:
    """Run `command --rank R --size P --rendezvous FILE` for each rank, and return once all of them have succeeded.

    Rank 0 writes where the parent does, the others to folder/rank-R.log. SIGINT and SIGTERM are forwarded once; a
    second one kills. When this returns or raises, no rank is left; if the parent is killed, its ranks die with it.
    `command` calls `rank_main`, whose ranks must all connect within about `timeout_s`.
    Raises: the first error of any rank, with its class; CommError if a rank was killed or all hang at the start;
    Interrupted after a signal. Only the main thread can forward signals.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(size):
        report_path(folder, rank).unlink(missing_ok=True)
    private = Path(tempfile.mkdtemp(prefix=".ranks-", dir=folder)).resolve()
    ranks: list[_Rank] = []
    try:
        _parent_path(private).write_text(str(os.getpid()))
        with _caught_signals() as signals:
            for rank in range(size):
                ranks.append(_start(command, rank, size, folder, private, env or {}))
            _watch(ranks, signals, folder, private, timeout_s)
    finally:
        _stop(ranks)
        shutil.rmtree(private, ignore_errors=True)
    endings = [rank.ending for rank in ranks if rank.ending is not None]
    error = first_error(endings, signals, folder)
    if error is not None:
        raise error


def _start(command: Sequence[str], rank: int, size: int, folder: Path, private: Path, env: Mapping[str, str]) -> _Rank:
    arguments = ["--rank", str(rank), "--size", str(size), "--rendezvous", str(private / "store")]
    variables = {**os.environ, **env, "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0"}
    # A session of its own: a Ctrl-C of the terminal reaches the parent alone, which forwards it once.
    log = None if rank == 0 else log_path(folder, rank).open("wb")
    try:
        process = subprocess.Popen(
            [*command, *arguments],
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    finally:
        if log is not None:
            log.close()
    return _Rank(rank, process)


def _watch(ranks: Sequence[_Rank], signals: Sequence[int], folder: Path, private: Path, timeout_s: float) -> None:
    """Return when all ranks have ended, or GRACE_S after the first that failed. Forwards `signals` as they come.

    Raises: CommError if nothing happened for too long at the start.
    """
    connect_by = time.monotonic() + timeout_s + IMPORT_S
    forwarded = 0
    failed_at: float | None = None
    while any(rank.running for rank in ranks):
        time.sleep(POLL_S)
        now = time.monotonic()
        _note_endings(ranks)
        if failed_at is None and any(rank.ending and rank.ending.code not in STOP_CODES for rank in ranks):
            failed_at = now
        if failed_at is not None and now > failed_at + GRACE_S:
            return
        while forwarded < len(signals):
            _signal_all(ranks, signals[0] if forwarded == 0 else signal.SIGKILL)
            forwarded += 1
        late = [rank for rank in ranks if rank.running and not _up_path(private, rank.number).exists()]
        if late and failed_at is None and now > connect_by:
            raise CommError(
                f"rank {late[0].number} did not connect within {timeout_s + IMPORT_S:g} s; its log ends:\n"
                f"{log_tail(folder, late[0].number)}"
            )
    _note_endings(ranks)


def _note_endings(ranks: Sequence[_Rank]) -> None:
    for rank in ranks:
        code = rank.process.poll()
        if code and rank.ending is None:
            rank.ending = Ending(rank=rank.number, code=code, seen_s=time.monotonic())


def _stop(ranks: Sequence[_Rank]) -> None:
    """End what still runs, by its pid: SIGTERM, then SIGKILL."""
    _signal_all(ranks, signal.SIGTERM)
    give_up_at = time.monotonic() + TERMINATE_S
    while any(rank.running for rank in ranks) and time.monotonic() < give_up_at:
        time.sleep(POLL_S)
    _signal_all(ranks, signal.SIGKILL)
    for rank in ranks:
        rank.process.wait()


def _signal_all(ranks: Sequence[_Rank], signum: int) -> None:
    for rank in ranks:
        rank.process.send_signal(signum)  # nothing happens to one that has ended: Popen looks first


@contextmanager
def _caught_signals() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM instead of obeying them. Only the main thread may set handlers; elsewhere: none."""
    caught: list[int] = []

    def remember(signum: int, _frame: FrameType | None) -> None:
        caught.append(signum)

    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    before = {signum: signal.signal(signum, remember) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def rank_main(
    rank: int, size: int, rendezvous: Path, timeout_s: float, folder: Path, body: Callable[[Communicator], None]
) -> int:
    """Connect a rank that `run_ranks` started, and run `body`. Returns 0; after a failure the process ends in here.

    The exception is left in folder/rank-R.error.json for the parent. `body` stops in order by raising Interrupted
    on all ranks: they meet once more, and leave with its exit code.
    """
    _die_with_parent(int(_parent_path(rendezvous.parent).read_text()))

    def join() -> DistributedCommunicator:
        from mggcn.comm.distributed import connect

        comm = connect(rank, size, f"file://{rendezvous}", timeout_s, loopback=True)
        _up_path(rendezvous.parent, rank).touch()
        return comm

    return _run(rank, folder, join, body)


def torchrun_main(timeout_s: float, folder: Path, body: Callable[[Communicator], None]) -> int:
    """As `rank_main`, for a rank that torchrun started; a failure is also printed, since torchrun reads no reports."""
    rank, _, _ = _require_torchrun()
    _die_with_parent(os.getppid())
    folder.mkdir(parents=True, exist_ok=True)
    return _run(rank, folder, lambda: connect_torchrun(timeout_s), body, show=True)


def torchrun_env() -> tuple[int, int, int] | None:
    """(rank, size, local rank) if torchrun started this process, else None."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    if any(name not in os.environ for name in names):
        return None
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])


def connect_torchrun(timeout_s: float) -> DistributedCommunicator:
    """Join the ranks of this torchrun. Raises: CommError if there is none or a rank does not come."""
    from mggcn.comm.distributed import connect

    rank, size, _ = _require_torchrun()
    return connect(rank, size, "env://", timeout_s, loopback=False)


def _require_torchrun() -> tuple[int, int, int]:
    found = torchrun_env()
    if found is None:
        raise CommError("expected RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT: start with torchrun")
    return found


def _run(
    rank: int,
    folder: Path,
    join: Callable[[], Communicator],
    body: Callable[[Communicator], None],
    show: bool = False,
) -> int:
    comm: Communicator | None = None
    try:
        comm = join()
        stopped = _stopped_by(body, comm)
        comm.close()
    except KeyboardInterrupt:
        _leave(128 + signal.SIGINT)
    except BaseException as error:
        report = Report.of(rank, error)
        try:
            report.save(folder)
        except OSError as problem:
            print(f"cannot report in {folder}: {problem}", file=sys.stderr)
            show = True
        if show and isinstance(error, MggcnError):
            print(f"mggcn: rank {rank}: {error}", file=sys.stderr)
        elif show:
            print(report.traceback, file=sys.stderr)
        if comm is not None:
            comm.abort(f"rank {rank} failed: {report.name}: {report.message}")
        _leave(report.exit_code)
    if stopped is not None:
        _leave(stopped.exit_code)
    return 0


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


def _die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent` dies, also if that has happened already. Linux only."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _parent_path(private: Path) -> Path:
    return private / "parent"


def _up_path(private: Path, rank: int) -> Path:
    return private / f"up-{rank}"
