"""The module that a trainer gives has its predictions; what PyG's layers do not have is refused."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mggcn
from mggcn.errors import ConfigError, RunError
from tests.graphs import make_graph, pattern
from tests.interop.test_weights import as_tensors

MODELS: dict[str, Any] = {
    "gcn": mggcn.GCN(8, dropout=0.2, norm_layer="batch"),
    "gcn without loops": mggcn.GCN((8, 6), self_loops=False, activation="elu"),
    "sage": mggcn.SAGE(8, aggregator="mean", self_loops=False, norm_layer="layer"),
    "pooling": mggcn.SAGE(8, aggregator="max", self_loops=False),
    "gin": mggcn.GIN(8),
    "gat": mggcn.GAT(8, heads=4, out_heads=2),
    "gatv2": mggcn.GATv2(8, heads=2, concat_heads=False),
    "sgc": mggcn.SGC(3),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_module_predicts_what_the_trainer_does(name: str) -> None:
    """Fails if a layer has another option or order than the model, or weights of another epoch."""
    graph = make_graph(pattern("random", 47, 9), num_features=5, num_classes=3, seed=9)
    trainer = mggcn.Trainer(graph, MODELS[name], threads=1, seed=7411, lr=0.05)
    trainer.fit(epochs=3)
    module = trainer.to_pyg()
    x, edges = as_tensors(graph, torch.float32)
    with torch.no_grad():
        np.testing.assert_allclose(module(x, edges).numpy(), trainer.predict(), atol=1e-5, rtol=1e-5)
    if name == "gcn":
        for how in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(RunError, match="cannot be copied or pickled"):
                how(trainer)


@pytest.mark.full
@pytest.mark.parametrize("name", ["gcn", "sage"])
def test_the_module_is_exported(name: str, tmp_path: Path) -> None:
    """Fails if what docs/export.md says of torch.export is not so."""
    graph = make_graph(pattern("random", 47, 9), num_features=5, num_classes=3, seed=9)
    trainer = mggcn.Trainer(graph, MODELS[name], threads=1)
    trainer.fit(epochs=2)
    x, edges = as_tensors(graph, torch.float32)
    torch.export.save(torch.export.export(trainer.to_pyg(), (x, edges)), tmp_path / "model.pt2")
    scores = torch.export.load(tmp_path / "model.pt2").module()(x, edges)
    np.testing.assert_allclose(scores.detach().numpy(), trainer.predict(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "model", [mggcn.MLP(8), mggcn.APPNP(8), mggcn.SAGE(8), mggcn.GCN(8, residual="linear"), mggcn.GCN(8, norm="mean")]
)
def test_models_that_pyg_does_not_have_are_refused(model: Any) -> None:
    """Fails if a module is built that computes something else."""
    graph = make_graph(pattern("random", 47, 9), num_features=5, num_classes=3, seed=9)
    trainer = mggcn.Trainer(graph, model, threads=1)
    trainer.fit(epochs=1)
    with pytest.raises(ConfigError, match="PyG's layers have no"):
        trainer.to_pyg()


def test_weights_of_edges_are_not_left_out() -> None:
    """Fails if a module scores without the weights with which the model was trained."""
    edges, labels = np.arange(40).reshape(2, 20) % 20, np.arange(20) % 2
    weights = np.linspace(0.5, 2.0, 20)
    graph = mggcn.load(edges, weights=weights, features=np.eye(20), labels=labels, splits={"train": labels >= 0})
    trainer = mggcn.Trainer(graph, mggcn.GCN(hidden=(4,)), ranks=1)
    trainer.fit(epochs=1)
    with pytest.raises(ConfigError, match="the graph has weights of edges, which gcn reads"):
        trainer.to_pyg()
