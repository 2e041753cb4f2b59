"""Runs that share a partition and its statistics are planned as they are alone, and share them."""

from __future__ import annotations

from typing import Any

import pytest

from mggcn.assemble import plan as assemble
from mggcn.assemble.plan import plan_graph, resolve
from mggcn.config import from_tables
from mggcn.graph.csr import Graph
from mggcn.planning import shape
from mggcn.planning.record import to_dict
from mggcn.planning.shared import Shared
from tests.graphs import make_graph, pattern

BASE = from_tables({"model": {"hidden": [8]}, "train": {"seed": 7177}, "run": {"threads": 1, "transport": "single"}})
CHANGES: list[dict[str, Any]] = [
    {},
    {"model": {"hidden": [20, 5]}},
    {"model": {"hidden": []}},
    {"train": {"seed": 8011}},
    {"model": {"self_loops": False, "norm": "mean"}},
    {"model": {"kind": "mlp"}},
    {"model": {"kind": "sage"}},
    {"run": {"order": "permute"}},
    {"run": {"order": "permute"}, "train": {"seed": 8011}},
    {"run": {"prune": "off"}},
    {"run": {"ranks": 2, "transport": "threads"}},
    {"run": {"ranks": 2, "transport": "threads"}, "train": {"seed": 8011}},
    {"run": {"ranks": 2, "transport": "threads"}, "model": {"hidden": []}},
    {"run": {"ranks": 2, "transport": "threads", "strategy": "halo"}},
    {"run": {"ranks": 2, "transport": "threads", "strategy": "delayed", "delay": 0}},
]


def graph_of() -> Graph:
    return make_graph(pattern("directed", 43, 6), num_features=40, num_classes=3, seed=8)


def planned(change: dict[str, Any], graph: Graph, shared: Shared | None) -> tuple[Any, str]:
    plan, partition = plan_graph(resolve(from_tables(change, BASE), graph), graph, shared=shared)
    return to_dict(plan), partition.digest()


def test_a_shared_run_is_planned_as_the_run_alone() -> None:
    """Fails if a run takes the vertices or the statistics that another setting has made."""
    graph, shared = graph_of(), Shared()
    alone = [planned(change, graph, None) for change in CHANGES]
    assert len({repr(found) for found in alone}) > len(CHANGES) // 2
    # Forwards, and each once more behind what came last.
    for k in [*range(len(CHANGES)), *range(len(CHANGES) - 1, -1, -1)]:
        assert planned(CHANGES[k], graph, shared) == alone[k], CHANGES[k]


def test_what_is_equal_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a run over widths, dropout and learning rates orders or counts the graph again."""
    calls: list[str] = []

    def counted(module: Any, name: str) -> None:
        original = getattr(module, name)

        def call(*arguments: Any, **named: Any) -> Any:
            calls.append(name)
            return original(*arguments, **named)

        monkeypatch.setattr(module, name, call)

    counted(assemble, "partition_graph")
    counted(shape, "stats_of")
    graph, shared = graph_of(), Shared()
    for hidden, dropout, lr in (([8], 0.5, 0.01), ([16], 0.0, 0.02), ([5], 0.2, 0.5)):
        planned({"model": {"hidden": hidden, "dropout": dropout}, "train": {"lr": lr}}, graph, shared)
    assert sorted(calls) == ["partition_graph", "stats_of"]
    planned({"model": {"self_loops": False, "norm": "mean"}}, graph, shared)
    assert calls[2:] == ["stats_of"]
