"""Four logical ranks as threads on one GPU: how much of each rank's messages lies under its own computation.

Seconds come from runs without a timeline, one as it is and one in which every message is waited for at once; shares and
plots from a third with `--timeline`. All on one GPU, whose memory serves both: this proves the order, not the speed.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from bench.gpu.graphs import find_store
from bench.gpu.lab import Lab, attempt, make_device
from bench.report import spread
from mggcn.assemble.plan import plan_graph, resolve
from mggcn.assemble.rank import Rank, make_rank
from mggcn.backend.cuda.base import Device
from mggcn.backend.events import DONE, Event
from mggcn.comm.base import Communicator
from mggcn.comm.threads import run_threads
from mggcn.config import Config, from_tables
from mggcn.graph.csr import Graph
from mggcn.graph.store import open_store
from mggcn.report.busy import overlap
from mggcn.report.timeline import read_timeline
from mggcn.train.timeline import RECORDED, WARM_UP

RANKS, HIDDEN = 4, (256, 256)
TIMEOUT_S = 120.0
WARM = 3
TIMED = 5
"""Epochs of a timed stretch, and rounds of it."""


class AtOnce:
    """A communicator whose broadcasts are waited for when they are asked for: nothing is computed meanwhile."""

    def __init__(self, inner: Communicator) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def broadcast(self, *args: Any, **more: Any) -> Event:
        self._inner.broadcast(*args, **more).wait()
        return DONE


WRAPPED: dict[str, Callable[[Communicator], Communicator]] = {
    "overlapped": lambda comm: comm,
    "waited for at once": lambda comm: cast(Communicator, AtOnce(comm)),
}


@dataclass(frozen=True)
class Run:
    """What all runs share."""

    lab: Lab
    graph: Graph
    hidden: tuple[int, ...]

    def train(self, comm: Communicator, epochs: int, folder: Path | None = None) -> Rank:
        """One rank that is ready to train, on a device of its own streams."""
        run = {"device": "cuda", "ranks": RANKS, "transport": "threads", "timeout_s": TIMEOUT_S}
        run |= {"timeline": folder is not None, "memory_limit": self.lab.free_bytes() // RANKS}
        tables = {"model": {"hidden": self.hidden}, "train": {"epochs": epochs, "eval_every": 0}, "run": run}
        config = resolve(from_tables(tables), self.graph)
        plan, owners = plan_graph(config, self.graph)
        name = self.lab.settings.device

        def device_of(config: Config, comm: Communicator) -> Device:
            return make_device(name, capture=False)

        return make_rank(config, self.graph, plan, owners, comm, device_of=device_of, folder=folder)

    def timed(self, comm: Communicator) -> dict[str, Any]:
        """Seconds of an epoch on one rank, from an idle device to an idle device, all ranks together."""
        epochs = WARM + TIMED * self.lab.settings.rounds
        rank = self.train(comm, epochs)
        losses = [rank.trainer.step(0), *rank.trainer.advance(1, WARM)[:, 0].tolist()]
        seconds = []
        for first in range(WARM, epochs, TIMED):
            comm.barrier()
            began = time.perf_counter()
            rank.trainer.advance(first, first + TIMED)
            seconds.append((time.perf_counter() - began) / TIMED)
        comm.barrier()
        # Libraries and context are no part of torch's memory; cuBLAS's work space is.
        planned = sum(nbytes for name, nbytes in rank.plan.regions.items() if name != "runtime")
        return {"seconds": seconds, "losses": losses, "planned": planned}

    def traced(self, comm: Communicator, folder: Path) -> None:
        """Train just long enough for a timeline; rank 0 writes it."""
        epochs = WARM_UP + RECORDED
        rank = self.train(comm, epochs, folder)
        rank.trainer.step(0)
        rank.trainer.advance(1, epochs)
        comm.barrier()


def measure(lab: Lab, case: str) -> None:
    """Write rows of the kinds run and timeline."""
    settings = lab.settings
    run = Run(lab, open_store(find_store(case, settings.scale, settings.cache, settings.data)), HIDDEN)
    for messages, wrapped in WRAPPED.items():
        attempt(lab, {"kind": "run", "messages": messages}, compared, run, wrapped)
    attempt(lab, {"kind": "timeline"}, traced, run)


def traced(run: Run) -> dict[str, Any]:
    """The timeline of all ranks, and the share of each rank's messages under its computation."""
    with tempfile.TemporaryDirectory() as folder:
        run_threads(RANKS, lambda comm: run.traced(comm, Path(folder)), TIMEOUT_S)
        file = Path(folder) / "timeline.json"
        shares = {str(rank): share for rank, share in overlap(read_timeline(file)).items()}
        return {"shares": shares, "content": json.loads(file.read_text())}


def compared(run: Run, wrapped: Callable[[Communicator], Communicator]) -> dict[str, Any]:
    """Seconds of the slowest rank, round by round, losses, and bytes of all ranks."""
    ranks = run_threads(RANKS, lambda comm: run.timed(wrapped(comm)), TIMEOUT_S)
    slowest = [max(seconds) for seconds in zip(*(rank["seconds"] for rank in ranks), strict=True)]
    planned = sum(rank["planned"] for rank in ranks)
    return {**spread(slowest), "losses": ranks[0]["losses"], "planned": planned, "memory": run.lab.memory()}
