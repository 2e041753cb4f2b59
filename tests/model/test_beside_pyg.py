"""GAT, GATv2 and GraphSAGE's pooling beside PyG's layers: equal logits for equal weights; what does not fit is refused."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch

from mggcn.config import ModelConfig
from mggcn.errors import ConfigError
from mggcn.graph.csr import Graph
from tests.graphs import make_graph, on_ranks, pattern
from tests.reference import dense_csr, dense_features
from tests.train.test_exact import config_of
from tests.train.test_mixed import with_run

HEADS, CLASSES, FEATURES = 4, 5, 9


def layers_of(kind: str, hidden: tuple[int, ...], self_loops: bool) -> torch.nn.ModuleList:
    """A stack of PyG's layers with weights of their own, biases among them."""
    nn = pytest.importorskip("torch_geometric.nn")
    torch.manual_seed(6021)
    inputs, options = (FEATURES, *hidden), {"heads": HEADS, "add_self_loops": self_loops}
    if kind == "sage":
        found = [nn.SAGEConv(d, e, aggr="max", project=True) for d, e in itertools.pairwise((*inputs, CLASSES))]
    else:
        conv = {"gat": nn.GATConv, "gatv2": nn.GATv2Conv}[kind]
        found = [conv(d, e // HEADS, **options) for d, e in zip(inputs, hidden, strict=False)]
        found.append(conv(inputs[-1], CLASSES, concat=False, **options))
    layers = torch.nn.ModuleList(found)
    for parameter in layers.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layers


def weights_of(kind: str, layers: torch.nn.ModuleList) -> dict[str, torch.Tensor]:
    """The layers' weights under our names."""
    state: dict[str, Any] = {}
    for number, conv in enumerate(layers, start=1):
        if kind == "sage":
            for side, linear in enumerate((conv.lin, conv.lin_r, conv.lin_l), start=3 * number - 2):
                state[f"layers.{side}.weight"] = linear.weight.t()
                if linear.bias is not None:
                    state[f"layers.{side}.bias"] = linear.bias
            continue
        if kind == "gat":
            state[f"layers.{number}.weight"] = conv.lin.weight.t()
            state[f"layers.{number}.source"], state[f"layers.{number}.destination"] = conv.att_src[0], conv.att_dst[0]
        else:
            for side, linear in ((2 * number - 1, conv.lin_l), (2 * number, conv.lin_r)):
                state[f"layers.{side}.weight"], state[f"layers.{side}.bias"] = linear.weight.t(), linear.bias
            state[f"layers.{2 * number}.attention"] = conv.att[0]
        state[f"attention.{number}.bias"] = conv.bias
    return {name: value.detach().clone() for name, value in state.items()}


def theirs(graph: Graph, layers: torch.nn.ModuleList) -> np.ndarray:
    x = torch.from_numpy(dense_features(graph)).float()
    edges = torch.from_numpy(np.stack(np.nonzero(dense_csr(graph.adj))))
    for number, conv in enumerate(layers, start=1):
        x = conv(x, edges)
        x = torch.relu(x) if number < len(layers) else x
    return x.detach().numpy()


@pytest.mark.parametrize("kind", ["gat", "gatv2", "sage"])
@pytest.mark.parametrize(("ranks", "strategy", "self_loops"), [(1, "broadcast", True), (3, "delayed", False)])
def test_logits_equal_pyg(kind: Any, ranks: int, strategy: str, self_loops: bool) -> None:
    """Fails on another slope, softmax, bias, order of heads or rule for self-loops than PyG's."""
    graph = make_graph(
        pattern("directed", 41, 3), num_features=FEATURES, num_classes=CLASSES, sparse=False, weighted=False, seed=8
    )
    layers = layers_of(kind, (12, 8), self_loops)
    settings = {"aggregator": "max"} if kind == "sage" else {"heads": HEADS, "self_loops": self_loops}
    config = config_of(ranks, strategy=strategy, hidden=(12, 8), kind=kind, **settings)
    config = with_run(config, precision="fp32")

    def logits(rank: Any) -> tuple[np.ndarray, np.ndarray]:
        rank.trainer.runtime.weights.load_state_dict(weights_of(kind, layers))
        rank.trainer.evaluate()
        return rank.trainer.runtime.inputs.row_ids.numpy(), rank.trainer.logits().double().numpy()

    expected = theirs(graph, layers)
    for ids, found in on_ranks(config, graph, logits):
        np.testing.assert_allclose(found, expected[ids], rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def test_settings_that_do_not_fit_are_refused() -> None:
    """Fails if heads are cut into unequal parts, or settings of attention are ignored in silence."""
    with pytest.raises(ConfigError, match=r"model.hidden must hold multiples of model.heads 3, .* got \(8,\)"):
        ModelConfig(kind="gat", hidden=(8,), heads=3)
    with pytest.raises(ConfigError, match=r"^model.heads belongs to gat, gatv2, got model.kind gcn"):
        ModelConfig(heads=2)
    with pytest.raises(ConfigError, match=r"^model.attention_dropout belongs to gat, gatv2, got model.kind mlp"):
        ModelConfig(kind="mlp", attention_dropout=0.5)
    with pytest.raises(ConfigError, match=r"model.aggregator belongs to sage, got model.kind gcn"):
        ModelConfig(aggregator="max")
    for name, value in (("dropout", 0.5), ("hidden", (64,)), ("activation", "elu")):
        with pytest.raises(ConfigError, match=rf"^model.{name} belongs to appnp, .*, got model.kind sgc; leave it out"):
            ModelConfig(kind="sgc", **{name: value})
    with pytest.raises(ConfigError, match=r"^model.residual and model.jumping belong to .*, got model.kind appnp"):
        ModelConfig(kind="appnp", residual="linear", jumping="max")
    assert ModelConfig(kind="sgc", hidden=()).hidden == ()
    assert not ModelConfig(kind="sage", aggregator="max").self_loops
    with pytest.raises(ConfigError, match=r"model.heads must lie in 1 .. 64, got 65"):
        ModelConfig(kind="gatv2", hidden=(65,), heads=65)
    assert dataclasses.replace(ModelConfig(kind="gat", hidden=(8,), heads=4), hidden=(12,)).heads == 4
