"""Whole runs of models with norms: the losses of one rank on several, messages as planned, the same bits when resumed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mggcn.assemble import plan_graph
from mggcn.assemble_rank import Rank
from tests.graphs import make_graph, on_ranks, pattern
from tests.train.test_exact import config_of
from tests.train.test_mixed import with_run
from tests.train.test_trainer import fit

GRAPH = make_graph(pattern("random", 61, 6), num_features=7, num_classes=4, sparse=False, weighted=False, seed=8)
BATCH: dict[str, Any] = {
    "hidden": (12, 12),
    "dropout": 0.3,
    "norm_layer": "batch",
    "residual": "linear",
    "head": "linear",
}
MODELS: dict[str, dict[str, Any]] = {
    "gcn": BATCH,
    "sage": BATCH | {"kind": "sage", "aggregator": "mean", "jumping": "max"},
    "gin": BATCH | {"kind": "gin", "norm_layer": "layer", "activation": "elu"},
    "appnp": {"kind": "appnp", "hidden": (12,), "dropout": 0.3, "norm_layer": "batch", "activation": "gelu"},
}


@pytest.mark.covering(0, rest="slow")
@pytest.mark.parametrize("name", MODELS)
def test_losses_do_not_depend_on_the_ranks(name: str) -> None:
    """Fails if ten epochs in float32 differ by more than rounding between rank counts, or at all between runs."""

    def losses(ranks: int, strategy: str = "broadcast", threads: int = 1) -> list[float]:
        config = with_run(config_of(ranks, strategy=strategy, **MODELS[name]), precision="fp32")
        config = dataclasses.replace(config, run=dataclasses.replace(config.run, threads=threads))
        found: list[list[float]] = on_ranks(config, GRAPH, lambda rank: [rank.trainer.step(e) for e in range(10)])
        return found[0]

    base = losses(1)
    assert base[-1] < base[0]
    assert losses(1, threads=3) == base
    assert losses(2) == losses(2)
    for ranks, strategy in ((2, "broadcast"), (4, "halo"), (4, "delayed")):
        np.testing.assert_allclose(losses(ranks, strategy), base, rtol=1e-5)


@pytest.mark.parametrize("strategy", ["halo", "delayed"])
def test_bytes_and_messages_are_as_planned(strategy: str) -> None:
    """Fails if a sum of statistics is not in the plan."""

    def body(rank: Rank) -> None:
        for program, run in (
            (rank.plan.train, lambda: rank.trainer.step(0)),
            (rank.plan.evaluate, rank.trainer.evaluate),
        ):
            rank.comm.bytes_sent = rank.comm.messages = 0
            run()
            assert rank.comm.bytes_sent == rank.plan.bytes_sent(program)
            assert rank.comm.messages == rank.plan.messages(program)

    on_ranks(config_of(3, strategy=strategy, **BATCH), GRAPH, body)


@pytest.mark.parametrize(("ranks", "strategy"), [(1, "broadcast"), (3, "delayed")])
def test_a_run_with_batch_norm_resumes_bit_for_bit(ranks: int, strategy: str, tmp_path: Path) -> None:
    """Fails if running statistics are not part of a checkpoint, or begin afresh."""
    config = config_of(ranks, strategy=strategy, **BATCH)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, epochs=6))
    folders = [tmp_path / "whole", tmp_path / "parts"]
    for folder in folders:
        folder.mkdir()
    whole = fit(config, GRAPH, folders[0])
    assert any(name.endswith("running_var") for name in whole[1])
    assert not fit(config, GRAPH, folders[1], stop_after=3)[0]
    parts = fit(config, GRAPH, folders[1])
    assert parts[2] == whole[2]
    assert all(torch.equal(parts[1][name], weight) for name, weight in whole[1].items())


def test_nothing_is_pruned_before_a_batch_norm() -> None:
    """Fails if statistics are taken from some vertices, or the plan does not say why all rows are computed."""
    for norm_layer, said in (("batch", True), ("layer", False)):
        config = with_run(config_of(2, **BATCH | {"norm_layer": norm_layer}), prune="auto")
        plan, _ = plan_graph(config, GRAPH)
        reasons = [rows.reason for rows in plan.ranks[0].rows]
        assert any("batch-norm 1 takes its statistics from all vertices" in reason for reason in reasons) == said
