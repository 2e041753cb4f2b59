"""Trains a few epochs under the preloaded watcher of watch_malloc.c and prints the largest block that an epoch asked for.

Usage: allocation_worker.py CASE [--plant]; the result is one line of JSON, backtraces of blocks over BOUND go to stderr.
"""

from __future__ import annotations

import ctypes
import json
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch

from mggcn.assemble import Rank
from mggcn.config import Config, ModelConfig, RunConfig, TrainConfig
from mggcn.graph.csr import Graph
from mggcn.model.lower import Program
from tests.graphs import make_graph, on_ranks

BOUND = 64 << 10
VERTICES = 20_000
WARM_UP, EPOCHS = 2, 3
CASES: dict[str, dict[str, Any]] = {
    "dense": {},
    "dropout": {"dropout": 0.5},
    "dense-input-dropout": {"input_dropout": 0.5},
    "sparse": {"features": "sparse"},
    "sparse-input-dropout": {"features": "sparse", "input_dropout": 0.5, "dropout": 0.5},
    "aggregate-first": {"products": "aggregate-first"},
    "mlp": {"kind": "mlp"},
    "sgd": {"optimizer": "sgd"},
    "two-ranks": {"ranks": 2},
    "two-ranks-dropout": {"ranks": 2, "dropout": 0.5},
}


def watcher() -> ctypes.CDLL:
    """The functions that the preloaded library adds to this process."""
    library = ctypes.CDLL(None)
    library.watch_reset.argtypes = [ctypes.c_size_t]
    library.watch_reset.restype = None
    library.watch_largest.restype = ctypes.c_size_t
    library.watch_count.restype = ctypes.c_size_t
    return library


WATCH = watcher()


@dataclass(frozen=True)
class Greedy:
    """The planted fault: an op with a temporary of 1 MiB."""

    label: str = "greedy"
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()

    def run(self, rt: Any) -> None:
        torch.empty(1 << 20, dtype=torch.uint8).zero_()


def config_of(case: str) -> Config:
    chosen = {"ranks": 1, "features": "auto", "products": "auto", "optimizer": "adam", **CASES[case]}
    ranks, features, products = chosen.pop("ranks"), chosen.pop("features"), chosen.pop("products")
    train = TrainConfig(seed=20011, optimizer=chosen.pop("optimizer"))
    transport = "threads" if ranks > 1 else "single"
    run = RunConfig(ranks=ranks, threads=2 // ranks, transport=transport, features=features, products=products)
    return Config(model=ModelConfig(hidden=(256, 256), **chosen), train=train, run=run)


def graph_of(config: Config) -> Graph:
    adj = sp.random(VERTICES, VERTICES, 5 / VERTICES, "csr", random_state=np.random.default_rng(7127), dtype=np.float32)
    adj.data[:] = 1
    adj = ((adj + adj.T) > 0).astype(np.float32)
    sparse = config.run.features == "sparse"
    return make_graph(adj, num_features=128, num_classes=40, sparse=sparse, weighted=False, seed=6011)


def epochs_of(rank: Rank, plant: bool) -> dict[str, Any]:
    """Warm up, then watch whole epochs; if one asks for too much, run another op by op to name the culprit."""
    trainer, plan = rank.trainer, rank.plan
    if plant:
        ops = (*plan.train.ops, Greedy())
        object.__setattr__(plan, "train", Program("train", ops, plan.train.arena))
    for epoch in range(WARM_UP):
        trainer.step(epoch)
    rank.comm.barrier()
    if rank.comm.rank == 0:
        WATCH.watch_reset(BOUND)
    rank.comm.barrier()
    for epoch in range(WARM_UP, WARM_UP + EPOCHS):
        trainer.step(epoch)
    rank.comm.barrier()
    found = {"largest": WATCH.watch_largest(), "blocks": WATCH.watch_count()}
    rank.comm.barrier()
    return found | {"ops": {} if found["largest"] <= BOUND else by_op(rank)}


def by_op(rank: Rank) -> dict[str, int]:
    """Run an epoch op by op: the largest block during each op that asked for more than BOUND. Ranks may mix."""
    guilty: dict[str, int] = {}

    def run(program: Program) -> None:
        runtime.program = program.name
        for op in program.ops:
            WATCH.watch_reset(BOUND)
            op.run(runtime)
            note(op.label)

    def note(label: str) -> None:
        if WATCH.watch_largest() > BOUND:
            guilty[label] = WATCH.watch_largest()
        WATCH.watch_reset(BOUND)

    runtime, trainer = rank.trainer.runtime, rank.trainer
    run(rank.plan.train)
    if rank.comm.size > 1:
        rank.comm.all_reduce(runtime.weights.grad).wait()
        note("all-reduce")
    trainer._optimizer.step()
    note("optimizer")
    return guilty


def main() -> None:
    case, plant = sys.argv[1], "--plant" in sys.argv
    config = config_of(case)
    results = on_ranks(config, graph_of(config), lambda rank: epochs_of(rank, plant))
    print(json.dumps(results[0]))


if __name__ == "__main__":
    main()
