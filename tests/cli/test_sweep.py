"""A sweep's trials are the runs that they would be alone; what fails or is interrupted costs itself alone."""

from __future__ import annotations

import csv
import dataclasses
import importlib.util
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mggcn
from mggcn.api import sweeps
from mggcn.assemble import plan as assemble
from mggcn.assemble.plan import Group, groups_of
from mggcn.backend.cuda.driver import Gpu
from mggcn.comm.failure import Interrupted
from mggcn.config import Config, RunConfig, from_tables
from mggcn.config.files import from_toml, layered, to_toml
from mggcn.errors import ConfigError, RunError
from mggcn.graph.csr import ArrayRows, Graph
from mggcn.graph.store import open_store, write_store
from mggcn.planning.shared import Shared
from mggcn.runs import sweep as sweeping
from mggcn.runs.result import read_result
from mggcn.runs.sweep import Sweep, Trial, make_sweep, read_sweep, run_sweep
from mggcn.runs.sweep_space import Space, read_space, with_trial
from mggcn.runs.sweep_study import study_of
from mggcn.runs.sweep_worker import train_trial
from tests.cli.runs import finish, history, refused, run_main, same_tensors, saved_epochs, start
from tests.graphs import make_graph, pattern
from tests.planted import plant


def small() -> Graph:
    return make_graph(pattern("random", 43, 6), num_features=17, num_classes=4, seed=8)


def test_trials_are_runs_of_their_own(tmp_path: Path) -> None:
    """Fails if a trial is not the run that it is alone, or a failure ends the sweep."""
    grid = {"lr": [0.02, 1e30], "hidden": [[8], (6, 5)]}
    found = mggcn.sweep(small(), grid, mggcn.GCN(dropout=0.5), out=tmp_path / "sweep", at_once=1, epochs=4, threads=1)
    assert [row["state"] for row in found.rows] == ["done"] * 2 + ["failed"] * 2
    assert repr(found).split("\n")[0].split()[3:7] == ["val", "accuracy", "test", "accuracy"]
    assert all("lower train.lr" in row["reason"] for row in found.rows[2:])
    scores = [row["val"] for row in found.rows[:2]]
    assert scores == sorted(scores, reverse=True)
    assert found.best is not None
    assert found.best.scores["val"] == scores[0]
    assert (found.best_folder or tmp_path) / "result.json" in tmp_path.rglob("result.json")
    with (tmp_path / "sweep" / "sweep.csv").open() as file:
        assert [row["state"] for row in csv.DictReader(file)] == ["done"] * 2 + ["failed"] * 2
    for trial in found.trials:
        folder = tmp_path / "sweep" / "trials" / f"{trial.number:03d}"
        if trial.error:
            continue
        alone = tmp_path / f"alone-{trial.number}"
        mggcn.Trainer(small(), config=from_toml(folder / "config.toml"), out=alone).fit()
        assert history(folder) == history(alone)
        assert same_tensors(folder, alone)


@pytest.mark.full
def test_a_second_call_trains_what_is_left(tmp_path: Path) -> None:
    """Fails if a complete trial is trained again, a failed one is not, or another graph is taken for the sweep's."""
    write_store(small(), tmp_path / "store")
    grid = {"lr": [0.02, 0.03, 1e30]}
    found = mggcn.sweep(mggcn.load(tmp_path / "store"), grid, out=tmp_path / "sweep", at_once=1, epochs=4, threads=1)
    lost = next(trial.number for trial in found.trials if not trial.error)
    (tmp_path / "sweep" / "trials" / f"{lost:03d}" / "result.json").unlink()
    ended: list[int] = []
    again = run_sweep(tmp_path / "sweep", lambda trial: ended.append(trial.number))
    assert sorted(ended) == sorted([lost, *(trial.number for trial in found.trials if trial.error)])
    compared = ("trial", "val", "test", "epochs", "state", "reason")
    assert [[row[name] for name in compared] for row in again.rows] == [
        [row[name] for name in compared] for row in found.rows
    ]
    record = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    (tmp_path / "sweep" / "sweep.json").write_text(json.dumps(record | {"store": str(tmp_path / "other")}))
    other = make_graph(pattern("star", 43, 6), num_features=17, num_classes=4, seed=8)
    write_store(other, tmp_path / "other")
    with pytest.raises(RunError, match=r"has changed since the sweep in .* began; start a new sweep"):
        run_sweep(tmp_path / "sweep")


