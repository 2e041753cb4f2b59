"""Runs on batches, from their folders: interrupted and resumed, repeated, extended, predicted, and damaged under way."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mggcn
from mggcn.feed.batch import Batch
from mggcn.feed.sampled import SampledFeed
from mggcn.graph.generate import community as generate
from mggcn.graph.links import split_links
from mggcn.graph.store import open_store
from mggcn.planning import block_evaluation
from tests.cli.runs import history, refused, run_main, same_tensors

SETTINGS = ["--batch", "7", "--fanout", "4,3", "--epochs", "3", "--threads", "1"]
SETTINGS += ["--set", "model.hidden=8", "--set", "model.dropout=0.4", "--quiet"]


@pytest.fixture(scope="module")
def community(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("stores") / "community"
    assert run_main("generate", "community", store, "--vertices", 300, "--edges", 1500, "--seed", 71) == 0
    return store


def as_batches_are_drawn(monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[], object]) -> None:
    """Call `act` in the thread of the feed that draws the batch of a step of the run."""
    drawn, left = SampledFeed._drawn, [act]

    def watched(self: SampledFeed, step: Any, seeds: Any) -> Batch | None:
        if step.number == number and left:
            left.pop()()
        return drawn(self, step, seeds)

    monkeypatch.setattr(SampledFeed, "_drawn", watched)


def interrupt() -> None:
    """Press Ctrl-C, and hold the batch back while the main thread, which looks after ranks now and then, hears of it."""
    signal.raise_signal(signal.SIGINT)
    time.sleep(0.3)


def without_counts(folder: Path) -> list[dict[str, Any]]:
    """The history without the rows that an epoch read, which a run that goes on within one counts from there."""
    return [
        {key: value for key, value in row.items() if not key.startswith(("rows_", "drawn_", "edges_"))}
        for row in history(folder)
    ]


MORE: dict[str, list[str]] = {
    "gcn": [],
    "two threads of ranks": ["--ranks", "2", "--transport", "threads"],
    "parts": ["--set", "sample.plan=run"],
    "batch norm": ["--set", "model.norm_layer=batch", "--precision", "bf16"],
    "in turn": ["--set", "sample.ahead=0", "--set", "sample.draw=labor"],
    "links": ["--batch", "20", "--set", "links.embedding=4", "--set", "links.decoder=3"],
    "rows from owners": [
        "--ranks",
        "2",
        "--transport",
        "threads",
        "--set",
        "sample.rows=owners",
        "--set",
        "sample.macro=2",
    ],
    "edges from owners": ["--ranks", "2", "--transport", "threads", "--set", "sample.rows=parts"],
    "features where they are stored": ["--set", "model.kind=sage", "--set", "model.hidden=70"],  # wider than features
}


@pytest.mark.parametrize("name", MORE)
def test_an_interrupted_run_goes_on_within_an_epoch(
    name: str, community: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if Ctrl-C while a thread draws loses steps, repeats one, or the rest of the run differs by a bit."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    if name == "links":
        community = tmp_path / "links"
        mggcn.save(split_links(generate(60, 300, 4, 2, seed=1), (0.8, 0.1, 0.1)), community)
    command = ["train", community, *SETTINGS, *MORE[name]]
    assert run_main(*command, "--out", whole) == 0
    with monkeypatch.context() as patched:
        # Drawn ahead at the earliest in the first step of an epoch, so that no run stops between two epochs.
        as_batches_are_drawn(patched, 7, interrupt)
        assert run_main(*command, "--out", parts) == 130
    progress = json.loads(next((parts / "checkpoints").glob("*/progress.json")).read_text())
    assert 0 < progress["step"] < progress["steps"]
    trainer = mggcn.Trainer.from_run(parts, open_store(community))
    assert f"{progress['step']} steps are saved" in repr(trainer)
    reads = "the first sums read features where they are stored" in str(trainer.plan)
    assert reads == (name == "features where they are stored")
    assert run_main("train", "--resume", parts, "--quiet") == 0
    assert without_counts(parts) == without_counts(whole)
    assert same_tensors(parts, whole)


def test_an_extended_run_is_one_that_never_stopped(community: Path, tmp_path: Path) -> None:
    """Fails if the batches of later epochs depend on where a run began."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run_main("train", community, *SETTINGS, "--out", whole) == 0
    assert run_main("train", community, *SETTINGS, "--epochs", 1, "--out", parts) == 0
    assert run_main("train", "--resume", parts, "--epochs", 3, "--quiet") == 0
    assert history(parts) == history(whole)
    assert same_tensors(parts, whole)


