"""Weights from and to PyG: the same logits on both sides, and nothing half-copied."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric import nn as pyg
from torch_geometric.data import Data
from torch_geometric.nn import (
    FastRGCNConv,
    GATConv,
    GATv2Conv,
    GCNConv,
    GINConv,
    PairNorm,
    RGCNConv,
    SAGEConv,
    Sequential,
)

from mggcn.api.graphs import GAT, GCN, GIN, RGCN, SAGE, SGC, GATv2, load
from mggcn.api.trainer import Trainer
from mggcn.config import Config
from mggcn.errors import ConfigError
from mggcn.graph.csr import CSR, Graph
from mggcn.interop.weights import SYNONYMS, from_pyg, to_pyg
from tests.graphs import make_graph, pattern
from tests.interop.test_beside_pyg import gin_conv, network_of

SEED = 8086


class Stack(torch.nn.Module):
    """A stack of GCNConv layers with ReLU and dropout between them."""

    def __init__(self, widths: tuple[int, ...], bias: bool = True, **options: Any) -> None:
        super().__init__()
        pairs = itertools.pairwise(widths)
        self.convs = torch.nn.ModuleList(GCNConv(d, e, bias=bias, **options) for d, e in pairs)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        for conv in self.convs[:-1]:
            x = torch.dropout(torch.relu(conv(x, edge_index, edge_weight)), 0.5, self.training)
        return self.convs[-1](x, edge_index, edge_weight)  # type: ignore[no-any-return]


def as_tensors(graph: Graph, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Features (N, D) and edge_index (2, E), as PyG takes them."""
    n = graph.num_vertices
    indptr = graph.adj.indptr.read(0, n + 1)
    rows = np.repeat(np.arange(n), np.diff(indptr))
    edges = torch.from_numpy(np.stack([rows, graph.adj.indices.read(0, indptr[-1]).astype(np.int64)]))
    if not isinstance(graph.features, CSR):
        assert graph.features is not None
        return torch.from_numpy(graph.features.read(0, n).copy()).to(dtype), edges
    x = np.zeros((n, graph.features.num_cols))
    starts = graph.features.indptr.read(0, n + 1)
    assert graph.features.values is not None
    places = np.repeat(np.arange(n), np.diff(starts)), graph.features.indices.read(0, starts[-1])
    x[places] = graph.features.values.read(0, starts[-1])
    return torch.from_numpy(x).to(dtype), edges


def logits(module: Stack, graph: Graph, dtype: torch.dtype) -> np.ndarray:
    module.eval()
    with torch.no_grad():
        return module.to(dtype)(*as_tensors(graph, dtype)).numpy()  # type: ignore[no-any-return]


def stack(widths: tuple[int, ...], bias: bool = True, **options: Any) -> Stack:
    """A stack with random weights and, unlike PyG's fresh ones, biases that are not zero."""
    torch.manual_seed(SEED)
    module = Stack(widths, bias, **options)
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return module


def directed() -> Graph:
    """A random directed graph with a stored self-loop and a vertex without in-edges."""
    return make_graph(pattern("directed", 61, 4), num_features=9, num_classes=4, seed=15)


def assert_equal_to(got: np.ndarray, expected: np.ndarray, rtol: float) -> None:
    assert got.dtype == expected.dtype
    np.testing.assert_allclose(got, expected, rtol=0, atol=rtol * np.abs(expected).max())


@pytest.mark.parametrize(
    ("precision", "dtype", "rtol"), [("fp32", torch.float32, 1e-5), ("fp64", torch.float64, 1e-10)]
)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", ["cora", "directed"])
def test_imported_weights_give_the_logits_of_pyg(
    data_root: Path, name: str, bias: bool, precision: str, dtype: torch.dtype, rtol: float
) -> None:
    """Fails if a matrix is transposed wrongly, a layer or bias is mixed up, or the normalisation is not PyG's."""
    graph = load("cora", root=data_root) if name == "cora" else directed()
    widths = (1433, 16, 7) if name == "cora" else (9, 12, 5, 4)
    module = stack(widths, bias)
    trainer = Trainer(graph, GCN(widths[1:-1], bias=bias), precision=precision, threads=1)
    got = trainer.scores_of(from_pyg(module.to(dtype)))
    assert_equal_to(got, logits(module, graph, dtype), rtol)


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_trained_weights_give_their_scores_in_pyg(data_root: Path, precision: str) -> None:
    """Fails if weights that mggcn trained mean something else in PyG."""
    dtype, rtol = (torch.float32, 1e-5) if precision == "fp32" else (torch.float64, 1e-10)
    graph = load("cora", root=data_root)
    trainer = Trainer(graph, GCN((16,), dropout=0.5), precision=precision, threads=1, seed=SEED)
    trainer.fit(epochs=4)
    module = stack((1433, 16, 7)).to(dtype)
    for weights in ("last", "best"):
        to_pyg(trainer.state_dict(weights), module)
        assert_equal_to(trainer.predict(weights=weights), logits(module, graph, dtype), rtol)


