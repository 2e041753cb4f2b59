"""GraphSAGE with the GCN aggregator: (sum of neighbours + self) / (degree + 1)."""

from __future__ import annotations

import numpy as np
import pytest

import mggcn
from mggcn.config import Config, ModelConfig, RunConfig, TrainConfig
from mggcn.errors import ConfigError
from tests.graphs import make_graph, pattern
from tests.reference import normalized
from tests.train.test_exact import SEED, relative_error


@pytest.mark.parametrize(("strategy", "ranks"), [("broadcast", 1), ("broadcast", 3), ("delayed", 3)])
def test_weights_and_stored_self_loops(strategy: str, ranks: int) -> None:
    """Fails if a weighted average is by another sum than that of its weights, or a stored self-loop's weight is lost."""
    adjacency = pattern("weighted", 31, 4)
    adjacency[[2, 5, 9], [2, 5, 9]] = [2.5, 0.25, 1.0]
    graph = make_graph(adjacency, num_features=9, num_classes=3, weighted=True, seed=1)
    scaled = normalized(graph, ModelConfig(kind="sage"))
    incoming = adjacency[:, 5].astype(np.float64)
    np.testing.assert_allclose(scaled[5], incoming / incoming.sum(), rtol=1e-7)
    without = adjacency[:, 6].astype(np.float64) + (np.arange(31) == 6)
    np.testing.assert_allclose(scaled[6], without / without.sum(), rtol=1e-7)
    config = Config(
        model=ModelConfig(kind="sage", hidden=(7,), dropout=0.4),
        train=TrainConfig(seed=SEED),
        run=RunConfig(
            ranks=ranks,
            threads=1,
            transport="threads" if ranks > 1 else "single",
            precision="fp64",
            strategy=strategy,  # type: ignore[arg-type]
        ),
    )
    assert relative_error(config, graph) < 1e-10


def test_without_itself_there_is_no_sage() -> None:
    """Fails if a setting that contradicts the aggregator is dropped silently."""
    with pytest.raises(ConfigError, match="adds every vertex to its neighbours"):
        ModelConfig(kind="sage", self_loops=False)
    assert mggcn.SAGE(hidden=(4,)).kind == "sage"
    assert ModelConfig(kind="sage", norm="symmetric").norm == "mean"
