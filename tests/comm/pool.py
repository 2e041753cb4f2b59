"""Processes that run cases over gloo, shared by the tests of a session: starting them for each test would cost seconds.

A call counts as good only if every process answers it, in time and without an error. After any other one the processes
may be anywhere in it, so they are ended and the next call gets fresh ones: no call can spoil a later one.
"""

from __future__ import annotations

import os
import pickle
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist

from mggcn.comm.calls import name_ranks
from mggcn.comm.control_store import ControlStore
from mggcn.comm.distributed import DistributedCommunicator, connect
from mggcn.errors import CommError

# Deadlines end what hangs, and no more: a busy machine takes ten times as long as a quiet one.
TIMEOUT_S = 60.0
"""Time limit of a case's communicator."""
ANSWER_S = 90.0
"""A call may take this much longer than the time limit of its communicator."""
START_S = 120.0
"""For fresh processes to find each other. All three fit into the 300 seconds of a test."""
ENDING_S = 10.0
"""Between the end of a process's pipe and its own."""


class Call(NamedTuple):
    """What the processes are asked for. Every one of them takes part; those below `members` run the case."""

    number: int
    members: int
    case: Callable[..., Any]
    args: tuple[Any, ...]
    timeout_s: float


class Answer(NamedTuple):
    """What a process says to a call: the number is the call's."""

    number: int
    error: BaseException | None = None
    trace: str = ""
    result: Any = None


@final
class GlooPool:
    """Up to `size` ranks; those of a call are the first P of as many processes."""

    def __init__(self, size: int, folder: Path) -> None:
        self.size = size
        self.number = 0
        """Calls so far, over all processes there were; a start is one as well."""
        self.processes: list[BaseProcess] = []
        """One per rank, or none: the next call starts them."""
        self._pipes: list[Connection] = []
        self._folder = folder
        # Forks of a process that has imported torch: fresh ranks take a tenth of a second, also on a busy machine.
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(["pytest", "torch"])

    def run(
        self,
        members: int,
        case: Callable[..., Any],
        args: tuple[Any, ...],
        timeout_s: float,
        answer_s: float = ANSWER_S,
    ) -> list[Any]:
        """Run case(comm, *args) on ranks 0 .. members - 1; results in rank order.

        Raises: the first error of a rank that is no CommError, else the CommError of the lowest rank; TimeoutError
        after timeout_s + answer_s; RuntimeError if a process ends.
        """
        try:
            if not all(process.is_alive() for process in self.processes):
                self.close()  # one ended after its last answer
            if not self.processes:
                self._start()
            self.number += 1
            for pipe in self._pipes:
                with suppress(BrokenPipeError, ConnectionResetError):  # of a process that ended: found below
                    pipe.send(Call(self.number, members, case, args, timeout_s))
            answers = self._answers(case.__name__, timeout_s + answer_s)
        except BaseException:  # also an interrupt, or pytest's own time limit
            self.close()
            raise
        return [answer.result for answer in answers[:members]]

    def close(self) -> None:
        """End the processes at once, whatever they do."""
        for process in self.processes:
            if process.is_alive():
                process.kill()
        for process in self.processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self.processes, self._pipes = [], []

    def _start(self) -> None:
        self.number += 1
        # A folder of its own: fresh processes would take files of ended ones for each other's.
        folder = self._folder / f"start-{self.number}"
        folder.mkdir()
        for rank in range(self.size):
            mine, theirs = self._context.Pipe()
            self._pipes.append(mine)
            args = (rank, self.size, folder, self.number, theirs)
            process = self._context.Process(target=_serve, args=args, daemon=True)
            process.start()
            self.processes.append(process)
            theirs.close()
        self._answers("start", START_S)

    def _answers(self, what: str, within_s: float) -> list[Answer]:
        """Return what each process says to the last call."""
        give_up_at = time.monotonic() + within_s
        answers: dict[int, Answer] = {}
        while late := [rank for rank in range(self.size) if rank not in answers]:
            ready = wait([self._pipes[rank] for rank in late], give_up_at - time.monotonic())
            if not ready:
                missing = f"no answer to call {self.number} ({what}) of {name_ranks(late)} in {within_s:g} s"
                raise TimeoutError(missing) from next(
                    (answer.error for answer in answers.values() if answer.error), None
                )
            for rank in late:
                if self._pipes[rank] in ready:
                    answers[rank] = self._answer(rank, what)
        # A CommError follows from what another rank did, so it waits for that one's answer.
        for _, answer in sorted(answers.items()):
            if answer.error is not None:
                raise answer.error
        return [answers[rank] for rank in range(self.size)]

    def _answer(self, rank: int, what: str) -> Answer:
        """Return one answer to the last call. Raises: the rank's error, unless it is a CommError."""
        try:
            answer: Answer = self._pipes[rank].recv()
        except (EOFError, OSError):  # its end, also in the middle of an answer
            self.processes[rank].join(ENDING_S)
            code = self.processes[rank].exitcode
            raise RuntimeError(f"rank {rank} ended with code {code} in call {self.number} ({what})") from None
        if answer.number != self.number:
            raise RuntimeError(f"rank {rank} answered call {answer.number} in call {self.number} ({what})")
        if answer.error is not None:
            answer.error.add_note(f"raised on rank {rank} in call {self.number} ({what})\n{answer.trace}")
            if not isinstance(answer.error, CommError):
                raise answer.error
        return answer