def test_layers_without_self_loops_are_a_model_without() -> None:
    """Fails if add_self_loops=False is not GCN(self_loops=False), or is taken for the default anywhere."""
    module = stack((9, 12, 4), add_self_loops=False).double()
    trainer = Trainer(directed(), GCN((12,), self_loops=False), precision="fp64", threads=1)
    expected = logits(module, directed(), torch.float64)
    for state in (module, from_pyg(module, trainer.config.model)):
        assert_equal_to(trainer.scores_of(state), expected, 1e-10)
    to_pyg(changed(), module, trainer.config.model)
    assert all(bool((parameter == 1).all()) for parameter in module.parameters())
    default = Trainer(directed(), GCN((12,)), threads=1)
    for action in (lambda: from_pyg(module), lambda: to_pyg(changed(), module), lambda: default.scores_of(module)):
        with pytest.raises(
            ConfigError, match=r"add_self_loops=False, but the model has self_loops=True; .*loops=False\)"
        ):
            action()
    with pytest.raises(ConfigError, match=r"add_self_loops=True, but the model has self_loops=False"):
        trainer.scores_of(stack((9, 12, 4)))


@pytest.mark.parametrize(
    "options",
    [{"normalize": False}, {"improved": True}, {"aggr": "mean"}, {"aggr": "max"}, {"flow": "target_to_source"}],
    ids=str,
)
def test_options_that_no_model_has_are_refused(options: dict[str, Any]) -> None:
    """Fails if a layer that computes something else than mggcn's is taken for one of its own, in either direction."""
    ((name, value),) = options.items()
    module = torch.nn.ModuleList([GCNConv(9, 12), GCNConv(12, 4, **options)])
    for action in (lambda: from_pyg(module), lambda: to_pyg(changed(), module)):
        with pytest.raises(ConfigError, match=rf"GCNConv 2 has {name}={value!r}, but mggcn's GCN computes {name}="):
            action()


def test_the_way_out_of_improved_is_the_same() -> None:
    """Fails if self-loops of weight 2 in the graph are not what improved=True computes."""
    edges = torch.cat([as_tensors(directed(), torch.float64)[1], torch.tensor([[5, 9], [9, 5]])], 1).unique(dim=1)
    edges = edges[:, edges[0] != edges[1]]
    weights = torch.linspace(0.5, 3, edges.shape[1], dtype=torch.float64)
    loops = torch.arange(61).expand(2, 61)
    x = as_tensors(directed(), torch.float64)[0]
    module = stack((9, 12, 4), improved=True).double().eval()
    with torch.no_grad():
        expected = module(x, edges, weights).numpy()
    plain = stack((9, 12, 4)).double()
    doubled = Data(x=x, edge_index=torch.cat([edges, loops], 1), y=torch.arange(61) % 4)
    all_weights = torch.cat([weights, torch.full((61,), 2.0)])
    graph = load(doubled, weights=all_weights, splits={"train": [0, 1, 2]})
    assert_equal_to(Trainer(graph, GCN((12,)), precision="fp64", threads=1).scores_of(plain), expected, 1e-6)


