"""Threads of a rank's epochs, as the work of its plan says."""

from __future__ import annotations

import numpy as np
import pytest

import mggcn
from mggcn import native
from mggcn.planning.op_cost import SMALL_ROWS, epoch_threads


def _trainer(vertices: int, *hidden: int, **settings: object) -> mggcn.Trainer:
    """Train a GCN on a ring, on two threads."""
    ring = np.arange(vertices)
    edges = np.stack([np.tile(ring, 2), np.append(np.roll(ring, 1), np.roll(ring, -1))])
    labels, splits = ring % 3, {"train": ring[::2], "val": ring[1::2]}
    graph = mggcn.load(edges, features=np.eye(vertices, 7, dtype=np.float32), labels=labels, splits=splits)
    return mggcn.Trainer(graph, mggcn.GCN(hidden=hidden), threads=2, **settings)


@pytest.mark.parametrize(
    ("vertices", "hidden", "ranks", "threads"),
    [
        (900, (128,), 1, 1),
        (SMALL_ROWS, (16,), 1, 1),
        (900, (2048, 2048), 1, 2),
        (SMALL_ROWS + 1, (16,), 1, 2),
        (SMALL_ROWS + 1, (16,), 2, 1),
    ],
)
def test_small_epochs_have_one_thread(vertices: int, hidden: tuple[int, ...], ranks: int, threads: int) -> None:
    """Fails if a second thread waits in epochs that it cannot shorten, or if wide layers or large graphs lose theirs."""
    plan = _trainer(vertices, *hidden, ranks=ranks, transport="threads" if ranks > 1 else "auto").plan.run
    assert epoch_threads(plan, 2) == threads


@pytest.mark.parametrize(("vertices", "named"), [(60, "1 thread"), (SMALL_ROWS + 1, "2 threads")])
def test_a_run_says_how_many_threads_its_epochs_had(vertices: int, named: str) -> None:
    """Fails if ranks do not compute as `epoch_threads` says, or a record names threads that were not there."""
    trainer = _trainer(vertices, 4)
    trainer.fit(epochs=1)
    assert trainer.result()["versions"]["device"].endswith(f", {named}")


def test_waiting_is_limited_before_torch_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if threads of a run from Python spin for milliseconds after each kernel, which only the command prevented."""
    asked = []
    monkeypatch.setattr(native, "limit_spinning", lambda: asked.append("limited"))
    _trainer(60, 4)
    assert asked == ["limited"] * 2
