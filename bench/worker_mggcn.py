"""The process of mggcn in a comparison: does what `mggcn train` does on one rank, one epoch at a time."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

from common import Contender, memory, serve


def prepare(job: dict[str, Any]) -> Contender:
    """Open the store, plan, make the rank; save the initial weights if asked to."""
    import numpy as np

    from mggcn.assemble import make_rank, memory_limit, plan_graph, resolve
    from mggcn.comm.single import SingleCommunicator
    from mggcn.config import from_tables
    from mggcn.graph.store import open_store

    settings = {"train": {"eval_every": 0}, "run": {"threads": job["threads"]}} | job.get("settings", {})
    settings["run"] = {"threads": job["threads"]} | settings["run"]
    graph = open_store(job["store"])
    config = resolve(from_tables({"model": {"hidden": job["hidden"]}} | settings), graph)
    plan, owners = plan_graph(config, graph)
    plan.check(memory_limit(config))
    planned = {"planned": memory()}
    began = time.perf_counter()
    rank = make_rank(config, graph, plan, owners, SingleCommunicator())
    if job.get("weights"):
        np.savez(Path(job["weights"]), **{n: w.numpy() for n, w in rank.trainer.runtime.weights.state_dict().items()})
    epochs = itertools.count()
    first = plan.ranks[0]
    facts = planned | {
        "make_rank_seconds": time.perf_counter() - began,
        "planned_bytes": plan.process_bytes,
        "regions": dict(first.regions),
        "setup_bytes": first.setup_bytes,
        "arena_bytes": first.arena_bytes,
        "paper_bytes": first.paper_bytes,
        "input": first.model.input.reason,
    }
    return Contender(lambda: rank.trainer.step(next(epochs)), facts)


if __name__ == "__main__":
    serve(prepare)
