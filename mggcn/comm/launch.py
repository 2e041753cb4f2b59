"""Ranks as processes of this machine: the parent that starts and watches them; it needs no torch."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final, final

from mggcn.comm.failure import (
    STOP_CODES,
    STOPPED,
    STOPS,
    Ending,
    Interrupted,
    first_error,
    log_path,
    output_of,
    process_state,
    report_path,
    stops,
)
from mggcn.comm.rank import (
    connect_torchrun,
    gpu_index,
    parent_path,
    rank_main,
    torchrun_env,
    torchrun_main,
    up_path,
)
from mggcn.errors import CommError
from mggcn.files import open_log

__all__ = ["Interrupted", "connect_torchrun", "gpu_index", "rank_main", "run_ranks", "torchrun_env", "torchrun_main"]


POLL_S: Final = 0.05
GRACE_S: Final = 2.0
"""After the first failure the other ranks have this long to report theirs."""
TERMINATE_S: Final = 3.0
"""Between SIGTERM and SIGKILL."""
LEFT_S: Final = 5.0
"""Ranks end together: once one has ended, the others have this long, on top of the time limit of a call."""
PRIVATE: Final = ".ranks-"
"""What the name of a launcher's own folder in the run folder begins with."""
IMPORT_S: Final = 15.0
"""Seconds that a rank may need to start Python and import torch, on top of the time limit to connect."""


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
    command: Sequence[str],
    size: int,
    folder: Path,
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    poll: Callable[[], None] | None = None,
    logs: bool = True,
) -> None:
    """Run `command --rank R --size P --rendezvous FILE` for each rank, and return once all of them have succeeded.

    Rank 0 writes where the parent does, the others to folder/rank-R.log, or without `logs` there too. SIGINT, SIGTERM and
    SIGHUP are forwarded once; a second one kills. When this returns or raises, no rank is left; if the parent is killed,
    its ranks die with it.
    poll: called regularly while the ranks run, and once they have ended; if it raises, the ranks save and end.
    `command` calls `rank.rank_main`, whose ranks must all connect within about `timeout_s`.
    Raises: the first error of any rank, with its class; CommError if a rank was killed or all hang at the start;
    Interrupted after a signal. Only the main thread can forward signals.
    """
    folder.mkdir(parents=True, exist_ok=True)
    remove_stale(folder)
    for rank in range(size):
        report_path(folder, rank).unlink(missing_ok=True)
    private = Path(tempfile.mkdtemp(prefix=PRIVATE, dir=folder)).resolve()
    ranks: list[_Rank] = []
    held = os.open(private, os.O_RDONLY)
    try:
        with suppress(OSError):  # file systems without locks
            fcntl.flock(held, fcntl.LOCK_EX)
        parent_path(private).write_text(str(os.getpid()))
        with _caught_signals() as signals:
            for rank in range(size):
                log = None if rank == 0 or not logs else log_path(folder, rank)
                ranks.append(_start(command, rank, size, log, private, env or {}))
            _watch(ranks, signals, folder, private, timeout_s, poll or _nothing)
            (poll or _nothing)()
    finally:
        _stop(ranks)
        shutil.rmtree(private, ignore_errors=True)
        os.close(held)
    endings = [rank.ending for rank in ranks if rank.ending is not None]
    error = first_error(endings, signals, folder)
    if error is not None:
        raise error


def remove_stale(folder: Path) -> None:
    """Remove the private folders of launchers that were killed: their locks are free."""
    for private in folder.glob(f"{PRIVATE}*"):
        with suppress(OSError):
            held = os.open(private, os.O_RDONLY)
            try:
                # A launcher locks its folder before it leaves its number there.
                if parent_path(private).exists():
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(private)
            finally:
                os.close(held)


