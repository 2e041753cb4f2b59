"""Runs on the capacity ladder: the rung that fits trains with the same bits, and counts what it moves as it was planned."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import mggcn
from mggcn.assemble import ladder
from mggcn.assemble.plan import plan_graph, resolve
from mggcn.config import Config
from mggcn.config.files import with_named
from mggcn.errors import PlanError
from mggcn.graph.csr import Graph
from mggcn.runs import regroup
from mggcn.runs import train as training
from mggcn.runs.folder import FILES, continued, known_plan, read_run, reopen
from mggcn.runs.regroup import regrouped
from mggcn.runs.weights import weights_of
from mggcn.train.checkpoint import read_progress
from tests.graphs import make_graph

CONFIG = with_named(Config(), {"hidden": (128, 128), "threads": 1, "epochs": 3, "dropout": 0.3, "seed": 7213})


@pytest.fixture(scope="module")
def graph() -> Graph:
    n, rng = 20_000, np.random.default_rng(7)
    rows, cols = rng.integers(0, n, (2, 2 * n))
    adj = sp.csr_matrix((np.ones(2 * n, np.float32), (rows, cols)), (n, n))
    adj.data[:] = 1
    return make_graph(adj, num_features=32, num_classes=5, seed=11)


@pytest.fixture(autouse=True)
def on_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests' folders may be in memory."""
    monkeypatch.setattr(ladder, "in_memory", lambda _: False)


def limit_of(graph: Graph, **settings: Any) -> int:
    """Bytes that everything in memory exceeds, and rows on disk do not."""
    plan, _ = plan_graph(resolve(with_named(CONFIG, settings), graph), graph)
    return plan.largest.total_bytes - 1


def trained(graph: Graph, out: Path, **settings: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    run = training.prepare_run(with_named(CONFIG, settings), graph, None, out)
    result = training.run_training(run, graph, quiet=True)
    return result, [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]


def test_a_run_that_does_not_fit_trains_from_disk(graph: Graph, tmp_path: Path) -> None:
    """Fails if a limit ends in a refusal, the rung changes a bit, or more or less is moved than was planned."""
    limit = limit_of(graph)
    result, rows = trained(graph, tmp_path / "memory")
    assert "disk_file_bytes" not in result
    assert not any(name.startswith("disk") for row in rows for name in row)
    paged, moved = trained(graph, tmp_path / "disk", memory_limit=limit)
    names = ("loss", "train", "val", "lr")
    assert [[row[name] for name in names] for row in moved] == [[row[name] for name in names] for row in rows]
    config, content, _ = read_run(tmp_path / "disk")
    assert (config.run.capacity, content["capacity"], content["limit"]) == ("auto", "disk", limit)
    plan, _ = known_plan(tmp_path / "disk", config, graph)
    disk = plan.ranks[0].disk
    assert disk is not None
    assert paged["disk_file_bytes"] == disk.file_bytes
    train, evaluate = disk.programs["train"], disk.programs["evaluate"]
    for row in moved:
        assert (row["disk_bytes_read"], row["disk_bytes_written"]) == (train.read, train.written)
        assert 0 <= row["disk_wait_seconds"] < 60
    # Besides, an evaluation each, and one with the best weights for the scores of each class.
    for name, one, other in (("read", train.read, evaluate.read), ("written", train.written, evaluate.written)):
        assert (paged[f"disk_bytes_{name}"] - 3 * one) % other == 0
        assert 3 <= (paged[f"disk_bytes_{name}"] - 3 * one) // other <= 4
    assert not any(path.name.startswith("mggcn-pages") for path in (tmp_path / "disk").iterdir())


def test_a_resumed_run_keeps_its_rung(graph: Graph, tmp_path: Path) -> None:
    """Fails if a run from disk continues on another rung, or not to the bits of one that never stopped."""
    limit, folder = limit_of(graph), tmp_path / "disk"
    _, rows = trained(graph, tmp_path / "whole", memory_limit=limit)
    trained(graph, folder, memory_limit=limit, epochs=1)
    (folder / "result.json").unlink()
    config = with_named(read_run(folder)[0], {"epochs": 3})
    assert read_progress(folder / "checkpoints") is not None
    training.resume_training(folder, config, graph, quiet=True)
    found = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    timed = {"seconds", "disk_wait_seconds"}
    assert [{k: v for k, v in row.items() if k not in timed} for row in found] == [
        {k: v for k, v in row.items() if k not in timed} for row in rows
    ]
    assert "disk_bytes_read" in found[-1]


def stopped(graph: Graph, out: Path, **settings: Any) -> None:
    """A run of three epochs that was interrupted behind the second."""

    def stop(row: dict[str, Any]) -> None:
        if row["epoch"] == 2:
            raise ZeroDivisionError

    run = training.prepare_run(with_named(CONFIG, {"checkpoint_every": 1} | settings), graph, None, out)
    with pytest.raises(ZeroDivisionError):
        training.run_training(run, graph, quiet=True, on_epoch=stop)


def untimed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != "seconds" and not k.startswith("disk_")} for row in rows]


