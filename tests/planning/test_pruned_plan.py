"""What a plan says of pruned epochs: which layers, why, what they save; and that a recorded plan says the same."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest

from mggcn.aggregate.broadcast import BroadcastStrategy
from mggcn.aggregate.delayed import DelayedStrategy
from mggcn.assemble.plan import plan_graph, plan_shape, resolve
from mggcn.blocks.block import WHOLE
from mggcn.config import Config, ModelConfig, RunConfig
from mggcn.cost.machine import find_machine
from mggcn.errors import GraphError, PlanError
from mggcn.partition.rows.partition import RowStats
from mggcn.partition.rows.required import LEAST_SAVED
from mggcn.planning.advice import require_fit
from mggcn.planning.cost_text import cost_dict, cost_lines
from mggcn.planning.op_cost import epoch_cost
from mggcn.planning.pruning import choose_rows
from mggcn.planning.record import plan_from_dict, to_dict
from mggcn.planning.text import render
from tests.planning.test_pruning import config_of, graph_of, off
from tests.shapes import shape_of

AGGREGATES = ((2, 2), (3, 1), (4, 0))
"""Those of four layers whose first reads A X: each with how many lie above it."""


def rows_of(shares: list[float], **run: Any) -> list[tuple[int, int | None]]:
    """Layer and level for sets with these shares of the nonzeros."""
    stats = RowStats.expected(1000, 9000, 2, self_loops=True, shares=[(share, share) for share in shares])
    return [(r.layer, r.block.hops) for r in choose_rows(RunConfig(**run), AGGREGATES, stats, BroadcastStrategy())]


def test_the_choice_by_hand() -> None:
    """Fails if a layer is pruned that saves too little, is not though a quarter is saved, or takes another's rows."""
    assert rows_of([0.1, 0.3, 0.6]) == [(2, 2), (3, 1), (4, 0)]
    assert rows_of([0.1, 0.9]) == [(2, None), (3, None), (4, 0)]
    # No vertex beyond the second set: it serves all layers below.
    assert rows_of([0.1, 0.3]) == [(2, 1), (3, 1), (4, 0)]
    assert rows_of([1 - LEAST_SAVED]) == [(2, 0), (3, 0), (4, 0)]
    assert rows_of([1 - LEAST_SAVED + 0.01]) == [(2, None), (3, None), (4, None)]
    assert rows_of([0.1], prune="off") == [(2, None), (3, None), (4, None)]
    assert rows_of([]) == [(2, None), (3, None), (4, None)]
    stats = RowStats.expected(1000, 9000, 2, self_loops=True, shares=[(0.1, 0.1), (0.9, 0.9)])
    found = choose_rows(RunConfig(), AGGREGATES, stats, BroadcastStrategy())
    assert [(layer.rows, layer.reason.split()[0]) for layer in found] == [(None, "it"), (900, "less"), (100, "the")]
    cut = choose_rows(RunConfig(), AGGREGATES, RowStats.expected(9, 9, 1, self_loops=True), DelayedStrategy())
    assert {layer.block for layer in cut} == {WHOLE}
    assert "cuts vertices" in cut[0].reason


SHAPE = shape_of(100_000, 400_000, 64, 16, num_training=2_000)


def test_a_bare_shape_is_estimated() -> None:
    """Fails if the number of training vertices does not matter, or what is saved is not in bytes, seconds and text."""
    config = Config(model=ModelConfig(hidden=(64, 64)), run=RunConfig(ranks=4, strategy="halo"))
    plan, machine = plan_shape(config, SHAPE), find_machine("assumed-cpu")
    whole = plan_shape(config, dataclasses.replace(SHAPE, num_training=None))
    assert [(layer.layer, layer.block.hops) for layer in plan.ranks[0].rows] == [(2, 1), (3, 0)]
    assert not whole.ranks[0].pruned
    for one, other in zip(plan.ranks, whole.ranks, strict=True):
        assert one.bytes_sent(one.train) < 0.5 * other.bytes_sent(other.train)
        assert one.num_spmm == other.num_spmm
        assert one.evaluate_spmm == other.evaluate_spmm
    assert epoch_cost(plan, machine).train.seconds < 0.9 * epoch_cost(whole, machine).train.seconds
    assert epoch_cost(plan, machine).evaluate.seconds == epoch_cost(whole, machine).evaluate.seconds
    text = render(plan)
    assert "expected of random training vertices" in text
    assert re.search(r"layer 3 +2,000 \(2.0%\) +10,\d{3} \(2.0%\) +these rows alone", text)
    assert "it is not known which vertices train" in render(whole)
    seconds = cost_dict(plan, machine)["training_all_rows"]["seconds"]
    assert seconds == pytest.approx(epoch_cost(whole, machine).train.seconds)
    assert any(line.strip().startswith("training, all rows") for line in cost_lines(plan, machine))
    assert "training_all_rows" not in cost_dict(whole, machine)
    with pytest.raises(GraphError, match="100,000 of the vertices can train, got 100,001"):
        plan_shape(config, dataclasses.replace(SHAPE, num_training=100_001))


def test_what_does_not_fit_may_fit_without() -> None:
    """Fails if a run is refused for its second copy of the graph, and the refusal does not say how to do without."""
    config = Config(model=ModelConfig(hidden=(8, 8)), run=RunConfig())
    shape = dataclasses.replace(SHAPE, num_edges=8_000_000, num_training=60_000)
    plan = plan_shape(config, shape)
    need = plan_shape(off(config), shape).largest.total_bytes
    assert need < plan.largest.total_bytes
    with pytest.raises(PlanError, match=r"--set debug\.prune=off.* would fit"):
        require_fit(plan, need)
    with pytest.raises(PlanError) as refusal:
        require_fit(plan, need - 1)
    assert "debug.prune" not in str(refusal.value)


def test_a_recorded_plan_is_planned_again() -> None:
    """Fails if plan.json loses what a training epoch computes: its ranks would send other messages than each other."""
    config, graph = config_of("halo", 3), graph_of()
    config = resolve(config, graph)
    plan, _ = plan_graph(config, graph)
    content = json.loads(json.dumps(to_dict(plan)))
    assert [row["level"] for row in content["training_rows"]] == [1, 0]
    again = plan_from_dict(config, content, plan.strategy)
    for one, other in zip(plan.ranks, again.ranks, strict=True):
        assert one.rows == other.rows
        assert one.regions == other.regions
        assert one.pruned == other.pruned
        assert one.bytes_sent(one.train) == other.bytes_sent(other.train)
    # Of an older plan, which knows nothing of rows, everything is computed.
    del content["partition"]["wanted"]
    assert not plan_from_dict(config, content, plan.strategy).ranks[0].pruned


def test_a_graph_without_a_split_is_planned() -> None:
    """Fails if a plan needs what only training needs: the vertices that train."""
    graph = dataclasses.replace(graph_of(), splits={})
    plan, _ = plan_graph(resolve(config_of(), graph), graph)
    assert {layer.reason for layer in plan.ranks[0].rows} == {"it is not known which vertices train"}
