"""The epoch loop: bytes as planned, equal losses for any P, equal bits on repetition and after an interruption."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mggcn.api.load import load_source
from mggcn.assemble.plan import plan_graph, resolve
from mggcn.assemble.rank import Rank, make_rank
from mggcn.backend.cpu.backend import CpuBackend
from mggcn.comm.base import Communicator
from mggcn.comm.single import SingleCommunicator
from mggcn.comm.threads import run_threads
from mggcn.config import Config, ModelConfig, RunConfig, TrainConfig
from mggcn.graph.csr import Graph
from mggcn.train import loop
from mggcn.train.engine import Stop
from mggcn.train.log import RunLog
from mggcn.train.trainer import RankTrainer
from tests.cli.runs import saved_epochs
from tests.graphs import make_graph, on_ranks, pattern

SEED = 31337


def config_of(ranks: int = 1, train: dict[str, Any] | None = None, precision: str = "fp32", **model: Any) -> Config:
    return Config(
        model=ModelConfig(**({"hidden": (8,), "dropout": 0.5} | model)),
        train=TrainConfig(**({"seed": SEED, "epochs": 8} | (train or {}))),
        run=RunConfig(ranks=ranks, threads=1, transport="threads" if ranks > 1 else "single", precision=precision),  # type: ignore[arg-type]
    )


def small(kind: str = "directed", sparse: bool = False, features: int = 40, classes: int = 3, seed: int = 8) -> Graph:
    return make_graph(pattern(kind, 43, 6), num_features=features, num_classes=classes, sparse=sparse, seed=seed)


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_arena_is_as_planned(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the device memory of a rank differs from its plan by a byte, or a view leaves the arena."""
    allocated: list[int] = []
    original = CpuBackend.allocate

    def allocate(self: CpuBackend, nbytes: int) -> torch.Tensor:
        allocated.append(nbytes)
        return original(self, nbytes)

    monkeypatch.setattr(CpuBackend, "allocate", allocate)

    def body(rank: Rank) -> tuple[int, int, int]:
        for bound in rank.trainer.runtime.programs.values():
            program, views = bound.program, bound.views
            starts = {v.data_ptr() - program.arena[n].offset for n, v in views.items() if v.numel()}
            assert len(starts) <= 1
            assert all(program.arena[n].end <= rank.plan.arena_bytes for n in views)
        dense = rank.trainer.runtime.inputs.owned.dense
        assert dense is not None
        return rank.plan.arena_bytes, rank.plan.regions["features"], rank.plan.gradient_bytes

    plans = on_ranks(config_of(ranks), small(), body)
    expected = [n for arena, features, weights in plans for n in (arena, features, weights, weights)]
    for nbytes in expected:
        allocated.remove(nbytes)
    # What is left: signals, clock, counts and the history of the losses.
    assert sum(allocated) < 2048 * ranks


def losses(graph: Graph, config: Config) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    """Losses of all epochs, final weights and scores; the same on every rank."""

    def body(rank: Rank) -> Any:
        found = [rank.trainer.step(epoch) for epoch in range(config.train.epochs)]
        return found, rank.trainer.runtime.weights.state_dict(), rank.trainer.evaluate()

    first, *others = on_ranks(config, graph, body)
    for other in others:
        assert other[0] == first[0]
        assert other[2] == first[2]
        assert all(torch.equal(other[1][n], w) for n, w in first[1].items())
    return first  # type: ignore[no-any-return]


@pytest.mark.parametrize("features", ["auto", "dense"])
def test_rank_counts_agree_on_cora(data_root: Path, features: str) -> None:
    """Fails if the loss depends on P by more than rounding, with dropout, over 20 epochs in float32."""
    graph = load_source(data_root / "cora")
    train = {"epochs": 20, "lr": 0.01, "weight_decay": 5e-4, "weight_decay_on": "first"}
    curves = []
    for ranks in (1, 2, 4):
        config = config_of(ranks, train, hidden=(16,), input_dropout=0.5 if features == "auto" else 0.0)
        config = dataclasses.replace(config, run=dataclasses.replace(config.run, features=features))  # type: ignore[arg-type]
        curves.append(losses(graph, config)[0])
    for other in curves[1:]:
        np.testing.assert_allclose(other, curves[0], rtol=1e-5)
    assert curves[0][-1] < 0.95 * curves[0][0]


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_configuration_repeats_bit_for_bit(ranks: int) -> None:
    """Fails if anything depends on time, on thread scheduling or on memory that was not written."""
    for sparse, threads in ((False, 1), (True, 2)):
        config = config_of(ranks, hidden=(16, 9), precision="fp32")
        config = dataclasses.replace(config, run=dataclasses.replace(config.run, threads=threads))
        one, other = (losses(small(sparse=sparse), config) for _ in range(2))
        assert one[0] == other[0]
        assert all(torch.equal(one[1][n], other[1][n]) for n in one[1])


