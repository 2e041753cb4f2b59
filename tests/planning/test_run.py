"""The plan of a run: what fits, what is refused with advice that holds, and what all ranks must share."""

from __future__ import annotations

import dataclasses
import itertools
import re
import sys

import pytest

from mggcn.assemble.plan import STRATEGIES, plan_shape
from mggcn.config import Config, ModelConfig, RunConfig
from mggcn.cost.machine import find_machine
from mggcn.errors import GraphError, PlanError
from mggcn.memory.units import GIB
from mggcn.planning.advice import require_fit, smallest_ranks
from mggcn.planning.op_cost import epoch_cost
from mggcn.planning.record import plan_from_dict, to_dict
from mggcn.planning.run import RunPlan
from mggcn.planning.shape import GraphShape
from mggcn.planning.text import render
from tests.shapes import PAPERS, PRODUCTS, PROTEINS, shape_of


def plan_of(shape: GraphShape, hidden: tuple[int, ...], ranks: int, device: str = "cuda", **model: object) -> RunPlan:
    run = RunConfig(ranks=ranks, device=device)  # type: ignore[arg-type]
    return plan_shape(Config(model=ModelConfig(hidden=hidden, **model), run=run), shape)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shape", "hidden", "ranks", "limit"),
    [
        (PAPERS, (208, 208), 8, 80 * GIB),
        (PROTEINS, (512,), 4, 32 * 10**9 - 1),
        (PROTEINS, (256, 256), 1, 80 * GIB),
    ],
    ids=lambda x: getattr(x, "name", None),
)
@pytest.mark.parametrize("symmetric", [True, False])
def test_graphs_that_the_papers_fit_do_fit(
    shape: GraphShape, hidden: tuple[int, ...], ranks: int, limit: int, symmetric: bool
) -> None:
    """Fails if a plan needs more memory than MG-GCN's machines have for the graphs that it trains on them."""
    plan = plan_of(dataclasses.replace(shape, symmetric=symmetric), hidden, ranks)
    require_fit(plan, limit)
    for rank in plan.ranks:
        assert rank.total_bytes <= limit
        assert rank.arena_bytes <= rank.paper_bytes


@pytest.mark.covering(0, rest="slow")
@pytest.mark.parametrize(
    ("hidden", "ranks"), [((208, 208), 1), ((208, 208), 3), ((512, 512, 512), 2), ((), 1), ((8,), 4)]
)
def test_advice_holds(hidden: tuple[int, ...], ranks: int) -> None:
    """Fails if a plan that does not fit is accepted, or what the refusal advises does not fit either."""
    plan = plan_of(PRODUCTS, hidden, ranks, "cpu")
    need = plan.largest.total_bytes
    require_fit(plan, need)
    for limit in (need - 1, need * 9 // 10, need * 2 // 3):
        with pytest.raises(PlanError, match=r"rank \d+ needs .* of 2,449,029 rows") as refusal:
            require_fit(plan, limit)
        text = str(refusal.value)
        if more := re.search(r"(\d+) ranks with", text):
            require_fit(plan_of(PRODUCTS, hidden, int(more[1]), "cpu"), limit)
        if narrower := re.search(r"model\.hidden=([\d,]+)", text):
            require_fit(plan_of(PRODUCTS, tuple(int(w) for w in narrower[1].split(",")), ranks, "cpu"), limit)
        assert more
    with pytest.raises(PlanError, match="no number of ranks up to 1024 would fit"):
        require_fit(plan, 1 << 20)


def test_smallest_number_of_ranks() -> None:
    """Fails if fewer ranks than planned fit but are not found."""
    plan = plan_of(PRODUCTS, (256, 256), 8, "cpu")
    need = plan.largest.total_bytes
    assert smallest_ranks(plan, need) in (7, 8)
    assert smallest_ranks(plan, 10 * need) == 1


def test_all_ranks_run_the_same_program() -> None:
    """Fails if ranks whose parts differ by one row cut A_hat X into different panels: their messages would not match."""
    for features, hidden, n, ranks in itertools.product(
        (17, 40, 200), ((), (8,), (16, 16), (64,)), (4, 37, 1001, 50003), (2, 5)
    ):
        shape = shape_of(n, min(8 * n, n * n), features, 5)
        plan = plan_of(shape, hidden, ranks, "cpu")
        for program in ("setup", "train", "evaluate"):
            ops = {
                tuple((op.label, getattr(op, "width", 0)) for op in getattr(rank, program).ops) for rank in plan.ranks
            }
            assert len(ops) == 1, (features, hidden, n, ranks)


def calls_of(strategy: str, ranks: int) -> int:
    """Calls of Python functions that planning and costing a run make, on a machine whose messages are slow."""
    run = RunConfig(ranks=ranks, strategy=strategy)  # type: ignore[arg-type]
    shape = dataclasses.replace(PRODUCTS, num_vertices=96 * 25_000, num_training=200_000)
    found = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal found
        found += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        plan = plan_shape(Config(run=run), shape, replication=3.0)
        epoch_cost(plan, find_machine("xeon-cluster"))
        assert "sent per epoch" in render(plan)
    finally:
        sys.setprofile(before)
    return found


@pytest.mark.covering(0)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_work_of_a_plan_grows_as_its_ranks(strategy: str) -> None:
    """Fails if each rank is planned as if there were no other, or lists P stages: 200 ranks would take a minute."""
    few, many = calls_of(strategy, 24), calls_of(strategy, 96)
    # Four times as many ranks; of P tiles on each, no more is done than to count them.
    assert few > 24 * 24
    assert many < 5 * few


def test_ranks_of_equal_sizes_share_their_programs() -> None:
    """Fails if programs are lowered and placed for every rank again, or ranks of other sizes get them too."""
    plan = plan_of(
        dataclasses.replace(PRODUCTS, num_vertices=1005, num_edges=9000), (16,), 10, "cpu", input_dropout=0.5
    )
    assert {rank.sizes.owned for rank in plan.ranks} == {100, 101}
    assert len({id(rank.train) for rank in plan.ranks}) == 2
    for rank in plan.ranks:
        assert rank.train.arena["linear1"].spec.rows == rank.sizes.owned


def test_plan_survives_json() -> None:
    """Fails if the run folder's plan.json does not give the same plan again."""
    import json

    plan = plan_of(PRODUCTS, (64,), 3, "cpu")
    again = plan_from_dict(plan.config, json.loads(json.dumps(to_dict(plan))), plan.strategy)
    assert to_dict(again) == to_dict(plan)


def test_bare_shapes_without_features_or_classes_are_refused() -> None:
    """Fails if a plan without features or classes divides by zero or pretends to train."""
    for features, classes in ((0, 2), (2, 0)):
        with pytest.raises(GraphError, match="training needs at least 1"):
            plan_of(
                shape_of(10, 20, features, classes),
                (4,),
                1,
            )
    with pytest.raises(GraphError, match="use more ranks"):
        plan_of(
            shape_of(10**8, 3 * 10**9, 4, 2),
            (4,),
            1,
        )
