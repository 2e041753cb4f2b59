"""Predictions in the forms that people use, for every task, from stores that hold them."""

from __future__ import annotations

import csv
import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mggcn
from mggcn.cli.entry import main
from mggcn.config import ModelConfig
from mggcn.errors import ConfigError
from mggcn.graph.generate import community
from mggcn.graph.ids import rows_of as rows_called
from mggcn.graph.store import open_store, write_store
from mggcn.runs import predict as predictions
from mggcn.runs import prediction_files
from mggcn.runs.predict import predict
from mggcn.runs.prediction_files import check_target, classes_of, probabilities_of, write_predictions

TASKS = ("classes", "labels", "numbers")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """A store and a short run of each task."""
    folder, found = tmp_path_factory.mktemp("tasks"), {}
    for task in TASKS:
        store, run = folder / task, folder / f"run-{task}"
        kinds = ["community", str(store), "--vertices", "120", "--edges", "600", "--features", "8", "--classes", "3"]
        assert main(["generate", *kinds, "--task", task]) == 0
        settings = ["--set", "train.epochs=3", "--set", "model.hidden=8", "--set", "run.threads=1", "--quiet"]
        assert main(["train", str(store), "--out", str(run), *settings]) == 0
        found[task] = store, run
    return found


@pytest.mark.parametrize("task", TASKS)
def test_stores_hold_every_task(runs: dict[str, tuple[Path, Path]], task: str, tmp_path: Path) -> None:
    """Fails if a store forgets its task, or a run's score, loss or number of columns is another task's."""
    store, run = runs[task]
    graph = open_store(store, verify=True)
    meta = json.loads((store / "meta.json").read_text())
    assert (graph.task, meta.get("task", "classes"), graph.num_classes) == (task, task, 1 if task == "numbers" else 3)
    assert 'loss = "auto"' not in (run / "config.toml").read_text()
    result = json.loads((run / "result.json").read_text())
    assert result["metric"] == {"classes": "accuracy", "labels": "micro_f1", "numbers": "rmse"}[task]
    write_store(mggcn.load(graph), tmp_path / "again")
    assert np.array_equal(open_store(tmp_path / "again").labels.array(), graph.labels.array(), equal_nan=True)  # type: ignore[union-attr]


@pytest.mark.parametrize("task", TASKS)
def test_forms_hold_the_same_scores(runs: dict[str, tuple[Path, Path]], task: str, tmp_path: Path) -> None:
    """Fails if a form loses digits, rows or their order, or classes are not those of the scores."""
    _, run = runs[task]
    scores = np.load(predict(run, tmp_path / "p.npy"))
    predict(run, tmp_path / "p.csv")
    header, *_ = (tmp_path / "p.csv").read_text().splitlines()
    table = np.loadtxt(tmp_path / "p.csv", delimiter=",", skiprows=1, ndmin=2)
    assert header.split(",") == ["vertex", *(f"score_{c}" for c in range(scores.shape[1]))]
    assert np.array_equal(table[:, 0], np.arange(120))
    assert np.array_equal(table[:, 1:].astype(scores.dtype), scores)
    if task == "numbers":
        with pytest.raises(ConfigError, match="neither classes nor probabilities"):
            predict(run, tmp_path / "c.csv", classes=True)
        return
    probabilities = np.load(predict(run, tmp_path / "q.npy", probabilities=True))
    expected = np.exp(scores) / np.exp(scores).sum(1, keepdims=True) if task == "classes" else 1 / (1 + np.exp(-scores))
    np.testing.assert_allclose(probabilities, expected, rtol=1e-5)
    chosen = scores.argmax(1) if task == "classes" else (scores > 0).astype(np.int8)
    assert np.array_equal(np.load(predict(run, tmp_path / "c.npy", classes=True)), chosen)
    predict(run, tmp_path / "c.csv", classes=True)
    listed = np.loadtxt(tmp_path / "c.csv", delimiter=",", skiprows=1, dtype=int)
    assert np.array_equal(listed[:, 1:].reshape(chosen.shape), chosen)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".csv", ".csv", ".npy", ".npy", ".npy"]