def _start(
    command: Sequence[str], rank: int, size: int, log_to: Path | None, private: Path, env: Mapping[str, str]
) -> _Rank:
    arguments = ["--rank", str(rank), "--size", str(size), "--rendezvous", str(private / "store")]
    loopback = "lo" if sys.platform == "linux" else "lo0"
    # NCCL moves data between GPUs over other links, and a user may have a reason to name an interface.
    variables = {"NCCL_SOCKET_IFNAME": loopback, **os.environ, **env, "GLOO_SOCKET_IFNAME": loopback}
    # A session of its own: a Ctrl-C of the terminal reaches the parent alone, which forwards it once.
    log = None if log_to is None else open_log(log_to, anew=True)
    # A signal that comes while the rank starts Python waits until the rank can obey it in order (rank.ready_for_signals).
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
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
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if log is not None:
            log.close()
    return _Rank(rank, process)


def _nothing() -> None:
    """Do nothing."""


def _watch(
    ranks: Sequence[_Rank],
    signals: Sequence[int],
    folder: Path,
    private: Path,
    timeout_s: float,
    poll: Callable[[], None],
) -> None:
    """Return when all ranks have ended, or GRACE_S after the first that failed. Forwards `signals` as they come.

    Raises: CommError if nothing happened for too long at the start.
    """
    connect_by = time.monotonic() + timeout_s + IMPORT_S
    forwarded = 0
    failed_at: float | None = None
    left_at: float | None = None
    while any(rank.running for rank in ranks):
        time.sleep(POLL_S)
        poll()
        now = time.monotonic()
        _note_endings(ranks)
        if failed_at is None and any(rank.ending and rank.ending.code not in (0, *STOP_CODES) for rank in ranks):
            failed_at = now
            _note_stopped(ranks)
        if failed_at is not None and now > failed_at + GRACE_S:
            return
        if left_at is None and any(rank.ending for rank in ranks):
            left_at = now
        if left_at is not None and now > left_at + timeout_s + LEFT_S:
            _refuse_early(ranks)
            return
        while forwarded < len(signals):
            _signal_all(ranks, signals[0] if forwarded == 0 else signal.SIGKILL)
            forwarded += 1
        late = [rank for rank in ranks if rank.running and not up_path(private, rank.number).exists()]
        if late and failed_at is None and now > connect_by:
            raise CommError(
                f"rank {late[0].number} did not connect within {timeout_s + IMPORT_S:g} s; "
                f"{output_of(folder, late[0].number)}"
            )
    _note_endings(ranks)


def _note_endings(ranks: Sequence[_Rank]) -> None:
    now = time.monotonic()  # of all that one look finds: what ended first among them is not known
    for rank in ranks:
        code = rank.process.poll()
        if code is not None and rank.ending is None:
            rank.ending = Ending(rank=rank.number, code=code, seen_s=now)


def _refuse_early(ranks: Sequence[_Rank]) -> None:
    """Raises: CommError if a rank ended as if its work were done, and others still wait for it."""
    for rank in ranks:
        if rank.ending is not None and rank.ending.code == 0:
            raise CommError(f"rank {rank.number} exited with code 0 while others still waited for it; resume the run")


def _note_stopped(ranks: Sequence[_Rank]) -> None:
    """Note the ranks that a signal has stopped: others waited for them in vain."""
    for rank in ranks:
        if rank.running and process_state(rank.process.pid) in ("T", "t"):
            rank.ending = Ending(rank=rank.number, code=STOPPED, seen_s=time.monotonic())


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
        rank.process.send_signal(signum)  # harmless for a process that has ended: Popen checks first


@contextmanager
def _caught_signals() -> Iterator[list[int]]:
    """Collect the signals that end a run instead of obeying them. Only the main thread sets handlers; elsewhere: none."""
    caught: list[int] = []

    def remember(signum: int, _frame: FrameType | None) -> None:
        caught.append(signum)

    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    before = {signum: signal.signal(signum, remember) for signum in stops()}
    try:
        yield caught
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
