"""Ranks of this process, and the flag with which signals stop them."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

from mggcn.assemble.plan import dense_products, threads_per_rank
from mggcn.comm.failure import Interrupted, stops
from mggcn.comm.rank import ranks_here
from mggcn.config import Config
from mggcn.host import process_bytes
from mggcn.memory.device import runtime_bytes
from mggcn.memory.units import free_bytes

if TYPE_CHECKING:
    from mggcn.comm.base import Communicator
    from mggcn.train.engine import Stop


def in_processes(config: Config) -> bool:
    """Return whether the ranks are separate processes, not this process or threads of it."""
    return config.run.transport == "nccl" or (config.run.transport == "gloo" and config.run.ranks > 1)


def free_per_rank(config: Config) -> int:
    """Return the bytes that each rank on a CPU may take, as plans count them: what is free, and what this process has taken
    already, where ranks run in it, of what a process takes in any case.
    """
    own = 0 if in_processes(config) else min(process_bytes("RssAnon"), runtime_bytes("cpu"))
    return (free_bytes() + own) // ranks_here(config.run.ranks)


def on_local_ranks(config: Config, body: Callable[[Communicator], Any]) -> list[Any]:
    """Run `body` on every rank of this process: one, or P threads, which multiply as run.precision says until they end."""
    with dense_products(config):
        return on_threads(config, body)


def on_threads(config: Config, body: Callable[[Communicator], Any]) -> list[Any]:
    """Run `body` on every rank of this process, without changing torch's settings of precision."""
    import torch

    from mggcn.comm.single import SingleCommunicator
    from mggcn.comm.threads import run_threads

    if config.run.ranks == 1:
        before = torch.get_num_threads()
        torch.set_num_threads(threads_per_rank(config))
        try:
            return [body(SingleCommunicator())]
        finally:
            torch.set_num_threads(before)
    if config.run.timeline:
        from mggcn.train.timeline import make_profiler

        # Started first in another thread than the main one, the profiler complains on stderr.
        with make_profiler(config.run):
            pass
    return run_threads(config.run.ranks, body, config.run.timeout_s)


@contextlib.contextmanager
def signalled_stop(*, saves: bool = True) -> Iterator[Stop]:
    """Yield a flag that the first SIGINT, SIGTERM or SIGHUP sets; a second one acts at once.

    Outside the main thread it stays unset.

    saves: whether there is something to save from the start. Until the flag's `saves` is true, a signal has its
    previous effect, or raises Interrupted if it had none.
    """
    from mggcn.train.engine import Stop

    stop = Stop(saves=saves)
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {s: signal.getsignal(s) for s in stops()}

    def note(number: int, frame: FrameType | None) -> None:
        if not stop.saves:
            obey = before[signal.Signals(number)]
            if callable(obey):
                obey(number, frame)
            raise Interrupted(number)
        stop.signal = number
        for s in before:
            signal.signal(s, signal.SIG_DFL)

    for s in before:
        signal.signal(s, note)
    try:
        yield stop
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