def test_parts_between_the_layers_are_refused() -> None:
    """Fails if a norm, a head or another activation is silently left out, or what is harmless is not."""
    layers = [GCNConv(9, 12), GCNConv(12, 4)]
    for part, message in (
        (torch.nn.BatchNorm1d(12), "2.weight, 2.bias"),
        (torch.nn.Linear(4, 4), "2.weight"),
        (torch.nn.ELU(), "also has ELU; if the network does not use"),
        (torch.nn.BatchNorm1d(12, affine=False), "also has BatchNorm1d;"),
        (PairNorm(), "also has PairNorm;"),
        (torch.nn.Sequential(torch.nn.Softmax(1), torch.nn.ReLU()), "also has Softmax;"),
        (SAGEConv(4, 4), "has GCNConv and SAGEConv layers"),
    ):
        with pytest.raises(ConfigError, match=message):
            from_pyg(torch.nn.ModuleList([*layers, part]))
    whole = torch.nn.ModuleList([*layers, torch.nn.ReLU(), torch.nn.Dropout(), torch.nn.LogSoftmax(1)])
    assert len(from_pyg(whole)) == 4
    assert len(from_pyg(pyg.GCN(9, 12, 2, 4))) == 4
    assert len(from_pyg(pyg.GCN(9, 12, 2, 4, act=torch.relu))) == 4
    assert len(from_pyg(torch.nn.ModuleList([GCNConv(9, 12, aggr="sum")]))) == 2
    with pytest.raises(ConfigError, match="also has act=tanh;"):
        from_pyg(pyg.GCN(9, 12, 2, 4, act=torch.tanh))
    with pytest.raises(ConfigError, match="also has InstanceNorm;"):
        from_pyg(pyg.GCN(9, 12, 2, 4, norm="InstanceNorm"))
    with pytest.raises(ConfigError, match=r'GCNConv is mggcn.GCN\(norm="symmetric"\), but the model is sage'):
        from_pyg(torch.nn.ModuleList(layers), SAGE())
    with pytest.raises(ConfigError, match="ChebConv has none"):
        from_pyg(pyg.ChebConv(9, 4, 2))


@pytest.mark.parametrize("weighted", [False, True])
def test_repeated_edges_of_a_data_count_as_in_pyg(weighted: bool) -> None:
    """Fails if load merges what PyG counts, or weights that are given for edge_attr are not those of GCNConv."""
    x, edges = as_tensors(directed(), torch.float64)
    edges = torch.cat([edges[:, edges[0] != edges[1]], edges[:, edges[0] != edges[1]][:, 3:40]], 1)
    weights = torch.linspace(0.5, 2, edges.shape[1], dtype=torch.float64) if weighted else None
    data = Data(x=x, edge_index=edges, y=torch.arange(61) % 4, train_mask=torch.arange(61) < 9)
    module = stack((9, 12, 4)).double().eval()
    with torch.no_grad():
        expected = module(x, edges, weights).numpy()
    graph = load(data, weights=weights) if weighted else load(data)
    assert_equal_to(Trainer(graph, GCN((12,)), precision="fp64", threads=1).scores_of(module), expected, 1e-6)


def test_there_and_back() -> None:
    """Fails if a round trip changes a bit, or the weights share memory with the module."""
    module = stack((9, 12, 4))
    state = from_pyg(module)
    assert list(state) == ["layers.1.weight", "layers.1.bias", "layers.2.weight", "layers.2.bias"]
    assert state["layers.1.weight"].shape == (9, 12)
    other = Stack((9, 12, 4))
    to_pyg(state, other)
    for a, b in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert b.requires_grad
    for tensor in state.values():
        tensor.zero_()
    assert all(parameter.any() for parameter in other.parameters())


def test_any_module_that_holds_convolutions() -> None:
    """Fails if the layers of PyG's Sequential, or a single layer, are not found in order."""
    layers = [(GCNConv(9, 12), "x, e -> x"), torch.nn.ReLU(), (GCNConv(12, 4), "x, e -> x")]
    sequential = Sequential("x, e", layers)
    assert [tuple(t.shape) for t in from_pyg(sequential).values()] == [(9, 12), (12,), (12, 4), (4,)]
    assert [tuple(t.shape) for t in from_pyg(GCNConv(3, 2, bias=False)).values()] == [(3, 2)]


