"""Every convolution beside PyG's: equal logits for equal weights on one rank and several, and back; what is refused."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch_geometric import nn as pyg
from torch_geometric.data import Data
from torch_geometric.utils import add_remaining_self_loops

from mggcn.api.graphs import load, save
from mggcn.api.trainer import Trainer
from mggcn.assemble.rank import Rank
from mggcn.config import ModelConfig
from mggcn.errors import ConfigError, GraphError
from mggcn.graph.csr import Graph
from mggcn.graph.options import GraphOptions
from mggcn.interop.weights import from_pyg, to_pyg
from tests.graphs import on_ranks
from tests.train.test_exact import config_of
from tests.train.test_mixed import with_run

SEED, VERTICES, FEATURES, CLASSES, HEADS, RELATIONS, HOPS = 8086, 61, 9, 4, 4, 3, 4
Slots = list[dict[str, Tensor]]
"""Of each matrix of a layer in mggcn's order, its parameters by the end of their names: views of PyG's."""


class SageGcn(nn.Module):
    """(sum of neighbours + self) / (degree + 1), times a matrix: GraphSAGE's aggregator gcn of PyG's parts."""

    def __init__(self, d: int, e: int) -> None:
        super().__init__()
        self.mean, self.lin = pyg.SimpleConv("mean"), nn.Linear(d, e)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.lin(self.mean(x, add_remaining_self_loops(edges, num_nodes=len(x))[0]))  # type: ignore[no-any-return]


class SageLoops(pyg.SAGEConv):  # type: ignore[misc]
    """A mean that counts the vertex itself, as published with self-loops in the graph."""

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return super().forward(x, add_remaining_self_loops(edges, num_nodes=len(x))[0])  # type: ignore[no-any-return]


class Dense(nn.Linear):
    """A dense layer in place of a convolution."""

    def forward(self, x: Tensor, *edges: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)


def gin_conv(d: int, e: int, act: nn.Module) -> pyg.GINConv:
    return pyg.GINConv(nn.Sequential(nn.Linear(d, e), act, nn.Linear(e, e)), train_eps=True)


def attention(conv: Any, d: int, e: int, last: bool) -> Any:
    return conv(d, e if last else e // HEADS, heads=HEADS, concat=not last)


def linear(layer: Any) -> dict[str, Tensor]:
    return {"weight": layer.weight.data.t()} | ({} if layer.bias is None else {"bias": layer.bias.data})


CONVS: dict[str, tuple[Callable[[int, int, nn.Module, bool], Any], dict[str, Any], Callable[[Any], Slots]]] = {
    "gcn": (
        lambda d, e, act, last: pyg.GCNConv(d, e),
        {"kind": "gcn"},
        lambda c: [linear(c.lin) | {"bias": c.bias.data}],
    ),
    "sage-gcn": (lambda d, e, act, last: SageGcn(d, e), {"kind": "sage"}, lambda c: [linear(c.lin)]),
    "sage-mean": (
        lambda d, e, act, last: pyg.SAGEConv(d, e),
        {"kind": "sage", "aggregator": "mean", "self_loops": False},
        lambda c: [{"weight": c.lin_l.weight.data.t()}, linear(c.lin_r) | {"bias": c.lin_l.bias.data}],
    ),
    "sage-mean-loops": (
        lambda d, e, act, last: SageLoops(d, e),
        {"kind": "sage", "aggregator": "mean"},
        lambda c: [{"weight": c.lin_l.weight.data.t()}, linear(c.lin_r) | {"bias": c.lin_l.bias.data}],
    ),
    "sage-max": (
        lambda d, e, act, last: pyg.SAGEConv(d, e, aggr="max", project=True),
        {"kind": "sage", "aggregator": "max"},
        lambda c: [linear(c.lin), linear(c.lin_r), linear(c.lin_l)],
    ),
    "gin": (
        lambda d, e, act, last: gin_conv(d, e, act),
        {"kind": "gin"},
        lambda c: [linear(c.nn[0]) | {"eps": c.eps.data}, linear(c.nn[2])],
    ),
    "gat": (
        lambda d, e, act, last: attention(pyg.GATConv, d, e, last),
        {"kind": "gat", "heads": HEADS},
        lambda c: [linear(c.lin) | {"source": c.att_src.data[0], "destination": c.att_dst.data[0]}],
    ),
    "gat-one-last": (
        lambda d, e, act, last: pyg.GATConv(d, e, heads=1) if last else attention(pyg.GATConv, d, e, last),
        {"kind": "gat", "heads": HEADS, "out_heads": 1},
        lambda c: [linear(c.lin) | {"source": c.att_src.data[0], "destination": c.att_dst.data[0]}],
    ),
    "gatv2-averaged": (
        lambda d, e, act, last: pyg.GATv2Conv(d, e, heads=HEADS, concat=False),
        {"kind": "gatv2", "heads": HEADS, "concat_heads": False},
        lambda c: [linear(c.lin_l), linear(c.lin_r) | {"attention": c.att.data[0]}],
    ),
    "gatv2": (
        lambda d, e, act, last: attention(pyg.GATv2Conv, d, e, last),
        {"kind": "gatv2", "heads": HEADS},
        lambda c: [linear(c.lin_l), linear(c.lin_r) | {"attention": c.att.data[0]}],
    ),
    "rgcn": (
        lambda d, e, act, last: pyg.RGCNConv(d, e, RELATIONS, num_bases=2),
        {"kind": "rgcn", "bases": 2},
        lambda c: [
            {"weight": c.root.data, "bases": c.weight.data, "coefficients": c.comp.data, "bias": c.bias.data},
        ],
    ),
    "sgc": (
        lambda d, e, act, last: pyg.SGConv(d, e, HOPS),
        {"kind": "sgc", "hops": HOPS},
        lambda c: [linear(c.lin)],
    ),
    "appnp": (
        lambda d, e, act, last: Dense(d, e),
        {"kind": "appnp", "hops": HOPS, "teleport": 0.2},
        lambda c: [linear(c)],
    ),
}
"""By name: PyG's layer (input and output width, activation, whether it is the last), the model, the layer's parameters."""
NORMS: dict[str, Any] = {"none": None, "layer": nn.LayerNorm, "batch": nn.BatchNorm1d}
ACTS: dict[str, nn.Module] = {"relu": nn.ReLU(), "elu": nn.ELU(), "leaky_relu": nn.LeakyReLU(), "gelu": nn.GELU()}
AROUND: dict[str, dict[str, Any]] = {
    "plain": {},
    "residual": {"residual": "linear"},
    "identity": {"residual": "identity", "hidden": (12, 12)},
    "concat": {"jumping": "concat"},
    "max": {"jumping": "max", "hidden": (12, 12), "residual": "linear"},
}


class Network(nn.Module):
    """Convolutions with norms and an activation between them, residuals, PyG's jumping knowledge or propagation."""

    def __init__(self, name: str, model: ModelConfig) -> None:
        super().__init__()
        make, _, self.slots = CONVS[name]
        self.model, self.act = model, ACTS[model.activation]
        pairs = list(itertools.pairwise((FEATURES, *model.hidden)))
        hidden = [make(d, e, self.act, False) for d, e in pairs]
        self.norms = nn.ModuleList([] if model.norm_layer == "none" else [NORMS[model.norm_layer](e) for _, e in pairs])
        self.residuals = nn.ModuleList(nn.Linear(d, e) for d, e in pairs if model.residual == "linear")
        width = (FEATURES, *model.hidden)[-1]
        self.head = self.joined = self.propagate = None
        if model.jumping == "last":
            hidden.append(make(width, CLASSES, self.act, True))
        else:
            self.joined = pyg.JumpingKnowledge("cat" if model.jumping == "concat" else "max")
            self.head = nn.Linear(sum(model.hidden) if model.jumping == "concat" else width, CLASSES)
        if model.kind == "appnp":
            self.propagate = pyg.APPNP(HOPS, model.teleport)
        self.convs = nn.ModuleList(hidden)
        for key, parameter in self.named_parameters():
            if key.endswith(("bias", "eps")) or "norms" in key:
                nn.init.normal_(parameter, mean=0.5)
        for buffer in self.buffers():
            if buffer.dtype.is_floating_point:
                nn.init.uniform_(buffer, 0.5, 1.5)

    def forward(self, x: Tensor, *edges: Tensor) -> Tensor:
        layers = []
        for number in range(len(self.model.hidden)):
            h = self.convs[number](x, *edges)
            if self.model.residual == "linear":
                h = h + self.residuals[number](x)
            elif self.model.residual == "identity" and h.shape == x.shape:
                h = h + x
            x = self.act(self.norms[number](h) if self.norms else h)
            layers.append(x)
        if self.joined is not None:
            return self.head(self.joined(layers))  # type: ignore[misc, no-any-return]
        x = self.convs[-1](x, *edges)
        return x if self.propagate is None else self.propagate(x, *edges)  # type: ignore[no-any-return]

    def named(self) -> dict[str, Tensor]:
        """Parameters and running statistics by mggcn's names, as views."""
        slots: Slots = []
        found: dict[str, Tensor] = {}
        for number, conv in enumerate(self.convs):
            slots += self.slots(conv)
            slots += [linear(layer) for layer in self.residuals[number : number + 1]]
            if self.model.attends:
                found[f"attention.{number + 1}.bias"] = conv.bias.data
        slots += [] if self.head is None else [linear(self.head)]
        for number, slot in enumerate(slots, start=1):
            found |= {f"layers.{number}.{end}": tensor for end, tensor in slot.items()}
        for number, norm in enumerate(self.norms, start=1):
            tensors = {key: value for key, value in norm.state_dict().items() if value.dim()}
            found |= {f"norms.{number}.{end}": tensor for end, tensor in tensors.items()}
        return found


