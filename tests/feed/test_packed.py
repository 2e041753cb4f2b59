"""Batches in one piece of memory: what is drawn where it lies and what is copied there are the same bytes."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from mggcn.assemble.rank import Rank
from mggcn.feed.packed import PackedBatch
from tests.feed.test_blocks import MODELS, graph_of
from tests.feed.test_sampled import sampled
from tests.graphs import on_ranks
from tests.train.tasks import TASKS, labelled

CASES: dict[str, dict[str, Any]] = {
    "gcn": {},
    "sage": {},
    "scales of blocks": {"weights": "block", "draw": "replace"},
    "first sums": {"first": "full"},
}


def filled(packed: PackedBatch) -> dict[str, Any]:
    """What a step reads of a packed batch: of arrays whose rest nothing reads, the part before."""
    layout, arrays = packed.layout, dict(packed.arrays)
    for number in range(len(layout.stack.blocks)):
        for t in ("", "_t") if layout.is_transposed(number) else ("",):
            edges = int(arrays[f"indptr{t}{number}"][-1])
            for name in (f"indices{t}{number}", f"values{t}{number}"):
                if name in arrays:
                    arrays[name] = arrays[name][:edges]
    for name in ("ids", "row_scale0", "col_scale0"):
        if name in arrays:
            arrays[name] = arrays[name][: packed.rows]
    for number in range(1, len(layout.stack.rows)):
        size = int(arrays[f"counted{number}"].sum())
        for name in (f"row_scale{number}", f"col_scale{number}"):
            if name in arrays:
                arrays[name] = arrays[name][:size]
    seeds = int(arrays["mask"].sum())
    arrays["labels"] = arrays["labels"][: seeds * layout.labels[1]]
    for name in layout.inputs:
        arrays[name] = arrays[name][: packed.rows * layout.feature_bytes]
    return {name: array.copy() for name, array in arrays.items()}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("task", ["classes", "bce"])
@pytest.mark.covering(2)
def test_what_is_drawn_in_place_is_what_would_be_copied(
    name: str, task: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if an array is drawn to another's place, is not copied, or is not filled up behind a smaller batch."""
    for room in ("rank", "batches"):
        monkeypatch.setattr(f"mggcn.assemble.{room}.pads_batches", lambda config: bool(config.sample.batch))
    model = MODELS["sage" if name in ("sage", "first sums") else "gcn"]
    config = sampled(ranks, model, plan="bound", **CASES[name])
    graph = graph_of()
    if task == "bce":
        graph, train = labelled(graph, task), dataclasses.replace(config.train, **TASKS[task])
        config = dataclasses.replace(config, train=train)

    def body(rank: Rank) -> list[int]:
        own, sizes = rank.trainer._epoch._load.__self__._own, []  # type: ignore[attr-defined]  # a bound method
        for batch in rank.feed.epoch(8123, 0):
            assert isinstance(batch.packed, PackedBatch)
            mine, copied = filled(batch.packed), filled(own.pack(batch.copy())[0])
            assert mine.keys() == copied.keys()
            for array in mine:
                np.testing.assert_array_equal(mine[array], copied[array], err_msg=array)
            assert mine["counted0"].sum() == batch.packed.rows
            assert (mine["mask"] == (np.arange(mine["mask"].size) < batch.rows[rank.feed.stack.seeds].size)).all()
            sizes.append(batch.packed.rows)
        return sizes

    for sizes in on_ranks(config, graph, body):
        assert len(set(sizes)) > 1
