"""Predictions of runs whose values lie on disk: written as they are computed, with the bits of runs in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mggcn.config.files import with_named
from mggcn.errors import RunError
from mggcn.planning import disk as planning
from mggcn.runs import predict as predicting
from mggcn.runs import prediction_files
from mggcn.runs.predict import predict
from mggcn.train.trainer import RankTrainer
from tests.runs.small import config_of, store_of, trained

FORMS: dict[str, dict[str, Any]] = {
    "scores": {},
    "probabilities": {"probabilities": True},
    "classes": {"classes": True},
    "layer": {"layer": 1},
    "vertices": {"vertices": [7, 299, 0]},
}
VERTICES = 300


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of 64 rows, however much memory there is."""
    monkeypatch.setattr(planning, "WINDOW_BYTES", 1)


def pair_of_runs(folder: Path, ranks: int, **run: Any) -> tuple[Path, Path]:
    """Runs of the same weights in memory and from disk."""
    graph, config = store_of(folder), config_of(ranks, **run)
    disk = with_named(config, {"capacity": "disk", "scratch": str(folder)})
    return trained(graph, config, folder / "memory"), trained(graph, disk, folder / "disk")


@pytest.mark.parametrize(
    ("ranks", "run"),
    [
        (1, {}),
        (1, {"order": "permute"}),
        (2, {"order": "random", "strategy": "halo"}),
        (3, {"order": "permute", "precision": "bf16"}),
        (2, {"strategy": "delayed"}),
    ],
)
def test_every_form_has_the_bits_of_a_run_in_memory(
    ranks: int, run: dict[str, Any], tmp_path: Path, narrow: None
) -> None:
    """Fails if a window's scores land at another vertex, are those of another rank, or have other bits."""
    memory, disk = pair_of_runs(tmp_path, ranks, **run)
    for form, wanted in FORMS.items():
        whole = np.load(predict(memory, tmp_path / "m.npy", **wanted))
        found = np.load(predict(disk, tmp_path / "d.npy", **wanted))
        assert found.dtype == whole.dtype
        np.testing.assert_array_equal(found, whole, err_msg=form)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_memory_never_holds_all_scores(tmp_path: Path, narrow: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a prediction from disk makes an array of all scores, or one of all classes."""
    _, disk = pair_of_runs(tmp_path, 1)
    largest = list[int]()
    probabilities_of = prediction_files.probabilities_of

    def watched(scores: Any, task: Any) -> Any:
        largest.append(len(scores))
        return probabilities_of(scores, task)

    def refused(self: RankTrainer) -> Any:
        raise AssertionError("all scores were asked for")

    monkeypatch.setattr(predicting, "probabilities_of", watched)
    monkeypatch.setattr(RankTrainer, "scores", refused)
    monkeypatch.setattr(RankTrainer, "logits", refused)
    predict(disk, tmp_path / "p.npy", probabilities=True)
    assert sum(largest) == VERTICES
    assert max(largest) == 64
    classes_of, chosen = prediction_files.classes_of, list[int]()

    def watched_classes(scores: Any, task: Any) -> Any:
        chosen.append(len(scores))
        return classes_of(scores, task)

    monkeypatch.setattr(prediction_files, "ROWS", 64)
    monkeypatch.setattr(prediction_files, "classes_of", watched_classes)
    assert np.load(predict(disk, tmp_path / "c.npy", classes=True)).shape == (VERTICES,)
    assert (sum(chosen), max(chosen)) == (VERTICES, 64)


def test_a_full_disk_is_one_line_before_anything_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a file without its space is mapped: where the disk is full a store to it ends the process."""
    _, disk = pair_of_runs(tmp_path, 1)

    def full(descriptor: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(predicting, "reserve", full)
    with pytest.raises(RunError, match="No space left on device; choose another --out"):
        predict(disk, tmp_path / "p.npy")
    assert not list(tmp_path.glob("*p.npy*"))