@pytest.mark.full
def test_an_interrupted_sweep_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if Ctrl-C loses an epoch of a running trial, or the sweep, continued, differs from one that was not."""
    write_store(small(), tmp_path / "store")
    grid = tmp_path / "grid.toml"
    grid.write_text("[model]\nhidden = [8]\n[train]\nepochs = 250\n[grid]\ntrain.lr = [0.02, 1e-6]\n")
    one = ["--at-once", 1, "--set", "train.checkpoint_every=5"]
    process = start("sweep", grid, tmp_path / "store", *one, "--out", tmp_path / "parts", module=("mggcn",))
    first = tmp_path / "parts" / "trials" / "001"
    while saved_epochs(first) < 5 and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert code == 130, err
    assert f"mggcn sweep --resume {tmp_path / 'parts'}" in out
    done = saved_epochs(first)
    assert len(history(first)) == done
    assert run_main("sweep", "--resume", tmp_path / "parts") == 0
    assert "best: " in capsys.readouterr().out
    assert run_main("sweep", grid, tmp_path / "store", *one, "--out", tmp_path / "whole", "--quiet") == 0
    for number in ("001", "002"):
        folders = [tmp_path / name / "trials" / number for name in ("parts", "whole")]
        assert history(folders[0]) == history(folders[1])


def test_a_process_that_dies_is_a_row(tmp_path: Path) -> None:
    """Fails if a killed process hangs the sweep, hides its last words, or takes later trials with it."""
    job = sweeping.Job(str(tmp_path), "", 1, Space({}))
    worker = sweeping.Worker(tmp_path, job, 1, Group(), 0)
    code = "import sys; sys.stdin.readline(); print('out of memory', file=sys.stderr); sys.exit(9)"
    worker._command = [sys.executable, "-S", "-c", code]
    trials = [Trial(number, {"train.lr": 0.1}) for number in (1, 2)]
    for trial in trials:
        worker.train(trial)
    assert [trial.error for trial in trials] == ["the process exited with code 9: out of memory"] * 2
    assert worker._process is None


def test_grids_and_draws(tmp_path: Path) -> None:
    """Fails if a form of TOML is not read, a point is missing, or a draw leaves its range or differs the next time."""
    file = tmp_path / "grid.toml"
    file.write_text(
        '[train]\nepochs = 7\n[grid]\ntrain.lr = [0.1, 0.2]\n"model.hidden" = ["16,16", [8], 4]\n'
        "[grid.run]\nranks = [1, 2]\n"
    )
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    space, base = read_file(file)
    settings = space.settings(base)
    assert base.train.epochs == 7
    assert len({json.dumps(s) for s in settings}) == len(settings) == 12
    assert [s["train.lr"] for s in settings[:2]] == [0.1, 0.2]
    file.write_text(
        "[sweep]\ntrials = 40\nseed = 3\n[grid]\ntrain.lr = {log = [1e-4, 1e-1]}\nmodel.dropout = {uniform = [0.2, 0.6]}\n"
        "train.optimizer = ['adam', 'sgd']\n"
    )
    space, base = read_file(file)
    drawn = space.settings(base)
    assert drawn == space.settings(base)
    assert len(drawn) == 40
    assert all(1e-4 <= s["train.lr"] <= 1e-1 and 0.2 <= s["model.dropout"] <= 0.6 for s in drawn)
    assert 10 < sum(s["train.lr"] < 10**-2.5 for s in drawn) < 30
    assert {s["train.optimizer"] for s in drawn} == {"adam", "sgd"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"a sweep needs a table \[grid\]"),
        ("[grid]\ntrain.lr = 0.1", r"train.lr expects a list of values, such as \[0.1, 0.01\], got 0.1"),
        ("[grid]\ntrain.lr = {log = [1, 2]}", r"the range of train.lr needs a number of draws: trials = 50"),
        ("[sweep]\ntrials = 3\n[grid]\ntrain.lr = {log = [0, 2]}", r"train.lr expects a list, \{uniform"),
        ("[sweep]\ntrials = 0\n[grid]\ntrain.lr = [1]", r"sweep.trials must lie in 1 \.\."),
        ("[sweep]\ntrials = 2.5\n[grid]\ntrain.lr = [1]", r"sweep.trials expects an integer, got 2.5"),
        ("[sweep]\nseed = true\n[grid]\ntrain.lr = [1]", r"sweep.seed expects an integer, got True"),
        ("[sweep]\nsearch = 1\n[grid]\ntrain.lr = [1]", r"sweep.search expects a word, got 1"),
        (
            "[sweep]\nsearch = 'tpr'\n[grid]\ntrain.lr = [1]",
            r"sweep.search must be one of grid, random, tpe, got 'tpr'",
        ),
        ("[sweep]\npruner = 'best'\n[grid]\ntrain.lr = [1]", r"sweep.pruner must be one of none, median, got 'best'"),
        ("[sweep]\nsearch = 'tpe'\n[grid]\ntrain.lr = [1]", r"the search tpe needs a number of trials"),
        ("[sweep]\nsearch = 'grid'\ntrials = 2\n[grid]\ntrain.lr = [1]", r"the search grid takes no number of trials"),
        ("[sweep]\nsearch = 'tpe'\ntrials = 9\n[grid]\nmodel.dropout = {uniform = [0, 2]}", r"dropout=2 is refused"),
        ("[sweep]\npruner = 'median'\n[train]\nrepeat = 2\n[grid]\ntrain.lr = [1]", r"leave train.repeat at 1"),
        ("[sweep]\nnumber = 3\n[grid]\ntrain.lr = [1]", r"unknown setting sweep.number; known in \[sweep\] are trials"),
        ("[grid]\ntrain.rate = [0.1]", r"unknown setting train.rate; .*known in \[train\] are"),
        ("[grid]\nmodel.dropout = [0.1, 1.5]", r"model.dropout must lie in \[0, 1\), got 1.5"),
        ("[grid]\ntrain.lr = [0.1", r"is not valid TOML"),
        ("[grid]\nlr = [0.1]", r"grid.toml, \[grid\]: expected table.key .*, got lr; did you mean train.lr\?"),
        ("[grid]\ntrian.lr = [0.1]", r"grid.toml, \[grid\]: expected table.key .*, got trian; did you mean train\?"),
        ("[grid]\ntrain.lr = [0.1, '1e-1']", r"train.lr lists 0.1 and '1e-1', which are equal; leave one of them out"),
        ("[grid]\nmodel.hidden = [16, [8], [16]]", r"model.hidden lists 16 and \[16\], which are equal"),
        ('[grid]\ntrain.lr = [1]\n"train.lr" = [2]', r"train.lr is varied twice; join the two lists"),
        ("[sweep]\ntrials = 3\n[grid]\ntrain.lr = {uniform = [0.1, 0.1]}", r"with low < high"),
        ("[grid]\ntrain.metric = ['rmse', 'r2']", r"trials are compared by train.metric; name one for all of them"),
        (
            "[grid]\nmodel.heads = [1, 2]\nmodel.kind = ['gcn', 'gat']",
            r"grid.toml, \[grid\]: the trial model.heads=2 model.kind=gcn is refused: model.heads belongs to",
        ),
        ("grid = 3", r"grid must be a table \[grid\], got 3"),
    ],
)
def test_what_no_trial_can_be_is_refused_at_once(tmp_path: Path, text: str, message: str) -> None:
    """Fails if a wrong setting costs a trial, or the message does not name it."""
    (tmp_path / "grid.toml").write_text(text)

    def settings() -> None:
        space, base = read_file(tmp_path / "grid.toml")
        space.settings(base)

    with pytest.raises(ConfigError, match=message):
        settings()


def read_file(path: Path) -> tuple[Space, Config]:
    """A sweep's file, and the settings that all trials have."""
    space, parts = read_space(path)
    return space, layered({path: parts}, [], {})


