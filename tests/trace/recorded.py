"""Ranks that are watched while they train, and what they wrote."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mggcn.assemble import plan_graph
from mggcn.assemble_rank import Rank, make_rank
from mggcn.comm.base import Communicator
from mggcn.comm.single import SingleCommunicator
from mggcn.comm.threads import run_threads
from mggcn.config import Config, ModelConfig, RunConfig, TrainConfig
from mggcn.graph.csr import Graph
from mggcn.graph.generate import community
from mggcn.trace.trace_json import FILE
from tests.graphs import make_graph, pattern

SEED = 2718
MODELS: dict[str, dict[str, Any]] = {
    "gemm first": {"hidden": (24, 16), "dropout": 0.5},
    "aggregate first": {"hidden": (8, 40), "dropout": 0.5, "bias": False},
    "input dropout": {"hidden": (24,), "input_dropout": 0.3},
    "sparse input": {"hidden": (24,), "input_dropout": 0.3},
    "layer norm": {"hidden": (24, 16), "norm_layer": "layer"},
}


def config_of(ranks: int, model: str = "gemm first", **train: Any) -> Config:
    return Config(
        model=ModelConfig(**MODELS[model]),
        train=TrainConfig(**({"seed": SEED, "epochs": 5} | train)),
        run=RunConfig(
            ranks=ranks,
            threads=1,
            transport="threads" if ranks > 1 else "single",
            features="sparse" if model == "sparse input" else "auto",
        ),
    )


@functools.cache
def graph(sparse: bool = False) -> Graph:
    if sparse:
        adj = pattern("random", 120, 5)
        return make_graph(adj, num_features=90, num_classes=4, sparse=True, weighted=False, seed=SEED)
    return community(501, 2000, 40, 4, seed=SEED)


def recorded_rank(config: Config, graph: Graph, comm: Communicator, folder: Path) -> Rank:
    """A rank that is watched while it trains, as `mggcn train --timeline` makes it."""
    watched = dataclasses.replace(config, run=dataclasses.replace(config.run, timeline=True))
    plan, owners = plan_graph(watched, graph)
    return make_rank(watched, graph, plan, owners, comm, folder=folder)


def on_ranks(config: Config, body: Callable[[Communicator], Any]) -> list[Any]:
    return run_threads(config.run.ranks, body, 60) if config.run.ranks > 1 else [body(SingleCommunicator())]


def events_of(folder: Path, ph: str = "X") -> list[dict[str, Any]]:
    content = json.loads((folder / FILE).read_text())
    return [event for event in content["traceEvents"] if event["ph"] == ph]


def row_of(events: list[dict[str, Any]], rank: int, row: int) -> list[dict[str, Any]]:
    return sorted((e for e in events if (e["pid"], e["tid"]) == (rank, row)), key=lambda e: float(e["ts"]))
