"""The process of mggcn in the contest of sampled training. Answers `epoch` with seconds, `result` with facts.

part  (job) sampler: seconds of a batch with compaction and transpose of every hop, drawn by the feed; feed: the same with
      gathered features; train: of an epoch of `mggcn train`; losses: trains by that command, and returns its losses and
      the test accuracy at the end; own: of an epoch in this process, whose seconds by stage are its result.
"""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.peers.layers import DROPOUT, LR, paced
from bench.process import Contender, held, mggcn, serve

STAGES = ("sample", "gather", "forward", "backward")


def prepare(job: dict[str, Any]) -> Contender:
    """Return what mggcn does in a part."""
    if job["part"] in ("train", "losses"):
        return command(job)
    from mggcn import native

    native.limit_spinning()
    from mggcn.assemble.plan import plan_graph, with_ahead
    from mggcn.config import from_tables
    from mggcn.graph.store import open_store
    from mggcn.train import runtime  # noqa: F401  (what a rank imports: the memory of a process before any data)

    imported, graph = held(), open_store(job["store"])
    config = with_ahead(from_tables(tables(job)))
    plan, owners = plan_graph(config, graph)
    made = own_rank if job["part"] == "own" else own_feed
    contender = made(job, config, graph, plan, owners)
    contender.facts["imported"] = imported
    return contender


def tables(job: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The settings of mggcn's runs."""
    sample = {"batch": job["batch"], "fanout": job["fanouts"]} | ({"ahead": job["ahead"]} if "ahead" in job else {})
    if job["part"] == "losses" and job["kind"] == "gcn":
        # Peers' layers scale by the degrees of a batch's blocks.
        sample["weights"] = job.get("weights", "block")
    train = {"epochs": job.get("epochs", 1000), "lr": LR, "eval_every": 0, "seed": job.get("seed", 1)}
    run = {"threads": job["threads"]}
    return {"model": {"dropout": DROPOUT} | job["model"], "sample": sample, "train": train, "run": run}


def own_feed(job: dict[str, Any], config: Any, graph: Any, plan: Any, owners: Any) -> Contender:
    """Draw and, for the feed, gather; edges have no values, and rows no scales."""
    import numpy as np
    import torch

    from mggcn.assemble.stack import seeds_of
    from mggcn.blocks.sampler import Sampler
    from mggcn.feed.edge_values import EdgeValues
    from mggcn.feed.features import VertexFeatures
    from mggcn.feed.gather import GatheredRows
    from mggcn.feed.memory import BatchMemoryPlan
    from mggcn.feed.sampled import SampledFeed
    from mggcn.feed.seeds import RankSeeds
    from mggcn.memory.arena import BufferSpec
    from mggcn.planning.batches import slot_plan

    adj_t, slots = graph.adj_t, slot_plan(config, plan.shape, plan.stack, len(plan.stack.blocks))
    values = EdgeValues(adj_t, config.sample, self_loops=False, corrected=False, stored=False, real=np.float32)
    reader = VertexFeatures(graph, False)
    rows = plan.stack.capacities[0].sources if job["part"] == "feed" else 0
    spec = BufferSpec("", rows, reader.num_features, "fp32")

    class NoRows:
        def gather(self, ids: Any) -> None:
            return None

    def memory(_: Any) -> Any:
        return GatheredRows(reader, spec, torch.float32) if rows else NoRows()

    seeds, sampler = seeds_of(config, graph, None), Sampler(adj_t, slots.draws)
    batch_memory = BatchMemoryPlan(stack=plan.stack, slots=slots, values=values, features=memory)
    feed = SampledFeed(sampler, RankSeeds(seeds), batch_memory, config.sample.ahead)
    sizes: list[float] = []

    def measure(batch: Any) -> None:
        edges = sum(block.indices.size for block in batch.edges.values())
        sizes[:] = [float(edges), float(max(ids.size for ids in batch.rows.values()))]

    numbers = itertools.count()

    def batches() -> Iterator[Any]:
        for number in numbers:
            yield from feed.epoch(1, number)

    return Contender(lambda: paced(batches(), measure, job["batches"]), {}, lambda: sizes)


def own_rank(job: dict[str, Any], config: Any, graph: Any, plan: Any, owners: Any) -> Contender:
    """Train in this process; the result is the seconds of STAGES and of what is left, in the last epoch."""
    from mggcn.assemble.rank import make_rank
    from mggcn.blocks.sampler import Sampler
    from mggcn.comm.single import SingleCommunicator
    from mggcn.feed.gather import GatheredRows, GatheredSparse
    from mggcn.model.kinds.ends import Loss

    seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def clocked(stage: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        seconds[stage] += time.perf_counter() - began

    gathers = [(owner, "gather", "gather") for owner in (GatheredRows, GatheredSparse)]
    for owner, name, stage in ((Sampler, "draw", "sample"), *gathers):
        setattr(owner, name, clocked(stage)(getattr(owner, name)))
    rank = make_rank(config, graph, plan, owners, SingleCommunicator())
    runtime, numbers = rank.trainer.runtime, itertools.count()
    ops = runtime.programs["train"].program.ops
    loss = next(number for number, op in enumerate(ops) if isinstance(op.kind, Loss))
    stages = {op.label: "forward" if number < loss else "backward" for number, op in enumerate(ops)}
    runtime.annotate = lambda label: clocked(stages[label])

    def epoch() -> float:
        seconds.clear()
        with clocked("step"):
            rank.trainer.step(next(numbers))
        return seconds["step"]

    def result() -> list[float]:
        parts = [seconds[stage] for stage in STAGES]
        return [*parts, seconds["step"] - sum(parts)]

    return Contender(epoch, {"planned": plan.process_bytes}, result)


def command(job: dict[str, Any]) -> Contender:
    """Train by `mggcn train`; the figure is seconds of a later epoch, or the last loss; the result, losses and a score."""
    found: list[float] = []

    def epoch() -> float:
        settings = tables(job)
        with tempfile.TemporaryDirectory() as folder:
            pairs = [(f"{table}.{key}", value) for table, keys in settings.items() for key, value in keys.items()]
            words = [word for name, value in pairs for word in ("--set", f"{name}={text_of(value)}")]
            mggcn("train", job["store"], "--quiet", "--out", f"{folder}/run", *words)
            lines = Path(folder, "run", "history.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        if job["part"] == "losses":
            found[:] = [*(row["loss"] for row in rows), rows[-1]["test"]]
            return float(rows[-1]["loss"])
        later = sorted(row["seconds"] for row in rows[1:] or rows)
        return float(later[len(later) // 2])

    return Contender(epoch, {}, lambda: found)


def text_of(value: Any) -> str:
    """A setting as the command line has it."""
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value).lower()


if __name__ == "__main__":
    serve(prepare)
