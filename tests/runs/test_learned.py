"""Runs on learned rows: their checkpoints, on the same ranks and on others, what they predict with, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mggcn
from mggcn.errors import ConfigError
from mggcn.graph.csr import Graph
from mggcn.graph.generate import community
from mggcn.runs.folder import read_run
from mggcn.runs.predict import _chosen_weights
from mggcn.runs.weights import weights_in_place, weights_of, weights_of_run
from mggcn.train import checkpoint
from mggcn.train.checkpoint import load_tensors, map_tensors
from mggcn.train.learned import SavedRows
from tests.cli.runs import finish, refused, result, run_main, start

D = 6
SETTINGS = ["--threads", 1, "--seed", 4129, "--set", "model.hidden=8", "--features", f"learned:{D}", "--quiet"]
FP64 = [*SETTINGS, "--precision", "fp64"]
BATCHES = ["--batch", 8, "--fanout", "4,3"]


@pytest.fixture(scope="module")
def graph() -> Graph:
    """A community graph, of which nothing tells where a vertex is but its edges."""
    return dataclasses.replace(community(200, 1600, 5, 3, seed=71), features=None)


@pytest.fixture(scope="module")
def store(graph: Graph, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stores") / "community"
    mggcn.save(graph, folder)
    return folder


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "history.jsonl").read_text().splitlines()]


def ranks(number: int) -> list[object]:
    return ["--ranks", number, *(["--transport", "threads"] if number > 1 else [])]


@pytest.mark.parametrize("more", [[], BATCHES, [*BATCHES, "--set", "train.row_optimizer=adagrad"]], ids=str)
def test_a_run_goes_on_with_the_same_rows(store: Path, tmp_path: Path, more: list[object]) -> None:
    """Fails if a checkpoint lacks a row, a moment or the number of steps, so that a run that goes on has other bits."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert run_main("train", store, *SETTINGS, *more, *ranks(2), "--epochs", 6, "--out", whole) == 0
    assert run_main("train", store, *SETTINGS, *more, *ranks(2), "--epochs", 3, "--out", broken) == 0
    assert run_main("train", "--resume", broken, "--epochs", 6, "--quiet") == 0
    assert losses(broken) == losses(whole)
    one, other = weights_of_run(broken), weights_of_run(whole)
    assert one["embedding.weight"].shape == (200, D)
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.covering(1, rest="slow")
@pytest.mark.parametrize("after", [1, 2, 5])
@pytest.mark.parametrize("more", [[], BATCHES], ids=str)
def test_a_run_of_three_ranks_goes_on_with_others(store: Path, tmp_path: Path, after: int, more: list[object]) -> None:
    """Fails if rows or moments are not regrouped by vertex, or the losses differ by more than rounding."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert run_main("train", store, *FP64, *more, *ranks(1), "--epochs", 7, "--out", whole) == 0
    assert run_main("train", store, *FP64, *more, *ranks(3), "--epochs", 3, "--out", broken) == 0
    assert run_main("train", "--resume", broken, "--ranks", after, "--epochs", 7, "--quiet") == 0
    np.testing.assert_allclose(losses(broken), losses(whole), rtol=1e-8)
    assert result(broken)["best"]["epoch"] == result(whole)["best"]["epoch"]
    one, other = (weights_of_run(folder)["embedding.weight"] for folder in (broken, whole))
    np.testing.assert_allclose(one, other, atol=1e-7)


@pytest.mark.parametrize("more", [[], BATCHES], ids=str)
def test_predictions_read_the_best_rows(store: Path, graph: Graph, tmp_path: Path, more: list[object]) -> None:
    """Fails if predict scores with the last rows, those of another vertex, or fails of some vertices, layers or blocks."""
    run = tmp_path / "run"
    assert run_main("train", store, *FP64, *more, *ranks(2), "--epochs", 8, "--out", run) == 0
    assert run_main("predict", run) == 0
    scores = np.load(run / "scores.npy")
    labels, best = graph.labels.array(), result(run)["best"]  # type: ignore[union-attr]  # it has some
    for split in ("train", "val", "test"):
        mask = graph.splits[split].array()[0]
        assert (scores[mask].argmax(1) == labels[mask]).mean() == pytest.approx(best[split])
    assert run_main("predict", run, "--vertices", "17,3,150", "--out", tmp_path / "some.npy") == 0
    np.testing.assert_allclose(np.load(tmp_path / "some.npy"), scores[[17, 3, 150]], atol=1e-10)
    assert run_main("predict", run, "--layer", 1, "--out", tmp_path / "layer.npy") == 0
    assert np.load(tmp_path / "layer.npy").shape == (200, 8)
    assert run_main("predict", run, "--weights", "last", "--out", tmp_path / "last.npy") == 0
    last = weights_of_run(run) if best["epoch"] == 8 else None
    assert (last is None) == (not np.allclose(np.load(tmp_path / "last.npy"), scores, atol=1e-12))


def test_scores_of_some_vertices_read_their_rows_alone(
    store: Path, graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if scores of a vertex read rows beyond its neighbourhood, or a checkpoint's rows come as a copy of all."""
    run, read, take = tmp_path / "run", list[Any](), SavedRows.take
    assert run_main("train", store, *FP64, *ranks(3), "--epochs", 2, "--out", run) == 0
    scores = mggcn.Trainer.from_run(run).predict()

    def noted(self: SavedRows, ids: Any) -> Any:
        read.append(ids.copy())
        return take(self, ids)

    monkeypatch.setattr(SavedRows, "take", noted)
    monkeypatch.setattr("mggcn.train.learned.all_rows", None)
    near = {17}
    for _ in range(2):
        near |= {
            int(u) for v in near for u in graph.adj_t.indices.array()[slice(*graph.adj_t.indptr.array()[v : v + 2])]
        }
    assert run_main("predict", run, "--vertices", "17", "--out", tmp_path / "some.npy") == 0
    np.testing.assert_allclose(np.load(tmp_path / "some.npy"), scores[[17]], atol=1e-10)
    np.testing.assert_allclose(mggcn.Trainer.from_run(run).predict(vertices=[17]), scores[[17]], atol=1e-10)
    assert [set(ids.tolist()) for ids in read] == [near, near]
    assert len(near) < graph.num_vertices
    (part,) = run.glob("checkpoints/*/rank-1.safetensors")
    tensors = map_tensors(part)
    assert str(part) in Path("/proc/self/maps").read_text()
    assert "rows.weight" in tensors