def untrained(folder: Path) -> Sweep:
    return read_sweep(folder)[0]


def test_no_point_is_drawn_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a finite space is drawn with replacement, or fewer points than trials are trained twice or in silence."""
    grid = {"train.lr": [0.1, 0.2, 0.3], "model.hidden": [16, 32]}
    for seed in range(20):
        drawn = Space(grid, 5, seed).settings(Config())
        assert len({repr(settings) for settings in drawn}) == len(drawn) == 5
    short = Space(grid, 7)
    assert sorted(map(repr, short.settings(Config()))) == sorted(map(repr, Space(grid).settings(Config())))
    message = "the grid has 6 points, fewer than 7 trials: each point is trained once"
    assert short.shortage == message
    assert not Space(grid, 6).shortage
    assert len(Space({"model.dropout": {"uniform": [0, 0.5]}, "model.hidden": [16]}, 9).settings(Config())) == 9
    monkeypatch.setattr(sweeps, "run_sweep", untrained)
    with pytest.warns(UserWarning, match="the grid has 1 point, fewer than 2 trials"):
        found = mggcn.sweep(small(), {"hidden": [8]}, trials=2, out=tmp_path / "sweep")
    assert len(found.rows) == 1


def numbers(mean: float = 0) -> Graph:
    graph = small()
    labels = np.random.default_rng(6180).normal(mean, size=(graph.num_vertices, 1)).astype(np.float32)
    return dataclasses.replace(graph, labels=ArrayRows(labels), num_classes=1)


def test_trials_are_compared_by_one_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if scores of different metrics are ranked, or the table does not say what it is ordered by."""
    out = tmp_path / "sweep"
    with pytest.raises(
        ConfigError, match=r"trials are compared by rmse and mae; name one for all of them: train.metric"
    ):
        mggcn.sweep(numbers(), {"loss": ["mse", "mae"]}, out=out)
    with pytest.raises(ConfigError, match=r"the trial train.loss=bce is refused: train.loss bce does not fit small"):
        mggcn.sweep(numbers(), {"loss": ["mse", "bce"]}, out=out)
    assert not out.exists()
    monkeypatch.setattr(sweeps, "run_sweep", untrained)
    found = mggcn.sweep(numbers(), {"loss": ["mse", "mae"]}, out=out, metric="mae")
    assert [row["metric"] for row in found.rows] == ["mae", "mae"]
    assert repr(found).split("\n")[0].split()[2:6] == ["val", "mae", "test", "mae"]