def test_threads_do_not_change_our_kernels() -> None:
    """Fails if the loss of a step depends on the number of threads by more than torch's products might."""
    curves = []
    for threads in (1, 2):
        config = config_of(1, hidden=(16, 9))
        config = dataclasses.replace(config, run=dataclasses.replace(config.run, threads=threads))
        curves.append(losses(small(), config)[0])
    np.testing.assert_allclose(curves[0], curves[1], rtol=1e-6)


def fit(
    config: Config, graph: Graph, folder: Path | None, stop_after: int | None = None
) -> tuple[bool, dict[str, torch.Tensor], list[dict[str, Any]], dict[str, Any] | None]:
    """Fit on all ranks; `stop_after` lines of history a signal comes. Returns what rank 0 knows."""
    config = resolve(config, graph)
    plan, owners = plan_graph(config, graph)

    def body(comm: Communicator) -> Any:
        stop = Stop()
        rank = make_rank(config, graph, plan, owners, comm, stop)
        main = folder if comm.rank == 0 else None
        log = RunLog(main, True, config.train.epochs)
        seen = 0

        def on_epoch(_row: dict[str, Any]) -> None:
            nonlocal seen
            seen += 1
            # Only one rank gets the signal: all must stop after the same epoch.
            if seen == stop_after and comm.rank == comm.size - 1:
                stop.signal = 15

        done = rank.trainer.fit(log, folder, on_epoch)
        weights = rank.trainer.runtime.weights.state_dict()
        return done, weights, seen, rank.trainer.summary() if done else None

    results = run_threads(config.run.ranks, body, 60) if config.run.ranks > 1 else [body(SingleCommunicator())]
    assert len({(done, seen) for done, _, seen, _ in results}) == 1
    for _, weights, _, _ in results[1:]:
        assert all(torch.equal(weights[n], w) for n, w in results[0][1].items())
    lines = [] if folder is None else (folder / "history.jsonl").read_text().splitlines()
    # What was moved from and to disk belongs to where rows are, not to what is computed.
    history = [
        {k: v for k, v in json.loads(line).items() if k != "seconds" and not k.startswith("disk_")} for line in lines
    ]
    done, weights, _, summary = results[0]
    return done, weights, history, summary


def assert_repeats_and_resumes(config: Config, graph: Graph, folder: Path, again: Config | None = None) -> Any:
    """Compare a run with one that was interrupted and with another (of the settings `again`), bit by bit; return it."""
    folders = [folder / name for name in ("whole", "parts", "again")]
    for place in folders:
        place.mkdir()
    whole = fit(config, graph, folders[0])
    assert not fit(config, graph, folders[1], stop_after=3)[0]
    for other in (fit(config, graph, folders[1]), fit(again or config, graph, folders[2])):
        assert other[2] == whole[2]
        assert all(torch.equal(other[1][n], w) for n, w in whole[1].items())
    return whole


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (1, {}),
    "three ranks": (3, {}),
    "repeat": (2, {"repeat": 2, "epochs": 5}),
    "early stop": (1, {"patience": 2, "epochs": 30, "repeat": 2}),
    "step schedule": (1, {"schedule": "step", "schedule_step": 2, "warmup": 3, "weight_decay": 0.1}),
    "plateau": (2, {"schedule": "plateau", "schedule_patience": 0, "warmup": 3, "lr": 0.2, "epochs": 12}),
    "momentum": (1, {"optimizer": "sgd", "momentum": 0.9, "lr": 0.1}),
    "late evaluation": (1, {"eval_every": 3, "checkpoint_every": 2}),
    "checkpoints by the clock": (3, {"checkpoint_minutes": 1e-9}),
    "no evaluation": (1, {"eval_every": 0}),
}


