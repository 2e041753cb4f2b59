"""Predictions of runs whose values lie on disk: written as they are computed, with the bits of runs in memory."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mggcn
from mggcn.api import scoring as api
from mggcn.assemble.plan import plan_graph
from mggcn.config.files import with_named
from mggcn.errors import PlanError, RunError
from mggcn.graph.store import open_store
from mggcn.memory.units import human
from mggcn.planning import disk as planning
from mggcn.planning.run import RunPlan
from mggcn.runs import predict as predicting
from mggcn.runs import prediction_files
from mggcn.runs import score as scoring
from mggcn.runs.folder import known_plan, read_run
from mggcn.runs.partial import identity_of, partial_prediction
from mggcn.runs.predict import predict
from mggcn.train.pages import PageFile
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


KILLED = """
import os, signal, sys
from pathlib import Path

from mggcn.planning import disk
from mggcn.runs.predict import predict
from mggcn.train.pages import PageFile

disk.WINDOW_BYTES, moved, move, last = 1, [0], PageFile._move, int(sys.argv[3])

def counted(self, ticket, tensor):
    moved[0] += 1
    if moved[0] == last:
        os.kill(os.getpid(), signal.SIGKILL)
    return move(self, ticket, tensor)

PageFile._move = counted
predict(Path(sys.argv[1]), Path(sys.argv[2]))
print(moved[0])
"""
"""Predicts; ends with SIGKILL at a request of its page file. Prints how many there were otherwise."""


def predicted(run: Path, out: Path, last: int) -> int:
    """Requests of a prediction that may be killed at one; 0 if it was."""
    command = [sys.executable, "-c", KILLED, str(run), str(out), str(last)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == -signal.SIGKILL:
        return 0
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_killed_prediction_goes_on(ranks: int, tmp_path: Path) -> None:
    """Fails if a prediction that was killed at any moment has other bits, begins anew, or leaves a file behind."""
    _, disk = pair_of_runs(tmp_path, ranks)
    before = set(tmp_path.iterdir())
    requests = predicted(disk, tmp_path / "whole.npy", 0)
    whole, draw = (tmp_path / "whole.npy").read_bytes(), random.Random(4133)
    assert set(tmp_path.iterdir()) == before | {tmp_path / "whole.npy"}
    for last in [requests, draw.randrange(1, requests)]:
        assert predicted(disk, tmp_path / "p.npy", last) == 0
        assert not (tmp_path / "p.npy").exists()
        # Killed once more, wherever that is in what is left.
        again = predicted(disk, tmp_path / "p.npy", draw.randrange(1, requests)) or predicted(
            disk, tmp_path / "p.npy", 0
        )
        assert again <= requests
        if last == requests and ranks == 1:
            assert again < requests // 2
        assert (tmp_path / "p.npy").read_bytes() == whole
        (tmp_path / "p.npy").unlink()
        assert set(tmp_path.iterdir()) == before | {tmp_path / "whole.npy"}


def test_a_prediction_of_other_weights_begins_anew(tmp_path: Path) -> None:
    """Fails if values of other weights are gone on with, or files are removed that no prediction wrote."""
    _, disk = pair_of_runs(tmp_path, 1)
    requests = predicted(disk, tmp_path / "whole.npy", 0)
    assert predicted(disk, tmp_path / "p.npy", requests) == 0
    stages = tmp_path / "p.npy.partial" / "stages-0.json"
    found = json.loads(stages.read_text())
    assert found["stages"] > 0
    stages.write_text(json.dumps(found | {"identity": "another"}))
    assert predicted(disk, tmp_path / "p.npy", 0) == requests
    assert (tmp_path / "p.npy").read_bytes() == (tmp_path / "whole.npy").read_bytes()
    (tmp_path / "p.npy.partial").mkdir()
    (tmp_path / "p.npy.partial" / "mine.txt").write_text("mine")
    with pytest.raises(RunError, match=r"holds mine.txt, which no prediction wrote; move it"):
        predict(disk, tmp_path / "p.npy")
    assert (tmp_path / "p.npy.partial" / "mine.txt").exists()


def test_one_prediction_at_a_time(tmp_path: Path) -> None:
    """Fails if two predictions write one page file."""
    _, disk = pair_of_runs(tmp_path, 1)
    with (
        partial_prediction(tmp_path / "p.npy"),
        pytest.raises(RunError, match="another prediction is at work"),
    ):
        predict(disk, tmp_path / "p.npy")
    assert not (tmp_path / "p.npy.partial").exists()


def test_what_a_page_file_depends_on(tmp_path: Path) -> None:
    """Fails if other weights, settings, graphs or places have the same identity."""
    graph, config = store_of(tmp_path), with_named(config_of(2), {"capacity": "disk"})
    plans = plan_graph(config, graph)[0].ranks
    state = {"w": torch.arange(4.0)}
    ways = [
        identity_of(plans[0], "a", "b", state),
        identity_of(plans[1], "a", "b", state),
        identity_of(plans[0], "c", "b", state),
        identity_of(plans[0], "a", "c", state),
        identity_of(plans[0], "a", "b", {"w": torch.arange(1.0, 5.0)}),
        identity_of(plan_graph(with_named(config, {"ranks": 1}), graph)[0].ranks[0], "a", "b", state),
    ]
    assert len(set(ways)) == len(ways)
    assert identity_of(plan_graph(config, graph)[0].ranks[0], "a", "b", state) == ways[0]


def test_less_memory_than_planned_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Fails if scores are computed in another way than was planned, which begins anew after a kill, and nothing says so."""
    memory, disk = pair_of_runs(tmp_path, 1)
    whole = np.load(predict(memory, tmp_path / "m.npy"))
    assert not caplog.messages
    config = with_named(read_run(disk)[0], {"prune": "off"})
    need = known_plan(disk, config, open_store(tmp_path / "store"))[0].largest.scoring_bytes
    monkeypatch.setattr(scoring, "limit_of", lambda config: need - 1)
    # Narrower panels, or windows, have the same bits.
    assert np.array_equal(np.load(predict(disk, tmp_path / "n.npy")), whole)
    assert not caplog.messages

    def nothing_less(*_: Any) -> RunPlan:
        raise PlanError("nothing less would do")

    monkeypatch.setattr(predicting, "plan_again", nothing_less)
    found = np.load(predict(disk, tmp_path / "d.npy"))
    np.testing.assert_allclose(found, whole, rtol=0, atol=1e-5 * np.abs(whole).max())
    (said,) = caplog.messages
    assert said.startswith(
        f"scores of all vertices, with rows on disk, need {human(need)} a rank, and {human(need - 1)} "
    )
    assert said.endswith(
        "may be used: they are computed by blocks, layer by layer, and begin anew if they are interrupted"
    )
    assert not list(tmp_path.glob("*d.npy.*"))


