"""Products made again in the backward pass (run.recompute): the same bits, in less memory, and advised where that fits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mggcn.assemble.plan import plan_graph, plan_shape
from mggcn.config import Config, ModelConfig, RunConfig
from mggcn.errors import PlanError
from mggcn.graph.csr import Graph
from mggcn.planning.advice import require_fit
from tests.graphs import make_graph, one_epoch, pattern
from tests.shapes import shape_of
from tests.train.test_exact import config_of
from tests.train.test_mixed import with_run

DROPS: dict[str, Any] = {"dropout": 0.4, "hidden": (12, 12)}
MODELS: dict[str, dict[str, Any]] = {
    "gat": DROPS | {"kind": "gat", "heads": 2, "attention_dropout": 0.3},
    "gatv2": DROPS | {"kind": "gatv2", "heads": 2, "attention_dropout": 0.3},
    "gin": DROPS | {"kind": "gin", "norm_layer": "batch"},
    "sage-max": {"kind": "sage", "aggregator": "max", "hidden": (12, 12)},
    "mlp": DROPS | {"kind": "mlp", "input_dropout": 0.2},
}
SMALLER = ("gat", "gatv2")
"""Models whose largest moment holds rows that are made again."""


def graph_of(sparse: bool = False) -> Graph:
    sizes: Any = {"num_features": 11, "num_classes": 4, "sparse": sparse, "seed": 8}
    return make_graph(pattern("directed", 61, 6), **sizes)


@pytest.mark.covering(1, rest="slow")
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(("ranks", "strategy"), [(1, "broadcast"), (3, "halo"), (3, "delayed")])
@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize("name", MODELS)
def test_the_same_bits_in_less_memory(name: str, precision: str, ranks: int, strategy: str, sparse: bool) -> None:
    """Fails if a row that is made again differs, a mask is another one, or the rows are kept nevertheless."""
    config = with_run(config_of(ranks, strategy=strategy, **MODELS[name]), precision=precision)
    again, graph = with_run(config, recompute="on"), graph_of(sparse)
    for one, other in zip(one_epoch(config, graph), one_epoch(again, graph), strict=True):
        assert one.loss == other.loss
        assert all(np.array_equal(gradient, other.grads[key]) for key, gradient in one.grads.items())
    before, now = (plan_graph(c, graph)[0].ranks[0].train for c in (config, again))
    assert now.arena.nbytes <= before.arena.nbytes
    if name in SMALLER:
        assert now.arena.nbytes < before.arena.nbytes
        assert len(now.ops) > len(before.ops)


def test_it_is_advised_where_it_fits() -> None:
    """Fails if a run is refused without a word of the setting with which it fits, or with one that does not help."""
    shape = shape_of(169_343, 2_340_000, 128, 40, name="arxiv")
    config = Config(model=ModelConfig(kind="gat", hidden=(256, 256), heads=4), run=RunConfig())
    plan = plan_shape(config, shape)
    need = plan_shape(with_run(config, recompute="on"), shape).largest.total_bytes
    assert need < 0.75 * plan.largest.total_bytes
    with pytest.raises(PlanError, match=r"--set run\.recompute=on.* would fit"):
        require_fit(plan, need)
    with pytest.raises(PlanError) as refusal:
        require_fit(plan, need - 1)
    assert "recompute" not in str(refusal.value)
