"""The capacity ladder: the first rung that fits is taken, said, recorded, and planned again."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from mggcn.assemble import ladder
from mggcn.assemble.ladder import in_memory, space_elsewhere, space_of
from mggcn.assemble.plan import plan_recorded, plan_shape
from mggcn.config import Config
from mggcn.config.files import with_named
from mggcn.cost.machine import find_machine
from mggcn.errors import PlanError
from mggcn.memory.device import ANY
from mggcn.memory.pages import DiskRates
from mggcn.memory.units import human
from mggcn.planning import disk_text
from mggcn.planning.advice import advice, fits, require_fit
from mggcn.planning.disk import DiskPlan
from mggcn.planning.disk_text import disk_dict, disk_lines, long_run_lines, rung_lines, stage_lines
from mggcn.planning.op_cost import disk_cost, epoch_cost
from mggcn.planning.opening import opening_lines
from mggcn.planning.record import to_dict
from mggcn.planning.run import RunPlan, Space
from mggcn.planning.text import verdict
from tests.shapes import PRODUCTS

ANYWHERE = Space("the run folder", ANY)


def config_of(**settings: Any) -> Config:
    return with_named(Config(), {"threads": 1, "hidden": (256, 256)} | settings)


def planned(limit: int | None, space: Space = ANYWHERE, **settings: Any) -> RunPlan:
    return plan_shape(config_of(**settings), PRODUCTS, limit=limit, space=space)


def on_disk(plan: RunPlan) -> DiskPlan:
    """The first rank's plan from disk."""
    disk = plan.ranks[0].disk
    assert disk is not None
    return disk


@pytest.fixture(scope="module")
def whole() -> RunPlan:
    """Everything in memory, without a limit."""
    return planned(None)


def test_what_fits_stays_in_memory(whole: RunPlan) -> None:
    """Fails if a run that fits is planned otherwise than with run.capacity memory, or has more to say."""
    need = whole.largest.total_bytes
    for plan in (planned(need), planned(need, capacity="memory"), planned(1 << 30, capacity="memory")):
        assert (plan.rung, plan.ladder, plan.largest.total_bytes) == ("memory", None, need)
        assert disk_lines(plan, MACHINE) == [] == rung_lines(plan, MACHINE)
        assert disk_dict(plan, MACHINE) == {}


MACHINE = find_machine("xeon-cluster")


def test_the_next_rung_is_taken_and_says_why(whole: RunPlan) -> None:
    """Fails if what does not fit is refused, the text lacks a figure, or a rung needs more than may be used."""
    need = whole.largest.total_bytes
    plan = planned(limit := need - 1)
    assert plan.config == config_of()
    assert (plan.rung, plan.chosen.run.capacity, plan.ladder is not None) == ("disk", "disk", True)
    assert plan.largest.total_bytes <= limit
    require_fit(plan, limit)
    (line,) = rung_lines(plan, MACHINE)
    disk = on_disk(plan).programs["train"]
    moved = disk.read + disk.written
    assert line.startswith(
        f"everything in memory needs {human(need)}, {human(limit)} may be used: rows between stages go"
    )
    assert f"to disk: {human(plan.disk_bytes)} in the run folder, {human(moved)} moved an epoch, " in line
    assert " s an epoch, bound by " in line
    assert line.endswith("in memory)")
    assert verdict(plan, limit) == (
        f"fits: {human(plan.largest.total_bytes)} of {human(limit)} per rank, with {human(plan.disk_bytes)} on disk"
    )
    text = "\n".join(disk_lines(plan, MACHINE, explain=True))
    for word in ("does not fit", "fits", "rows on disk", "aggregate-grad 2", "rows, ", "columns", "which is assumed"):
        assert word in text
    found = json.loads(json.dumps(disk_dict(plan, MACHINE)))
    assert [rung["rung"] for rung in found["rungs"]] == ["memory", "disk"]
    assert found["rungs"][1]["bytes_moved_per_epoch"] == moved