def network_of(name: str, norm: str = "none", act: str = "relu", around: str = "plain") -> tuple[Network, ModelConfig]:
    """A module of two hidden layers, SGC's of none, and the model that it is."""
    torch.manual_seed(SEED)
    settings = {"hidden": (12, 8), "norm_layer": norm, "activation": act} | AROUND[around] | CONVS[name][1]
    if name == "sgc":
        settings = {"hidden": ()} | CONVS[name][1]
    model = ModelConfig(**settings)
    return Network(name, model).eval(), model


@functools.cache
def data_of(kind: str, weighted: bool) -> tuple[Graph, tuple[Tensor, ...]]:
    """A directed graph, some vertices without in-edges, and what PyG's layers read: parallel edges only with types."""
    generator = torch.Generator().manual_seed(SEED)
    x = torch.randn(VERTICES, FEATURES, generator=generator)
    edges = torch.randint(0, VERTICES - 3, (2, 400), generator=generator)
    known = {"x": x, "y": torch.arange(VERTICES) % CLASSES, "train_mask": torch.arange(VERTICES) < 9}
    if kind == "rgcn":
        types = torch.randint(0, RELATIONS, (400,), generator=generator)
        return load(Data(edge_index=edges, edge_type=types, **known)), (x, edges, types)
    edges = edges.unique(dim=1)
    if not weighted:
        return load(Data(edge_index=edges, **known)), (x, edges)
    weights = torch.rand(edges.shape[1], generator=generator) + 0.5
    return load(Data(edge_index=edges, **known), weights=weights), (x, edges, weights)


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def _cases() -> list[tuple[str, str, str, str, bool]]:
    """Convolution, norm, activation, what is around, whether edges have weights: what models and PyG have."""
    found = []
    for name, norm, around in itertools.product(CONVS, NORMS, AROUND):
        alone = {"sgc": norm == "none" and around == "plain", "appnp": around == "plain"}.get(name, True)
        alone = alone and (name != "gat-one-last" or around not in ("concat", "max"))  # their head is linear
        for weighted in (False, True) if name in ("gcn", "sgc", "appnp") else (False,):
            act = "relu" if name == "sgc" else list(ACTS)[len(found) % 4]
            found += [(name, norm, act, around, weighted)] * alone
    return found


