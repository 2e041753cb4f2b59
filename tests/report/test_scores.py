"""mggcn/report/scores.py: which score stands first, and with how many decimals."""

import json
from pathlib import Path
from typing import Any

import pytest

from mggcn.report.run_folder import changed_settings, read_run
from mggcn.report.scores import class_names, headline, places
from tests.report.run_folders import write_run


@pytest.mark.parametrize(
    ("metric", "count", "decimals"),
    [("accuracy", 1000, 3), ("accuracy", 96, 2), ("accuracy", 7, 1), ("accuracy", 1, 1), ("macro_f1", 169_343, 4),
     ("accuracy", None, 4), ("rmse", 96, 4), ("r2", 10, 4)],
)  # fmt: skip
def test_decimals_follow_the_vertices(metric: str, count: int | None, decimals: int) -> None:
    """Fails if a score of a few vertices is shown with decimals that they cannot tell apart."""
    assert places(metric, count) == decimals


def changed(run: Path, **change: Any) -> str:
    """The headline of a run whose result has changed."""
    file = run / "result.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    return "".join(headline(read_run(run)))


def test_the_test_score_stands_first(tmp_path: Path) -> None:
    """Fails if another split or epoch is shown for the test score, or another split's decimals."""
    run = write_run(tmp_path / "run", epochs=3)
    best = {"epoch": 2, "train": 0.95, "val": 0.5, "test": 0.25}
    support = {"test": {"support": [40, 60]}, "val": {"support": [4, 6]}}
    text = changed(run, best=best, per_class=support)
    assert "<strong>0.25</strong> test accuracy, val 0.5, train 0.9500 at the best validation, epoch 2" in text
    assert "<strong>0.5000</strong> val accuracy" in changed(run, best=best | {"test": None}, per_class={})


def test_without_validation_the_last_epoch_counts(tmp_path: Path) -> None:
    """Fails if the score of weights that `predict` does not take is shown."""
    run = write_run(tmp_path / "run", epochs=3)
    best = {"epoch": 2, "train": 0.9, "val": None, "test": 0.7}
    text = changed(run, best=best, final={"train": 0.8, "val": None, "test": 0.6})
    assert "<strong>0.6000</strong> test accuracy, train 0.8000 after the last epoch" in text


def test_repeats_show_mean_and_deviation(tmp_path: Path) -> None:
    """Fails if a repeat passes for the mean of all."""
    run = write_run(tmp_path / "run", epochs=12, repeats=3)
    both = {"mean": {"best": {"test": 0.5, "val": 0.75}}, "std": {"best": {"test": 0.125, "val": 0.0}}}
    text = changed(run, **both)
    assert "<strong>0.5000</strong> test accuracy ± 0.1250, mean of 3 runs, val 0.7500" in text


def test_an_interrupted_run_has_no_headline(tmp_path: Path) -> None:
    """Fails if an unfinished run breaks the page."""
    assert list(headline(read_run(write_run(tmp_path / "run", epochs=3, finished=False)))) == []


@pytest.mark.parametrize("names", [["a", "b"], ["a"], None, "ab"])
def test_classes_have_the_graphs_names(tmp_path: Path, names: object) -> None:
    """Fails if names that do not fit the classes are shown."""
    run = write_run(tmp_path / "run", epochs=3)
    plan = json.loads((run / "plan.json").read_text())
    (run / "plan.json").write_text(json.dumps(plan | {"class_names": names}))
    assert class_names(read_run(run), 2) == (["a", "b"] if names == ["a", "b"] else ["0", "1"])


def test_settings_that_differ(tmp_path: Path) -> None:
    """Fails if a default, or what `auto` stands for, passes for a choice; or a choice for a default."""
    run = write_run(tmp_path / "run", epochs=60)
    text = (run / "config.toml").read_text().replace('metric = "auto"', 'metric = "accuracy"')
    (run / "config.toml").write_text(text.replace('transport = "auto"', 'transport = "single"'))
    assert changed_settings(read_run(run)) == {"model.hidden": [256, 256], "train.epochs": 60}
    (run / "config.toml").write_text(text.replace('metric = "accuracy"', 'metric = "macro_f1"'))
    assert changed_settings(read_run(run))["train.metric"] == "macro_f1"
