"""Runs on a small store whose products have several variants each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mggcn.config import Config, ModelConfig, RunConfig, TrainConfig
from mggcn.graph.csr import Graph
from mggcn.graph.store import open_store
from mggcn.graph.store_write import write_store
from mggcn.runs import train as training
from tests.graphs import make_graph, pattern


def config_of(ranks: int, **run: Any) -> Config:
    transport: Any = "threads" if ranks > 1 else "single"
    return Config(
        model=ModelConfig(hidden=(33,), dropout=0.3),
        train=TrainConfig(epochs=3, lr=0.01, seed=5077),
        run=RunConfig(ranks=ranks, threads=1, transport=transport, products="gemm-first", **run),
    )


def store_of(folder: Path) -> Graph:
    adj = pattern("directed", 300, 9)
    graph = make_graph(adj, num_features=19, num_classes=4, sparse=False, weighted=True, seed=3)
    write_store(graph, folder / "store")
    return open_store(folder / "store")


def trained(graph: Graph, config: Config, out: Path) -> Path:
    planned = training.prepare_run(config, graph, out.parent / "store", out)
    training.run_training(planned, graph, quiet=False)
    return planned.folder