def changed(**tensors: Tensor | None) -> dict[str, Tensor]:
    """Weights of a (9, 12, 4) stack, all ones, with some exchanged or, if None, left out."""
    shapes = {"1.weight": (9, 12), "1.bias": (12,), "2.weight": (12, 4), "2.bias": (4,)}
    state: dict[str, Any] = {f"layers.{name}": torch.ones(shape) for name, shape in shapes.items()}
    state |= {f"layers.{name[1]}.{name[3:]}": tensor for name, tensor in tensors.items()}
    return {name: tensor for name, tensor in state.items() if tensor is not None}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (changed(l2_bias=torch.ones(5)), r"layers.2.bias has shape \(5,\), but the module expects \(4,\)"),
        (
            changed(l2_weight=torch.ones(4, 12)),
            r"layers.2.weight has shape \(12, 4\), but the module expects \(4, 12\)",
        ),
        (changed(l2_bias=None), "the module needs layers.2.bias"),
        (changed(l2_weight=None, l2_bias=None), "the module needs layers.2.weight"),
        (changed(l3_weight=torch.ones(4, 4)), "no place for layers.3.weight"),
    ],
    ids=["bias", "transposed", "no bias", "fewer layers", "more layers"],
)
def test_weights_that_do_not_match_change_nothing(state: dict[str, Tensor], message: str) -> None:
    """Fails if a mismatch in the last layer is found after the first was copied, or not at all."""
    module = stack((9, 12, 4))
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(ConfigError, match=message):
        to_pyg(state, module)
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())


def test_modules_that_do_not_match_are_refused() -> None:
    """Fails if weights of another shape, depth or bias are loaded, or a module without layers passes for one."""
    trainer = Trainer(directed(), GCN((12,)), config=Config(), threads=1)
    for widths, bias in (((9, 13, 4), True), ((9, 4), True), ((9, 12, 12, 4), True), ((9, 12, 4), False)):
        with pytest.raises(ConfigError, match=r"the model has the weights .*, got"):
            trainer.scores_of(from_pyg(Stack(widths, bias)))
    for state in ({name: tensor.numpy() for name, tensor in changed().items()}, changed() | {"layers.1.bias": 3}):
        with pytest.raises(ConfigError, match=r"layers.1.* must be a torch tensor, got"):
            trainer.scores_of(state)
        with pytest.raises(ConfigError, match=r"layers.1.* must be a torch tensor, got"):
            to_pyg(state, stack((9, 12, 4)))
    with pytest.raises(ConfigError, match="expected weights as a mapping from names to tensors, got list"):
        to_pyg(cast("Any", []), stack((9, 12, 4)))
    with pytest.raises(ConfigError, match=r"expected a torch module with .*GCNConv.* layers, got int"):
        trainer.scores_of(cast("Any", 3))
    with pytest.raises(ConfigError, match="Linear has none"):
        from_pyg(torch.nn.Linear(3, 2))
    with pytest.raises(ConfigError, match="before its first call"):
        from_pyg(GCNConv(-1, 4))
    with pytest.raises(ConfigError, match="before its first call"):
        to_pyg(changed(), Stack((-1, 12, 4)))


class Relations(torch.nn.Module):
    """A stack of RGCNConv layers with ReLU between them."""

    def __init__(self, widths: tuple[int, ...], conv: type[RGCNConv] = RGCNConv, **options: Any) -> None:
        super().__init__()
        pairs = itertools.pairwise(widths)
        self.convs = torch.nn.ModuleList(conv(d, e, 3, **options) for d, e in pairs)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter)

    def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        for conv in self.convs[:-1]:
            x = torch.relu(conv(x, edge_index, edge_type))
        return self.convs[-1](x, edge_index, edge_type)  # type: ignore[no-any-return]


def relations(dtype: torch.dtype) -> Data:
    """A directed graph with three relations and repeated edges."""
    generator = torch.Generator().manual_seed(SEED)
    return Data(
        x=torch.randn(61, 9, generator=generator).to(dtype),
        edge_index=torch.randint(0, 61, (2, 400), generator=generator),
        edge_type=torch.randint(0, 3, (400,), generator=generator),
        y=torch.arange(61) % 4,
        train_mask=torch.arange(61) < 9,
    )


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.float64, 1e-6)])
@pytest.mark.parametrize(
    ("conv", "options"),
    [(RGCNConv, {"num_bases": 2}), (FastRGCNConv, {"num_bases": 5, "bias": False}), (RGCNConv, {})],
    ids=str,
)
def test_relations_give_the_logits_of_pyg_and_back(
    conv: type[RGCNConv], options: dict[str, Any], dtype: torch.dtype, rtol: float
) -> None:
    """Fails if bases, coefficients or the root weight are mixed up, or matrices without bases are not composed."""
    torch.manual_seed(SEED)
    data, module = relations(dtype), Relations((9, 12, 4), conv, **options).to(dtype).eval()
    bases = options.get("num_bases", 3)
    model = RGCN((12,), bases=bases, bias=options.get("bias", True))
    precision = "fp32" if dtype == torch.float32 else "fp64"
    trainer = Trainer(load(data), model, precision=precision, threads=1, lr=0.05)
    with torch.no_grad():
        expected = module(data.x, data.edge_index, data.edge_type).numpy()
    for state in (module, from_pyg(module), from_pyg(module, model)):
        assert_equal_to(trainer.scores_of(state), expected, rtol)
    trainer.fit(epochs=3)
    to_pyg(trainer.state_dict("last"), module)
    with torch.no_grad():
        trained = module(data.x, data.edge_index, data.edge_type).numpy()
    assert np.abs(trained - expected).max() > 0.01
    assert_equal_to(trainer.predict(weights="last"), trained, rtol)


