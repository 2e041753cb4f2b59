"""Which candidate is chosen: the fastest exact one that fits, by figures that a reader can follow."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import pytest

from mggcn.aggregate.edge_op import SUM, EdgeOp
from mggcn.aggregate.steps import Await, Multiply, Send, Step
from mggcn.assemble.plan import plan_shape
from mggcn.blocks.block import WHOLE
from mggcn.config import Config, ModelConfig, RunConfig
from mggcn.cost.machine import MESSAGES, Link, Machine, find_machine
from mggcn.cost.work import KINDS, Sum, Work
from mggcn.planning.op_cost import epoch_cost
from mggcn.planning.op_work import program_items
from mggcn.planning.run import RunPlan
from mggcn.planning.select import Candidate, Choice, choice_dict, choice_lines, choose
from tests.shapes import shape_of

SHAPE = shape_of(40_000, 600_000, 50, 9)
GIB = 2**30
LINK = Link(
    transport="gloo",
    ranks=4,
    rates=dict.fromkeys(MESSAGES, 1e9),
    latency_s=dict.fromkeys(MESSAGES, 1e-4),
    pooled=False,
    busy=0.0,
)
MACHINE = dataclasses.replace(find_machine("xeon-cluster"), links=(LINK,), name="some machine")


def plan_of(ranks: int = 4, **model: Any) -> RunPlan:
    config = Config(model=ModelConfig(**{"hidden": (64, 64)} | model), run=RunConfig(ranks=ranks))
    return plan_shape(config, SHAPE)


@dataclasses.dataclass(frozen=True)
class Scripted:
    """An aggregation plan that does what it is told, otherwise as the one it stands in for."""

    inner: Any
    script: Sequence[Step]
    period: int = 1
    silent_phases: int = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def steps(self, cols: int, dtype: str, backward: bool, phase: int = 0, op: EdgeOp = SUM) -> tuple[Step, ...]:
        return tuple(self.script) if phase >= self.silent_phases else ()


def scripted(plan: RunPlan, script: Sequence[Step], **more: Any) -> RunPlan:
    """The plan with the same steps in every aggregation of every rank's epochs."""
    ranks = [
        dataclasses.replace(rank, training={WHOLE: Scripted(rank.aggregation, script, **more)})  # type: ignore[dict-item]
        for rank in plan.ranks
    ]
    return dataclasses.replace(plan, ranks=tuple(ranks))


def sending(nbytes: int) -> list[Step]:
    return [Send("all_to_all", nbytes, nbytes), Await(0), Multiply(10_000, 40_000, 150_000, 64)]


def candidate(strategy: str, plan: RunPlan | None, exact: bool = True, reason: str = "") -> Candidate:
    return Candidate(strategy=strategy, order="random", partition="rows", exact=exact, plan=plan, reason=reason)


def without_memory(plan: RunPlan, nbytes: int) -> RunPlan:
    """The plan with the arena of every rank set to so many bytes."""
    return dataclasses.replace(
        plan,
        ranks=tuple(dataclasses.replace(r, regions=dict(r.regions) | {"arena": nbytes}) for r in plan.ranks),
    )


def chosen(candidates: Sequence[Candidate], limit: int = GIB, machine: Machine = MACHINE) -> Choice:
    return choose(candidates, machine, limit)


def test_the_fastest_exact_one_that_fits_is_chosen() -> None:
    """Fails if bytes on a slow link do not decide, or something inexact, impossible or too large wins."""
    plan = plan_of()
    slow, fast, free = (scripted(plan, sending(n)) for n in (100_000_000, 20_000_000, 0))
    rows = [
        candidate("broadcast", slow),
        candidate("halo", fast),
        candidate("slice", None, reason="A does not fit"),
        candidate("delayed", free, exact=False),
        candidate("huge", without_memory(free, 64 * GIB)),
    ]
    choice = chosen(rows)
    assert choice.chosen is choice.rows[1]
    assert choice.chosen.candidate is rows[1]
    assert [row.verdict for row in choice.rows[:5]] == ["fits", "fits", "not possible", "not exact", "does not fit"]
    # Three aggregations of all-to-alls at 1 GB/s.
    count = len(plan.ranks[0].steps(plan.ranks[0].train))
    seconds = [row.seconds for row in choice.rows[:2]]
    assert seconds[0] is not None
    assert seconds[1] is not None
    assert seconds[0] - seconds[1] == pytest.approx(count * 0.08)
    assert "halo, order random is chosen" in choice.reason
    assert f"broadcast, order random takes {seconds[0] / seconds[1]:.2f} times as long" in choice.reason
    assert "delayed, order random would take" in choice.reason
    assert "is not exact" in choice.reason
    assert "huge, order random would take" in choice.reason
    assert "per rank" in choice.reason


def test_figures_are_those_of_the_plans() -> None:
    """Fails if bytes, memory or the prediction in the table are not what the plan says."""
    plan = plan_of()
    row = chosen([candidate("broadcast", plan)]).rows[0]
    assert row.bytes_sent == max(rank.bytes_sent(rank.train) for rank in plan.ranks)
    assert row.memory_bytes == plan.largest.total_bytes
    assert row.seconds == epoch_cost(plan, MACHINE).train.seconds
    assert row.parts is not None
    assert set(row.parts) == set(KINDS)
    assert sum(row.parts.values()) == pytest.approx(row.seconds)