def test_commands_name_the_best_trial_of_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a sweep's folder, given in place of a run's, is called damaged."""
    trials = [Trial(1, {"train.lr": 0.1}, error="killed"), Trial(2, {"train.lr": 0.2})]
    sweeping._save(Sweep(tmp_path, trials, "accuracy"), {})
    expected = "is the folder of a sweep, expected that of a run; name one of its trials"
    assert f"{expected}: such as {tmp_path / 'trials' / '001'}" in refused(capsys, "predict", tmp_path)
    trials[1].result = {"metric": "accuracy", "best": {"val": 0.5, "test": None}}
    sweeping._save(Sweep(tmp_path, trials, "accuracy"), {})
    for command in ("predict",):
        assert f"{expected}: the best is {tmp_path / 'trials' / '002'}" in refused(capsys, command, tmp_path)


def test_what_varies_is_given_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a grid overrides --set, a flag or an argument in silence."""
    write_store(small(), tmp_path / "store")
    (tmp_path / "grid.toml").write_text("[grid]\ntrain.epochs = [1, 2]\nmodel.hidden = [8, 4]\n")
    command = ("sweep", tmp_path / "grid.toml", tmp_path / "store", "--out", tmp_path / "out")
    for name, given in (("model.hidden", ("--set", "model.hidden = 6")), ("train.epochs", ("--epochs", 3))):
        message = f"{name} is varied by the grid and given for all trials, too; leave one of them out"
        assert message in refused(capsys, *command, *given)
    with pytest.raises(ConfigError, match=r"train.lr is varied by the grid and given for all trials, too"):
        mggcn.sweep(small(), {"train.lr": [0.1]}, out=tmp_path / "out", lr=0.2)
    assert not (tmp_path / "out").exists()