def test_saved_rows_are_those_of_all_vertices(store: Path, tmp_path: Path) -> None:
    """Fails if a row of a checkpoint's parts is read as another vertex's, or of other epochs."""
    run = tmp_path / "run"
    assert run_main("train", store, *FP64, *ranks(3), "--epochs", 5, "--out", run) == 0
    config = read_run(run)[0]
    for weights in ("best", "last"):
        whole = weights_of(run, config, weights)["embedding.weight"].numpy()
        state, rows = weights_in_place(run, config, weights)
        assert rows is not None
        assert "embedding.weight" not in state
        assert rows.shape == whole.shape == (200, D)
        np.testing.assert_array_equal(rows.array(), whole)
        np.testing.assert_array_equal(rows.take(np.array([150, 3, 3, 199])), whole[[150, 3, 3, 199]])


def test_other_graphs_have_no_rows(
    store: Path, graph: Graph, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if rows of one graph's vertices score, or start, those of another."""
    run, other = tmp_path / "run", tmp_path / "other"
    mggcn.save(dataclasses.replace(community(200, 1600, 5, 3, seed=72), features=None), other)
    mggcn.save(dataclasses.replace(community(150, 900, 5, 3, seed=72), features=None), tmp_path / "smaller")
    assert run_main("train", store, *SETTINGS, "--epochs", 2, "--out", run) == 0
    assert "its vertices have none" in refused(capsys, "predict", run, "--store", other)
    said = refused(
        capsys, "train", tmp_path / "smaller", *SETTINGS, "--epochs", 1, "--start-from", run, "--out", tmp_path / "new"
    )
    assert "of learned rows on the same graph" in said
    trainer = mggcn.Trainer.from_run(run)
    with pytest.raises(ConfigError, match="its vertices have none"):
        trainer.predict(graph=mggcn.load(other))
    np.testing.assert_array_equal(trainer.predict(graph=mggcn.load(store)), trainer.predict())


def test_a_run_starts_from_the_rows_of_another(store: Path, tmp_path: Path) -> None:
    """Fails if learned rows are left out of what a run begins with."""
    first, second = tmp_path / "first", tmp_path / "second"
    assert run_main("train", store, *FP64, *ranks(2), "--epochs", 6, "--out", first) == 0
    again = ["--start-from", first, "--epochs", 1, "--set", "train.lr=0"]
    assert run_main("train", store, *FP64, *ranks(3), *again, "--out", second) == 0
    one, other = weights_of_run(first), weights_of_run(second)
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("batches", [{}, {"batch": 8, "fanout": (4, 3)}], ids=str)
def test_a_trainer_learns_rows(graph: Graph, number: int, batches: dict[str, Any]) -> None:
    """Fails if Python trains, scores, saves or exports otherwise than the command does."""
    settings: dict[str, Any] = {"threads": 1, "precision": "fp64", "epochs": 8, "seed": 17, "lr": 0.03, **batches}
    transport = {"transport": "threads"} if number > 1 else {}
    trainer = mggcn.Trainer(graph, mggcn.GCN(hidden=8), ranks=number, inputs=f"learned:{D}", **settings, **transport)
    rows = trainer.fit()
    assert rows[-1]["loss"] < 0.9 * rows[0]["loss"]
    state = trainer.state_dict()
    assert next(iter(state)) == "embedding.weight"
    assert state["embedding.weight"].shape == (200, D)
    scores = trainer.predict()
    mask = graph.splits["test"].array()[0]
    labels = graph.labels.array()  # type: ignore[union-attr]  # it has some
    assert (scores[mask].argmax(1) == labels[mask]).mean() == pytest.approx(trainer.evaluate("test"))
    np.testing.assert_allclose(trainer.predict(vertices=[5, 90]), scores[[5, 90]], atol=1e-10)
    np.testing.assert_allclose(trainer.scores_of(state), scores, atol=1e-12)
    with pytest.raises(ConfigError, match=r"embedding\.weight"):
        trainer.scores_of({name: w for name, w in state.items() if name != "embedding.weight"})
    loaded = torch.nn.Embedding.from_pretrained(state["embedding.weight"])
    assert torch.equal(loaded(torch.tensor([3])), state["embedding.weight"][3:4])


def test_rows_take_the_place_of_features(tmp_path: Path) -> None:
    """Fails if a graph's features are read, or have to be there, where rows are learned."""
    graph = community(200, 1600, 5, 3, seed=71)
    settings: dict[str, Any] = {"threads": 1, "epochs": 3, "seed": 17, "inputs": f"learned:{D}"}
    found = [
        mggcn.Trainer(one, mggcn.GCN(hidden=8), **settings).fit()
        for one in (graph, dataclasses.replace(graph, features=None))
    ]
    assert [row["loss"] for row in found[0]] == [row["loss"] for row in found[1]]


def test_links_of_a_graph_without_features(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if embeddings of links cannot be learned from rows alone, or pairs are scored with others."""
    source, store, run = tmp_path / "source", tmp_path / "store", tmp_path / "run"
    mggcn.save(dataclasses.replace(community(150, 1500, 4, 3, seed=5), features=None), source)
    assert run_main("prepare", source, store, "--links", "0.8,0.1,0.1") == 0
    settings = [*FP64, "--set", "links.embedding=8", "--epochs", 12, "--set", "train.lr=0.05"]
    assert run_main("train", store, *settings, "--batch", 200, "--fanout", "5,5", *ranks(2), "--out", run) == 0
    assert losses(run)[-1] < losses(run)[0]
    np.save(tmp_path / "pairs.npy", np.array([[0, 1], [4, 9]]))
    assert run_main("predict", run, "--pairs", tmp_path / "pairs.npy") == 0
    assert np.load(run / "pairs.npy").shape == (2,)
    assert run_main("predict", run) == 0
    assert np.load(run / "scores.npy").shape == (150, 8)


def test_processes_exchange_rows_over_gloo(store: Path, tmp_path: Path) -> None:
    """Fails if ranks that are processes train other rows than ranks that are threads."""
    threads, gloo = tmp_path / "threads", tmp_path / "gloo"
    assert run_main("train", store, *FP64, *BATCHES, *ranks(2), "--epochs", 3, "--out", threads) == 0
    code, _, err = finish(start("train", store, *FP64, *BATCHES, "--ranks", 2, "--epochs", 3, "--out", gloo))
    assert code == 0, err
    np.testing.assert_allclose(losses(gloo), losses(threads), rtol=1e-9)
    code, _, err = finish(start("predict", gloo, "--out", tmp_path / "scores.npy"))
    assert code == 0, err
    assert run_main("predict", threads) == 0
    np.testing.assert_allclose(np.load(tmp_path / "scores.npy"), np.load(threads / "scores.npy"), atol=1e-8)


def test_the_command_plans_learned_rows(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a plan of a store, or of a bare shape, does not say what learned rows take and send."""
    assert run_main("plan", store, "--features", "learned:12", *BATCHES, "--ranks", 2, "--set", "model.hidden=8") == 0
    text = capsys.readouterr().out
    assert "12 learned numbers for each vertex" in text
    assert "learned rows, beside themselves" in text
    assert "12 features (learned)" in text
    shape = ["--vertices", "1M", "--edges", "9M", "--classes", 9]
    assert run_main("plan", *shape, "--features", "learned:64", "--json") in (0, 2)
    assert json.loads(capsys.readouterr().out)["graph"]["num_features"] == 64
    assert run_main("plan", *shape, "--features", 32, "--json") in (0, 2)
    assert json.loads(capsys.readouterr().out)["graph"]["num_features"] == 32


def test_auto_chooses_among_what_rows_allow(store: Path, tmp_path: Path) -> None:
    """Fails if auto tries a strategy that cuts vertices, or leaves learned rows without one."""
    run = tmp_path / "run"
    auto = [*ranks(2), "--strategy", "auto", "--order", "auto"]
    assert run_main("train", store, *SETTINGS, *auto, "--epochs", 1, "--out", run) == 0
    assert mggcn.Trainer.from_run(run).config.run.strategy in ("broadcast", "halo", "slice")


def test_a_module_of_ones_own_has_its_own_rows(graph: Graph) -> None:
    """Fails if a setting that a user's module would not read is taken."""
    with pytest.raises(ConfigError, match=r"data\.inputs"):
        mggcn.Trainer(graph, torch.nn.Linear(3, 3), inputs="learned:4")


def test_rank_processes_map_one_file_of_rows(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if each rank that predicts reads the rows and moments of all ranks, or the file has others, or stays."""
    run, file = tmp_path / "run", tmp_path / "rows.npy"
    assert run_main("train", store, *SETTINGS, *BATCHES, *ranks(2), "--epochs", 2, "--out", run) == 0
    config, expected, read = read_run(run)[0], weights_of_run(run), list[str]()
    assert torch.equal(weights_of(run, config, file=file)["embedding.weight"], expected["embedding.weight"])

    def noted(path: Path) -> dict[str, torch.Tensor]:
        read.append(path.stem)
        return load_tensors(path)

    monkeypatch.setattr(checkpoint, "load_tensors", noted)
    chosen = _chosen_weights(run, config, {"rows": str(file), "weights": "best", "seed": None})
    assert all(torch.equal(chosen[name], tensor) for name, tensor in expected.items())
    assert "weights" in read
    assert not any(name.startswith("rank-") for name in read)
    before = sorted(path.name for path in run.iterdir())
    assert run_main("predict", run) == 0
    assert sorted(path.name for path in run.iterdir()) == sorted([*before, "scores.npy"])
