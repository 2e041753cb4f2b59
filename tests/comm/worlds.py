"""Ways to run a function on P ranks: the same cases go through each of them."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, final

import torch.distributed as dist

from mggcn.comm.base import Communicator
from mggcn.comm.control_store import CHECKED_CALLS, ControlStore
from mggcn.comm.distributed import DistributedCommunicator
from mggcn.comm.single import SingleCommunicator
from mggcn.comm.threads import run_threads
from mggcn.errors import CommError
from tests.comm.fake_nccl import FakeNccl, FakeStream, gloo_group
from tests.comm.pool import TIMEOUT_S, GlooPool

HANGING_S = 20.0
"""A call that should return at once and takes longer hangs; a busy machine can stop a process for seconds."""


class World(Protocol):
    size: int

    def run(self, case: Callable[..., Any], *args: Any, timeout_s: float = TIMEOUT_S) -> list[Any]:
        """Run case(comm, *args) on every rank; results in rank order. Raises what a rank raised."""
        ...


@final
class SingleWorld:
    size = 1

    def run(self, case: Callable[..., Any], *args: Any, timeout_s: float = TIMEOUT_S) -> list[Any]:
        return [case(SingleCommunicator(), *args)]


@final
class Threads:
    def __init__(self, size: int) -> None:
        self.size = size

    def run(self, case: Callable[..., Any], *args: Any, timeout_s: float = TIMEOUT_S) -> list[Any]:
        def rank(comm: Communicator) -> Any:
            return case(comm, *args)

        return run_threads(self.size, rank, timeout_s)


@final
class Nccl:
    """Ranks as threads over the fake NCCL, host tensors over gloo."""

    def __init__(self, size: int, *, lazy: bool = False) -> None:
        self.size = size
        self.library = FakeNccl()
        self.streams = [FakeStream(self.library, rank, lazy=lazy) for rank in range(size)]
        self.checked_calls = CHECKED_CALLS
        self.start = True
        """Whether a case finds NCCL started."""

    def run(self, case: Callable[..., Any], *args: Any, timeout_s: float = TIMEOUT_S) -> list[Any]:
        store = dist.HashStore()
        held: dict[int, Any] = {}

        def body(rank: int) -> Any:
            control = ControlStore(dist.PrefixStore("control", store), rank, self.size, timeout_s)
            host = gloo_group(dist.PrefixStore("host", store), rank, self.size)
            comm = DistributedCommunicator(host, control, self.checked_calls, self.library.of(store, rank, self.size))
            held[rank] = comm  # until all ranks are done: a group that goes takes its connections along
            try:
                if self.start:
                    comm.use_stream(self.streams[rank])
                return case(comm, *args)
            except BaseException as error:
                comm.abort(f"rank {rank}: {error}")
                raise

        try:
            return in_threads(self.size, body)
        finally:
            self.library.killed.set()
            for stream in self.streams:
                stream.stop()
            # gloo joins its threads, and the last rank is the one for which the others may still wait in vain.
            for _, comm in sorted(held.items(), reverse=True):
                vars(comm).clear()  # tracebacks may hold it


def in_threads(size: int, body: Callable[[int], Any]) -> list[Any]:
    """Call body(rank) in a thread per rank. Raises: the first error that is no CommError, else the first."""
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(body, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, CommError)), errors[0])
    return [future.result() for future in futures]


@final
class Gloo:
    def __init__(self, pool: GlooPool, size: int) -> None:
        self.pool = pool
        self.size = size

    def run(self, case: Callable[..., Any], *args: Any, timeout_s: float = TIMEOUT_S) -> list[Any]:
        return self.pool.run(self.size, case, args, timeout_s)


def listening_addresses(_comm: Communicator) -> list[str]:
    """Where this process accepts TCP connections, as Linux tells it."""
    inodes = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            inodes.add(os.readlink(entry))
        except OSError:
            continue
    found = []
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        path = Path("/proc/net") / table
        lines = path.read_text().splitlines()[1:] if path.exists() else []
        for line in lines:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                raw = bytes.fromhex(fields[1].split(":")[0])
                words = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
                found.append(socket.inet_ntop(family, words))
    return found


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Whether `condition` came true in time."""
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > give_up_at:
            return False
        time.sleep(0.05)
    return True


def await_files(folder: Path, name: str, ranks: Iterable[int]) -> None:
    """Return once `ranks` have come to where they write a file: meetings that no communicator's time limit applies to."""
    files = [folder / f"{name}-{rank}" for rank in ranks]
    assert wait_until(lambda: all(file.exists() for file in files), TIMEOUT_S)


def meet_in(folder: Path, comm: Communicator) -> None:
    """Return when all ranks are here, on a machine that may run some of them seconds after the others."""
    (folder / f"here-{comm.rank}").touch()
    await_files(folder, "here", range(comm.size))