def test_what_all_trials_have_may_need_what_varies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a batch is refused for want of the fan-outs that the grid has, a trial keeps the first ones, or the message
    is about the grid where it is not at fault."""
    write_store(small(), tmp_path / "store")
    file = tmp_path / "grid.toml"
    file.write_text('[model]\nhidden = [4]\n[sample]\nbatch = 7\n[grid]\nsample.fanout = ["4,3", "all,2"]\n')
    once = ("sweep", file, tmp_path / "store", "--epochs", 1, "--threads", 1, "--at-once", 1, "--quiet")
    assert run_main(*once, "--out", tmp_path / "file") == 0
    drawn = [from_toml(folder / "config.toml").sample for folder in sorted((tmp_path / "file" / "trials").iterdir())]
    assert [(sample.batch, sample.fanout) for sample in drawn] == [(7, (4, 3)), (7, (-1, 2))]
    assert run_main("sweep", "--resume", tmp_path / "file", "--quiet") == 0

    monkeypatch.setattr(sweeps, "run_sweep", untrained)
    found = mggcn.sweep(small(), {"fanout": [(4, 3), (2, 2)]}, mggcn.GCN(4), out=tmp_path / "python", batch=7)
    assert [trial.settings for trial in found.trials] == [{"sample.fanout": [4, 3]}, {"sample.fanout": [2, 2]}]

    file.write_text("[sample]\nbatch = 7\n[grid]\ntrain.lr = [0.1, 0.2]\n")
    out = ("sweep", file, tmp_path / "store", "--out", tmp_path / "refused")
    message = refused(capsys, *out)
    assert f"{file}: sample.batch is 7, and sample.fanout is not set" in message
    assert "the trial" not in message
    file.write_text("[sample]\nbatch = 7\n[grid]\nsample.fanout = [[0, 1], [2, 3]]\n")
    assert "[grid]: the trial sample.fanout=[0, 1] is refused: sample.fanout must be 1 or more" in refused(capsys, *out)
    assert not (tmp_path / "refused").exists()


def test_wrong_calls_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a call without a grid, or with two meanings, starts."""
    assert "needs GRID, a TOML file, and STORE" in refused(capsys, "sweep")
    for given in (["grid.toml"], ["--epochs", 500], ["--set", "model.hidden=8"], ["--at-once", 2]):
        assert "remove GRID, STORE, settings" in refused(capsys, "sweep", *given, "--resume", tmp_path)
    assert "is not the folder of a sweep" in refused(capsys, "sweep", "--resume", tmp_path)
    assert "cannot read the sweep" in refused(capsys, "sweep", tmp_path / "none.toml", tmp_path)
    with pytest.raises(ConfigError, match="unknown setting 'rate'"):
        mggcn.sweep(small(), {"rate": [1]}, out=tmp_path / "out")
    for grid in ([("lr", [1])], {1: [1]}):
        with pytest.raises(ConfigError, match="grid must be a dict of settings and their values"):
            mggcn.sweep(small(), grid, out=tmp_path / "out")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"train.lr is varied twice"):
        mggcn.sweep(small(), {"lr": [1], "train.lr": [2]}, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert Space({"train.lr": [1]}).settings(Config()) == [{"train.lr": 1}]


def test_every_trial_has_its_cores_or_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if trials at the same time share a core or a GPU, threads outnumber the cores of a group, or a trial
    that has several may not take fewer."""
    monkeypatch.setattr(assemble.os, "sched_getaffinity", lambda _pid: set(range(3, 11)))

    def groups(at_once: int = 0, **run: Any) -> tuple[list[Group], int]:
        found, config = groups_of(Config(run=RunConfig(**run)), at_once)
        return found, config.run.threads

    assert groups() == ([Group(cores=(k,)) for k in range(3, 11)], 1)
    assert groups(threads=4) == ([Group(cores=(3, 4, 5, 6)), Group(cores=(7, 8, 9, 10))], 4)
    assert groups(at_once=3) == ([Group(cores=(k, k + 1)) for k in (3, 5, 7)], 0)
    assert groups(ranks=2, transport="threads", at_once=2)[1] == 0
    assert groups(bind="off") == ([Group()] * 8, 1)
    monkeypatch.setattr(assemble, "visible_gpus", lambda: [Gpu("a", ""), Gpu("b", ""), Gpu("c", "")])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7")
    assert groups(device="cuda")[0] == [Group(gpus=(name,)) for name in "457"]
    assert groups(device="cuda", ranks=2, transport="nccl")[0] == [Group(gpus=("4", "5"))]


@pytest.mark.full
def test_grids_may_hold_numpys_numbers(tmp_path: Path) -> None:
    """Fails if np.linspace or an integer of an array ends in a traceback of the file that keeps the settings."""
    grid = {"lr": np.linspace(0.01, 0.02, 2), "hidden": [np.int64(4)]}
    found = mggcn.sweep(small(), grid, out=tmp_path / "sweep", at_once=1, epochs=2, threads=1)
    assert sorted((row["train.lr"], row["model.hidden"], row["state"]) for row in found.rows) == [
        (0.01, 4, "done"),
        (0.02, 4, "done"),
    ]


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a sweep of two trials, both complete, trained in this process."""
    root = tmp_path_factory.mktemp("complete")
    write_store(small(), root / "store")
    base = from_tables({"train": {"epochs": 2, "seed": 61}, "run": {"threads": 1}, "model": {"hidden": [4]}})
    graph = open_store(root / "store")
    found = make_sweep(Space({"train.lr": [0.02, 0.03]}), base, graph, root / "store", root / "sweep", 1)
    for trial in found.trials:
        train_trial(root / "sweep", trial.settings, trial.number, graph, root / "store", Shared(), 1)
    return root / "sweep"


@pytest.fixture
def sweep(complete: Path, tmp_path: Path) -> Path:
    shutil.copytree(complete, tmp_path / "sweep")
    return tmp_path / "sweep"


def edited(path: Path, change: Callable[[Any], Any]) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps(change(content) or content))


