"""Trains a few epochs of each case under the preloaded watcher of watch_malloc.c; prints the largest block of an epoch.

Of an evaluation by blocks (EVALUATIONS), prints what it holds at most, and what its plan counts.

Usage: python -m tests.train.allocation_worker CASE ... [--plant]. Prints one line of JSON with an entry per case;
backtraces of blocks over BOUND go to stderr.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch

from mggcn.assemble import rank as assembled
from mggcn.assemble.rank import Rank
from mggcn.config import Config, ModelConfig, RunConfig, SampleConfig, TrainConfig
from mggcn.graph.csr import ArrayRows, Graph
from mggcn.graph.edges import of_matrix
from mggcn.graph.options import GraphOptions
from mggcn.graph.structure import build_adjacency
from mggcn.model.program import Program
from mggcn.train.block_evaluator import BlockEvaluator, SplitScores
from tests.graphs import make_graph, on_ranks

BOUND = 64 << 10
QUIET = 2**63
VERTICES = 17_000  # four bytes for each are more than BOUND
HIDDEN = (80, 80)  # all weights together are more than BOUND, too
WARM_UP, EPOCHS = 2, 2
CASES: dict[str, dict[str, Any]] = {
    "dense": {},
    "dropout": {"dropout": 0.5},
    "dense-input-dropout": {"input_dropout": 0.5},
    "sparse": {"features": "sparse"},
    "sparse-input-dropout": {"features": "sparse", "input_dropout": 0.5, "dropout": 0.5},
    "aggregate-first": {"products": "aggregate-first"},
    "mlp": {"kind": "mlp"},
    "sgd": {"optimizer": "sgd"},
    "gat": {"kind": "gat", "heads": 4, "attention_dropout": 0.3, "dropout": 0.5},
    "gatv2": {"kind": "gatv2", "heads": 4, "attention_dropout": 0.3},
    "two-ranks-gat-cd-0": {"kind": "gat", "heads": 4, "ranks": 2, "strategy": "delayed"},
    "two-ranks-rgcn": {"kind": "rgcn", "bases": 4, "ranks": 2, "dropout": 0.5, "strategy": "halo"},
    "batch-norm": {"norm_layer": "batch", "residual": "linear", "activation": "gelu", "jumping": "max", "dropout": 0.5},
    "layer-norm-gin": {"kind": "gin", "norm_layer": "layer", "activation": "elu", "jumping": "concat"},
    "two-ranks-batch-norm-cd-0": {"norm_layer": "batch", "head": "linear", "ranks": 2, "strategy": "delayed"},
    "batches": {"batch": 400, "dropout": 0.5},
    "batches-gat": {"batch": 400, "kind": "gat", "heads": 4},
    "batches-sparse-bf16": {"batch": 400, "features": "sparse", "precision": "bf16"},
    "batches-sparse-dropout": {
        "batch": 400,
        "features": "sparse",
        "input_dropout": 0.5,
        "kind": "sage",
        "aggregator": "mean",
    },
    "batches-fp64": {"batch": 400, "precision": "fp64", "kind": "sage"},
    "batches-stored": {
        "batch": 400,
        "kind": "sage",
        "aggregator": "mean",
        "products": "aggregate-first",
        "dropout": 0.5,
    },
    "batches-full": {"batch": 400, "first": "full", "kind": "sage", "aggregator": "mean", "dropout": 0.5},
    "batches-rgcn": {"batch": 400, "kind": "rgcn", "bases": 4, "by_type": True},
    "two-ranks-batches": {"batch": 400, "ranks": 2, "norm_layer": "batch"},
    "two-ranks-shared-batches": {"batch": 400, "ranks": 2, "batches": "cooperative", "kind": "gat", "heads": 4},
    "bf16": {"precision": "bf16", "dropout": 0.5},
    "two-ranks": {"ranks": 2},
    "two-ranks-dropout": {"ranks": 2, "dropout": 0.5},
    "two-ranks-halo": {"ranks": 2, "dropout": 0.5, "strategy": "halo"},
    "two-ranks-slice": {"ranks": 2, "dropout": 0.5, "strategy": "slice"},
    "two-ranks-bf16": {"ranks": 2, "precision": "bf16", "input_dropout": 0.5},
    "two-ranks-cd-0": {"ranks": 2, "dropout": 0.5, "strategy": "delayed"},
    "two-ranks-cd-2": {"ranks": 2, "dropout": 0.5, "strategy": "delayed", "delay": "2"},
}
BLOCKS: dict[str, Any] = {"batch": 400, "evaluate": "blocks"}
EVALUATIONS: dict[str, dict[str, Any]] = {
    "evaluation-gat": {**BLOCKS, "features": "sparse", "kind": "gat", "heads": 4},
    "evaluation-rgcn": {**BLOCKS, "kind": "rgcn", "bases": 4},
    "evaluation-permuted": {**BLOCKS, "order": "permute", "self_loops": True},
}


def watcher() -> ctypes.CDLL:
    """The functions that the preloaded library adds to this process."""
    library = ctypes.CDLL(None)
    library.watch_reset.argtypes = [ctypes.c_size_t]
    library.watch_reset.restype = None
    library.watch_largest.restype = ctypes.c_size_t
    library.watch_count.restype = ctypes.c_size_t
    for name in ("watch_held", "watch_most"):
        getattr(library, name).restype = ctypes.c_longlong
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
    chosen = {"optimizer": "adam", "evaluate": "auto", **(CASES | EVALUATIONS)[case]}
    given = {
        name: chosen.pop(name)
        for name in ("features", "products", "strategy", "delay", "precision", "batches", "order")
        if name in chosen
    }
    ranks, batch = chosen.pop("ranks", 1), chosen.pop("batch", 0)
    drawn = {name: chosen.pop(name) for name in ("first", "by_type") if name in chosen}
    train = TrainConfig(seed=20011, optimizer=chosen.pop("optimizer"), evaluate=chosen.pop("evaluate"))
    transport = "threads" if ranks > 1 else "single"
    run = RunConfig(ranks=ranks, threads=2 // ranks, transport=transport, **given)
    sample = SampleConfig(batch=batch, fanout=(8, 5, 3) if batch else (), **drawn)
    return Config(model=ModelConfig(hidden=HIDDEN, **chosen), train=train, sample=sample, run=run)


def fewer_seeds(graph: Graph) -> Graph:
    """The same graph with 3,000 training vertices: an epoch's order takes 8 bytes for each, which is no part of a step."""
    train = graph.splits["train"].array().copy()
    train[0, np.flatnonzero(train[0])[3000:]] = False
    return dataclasses.replace(graph, splits=graph.splits | {"train": ArrayRows(train)})