PLACES = [(1, "broadcast"), (3, "broadcast"), (3, "halo"), (3, "slice"), (3, "delayed")]


@pytest.mark.covering(1, rest="slow")
@pytest.mark.parametrize(("ranks", "strategy"), PLACES)
@pytest.mark.parametrize(("name", "norm", "act", "around", "weighted"), _cases())
def test_every_convolution_with_every_norm_and_back(
    name: str, norm: str, act: str, around: str, weighted: bool, ranks: int, strategy: str
) -> None:
    """Fails on another formula, slope, eps or order than PyG's, or if a matrix, side, head or statistic is mixed up."""
    module, model = network_of(name, norm, act, around)
    if strategy == "slice" and name in ("sage-max", "rgcn"):
        strategy = "halo"  # the one has no slices of a maximum's result, the other none of relations
    graph, inputs = data_of(model.kind, weighted)
    config = with_run(config_of(ranks, strategy=strategy), precision="fp32")
    config = dataclasses.replace(config, model=model, train=dataclasses.replace(config.train, lr=0.02))
    state = {key: value.clone() for key, value in module.named().items()}

    def body(rank: Rank) -> Any:
        weights = rank.trainer.runtime.weights
        weights.load_state_dict(state)
        rank.trainer.evaluate()
        before = rank.trainer.logits().clone().numpy()
        for epoch in range(2):
            rank.trainer.step(epoch)
        rank.trainer.evaluate()
        return (
            rank.trainer.runtime.inputs.owned.ids.numpy(),
            before,
            rank.trainer.logits().numpy(),
            weights.state_dict(),
        )

    expected = logits(module, inputs)
    found = on_ranks(config, graph, body)
    for key, view in module.named().items():
        view.copy_(found[0][3][key])
    trained = logits(module, inputs)
    assert np.abs(trained - expected).max() > 1e-3
    for ids, before, after, _ in found:
        assert_close(before, expected[ids])
        assert_close(after, trained[ids])