def test_what_a_machine_has_no_rates_for_is_said_without_seconds(whole: RunPlan) -> None:
    """Fails if a run's first lines lose the reason for a rung with the seconds."""
    plan = planned(whole.largest.total_bytes, precision="fp64")
    gemm = {"fp32": 1e11}
    machine = dataclasses.replace(MACHINE, device=dataclasses.replace(MACHINE.device, gemm=gemm))
    (line,) = rung_lines(plan, machine)
    assert line.startswith("everything in memory needs ")
    assert line.endswith(" moved an epoch")


def test_a_run_that_disks_make_long_says_so(whole: RunPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if auto turns a refusal into a run of many times the seconds, or of seconds that are assumed, in silence."""
    plan = planned(whole.largest.total_bytes - 1)
    fast, slow = DiskRates(1e12, 1e12, 1e12), DiskRates(1e6, 1e6, 1e6)
    measured = [dataclasses.replace(MACHINE, disk=rates) for rates in (fast, slow)]
    assert long_run_lines(plan, measured[0]) == []
    times = epoch_cost(plan, measured[1]).step_s / epoch_cost(whole, measured[1]).step_s
    advice = "more memory or fewer columns (model.hidden) make it shorter; --set run.capacity=memory refuses such a run"
    assert long_run_lines(plan, measured[1]) == [
        f"an epoch from disk takes some {times:,.0f} times as long as in memory would: {advice}"
    ]
    assert MACHINE.disk is None
    (line,) = long_run_lines(plan, MACHINE)
    assert (
        " times as long as in memory would, and the disk's rates are assumed: mggcn tune --scratch FOLDER "
        "measures them; more " in line
    )
    with monkeypatch.context() as patch:
        patch.setattr(disk_text, "SLOW", 1e9)
        assert long_run_lines(plan, MACHINE) == [
            "the disk's rates are assumed: mggcn tune --scratch FOLDER measures them; "
            "--set run.capacity=memory refuses such a run"
        ]
    there = dataclasses.replace(plan, config=config_of(scratch="/a b"))
    assert ": mggcn tune --scratch '/a b' measures them; " in long_run_lines(there, MACHINE)[0]
    for other in (
        whole,
        planned(whole.largest.total_bytes, capacity="disk"),
        plan_recorded(plan.config, to_dict(plan)),
    ):
        assert long_run_lines(other, MACHINE) == []
    assert long_run_lines(plan, MACHINE)[0] in opening_lines(plan, MACHINE, plan.limit)


def test_products_are_made_again_before_rows_go_to_disk() -> None:
    """Fails if a rung is left out that would have done, or what it sets is lost with the plan's record."""
    attention = {"kind": "gat", "hidden": (64, 64), "heads": 4}
    first, again = planned(None, **attention), planned(None, recompute="on", **attention)
    assert again.largest.total_bytes < first.largest.total_bytes
    plan = planned(limit := again.largest.total_bytes, **attention)
    assert (plan.rung, plan.again, plan.config.run.recompute) == ("recompute", True, "off")
    assert plan.largest.total_bytes == limit
    (line,) = rung_lines(plan, MACHINE)
    assert f"may be used: products are made again backwards: {human(limit)}, " in line
    found = plan_recorded(plan.config, json.loads(json.dumps(to_dict(plan))))
    assert (found.rung, found.largest.regions) == ("recompute", plan.largest.regions)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_plan_from_disk_is_recorded_and_planned_again(whole: RunPlan, ranks: int) -> None:
    """Fails if a resumed run has other windows, panels or bytes than it began with."""
    plan = planned(whole.largest.total_bytes // (2 * ranks), ranks=ranks)
    content = json.loads(json.dumps(to_dict(plan)))
    assert (content["capacity"], content["limit"]) == ("disk", plan.limit)
    found = plan_recorded(plan.config, content)
    assert found.ranks[0].disk == plan.ranks[0].disk
    assert [rank.regions for rank in found.ranks] == [rank.regions for rank in plan.ranks]
    assert found.config == plan.config
    assert to_dict(found) == to_dict(plan)
    (line,) = rung_lines(found, MACHINE)
    assert line.startswith(f"rows between stages go to disk: {human(plan.disk_bytes)}, ")


def test_a_folder_without_the_space_is_refused_with_a_remedy(whole: RunPlan) -> None:
    """Fails if a run begins whose rows do not fit on the disk, or the message does not say which disk would do."""
    limit = whole.largest.total_bytes - 1
    disk = planned(limit)
    small = Space("/small", disk.disk_bytes - 1)
    plan = planned(limit, small)
    assert (plan.rung, fits(plan, limit)) == ("memory", False)
    text = advice(plan, limit)
    assert text.startswith(
        f"--set run.scratch=FOLDER on a disk with {human(disk.disk_bytes)} for rows (/small has {human(small.free)}) would "
        f"fit into {human(disk.largest.total_bytes)} or "
    )
    with pytest.raises(PlanError, match=rf"rank 0 needs .* only {human(limit)} may be used; --set run.scratch=FOLDER"):
        require_fit(plan, limit)
    assert fits(planned(limit, Space("/large", disk.disk_bytes)), limit)
    asked = planned(limit, small, capacity="disk")
    assert (asked.rung, fits(asked, limit)) == ("disk", False)
    assert verdict(asked, limit).startswith(f"does not fit: rows on disk need {human(disk.disk_bytes)} in /small, ")
    with pytest.raises(
        PlanError, match=r"free space there, or name a folder on another disk: --set run.scratch=FOLDER"
    ):
        require_fit(asked, limit)


def test_what_not_even_a_disk_serves_is_refused(whole: RunPlan) -> None:
    """Fails if the advice hides what rows on disk would still need."""
    plan = planned(1 << 28)
    assert (plan.rung, plan.largest.total_bytes) == ("memory", whole.largest.total_bytes)
    assert plan.ladder is not None
    assert plan.ladder.last is not None
    least = plan.ladder.last.largest.total_bytes
    assert least > 1 << 28
    assert f"; with rows on disk {human(least)} are needed at least" in advice(plan, 1 << 28)


@pytest.mark.parametrize(
    "settings",
    [{"batch": 1024, "fanout": (5, 5, 5)}, {"inputs": "learned:16"}],
    ids=["batches", "learned"],
)
def test_other_runs_are_refused_as_ever(settings: dict[str, Any]) -> None:
    """Fails if a run that cannot have rows on disk is planned for one, or as something else than in memory."""
    shape = PRODUCTS
    config, limit = config_of(**settings), 1 << 28
    assert not config.climbs
    plan = plan_shape(config, shape, limit=limit, space=ANYWHERE, machine=find_machine("dgx-h100"))
    assert (plan.rung, plan.ladder) == ("memory", None)
    assert not fits(plan, limit)
    assert "disk" not in advice(plan, limit)


def test_memory_alone_is_told_of_the_disk(whole: RunPlan) -> None:
    """Fails if a run that is kept in memory by a setting is not told which setting would let it run."""
    limit = whole.largest.total_bytes - 1
    text = advice(planned(limit, capacity="memory"), limit)
    need = planned(limit, capacity="disk").largest.total_bytes
    assert f" or --set run.capacity=disk, which has rows on disk, would fit into {human(need)}" in text


def test_a_stage_takes_as_long_as_the_slower_of_both(whole: RunPlan) -> None:
    """Fails if computing and the disk are added up, or a part that nothing hides is forgotten."""
    plan = planned(whole.largest.total_bytes // 2)
    cost = disk_cost(plan, MACHINE, "train")
    programs = on_disk(plan).programs["train"]
    assert sum(stage.read for stage in cost.stages) == programs.read
    assert sum(stage.written for stage in cost.stages) == programs.written
    panels = {region.spec.name: region.spec.panels for region in on_disk(plan).pages.regions}
    for stage, planned_stage in zip(cost.stages, programs.stages, strict=True):
        # Rows of several panels meet in memory by copies, which take the cores from computing.
        meets = any(panels[one.page] > 1 for one in (*planned_stage.reads, *planned_stage.writes))
        assert (stage.copied_s > 0) == (meets and planned_stage.how != "columns")
        slow, fast = sorted([stage.compute_s(cost.disk), stage.disk_s(cost.disk)], reverse=True)
        assert slow <= stage.seconds(cost.disk) <= slow + fast
        if stage.parts == 1:
            assert stage.seconds(cost.disk) == slow + fast
    total = epoch_cost(plan, MACHINE).train.seconds
    assert max(cost.disk_s, cost.compute_s) <= total <= cost.disk_s + cost.compute_s
    # What is computed is what a run in memory computes, but for calls and passes.
    assert 0.8 < cost.compute_s / epoch_cost(whole, MACHINE).train.seconds < 1.6


def test_edges_are_read_where_memory_has_no_room_for_them(whole: RunPlan) -> None:
    """Fails if the seconds of a plan leave out the edges that each panel reads from disk again, or count those that the
    page cache keeps, or bytes of rows count edges.
    """
    plan = on_disk(planned(3 << 30, capacity="disk"))
    tight, roomy = (planned(limit, capacity="disk") for limit in (3 << 30, 1 << 40))
    tight = dataclasses.replace(tight, limit=tight.ranks[0].total_bytes + plan.edge_bytes - 1)
    cached = dataclasses.replace(tight, limit=tight.limit + 1)
    costs = [disk_cost(one, MACHINE, "train") for one in (tight, cached, dataclasses.replace(tight, limit=0), roomy)]
    assert [sum(stage.read for stage in cost.stages) for cost in costs] == [plan.programs["train"].read] * 4
    edges, *others = [sum(stage.edges for stage in cost.stages) for cost in costs]
    assert others == [0] * 3
    assert costs[0].compute_s == pytest.approx(costs[1].compute_s + edges / MACHINE.disk_rates.read)
    nnz = PRODUCTS.num_edges + PRODUCTS.num_vertices  # with self-loops
    panels = sum(len(stage.parts) for stage in plan.programs["train"].stages if stage.how == "columns")
    assert 0.8 * 4 * nnz * panels < edges <= 4 * nnz * panels  # of pruned rows not all


def test_every_stage_is_listed(whole: RunPlan) -> None:
    """Fails if a stage is not in the plan's text, or its bytes are others than the program's."""
    plan = planned(whole.largest.total_bytes // 2)
    disk = plan.ranks[0].disk
    assert disk is not None
    lines = stage_lines(plan.ranks[0])
    for program in disk.programs.values():
        for stage in program.stages:
            assert any(", ".join(op.label for op in stage.program.ops) in line for line in lines)
    assert sum("in memory from stage to stage" in line for line in lines) == len(disk.programs)


def test_the_folder_is_the_settings_or_the_run_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if free space is asked of another disk, or a wrong folder is a traceback."""
    monkeypatch.setattr(ladder, "in_memory", lambda _: False)
    assert space_of(config_of(), tmp_path / "a" / "b").folder == str(tmp_path / "a" / "b")
    assert space_of(config_of()).folder == "the run folder"
    assert space_of(config_of(scratch=str(tmp_path))).folder == str(tmp_path)
    assert space_of(config_of(scratch=str(tmp_path))).free > 0
    assert space_elsewhere(config_of()) == Space("the run folder", ANY)
    (tmp_path / "file").touch()
    for name, why in (("nowhere", "No such file"), ("file", "Not a directory")):
        with pytest.raises(
            PlanError, match=rf"run.scratch {tmp_path / name}: {why}.*; name a folder that exists, on a fast"
        ):
            space_of(config_of(scratch=str(tmp_path / name)))
    monkeypatch.setattr(ladder, "in_memory", lambda _: True)
    assert space_of(config_of(), tmp_path) == Space(f"{tmp_path}, whose files are in memory", 0)


def test_files_in_memory_are_told_from_a_disk_s() -> None:
    """Fails if rows would go to a file system that takes the memory that they save."""
    if Path("/dev/shm").is_dir():
        assert in_memory(Path("/dev/shm"))
    assert not in_memory(Path("/proc"))
