"""One rank of P for bench/strategies.py: trains the same graph by every strategy in turn, some epochs of each at a time."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mggcn import native
from mggcn.comm.rank import rank_main

if TYPE_CHECKING:
    from mggcn.comm.base import Communicator

TIMEOUT_S = 300.0


def measure(comm: Communicator, job: dict[str, Any]) -> dict[str, Any]:
    """Return, by name of the configuration, seconds of every epoch and the bytes that this rank sent per epoch."""
    from mggcn.assemble import plan_graph, resolve
    from mggcn.assemble_rank import make_rank
    from mggcn.config import from_tables
    from mggcn.graph.store import open_store

    graph = open_store(job["store"])
    ranks, found = {}, {}
    for name, settings in job["configurations"].items():
        config = resolve(from_tables(settings), graph)
        plan, partition = plan_graph(config, graph)
        ranks[name] = make_rank(config, graph, plan, partition, comm)
        found[name] = {
            "seconds": [],
            "bytes_sent": [],
            "planned": plan.ranks[comm.rank].bytes_sent(plan.ranks[comm.rank].train),
        }
    first, last = 0, job["warm_up"]
    for _ in range(job["rounds"]):
        for name, rank in ranks.items():
            for epoch in range(first, last + job["turn"]):
                before = rank.comm.bytes_sent
                comm.barrier()
                began = time.perf_counter()
                rank.trainer.step(epoch)
                seconds = time.perf_counter() - began
                if epoch >= last:
                    found[name]["seconds"].append(seconds)
                    found[name]["bytes_sent"].append(rank.comm.bytes_sent - before)
        # The first epoch of the next turn finds the caches as the other strategies have left them: it is not timed.
        first = last + job["turn"]
        last = first + 1
    for rank in ranks.values():
        rank.trainer.runtime.training.state()  # every message has come
    return found


def main() -> int:
    native.limit_spinning()
    parser = argparse.ArgumentParser()
    parser.add_argument("job", type=Path)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--rendezvous", type=Path, required=True)
    a = parser.parse_args()

    def body(comm: Communicator) -> None:
        found = measure(comm, json.loads(a.job.read_text()))
        (a.job.parent / f"rank-{comm.rank}.json").write_text(json.dumps(found))

    return rank_main(a.rank, a.size, a.rendezvous, TIMEOUT_S, a.job.parent, body)


def read_ranks(folder: Path, size: int) -> dict[str, dict[str, Any]]:
    """Put the ranks' results together: an epoch is as long as on the slowest rank, which all wait for."""
    parts = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(size)]
    found = {}
    for name in parts[0]:
        same = [part[name] for part in parts]
        seconds = [max(times) for times in zip(*(part["seconds"] for part in same), strict=True)]
        found[name] = {
            "seconds": seconds,
            "median": statistics.median(seconds),
            "bytes_sent": [sum(part["bytes_sent"]) / len(part["bytes_sent"]) for part in same],
            "planned_bytes": [part["planned"] for part in same],
        }
    return found


if __name__ == "__main__":
    sys.exit(main())
