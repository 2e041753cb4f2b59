"""Weights from DGL's layers: its logits on the same graph, and what is refused. Without DGL its classes have stand-ins."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch_geometric import nn as pyg

import mggcn
from mggcn.config import ModelConfig
from mggcn.errors import ConfigError
from mggcn.graph.csr import Graph

SEED, VERTICES, FEATURES, HIDDEN, CLASSES, HEADS, RELATIONS = 5309, 61, 9, 8, 4, 2, 3
needs_dgl = pytest.mark.skipif(importlib.util.find_spec("dgl") is None, reason="DGL is not installed")


@dataclasses.dataclass(frozen=True)
class Kind:
    """make: a layer of DGL's module from widths and whether it is the last; call: its options in `forward`."""

    make: Callable[[Any, int, int, bool], Any]
    model: ModelConfig
    loops: bool = True
    heads: int = 1
    layers: int = 2


def gin(dgl: Any, d: int, e: int, last: bool) -> Any:
    return dgl.GINConv(nn.Sequential(nn.Linear(d, e), nn.ReLU(), nn.Linear(e, e)), "sum", init_eps=0.3, learn_eps=True)


KINDS = {
    "GraphConv": Kind(lambda dgl, d, e, last: dgl.GraphConv(d, e), mggcn.GCN(HIDDEN, self_loops=False)),
    "GraphConv-own-activation": Kind(
        lambda dgl, d, e, last: dgl.GraphConv(d, e, norm="right", activation=None if last else torch.relu),
        mggcn.GCN(HIDDEN, norm="mean", self_loops=False),
    ),
    "GraphConv-added-loops": Kind(lambda dgl, d, e, last: dgl.GraphConv(d, e), mggcn.GCN(HIDDEN)),
    "SAGEConv-mean": Kind(
        lambda dgl, d, e, last: dgl.SAGEConv(d, e, "mean"),
        mggcn.SAGE(HIDDEN, aggregator="mean", self_loops=False),
        loops=False,
    ),
    "SAGEConv-pool": Kind(
        lambda dgl, d, e, last: dgl.SAGEConv(d, e, "pool"),
        mggcn.SAGE(HIDDEN, aggregator="max", self_loops=False),
        loops=False,
    ),
    "SAGEConv-gcn": Kind(lambda dgl, d, e, last: dgl.SAGEConv(d, e, "gcn"), mggcn.SAGE(HIDDEN), loops=False),
    "GATConv": Kind(
        lambda dgl, d, e, last: dgl.GATConv(d, e if last else e // HEADS, HEADS),
        mggcn.GAT(HIDDEN, heads=HEADS, self_loops=False),
        heads=HEADS,
    ),
    "GATv2Conv": Kind(
        lambda dgl, d, e, last: dgl.GATv2Conv(d, e if last else e // HEADS, HEADS),
        mggcn.GATv2(HIDDEN, heads=HEADS, self_loops=False),
        heads=HEADS,
    ),
    "GINConv": Kind(gin, mggcn.GIN(HIDDEN), loops=False),
    "SGConv": Kind(lambda dgl, d, e, last: dgl.SGConv(d, e, k=3), mggcn.SGC(hops=3, self_loops=False), layers=1),
    "RelGraphConv": Kind(
        lambda dgl, d, e, last: dgl.RelGraphConv(d, e, RELATIONS), mggcn.RGCN(HIDDEN, bases=RELATIONS), loops=False
    ),
    "RelGraphConv-basis": Kind(
        lambda dgl, d, e, last: dgl.RelGraphConv(d, e, RELATIONS, "basis", 2), mggcn.RGCN(HIDDEN, bases=2), loops=False
    ),
}


def edges_of(kind: Kind) -> np.ndarray:
    """A symmetric graph (2, E), with a self-loop on every vertex where layers need some."""
    rng = np.random.default_rng(SEED)
    pairs = np.unique(np.sort(rng.integers(0, VERTICES, (150, 2)), axis=1), axis=0)
    pairs = np.concatenate([pairs[pairs[:, 0] != pairs[:, 1]], [[v, (v + 1) % VERTICES] for v in range(VERTICES)]])
    pairs = np.unique(np.sort(pairs, axis=1), axis=0)
    both = np.concatenate([pairs, pairs[:, ::-1]])
    if kind.loops:
        both = np.concatenate([both, np.repeat(np.arange(VERTICES), 2).reshape(-1, 2)])
    return both.T


def make(kind: Kind, dgl: Any) -> nn.ModuleList:
    """The layers with random weights, biases too."""
    torch.manual_seed(SEED)
    widths = [FEATURES, *[HIDDEN] * (kind.layers - 1), CLASSES]
    pairs = list(itertools.pairwise(widths))
    layers = nn.ModuleList(kind.make(dgl, d, e, number == len(pairs)) for number, (d, e) in enumerate(pairs, 1))
    for name, parameter in layers.named_parameters():
        if "bias" in name:
            nn.init.normal_(parameter)
    return layers


def logits(kind: Kind, layers: nn.ModuleList, graph: Any, x: Tensor, types: Tensor) -> np.ndarray:
    """What a user's forward gives: heads flattened, those of the last averaged."""
    for number, conv in enumerate(layers, start=1):
        last = number == len(layers)
        if type(conv).__name__ == "RelGraphConv":
            targets = graph.edges()[1]
            groups = targets * RELATIONS + types
            x = conv(graph, x, types, 1 / torch.bincount(groups)[groups].unsqueeze(1))
        else:
            x = conv(graph, x)
        if kind.heads > 1:
            x = x.mean(1) if last else x.flatten(1)
        x = x if last else torch.relu(x)
    found: np.ndarray = x.detach().numpy()
    return found


def graphs_of(kind: Kind) -> tuple[np.ndarray, np.ndarray, Graph]:
    edges = edges_of(kind)
    types = np.random.default_rng(SEED).integers(0, RELATIONS, edges.shape[1])
    typed = {"edge_types": types} if kind.model.kind == "rgcn" else {}
    x = np.random.default_rng(SEED + 1).standard_normal((VERTICES, FEATURES)).astype(np.float32)
    labels = np.arange(VERTICES) % CLASSES
    return edges, types, mggcn.load(edges, features=x, labels=labels, splits={"train": range(VERTICES)}, **typed)


@needs_dgl
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", KINDS)
def test_logits_are_those_of_dgl(name: str) -> None:
    """Fails if a weight is read from another place, turned round, or a layer computes something else."""
    dgl = pytest.importorskip("dgl")
    kind = KINDS[name]
    edges, types, graph = graphs_of(kind)
    layers = make(kind, dgl.nn)
    x = torch.from_numpy(graph.features.array())  # type: ignore[union-attr]
    own = dgl.graph((torch.from_numpy(edges[0].copy()), torch.from_numpy(edges[1].copy())), num_nodes=VERTICES)
    expected = logits(kind, layers, own, x, torch.from_numpy(types))
    trainer = mggcn.Trainer(graph, kind.model, threads=1)
    got = trainer.scores_of(layers)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    np.testing.assert_array_equal(got, trainer.scores_of(mggcn.from_dgl(layers, kind.model)))


def stand_in(name: str, **parts: Any) -> Any:
    """A layer with the parts of DGL's of that name; it has no `forward`."""
    layer = type(name, (nn.Module,), {"__module__": "dgl.nn.pytorch.conv"})()
    for part, value in parts.items():
        setattr(layer, part, value)
    return layer


def graph_conv(d: int = 3, e: int = 2, **parts: Any) -> Any:
    plain = {"weight": nn.Parameter(torch.randn(d, e)), "bias": nn.Parameter(torch.randn(e)), "_norm": "both"}
    return stand_in("GraphConv", **plain | {"_activation": None} | parts)


def sage_of(conv: Any) -> Any:
    """DGL's form of a SAGEConv of PyG's, whose bias is the neighbours'."""
    root = nn.Linear(*conv.lin_r.weight.shape[::-1])
    root.weight, root.bias = conv.lin_r.weight, conv.lin_l.bias
    parts = {"fc_pool": conv.lin} if conv.project else {}
    kind = {"_aggre_type": "pool" if conv.project else "mean", "norm": None, "activation": None}
    return stand_in("SAGEConv", fc_self=root, fc_neigh=conv.lin_l, **kind, **parts)


def gat_of(conv: Any, **parts: Any) -> Any:
    each = conv.bias if conv.concat else nn.Parameter(torch.stack([conv.bias + 1, conv.bias - 1]).flatten())
    plain = {"fc": conv.lin, "attn_l": conv.att_src, "attn_r": conv.att_dst, "bias": each, "_num_heads": conv.heads}
    return stand_in("GATConv", **plain | {"leaky_relu": nn.LeakyReLU(0.2), "res_fc": None, "activation": None} | parts)


def pairs_of_layers() -> dict[str, tuple[list[Any], list[Any], ModelConfig]]:
    """PyG's layers and DGL's with the same weights."""
    torch.manual_seed(SEED)
    gcn = [pyg.GCNConv(3, 4), pyg.GCNConv(4, 2)]
    mean = [pyg.SAGEConv(3, 4), pyg.SAGEConv(4, 2)]
    pool = [pyg.SAGEConv(d, e, aggr="max", project=True) for d, e in ((3, 4), (4, 2))]
    gat = [pyg.GATConv(3, 2, heads=2), pyg.GATConv(4, 2, heads=2, concat=False)]
    sgc = [pyg.SGConv(3, 2, K=3)]
    for conv in (*gcn, *mean, *pool, *gat, *sgc):
        for parameter in conv.parameters():
            nn.init.normal_(parameter)
    turned = [graph_conv(weight=nn.Parameter(c.lin.weight.t()), bias=c.bias) for c in gcn]
    return {
        "GraphConv": (gcn, turned, mggcn.GCN(4)),
        "SAGEConv-mean": (mean, [sage_of(c) for c in mean], mggcn.SAGE(4, aggregator="mean", self_loops=False)),
        "SAGEConv-pool": (pool, [sage_of(c) for c in pool], mggcn.SAGE(4, aggregator="max", self_loops=False)),
        "GATConv": (gat, [gat_of(c) for c in gat], mggcn.GAT(4, heads=2)),
        "SGConv": (sgc, [stand_in("SGConv", fc=sgc[0].lin, _k=3, norm=None)], mggcn.SGC(hops=3)),
    }


@pytest.mark.parametrize("name", ["GraphConv", "SAGEConv-mean", "SAGEConv-pool", "GATConv", "SGConv"])
def test_states_are_those_of_pyg_layers(name: str) -> None:
    """Fails if a weight of DGL's form is read from another place or side than PyG's, or heads' biases are not averaged."""
    theirs, stand_ins, model = pairs_of_layers()[name]
    expected = mggcn.from_pyg(nn.ModuleList(theirs), model)
    got = mggcn.from_dgl(nn.ModuleList(stand_ins), model)
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value)


REFUSED: dict[str, tuple[Callable[[], Any], ModelConfig | None, str]] = {
    "norm none": (lambda: graph_conv(_norm="none"), None, "norm='none'"),
    "norm left": (lambda: graph_conv(_norm="left"), None, "norm='left'"),
    "norm right": (
        lambda: graph_conv(_norm="right"),
        mggcn.GCN(4),
        r'GCN\(norm="mean"\), but the model is gcn with norm symmetric',
    ),
    "no matrix": (lambda: graph_conv(weight=None), None, "weight=False"),
    "activation after the last": (lambda: graph_conv(_activation=torch.relu), None, "none after the last layer"),
    "another model": (graph_conv, mggcn.SAGE(4), "but the model is sage"),
    "residual": (lambda: gat_of(pyg.GATConv(3, 2), res_fc=nn.Identity()), None, "residual=True"),
    "slope": (lambda: gat_of(pyg.GATConv(3, 2), leaky_relu=nn.LeakyReLU(0.1)), None, "negative_slope=0.1"),
    "heads": (lambda: gat_of(pyg.GATConv(3, 2)), mggcn.GAT(4, heads=2), "out_heads=2"),
    "lstm": (lambda: stand_in("SAGEConv", _aggre_type="lstm", norm=None, activation=None), None, "lstm"),
    "no twin": (lambda: stand_in("ChebConv"), None, "has none; other layers have no twin"),
    "PyG's": (lambda: pyg.GCNConv(3, 2), None, r"PyG's layer; mggcn.from_pyg\(module, model\)"),
    "something else": (lambda: nn.PReLU(), None, "has none"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_layers_that_no_model_has_are_refused(case: str) -> None:
    """Fails if weights are read of a layer that computes something else."""
    make_layer, model, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        mggcn.from_dgl(nn.Sequential(make_layer()), model)


@pytest.mark.parametrize("name", ["GraphConv", "SAGEConv", "GATConv"])
def test_from_pyg_names_from_dgl(name: str) -> None:
    """Fails if DGL's layers, whose classes have PyG's names, end in an AttributeError."""
    with pytest.raises(ConfigError, match=r"DGL's layer; mggcn.from_dgl\(module, model\)"):
        mggcn.from_pyg(nn.Sequential(stand_in(name)))
    with pytest.raises(ConfigError, match="DGL's layer"):
        mggcn.to_pyg({}, nn.Sequential(stand_in(name)))


@pytest.mark.parametrize("name", ["GCNConv", "SAGEConv", "GATConv", "GraphConv"])
@pytest.mark.parametrize("read", [mggcn.from_pyg, mggcn.from_dgl])
def test_a_class_of_ones_own_is_no_layer_of_theirs(name: str, read: Callable[[Any], Any]) -> None:
    """Fails if a layer that somebody wrote under such a name ends in an AttributeError, or is read as theirs."""
    own = type(name, (nn.Module,), {"__module__": "paper.layers"})()
    own.lin = nn.Linear(3, 2)
    with pytest.raises(ConfigError, match="layer") as caught:
        read(nn.Sequential(own))
    assert "a class of paper.layers" in str(caught.value) or "has none; other" in str(caught.value)


def test_a_class_made_of_a_layer_is_known() -> None:
    """Fails if a class of one's own that inherits from a layer of DGL's under its name is read as PyG's."""
    made = type("GATConv", (type(stand_in("GATConv")),), {"__module__": "paper.layers"})()
    with pytest.raises(ConfigError, match="DGL's layer"):
        mggcn.from_pyg(nn.Sequential(made))


def test_a_trainer_starts_from_dgl_layers() -> None:
    """Fails if start_from reads layers of DGL's by PyG's names."""
    _, _, graph = graphs_of(KINDS["GraphConv"])
    layers = nn.Sequential(graph_conv(FEATURES, HIDDEN), graph_conv(HIDDEN, CLASSES))
    trainer = mggcn.Trainer(graph, mggcn.GCN(HIDDEN, self_loops=False), start_from=layers, threads=1, lr=1e-9)
    trainer.fit(epochs=1)
    np.testing.assert_allclose(
        trainer.state_dict(weights="last")["layers.1.weight"], layers[0].weight.detach(), atol=1e-6
    )
