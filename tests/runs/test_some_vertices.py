"""Scores of some vertices from their neighbourhood alone: those that an evaluation of the whole graph gives."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mggcn
from mggcn.assemble import vertices as scoring
from mggcn.assemble.vertices import VertexScorer
from mggcn.cli.entry import main
from mggcn.config import ModelConfig
from mggcn.errors import ConfigError, PlanError
from mggcn.graph.csr import ArrayRows, Graph
from mggcn.graph.options import GraphOptions
from mggcn.memory.device import runtime_bytes
from tests.graphs import make_graph, pattern

N, D, C = 61, 7, 4
LONELY = 17
"""A vertex without neighbours."""
SETTINGS = [
    word for setting in ("train.epochs=3", "run.threads=1", "run.precision=fp64") for word in ("--set", setting)
]
LAYERS: dict[str, Any] = {"hidden": (6, 6)}
MODELS: dict[str, dict[str, Any]] = {
    "gcn": {"kind": "gcn"},
    "gcn, symmetric": {"kind": "gcn", "norm": "symmetric", "self_loops": True, **LAYERS},
    "gcn, wider than its input": {"kind": "gcn", "hidden": (20,)},
    "sage, mean": {"kind": "sage", "aggregator": "mean", **LAYERS},
    "sage, gcn": {"kind": "sage", "aggregator": "gcn"},
    "sage, max": {"kind": "sage", "aggregator": "max"},
    "gin": {"kind": "gin"},
    "gat": {"kind": "gat", "heads": 2, "hidden": (8,)},
    "gatv2": {"kind": "gatv2", "heads": 2, "hidden": (8,)},
    "sgc": {"kind": "sgc", "hops": 3, "hidden": ()},
    "appnp": {"kind": "appnp", "hops": 3},
    "mlp": {"kind": "mlp"},
    "residual, layer norm": {"kind": "gcn", "residual": "linear", "norm_layer": "layer", **LAYERS},
    "batch norm": {"kind": "gcn", "norm_layer": "batch"},
    "jumping": {"kind": "sage", "aggregator": "mean", "head": "linear", "jumping": "concat", **LAYERS},
}


def small(*, weighted: bool = True) -> Graph:
    """A directed graph, with weights that no mean undoes, in which one vertex has no neighbours."""
    adj = pattern("directed", N, 5) * np.random.default_rng(8).uniform(0.5, 2, (N, N)).astype(np.float32)
    adj[LONELY], adj[:, LONELY] = 0, 0
    return make_graph(adj, num_features=D, num_classes=C, weighted=weighted, seed=4)


def trained(graph: Graph, model: dict[str, Any], **settings: Any) -> mggcn.Trainer:
    shape = ModelConfig(**({"hidden": (6,)} | model))
    trainer = mggcn.Trainer(graph, shape, **{"threads": 1, "epochs": 2, "precision": "fp64", **settings})
    trainer.fit()
    return trainer


def assert_rows_of_all(trainer: mggcn.Trainer, rows: Any, rtol: float, **options: Any) -> None:
    everything = trainer.predict(**options)
    found = trainer.predict(vertices=rows, **options)
    assert found.dtype == everything.dtype
    np.testing.assert_allclose(found, everything[rows], rtol=rtol, atol=rtol * np.abs(everything).max())


@pytest.mark.covering(1, rest="slow")
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_some_scores_are_those_of_the_whole_graph(name: str, weighted: bool) -> None:
    """Fails if a neighbour, a weight, a degree of the whole graph, a running statistic or a self-loop is left out, rows
    come in another order, or a vertex without neighbours has no score.
    """
    trainer = trained(small(weighted=weighted), MODELS[name])
    for rows in ([LONELY], [5, 60, LONELY, 5, 0], list(range(N))):
        assert_rows_of_all(trainer, rows, 1e-10)


@pytest.mark.parametrize(
    ("name", "precision", "rtol"),
    [
        ("gcn, symmetric", "fp32", 1e-5),
        ("sage, max", "fp32", 1e-5),
        ("gatv2", "fp32", 1e-5),
        ("residual, layer norm", "mixed", 2e-2),
        ("gcn", "bf16", 2e-2),
    ],
)
def test_some_scores_on_a_real_graph(name: str, precision: str, rtol: float, data_root: Path) -> None:
    """Fails if sparse features are gathered wrongly, or a precision rounds what the whole graph's evaluation does not."""
    trainer = trained(mggcn.load("cora", root=data_root), MODELS[name], precision=precision)
    assert_rows_of_all(trainer, [2707, 0, 1234, 99], rtol)