def test_relations_that_no_model_has_are_refused() -> None:
    """Fails if a layer without a root weight, with blocks, sums or other bases passes for one of mggcn's."""
    for options, message in (
        ({"root_weight": False}, "RGCNConv 1 has root_weight=False"),
        ({"num_blocks": 3}, "RGCNConv 1 has num_blocks=3, but mggcn's RGCN computes num_blocks=None; use num_bases"),
        ({"aggr": "add"}, "has aggr='add', but mggcn's RGCN computes aggr='mean'"),
    ):
        with pytest.raises(ConfigError, match=message):
            from_pyg(Relations((9, 12), **options))
    with pytest.raises(ConfigError, match=r"num_bases=2, but the model has bases=8; .*RGCN\(\.\.\., bases=2\)"):
        from_pyg(Relations((9, 12), num_bases=2), RGCN())
    with pytest.raises(ConfigError, match=r"3 relations without bases, but the model has bases=8"):
        from_pyg(Relations((9, 12)), RGCN())
    with pytest.raises(ConfigError, match=r"RGCNConv is mggcn.RGCN\(\), but the model is gcn"):
        from_pyg(Relations((9, 12)), GCN())
    with pytest.raises(ConfigError, match="has GCNConv and RGCNConv layers"):
        from_pyg(torch.nn.ModuleList([GCNConv(9, 9), RGCNConv(9, 4, 3)]))
    with pytest.raises(ConfigError, match=r"no place for layers\.1\.bases, layers\.1\.coefficients"):
        to_pyg(from_pyg(Relations((9, 12), num_bases=2)) | {"layers.1.weight": torch.ones(9, 12)}, stack((9, 12)))