def last_weights(folder: Path) -> dict[str, torch.Tensor]:
    return weights_of(folder, read_run(folder)[0], "last")


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"kind": "gat", "heads": 4, "hidden": (64, 64)},
        pytest.param({"ranks": 2, "transport": "threads", "strategy": "halo"}, marks=pytest.mark.slow),
        pytest.param({"ranks": 2, "transport": "threads", "strategy": "delayed", "delay": "1"}, marks=pytest.mark.full),
        pytest.param({"precision": "bf16", "kind": "sage"}, marks=pytest.mark.slow),
    ],
    ids=["gcn", "gat", "halo", "delayed", "bf16"],
)
@pytest.mark.parametrize("from_disk", [False, True], ids=["from memory", "from disk"])
def test_a_resumed_run_takes_another_rung(graph: Graph, tmp_path: Path, more: dict[str, Any], from_disk: bool) -> None:
    """Fails if run.capacity or memory_limit are not heeded when a run continues, or the other rung costs a bit."""
    limit = limit_of(graph, **more)
    tight = resolve(with_named(CONFIG, more | {"memory_limit": limit}), graph)
    lower = plan_graph(tight, graph, limit=limit)[0].rung
    asks: dict[str, Any] = {"memory_limit": limit}
    if lower == "memory":  # rows of all layers are in memory in either case
        asks, lower = {"capacity": "disk"}, "disk"
    assert lower == ("recompute" if more.get("kind") == "gat" else "disk")
    _, rows = trained(graph, tmp_path / "whole", **more)
    stopped(graph, tmp_path / "run", **more, **(asks if from_disk else {}))
    before, content, _ = read_run(tmp_path / "run")
    assert content["capacity"] == (lower if from_disk else "memory")
    changes = [
        ({"capacity": "auto", "memory_limit": 0}, "memory") if from_disk else (asks, lower),
        ({"capacity": "memory", "memory_limit": 0}, "memory") if from_disk else ({"capacity": "disk"}, "disk"),
    ]
    for number, (change, rung) in enumerate(changes):
        folder = shutil.copytree(tmp_path / "run", tmp_path / f"run-{number}")
        config = regrouped(folder, continued(folder, before, change), graph, None)
        reopen(folder, config)
        assert read_run(folder)[1]["capacity"] == rung
        training.resume_training(folder, config, graph, quiet=True)
        found = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
        assert untimed(found) == untimed(rows)
        on_disk = ["disk_bytes_read" in row for row in (found[0], found[-1])]
        assert on_disk == [content["capacity"] == "disk", rung == "disk"]
        weights = last_weights(folder)
        assert all(torch.equal(weights[name], one) for name, one in last_weights(tmp_path / "whole").items())