def test_parts_are_written_behind_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a table of more rows than are written at a time repeats its header or its numbers."""
    monkeypatch.setattr(prediction_files, "ROWS", 4)
    scores = np.random.default_rng(3).normal(size=(11, 2))
    np.save(tmp_path / "s.npy", scores)
    write_predictions(tmp_path / "s.npy", tmp_path / "s.csv", "classes", classes=False)
    table = np.loadtxt(tmp_path / "s.csv", delimiter=",", skiprows=1)
    assert np.array_equal(table, np.column_stack([np.arange(11), scores]))
    if importlib.util.find_spec("pyarrow"):
        import pyarrow.parquet

        write_predictions(tmp_path / "s.npy", tmp_path / "s.parquet", "classes", classes=True)
        read = pyarrow.parquet.read_table(tmp_path / "s.parquet").to_pydict()
        assert read == {"vertex": list(range(11)), "class": scores.argmax(1).tolist()}


@pytest.mark.parametrize("name", ["p.txt", "p", "p.npz", "missing/p.npy"])
def test_other_files_are_refused_before_anything_runs(name: str, tmp_path: Path) -> None:
    """Fails if a suffix that means no form is written as another one."""
    with pytest.raises(ConfigError, match="--out expects a file"):
        check_target(tmp_path / name)


def test_parquet_without_pyarrow_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a missing package shows only once everything has been computed."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs pyarrow"):
        check_target(tmp_path / "p.parquet")


def test_probabilities_of_labels_do_not_overflow() -> None:
    """Fails if large scores of a label warn or become NaN."""
    scores = np.array([[1e4, -1e4, 0.0]])
    assert probabilities_of(scores, "labels").tolist() == [[1.0, 0.0, 0.5]]
    assert classes_of(scores, "labels").tolist() == [[1, 0, 0]]


def test_python_has_the_same_forms() -> None:
    """Fails if Trainer.predict gives other classes than its scores, or another graph's are not of the run's task."""
    settings: dict[str, Any] = {"epochs": 3, "hidden": (8,), "threads": 1}
    for task in TASKS:
        graph = community(80, 300, 6, 3, seed=4, task=task)  # type: ignore[arg-type]
        trainer = mggcn.Trainer(graph, **settings)
        trainer.fit()
        scores, other = trainer.predict(), trainer.predict(graph=graph)
        np.testing.assert_allclose(scores, other, rtol=1e-5, atol=1e-6)
        if task == "numbers":
            with pytest.raises(ConfigError, match="numbers"):
                trainer.predict(classes=True)
        else:
            assert np.array_equal(trainer.predict(classes=True), classes_of(scores, graph.task))


LAYERED: dict[str, dict[str, Any]] = {
    "gcn": {"norm_layer": "batch", "dense_before": (5,)},
    "sage": {"aggregator": "mean", "residual": "linear", "self_loops": False},
    "gin": {"norm_layer": "layer"},
    "gat": {"heads": 2, "activation": "elu"},
    "mlp": {"dense_between": True},
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", LAYERED)
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_linear_head_on_the_layers_gives_the_scores(kind: str, ranks: int) -> None:
    """Fails if a layer is another's, is cut before its norm or activation, has dropout, or lacks a rank."""
    graph = community(60, 240, 7, 3, seed=8)
    settings: dict[str, Any] = {"kind": kind, "hidden": (8, 6), "jumping": "concat", "dropout": 0.5, **LAYERED[kind]}
    where = {"ranks": ranks, "transport": "threads" if ranks > 1 else "single", "precision": "fp64", "threads": 1}
    trainer = mggcn.Trainer(graph, ModelConfig(**settings), epochs=4, **where)
    trainer.fit()
    layers = [trainer.predict(layer=number) for number in (1, 2)]
    assert [layer.shape for layer in layers] == [(60, 8), (60, 6)]
    state = trainer.state_dict()
    last = max(int(name.split(".")[1]) for name in state)
    head, bias = (state[f"layers.{last}.{part}"].numpy() for part in ("weight", "bias"))
    np.testing.assert_allclose(np.hstack(layers) @ head + bias, trainer.predict(), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(trainer.predict(layer=2, graph=graph), layers[1], rtol=1e-10, atol=1e-12)


def test_layers_are_written_in_every_form(runs: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    """Fails if the command writes another layer than Python returns, or its columns pass for scores."""
    for task in TASKS:
        store, run = runs[task]
        assert main(["predict", str(run), "--layer", "1"]) == 0
        layer = np.load(run / "layer-1.npy")
        np.testing.assert_allclose(layer, mggcn.Trainer.from_run(run).predict(layer=1), rtol=1e-6)
        predict(run, tmp_path / "h.csv", layer=1, store=store)
        header, first, *_ = (tmp_path / "h.csv").read_text().splitlines()
        assert header == "vertex," + ",".join(f"feature_{n}" for n in range(8))
        assert np.array_equal(np.array(first.split(",")[1:], layer.dtype), layer[0])


def test_predictions_beside_each_other(
    runs: dict[str, tuple[Path, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if ranks score with weights of different epochs, or two predictions write into one file."""
    store, run = runs["classes"]
    several = tmp_path / "run"
    settings = ["--epochs", "3", "--ranks", "2", "--transport", "threads", "--set", "model.hidden=8", "--quiet"]
    assert main(["train", str(store), "--out", str(several), *settings]) == 0
    read: list[Path] = []
    weights_of, open_memmap = predictions.weights_of, np.lib.format.open_memmap
    monkeypatch.setattr(
        predictions, "weights_of", lambda folder, *a, **more: read.append(folder) or weights_of(folder, *a, **more)
    )
    predict(several)
    assert read == [several]
    written = []

    def first(path: Path, mode: str, *shape: Any) -> Any:
        written.append(path)
        if len(written) == 1:
            predict(run, tmp_path / "s.npy")  # another command comes first
        return open_memmap(path, mode, *shape)

    monkeypatch.setattr(np.lib.format, "open_memmap", first)
    predict(run, tmp_path / "s.npy")
    assert len(set(written)) == 2
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["s.npy"]


@pytest.mark.parametrize(
    ("layer", "more", "message"),
    [
        (0, {}, "from 1 to 1, got 0"),
        (2, {}, "from 1 to 1, got 2; without it the output layer is given"),
        ("1", {}, "from 1 to 1, got '1'"),
        (1.0, {}, "from 1 to 1, got 1.0"),
        (True, {}, "from 1 to 1, got True"),
        (1, {"classes": True}, "no classes; leave classes"),
    ],
)
def test_layers_that_are_not_there_are_refused(
    runs: dict[str, tuple[Path, Path]], layer: Any, more: dict[str, bool], message: str
) -> None:
    """Fails if a layer that the model lacks is found out by an error of the plan, or classes are made of embeddings."""
    with pytest.raises(ConfigError, match=message):
        predict(runs["classes"][1], layer=layer, **more)


def test_a_model_without_hidden_layers_has_no_embeddings() -> None:
    """Fails if the logits of sgc pass for a hidden layer."""
    trainer = mggcn.Trainer(community(60, 240, 7, 3, seed=8), mggcn.SGC(), epochs=1, threads=1)
    trainer.fit()
    with pytest.raises(ConfigError, match="this sgc has none"):
        trainer.predict(layer=1)


@pytest.mark.parametrize("ids", [[7, 11, 5], ["a,b", 'say "c"', "d"]], ids=["gaps", "strings"])
def test_tables_hold_the_ids_of_the_store(ids: list[Any], tmp_path: Path) -> None:
    """Fails if tables name vertices by rows where the store has names, or a comma in a name makes two columns."""
    edges = np.array([[ids[0], ids[1], ids[1], ids[2]], [ids[1], ids[0], ids[2], ids[1]]])
    graph = mggcn.load(edges, ids=ids, features=np.eye(3, dtype=np.float32), labels=[0, 1, 0], splits={"train": ids})
    mggcn.save(graph, tmp_path / "store")
    settings = ["--set", "train.epochs=1", "--set", "run.threads=1", "--quiet"]
    assert main(["train", str(tmp_path / "store"), "--out", str(tmp_path / "run"), *settings]) == 0
    scores = np.load(predict(tmp_path / "run", tmp_path / "s.npy"))
    predict(tmp_path / "run", tmp_path / "s.csv")
    with (tmp_path / "s.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["vertex"] for row in rows] == list(map(str, ids))
    assert np.array_equal(np.array([row["score_1"] for row in rows], scores.dtype), scores[:, 1])
    if importlib.util.find_spec("pyarrow"):
        import pyarrow.parquet

        predict(tmp_path / "run", tmp_path / "s.parquet", classes=True)
        read = pyarrow.parquet.read_table(tmp_path / "s.parquet").to_pydict()
        assert read == {"vertex": ids, "class": scores.argmax(1).tolist()}


def test_nothing_validated_is_not_called_best(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Fails if a run without validation vertices prints, or reports, scores of the best validation."""
    write_store(community(80, 300, 6, 3, seed=4, val=0.0), tmp_path / "store")
    settings = ["--set", "train.epochs=2", "--set", "run.threads=1"]
    assert main(["train", str(tmp_path / "store"), "--out", str(tmp_path / "run"), *settings]) == 0
    printed = capsys.readouterr().out
    assert "last epoch" in printed
    assert "best validation" not in printed


def test_tables_name_classes(tmp_path: Path) -> None:
    """Fails if a table calls a class by another's name, or loses the names of the run on another store."""
    graph = mggcn.load(community(60, 240, num_features=4, num_classes=3, seed=5), class_names=["a,b", "c", "é"])
    mggcn.save(graph, tmp_path / "s")
    settings = ["--set", "train.epochs=2", "--set", "model.hidden=4", "--set", "run.threads=1", "--quiet"]
    assert main(["train", str(tmp_path / "s"), "--out", str(tmp_path / "run"), *settings]) == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["class_names"] == ["a,b", "c", "é"]
    mggcn.save(dataclasses.replace(graph, class_names=()), tmp_path / "nameless")
    for store in (tmp_path / "s", tmp_path / "nameless"):
        scores = np.load(predict(tmp_path / "run", tmp_path / "p.npy", store=store))
        table = rows_of(predict(tmp_path / "run", tmp_path / "p.csv", store=store))
        assert table[0] == ["vertex", "score_a,b", "score_c", "score_é"]
        classes = rows_of(predict(tmp_path / "run", tmp_path / "c.csv", store=store, classes=True))
        assert classes[0] == ["vertex", "class", "class_name"]
        named = [(int(row[1]), row[2]) for row in classes[1:]]
        assert named == [(int(best), graph.class_names[best]) for best in scores.argmax(1)]
    layer = rows_of(predict(tmp_path / "run", tmp_path / "l.csv", layer=1))
    assert layer[0] == ["vertex", "feature_0", "feature_1", "feature_2", "feature_3"]


def test_parquet_names_classes(tmp_path: Path) -> None:
    """Fails if a Parquet table has no names, or those of other rows."""
    parquet = pytest.importorskip("pyarrow.parquet")
    np.save(tmp_path / "s.npy", np.array([[0.0, 1.0], [2.0, 0.0]]))
    write_predictions(tmp_path / "s.npy", tmp_path / "p.parquet", "classes", classes=True, class_names=["x", "y"])
    assert parquet.read_table(tmp_path / "p.parquet").to_pydict() == {
        "vertex": [0, 1],
        "class": [1, 0],
        "class_name": ["y", "x"],
    }
    write_predictions(tmp_path / "s.npy", tmp_path / "l.parquet", "labels", classes=True, class_names=["x", "y"])
    assert parquet.read_table(tmp_path / "l.parquet").column_names == ["vertex", "label_x", "label_y"]


def rows_of(path: Path) -> list[list[str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


def scored(run: Path, *more: object) -> np.ndarray:
    out = run.parent / "some.npy"
    assert main(["predict", str(run), "--out", str(out), *map(str, more)]) == 0
    return np.load(out)


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    """Some vertices are computed from their neighbourhood, which rounds otherwise than the whole graph."""
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_some_vertices_are_rows_of_all(runs: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    """Fails if other rows, another order, or all rows are written, or files of ids and masks mean something else."""
    _, run = runs["classes"]
    everything = scored(run)
    assert_close(scored(run, "--vertices", "7,0,7,119"), everything[[7, 0, 7, 119]])
    np.save(tmp_path / "ids.npy", np.array([3, 1], np.uint8))
    np.save(tmp_path / "mask.npy", np.arange(120) % 7 == 0)
    (tmp_path / "ids.txt").write_text("119\n2\n")
    assert_close(scored(run, "--vertices", tmp_path / "ids.npy"), everything[[3, 1]])
    assert_close(scored(run, "--vertices", tmp_path / "mask.npy"), everything[::7])
    assert_close(scored(run, "--vertices", tmp_path / "ids.txt"), everything[[119, 2]])
    assert np.array_equal(scored(run, "--vertices", "4", "--classes"), everything[[4]].argmax(1))
    assert scored(run, "--vertices", "4", "--layer", 1).shape == (1, 8)
    assert main(["predict", str(run), "--vertices", "5,6"]) == 0
    assert_close(np.load(run / "scores-selected.npy"), everything[[5, 6]])
    assert not (run / "scores.npy").exists()
    assert main(["predict", str(run), "--vertices", "5,6", "--out", str(tmp_path / "some.csv")]) == 0
    assert [row["vertex"] for row in csv.DictReader((tmp_path / "some.csv").read_text().splitlines())] == ["5", "6"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("120", "names 120, but no vertex has such an id; row numbers are 0 to 119"),
        ("-1", "names -1"),
        ("1,x", "expects row numbers, whole numbers"),
        ("", "expects row numbers, whole numbers"),
        ("1.5", "expects row numbers, whole numbers"),
        (str(2**70), "expects row numbers, whole numbers"),
        ("nothing.npy", "cannot be read: No such file"),
        ("/dev/zero.npy", "cannot be read"),
        ("{here}/text.npy", "holds no list of ids"),
        ("{here}/short.npy", "expects a list of row numbers"),
        ("{here}/floats.npy", "expects a list of row numbers"),
        ("{here}/empty.txt", "vertices names none; give one or more"),
        ("{here}/folder.txt", "cannot be read"),
    ],
)
def test_vertices_that_are_none_are_refused(
    runs: dict[str, tuple[Path, Path]], given: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if a wrong id is rounded, wraps around, is left out, or ends in a traceback, or something is computed first."""
    (tmp_path / "text.npy").write_text("1 2")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "folder.txt").mkdir()
    np.save(tmp_path / "short.npy", np.ones(119, np.bool_))
    np.save(tmp_path / "floats.npy", np.ones(3))
    before = sorted(tmp_path.iterdir())
    command = ["predict", str(runs["classes"][1]), f"--vertices={given.format(here=tmp_path)}"]
    assert main([*command, "--out", str(tmp_path / "out.npy")]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("names", [["b", "a", "01", "1"], [10, 7, -3, 2**62 + 1]])
def test_vertices_have_the_ids_of_the_store(names: list[Any], tmp_path: Path) -> None:
    """Fails if ids are taken for rows, lose leading zeros or digits, or Python knows others than the command."""
    edges = np.array([[0, 1, 2], [1, 2, 3]])
    graph = mggcn.load(
        np.array(names)[edges], ids=np.array(names), features=np.eye(4, dtype=np.float32), labels=np.array([0, 1, 0, 1]),
        splits={"train": np.array(names[:2])},
    )  # fmt: skip
    trainer = mggcn.Trainer(graph, mggcn.GCN(hidden=(4,)), threads=1)
    trainer.fit(epochs=2)
    everything = trainer.predict()
    for wanted in ([names[2]], [names[3], names[0]]):
        rows = [names.index(name) for name in wanted]
        assert_close(trainer.predict(vertices=wanted), everything[rows])
        assert np.array_equal(trainer.predict(vertices=np.array(wanted), classes=True), everything[rows].argmax(1))
        assert np.array_equal(rows_called(graph, [str(name) for name in wanted]), rows)
    with pytest.raises(ConfigError, match="but no vertex has such an id; ids of the graph are such as"):
        trainer.predict(vertices=["z"] if isinstance(names[0], str) else [0])
    other = mggcn.load(np.array([[0, 1]]).T, features=np.eye(4, dtype=np.float32)[:2])
    assert trainer.predict(graph=other, vertices=[1]).shape == (1, 2)
