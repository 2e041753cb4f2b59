"""Ranks as processes that multiprocessing starts, so that they can run a function of a user's script.

The function is sent by name, or by value if it was typed in (a notebook, standard input) and no process could import it
(nn/typed_in.py). Its results come back through a pipe; failures are reported and watched as for the ranks that
the command starts (comm/rank.py, comm/failure.py).
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, TypeVar

import torch

from mggcn import native
from mggcn.comm.base import Communicator
from mggcn.comm.control_store import loopback_interface
from mggcn.comm.failure import Ending, first_error
from mggcn.comm.rank import parent_path, rank_main
from mggcn.errors import ConfigError
from mggcn.files import temporary_folder
from mggcn.graph.csr import Graph
from mggcn.graph.store import open_store, store_folder
from mggcn.graph.store_write import write_store
from mggcn.nn.partitioned import PartitionedGraph, on_rank
from mggcn.nn.sharing import Sharing, share
from mggcn.nn.typed_in import portable, refuse_in_a_starting_process, without_main_file

T = TypeVar("T")
POLL_S = 0.05
GRACE_S = 2.0
"""After the first failure the other ranks have this long to report theirs."""
TERMINATE_S = 3.0
"""Between SIGTERM and SIGKILL."""


@dataclass(slots=True)
class _Rank:
    """A rank as the parent sees it. results: empty until the rank has sent its result."""

    number: int
    process: SpawnProcess
    pipe: Connection
    results: list[Any]
    ending: Ending | None = None

    def look(self) -> None:
        """Receive the rank's result, and note how it ended."""
        if not self.results and self.pipe.poll():
            try:
                self.results.append(pickle.loads(self.pipe.recv_bytes()))
            except EOFError:
                pass  # it ended without a result: its exit code says more
        code = self.process.exitcode
        if code and self.ending is None:
            self.ending = Ending(rank=self.number, code=code, seen_s=time.monotonic())


def run_processes(
    body: Callable[[PartitionedGraph], T],
    graph: Graph,
    sharing: Sharing,
    ranks: int,
    transport: str,
    timeout_s: float,
    poll: Callable[[], None] | None = None,
) -> list[T]:
    """Call `body` on each of P processes with its part of the graph; see run.run.

    poll: called regularly while they run, and once they have ended; what it raises ends them.

    Cost: a graph in memory is written to a temporary store; each process imports torch, some seconds.
    Raises: ConfigError if body cannot be sent, or an unguarded script calls this in a rank; the first error of any rank.
    """
    refuse_in_a_starting_process()
    body = portable(body)
    started: list[_Rank] = []
    native.limit_spinning()  # for the ranks, which load torch before any of this runs
    with temporary_folder() as folder:
        store = store_folder(graph)
        if store is None:
            store = folder / "graph"
            write_store(graph, store)
        private = folder / "ranks"
        private.mkdir(mode=0o700)
        parent_path(private).write_text(str(os.getpid()))
        try:
            for rank in range(ranks):
                started.append(_start(rank, (ranks, folder, store, sharing, transport, timeout_s, body)))
            _watch(started, poll)
            error = first_error([r.ending for r in started if r.ending is not None], [], folder)
            if error is not None:
                raise error
            return [rank.results[0] for rank in started]
        finally:
            _stop(started)


def _start(rank: int, arguments: tuple[Any, ...]) -> _Rank:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(rank, *arguments, theirs), name=f"rank {rank}")
    try:
        with without_main_file(), _without_working_folder():
            process.start()
    except (pickle.PicklingError, AttributeError, TypeError) as error:  # pickle raises all of them
        raise ConfigError(
            f"a function that rank processes run must be picklable: one at the top of a module, or functools.partial "
            f"of one ({error}); or use transport='threads'"
        ) from error
    finally:
        theirs.close()
    return _Rank(rank, process, ours, [])


def _work(
    rank: int,
    size: int,
    folder: Path,
    store: Path,
    sharing: Sharing,
    transport: str,
    timeout_s: float,
    body: Callable[[PartitionedGraph], Any],
    pipe: Connection,
) -> None:
    """The life of a rank process; after a failure it ends in rank_main, its report in `folder`."""
    os.setsid()  # a Ctrl-C of the terminal reaches the parent alone, which ends the ranks in order
    os.environ["GLOO_SOCKET_IFNAME"] = loopback_interface()
    os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback_interface())

    def work(comm: Communicator) -> None:
        pipe.send_bytes(_packed(on_rank(body, share(open_store(store), sharing, size, transport), comm)))

    rank_main(rank, size, folder / "ranks" / "store", timeout_s, folder, work, transport=transport)


@contextlib.contextmanager
def _without_working_folder() -> Iterator[None]:
    """Have Python start without the working folder in its path, whose types.py would pass for the library's.

    A process that multiprocessing spawns takes this one's path afterwards, with the folder of the script in it.
    """
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


class _ByValue(pickle.Pickler):
    """Pickles only the visible part of a tensor that is a view of a larger one."""

    def reducer_override(self, found: Any) -> Any:
        if type(found) is torch.Tensor and found.layout == torch.strided:
            if found.untyped_storage().nbytes() > found.numel() * found.itemsize:
                return found.detach().clone().requires_grad_(found.requires_grad).__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def _packed(result: Any) -> bytes:
    """Pickle a result by value: torch would send tensors as handles to the memory of this process, which is about to
    end.
    """
    packed = io.BytesIO()
    try:
        _ByValue(packed, pickle.HIGHEST_PROTOCOL).dump(result)
        return packed.getvalue()
    except (pickle.PicklingError, AttributeError, TypeError) as error:  # pickle raises all of them
        raise ConfigError(
            f"body runs in rank processes, so it must return something picklable: tensors, arrays, numbers ({error}); or "
            "use transport='threads'"
        ) from error


def _watch(ranks: Sequence[_Rank], poll: Callable[[], None] | None) -> None:
    """Return when all ranks have ended, or GRACE_S after the first that failed."""
    failed_at: float | None = None
    while any(rank.process.is_alive() for rank in ranks):
        time.sleep(POLL_S)
        if poll is not None:
            poll()
        for rank in ranks:
            rank.look()
        if failed_at is None and any(rank.ending for rank in ranks):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() > failed_at + GRACE_S:
            return
    if poll is not None:
        poll()
    for rank in ranks:
        rank.look()


def _stop(ranks: Sequence[_Rank]) -> None:
    """End what still runs."""
    for rank in ranks:
        rank.process.terminate()
    for rank in ranks:
        rank.process.join(TERMINATE_S)
        if rank.process.is_alive():
            rank.process.kill()
        rank.process.join()
        rank.pipe.close()
