"""All vertices scored by blocks, where the whole graph needs more memory than may be used: decided for each graph."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mggcn
from mggcn.assemble.plan import plan_graph
from mggcn.config import Config, ModelConfig
from mggcn.config.files import with_named
from mggcn.errors import PlanError
from mggcn.graph.csr import Graph
from mggcn.graph.generate import community
from mggcn.graph.store import open_store, write_store
from mggcn.memory.units import human
from mggcn.planning.shape import graph_shape
from mggcn.runs import score as scoring
from mggcn.runs.folder import known_plan, read_run
from tests.cli.runs import refused, run_main

D, SMALL, LARGE = 500, 120, 6000
MODELS: dict[str, dict[str, Any]] = {
    "gcn": {"kind": "gcn"},
    "sage": {"kind": "sage", "aggregator": "max", "residual": "linear"},
    "gat": {"kind": "gat", "heads": 2},
    "appnp": {"kind": "appnp", "hops": 2},
    "mlp": {"kind": "mlp"},
}
SETTINGS: dict[str, Any] = {"epochs": 2, "threads": 1, "transport": "auto"}


def graph_of(vertices: int) -> Graph:
    """All vertices have 500 features, so that of a large graph the whole graph's program takes much more than blocks do."""
    return community(vertices, 4 * vertices, D, 3, seed=vertices)


@pytest.fixture(scope="module")
def graphs() -> tuple[Graph, Graph]:
    return graph_of(SMALL), graph_of(LARGE)