@pytest.mark.covering(1, rest="slow")
@pytest.mark.parametrize(("ranks", "strategy"), PLACES)
@pytest.mark.parametrize("name", CONVS)
def test_repeated_links_count_as_in_pyg(name: str, ranks: int, strategy: str) -> None:
    """Fails if a convolution counts parallel edges once, or as often as a weight says, where PyG's layer does not."""
    module, model = network_of(name)
    if strategy == "slice" and name in ("sage-max", "rgcn"):
        strategy = "halo"
    generator = torch.Generator().manual_seed(SEED + 1)
    edges = torch.randint(0, VERTICES - 3, (2, 150), generator=generator)
    edges = edges[:, edges[0] != edges[1]]
    edges = torch.cat([edges, edges[:, ::2], edges[:, ::4]], 1)
    types = (torch.arange(edges.shape[1]) % RELATIONS,) if model.kind == "rgcn" else ()
    x = torch.randn(VERTICES, FEATURES, generator=generator)
    known = {"x": x, "y": torch.arange(VERTICES) % CLASSES, "train_mask": torch.arange(VERTICES) < 9}
    graph = load(Data(edge_index=edges, **known, **({"edge_type": types[0]} if types else {})))
    assert graph.repeats == "counted"
    config = with_run(config_of(ranks, strategy=strategy), precision="fp32")
    state = {key: value.clone() for key, value in module.named().items()}

    def body(rank: Rank) -> Any:
        rank.trainer.runtime.weights.load_state_dict(state)
        rank.trainer.evaluate()
        return rank.trainer.runtime.inputs.owned.ids.numpy(), rank.trainer.logits().numpy()

    expected = logits(module, (x, edges, *types))
    for ids, found in on_ranks(dataclasses.replace(config, model=model), graph, body):
        assert_close(found, expected[ids])


@pytest.mark.parametrize("kind", ["gat", "gatv2"])
def test_attention_refuses_weights_that_were_added_up(kind: str, tmp_path: Path) -> None:
    """Fails if attention is planned on a graph, in memory, stored or joined, whose parallel edges are not counted."""
    edges = torch.tensor([[0, 0, 1], [1, 1, 2]])
    known = {"x": torch.ones(3, 1), "y": torch.arange(3), "train_mask": torch.ones(3, dtype=torch.bool)}
    graph = load(Data(edge_index=edges, edge_weight=torch.tensor([0.5, 2.0, 1.0]), **known))
    counted = load(Data(edge_index=edges, **known))
    model = ModelConfig(kind=kind, hidden=(4,))  # type: ignore[arg-type]
    for refused in (graph, save(graph, tmp_path / "summed"), load([graph, counted])):
        with pytest.raises(GraphError, match=r"attention counts each.*weights=None"):
            Trainer(refused, model, ranks=1)
    for taken in (counted, save(counted, tmp_path / "counted"), load([counted, counted])):
        assert taken.repeats == "counted"
        Trainer(taken, model, ranks=1)
    assert load([counted, load(Data(edge_index=edges[:, 1:], **known))]).repeats == "counted"
    loops = load(counted, options=GraphOptions(self_loops="add"))
    assert loops.repeats == "counted"


