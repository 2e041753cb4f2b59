"""Measured figures choose kernels and change no bit; a run keeps those that it was started with."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from mggcn.assemble import plan as assemble
from mggcn.assemble import rank as assemble_rank
from mggcn.assemble.plan import plan_graph, plan_recorded, resolve
from mggcn.assemble.rank import Rank
from mggcn.backend.cpu import kept_figures
from mggcn.backend.cpu.backend import CpuBackend
from mggcn.backend.cpu.figures import ASSUMED, Figures
from mggcn.backend.cpu.machine import dense_kernels
from mggcn.backend.cpu.variants import PAIRED
from mggcn.planning.record import to_dict
from mggcn.runs import train as training
from mggcn.runs.folder import continued, read_run, reopen
from tests.cli.runs import run_main
from tests.graphs import make_graph, on_ranks, pattern
from tests.machines import XEON, ZEN3, tight
from tests.planning.test_pruning import config_of
from tests.runs.small import config_of as small_run
from tests.runs.small import store_of, trained


def take(figures: Figures, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assemble, "figures_here", lambda config: figures)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_no_bit_depends_on_the_figures(precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a variant that another machine's figures choose gives other bits, or figures choose nothing.

    Tiles and pairs round bfloat16 otherwise, which note 0026 allows: no figure of theirs is given here.
    """
    graph = make_graph(pattern("random", 400, 9), num_features=30, num_classes=5, weighted=True, seed=3)
    config = config_of(ranks=2, run={"precision": precision}, hidden=(150, 70), epochs=3)

    def body(rank: Rank) -> Any:
        losses = [rank.trainer.step(epoch) for epoch in range(3)]
        weights = [tensor.clone() for tensor in rank.trainer.runtime.weights.state_dict().values()]
        backend: Any = rank.trainer.runtime.backend
        return losses, weights, {product.choice.text for product in backend.sparse_products.products}

    found = {}
    for name, figures in {"zen": ZEN3, "xeon": XEON, "tight": tight(2**15), "none": ASSUMED}.items():
        single = tuple(rate for rate in figures.dense if rate.kernel not in PAIRED)
        take(dataclasses.replace(figures, dense=single), monkeypatch)
        found[name] = on_ranks(config, graph, body)[0]
    losses, weights, chosen = found.pop("zen")
    for other in found.values():
        assert other[0] == losses
        assert all(torch.equal(a, b) for a, b in zip(weights, other[1], strict=True))
    assert found["tight"][2] != chosen


@pytest.mark.skipif("amx" not in dense_kernels(), reason="no AMX here")
def test_a_run_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a processor with AMX that measured it as faster trains without it, or not the same twice."""
    graph = make_graph(pattern("random", 400, 9), num_features=64, num_classes=5, weighted=True, seed=3)
    config = config_of(run={"precision": "bf16"}, hidden=(128, 64), epochs=3)

    def body(rank: Rank) -> Any:
        return [rank.trainer.step(epoch) for epoch in range(3)], rank.trainer.runtime.backend.name

    take(XEON, monkeypatch)
    (losses, name), again = on_ranks(config, graph, body)[0], on_ranks(config, graph, body)[0]
    assert "amx" in name
    assert again == (losses, name)
    take(dataclasses.replace(XEON, dense=()), monkeypatch)
    others, name = on_ranks(config, graph, body)[0]
    assert "amx" not in name
    assert losses == pytest.approx(others, rel=2e-2)


def test_a_plan_keeps_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a recorded plan is taken up with the figures of another hour, or chooses its memory by others."""
    graph = make_graph(pattern("random", 60, 9), num_features=30, num_classes=5, weighted=True, seed=3)
    config = resolve(config_of(), graph)
    take(XEON, monkeypatch)
    plan, _ = plan_graph(config, graph)
    assert plan.figures == XEON
    take(ZEN3, monkeypatch)
    again = plan_recorded(config, json.loads(json.dumps(to_dict(plan))))
    assert again.figures == XEON
    assert [rank.regions for rank in again.ranks] == [rank.regions for rank in plan.ranks]


def test_a_resumed_run_takes_the_figures_it_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a rank chooses its kernels by what is measured when the run goes on."""
    graph, taken = store_of(tmp_path), []

    def watched(*args: Any, **settings: Any) -> CpuBackend:
        taken.append(settings["figures"])
        return CpuBackend(*args, **settings)

    monkeypatch.setattr(assemble_rank, "CpuBackend", watched)
    config = small_run(1)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, epochs=2))
    take(XEON, monkeypatch)
    folder = trained(graph, config, tmp_path / "run")
    take(ZEN3, monkeypatch)
    longer = continued(folder, read_run(folder)[0], {"epochs": 3})
    reopen(folder, longer)
    training.resume_training(folder, longer, graph, quiet=True)
    assert taken == [XEON, XEON]


def test_a_second_start_measures_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a start of a known machine measures it, whatever the command, or a number of threads is measured twice."""
    store_of(tmp_path)
    asked: list[int] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(os, "getloadavg", lambda: (0.1, 0.1, 0.1))
    monkeypatch.setattr(kept_figures, "measure", lambda threads, *_: asked.append(threads) or XEON)
    store, run = tmp_path / "store", ["--threads", 1, "--set", "model.hidden=5"]
    assert run_main("plan", store, *run) == 0
    assert asked == [1]
    assert run_main("train", store, *run, "--epochs", 2, "--out", tmp_path / "first", "--quiet") == 0
    assert asked == [1], "the run takes what the plan has measured"
    reopen(tmp_path / "first", continued(tmp_path / "first", read_run(tmp_path / "first")[0], {"epochs": 3}))
    assert run_main("train", "--resume", tmp_path / "first", "--quiet") == 0
    two = [*run, "--ranks", 2, "--transport", "threads", "--epochs", 1, "--quiet"]
    assert run_main("train", store, *two, "--out", tmp_path / "second") == 0
    known = sorted(asked)
    assert known in ([1], [1, 2]), "no number of threads twice"
    assert run_main("train", store, *two, "--out", tmp_path / "third") == 0
    assert sorted(asked) == known
