"""The Python API: what the documentation shows, any kind of graph, ranks, and errors before anything is spent."""

from __future__ import annotations

import dataclasses
import gc
import signal
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch_geometric.data import Data

import mggcn
from mggcn.comm.failure import Interrupted
from mggcn.config import Config, ModelConfig, RunConfig, TrainConfig
from mggcn.errors import BackendError, ConfigError, GraphError, PlanError, RunError
from mggcn.graph.csr import Graph
from mggcn.graph.store_write import write_store
from tests.graphs import make_graph, pattern

N, D, C = 90, 6, 3


def arrays() -> dict[str, Any]:
    """A graph of two dozen lines of NumPy: adjacency, features, labels, splits."""
    rng = np.random.default_rng(451)
    labels = np.arange(N) % C
    adj = sp.random_array((N, N), density=0.1, rng=rng, format="csr", dtype=np.float32)
    adj = ((adj + adj.T) > 0).astype(np.float32)
    x = (np.eye(C)[labels] @ rng.normal(size=(C, D)) + 0.3 * rng.normal(size=(N, D))).astype(np.float32)
    part = rng.permutation(np.arange(N) % 3)
    splits = {name: part == i for i, name in enumerate(("train", "val", "test"))}
    return {"adj": adj, "features": x, "labels": labels, "splits": splits}


def small(**settings: Any) -> mggcn.Trainer:
    """A trainer of the small graph."""
    a = arrays()
    graph = mggcn.load(a.pop("adj"), **a)
    return mggcn.Trainer(graph, mggcn.GCN(8, dropout=0.3), **({"threads": 1, "lr": 0.02, "seed": 77} | settings))


@pytest.mark.parametrize("transport", ["single", pytest.param("gloo", marks=pytest.mark.slow)])
def test_the_best_repeat_is_scored(transport: str) -> None:
    """Fails if a trainer of several seeds tells the scores of one and has the weights of another."""
    ways: dict[str, Any] = {"transport": transport, "ranks": 1 if transport == "single" else 2, "epochs": 3}
    trainer = small(repeat=3, **ways)
    trainer.fit()
    runs = trainer.result()["runs"]
    best = max(runs, key=lambda run: run["best"]["val"])
    assert best["seed"] != runs[-1]["seed"]
    alone = small(epochs=3, seed=best["seed"])
    alone.fit()
    assert trainer.evaluate("test") == alone.evaluate("test")
    # Another seed or number of ranks is another partition, whose sums are rounded otherwise.
    for weights in ("best", "last"):
        if transport == "single" or weights == "best":  # processes start slowly
            np.testing.assert_allclose(
                trainer.predict(weights=weights), alone.predict(weights=weights), rtol=1e-4, atol=1e-5
            )
        for name, weight in trainer.state_dict(weights).items():
            torch.testing.assert_close(weight, alone.state_dict(weights)[name], rtol=1e-4, atol=1e-5)


def losses(history: list[dict[str, Any]]) -> np.ndarray:
    return np.array([row["loss"] for row in history])


