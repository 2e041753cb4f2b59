"""Epochs of several steps: a run that stops within one goes on with the same bits, and faults name the step."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mggcn.assemble.rank import Rank
from mggcn.backend.cpu.backend import CpuBackend
from mggcn.backend.epoch_end import LOSS
from mggcn.blocks.block import Stack
from mggcn.config import Config
from mggcn.errors import DivergedError, GraphError, PlanError, RunError
from mggcn.feed.batch import Batch
from mggcn.graph.csr import ArrayRows
from mggcn.model.kinds.dense import Linear
from mggcn.train import epoch as epochs
from mggcn.train.checkpoint import Progress, load_checkpoint, save_checkpoint
from mggcn.train.engine import Stop
from mggcn.train.log import RunLog
from tests.feed.test_blocks import Drawn, config_of, graph_of
from tests.graphs import on_ranks

STEPS, EPOCHS = 6, 4
MODEL = {"kind": "gcn", "dropout": 0.4}
FOREVER = 1e6
"""Seconds that may be queued: the pieces double, whatever a step takes."""


class CrashError(Exception):
    """What a test raises in the middle of an epoch."""


@dataclass
class Watched:
    """A feed that notes where its epochs begin, and sets a flag, or crashes, as it gives the batch of a step."""

    inner: Drawn
    at: tuple[int, int] = (-1, -1)
    crashes: bool = False
    given: int = 1 << 30
    """Batches that an epoch gives at most."""
    stop: Stop = field(default_factory=Stop)
    begun: list[tuple[int, int]] = field(default_factory=list)

    @property
    def stack(self) -> Stack:
        return self.inner.stack

    @property
    def num_steps(self) -> int:
        return self.inner.num_steps

    def epoch(self, seed: int, number: int, first: int = 0) -> Iterator[Batch]:
        self.begun.append((number, first))
        for step, batch in enumerate(self.inner.epoch(seed, number, first), start=first):
            if (number, step) == self.at and self.crashes:
                raise CrashError
            if (number, step) == self.at:
                self.stop.signal = 15
            if step >= self.given:
                return
            yield batch

    def counts(self, seed: int, number: int) -> Mapping[str, int]:
        return self.inner.counts(seed, number)

    def halt(self) -> None:
        self.inner.halt()


def feeds_of(ranks: int, *, vary: bool = True, steps: int = STEPS, **last: Any) -> list[Watched]:
    """Feeds of all ranks; `last` of the last one."""
    feeds = [Watched(Drawn(graph_of(), rank, ranks, vary, steps)) for rank in range(ranks)]
    return [*feeds[:-1], dataclasses.replace(feeds[-1], **last)]


@dataclass
class Fitted:
    """What a rank has at the end of a fit."""

    complete: bool
    progress: Progress
    tensors: dict[str, torch.Tensor]


def fit(config: Config, feeds: list[Watched], folder: Path) -> list[Fitted]:
    """Train in a new trainer on every rank, from the checkpoint in the folder if there is one."""
    folder.mkdir(exist_ok=True)

    def body(rank: Rank) -> Fitted:
        trainer = rank.trainer
        feeds[trainer.rank].stop = trainer._stop
        complete = trainer.fit(RunLog(folder if trainer.rank == 0 else None, True, EPOCHS), folder)
        parts = trainer.weights(best=True) | {"optimizer": trainer.optimizer_state()}
        tensors = {f"{part} {name}": t for part, named in parts.items() for name, t in named.items()}
        # The lines of the history are counted by rank 0 alone.
        return Fitted(complete, dataclasses.replace(trainer.progress, history_lines=0), tensors)

    return on_ranks(config, graph_of(), body, feed_of=feeds.__getitem__)


def history(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run; no two runs take the same seconds."""
    rows = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    assert all(row.pop("seconds") > 0 for row in rows)
    return rows