class Attention(Stack):
    """A stack of GATConv or GATv2Conv layers with four heads, averaged in the last."""

    def __init__(self, conv: type[GATConv | GATv2Conv], widths: tuple[int, ...], **options: Any) -> None:
        torch.nn.Module.__init__(self)
        *inner, (last, classes) = itertools.pairwise(widths)
        options = {"heads": 4} | options
        layers = [conv(d, e // 4, **options) for d, e in inner]
        self.convs = torch.nn.ModuleList([*layers, conv(last, classes, **{"concat": False} | options)])
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter, std=0.5)


@pytest.mark.parametrize(("conv", "model"), [(GATConv, GAT), (GATv2Conv, GATv2)])
def test_attention_without_bias_gives_the_logits_of_pyg_and_back(conv: type[GATConv | GATv2Conv], model: Any) -> None:
    """Fails if a layer without a bias gets one, or GATv2's matrices, which then have none either, are mixed up."""
    torch.manual_seed(SEED)
    module = Attention(conv, (9, 12, 4), bias=False)
    trainer = Trainer(directed(), model((12,), heads=4, bias=False), threads=1, lr=0.05)
    expected = logits(module, directed(), torch.float32)
    for state in (module, from_pyg(module)):
        assert_equal_to(trainer.scores_of(state), expected, 1e-5)
    trainer.fit(epochs=3)
    to_pyg(trainer.state_dict("last"), module)
    trained = logits(module, directed(), torch.float32)
    assert np.abs(trained - expected).max() > 0.01
    assert_equal_to(trainer.predict(weights="last"), trained, 1e-5)


def test_attention_that_no_model_has_is_refused() -> None:
    """Fails if other heads, slopes, shared weights, or heads joined at the end pass for those of mggcn's."""
    for conv, options, message in (
        (GATConv, {"negative_slope": 0.1}, "GATConv 1 has negative_slope=0.1"),
        (GATv2Conv, {"share_weights": True}, "GATv2Conv 1 has share_weights=True"),
        (GATConv, {"edge_dim": 3}, "GATConv 1 has edge_dim=3"),
        (GATConv, {"residual": True}, "GATConv 1 has residual=True"),
        (GATConv, {"concat": True}, "GATConv 2 has concat=True, .*give it concat=False"),
        (
            GATv2Conv,
            {"add_self_loops": False},
            r"add_self_loops=False, .*model=mggcn.GATv2\(\.\.\., self_loops=False\)",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            from_pyg(Attention(conv, (9, 12, 4), **options))
    with pytest.raises(ConfigError, match="GATConv 1 has heads=4, but the model has heads=2"):
        from_pyg(Attention(GATConv, (9, 12, 4)), GAT(heads=2))
    apart = Attention(GATConv, (9, 12, 4))
    apart.convs[0] = GATConv((9, 9), 3, heads=4)
    with pytest.raises(ConfigError, match="GATConv 1 has a matrix for sources and one for destinations"):
        from_pyg(apart)


def test_norms_and_activations_that_the_model_has_not_are_refused() -> None:
    """Fails if a norm or activation of another model, of other options or number is left out or taken for its own."""
    module, model = network_of("gcn", "batch", "elu")
    changes: list[tuple[dict[str, Any], str]] = [
        ({"norm_layer": "none"}, r"norms.0.weight.*model=mggcn.GCN\(\.\.\., activation='elu', norm_layer='batch'\)"),
        ({"norm_layer": "layer"}, "a LayerNorm for each of 2 hidden layers, but the module has 0"),
        ({"activation": "relu"}, "ReLU and dropout between GCNConv layers, the module also has ELU"),
        ({"residual": "linear"}, "the model has residual; copy tensors by name"),
        ({"dense_before": (5,)}, "the model has dense_before"),
    ]
    for change, message in changes:
        with pytest.raises(ConfigError, match=message):
            from_pyg(module, dataclasses.replace(model, **change))
    module.norms[0].eps = 1e-3
    with pytest.raises(ConfigError, match=r"BatchNorm1d 1 has eps=0.001, but mggcn's norms have eps=1e-05"):
        from_pyg(module, model)
    graph_norm = torch.nn.ModuleList([GCNConv(9, 12), pyg.LayerNorm(12), torch.nn.ReLU(), GCNConv(12, 4)])
    with pytest.raises(ConfigError, match="LayerNorm 1 has mode='graph'"):
        from_pyg(graph_norm, GCN((12,), norm_layer="layer"))


def test_sage_gin_and_sgc_that_no_model_has_are_refused() -> None:
    """Fails if another aggregator, projection, number of hops or other dense layers pass for those of mggcn's."""
    for conv, message in (
        (SAGEConv(9, 4, normalize=True), "SAGEConv 1 has normalize=True"),
        (SAGEConv(9, 4, root_weight=False), "SAGEConv 1 has root_weight=False"),
        (SAGEConv(9, 4, aggr="max"), "SAGEConv 1 has aggr='max' with project=False"),
        (SAGEConv(9, 4, project=True), "SAGEConv 1 has aggr='mean' with project=True"),
        (SAGEConv(9, 4, aggr="add"), "SAGEConv 1 has aggr='add'"),
        (GINConv(torch.nn.Linear(9, 4)), "GINConv 1 has Linear; mggcn's GIN has two dense layers"),
        (gin_conv(9, 4, torch.nn.Tanh()), "GINConv 1 has Linear, Tanh, Linear"),
        (GINConv(pyg.MLP([9, 4, 4])), "GINConv 1 has Linear, BatchNorm, ReLU, Linear"),
        (gin_conv(9, 4, torch.nn.ELU()), r"GINConv 1 has Linear, ELU, Linear; .*model.activation relu"),
    ):
        with pytest.raises(ConfigError, match=message):
            from_pyg(conv)
    sgc = SGC(hops=3)
    for module, model, message in (
        (torch.nn.ModuleList([pyg.SGConv(9, 9, 3), pyg.SGConv(9, 4, 3)]), sgc, "several SGConv layers"),
        (pyg.SGConv(9, 4, 2), sgc, r"SGConv has K=2 .*hops=3 .*mggcn.SGC\(hops=2\)"),
        (pyg.SGConv(9, 4, 3), dataclasses.replace(sgc, norm="mean"), "the symmetric norm, .*norm='mean'"),
        (pyg.SGConv(9, 4, 3, add_self_loops=False), sgc, "SGConv 1 has add_self_loops=False"),
        (pyg.SGConv(9, 4, 3, aggr="mean"), sgc, "SGConv 1 has aggr='mean'"),
        (pyg.SGConv(9, 4, 3), GCN(), r"SGConv is mggcn.SGC\(\), but the model is gcn"),
    ):
        with pytest.raises(ConfigError, match=message):
            from_pyg(module, model)
    assert len(from_pyg(pyg.SGConv(9, 4, 3))) == 2
    assert len(from_pyg(GINConv(pyg.MLP([9, 4, 4], norm=None)))) == 5
    assert len(from_pyg(pyg.GIN(9, 12, 2, 4))) == 10
    assert len(from_pyg(SAGEConv(9, 4))) == 3
    with pytest.raises(ConfigError, match=r"model=mggcn.SAGE\(\.\.\., aggregator='mean', self_loops=False\)"):
        from_pyg(SAGEConv(9, 4), SAGE())


def gin_steps(d: int, e: int, steps: str, **modules: torch.nn.Module) -> torch.nn.Sequential:
    """A Sequential of dense layers L, activations R (ReLU), E (ELU) and modules by letter."""
    made: dict[str, Any] = {"R": torch.nn.ReLU(), "E": torch.nn.ELU(), "A": torch.nn.ELU(2.0), "D": torch.nn.Dropout()}
    dense = iter([torch.nn.Linear(d, e), torch.nn.Linear(e, e), torch.nn.Linear(e, e)])
    return torch.nn.Sequential(*(next(dense) if step == "L" else (made | modules)[step] for step in steps))


class Gin(Stack):
    """Two GINConv layers with an activation, and perhaps a norm, between them."""

    def __init__(self, hidden: Any, last: Any, norm: torch.nn.Module | None = None, act: Any = None) -> None:
        torch.nn.Module.__init__(self)
        self.convs = torch.nn.ModuleList([GINConv(hidden, train_eps=True), GINConv(last, train_eps=True)])
        self.between = torch.nn.Sequential(norm or torch.nn.Identity(), act or torch.nn.ReLU())

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        return self.convs[1](self.between(self.convs[0](x, edge_index)), edge_index)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "hidden",
    [
        gin_steps(9, 12, "LRL"),
        gin_steps(9, 12, "LRDL"),
        gin_steps(9, 12, "LRLR"),
        torch.nn.Sequential(gin_steps(9, 12, "LR"), torch.nn.Linear(12, 12)),
        pyg.MLP([9, 12, 12], norm=None),
        pyg.MLP([9, 12, 12], norm=None, act=torch.relu),
    ],
)
def test_gin_of_these_dense_layers_gives_the_logits_of_pyg(hidden: Any) -> None:
    """Fails if dense layers that mggcn has are refused, or computed otherwise."""
    module = Gin(hidden, gin_steps(12, 4, "LRL")).double()
    trainer = Trainer(directed(), GIN((12,)), precision="fp64", threads=1)
    assert_equal_to(trainer.scores_of(module), logits(module, directed(), torch.float64), 1e-10)


@pytest.mark.parametrize(
    ("hidden", "last", "norm", "has"),
    [
        ("LL", "LRL", "none", "GINConv 1 has Linear, Linear;"),
        ("LRL", "LRLR", "none", "GINConv 2 has Linear, ReLU, Linear, ReLU;"),
        ("RLRL", "LRL", "none", "GINConv 1 has ReLU, Linear, ReLU, Linear;"),
        ("LRRLR", "LRL", "none", "GINConv 1 has Linear, ReLU, ReLU, Linear, ReLU;"),
        ("LRLRL", "LRL", "batch", "GINConv 1 has Linear, ReLU, Linear, ReLU, Linear;"),
        ("LRLR", "LRL", "layer", "GINConv 1 has Linear, ReLU, Linear, ReLU;"),
        ("LRLR", "LRL", "batch", "GINConv 1 has Linear, ReLU, Linear, ReLU;"),
        ("LELE", "LEL", "none", "GINConv 1 has Linear, ELU, Linear, ELU;"),
        ("LAL", "LEL", "none", r"GINConv 1 has Linear, ELU\(alpha=2.0\), Linear;"),
    ],
)
def test_gin_with_activations_elsewhere_is_refused(hidden: str, last: str, norm: str, has: str) -> None:
    """Fails if an activation that is missing, or stands before, behind or twice, goes unseen: logits would differ."""
    act = "elu" if "E" in last else "relu"
    norms = {"none": None, "layer": torch.nn.LayerNorm(12), "batch": torch.nn.BatchNorm1d(12)}
    module = Gin(
        gin_steps(9, 12, hidden), gin_steps(12, 4, last), norms[norm], torch.nn.ELU() if act == "elu" else None
    )
    with pytest.raises(ConfigError, match=has):
        from_pyg(module, GIN((12,), activation=act, norm_layer=norm))


@pytest.mark.parametrize(
    ("mlp", "has"),
    [
        (pyg.MLP([9, 12, 12], norm=None, act=None), "has Linear, Linear;"),
        (pyg.MLP([9, 12, 12], norm=None, act="elu"), "has Linear, ELU, Linear;"),
        (pyg.MLP([9, 12, 12], norm=None, act="elu", plain_last=False), "has Linear, ELU, Linear, ELU;"),
        (pyg.MLP([9, 12, 12, 12], norm=None), "has Linear, ReLU, Linear, ReLU, Linear;"),
        (pyg.MLP([9, 12, 12], norm="layer_norm"), "has Linear, LayerNorm, ReLU, Linear;"),
        (gin_steps(9, 12, "LRLR"), "has Linear, ReLU, Linear, ReLU;"),
        (torch.nn.ModuleList([torch.nn.Linear(9, 12), torch.nn.Linear(12, 12), torch.nn.Tanh()]), "has Tanh;"),
    ],
)
def test_gin_with_a_last_layer_of_other_steps_is_refused(mlp: Any, has: str) -> None:
    """Fails if PyG's MLP, or a module of one's own, passes with an activation that the model has not there."""
    with pytest.raises(ConfigError, match=f"GINConv 1 {has}"):
        from_pyg(GINConv(mlp))


def test_gin_of_another_inner_width_is_refused_in_words() -> None:
    """Fails if the answer names shapes that no setting gives."""
    conv = GINConv(torch.nn.Sequential(torch.nn.Linear(9, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)))
    trainer = Trainer(directed(), GIN(()), threads=1)
    for action in (lambda: from_pyg(conv), lambda: trainer.scores_of(conv)):
        with pytest.raises(ConfigError, match=r"widths 16 and 4, but in mggcn's GIN both have the width of the output"):
            action()


@pytest.mark.parametrize(
    ("parts", "advice"),
    [
        ((torch.nn.ELU(),), r"model=mggcn.GAT\(\.\.\., activation='elu'\), also for the Trainer"),
        ((torch.nn.BatchNorm1d(12),), r"model=mggcn.GAT\(\.\.\., norm_layer='batch'\)"),
        (
            (torch.nn.LayerNorm(12), torch.nn.GELU(), torch.nn.Dropout()),
            r"model=mggcn.GAT\(\.\.\., activation='gelu', norm_layer='layer'\)",
        ),
        ((torch.nn.ELU(2.0),), r"has ELU\(alpha=2.0\); .*write the model with mggcn.nn"),
        ((torch.nn.ELU(), torch.nn.ReLU()), "write the model with mggcn.nn"),
        ((torch.nn.ELU(), torch.nn.Linear(4, 4)), "write the model with mggcn.nn"),
    ],
)
def test_advice_names_the_model_of_the_layers(parts: tuple[torch.nn.Module, ...], advice: str) -> None:
    """Fails if the advice is of another kind than the layers, or names a setting that does not help."""
    layers = [GATConv(9, 3, heads=4), GATConv(12, 4, heads=1)]
    module = torch.nn.ModuleList([layers[0], *parts, layers[1]])
    for model in (None, GAT((12,), heads=4, out_heads=1)):
        with pytest.raises(ConfigError, match=advice):
            from_pyg(module, model)
    if "activation='elu'" in advice:
        assert len(from_pyg(module, GAT((12,), heads=4, out_heads=1, activation="elu"))) == 8


def test_synonyms_stay_as_they_are() -> None:
    """Fails if one importer's entry would be everyone's."""
    with pytest.raises(TypeError):
        SYNONYMS["mean"] = "sum"  # type: ignore[index]
