"""Runs that share what they hold are the runs that they are alone, and share it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from mggcn import assemble, assemble_rank
from mggcn.assemble import plan_graph, resolve
from mggcn.assemble_rank import make_rank
from mggcn.comm.base import Communicator
from mggcn.comm.single import SingleCommunicator
from mggcn.comm.threads import run_threads
from mggcn.config import Config, from_tables
from mggcn.graph.csr import Graph
from mggcn.planning import shape
from mggcn.planning.shared import Shared
from mggcn.train.log import RunLog
from tests.devices import CPU, WHERE, Where
from tests.graphs import make_graph, pattern

BASE = from_tables(
    {
        "model": {"hidden": [8], "dropout": 0.5},
        "train": {"epochs": 3, "seed": 7177, "metric": "accuracy"},
        "run": {"threads": 1, "transport": "single"},
    }
)
CHANGES: list[dict[str, Any]] = [
    {},
    {"train": {"lr": 0.5, "clip_norm": 0.1, "weight_decay": 0.1}},
    {"model": {"hidden": [20, 5]}},
    {"train": {"seed": 8011}},
    {"model": {"input_dropout": 0.5}},
    {"model": {"input_dropout": 0.3}},
    {"model": {"norm": "mean"}},
    {"model": {"norm": "mean", "self_loops": False}},
    {"model": {"kind": "mlp"}},
    {"model": {"kind": "sage"}},
    {"model": {"kind": "sage", "aggregator": "max"}},
    {"model": {"kind": "gat", "heads": 2, "attention_dropout": 0.3}},
    {"model": {"kind": "gat", "heads": 2, "hidden": [4, 6], "attention_dropout": 0.3}},
    {"model": {"kind": "gatv2", "heads": 2}},
    {"data": {"row_normalize": True}},
    {"run": {"precision": "fp64"}},
    {"run": {"precision": "bf16"}},
    {"run": {"order": "permute"}},
    {"run": {"order": "permute"}, "train": {"seed": 8011}},
    {"run": {"prune": "off"}},
    {"run": {"ranks": 2, "transport": "threads"}},
    {"run": {"ranks": 2, "transport": "threads"}, "model": {"hidden": []}},
    {"run": {"ranks": 2, "transport": "threads", "strategy": "halo"}},
]


def graph_of(sparse: bool = False) -> Graph:
    return make_graph(pattern("directed", 43, 6), num_features=40, num_classes=3, sparse=sparse, weighted=False, seed=8)


def trained(config: Config, graph: Graph, shared: Shared | None, where: Where = CPU) -> list[Any]:
    """Losses and weights, of the first rank."""
    config = where.config(config)
    config = resolve(config, graph)
    plan, partition = plan_graph(config, graph, shared=shared)

    def body(comm: Communicator) -> list[Any]:
        rank = make_rank(config, graph, plan, partition, comm, device_of=where.device_of, shared=shared)
        losses: list[Any] = []
        rank.trainer.fit(RunLog(None, True, 3), None, lambda row: losses.append((row["loss"], row["val"])))
        assert rank.comm.bytes_sent > 0 or config.run.ranks == 1
        return [losses, rank.trainer.runtime.weights.flat.clone()]

    return run_threads(2, body, 60)[0] if config.run.ranks > 1 else body(SingleCommunicator())


@pytest.mark.parametrize("sparse", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_shared_run_is_the_run_alone(sparse: bool) -> None:
    """Fails if a run takes what another setting has made, or what epochs of an earlier run have changed."""
    graph, shared = graph_of(sparse), Shared()
    alone = [trained(from_tables(change, BASE), graph, None) for change in CHANGES]
    # Forwards, and each once more behind what came last: every run finds its own and others' remains.
    order = [*range(len(CHANGES)), *range(len(CHANGES) - 1, -1, -1)]
    for k in order:
        losses, weights = trained(from_tables(CHANGES[k], BASE), graph, shared)
        assert losses == alone[k][0], CHANGES[k]
        assert torch.equal(weights, alone[k][1]), CHANGES[k]


@pytest.mark.parametrize("where", WHERE)
def test_a_device_serves_one_run_after_the_other(where: Where) -> None:
    """Fails if what a GPU recorded, counted or multiplied for a run reaches the next, or A X is multiplied twice."""
    graph, shared = graph_of(), Shared()
    for change in ({}, {"model": {"hidden": [20, 5]}}, {}):
        config = from_tables(change, BASE)
        (losses, weights), alone = trained(config, graph, shared, where), trained(config, graph, None, where)
        assert losses == alone[0]
        assert torch.equal(weights, alone[1])


def test_what_is_equal_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a run over widths, dropout and learning rates reads the graph or multiplies A X again."""
    calls: list[str] = []

    def counted(module: Any, name: str) -> None:
        original = getattr(module, name)

        def call(*arguments: Any, **named: Any) -> Any:
            calls.append(name)
            return original(*arguments, **named)

        monkeypatch.setattr(module, name, call)

    counted(assemble, "partition_graph")
    counted(shape, "stats_of")
    counted(assemble_rank, "load_inputs")
    counted(assemble_rank, "_build_aggregations")
    graph, shared = graph_of(), Shared()
    for hidden, dropout, lr in (([8], 0.5, 0.01), ([16], 0.0, 0.02), ([5], 0.2, 0.5)):
        trained(
            from_tables({"model": {"hidden": hidden, "dropout": dropout}, "train": {"lr": lr}}, BASE), graph, shared
        )
    assert sorted(calls) == ["_build_aggregations", "load_inputs", "partition_graph", "stats_of"]
    trained(dataclasses.replace(BASE, model=dataclasses.replace(BASE.model, norm="mean")), graph, shared)
    assert calls[4:] == ["load_inputs", "_build_aggregations"]