def _serve(rank: int, size: int, folder: Path, number: int, pipe: Connection) -> None:
    """Answer the start, which has a number of its own, and then calls until the pipe ends."""
    torch.set_num_threads(1)
    # Not a name of any interface: `loopback` must replace it.
    os.environ["GLOO_SOCKET_IFNAME"] = "elsewhere0"
    own = _Rank(rank, size, folder)
    try:
        _tell(pipe, number, own.start)
        while True:
            call: Call = pipe.recv()
            _tell(pipe, call.number, partial(own.run, call))
    except (EOFError, BrokenPipeError, ConnectionResetError):  # nobody asks any more
        os._exit(0)


def _tell(pipe: Connection, number: int, work: Callable[[], Any]) -> None:
    """Send what `work` returns or raises."""
    try:
        answer = Answer(number, result=work())
        sent = ForkingPickler.dumps(answer)
    except BaseException as error:
        trace = traceback.format_exc()
        try:
            sent = ForkingPickler.dumps(Answer(number, error, trace))
            pickle.loads(sent)  # an error class with a constructor of its own may not come back
        except Exception:  # whatever pickle, or the error's own code, raises: the rank's answer must go out
            sent = ForkingPickler.dumps(Answer(number, RuntimeError(f"{type(error).__name__}: {error}"), trace))
    pipe.send_bytes(sent)


@final
class _Rank:
    """A process's side: its gloo groups. That of the first P ranks serves all cases for P ranks with the usual limit."""

    def __init__(self, rank: int, size: int, folder: Path) -> None:
        self._rank = rank
        self._size = size
        self._folder = folder
        self._groups: dict[int, DistributedCommunicator | None] = {}

    def start(self) -> None:
        connect(self._rank, self._size, f"file://{self._folder}/ranks", START_S, loopback=True)
        self._store = dist.FileStore(f"{self._folder}/groups", self._size)

    def run(self, call: Call) -> Any:
        """Return what the case returns; None on a process that is no member."""
        comm = self._group(call)
        if comm is None:
            return None
        try:
            return call.case(comm, *call.args)
        except BaseException as error:
            comm.abort(f"rank {self._rank}: {error}")
            raise

    def _group(self, call: Call) -> DistributedCommunicator | None:
        """All processes make a group together, members or not."""
        usual = call.timeout_s == TIMEOUT_S
        if usual and call.members in self._groups:
            return self._groups[call.members]
        # gloo's own limit comes after ours.
        group = dist.new_group(
            list(range(call.members)), backend="gloo", timeout=timedelta(seconds=call.timeout_s + TIMEOUT_S)
        )
        comm = None
        if self._rank < call.members:
            store = dist.PrefixStore(f"call-{call.number}", self._store)
            comm = DistributedCommunicator(group, ControlStore(store, self._rank, call.members, call.timeout_s))
        if usual:  # a case with a time limit of its own is one that breaks its group
            self._groups[call.members] = comm
        return comm
