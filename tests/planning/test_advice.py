"""Advice names the right reason first, and nothing that has not been planned to fit."""

from __future__ import annotations

import re
import time

import pytest

from mggcn.assemble import plan as assemble
from mggcn.assemble.plan import STRATEGIES, check_ranks, plan_shape, room_of
from mggcn.config import Config
from mggcn.config.files import with_named
from mggcn.cost.machine import find_machine
from mggcn.errors import PlanError
from mggcn.memory.units import GIB, MIB
from mggcn.planning.advice import Room, advice
from mggcn.planning.text import render, verdict
from tests.cli.runs import run_main
from tests.shapes import PRODUCTS, shape_of

PAPERS = shape_of(111_059_956, 3_231_371_744, 128, 172, name="papers")
SMALL = shape_of(962, 20_000, 64, 4)


def config_of(**settings: object) -> Config:
    return with_named(Config(), {"threads": 1} | settings)


def test_a_machine_that_is_full_gets_other_advice() -> None:
    """Fails if ranks are proposed that the machine lacks, or bf16 is not, though it fits."""
    machine = find_machine("dgx-h100")
    config = config_of(ranks=8, device="cuda", hidden=(256, 256), transport="nccl")
    plan, limit = plan_shape(config, PAPERS, machine=machine), 48 * GIB
    assert plan.largest.total_bytes > limit
    room = Room(lambda ranks: limit if ranks <= 8 else 0, room_of(config, machine).strategies)
    text = advice(plan, limit, room)
    assert not re.search(r"\d+ ranks", text)
    assert text.startswith("--precision bf16 would fit into ")
    fitting = plan_shape(with_named(config, {"precision": "bf16"}), PAPERS, machine=machine)
    assert fitting.largest.total_bytes <= limit
    assert re.search(r"\d+ ranks with as much memory each would fit", advice(plan, limit))
    assert room_of(config, machine).per_rank(9) == 0
    assert room_of(config, machine).per_rank(8) == machine.memory_per_rank(8)


@pytest.mark.parametrize("limit", [0.97, 0.9, 0.8, 0.6])
def test_every_hint_is_a_plan_that_fits(limit: float) -> None:
    """Fails if a precision or a strategy is named that does not fit, or needs other bytes than said."""
    config = config_of(ranks=4, hidden=(512, 512), memory_limit=1, order="random")
    shape = PRODUCTS
    plan = plan_shape(config, shape)
    allowed = int(plan.largest.total_bytes * limit)
    text = advice(plan, allowed, Room(lambda _: allowed, STRATEGIES | {}))
    for flag, value in re.findall(r"--(precision|strategy) (\w+)", text):
        assert plan_shape(with_named(config, {flag: value}), shape).largest.total_bytes <= allowed
    assert "would fit" in text


def test_narrower_layers_keep_the_heads_that_lie_in_them() -> None:
    """Fails if a width that is tried, and that nobody gave, is refused in place of the run."""
    model = {"kind": "gat", "heads": 4, "hidden": (64, 48)}
    plan = plan_shape(config_of(**model), PRODUCTS)
    text = advice(plan, int(0.9 * plan.largest.total_bytes))
    widths = re.search(r"--set model.hidden=(\d+),(\d+) would fit", text)
    assert widths is not None
    assert all(int(width) % 4 == 0 for width in widths.groups())
    smaller = plan_shape(config_of(**model | {"hidden": tuple(map(int, widths.groups()))}), PRODUCTS)
    assert smaller.largest.total_bytes <= 0.9 * plan.largest.total_bytes


def test_fewer_ranks_where_they_share_the_memory() -> None:
    """Fails if a machine that is divided too finely is said to need more ranks, or none at all."""
    plan = plan_shape(config_of(ranks=100, memory_limit=1), SMALL)
    limit = 8 * GIB // 100
    text = advice(plan, limit, Room(lambda ranks: 8 * GIB // ranks if ranks <= 100 else 0))
    assert text.startswith("25 ranks with 327.68 MiB each would fit")
    assert plan_shape(config_of(ranks=25, memory_limit=1), SMALL).largest.total_bytes <= 8 * GIB // 25


def test_absurd_numbers_of_ranks_are_refused_unplanned(
    monkeypatch: pytest.MonkeyPatch, data_root: object, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if more ranks than vertices, or than processes fit, are planned before they are refused."""
    with pytest.raises(PlanError, match="963 ranks cannot share the 962 vertices of small"):
        check_ranks(config_of(ranks=963), 962, "small", Room(lambda _: GIB))
    check_ranks(config_of(ranks=962), 962, "small", Room(lambda _: GIB))
    shared = Room(lambda ranks: 1840 * MIB // ranks)
    with pytest.raises(PlanError, match="use at most 10 ranks on this machine"):
        check_ranks(config_of(ranks=900), 962, "small", shared)
    check_ranks(config_of(ranks=10), 962, "small", shared)
    check_ranks(config_of(ranks=900, memory_limit=MIB), 962, "small", shared)

    def never(*_: object, **__: object) -> None:
        raise AssertionError("planned")

    monkeypatch.setattr(assemble, "plan_run", never)
    monkeypatch.setattr(assemble, "make_partition", never)
    for command in (("plan",), ("train", "--out", "/nonexistent/run")):
        before = time.process_time()
        assert run_main(*command, f"{data_root}/usa_airports", "--ranks", 4000) == 2
        assert "4,000 ranks cannot share the 1,190 vertices" in capsys.readouterr().err
        assert time.process_time() - before < 2


def test_the_verdict_comes_first() -> None:
    """Fails if what matters is the last of eighty lines, or one rank is called the fewest of one."""
    plan = plan_shape(config_of(ranks=2), SMALL)
    need = plan.largest.total_bytes
    first = render(plan, 10 * need).splitlines()[0]
    assert first == verdict(plan, 10 * need)
    assert re.fullmatch(r"fits: .* per rank; 1 with as much memory each would do", first)
    assert verdict(plan_shape(config_of(), SMALL), 10 * need).endswith("per rank")
    assert render(plan, MIB).startswith("does not fit: ")


def test_plan_says_what_was_compared_and_where_gpus_are(
    data_root: object, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if the table is lost where no strategy fits, or a missing GPU does not lead to --machine."""
    arguments = ("plan", f"{data_root}/cora")
    assert run_main(*arguments, "--ranks", 2, "--strategy", "auto", "--memory-limit", "100MiB") == 2
    said = capsys.readouterr()
    assert said.out.count("does not fit") >= 3
    assert said.err.startswith("mggcn: no exact strategy fits into 100.00 MiB per rank; ")
    assert said.err.count("\n") == 1

    def missing(_: Config) -> int:
        from mggcn.errors import BackendError

        raise BackendError("run.device cuda needs a GPU")

    monkeypatch.setattr("mggcn.cli.plan.memory_limit", missing)
    assert run_main(*arguments, "--device", "cuda") == 2
    assert (
        "--machine NAME, which is one of assumed-cuda, dgx-1, dgx-a100, dgx-h100, hgx-h200" in capsys.readouterr().err
    )
