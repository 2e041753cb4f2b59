"""The capacity ladder of GPUs: rows on the host where a GPU's memory does not hold them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mggcn.assemble.ladder import HOST, space_elsewhere, space_of
from mggcn.assemble.plan import plan_recorded, plan_shape
from mggcn.config import Config
from mggcn.config.files import with_named
from mggcn.cost.machine import find_machine
from mggcn.errors import ConfigError, PlanError
from mggcn.memory.device import ANY
from mggcn.memory.units import human
from mggcn.planning.advice import advice, fits, require_fit
from mggcn.planning.disk_text import disk_dict, disk_lines, rung_lines
from mggcn.planning.op_cost import epoch_cost, host_cost
from mggcn.planning.record import to_dict
from mggcn.planning.run import RunPlan, Space
from mggcn.planning.text import verdict
from tests.cli.runs import run_main
from tests.shapes import PRODUCTS

A100 = find_machine("dgx-a100")


def config_of(**settings: Any) -> Config:
    """Settings with products made again, so that the host is the next rung."""
    return with_named(Config(), {"threads": 1, "device": "cuda", "hidden": (256,) * 4, "recompute": "on"} | settings)


def planned(limit: int | None, free: int = ANY, **settings: Any) -> RunPlan:
    return plan_shape(config_of(**settings), PRODUCTS, limit=limit, space=Space(HOST, free), machine=A100)


@pytest.fixture(scope="module")
def whole() -> RunPlan:
    """Everything in the GPU's memory."""
    return planned(None, capacity="memory")


def test_the_host_is_taken_and_says_why(whole: RunPlan) -> None:
    """Fails if what does not fit is refused, more goes to the host than must, or the text lacks a figure."""
    need = whole.largest.total_bytes
    assert planned(need).rung == "memory"
    plan = planned(limit := need - 1)
    rank = plan.largest
    assert (plan.rung, plan.chosen.run.capacity, plan.config) == ("host", "host", config_of())
    assert rank.total_bytes <= limit
    require_fit(plan, limit)
    assert plan.ranks[0].values.hosted == 1
    assert 0 < whole.largest.arena_bytes - rank.arena_bytes <= rank.host_bytes
    (line,) = rung_lines(plan, A100)
    assert line.startswith(f"everything in memory needs {human(need)}, ")
    assert f"may be used: {human(rank.host_bytes)} on the host from the forward to the backward pass, " in line
    assert f"{human(2 * rank.host_bytes)} moved an epoch, " in line
    assert " of them waiting for copies" in line
    assert verdict(plan, limit).startswith(
        f"fits: {human(rank.total_bytes)} of {human(limit)} per rank, with {human(rank.host_bytes)} on the host"
    )
    text = "\n".join(disk_lines(plan, A100, explain=True))
    for word in ("on the host", "does not fit", "25.0 GB/s", "of which computing waits", "slots of rank 0, pinned"):
        assert word in text
    found = json.loads(json.dumps(disk_dict(plan, A100)))
    assert [rung["rung"] for rung in found["rungs"]] == ["memory", "host"]
    assert found["rungs"][1]["bytes_moved_per_epoch"] == 2 * rank.host_bytes == 2 * found["host"]["bytes"]


def test_products_are_made_again_first() -> None:
    """Fails if rows go to the host where products that are made again do, which cost less."""
    limit = planned(None, capacity="memory", recompute="off").largest.total_bytes - 1
    assert planned(limit, recompute="off").rung == "recompute"