@pytest.mark.parametrize("options", [{"layer": 1}, {"layer": 2}, {"probabilities": True}, {"weights": "last"}], ids=str)
def test_some_rows_of_what_else_is_predicted(options: dict[str, Any]) -> None:
    """Fails if embeddings, probabilities or the last weights of some vertices are others than those of all."""
    for model in ("sage, mean", "appnp"):
        trainer = trained(small(), {**MODELS[model], **LAYERS}, epochs=4)
        assert_rows_of_all(trainer, [9, 2], 1e-10, **options)


@pytest.mark.parametrize("ranks", [2, 3])
def test_runs_of_several_ranks(ranks: int) -> None:
    """Fails if the scores of some vertices need the run's ranks, or take the rows of one rank for the graph's."""
    trainer = trained(small(), MODELS["sage, mean"], ranks=ranks, transport="threads")
    assert_rows_of_all(trainer, [60, 3], 1e-10)


def test_runs_on_batches() -> None:
    """Fails if fan-outs of training limit what a score reads."""
    trainer = trained(small(), MODELS["gcn"], batch=8, fanout=(2, 2))
    assert_rows_of_all(trainer, [7, 1], 1e-10)


@pytest.mark.parametrize("weighted", [False, True])
def test_types_of_edges_are_read(weighted: bool) -> None:
    """Fails if a model that reads types of edges is scored without them, or by other means than the whole graph's."""
    edges = np.random.default_rng(3).integers(0, 30, (2, 200))
    features = np.random.default_rng(5).normal(size=(30, D)).astype(np.float32)
    graph = mggcn.load(
        edges,
        edge_types=np.arange(200) % 3,
        weights=np.random.default_rng(4).uniform(0.5, 2, 200) if weighted else None,
        features=features,
        labels=np.arange(30) % C,
        splits={"train": range(20)},
        options=GraphOptions(duplicates="sum"),
    )
    trainer = trained(graph, {"kind": "rgcn"})
    assert_rows_of_all(trainer, [4, 1, 29], 1e-10)
    if weighted:
        return
    # A model that does not read types takes parallel edges of several relations one by one.
    assert_rows_of_all(trained(graph, {"kind": "gat", "heads": 1}), [4, 1], 1e-10)


def test_only_the_neighbourhood_is_read() -> None:
    """Fails if features or edges beyond the layers of the model change a score, or are touched at all."""
    adj = pattern("path", N, 1)
    graph = make_graph(adj, num_features=D, num_classes=C, seed=4)
    trainer = trained(graph, MODELS["gcn"])
    before = trainer.predict(vertices=[30])
    features = graph.features.array()  # type: ignore[union-attr]
    assert np.isfinite(before).all()
    # Two sums read vertices 28 .. 32 of a path.
    features[:28], features[33:] = np.nan, np.nan
    assert np.array_equal(trainer.predict(vertices=[30]), before)
    features[28] = np.nan
    assert np.isnan(trainer.predict(vertices=[30])).all()