@functools.cache
def graph_of(sparse: bool) -> Graph:
    """VERTICES with about ten neighbours each."""
    adj = sp.random(VERTICES, VERTICES, 5 / VERTICES, "csr", random_state=np.random.default_rng(7127), dtype=np.float32)
    adj.data[:] = 1
    adj = ((adj + adj.T) > 0).astype(np.float32)
    return make_graph(adj, num_features=128, num_classes=40, sparse=sparse, seed=6011)


def typed(graph: Graph) -> Graph:
    """The same graph with a random relation of ten for every edge."""
    types = ArrayRows(np.random.default_rng(557).integers(0, 10, graph.num_edges))
    edges = dataclasses.replace(of_matrix(graph.adj), types=types)
    both, relations = build_adjacency(edges, graph.num_vertices, GraphOptions(duplicates="merge"))
    return dataclasses.replace(graph, adj=both.adj, adj_t=both.adj_t, num_relations=relations)


def watch(rank: Rank, body: Callable[[], object]) -> dict[str, int]:
    """The largest block and the number of blocks that all ranks ask for while all run `body`."""
    rank.comm.barrier()
    if rank.comm.rank == 0:
        WATCH.watch_reset(BOUND)
    rank.comm.barrier()
    body()
    rank.comm.barrier()
    found = {"largest": WATCH.watch_largest(), "blocks": WATCH.watch_count()}
    rank.comm.barrier()
    if rank.comm.rank == 0:
        WATCH.watch_reset(QUIET)
    return found