def spread(tensors: list[Tensor]) -> list[float]:
    """The limits of what was drawn: of uniform numbers close to their bounds, of constants the constants."""
    return [min(float(t.min()) for t in tensors), max(float(t.max()) for t in tensors)]


def reset(module: nn.Module) -> None:
    for part in module.modules():
        if part is not module and hasattr(part, "reset_parameters"):
            part.reset_parameters()  # type: ignore[operator]


@pytest.mark.parametrize("name", CONVS)
def test_weights_start_as_pygs_do(name: str) -> None:
    """Fails if a matrix or bias starts from another distribution than in PyG, or Glorot's is no longer the default."""
    around = "plain" if name in ("sgc", "appnp") else "residual"
    module, model = network_of(name, "none" if name == "sgc" else "batch", around=around)
    config = dataclasses.replace(config_of(1), model=dataclasses.replace(model, init="pyg"))
    seeds = range(60)

    def body(rank: Rank) -> list[dict[str, Tensor]]:
        weights, found = rank.trainer.runtime.weights, []
        for seed in seeds:
            weights.initialize(seed)
            found.append(weights.state_dict())
        return found

    (ours,) = on_ranks(config, data_of(model.kind, weighted=False)[0], body)
    theirs = []
    for _ in seeds:
        reset(module)
        theirs.append({key: value.clone() for key, value in module.named().items()})
    assert ours[0].keys() == theirs[0].keys()
    for key in ours[0]:
        found, expected = spread([state[key] for state in ours]), spread([state[key] for state in theirs])
        assert found == pytest.approx(expected, rel=0.05), key
    plain = on_ranks(dataclasses.replace(config, model=model), data_of(model.kind, weighted=False)[0], body)[0]
    for key in plain[0]:
        if key.endswith("bias"):
            assert spread([state[key] for state in plain]) == [0, 0]
        elif key.endswith("weight") and not key.startswith("norms"):
            d, e = plain[0][key].shape
            bound = (6 / (d + e)) ** 0.5
            assert spread([state[key] for state in plain]) == pytest.approx([-bound, bound], rel=0.05)


def logits(module: Network, inputs: tuple[Tensor, ...]) -> np.ndarray:
    with torch.no_grad():
        return module(*inputs).numpy()  # type: ignore[no-any-return]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", [name for name in CONVS if name not in ("sage-gcn", "sage-mean-loops", "appnp")])
def test_weights_are_exchanged_by_these_names(name: str, norm: str) -> None:
    """Fails if from_pyg or to_pyg takes a matrix, side, vector or running statistic for another one."""
    module, model = network_of(name, norm)
    imported = from_pyg(module, model)
    assert imported.keys() == module.named().keys()
    assert all(torch.equal(imported[key], value) for key, value in module.named().items())
    state = {key: torch.rand(value.shape) for key, value in imported.items()}
    to_pyg(state, module, model)
    assert all(torch.equal(state[key], value) for key, value in module.named().items())


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
    with pytest.raises(ConfigError, match=r"model.out_heads must lie in 0 .. 64, got 65"):
        ModelConfig(kind="gat", out_heads=65)
    assert ModelConfig(kind="gat", hidden=(9,), heads=4, concat_heads=False).hidden == (9,)
    with pytest.raises(ConfigError, match=r"model.heads must lie in 1 .. 64, got 65"):
        ModelConfig(kind="gatv2", hidden=(65,), heads=65)
    assert dataclasses.replace(ModelConfig(kind="gat", hidden=(8,), heads=4), hidden=(12,)).heads == 4
