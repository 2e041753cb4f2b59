"""The pool of gloo processes: whatever becomes of one call, the next is as good as the first."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mggcn.comm.base import Communicator
from mggcn.errors import CommError
from tests.comm.pool import TIMEOUT_S, Call, GlooPool

FOREVER_S = 1000.0


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GlooPool]:
    pool = GlooPool(2, tmp_path_factory.mktemp("pool"))
    yield pool
    pool.close()


def total(comm: Communicator, summand: int) -> int:
    buf = torch.tensor([summand + comm.rank])
    comm.all_reduce(buf).wait()
    return int(buf)


def assert_good(pool: GlooPool) -> None:
    """The pool answers for two ranks, with the answers to this call."""
    summand = 10 * pool.number
    assert pool.run(2, total, (summand,), TIMEOUT_S) == [2 * summand + 1] * 2


def gone(pids: list[int]) -> bool:
    """Whether no process has one of these numbers, not even one that nobody waited for."""
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def last_sleeps(comm: Communicator) -> str:
    if comm.rank == comm.size - 1:
        time.sleep(FOREVER_S)
    return "an answer to an earlier call"


def test_call_that_outlasts_its_deadline(pool: GlooPool) -> None:
    """Fails if what some ranks answered, or a late answer, is taken for that of the next call; or if processes are left."""
    assert_good(pool)
    pids = [int(process.pid or 0) for process in pool.processes]
    with pytest.raises(TimeoutError, match=r"no answer to call \d+ \(last_sleeps\) of ranks? (0, )?1 in 0.6 s"):
        pool.run(2, last_sleeps, (), 0.5, answer_s=0.1)
    assert gone(pids)
    assert_good(pool)


def last_raises(comm: Communicator, others: str) -> None:
    if comm.rank == comm.size - 1:
        raise ValueError("disk full")
    if others == "wait for it":
        comm.barrier()
    else:
        time.sleep(FOREVER_S)


@pytest.mark.parametrize("others", ["wait for it", "do not look"])
def test_rank_that_raises(pool: GlooPool, others: str) -> None:
    """Fails if the others' errors hide the first, if it waits for them, or if the broken group serves another call."""
    with pytest.raises(ValueError, match="disk full") as caught:
        pool.run(2, last_raises, (others,), TIMEOUT_S)
    assert "raised on rank 1" in caught.value.__notes__[0]
    assert "in last_raises" in caught.value.__notes__[0]
    assert_good(pool)


def all_wait(comm: Communicator) -> None:
    if comm.rank == 0:
        comm.abort("out of memory")
    comm.barrier()


def test_error_of_all_ranks(pool: GlooPool) -> None:
    """Fails if a group that was aborted serves another call."""
    with pytest.raises(CommError, match="out of memory"):
        pool.run(2, all_wait, (), TIMEOUT_S)
    assert_good(pool)


def last_is_killed(comm: Communicator) -> None:
    if comm.rank == comm.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.barrier()


def test_rank_that_is_killed(pool: GlooPool) -> None:
    """Fails if a lost connection is all that is said, or if the pool goes on without the rank."""
    with pytest.raises(RuntimeError, match=r"rank 1 ended with code -9 in call \d+ \(last_is_killed\)"):
        pool.run(2, last_is_killed, (), TIMEOUT_S)
    assert_good(pool)


def test_rank_that_is_killed_between_two_calls(pool: GlooPool) -> None:
    """Fails if the next call pays for it."""
    assert_good(pool)
    pool.processes[0].kill()
    pool.processes[0].join()
    assert_good(pool)


class OnlyGoesError(Exception):
    """An error that pickle writes and cannot read."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


def raises_what_cannot_come_back(comm: Communicator) -> None:
    raise OnlyGoesError("disk", " full")


def returns_what_cannot_come_back(comm: Communicator) -> Any:
    return lambda: None


@pytest.mark.parametrize(
    ("case", "message"),
    [(raises_what_cannot_come_back, "OnlyGoesError: disk full"), (returns_what_cannot_come_back, "pickle.*lambda")],
)
def test_answer_that_cannot_be_sent(pool: GlooPool, case: Callable[..., Any], message: str) -> None:
    """Fails if a rank ends of it, silently."""
    with pytest.raises(Exception, match=message):
        pool.run(2, case, (), TIMEOUT_S)
    assert_good(pool)


def test_answer_to_an_earlier_call(pool: GlooPool) -> None:
    """Fails if answers do not say to what: rank 1 answers a call that nobody reads the answer of, and is a call behind."""
    assert_good(pool)
    pool.run(1, total, (0,), TIMEOUT_S)
    pool._pipes[1].send(Call(pool.number, 1, total, (0,), TIMEOUT_S))
    with pytest.raises(RuntimeError, match=r"rank 1 answered call \d+ in call \d+ \(total\)"):
        pool.run(2, total, (0,), TIMEOUT_S)
    assert_good(pool)


def test_close_ends_the_processes(pool: GlooPool) -> None:
    """Fails if a process outlives the session; a closed pool may be used again."""
    assert_good(pool)
    pids = [int(process.pid or 0) for process in pool.processes]
    pool.close()
    assert gone(pids)
    assert_good(pool)