def epochs_of(rank: Rank, plant: bool) -> dict[str, Any]:
    """Warm up, then watch whole epochs; if one asks for too much, run another op by op to name the culprit."""
    trainer, plan = rank.trainer, rank.plan
    if plant:
        programs, program = trainer.runtime.programs, Program("train", (*plan.train.ops, Greedy()), plan.train.arena)
        trainer.runtime.programs = {**programs, "train": dataclasses.replace(programs["train"], program=program)}

    def train_and_score(epochs: range) -> None:
        for epoch in epochs:
            trainer.step(epoch)
            trainer.evaluate()
            trainer.keep_best()

    train_and_score(range(WARM_UP))
    found = watch(rank, lambda: train_and_score(range(WARM_UP, WARM_UP + EPOCHS)))
    return found | {"ops": {} if found["largest"] <= BOUND else by_op(rank)}


def by_op(rank: Rank) -> dict[str, int]:
    """Run an epoch op by op: the largest block of each op that asks for more than BOUND."""
    runtime = rank.trainer.runtime
    runtime.bound = runtime.programs["train"]
    program = runtime.bound.program
    steps: list[tuple[str, Callable[[], object]]] = [
        (op.label, functools.partial(op.run, runtime)) for op in program.ops
    ]
    if rank.comm.size > 1:
        steps.append(("all-reduce", lambda: rank.comm.all_reduce(runtime.weights.grad).wait()))
    rank.trainer._epoch.start(0, 0)
    steps.append(("optimizer", rank.trainer._epoch._work.end))
    found = {label: watch(rank, step)["largest"] for label, step in steps}
    return {label: largest for label, largest in found.items() if largest > BOUND}


def evaluation_of(rank: Rank, make: Callable[[], SplitScores | None], plant: bool) -> dict[str, int]:
    """Make an evaluation by blocks and run it twice: the bytes that it holds at most, and those of its regions."""
    first = rank.trainer._by_blocks
    assert first is not None
    first.run(0)  # what kernels keep is there
    WATCH.watch_hold()
    scores = make()
    assert scores is not None
    WATCH.watch_again()  # of set-up only what stays
    if plant:
        tile, evaluator = BlockEvaluator._tile, scores._evaluator
        evaluator._tile = lambda *a: (torch.zeros(1 << 20), tile(evaluator, *a))[1]  # type: ignore[method-assign]  # the fault
    for _ in range(2):
        scores.run(0)
    regions = rank.plan.regions
    return {"most": WATCH.watch_most(), "planned": regions["evaluation by blocks"] + regions["kernel schedules"]}


def evaluate(case: str, graph: Graph, plant: bool) -> dict[str, int]:
    """Watch the evaluation of a case, which is made again with what set-up has made the rank's of."""
    made, make = list[Any](), assembled._split_scores

    def noted(*arguments: Any) -> SplitScores | None:
        made.append(arguments)
        return make(*arguments)

    assembled._split_scores = noted
    found = on_ranks(config_of(case), graph, lambda rank: evaluation_of(rank, lambda: make(*made[0]), plant))
    assembled._split_scores = make
    return dict(found[0])


def main() -> None:
    plant = "--plant" in sys.argv
    found: dict[str, dict[str, Any]] = {}
    for case in (argument for argument in sys.argv[1:] if argument in EVALUATIONS):
        graph = graph_of(EVALUATIONS[case].get("features") == "sparse")
        graph = typed(graph) if EVALUATIONS[case].get("kind") == "rgcn" else graph
        found[case] = evaluate(case, fewer_seeds(graph), plant)
    for case in (argument for argument in sys.argv[1:] if argument in CASES):
        config = config_of(case)
        graph = graph_of(config.run.features == "sparse")
        graph = typed(graph) if config.model.kind == "rgcn" else graph
        graph = fewer_seeds(graph) if config.sample.batch else graph
        found[case] = on_ranks(config, graph, lambda rank: epochs_of(rank, plant))[0]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
