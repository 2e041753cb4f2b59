"""Threads of a rank's epochs, as the work of its plan says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import mggcn
from mggcn import native
from mggcn.config import ModelConfig
from mggcn.cost.work import Work
from mggcn.model.kinds import norms
from mggcn.planning.cost_text import summed_widths
from mggcn.planning.op_cost import SMALL_ROWS, epoch_threads, program_items
from tests.graphs import make_graph, on_ranks, pattern
from tests.train.test_exact import config_of
from tests.train.test_mixed import with_run


def _trainer(vertices: int, *hidden: int, norm_layer: str = "none", **settings: object) -> mggcn.Trainer:
    """Train a GCN on a ring, on two threads."""
    ring = np.arange(vertices)
    edges = np.stack([np.tile(ring, 2), np.append(np.roll(ring, 1), np.roll(ring, -1))])
    labels, splits = ring % 3, {"train": ring[::2], "val": ring[1::2]}
    graph = mggcn.load(edges, features=np.eye(vertices, 7, dtype=np.float32), labels=labels, splits=splits)
    return mggcn.Trainer(graph, mggcn.GCN(hidden=hidden, norm_layer=norm_layer), threads=2, **settings)


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


ROWS, COLS = 40, 9


class Counting(TorchDispatchMode):
    """Counts what calls read and write of matrices: of float32 ones, of float64 ones, and the calls that see the latter."""

    def __init__(self) -> None:
        super().__init__()
        self.stored = self.blocks = self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.is_view:
            return found
        read = list(args[1:] if "copy_" in func.__name__ else args)
        touched = []
        for tensors in (read, [found]):
            matrices = {t.data_ptr(): t for t in tensors if isinstance(t, torch.Tensor) and t.shape == (ROWS, COLS)}
            touched += [t.dtype for t in matrices.values()]
        self.stored += touched.count(torch.float32)
        self.blocks += touched.count(torch.float64)
        self.calls += torch.float64 in touched
        return found


@pytest.mark.parametrize("norm_layer", ["layer", "batch"])
def test_norms_cost_the_passes_that_they_make(norm_layer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a norm reads or writes rows more or less often, or makes more or fewer calls, than plans count."""
    kinds = [norms.LayerNorm, norms.LayerNormGrad, norms.BatchNorm, norms.BatchNormGrad, norms.RunningNorm]
    seen = []
    for kind in kinds:

        def run(self: Any, rt: Any, op: Any, before: Any = kind.run) -> None:
            with Counting() as counting:
                before(self, rt, op)
            seen.append((type(self), (counting.stored, counting.blocks, counting.calls)))

        monkeypatch.setattr(kind, "run", run)
    settings = {"num_features": 5, "num_classes": 3, "sparse": False, "weighted": False, "seed": 11}
    graph = make_graph(pattern("random", ROWS, 6), **settings)  # type: ignore[arg-type]
    config = with_run(config_of(1, hidden=(COLS,), norm_layer=norm_layer), precision="fp32")

    def body(rank: Any) -> None:
        rank.trainer.step(0)
        rank.trainer.evaluate()

    on_ranks(config, graph, body)
    assert len(seen) == 3, seen
    for kind, counted in seen:
        assert counted == tuple(kind.passes), kind


def test_norms_pass_over_their_blocks_in_float64() -> None:
    """Fails if the plan takes the blocks of a norm, which are summed in float64, for larger or smaller than they are."""
    plan = _trainer(ROWS, 16, norm_layer="layer").plan.run
    works = [item for item in program_items(plan, plan.ranks[0], plan.ranks[0].train) if isinstance(item, Work)]
    assert [work.span for work in works].count(2 * ROWS * 16 * 8) == 2


@pytest.mark.parametrize(
    ("model", "widths"),
    [
        ({"kind": "sage", "hidden": (16, 8)}, (100, 16, 8)),
        ({"kind": "gat", "hidden": (16, 8), "heads": 4}, (16, 8, 20)),
        ({"kind": "gat", "hidden": (16, 8), "heads": 4, "head": "linear"}, (16, 8)),
        ({"kind": "gin", "hidden": (16,), "dense_before": (6,), "head": "linear"}, (6,)),
        ({"kind": "appnp", "hidden": (16,), "hops": 3}, (5, 5, 5)),
    ],
)
def test_work_is_counted_where_neighbours_are_summed(model: dict[str, Any], widths: tuple[int, ...]) -> None:
    """Fails if the columns of a layer's input are counted where attention sums those of its heads, or a head sums none."""
    assert summed_widths(ModelConfig(**model), 100, 5) == widths