HOW: dict[str, tuple[float, dict[str, Any], tuple[int, int]]] = {
    # The flag is noted with the piece behind that of its step.
    "signal": (0.0, {"at": (1, 2)}, (1, 4)),
    # Pieces of 1, 1, 2, 4 steps: the flag is set in the third.
    "signal between queued steps": (FOREVER, {"at": (0, 2)}, (1, 2)),
    "crash": (0.0, {"at": (1, 3), "crashes": True}, (1, 3)),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("vary", [True, False], ids=["other sizes", "equal sizes"])
def test_a_run_goes_on_within_an_epoch(
    how: str, vary: bool, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if ranks stop after different steps, or a resumed run repeats a step, skips one, or differs by a bit."""
    queue_s, fault, (epoch, step) = HOW[how]
    monkeypatch.setattr(CpuBackend, "queue_s", queue_s)
    train = {"eval_every": 2, "schedule": "cosine", "warmup": 1, "lr": 0.05}
    config = config_of(ranks, MODEL, **train)
    feeds = feeds_of(ranks, vary=vary)
    whole = fit(config, feeds, tmp_path / "whole")
    assert all(feed.begun == [(number, 0) for number in range(EPOCHS)] for feed in feeds)

    parts, broken = tmp_path / "parts", feeds_of(ranks, vary=vary, **fault)
    if how == "crash":
        often = config_of(ranks, MODEL, **train, checkpoint_minutes=1e-9)
        with pytest.raises(CrashError):
            fit(often, broken, parts)
    else:
        stopped = fit(config, broken, parts)
        assert {(one.complete, one.progress.epoch, one.progress.step) for one in stopped} == {(False, epoch, step)}
    name = f"run-000-epoch-{epoch:06d}-step-{step:06d}"
    assert (parts / "checkpoints" / "latest").read_text().startswith(name)
    assert len(history(parts)) == epoch

    feeds = feeds_of(ranks, vary=vary)
    rest = fit(config, feeds, parts)
    assert all(feed.begun == [(epoch, step), *((n, 0) for n in range(epoch + 1, EPOCHS))] for feed in feeds)
    assert history(parts) == history(tmp_path / "whole")
    for one, other in zip(rest, whole, strict=True):
        assert one.complete
        assert one.progress == other.progress
        assert one.tensors.keys() == other.tensors.keys()
        assert all(torch.equal(tensor, other.tensors[name]) for name, tensor in one.tensors.items())


@pytest.mark.parametrize(("window", "queue_s"), [(4096, FOREVER), (4, 0.0), (4, FOREVER)])
def test_windows_and_pieces_change_nothing(
    window: int, queue_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if records of more steps than a window holds are lost or mixed up, a rate is another epoch's, or pieces that
    cross the end of an epoch differ from single steps.
    """
    config = config_of(1, MODEL, eval_every=0, schedule="cosine", warmup=3)
    single = fit(config, feeds_of(1), tmp_path / "single")[0]
    rows = history(tmp_path / "single")
    monkeypatch.setattr(epochs, "WINDOW", window)
    monkeypatch.setattr(CpuBackend, "queue_s", queue_s)
    found = fit(config, feeds_of(1), tmp_path / "pieces")[0]
    assert history(tmp_path / "pieces") == rows
    assert len({row["lr"] for row in rows}) == EPOCHS
    assert all(torch.equal(tensor, single.tensors[name]) for name, tensor in found.tensors.items())

    def body(rank: Rank) -> tuple[list[float], int]:
        losses = [rank.trainer.step(epoch) for epoch in range(EPOCHS)]
        return losses, rank.trainer._epoch._work.books.history.shape[0]

    losses, held = on_ranks(config, graph_of(), body, feed_of=feeds_of(1).__getitem__)[0]
    assert losses == [row["loss"] for row in rows]
    assert held == min(window, EPOCHS * STEPS)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("queue_s", [0.0, FOREVER])
def test_the_step_that_failed_is_named(
    ranks: int, queue_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if another step is blamed or run again, weights move from it on, or an epoch that was whole is lost."""
    bad, guilty = STEPS + 2, ranks - 1
    monkeypatch.setattr(CpuBackend, "queue_s", queue_s)
    original = Linear.run

    def run(self: Linear, rt: Any, op: Any) -> None:
        original(self, rt, op)
        if self.layer == 2 and rt.comm.rank == guilty and int(rt.clock[1]) == bad:
            rt.buffer(op.out)[:, 0] = np.inf

    config = config_of(ranks, MODEL)

    def body(rank: Rank) -> tuple[str, torch.Tensor]:
        with pytest.raises(DivergedError) as caught:
            rank.trainer.fit(RunLog(tmp_path if rank.comm.rank == 0 else None, True, EPOCHS), tmp_path)
        return str(caught.value), rank.trainer.runtime.weights.flat.clone()

    def good(rank: Rank) -> torch.Tensor:
        rank.trainer.start(config.train.seed, 0, None)
        assert np.isfinite(rank.trainer.advance(0, bad)[:, LOSS]).all()
        return rank.trainer.runtime.weights.flat.clone()

    kept = on_ranks(config, graph_of(), good, feed_of=feeds_of(ranks).__getitem__)[0]
    monkeypatch.setattr(Linear, "run", run)
    feeds = feeds_of(ranks)
    for text, weights in on_ranks(config, graph_of(), body, feed_of=feeds.__getitem__):
        assert "the loss of step 3 of epoch 2 is " in text
        assert f"it began in layer 2 (linear 2), on rank {guilty}" in text
        assert torch.equal(weights, kept)
    assert all(feed.begun[-1] == (1, 2) for feed in feeds)
    assert [row["epoch"] for row in history(tmp_path)] == [1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_feed_that_ends_too_soon_is_refused(ranks: int, tmp_path: Path) -> None:
    """Fails if a rank waits for batches that do not come, or the epoch and the step are not named."""
    with pytest.raises(PlanError, match="a feed of 6 steps gave 4 batches in epoch 1"):
        fit(config_of(ranks, MODEL), feeds_of(ranks, given=4), tmp_path)


@pytest.mark.parametrize(
    ("steps", "words"), [((3, 5), "3 on rank 0, 5 on rank 1"), ((0,), "at least one; the feeds have 0 on rank 0")]
)
def test_ranks_need_equal_numbers_of_steps(steps: tuple[int, ...], words: str) -> None:
    """Fails if a rank with fewer steps leaves the others waiting, or an epoch without steps begins."""
    feeds = [Drawn(graph_of(), rank, len(steps), num_steps=count) for rank, count in enumerate(steps)]
    with pytest.raises(PlanError, match=words):
        on_ranks(config_of(len(steps), MODEL), graph_of(), lambda rank: None, feed_of=feeds.__getitem__)


def test_other_steps_than_those_of_the_checkpoint_are_refused(tmp_path: Path) -> None:
    """Fails if a run goes on in the middle of an epoch that is cut into other batches now."""
    fit(config_of(1, MODEL), feeds_of(1, at=(1, 2)), tmp_path)
    with pytest.raises(RunError, match=r"is of step 4 of 6 of an epoch, which now has 9 steps"):
        fit(config_of(1, MODEL), feeds_of(1, steps=9), tmp_path)


def test_checkpoints_hold_steps_where_an_epoch_has_several(tmp_path: Path) -> None:
    """Fails if steps are not read back, an earlier version cannot read a run's of the whole graph, or bad steps pass."""
    weights = {"weights": {"w": torch.ones(2)}}
    save_checkpoint(tmp_path, Progress(epoch=3), weights)
    text = (tmp_path / "run-000-epoch-000003" / "progress.json").read_text()
    assert not {"step", "steps", "loss_sum", "seconds"} & json.loads(text).keys()
    for saved in (Progress(epoch=3), Progress(epoch=3, step=2, steps=7, loss_sum=0.1 + 0.2, seconds=1.5)):
        save_checkpoint(tmp_path, saved, weights)
        found = load_checkpoint(tmp_path)
        assert found is not None
        assert found[0] == saved
    save_checkpoint(tmp_path, Progress(epoch=3, step=7, steps=7), weights)
    with pytest.raises(RunError, match="more steps than are done"):
        load_checkpoint(tmp_path)


def test_seeds_without_labels_are_refused() -> None:
    """Fails if the loss of a batch counts a vertex of unknown label."""
    graph = graph_of()
    everywhere = dataclasses.replace(graph, splits={"train": ArrayRows(np.ones((1, graph.num_vertices), bool))})
    with pytest.raises(GraphError, match="label"):
        on_ranks(
            config_of(1, MODEL), graph, lambda rank: rank.trainer.step(0), feed_of=lambda r: Drawn(everywhere, r, 1)
        )


def test_relations_need_types() -> None:
    """Fails if a model with types of edges is run over blocks that hold none."""
    graph = graph_of()
    types, ones = np.zeros(graph.num_edges, np.uint8), np.ones(graph.num_edges, np.float32)
    adj, adj_t = (
        dataclasses.replace(matrix, types=ArrayRows(types), type_degrees=ArrayRows(ones))
        for matrix in (graph.adj, graph.adj_t)
    )
    graph, config = dataclasses.replace(graph, adj=adj, adj_t=adj_t, num_relations=1), config_of(1, {"kind": "rgcn"})
    with pytest.raises(PlanError, match="edges of block 'above' have no types"):
        on_ranks(config, graph, lambda rank: rank.trainer.step(0), feed_of=lambda r: Drawn(graph, r, 1))