def test_the_documented_example(data_root: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the example of the README and DESIGN does not run as it stands, or learns nothing."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})  # one thread: the cores may be shared
    graph = mggcn.load("cora", root=data_root)
    trainer = mggcn.Trainer(graph, mggcn.GCN(hidden=(16,), dropout=0.5), ranks=1)
    history = trainer.fit(epochs=40)
    assert [row["epoch"] for row in history] == list(range(1, 41))
    assert history[0].keys() == {"epoch", "loss", "train", "val", "test", "lr", "seconds"}
    assert trainer.evaluate("test") > 0.7
    assert "predicted peak" in str(trainer.plan)
    assert trainer.evaluate("test", "last") == history[-1]["test"]
    assert trainer.evaluate("val") == max(row["val"] for row in history)
    scores = trainer.predict()
    assert graph.labels is not None
    right = scores.argmax(1) == graph.labels.read(0, graph.num_vertices)
    assert right[graph.splits["test"].read(0, 1)[0]].mean() == pytest.approx(trainer.evaluate("test"))
    assert trainer.run_folder is not None
    assert trainer.run_folder.is_relative_to(temporary)


def test_scipy_pyg_and_a_store_are_one_graph(tmp_path: Path) -> None:
    """Fails if the same graph trains differently depending on what held it."""
    a = arrays()
    edges = torch.from_numpy(np.stack(a["adj"].nonzero()))
    masks = {f"{name}_mask": torch.from_numpy(mask) for name, mask in a["splits"].items()}
    data = Data(x=torch.from_numpy(a["features"]), edge_index=edges, y=torch.from_numpy(a["labels"]), **masks)
    rest = {key: value for key, value in a.items() if key != "adj"}
    write_store(mggcn.load(data), tmp_path / "store")
    # A matrix has weights, here ones; PyG's edge_index and edges of an array have none.
    graphs: list[Any] = [data, tmp_path / "store", str(tmp_path / "store"), mggcn.load(edges.numpy(), **rest)]
    graphs += [mggcn.load(a["adj"], **rest), mggcn.load("store", root=tmp_path)]
    curves = []
    for graph in graphs:
        trainer = mggcn.Trainer(graph, mggcn.GCN((8,)), threads=1, seed=12)
        curves.append(losses(trainer.fit(epochs=3)))
    for curve in curves[1:]:
        np.testing.assert_allclose(curve, curves[0], rtol=1e-6)


@pytest.mark.full
def test_ranks_as_processes_and_as_threads(temporary: Path) -> None:
    """Fails if ranks change curve, scores or order, or a graph in memory does not reach the processes."""
    single = small()
    expected = losses(single.fit(epochs=5))
    for settings in ({"ranks": 2}, {"ranks": 3, "transport": "threads"}):
        trainer = small(**settings)
        history = trainer.fit(epochs=5)
        np.testing.assert_allclose(losses(history), expected, rtol=1e-5)
        scores = single.predict(weights="last")
        np.testing.assert_allclose(trainer.predict(weights="last"), scores, rtol=1e-4, atol=1e-5)
        assert trainer.evaluate("test", "last") == single.evaluate("test", "last")
        assert trainer.result()["bytes_sent_per_epoch"] > 0
        if trainer.config.run.transport == "gloo":
            assert any(folder.name == "graph" for folder in temporary.rglob("graph"))
            assert losses(history).tolist() == [row["loss"] for row in _history(trainer)]


@pytest.mark.full
def test_on_epoch_of_processes_is_called_here() -> None:
    """Fails if a row is lost, doubled, late for good, or told again after a resume, or what the function raises is lost."""
    trainer, seen = small(ranks=2), list[dict[str, Any]]()
    assert trainer.fit(epochs=4, on_epoch=seen.append) == seen

    def stop(row: dict[str, Any]) -> None:
        raise ZeroDivisionError(f"after epoch {row['epoch']}")

    with pytest.raises(ZeroDivisionError, match="after epoch 5"):
        trainer.resume(epochs=1_000_000, on_epoch=stop)
    assert "epochs are saved" in repr(trainer)


def _history(trainer: mggcn.Trainer) -> list[dict[str, Any]]:
    import json

    assert trainer.run_folder is not None
    return [json.loads(line) for line in (trainer.run_folder / "history.jsonl").read_text().splitlines()]


def test_predict_keeps_the_order_of_the_graph() -> None:
    """Fails if scores leave in the order of the ranks: relabelling the vertices must relabel the scores alone."""
    a = arrays()
    order = np.random.default_rng(86).permutation(N)
    shuffled = {
        "features": a["features"][order],
        "labels": a["labels"][order],
        "splits": {k: v[order] for k, v in a["splits"].items()},
    }
    graphs = mggcn.load(a.pop("adj"), **a), mggcn.load(arrays()["adj"][order][:, order], **shuffled)
    scores = []
    for graph in graphs:
        trainer = mggcn.Trainer(graph, mggcn.GCN(8), ranks=2, transport="threads", threads=1, order="permute", seed=5)
        trainer.fit(epochs=4)
        scores.append(trainer.predict(weights="last"))
    np.testing.assert_allclose(scores[1], scores[0][order], rtol=1e-3, atol=1e-4)
    assert np.abs(scores[1] - scores[0]).max() > 0.1


def test_weights_and_scores() -> None:
    """Fails if best and last are mixed up, probabilities are none, or predicting disturbs the weights."""
    trainer = small(eval_every=1, lr=0.3)
    trainer.fit(epochs=12)
    best, last = trainer.state_dict(), trainer.state_dict("last")
    assert list(best) == ["layers.1.weight", "layers.1.bias", "layers.2.weight", "layers.2.bias"]
    assert not torch.equal(best["layers.1.weight"], last["layers.1.weight"])
    for name, state in (("best", best), ("last", last), ("best", best)):
        scores = trainer.predict(weights=name)
        assert scores.dtype == np.float32
        np.testing.assert_allclose(scores, trainer.scores_of(state), rtol=1e-5, atol=1e-6)
    chances = trainer.predict(probabilities=True)
    np.testing.assert_allclose(chances.sum(1), 1, rtol=1e-5)
    assert (chances.argmax(1) == trainer.predict().argmax(1)).all()
    assert trainer.scores_of(best, probabilities=True) == pytest.approx(chances, abs=1e-5)


def test_a_second_fit_starts_afresh(tmp_path: Path) -> None:
    """Fails if fit goes on from used weights, overwrites the first run, or keeps the first result."""
    trainer = small(out=tmp_path / "run")
    first = trainer.fit(epochs=3)
    assert trainer.run_folder == tmp_path / "run"
    assert losses(trainer.fit(epochs=5))[:3].tolist() == losses(first).tolist()
    assert trainer.run_folder != tmp_path / "run"
    assert trainer.result()["epochs"] == 5
    assert len((tmp_path / "run" / "history.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize("settings", [{}, {"ranks": 2, "transport": "threads"}])
def test_on_epoch_sees_every_row(settings: dict[str, Any]) -> None:
    """Fails if the callback misses an epoch, is called by every rank, or its error is lost or costs the fit before."""
    trainer = small(**settings)
    rows: list[dict[str, Any]] = []
    assert trainer.fit(epochs=4, on_epoch=rows.append) == rows
    result, scores = trainer.result(), trainer.predict()
    failing(trainer)
    assert trainer.result() == result
    np.testing.assert_array_equal(trainer.predict(), scores)
    assert len(trainer.fit(epochs=2)) == trainer.result()["epochs"] == 2
    with pytest.raises(ConfigError, match="on_epoch must be a function of a row, got int"):
        trainer.fit(epochs=4, on_epoch=cast("Any", 3))


def test_a_first_fit_that_fails_leaves_nothing() -> None:
    """Fails if weights of an epoch that raised pass for trained ones, or the next fit does not start."""
    trainer = small()
    failing(trainer)
    for action in (trainer.result, trainer.predict, trainer.state_dict):
        with pytest.raises(RunError, match=r"call fit\(\)"):
            action()
    assert len(trainer.fit(epochs=2)) == 2


def test_a_signal_keeps_what_it_saves() -> None:
    """Fails if the weights of a fit that SIGINT stopped give way to those of the fit before."""
    trainer = small()
    trainer.fit(epochs=2)
    before = trainer.state_dict("last")["layers.1.weight"]
    with pytest.raises(Interrupted):
        trainer.fit(epochs=50, on_epoch=lambda row: signal.raise_signal(signal.SIGINT) if row["epoch"] == 3 else None)
    assert not torch.equal(trainer.state_dict("last")["layers.1.weight"], before)
    assert trainer.predict().shape == (N, C)


def failing(trainer: mggcn.Trainer) -> None:
    with pytest.raises(ZeroDivisionError):
        trainer.fit(epochs=2, on_epoch=lambda row: 1 / 0)


@pytest.mark.parametrize("settings", [{}, {"ranks": 2, "transport": "threads"}])
def test_torch_is_left_as_it_was(settings: dict[str, Any]) -> None:
    """Fails if training, scoring or an error leaves gradients off or another number of threads behind."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        trainer = small(**settings)
        for action in (
            lambda: trainer.fit(epochs=2),
            trainer.predict,
            lambda: trainer.scores_of(trainer.state_dict()),
            lambda: failing(trainer),
        ):
            action()
            assert torch.is_grad_enabled()
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_temporary_folders_vanish_with_the_trainer(temporary: Path) -> None:
    """Fails if a folder outlives its trainer, or vanishes before it."""
    trainer = small()
    trainer.fit(epochs=1)
    trainer.predict()
    assert len(list(temporary.iterdir())) == 1
    del trainer
    gc.collect()
    assert list(temporary.iterdir()) == []


def test_errors_before_fit() -> None:
    """Fails if a trainer without weights answers, or a misspelt argument counts for another."""
    trainer = small()
    for action in (trainer.result, trainer.evaluate, trainer.predict, trainer.state_dict):
        with pytest.raises(RunError, match=r"call fit\(\)"):
            action()
    for method in (lambda w: trainer.evaluate("test", w), lambda w: trainer.predict(weights=w), trainer.state_dict):
        with pytest.raises(ConfigError, match="weights must be best or last, got 'bset'"):
            method("bset")
    with pytest.raises(ConfigError, match="split must be train, val or test"):
        trainer.evaluate("tset")
    with pytest.raises(ConfigError, match=r"train\.epochs must be 1 or more"):
        trainer.fit(epochs=0)


def test_settings_are_checked_when_they_are_given(tmp_path: Path) -> None:
    """Fails if an unknown setting is swallowed, or a plan that cannot run is found out only by fit."""
    with pytest.raises(ConfigError, match=r"unknown setting 'learning_rate'; known are .*bias, .*lr.*weight_decay"):
        small(learning_rate=1)
    with pytest.raises(
        ConfigError,
        match=r"model\.hiden; did you mean model\.hidden\?; known in \[model\] are kind, hidden",
    ):
        mggcn.GCN(hiden=(16,))
    with pytest.raises(ConfigError, match=r"model\.dropout must lie in"):
        mggcn.MLP(dropout=1.5)
    with pytest.raises(ConfigError, match="single has one rank"):
        small(ranks=2, transport="single")
    with pytest.raises(PlanError, match=r"needs .* may be used"):
        small(memory_limit=1 << 20)
    with pytest.raises(ConfigError, match="precision tf32 needs --device cuda"):
        small(precision="tf32")
    if not torch.cuda.is_available():
        with pytest.raises(BackendError, match=r"run.device cuda needs .* use --device cpu"):
            small(device="cuda", out=tmp_path / "run").fit(1)
    assert not (tmp_path / "run").exists()
    with pytest.raises(GraphError, match="there is no"):
        mggcn.Trainer(tmp_path / "nothing")
    with pytest.raises(GraphError, match="give it some"):
        mggcn.Trainer(mggcn.load(arrays()["adj"]))
    with pytest.raises(ConfigError, match=r"model must be mggcn.GCN\(...\), or SAGE.* got str"):
        mggcn.Trainer(arrays()["adj"], cast("Any", "gcn"))
    with pytest.raises(ConfigError, match=r"config must be a mggcn.Config, got dict"):
        small(config={})
    with pytest.raises(ConfigError, match=r"no argument feature; known are features, .*, name, verify"):
        mggcn.load(tmp_path, feature=1)
    with pytest.raises(ConfigError, match=r"no argument edge_weight; known are features, .*, name, ids$"):
        mggcn.load(arrays()["adj"], edge_weight=1)
    assert set(dir(mggcn)) > {"load", "Trainer", "GCN", "__version__", "__name__"}
    with pytest.raises(AttributeError, match="public are APPNP, GAT, GCN"):
        _ = mggcn.Trainor  # type: ignore[attr-defined]


def test_settings_reach_their_tables() -> None:
    """Fails if a setting lands in another table, or beats the model or the configuration that it should not touch."""
    config = Config(model=ModelConfig(hidden=(5,)), train=TrainConfig(lr=0.5, epochs=7), run=RunConfig(threads=1))
    trainer = small(config=config, epochs=3, row_normalize=True, precision="fp64", lr=0.25)
    assert trainer.config.model == mggcn.GCN(8, dropout=0.3)
    assert (trainer.config.train.lr, trainer.config.train.epochs, trainer.config.run.threads) == (0.25, 3, 1)
    assert trainer.config.data.row_normalize
    assert len(trainer.fit()) == 3
    assert trainer.predict().dtype == np.float64
    assert mggcn.GCN(16) == mggcn.GCN((16,)) == mggcn.GCN([16]) == ModelConfig(hidden=(16,))
    assert mggcn.MLP().kind == "mlp"


def test_graphs_without_val_or_test() -> None:
    """Fails if a missing split is scored as 0, or the last weights are not the best there are."""
    adj = pattern("random", 30, 3)
    graph: Graph = make_graph(adj, num_features=4, num_classes=2, seed=9)
    graph.splits.pop("val")
    trainer = mggcn.Trainer(graph, mggcn.GCN(4), threads=1)
    history = trainer.fit(epochs=2)
    assert history[-1]["val"] is None
    with pytest.raises(ConfigError, match="no test vertices"):
        trainer.evaluate("test")
    assert trainer.evaluate("train") == history[-1]["train"]
    assert torch.equal(trainer.state_dict()["layers.1.weight"], trainer.state_dict("last")["layers.1.weight"])


def test_weights_are_scored_on_a_graph_without_splits() -> None:
    """Fails if a graph that only needs scores must have splits, or the scores are others than with them."""
    whole = mggcn.load(arrays()["adj"], **{k: v for k, v in arrays().items() if k != "adj"})
    trainer = mggcn.Trainer(whole, mggcn.GCN(hidden=4), threads=1)
    trainer.fit(epochs=1)
    state = trainer.state_dict("last")
    bare = mggcn.Trainer(dataclasses.replace(whole, splits={}), mggcn.GCN(hidden=4), threads=1)
    np.testing.assert_array_equal(bare.scores_of(state), trainer.scores_of(state))