def test_repeats_read_other_batches(
    community: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if a repeat reads the batches of another, or commands that read a run do not know one of batches."""
    run, seen = tmp_path / "run", dict[tuple[int, int], list[int]]()
    drawn = SampledFeed._drawn

    def noted(self: SampledFeed, step: Any, seeds: Any) -> Batch | None:
        seen[step.seed, step.number] = seeds.tolist()
        return drawn(self, step, seeds)

    monkeypatch.setattr(SampledFeed, "_drawn", noted)
    assert run_main("train", community, *SETTINGS, "--repeat", 2, "--timeline", "--out", run) == 0
    seeds = sorted({seed for seed, _ in seen})
    assert seeds == [1, 2]
    assert all(seen[1, step] != seen[2, step] for step in range(5))
    read = sorted(vertex for step in range(5) for vertex in seen[1, step])
    assert read == np.flatnonzero(open_store(community).splits["train"].array()[0]).tolist()
    for command in ("status", "report", "predict"):
        capsys.readouterr()
        assert run_main(command, run) == 0
        said = capsys.readouterr().out
        assert said
        assert "step 0" not in said


@pytest.mark.slow
def test_sweeps_over_fan_outs_and_batches(community: Path, tmp_path: Path) -> None:
    """Fails if a list of fan-outs, or a batch, cannot be tried, or two trials read the same batches."""
    grid = {"fanout": [(4, 3), (2, 2)], "batch": [7, 15]}
    found = mggcn.sweep(
        open_store(community), grid, mggcn.GCN(8), out=tmp_path / "sweep", at_once=1, epochs=2, threads=1
    )
    assert [row["state"] for row in found.rows] == ["done"] * 4
    assert len({history(folder)[-1]["loss"] for folder in (tmp_path / "sweep" / "trials").iterdir()}) == 4
    file = tmp_path / "grid.toml"
    settings = "[model]\nhidden = [8]\n[sample]\nbatch = 7\nfanout = [3, 3]\n[train]\nepochs = 2\n"
    file.write_text(settings + '[grid]\nsample.fanout = ["4,3", "all,2"]\n')
    assert run_main("sweep", file, community, "--out", tmp_path / "file", "--quiet") == 0


def test_sampled_scores_of_a_sweep_are_marked(
    community: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if a table, its page or the answer in JSON shows sampled scores as exact, or exact ones as sampled."""
    file, out = tmp_path / "grid.toml", tmp_path / "sweep"
    settings = "[model]\nhidden = [4]\n[sample]\nbatch = 50\nfanout = [3, 3]\n[train]\nepochs = 1\n[run]\nthreads = 1\n"
    file.write_text(settings + '[grid]\ntrain.evaluate = ["sampled", "blocks"]\n')
    assert run_main("sweep", file, community, "--at-once", 1, "--out", out) == 0
    said = capsys.readouterr().out
    (line,) = [line for line in said.splitlines() if line.startswith("scores of")]
    assert line == "scores of trial 1 are SAMPLED over 20 in-neighbours a row: for a comparison, and not exact"
    assert [line.partition(": ")[0] for line in said.splitlines() if "(SAMPLED)" in line] == [
        "[1/2] train.evaluate=sampled"
    ]
    assert run_main("report", out) == 0
    page = next(out.rglob("index.html")).read_text()
    assert "Scores of trial 1 are SAMPLED over 20" in page
    capsys.readouterr()
    assert run_main("sweep", "--resume", out, "--json") == 0
    trials = json.loads(capsys.readouterr().out)["trials"]
    assert {trial["trial"]: trial["evaluated_fanout"] for trial in trials} == {1: 20, 2: None}
    assert run_main("status", out) == 0
    assert [line.endswith("scores are SAMPLED") for line in capsys.readouterr().out.splitlines()] == [True, False]


def test_batches_from_python(community: Path, tmp_path: Path) -> None:
    """Fails if Trainer trains other batches than the command, or evaluates, predicts or resumes otherwise."""
    graph = open_store(community)
    settings: dict[str, Any] = {"batch": 7, "fanout": (4, 3), "threads": 1, "seed": 1}
    trainer = mggcn.Trainer(graph, mggcn.GCN(8, dropout=0.4), out=tmp_path / "run", epochs=3, **settings)
    rows = trainer.fit()
    assert run_main("train", community, *SETTINGS, "--out", tmp_path / "command") == 0
    assert [row["loss"] for row in rows] == [row["loss"] for row in history(tmp_path / "command")]
    scores = trainer.predict()
    assert scores.shape == (300, graph.num_classes)
    opened = mggcn.Trainer.from_run(tmp_path / "run", graph)
    np.testing.assert_array_equal(opened.predict(), scores)
    assert opened.evaluate("val") == trainer.evaluate("val")
    more = opened.resume(epochs=5)
    assert [row["loss"] for row in more[:3]] == [row["loss"] for row in rows]
    assert len(more) == 5


def test_a_store_that_is_damaged_while_it_is_read_ends_the_run(
    community: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if a column that is no vertex is read, a thread's error is lost or a traceback, or the checkpoint goes."""
    store, run = tmp_path / "store", tmp_path / "run"
    shutil.copytree(community, store)
    indices = np.load(store / "indices.npy", mmap_mode="r+")

    def damage() -> None:
        indices[:] = 2**30
        indices.flush()

    as_batches_are_drawn(monkeypatch, 6, damage)
    said = refused(
        capsys,
        "train",
        store,
        *SETTINGS,
        "--set",
        "train.checkpoint_every=1",
        "--set",
        "train.eval_every=0",
        "--out",
        run,
    )
    assert "column ids must lie in [0, 300), one is 1073741824; the matrix is damaged" in said
    progress = json.loads(next((run / "checkpoints").glob("*/progress.json")).read_text())
    assert progress["epoch"] == 1
    assert len(history(run)) == 1


def test_a_thread_of_the_feed_that_fails_ends_all_ranks(
    community: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if the other rank waits for one whose thread ran out of memory."""

    def fail() -> None:
        raise MemoryError("planted")

    as_batches_are_drawn(monkeypatch, 6, fail)
    command = ["train", community, *SETTINGS, "--ranks", "2", "--transport", "threads", "--out", tmp_path / "run"]
    assert "memory" in refused(capsys, *command, code=1)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_evaluation_by_blocks_gives_the_same_run(ranks: int, community: Path, tmp_path: Path) -> None:
    """Fails if training depends on how scores are computed, or scores and predictions differ beyond rounding."""
    found = {}
    for how in ("whole", "blocks"):
        run = tmp_path / how
        settings = [*SETTINGS, "--ranks", str(ranks), "--set", f"train.evaluate={how}"]
        assert run_main("train", community, *settings, "--out", run) == 0
        assert run_main("predict", run) == 0
        found[how] = np.load(run / "scores.npy")
    assert same_tensors(tmp_path / "whole", tmp_path / "blocks")
    rows, others = (history(tmp_path / how) for how in found)
    assert [row["val"] for row in rows] == pytest.approx([row["val"] for row in others])
    np.testing.assert_allclose(found["blocks"], found["whole"], atol=1e-5 * np.abs(found["whole"]).max())


def test_evaluation_by_blocks_needs_batches(
    community: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if the setting is ignored, or a folder is written before it is refused."""
    run = tmp_path / "run"
    assert run_main("train", community, "--set", "train.evaluate=blocks", "--out", run) == 2
    assert "set sample.batch, such as 1024, or leave train.evaluate out" in capsys.readouterr().err
    assert not run.exists()


def test_sampled_scores_are_marked(
    community: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if sampled scores pass for exact ones, differ after an interruption, or predictions are sampled, too."""
    monkeypatch.setattr(block_evaluation, "EVALUATED_FANOUT", 2)
    given = [*(word for word in SETTINGS if word != "--quiet"), "--set", "train.evaluate=sampled"]
    assert run_main("train", community, *given, "--epochs", "4", "--out", tmp_path / "run") == 0
    assert "and so are scores, which are SAMPLED over 20 in-neighbours a row" in capsys.readouterr().out
    rows = history(tmp_path / "run")
    assert {row["evaluated_fanout"] for row in rows} == {20}
    assert json.loads((tmp_path / "run" / "result.json").read_text())["evaluated_fanout"] == 20
    assert run_main("report", tmp_path / "run") == 0
    assert "Scores are SAMPLED" in (tmp_path / "run" / "report" / "index.html").read_text()
    assert run_main("status", tmp_path / "run") == 0
    assert "scores are SAMPLED" in capsys.readouterr().out

    assert run_main("train", community, *given, "--epochs", "2", "--out", tmp_path / "half") == 0
    assert run_main("train", "--resume", tmp_path / "half", "--epochs", "4") == 0
    scores = [[row[name] for name in ("loss", "train", "val", "test")] for row in rows]
    assert [[row[name] for name in ("loss", "train", "val", "test")] for row in history(tmp_path / "half")] == scores
    found = {}
    for how in ("sampled", "blocks"):
        once = ["--epochs", "4", "--set", "train.eval_every=0", "--set", f"train.evaluate={how}"]
        assert run_main("train", community, *SETTINGS, *once, "--out", tmp_path / how) == 0
        last = history(tmp_path / how)[-1]
        found[how] = (
            [last[name] for name in ("train", "val", "test")],
            mggcn.Trainer.from_run(tmp_path / how, open_store(community)).predict(),
        )
    assert found["sampled"][0] != found["blocks"][0]
    np.testing.assert_array_equal(found["sampled"][1], found["blocks"][1])