def test_a_rung_that_does_not_fit_is_refused_when_a_run_continues(
    graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a run continues in more memory than it may use or on a disk without the space, a refusal changes it, or it
    names what a run cannot change.
    """
    folder = tmp_path / "run"
    stopped(graph, folder, memory_limit=limit_of(graph))
    before, files = read_run(folder)[0], [(folder / name).read_bytes() for name in FILES]
    for change, says in (
        ({"capacity": "memory"}, r"rank 0 needs .* may be used; .*--set run.capacity=disk"),
        (
            {"memory_limit": 1 << 20},
            r"rank 0 needs .* but only 1.00 MiB may be used; .*with rows on disk .* are needed",
        ),
        ({"scratch": str(tmp_path / "nowhere")}, r"run.scratch .*nowhere: No such file .* name a folder that exists"),
    ):
        with pytest.raises(PlanError, match=says) as refusal:
            regrouped(folder, continued(folder, before, change), graph, None)
        assert not re.search(r"\n|--precision|--strategy|model.hidden|recompute|prune", str(refusal.value))
    monkeypatch.setattr(ladder.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1 << 20}))
    with pytest.raises(PlanError, match=r"--set run.scratch=FOLDER on a disk with .* has 1.00 MiB\) would fit"):
        regrouped(folder, continued(folder, before, {"scratch": str(tmp_path)}), graph, None)
    assert [(folder / name).read_bytes() for name in FILES] == files


def test_a_run_continues_in_what_is_free_then(graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a run that was planned for more memory than is free now goes on as planned, until the system ends it."""
    folder, limit = tmp_path / "run", limit_of(graph)
    stopped(graph, folder)
    config, files = read_run(folder)[0], [(folder / name).read_bytes() for name in FILES]
    monkeypatch.setattr(regroup, "free_bytes", lambda: 0)
    monkeypatch.setattr(regroup, "free_per_rank", lambda _: 1 << 20)
    with pytest.raises(PlanError, match=r"rank 0 needs .* but only 1.00 MiB may be used"):
        regrouped(folder, config, graph, None)
    assert [(folder / name).read_bytes() for name in FILES] == files
    monkeypatch.setattr(regroup, "free_per_rank", lambda _: limit)
    regrouped(folder, config, graph, None)
    assert read_run(folder)[1]["capacity"] == "disk"


def test_a_scratch_folder_is_found_from_everywhere(
    graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a run from disk goes on only in the folder in which it was started, or on a disk that cannot be written."""
    (tmp_path / "fast").mkdir()
    monkeypatch.chdir(tmp_path)
    stopped(graph, tmp_path / "run", capacity="disk", scratch="fast")
    before = read_run(tmp_path / "run")[0]
    assert before.run.scratch == str(tmp_path / "fast")
    monkeypatch.setattr(ladder.os, "access", lambda *_: False)
    with pytest.raises(PlanError, match=r"run.scratch .*fast cannot be written; name a folder"):
        regrouped(
            tmp_path / "run",
            continued(tmp_path / "run", before, {"capacity": "disk", "memory_limit": 1 << 40}),
            graph,
            None,
        )


def test_a_run_that_nothing_asks_to_move_keeps_its_plan(graph: Graph, tmp_path: Path) -> None:
    """Fails if a run is planned anew for what it began with, or what differs after a kill is not mended."""
    folder, limit = tmp_path / "run", limit_of(graph)
    stopped(graph, folder, memory_limit=limit)
    config, plan = read_run(folder)[0], (folder / "plan.json").read_bytes()
    for change in ({}, {"threads": 2}, {"memory_limit": limit}, {"capacity": "auto"}, {"scratch": str(tmp_path)}):
        assert regrouped(folder, continued(folder, config, change), graph, None).run.memory_limit == limit
        assert (folder / "plan.json").read_bytes() == plan
    for change, rung in (({"capacity": "memory", "memory_limit": 0}, "memory"), ({"capacity": "disk"}, "disk")):
        # Killed when config.toml had changed: as if it were edited.
        reopen(folder, config := continued(folder, config, change))
        assert regrouped(folder, config, graph, None) == config
        assert read_run(folder)[1]["capacity"] == rung


def test_a_limit_that_the_settings_have_is_kept(graph: Graph, tmp_path: Path) -> None:
    """Fails if a run that is recorded in memory, and needs more than its settings allow, continues there without a word: an
    edited file, or a command that was killed between both.
    """
    folder, limit = tmp_path / "run", limit_of(graph)
    stopped(graph, folder)
    config = continued(folder, read_run(folder)[0], {"memory_limit": limit})
    reopen(folder, config)
    needed = read_run(folder)[1]["per_rank"][0]["total_bytes"]
    assert read_run(folder)[1]["capacity"] == "memory"
    assert needed > limit
    assert regrouped(folder, config, graph, None) == config
    content = read_run(folder)[1]
    assert content["capacity"] == "disk"
    assert content["per_rank"][0]["total_bytes"] <= limit


def test_python_takes_another_rung(graph: Graph, tmp_path: Path) -> None:
    """Fails if Trainer.resume keeps the plan that it had, or what it trains is not what it has planned."""
    settings: dict[str, Any] = {"hidden": (128, 128), "threads": 1, "dropout": 0.3, "seed": 7213}
    whole = mggcn.Trainer(graph, out=tmp_path / "whole", **settings)
    rows = whole.fit(epochs=3)
    trainer = mggcn.Trainer(graph, out=tmp_path / "run", **settings)
    trainer.fit(epochs=2)
    found = trainer.resume(epochs=3, capacity="disk")
    assert untimed(found) == untimed(rows)
    assert "disk_bytes_read" in found[-1]
    assert trainer.plan.run.rung == "disk"
    np.testing.assert_array_equal(trainer.predict(), whole.predict())
    opened = mggcn.Trainer.from_run(tmp_path / "run", graph)
    np.testing.assert_array_equal(opened.predict(), whole.predict())


def test_a_full_disk_is_refused_before_anything_is_written(
    graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a folder is left behind, or the line does not say what is missing and what to do."""
    limit = limit_of(graph)
    monkeypatch.setattr(ladder.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1 << 20}))
    for settings in ({}, {"capacity": "disk"}):
        with pytest.raises(PlanError, match=r"run\.scratch=FOLDER") as refusal:
            trained(graph, tmp_path / "run", memory_limit=limit, **settings)
        assert "\n" not in str(refusal.value)
        assert "1.00 MiB" in str(refusal.value)
        assert not (tmp_path / "run").exists()


def test_memory_alone_is_refused_as_ever(graph: Graph, tmp_path: Path) -> None:
    """Fails if run.capacity memory goes to disk all the same."""
    with pytest.raises(PlanError, match=r"may be used; .*--set run.capacity=disk, which has rows on disk, would fit"):
        trained(graph, tmp_path / "run", memory_limit=limit_of(graph), capacity="memory")