def test_less_memory_has_more_on_the_host(whole: RunPlan) -> None:
    """Fails if a smaller limit does not take more steps, or an epoch is not priced as computing and waiting for copies."""
    computing = epoch_cost(planned(None, capacity="memory", recompute="off"), A100).train.seconds
    limit, before, waited = whole.largest.total_bytes - 1, 0, 0.0
    for _ in range(2):
        plan = planned(limit, recompute="off")
        assert fits(plan, limit)
        assert plan.rung == "host"
        assert plan.ranks[0].values.hosted > before
        cost, seconds = host_cost(plan, A100), epoch_cost(plan, A100).train.seconds
        assert cost.copying_s == pytest.approx(2 * plan.largest.host_bytes / 25e9)
        assert waited < cost.waiting_s <= cost.copying_s
        assert seconds == pytest.approx(computing + cost.waiting_s, rel=0.01)
        limit, before, waited = plan.largest.total_bytes - 1, plan.ranks[0].values.hosted, cost.waiting_s
    assert not fits(planned(limit, recompute="off"), limit)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_plan_is_recorded_and_planned_again(whole: RunPlan, ranks: int) -> None:
    """Fails if a resumed run has other rows on the host than it began with, or ranks have others than each other."""
    limit = planned(None, capacity="memory", ranks=ranks).largest.total_bytes - 1
    plan = planned(limit, ranks=ranks)
    content = json.loads(json.dumps(to_dict(plan)))
    assert (content["capacity"], content["limit"], content["hosted_steps"]) == ("host", limit, 1)
    found = plan_recorded(plan.config, content)
    assert to_dict(found) == to_dict(plan)
    assert [rank.hosted for rank in found.ranks] == [rank.hosted for rank in plan.ranks]
    assert len({len(rank.hosted) for rank in plan.ranks}) == 1
    assert plan.ladder is not None
    assert plan.ladder.last_bytes == sum(rank.host_bytes for rank in plan.ranks)


def test_a_host_without_the_memory_is_refused(whole: RunPlan) -> None:
    """Fails if a run begins whose rows the host cannot hold, or the message does not say what it needs."""
    limit = whole.largest.total_bytes - 1
    bytes_there = planned(limit).largest.host_bytes
    plan = planned(limit, bytes_there - 1)
    assert (plan.rung, fits(plan, limit)) == ("memory", False)
    assert f"a host with {human(bytes_there)} for rows ({HOST} has " in advice(plan, limit)
    assert fits(planned(limit, bytes_there), limit)
    asked = planned(limit, 1, capacity="host")
    assert verdict(asked, limit).startswith("does not fit: rows on the host need ")
    with pytest.raises(PlanError, match=r"of its memory, pinned, and 1 B are free; free memory there"):
        require_fit(asked, limit)


def test_what_not_even_the_host_serves_is_refused(whole: RunPlan) -> None:
    """Fails if the advice hides what would still be needed."""
    limit = 1 << 30
    plan = planned(limit)
    assert plan.rung == "memory"
    assert "; with rows on the host " in advice(plan, limit)


def test_memory_alone_is_told_of_the_host(whole: RunPlan) -> None:
    """Fails if a run that a setting keeps in the GPU's memory is not told which would let it run."""
    limit = whole.largest.total_bytes - 1
    assert " --set run.capacity=host, which has rows on the host, would fit into " in advice(
        planned(limit, capacity="memory"), limit
    )


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"device": "cpu"}, "is for GPUs; on CPUs set run.capacity=disk"),
        ({"batch": 1024, "fanout": (5,) * 5}, "batches hold few rows; set run.capacity=memory"),
        ({"kind": "sgc", "hidden": ()}, "reads no rows .*; set run.capacity=memory"),
    ],
    ids=["cpu", "batches", "sgc"],
)
def test_what_cannot_is_refused_with_advice(settings: dict[str, Any], why: str) -> None:
    """Fails if a run that cannot have rows on the host is planned for it, or is not told what to set."""
    with pytest.raises(ConfigError, match=rf"run\.capacity host.*{why}"):
        planned(1 << 40, capacity="host", **settings)


def test_the_space_is_the_host_s() -> None:
    """Fails if a run on a GPU asks for a folder's space."""
    assert space_of(config_of()).folder == HOST
    assert space_of(config_of()).free > 0
    assert space_elsewhere(config_of()) == Space(HOST, ANY)


def test_the_command_plans_a_described_machine(capsys: pytest.CaptureFixture[str], whole: RunPlan) -> None:
    """Fails if mggcn plan does not climb for a machine that is not at hand."""
    shape = ["--vertices", PRODUCTS.num_vertices, "--edges", PRODUCTS.num_edges, "--symmetric", "--features", 100]
    limit = whole.largest.total_bytes - (1 << 30)
    given = [*shape, "--classes", 47, "--device", "cuda", "--machine", "dgx-a100", "--memory-limit", limit]
    assert run_main("plan", *given, "--set", "model.hidden=256,256,256,256") == 0
    out = capsys.readouterr().out
    assert " on the host" in out
    assert "rungs of run.capacity" in out
