"""The process of mggcn in a comparison: does what `mggcn train` does on one rank, one epoch at a time.

run, model, train  (job) settings; what is `auto` in them is chosen as by `mggcn train`.
plain_rows  (job) sparse products go row by row, without panels, blocks or rows fetched ahead.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

from bench.process import Contender, memory, serve


def switch_ways_off() -> None:
    """Have every sparse product go row by row."""
    from mggcn.backend.cpu import spmm
    from mggcn.backend.spmm_choice import SpmmChoice

    spmm.choose_spmm = lambda *_, **__: SpmmChoice()


def work_of(plan: Any) -> dict[str, Any]:
    """What bounds an epoch: FLOP of dense products, and [bytes, footprint] of what every sparse product gathers."""
    from mggcn.cost.work import Work
    from mggcn.planning.op_work import program_items

    rank = plan.ranks[0]
    items = [item for item in program_items(plan, rank, rank.train) if isinstance(item, Work)]
    gathers = [[item.rows * item.row_bytes, item.footprint] for item in items if item.kind == "sparse"]
    return {"flop": sum(item.flop for item in items), "gathers": gathers}


def predicted(plan: Any, machine: str) -> dict[str, float]:
    """Seconds of an epoch by kind of work, as the plan predicts them for a machine."""
    from mggcn.cost.machine import find_machine
    from mggcn.planning.op_cost import epoch_cost

    return dict(epoch_cost(plan, find_machine(machine)).train.parts)


def prepare(job: dict[str, Any]) -> Contender:
    """Open the store, plan, make the rank; save the initial weights if asked to."""
    from mggcn import native

    native.limit_spinning()
    import numpy as np

    from mggcn.assemble.plan import memory_limit, plan_graph
    from mggcn.assemble.rank import make_rank
    from mggcn.comm.single import SingleCommunicator
    from mggcn.config import from_tables
    from mggcn.graph.store import open_store
    from mggcn.planning.advice import require_fit
    from mggcn.runs.auto import resolve_auto
    from mggcn.train import runtime  # noqa: F401  (what a rank imports: the memory of a process before any data)

    if job.get("plain_rows"):
        switch_ways_off()
    imported, began = memory(), time.perf_counter()
    run, model = {"threads": job["threads"]} | job.get("run", {}), {"hidden": job["hidden"]} | job.get("model", {})
    graph = open_store(job["store"])
    train = {"eval_every": 0} | job.get("train", {})
    config, _ = resolve_auto(from_tables({"model": model, "train": train, "run": run}), graph)
    plan, owners = plan_graph(config, graph)
    require_fit(plan, memory_limit(config))
    planned = time.perf_counter()
    rank = make_rank(config, graph, plan, owners, SingleCommunicator())
    if job.get("weights"):
        np.savez(job["weights"], **{n: w.numpy() for n, w in rank.trainer.runtime.weights.state_dict().items()})
    epochs, first = itertools.count(), plan.ranks[0]
    facts = {
        "imported": imported["VmRSS"],
        "plan_seconds": planned - began,
        "rank_seconds": time.perf_counter() - planned,
        "planned_bytes": plan.process_bytes,
        "regions": dict(first.regions),
        "order": config.run.order,
        "precision": config.run.precision,
        "work": work_of(plan),
        "predicted": predicted(plan, job.get("machine", "assumed-cpu")),
    }
    return Contender(lambda: rank.trainer.step(next(epochs)), facts)


if __name__ == "__main__":
    serve(prepare)