@pytest.fixture(scope="module")
def stores(graphs: tuple[Graph, Graph], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("stores")
    for graph, name in zip(graphs, ("small", "large"), strict=True):
        write_store(graph, folder / name)
    return folder / "small", folder / "large"


def between(config: Config, graphs: tuple[Graph, Graph]) -> int:
    """Bytes that do for the small graph's training and the large one's scores by blocks, not for its whole program."""
    small, large = graphs
    config, graph = scoring.for_scoring(config, large, graph_shape(small, config))
    plan = plan_graph(config.evaluating("whole"), graph, limit=2**40)[0]
    whole, blocks = max(rank.scoring_bytes for rank in plan.ranks), scoring.scoring_plan(graph, plan, 2**40).total_bytes
    assert blocks < whole - (4 << 20)
    return (whole + blocks) // 2


@pytest.fixture
def by_blocks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of vertices of each graph that is scored by blocks in this process."""
    scored, plan = list[int](), scoring.scoring_plan

    def watched(graph: Graph, *rest: Any) -> Any:
        scored.append(graph.num_vertices)
        return plan(graph, *rest)

    monkeypatch.setattr(scoring, "scoring_plan", watched)
    return scored


def assert_near(found: Any, expected: Any) -> None:
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("gcn", {}),
        ("gcn", {"batch": 20, "fanout": (3, 3)}),
        ("gat", {}),
        ("mlp", {}),
        pytest.param("sage", {}, marks=pytest.mark.full),
        pytest.param("appnp", {}, marks=pytest.mark.full),
        pytest.param("gat", {"batch": 20, "fanout": (3, 3)}, marks=pytest.mark.full),
    ],
)
def test_a_larger_graph_is_scored_by_blocks(
    name: str, more: dict[str, Any], graphs: tuple[Graph, Graph], by_blocks: list[int]
) -> None:
    """Fails if a graph that a run was not trained on is refused, or held as a whole, though blocks of it would do, or the
    scores or a layer's outputs are others than the whole graph's."""
    small, large = graphs
    model = ModelConfig(**({"hidden": (8,)} | MODELS[name]))
    free = mggcn.Trainer(small, model, **SETTINGS, **more)
    limit = between(free.config, graphs)
    by_blocks.clear()
    tight = mggcn.Trainer(small, model, **SETTINGS, **more, memory_limit=limit)
    free.fit()
    tight.fit()
    for options in ({}, {"probabilities": True}, {"layer": 1}):
        whole = free.predict(graph=large, **options)  # type: ignore[arg-type]  # options are of several types
        assert not by_blocks
        assert_near(tight.predict(graph=large, **options), whole)  # type: ignore[arg-type]  # as above
        assert by_blocks == [LARGE]
        by_blocks.clear()
    assert_near(tight.predict(graph=small), free.predict())
    assert not by_blocks


@pytest.mark.parametrize(
    "ranks",
    [
        ["--ranks", "1"],
        ["--ranks", "2", "--transport", "threads"],
        pytest.param(["--ranks", "2"], marks=pytest.mark.slow),
        pytest.param(["--ranks", "3", "--strategy", "delayed"], marks=pytest.mark.full),
    ],
    ids=" ".join,
)
def test_the_command_scores_by_blocks(
    ranks: list[str], graphs: tuple[Graph, Graph], stores: tuple[Path, Path], tmp_path: Path
) -> None:
    """Fails if ranks write other rows than they compute, another order, or other scores than Python returns."""
    options = ["--threads", "1", "--epochs", "2", "--set", "model.hidden=8", "--quiet", *ranks]
    given = {"ranks": int(ranks[1]), "hidden": (8,)} | ({"strategy": "delayed"} if "delayed" in ranks else {})
    limit = between(mggcn.Trainer(graphs[0], **SETTINGS, **given).config, graphs)
    for name, more in (("free", []), ("tight", ["--set", f"run.memory_limit={limit}"])):
        assert run_main("train", stores[0], "--out", tmp_path / name, *options, *more) == 0
    for more in ([], ["--layer", "1"], ["--probabilities"]):
        found = []
        for name in ("free", "tight"):
            out = tmp_path / f"{name}.npy"
            assert run_main("predict", tmp_path / name, "--store", stores[1], "--out", out, *more) == 0
            found.append(np.load(out))
        assert_near(found[1], found[0])
        assert found[0].dtype == found[1].dtype
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".tmp"]


def test_the_runs_own_graph_on_a_smaller_machine(
    graphs: tuple[Graph, Graph],
    stores: tuple[Path, Path],
    by_blocks: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Fails if a run that was trained where there was more memory is not scored by blocks where there is less, or nothing
    says so.
    """
    run = tmp_path / "run"
    options = ["--threads", "1", "--epochs", "2", "--set", "model.hidden=8", "--quiet"]
    assert run_main("train", stores[1], "--out", run, *options) == 0
    assert run_main("predict", run) == 0
    whole = np.load(run / "scores.npy")
    limit = between(read_run(run)[0], (graphs[1], graphs[1]))
    by_blocks.clear()
    monkeypatch.setattr(scoring, "free_per_rank", lambda config: limit)
    assert not caplog.messages
    assert run_main("predict", run) == 0
    (said,) = caplog.messages
    config = with_named(read_run(run)[0], {"prune": "off"})  # no training epochs
    need = max(rank.scoring_bytes for rank in known_plan(run, config, graphs[1])[0].ranks)
    assert said == (
        f"scores of all vertices need {human(need)} a rank, and {human(limit)} may be used: they are computed by blocks, "
        "layer by layer"
    )
    assert_near(np.load(run / "scores.npy"), whole)
    assert_near(mggcn.Trainer.from_run(run).predict(), whole)
    assert by_blocks == [LARGE] * 2


def test_auto_is_decided_for_each_graph(
    graphs: tuple[Graph, Graph], stores: tuple[Path, Path], by_blocks: list[int], tmp_path: Path
) -> None:
    """Fails if what auto chose for the graph of a run holds for others too, or is chosen again when the run continues."""
    config = with_named(Config(), {"hidden": (8,), "batch": 20, "fanout": (3, 3), "threads": 1})
    options = [
        "--threads",
        "1",
        "--epochs",
        "2",
        "--set",
        "model.hidden=8",
        "--batch",
        "20",
        "--fanout",
        "3,3",
        "--quiet",
    ]
    limit, run = between(mggcn.Trainer(graphs[0], config=config).config, graphs), tmp_path / "run"
    by_blocks.clear()
    assert run_main("train", stores[1], "--out", run, *options, "--set", f"run.memory_limit={limit}") == 0
    assert json.loads((run / "plan.json").read_text())["evaluate"] == "blocks"
    settings = read_run(run)[0]
    assert settings.train.evaluate == "auto"
    assert known_plan(run, settings, open_store(stores[1]))[0].by_blocks
    # Continued with more memory, its scores are computed as they were.
    larger = dataclasses.replace(settings, run=dataclasses.replace(settings.run, memory_limit=2**40))
    assert known_plan(run, larger, open_store(stores[1]))[0].by_blocks
    assert run_main("predict", run, "--store", stores[0], "--out", tmp_path / "small.npy") == 0
    assert not by_blocks
    assert run_main("predict", run) == 0
    assert by_blocks == [LARGE]
    assert_near(mggcn.Trainer.from_run(run).predict(graph=graphs[0]), np.load(tmp_path / "small.npy"))
    assert by_blocks == [LARGE]


def test_ranks_agree(stores: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if ranks that find different numbers score in different ways, and wait for each other for ever."""
    run, measured = tmp_path / "run", list[int]()
    options = ["--threads", "1", "--epochs", "1", "--set", "model.hidden=8", "--set", "run.timeout_s=20", "--quiet"]
    assert run_main("train", stores[0], "--out", run, "--ranks", "2", "--transport", "threads", *options) == 0
    assert run_main("predict", run) == 0
    whole, answers = np.load(run / "scores.npy"), itertools.count()
    monkeypatch.setattr(scoring, "scored_by_blocks", lambda plan, limit: next(answers) % 2 == 0)
    monkeypatch.setattr(scoring, "free_per_rank", lambda config: measured.append(0) or 2**40)
    for _ in range(4):
        assert run_main("predict", run) == 0
        assert_near(np.load(run / "scores.npy"), whole)
    assert len(measured) == 4


def test_what_fits_neither_way_is_refused(
    graphs: tuple[Graph, Graph],
    stores: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fails if scores that do not fit are begun, or the advice is one that the command has no setting for."""
    run = tmp_path / "run"
    options = ["--threads", "1", "--epochs", "1", "--set", "model.hidden=8", "--quiet"]
    assert run_main("train", stores[0], "--out", run, *options) == 0
    trainer = mggcn.Trainer.from_run(run)
    monkeypatch.setattr(scoring, "free_per_rank", lambda config: 1 << 20)
    said = refused(capsys, "predict", run, "--store", stores[1], code=2)
    assert "computed layer by layer" in said
    assert "--vertices" in said
    with pytest.raises(PlanError, match=r"scores of all 6,000 vertices need .* score some vertices"):
        trainer.predict(graph=graphs[1])
    assert "--set" not in said
    assert not [path for path in run.iterdir() if path.name.startswith((".scores", "scores"))]


def test_training_takes_nothing_of_what_scores_need(graphs: tuple[Graph, Graph]) -> None:
    """Fails if a graph is scored by blocks where its evaluation fits, but a training epoch would not."""
    graph = graphs[1]
    config = with_named(Config(), {"hidden": (512, 512), "threads": 1})
    config, graph = scoring.for_scoring(config, graph, graph_shape(graph, config))
    (rank,) = (plan := plan_graph(config, graph)[0]).ranks
    saved = rank.train.arena.nbytes - rank.evaluate.arena.nbytes
    assert saved > 10 << 20
    assert rank.scoring_bytes == rank.total_bytes - saved
    assert not scoring.scored_by_blocks(plan, rank.scoring_bytes)
    assert scoring.scored_by_blocks(plan, rank.scoring_bytes - 1)