@pytest.mark.parametrize(
    ("ranks", "transport"), [(1, "single"), (2, "threads"), pytest.param(2, "gloo", marks=pytest.mark.full)]
)
def test_python_has_rows_where_the_run_has_them(
    ranks: int, transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if rows on disk lie in the system's temporary folder, which may be in memory, or anything is left behind."""
    graph = store_of(tmp_path)
    config = with_named(config_of(ranks), {"capacity": "disk", "transport": transport})
    run = trained(graph, config, tmp_path / "run")
    whole = np.load(predict(run, tmp_path / "p.npy"))
    places, opened = list[Path](), PageFile.__init__

    def watched(self: PageFile, folder: Path, *rest: Any) -> None:
        places.append(folder)
        opened(self, folder, *rest)

    monkeypatch.setattr(PageFile, "__init__", watched)
    before = set(run.iterdir())
    np.testing.assert_array_equal(mggcn.Trainer.from_run(run).predict(), whole)
    assert set(run.iterdir()) == before
    if transport != "gloo":
        assert set(places) == {run}
    monkeypatch.setattr(api, "in_memory", lambda folder: folder == run)
    with pytest.raises(RunError, match=r"rows on disk would lie in .*run, where files are in memory; .*run.scratch"):
        mggcn.Trainer.from_run(run).predict()
    (tmp_path / "fast").mkdir()
    (run / "config.toml").write_text(
        (run / "config.toml").read_text().replace('scratch = ""', f'scratch = "{tmp_path / "fast"}"')
    )
    places.clear()
    np.testing.assert_array_equal(mggcn.Trainer.from_run(run).predict(), whole)
    if transport != "gloo":
        assert set(places) == {tmp_path / "fast"}
    assert not list((tmp_path / "fast").iterdir())