def test_what_does_not_fit_is_computed_in_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if more is computed at once than fits, a half is lost or in another place, or one vertex is split for ever."""
    trainer, parts = trained(small(), MODELS["gcn"]), list[int]()
    everything, evaluated = trainer.predict(), VertexScorer._evaluated

    def counted(scorer: VertexScorer, of: Any, program: Any, *rest: Any) -> Any:
        parts.append(of.sizes[0])
        assert program.arena.nbytes < room
        return evaluated(scorer, of, program, *rest)

    def allow(nbytes: int) -> None:
        monkeypatch.setattr(scoring, "memory_limit", lambda _: nbytes + runtime_bytes("cpu"))

    monkeypatch.setattr(VertexScorer, "_evaluated", counted)
    rows = [60, 3, *range(40)]
    for room, several in ((1 << 30, False), (29_000, True)):
        allow(room)
        parts.clear()
        np.testing.assert_allclose(trainer.predict(vertices=rows), everything[rows], rtol=1e-10, atol=1e-12)
        assert (len(parts) > 1) == several
        assert sum(parts) == 41
    allow(100)
    with pytest.raises(PlanError, match=r"the neighbourhood of vertex 5 alone does not fit into 100 B; raise"):
        trainer.predict(vertices=[5])


def test_what_is_kept_between_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if degrees are summed or weights are read again for every call, those of an earlier run, other weights or
    another graph are taken, or a score has other bits after another call.
    """
    graph, made = small(), list[Graph]()
    trainer, start = trained(graph, MODELS["gcn"]), VertexScorer.__init__

    def counted(scorer: VertexScorer, config: Any, of: Graph, *rest: Any) -> None:
        made.append(of)
        start(scorer, config, of, *rest)

    monkeypatch.setattr(VertexScorer, "__init__", counted)
    first = trainer.predict(vertices=[1])
    trainer.predict(vertices=range(2, 60))
    assert np.array_equal(trainer.predict(vertices=[1]), first)
    assert len(made) == 1
    assert_rows_of_all(trainer, [1], 1e-10, weights="last")
    trainer.resume(epochs=5)
    assert_rows_of_all(trainer, [1], 1e-10)
    other = small(weighted=False)
    assert_rows_of_all(trainer, [1], 1e-10, graph=other)
    assert_rows_of_all(trainer, [1], 1e-10)
    assert [of is other for of in made] == [False, False, False, True, False]
    narrow = make_graph(pattern("path", 5, 1), num_features=3, num_classes=C, seed=4)
    with pytest.raises(ConfigError, match="has 3 features, the run was trained on 7"):
        trainer.predict(graph=narrow, vertices=[1])


def test_the_command_writes_the_rows_of_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if the command's file, its columns, its ids or its order are others than those of all vertices' scores."""
    names = np.array([f"v{number}" for number in range(N)])
    graph = dataclasses.replace(small(), ids=ArrayRows(names))
    store, run = tmp_path / "store", tmp_path / "run"
    mggcn.save(graph, store)
    assert main(["train", str(store), "--out", str(run), "--quiet", *SETTINGS]) == 0
    assert main(["predict", str(run), "--out", str(tmp_path / "all.csv"), "--probabilities"]) == 0
    capsys.readouterr()
    some = ["--vertices", "v9,v0,v9", "--out", str(tmp_path / "some.csv"), "--probabilities", "--json"]
    assert main(["predict", str(run), *some]) == 0
    assert json.loads(capsys.readouterr().out)["what"] == "probabilities"
    every, found = ((tmp_path / f"{name}.csv").read_text().splitlines() for name in ("all", "some"))
    assert found[0] == every[0]
    assert [line.split(",")[0] for line in found[1:]] == ["v9", "v0", "v9"]
    wanted, came = (np.array([line.split(",")[1:] for line in lines], float) for lines in (every[1:], found[1:]))
    np.testing.assert_allclose(came, wanted[[9, 0, 9]], rtol=1e-10)
    assert main(["predict", str(run), "--vertices", "v61"]) == 2
    assert "no vertex has such an id; ids of the graph are such as 'v0'" in capsys.readouterr().err