@pytest.mark.covering(0)
@pytest.mark.parametrize("name", CASES)
def test_resuming_is_as_if_nothing_had_happened(name: str, tmp_path: Path) -> None:
    """Fails if an interrupted run, continued, differs in one bit of weights or history from one that was not."""
    ranks, train = CASES[name]
    config, graph = config_of(ranks, train, hidden=(6, 5)), small("random")
    folders = [tmp_path / "whole", tmp_path / "parts"]
    for folder in folders:
        folder.mkdir()
    whole = fit(config, graph, folders[0])
    assert whole[0]
    total = len(whole[2])
    assert total == config.train.epochs * config.train.repeat or config.train.patience
    # Twice interrupted; the signal is acted upon one epoch later.
    for stop_after in (2, max(1, total // 2 - 2)):
        done, _, history, _ = fit(config, graph, folders[1], stop_after)
        assert not done
        assert 0 < len(history) < total
        assert history == whole[2][: len(history)]
    rest = fit(config, graph, folders[1])
    assert rest[0]
    assert rest[2] == whole[2]
    assert rest[3] == whole[3]
    assert all(torch.equal(rest[1][n], w) for n, w in whole[1].items())
    # A complete run resumed does nothing more.
    again = fit(config, graph, folders[1])
    assert (again[0], again[2], again[3]) == (whole[0], whole[2], whole[3])


def test_the_clock_is_one_for_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if ranks look at clocks of their own, evaluation does not count, or a checkpoint does not set it back."""
    ticks: dict[str, int] = {}

    def clock() -> float:
        """Whenever rank r looks, r + 1 seconds have passed for it."""
        name = threading.current_thread().name
        ticks[name] = ticks.get(name, 0) + 1
        return float(ticks[name] * (1 + int(name.removeprefix("rank "))))

    saved: list[int] = []
    monkeypatch.setattr(loop.time, "perf_counter", clock)
    monkeypatch.setattr(loop, "save_checkpoint", lambda folder, progress, parts, ranks: saved.append(progress.epoch))
    config = config_of(3, {"epochs": 11, "checkpoint_minutes": 0.2})
    # An epoch is told to have taken two looks of 2 s on average, one epoch later: 12 s have passed after 4 epochs.
    on_ranks(config, small("random"), lambda rank: rank.trainer.fit(RunLog(None, True, 11), tmp_path))
    assert saved == [4, 7, 10, 11]


@pytest.mark.parametrize(
    ("train", "kept"),
    [({"checkpoint_every": 3}, 3), ({"checkpoint_minutes": 1e-9}, 4), ({"checkpoint_minutes": 1e9}, 0)],
)
def test_a_crash_loses_only_the_epochs_since_the_checkpoint(tmp_path: Path, train: dict[str, Any], kept: int) -> None:
    """Fails if lines of history after the last checkpoint are kept twice, or the run does not go on from there."""
    config, graph = config_of(1, train), small("random")
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    whole = fit(config, graph, tmp_path / "whole")

    class CrashError(Exception):
        pass

    plan, owners = plan_graph(resolve(config, graph), graph)
    rank = make_rank(resolve(config, graph), graph, plan, owners, SingleCommunicator())

    def crash(row: dict[str, Any]) -> None:
        if row["epoch"] == 5:
            raise CrashError

    with pytest.raises(CrashError):
        rank.trainer.fit(RunLog(tmp_path / "parts", True, 8), tmp_path / "parts", crash)
    assert saved_epochs(tmp_path / "parts") == kept
    rest = fit(config, graph, tmp_path / "parts")
    assert rest[2] == whole[2]
    assert all(torch.equal(rest[1][n], w) for n, w in whole[1].items())


def test_a_new_schedule_owes_nothing_to_a_plateau(tmp_path: Path) -> None:
    """Fails if a run that is extended with another schedule keeps the rate to which the plateau's had cut it."""
    train = {"schedule": "plateau", "schedule_patience": 0, "lr": 0.2}
    cut = fit(config_of(1, train), small("random"), tmp_path)[2]
    assert cut[-1]["lr"] < 0.2
    assert [row["lr"] for row in cut] == sorted((row["lr"] for row in cut), reverse=True)
    longer = fit(config_of(1, {"epochs": 10, "lr": 0.5, "schedule_start": 8}), small("random"), tmp_path)[2]
    assert longer[:8] == cut
    assert [row["lr"] for row in longer[8:]] == [0.5, 0.5]


def test_repeats_differ_and_are_summed_up(tmp_path: Path) -> None:
    """Fails if repeats share a seed, or mean, deviation and best epoch are not those of the history."""
    _, _, history, summary = fit(config_of(1, {"repeat": 3, "epochs": 4}), small("random"), tmp_path)
    assert summary is not None
    runs = [[row for row in history if row["run"] == r] for r in range(3)]
    assert [len(rows) for rows in runs] == [4, 4, 4]
    assert len({rows[0]["loss"] for rows in runs}) == 3
    finals = [rows[-1]["val"] for rows in runs]
    bests = [max(rows, key=lambda row: row["val"]) for rows in runs]
    assert [run["seed"] for run in summary["runs"]] == [SEED, SEED + 1, SEED + 2]
    assert [run["best"]["epoch"] for run in summary["runs"]] == [best["epoch"] for best in bests]
    assert summary["mean"]["final"]["val"] == pytest.approx(np.mean(finals))
    assert summary["std"]["best"]["val"] == pytest.approx(np.std([best["val"] for best in bests]))
    alone = fit(config_of(1, {"epochs": 4, "seed": SEED + 2}), small("random"), None)[3]
    assert alone is not None
    assert alone["final"] == summary["runs"][2]["final"]
    shown = max(summary["runs"], key=lambda run: run["best"]["val"])
    assert (summary["best"], summary["final"], summary["epochs"]) == (shown["best"], shown["final"], 4)


@pytest.mark.covering(1, rest="slow")
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("train", [{"eval_every": 0}, {"eval_every": 4, "checkpoint_every": 3}, {"repeat": 2}])
def test_looking_rarely_changes_nothing(
    ranks: int, train: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if epochs that a device has queued differ from epochs watched one by one, or something due is passed over."""
    config, graph = config_of(ranks, {"epochs": 21} | train, hidden=(6, 5)), small("random")
    folders = [tmp_path / "watched", tmp_path / "queued"]
    for folder in folders:
        folder.mkdir()
    watched = fit(config, graph, folders[0])
    looks: list[tuple[int, int]] = []
    original = RankTrainer.advance

    def advance(self: RankTrainer, first: int, last: int) -> Any:
        looks.append((first, last))
        return original(self, first, last)

    monkeypatch.setattr(RankTrainer, "advance", advance)
    monkeypatch.setattr(CpuBackend, "queue_s", 1.0)
    queued = fit(config, graph, folders[1])
    assert (queued[0], queued[2], queued[3]) == (watched[0], watched[2], watched[3])
    assert all(torch.equal(queued[1][n], w) for n, w in watched[1].items())
    if not train.get("eval_every", 1):
        assert len(looks) < 21 * ranks
        assert len(set(looks)) * ranks == len(looks), "ranks looked after different epochs"
    assert all(last // 4 == first // 4 or last % 4 == 0 for first, last in looks if train.get("eval_every") == 4)


def test_a_signal_stops_queued_ranks_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a rank that has queued many epochs stops after another one than its peers."""
    monkeypatch.setattr(CpuBackend, "queue_s", 0.2)
    config = resolve(config_of(3, {"epochs": 100_000, "eval_every": 0}), small("random"))
    plan, owners = plan_graph(config, small("random"))

    def body(comm: Communicator) -> tuple[bool, int]:
        stop = Stop()
        rank = make_rank(config, small("random"), plan, owners, comm, stop)
        if comm.rank == 1:
            threading.Timer(1.0, lambda: setattr(stop, "signal", 15)).start()
        return rank.trainer.fit(RunLog(None, True, 100_000), None), rank.trainer.progress.epoch

    ended = run_threads(3, body, 60)
    assert ended == [ended[0]] * 3
    assert not ended[0][0]
    assert 0 < ended[0][1] < 100_000