def test_ties_and_nothing_to_choose() -> None:
    """Fails if equal predictions are decided at random, or no reason is given when nothing can be chosen."""
    plan = plan_of()
    lean = without_memory(plan, plan.ranks[0].regions["arena"] - 4096)
    same = chosen([candidate("a", plan), candidate("b", plan)])
    assert same.chosen is same.rows[0]
    smaller = chosen([candidate("a", plan), candidate("b", lean)])
    assert smaller.chosen is smaller.rows[1]
    nothing = chosen([candidate("a", plan), candidate("b", lean)], limit=1000)
    assert nothing.chosen is None
    assert "no exact strategy fits into 1000 B per rank; b, order random needs the least" in nothing.reason
    impossible = chosen([candidate("a", None, reason="no cut at hand")])
    assert impossible.chosen is None
    assert "no exact strategy is possible: a, order random: no cut at hand" in impossible.reason
    assert choice_dict(impossible)["chosen"] is None


def test_15d_is_a_row_of_analysis() -> None:
    """Fails if the 1.5D row can be chosen, is missing where links are known, or counts something else than MG-GCN does."""
    run = RunConfig(ranks=8, device="cuda")
    plan = plan_shape(Config(run=run), SHAPE)
    choice = choose([candidate("broadcast", plan)], find_machine("dgx-1"), 2 * GIB)
    base, row = choice.rows
    assert (row.candidate.strategy, row.verdict, row.seconds) == ("1.5D broadcast", "analysis", None)
    assert "2 copies of all rows" in row.note
    assert "communication takes 1.50 of 1D's" in row.note
    assert choice.chosen is base
    assert base.bytes_sent is not None
    assert row.bytes_sent is not None
    assert 5 / 7 <= row.bytes_sent / base.bytes_sent < 1
    assert base.memory_bytes is not None
    assert row.memory_bytes is not None
    assert base.memory_bytes < row.memory_bytes < 2 * base.memory_bytes
    assert "[topology]" in chosen([candidate("broadcast", plan_of())]).rows[-1].note
    assert len(chosen([candidate("halo", plan_of())]).rows) == 1
    assert len(chosen([candidate("broadcast", plan_of(ranks=1))]).rows) == 1


def test_text_and_json_say_the_same() -> None:
    """Fails if the table hides a candidate, a reason or the machine's origin, or the JSON differs from it."""
    plan = plan_of()
    choice = chosen([candidate("broadcast", plan), candidate("slice", None, reason="A needs 3 GiB")])
    lines = choice_lines(choice)
    assert "not measured" in lines[0]
    assert sum(line.lstrip().startswith("*") for line in lines) == 1
    assert any("slice" in line and "not possible; A needs 3 GiB" in line for line in lines)
    assert any(choice.reason in line for line in lines)
    content = json.loads(json.dumps(choice_dict(choice)))
    assert content["candidates"][content["chosen"]]["strategy"] == "broadcast"
    assert content["reason"] == choice.reason
    assert [c["verdict"] for c in content["candidates"]] == [row.verdict for row in choice.rows]


def test_epochs_that_differ_are_averaged() -> None:
    """Fails if a strategy that sends in one epoch of four is costed as if it sent in each, or in none."""
    plan = plan_of()
    each = epoch_cost(scripted(plan, sending(100_000_000)), MACHINE).train.seconds
    never = epoch_cost(scripted(plan, []), MACHINE).train.seconds
    seldom = epoch_cost(scripted(plan, sending(100_000_000), period=4, silent_phases=3), MACHINE).train.seconds
    assert seldom == pytest.approx((each + 3 * never) / 4)
    assert each > never + 0.1


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"input_dropout": 0.5, "dropout": 0.5},
        {"hidden": (16, 128)},
        {"hidden": (16, 128), "input_dropout": 0.3},
        {"kind": "mlp"},
        {"kind": "mlp", "input_dropout": 0.3},
        {"hidden": ()},
        {"bias": False, "norm": "mean"},
    ],
    ids=str,
)
@pytest.mark.parametrize("sparse", [False, True])
def test_every_op_has_work(model: dict[str, Any], sparse: bool) -> None:
    """Fails if an op is forgotten, products are not those of the layers, or messages differ from the plan's count."""
    shape = dataclasses.replace(SHAPE, feature_nnz=200_000, aggregated_nnz=900_000) if sparse else SHAPE
    config = Config(model=ModelConfig(**{"hidden": (64, 64)} | model), run=RunConfig(ranks=3))
    plan = plan_shape(config, shape)
    for rank in plan.ranks:
        for program in (rank.train, rank.evaluate):
            items = program_items(plan, rank, program)
            messages = sum(isinstance(item, Send | Sum) for item in items)
            assert messages == rank.messages(program)
            works = [item for item in items if isinstance(item, Work)]
            assert all(work.calls >= 0 and work.streamed + work.rows + work.flop > 0 for work in works)
            dense = sum(work.flop for work in works)
            layers = [c.d_in * c.d_out for c in rank.values.layers[1:]]
            if not rank.input.sparse:
                layers.append(rank.values.layers[0].d_in * rank.values.layers[0].d_out)
            inner = sum(c.d_in * c.d_out for c in rank.values.layers[1:])
            # Forward and weight gradients of all, input gradients of all but the first.
            expected = sum(layers) if program is rank.evaluate else 2 * sum(layers) + inner
            assert dense == 2 * rank.sizes.owned * expected
    cost = epoch_cost(plan, MACHINE)
    assert 0 < cost.evaluate.seconds < cost.train.seconds
