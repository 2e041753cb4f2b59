"""The process of mggcn in a comparison: does what `mggcn train` does on one rank, one epoch at a time.

settings    (job) tables of the configuration; what is `auto` in them is chosen as by `mggcn train`.
plain_rows  (job) sparse products go row by row, without panels, blocks or rows fetched ahead.
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

from common import Contender, memory, serve


def switch_ways_off() -> None:
    """Have every sparse product go row by row. Raises: ImportError before there are several ways."""
    from mggcn.backend.cpu import spmm as cpu_spmm
    from mggcn.backend.cpu import variants as cpu_variants

    plain = cpu_variants.SpmmChoice()
    cpu_spmm.choose_spmm = lambda *_, **__: plain


def work_of(plan: Any) -> dict[str, Any]:
    """What bounds an epoch: FLOP of dense products, and [bytes, footprint] of what every sparse product gathers."""
    from mggcn.cost.work import Work
    from mggcn.planning.op_cost import program_items

    rank = plan.ranks[0]
    items = [item for item in program_items(plan, rank, rank.train) if isinstance(item, Work)]
    gathers = [[item.rows * item.row_bytes, item.footprint] for item in items if item.kind == "sparse"]
    return {"flop": sum(item.flop for item in items), "gathers": gathers}


def prepare(job: dict[str, Any]) -> Contender:
    """Open the store, plan, make the rank; save the initial weights if asked to."""
    from mggcn import native

    native.limit_spinning()
    import numpy as np

    from mggcn.assemble import memory_limit, plan_graph
    from mggcn.assemble_rank import make_rank
    from mggcn.comm.single import SingleCommunicator
    from mggcn.config import from_tables
    from mggcn.graph.store import open_store
    from mggcn.jobs.auto import resolve_auto
    from mggcn.train import runtime  # noqa: F401  (what a rank imports: the memory of a process before any data)

    if job.get("plain_rows"):
        switch_ways_off()
    imported, began = memory(), time.perf_counter()

    settings = {"train": {"eval_every": 0}, "run": {"threads": job["threads"]}} | job.get("settings", {})
    settings["run"] = {"threads": job["threads"]} | settings["run"]
    graph = open_store(job["store"])
    config, _ = resolve_auto(from_tables({"model": {"hidden": job["hidden"]}} | settings), graph)
    plan, owners = plan_graph(config, graph)
    plan.check(memory_limit(config))
    planned = {"imported": imported, "planned": memory(), "plan_seconds": time.perf_counter() - began}
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
        "order": config.run.order,
        "precision": config.run.precision,
        "work": work_of(plan),
    }
    return Contender(lambda: rank.trainer.step(next(epochs)), facts)


if __name__ == "__main__":
    serve(prepare)