RESULTS: dict[str, Callable[[Path], object]] = {
    "empty object": lambda path: path.write_text("{}"),
    "no score": lambda path: edited(path, lambda result: result["best"].update(val="high")),
    "no seconds": lambda path: edited(path, lambda result: result.update(setup_seconds=[1])),
    "a list": lambda path: plant(path, "a list"),
    "deep": lambda path: plant(path, "deep"),
    "FIFO": lambda path: plant(path, "FIFO"),
    "device": lambda path: plant(path, "device"),
    "folder": lambda path: plant(path, "folder"),
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_damaged_trial_hides_no_other(sweep: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """Fails if the result of a trial that cannot be read ends in a traceback, hides the others or is trained over."""
    place = sweep / "trials" / "001" / "result.json"
    RESULTS[name](place)
    before = place.lstat().st_mtime_ns
    assert run_main("sweep", "--resume", sweep) == 2
    said = capsys.readouterr()
    assert said.err == ""
    rows = [line for line in said.out.splitlines() if line[:1].isdigit()]
    assert [" done" in row for row in rows] == [True, False]
    assert "trials/001/result.json is damaged: " in rows[1]
    assert place.lstat().st_mtime_ns == before
    shutil.rmtree(place) if name == "folder" else place.unlink()
    shutil.copy(sweep / "trials" / "002" / "result.json", place)
    assert run_main("sweep", "--resume", sweep) == 0


RECORDS: dict[str, tuple[Callable[[Any], object], str]] = {
    "unknown setting": (lambda c: [t.update(settings={"train.nope": 1}) for t in c["trials"]], "train.nope"),
    "one unknown": (lambda c: c["trials"][0].update(settings={"train.nope": 1}), "vary different settings"),
    "a number twice": (lambda c: c["trials"][1].update(number=1), "trial 1 occurs 2 times"),
    "a negative number": (lambda c: c["trials"][1].update(number=-1), "numbered from 1"),
    "a number with a path": (lambda c: c["trials"][1].update(number="../x"), "numbered from 1"),
    "no trials": (lambda c: c.update(trials=[]), "numbered from 1"),
    "settings as text": (lambda c: c["trials"][0].update(settings="lr"), "must have settings"),
    "seconds as text": (lambda c: c["trials"][0].update(seconds="long"), "must have settings"),
    "another search": (lambda c: c["space"].update(search="all"), "must be one of grid, random, tpe"),
    "trials as text": (lambda c: c["space"].update(trials="all"), "sweep.trials expects an integer"),
    "a list of candidates": (lambda c: c["space"].update(candidates=[1]), "candidates must be a table"),
    "candidates that are none": (
        lambda c: c["space"].update(candidates={"train.lr": {"log": [1]}}, search="tpe", trials=9),
        "train.lr expects a list",
    ),
    "another value": (lambda c: c["trials"][0]["settings"].update({"train.lr": 0.5}), "trained with 0.02"),
}


@pytest.mark.parametrize("name", RECORDS)
def test_an_edited_record_is_noticed(sweep: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """Fails if sweep.json shows a score beside settings that it was not trained with, or ends in a traceback."""
    change, message = RECORDS[name]
    edited(sweep / "sweep.json", lambda content: change(content) and None)
    assert run_main("sweep", "--resume", sweep) == 2
    said = capsys.readouterr()
    assert message in said.out + said.err
    assert said.err.count("\n") <= 1
    assert "Traceback" not in said.err


@pytest.mark.parametrize("damage", ["FIFO", "device", "folder", "deep", "a list", "not UTF-8", "huge"])
@pytest.mark.parametrize("name", ["sweep.json", "config.toml", "sweep.csv", "optuna.log"])
def test_every_file_of_a_sweep(sweep: Path, capsys: pytest.CaptureFixture[str], name: str, damage: str) -> None:
    """Fails if a sweep waits for one of its files, or ends in a traceback; `predict` names its best trial, if it can."""
    plant(sweep / name, damage)
    assert run_main("sweep", "--resume", sweep) == (0 if name == "sweep.csv" else 2)
    if name != "sweep.json":
        assert "is the folder of a sweep" in refused(capsys, "predict", sweep)


class Quick:
    """In place of a process: a trial's score follows from its settings, and trials end in any order."""

    template: Path

    def __init__(self, folder: Path, *_: object) -> None:
        self._folder = folder

    def train(self, trial: Trial) -> None:
        time.sleep(random.uniform(0, 0.003))
        target = self._folder / "trials" / f"{trial.number:03d}"
        shutil.copytree(self.template, target, dirs_exist_ok=True)
        base = from_toml(self._folder / "config.toml", saved=True)
        (target / "config.toml").write_text(to_toml(with_trial(base, trial.settings)))
        score = 1 - (trial.settings["model.dropout"] - 0.3) ** 2 - abs(trial.settings["model.hidden"][0] - 8) / 100
        edited(target / "result.json", lambda result: result["best"].update(val=score))
        trial.result, trial.error, trial.seconds = read_result(target), "", 0.0

    def stop(self) -> None: ...

    def end(self) -> None: ...


def test_a_seed_has_its_trials(complete: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if TPE learns nothing, or its trials depend on which one ends first, or on an interruption."""
    monkeypatch.setattr(Quick, "template", complete / "trials" / "001", raising=False)
    monkeypatch.setattr(sweeping, "Worker", Quick)
    store = complete.parent / "store"
    candidates = {"model.dropout": {"uniform": [0, 0.9]}, "model.hidden": [[4], [8], [16], [32]]}
    base, graph = from_toml(complete / "config.toml", saved=True), open_store(store)

    def made(name: str, seed: int = 31, at_once: int = 2) -> Path:
        space = Space(candidates, 24, seed, search="tpe")
        return make_sweep(space, base, graph, store, tmp_path / name, at_once).folder

    whole = run_sweep(made("whole"))
    tried = [trial.settings for trial in whole.trials]
    assert len(tried) == whole.planned == 24
    assert [trial.settings for trial in run_sweep(made("again")).trials] == tried
    assert [trial.settings for trial in run_sweep(made("other", seed=32)).trials] != tried

    def stop(trial: Trial) -> None:
        if trial.number == 13:
            raise KeyboardInterrupt

    folder = made("parts")
    with pytest.raises(Interrupted):
        run_sweep(folder, stop)
    assert len(read_sweep(folder)[0].trials) < 24
    (folder / "optuna.log.lock").symlink_to(folder / "optuna.log")  # what a killed process leaves
    assert [trial.settings for trial in run_sweep(folder).trials] == tried
    (folder / "optuna.log").unlink()
    run_sweep(folder)
    assert len(study_of(folder).trials) == 24
    best = [trial.scores["val"] or 0 for trial in whole.trials]
    assert np.mean(best[14:]) > np.mean(best[:10])


def test_a_trial_that_is_behind_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a hopeless trial is trained to its end, lost, ranked by half a score, or trained again."""
    write_store(numbers(mean=30), tmp_path / "store")  # which every rate but the last one learns
    (tmp_path / "grid.toml").write_text(
        "[model]\nhidden = [8]\n[train]\nepochs = 40\n[sweep]\npruner = 'median'\n"
        "[grid]\ntrain.lr = [0.05, 0.04, 0.03, 0.02, 0.01, 1e-7]\n"
    )
    command = ("sweep", tmp_path / "grid.toml", tmp_path / "store", "--at-once", 1, "--out", tmp_path / "sweep")
    assert run_main(*command) == 0
    said = capsys.readouterr().out
    assert "train.lr=1e-07: pruned: val 3" in said
    found = read_sweep(tmp_path / "sweep")[0]
    assert [row["state"] for row in found.rows] == ["done"] * 5 + ["pruned"]
    assert (found.rows[-1]["trial"], found.rows[-1]["val"]) == (6, None)
    folder = tmp_path / "sweep" / "trials" / "006"
    assert 4 <= len(history(folder)) == saved_epochs(folder) < 40
    trials = study_of(tmp_path / "sweep").trials
    assert [trial.state.name for trial in trials] == ["COMPLETE"] * 5 + ["PRUNED"]
    assert [[*trial.intermediate_values] for trial in trials] == [[*range(1, 10)]] * 5 + [[1]]
    assert run_main("sweep", "--resume", tmp_path / "sweep", "--quiet") == 0
    assert len(history(folder)) < 40
    assert run_main("train", "--resume", folder, "--quiet") == 0
    assert len(history(folder)) == 40


def test_optuna_is_an_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fails if mggcn loads Optuna for anything but a sweep, or a sweep without it does not say what to install."""
    modules = "mggcn.cli.entry, mggcn.api.trainer, mggcn.runs.sweep_worker, mggcn.report"
    code = f"import sys, {modules}; print('optuna' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "optuna" else find(name))
    write_store(small(), tmp_path / "store")
    (tmp_path / "grid.toml").write_text("[grid]\ntrain.lr = [1]\n")
    said = refused(capsys, "sweep", tmp_path / "grid.toml", tmp_path / "store", "--out", tmp_path / "out", code=1)
    assert 'a sweep needs Optuna: pip install "mggcn[sweep]"' in said
    assert not (tmp_path / "out").exists()


def test_a_sweep_of_an_earlier_version_goes_on(sweep: Path) -> None:
    """Fails if a record without its candidates cannot be read."""
    edited(sweep / "sweep.json", lambda content: content.pop("space") and None)
    (sweep / "trials" / "002" / "result.json").unlink()
    assert [trial.result is not None for trial in run_sweep(sweep).trials] == [True, True]
