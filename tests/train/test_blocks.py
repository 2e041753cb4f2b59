"""Epochs whose dense products are cut into blocks of rows: the same results whatever the blocks."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from mggcn.assemble.rank import Rank
from mggcn.config import Config, ModelConfig, RunConfig, TrainConfig
from mggcn.memory.device import DEVICES, TILE_ROWS
from tests.devices import EMULATED
from tests.graphs import make_graph, on_ranks, pattern

VERTICES = 2 * TILE_ROWS + 44


@pytest.mark.parametrize("model", [{"input_dropout": 0.3}, {"dropout": 0.4}], ids=["dropped input", "dropout"])
def test_results_do_not_depend_on_the_blocks(model: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a block is left out, done twice or given another's mask, or the same blocks give other bits again."""
    graph = make_graph(pattern("directed", VERTICES, 9), num_features=19, num_classes=4, seed=3)
    config = Config(
        model=ModelConfig(hidden=(24, 8), **model),  # type: ignore[arg-type]
        train=TrainConfig(seed=551, epochs=2, lr=0.02),
        run=RunConfig(threads=1, device="cuda", transport="single"),
    )
    sizes: set[int] = set()

    def gradients(cache_bytes: int) -> dict[str, np.ndarray]:
        figures = dataclasses.replace(DEVICES["cuda"], cache_bytes=cache_bytes)

        def body(rank: Rank) -> dict[str, np.ndarray]:
            sizes.add(rank.plan.sizes.block_rows(24))
            rank.trainer.gradients(3)
            return {name: grad.numpy().copy() for name, grad in rank.trainer.runtime.weights.grads.items()}

        with monkeypatch.context() as patch:
            patch.setitem(DEVICES, "cuda", figures)
            return on_ranks(config, graph, body, device_of=EMULATED.device_of)[0]  # type: ignore[no-any-return]

    whole, cut, again = gradients(DEVICES["cuda"].cache_bytes), gradients(1), gradients(1)
    assert sizes == {VERTICES, TILE_ROWS}
    for name, expected in whole.items():
        np.testing.assert_allclose(cut[name], expected, rtol=2e-5, atol=1e-7)
        assert np.array_equal(cut[name], again[name])
