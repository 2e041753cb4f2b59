"""A run that is over gives its memory back at once: a GPU cannot wait for the garbage collector."""

from __future__ import annotations

import gc
import weakref

from mggcn.config import Config, ModelConfig, RunConfig
from tests.graphs import make_graph, on_ranks, pattern


def test_a_rank_is_freed_without_the_collector() -> None:
    """Fails if a cycle keeps features and arena of a finished run beside those of the next."""
    graph = make_graph(pattern("random", 43, 6), num_features=9, num_classes=3, seed=8)
    config = Config(model=ModelConfig(hidden=(8,)), run=RunConfig(threads=1, transport="single"))
    gc.collect()
    gc.disable()
    try:
        rank = on_ranks(config, graph, lambda rank: rank)[0]
        rank.trainer.step(0)
        rank.trainer.evaluate()
        runtime, features = weakref.ref(rank.trainer._epoch._work), weakref.ref(rank.trainer.runtime.inputs.owned.dense)
        del rank
        assert features() is None
        assert runtime() is None
    finally:
        gc.enable()
