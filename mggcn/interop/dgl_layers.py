"""Layers of DGL and their twins in mggcn, as interop/pyg_layers.py has PyG's: weights are read only.

A layer of DGL adds no self-loops, and its activation may be its own. D input width, E output width, H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from mggcn.config import ModelConfig
from mggcn.errors import ConfigError
from mggcn.interop.pyg_gin import check_gin, gin_layers, is_activation, name_of
from mggcn.interop.pyg_layers import Twin, Weight, linear_weights


def library_of(module: Any) -> str:
    """Return "DGL" or "PyG" for a module of their classes or subclasses; "" for others."""
    roots = {kind.__module__.partition(".")[0] for kind in type(module).__mro__}
    return "DGL" if "dgl" in roots else "PyG" if "torch_geometric" in roots else ""


def _vector(name: str, vector: Any) -> dict[str, Weight]:
    return {} if vector is None else {name: Weight(vector)}


def _graph_conv(layer: int, conv: Any) -> dict[str, Weight]:
    return {f"layers.{layer}.weight": Weight(conv.weight)} | _vector(f"layers.{layer}.bias", conv.bias)


def _sage(layer: int, conv: Any) -> dict[str, Weight]:
    if conv._aggre_type == "gcn":
        found = {f"layers.{layer}.weight": Weight(conv.fc_neigh.weight, transposed=True)}
        return found | _vector(f"layers.{layer}.bias", conv.bias)
    pooled = conv._aggre_type == "pool"
    root = 3 * layer - 1 if pooled else 2 * layer
    neighbours = 3 * layer if pooled else 2 * layer - 1
    found = linear_weights(3 * layer - 2, conv.fc_pool) if pooled else {}
    found[f"layers.{neighbours}.weight"] = Weight(conv.fc_neigh.weight, transposed=True)
    found[f"layers.{root}.weight"] = Weight(conv.fc_self.weight, transposed=True)
    return found | _vector(f"layers.{max(root, neighbours)}.bias", conv.fc_self.bias)


def _sage_model(conv: Any) -> ModelConfig:
    aggregator = {"mean": "mean", "pool": "max"}.get(conv._aggre_type)
    if aggregator is None:
        return ModelConfig(kind="sage")
    return ModelConfig(kind="sage", aggregator=aggregator, self_loops=False)  # type: ignore[arg-type]


def _gat(layer: int, conv: Any) -> dict[str, Weight]:
    name = f"layers.{layer}"
    return {
        f"{name}.weight": Weight(conv.fc.weight, transposed=True),
        f"{name}.source": Weight(conv.attn_l.data[0]),
        f"{name}.destination": Weight(conv.attn_r.data[0]),
    } | _vector(f"attention.{layer}.bias", conv.bias)


def _gatv2(layer: int, conv: Any) -> dict[str, Weight]:
    found = linear_weights(2 * layer - 1, conv.fc_src) | linear_weights(2 * layer, conv.fc_dst)
    found[f"layers.{2 * layer}.attention"] = Weight(conv.attn.data[0])
    if conv.fc_src.bias is not None:  # DGL adds none after attention
        found[f"attention.{layer}.bias"] = Weight(conv.fc_src.bias.data.new_zeros(conv.fc_src.bias.shape))
    return found


def _gin(layer: int, conv: Any) -> dict[str, Weight]:
    first, second = gin_layers(_Nn(conv.apply_func))
    eps = {f"layers.{2 * layer - 1}.eps": Weight(conv.eps)}
    return linear_weights(2 * layer - 1, first) | eps | linear_weights(2 * layer, second)


@dataclass(frozen=True, slots=True)
class _Nn:
    """The dense layers of a GINConv under PyG's name."""

    nn: Any


def _relations(layer: int, conv: Any) -> dict[str, Weight]:
    name, matrices = f"layers.{layer}", conv.linear_r
    found = {f"{name}.weight": Weight(conv.loop_weight), f"{name}.bases": Weight(matrices.W)}
    rows = matrices.coeff if matrices.regularizer == "basis" else _identity(matrices.W)
    found[f"{name}.coefficients"] = Weight(rows)
    return found | (_vector(f"{name}.bias", conv.h_bias) if conv.bias else {})


def _identity(matrices: Any) -> Any:
    """The coefficients of relations with a matrix each."""
    import torch

    return torch.eye(len(matrices), dtype=matrices.dtype)


def _refuse(layer: int, conv: Any, option: str, came: object, instead: str) -> None:
    raise ConfigError(f"{type(conv).__name__} {layer} has {option}={came!r}; {instead}")


def _check(layer: int, last: bool, conv: Any, model: ModelConfig) -> None:
    """Refuse an activation of the layer's own where the model has none, or another."""
    own = getattr(conv, "_activation", getattr(conv, "activation", None))
    if own is not None and (last or not is_activation(own, model.activation)):
        where = "none after the last layer" if last else f"{model.activation} after hidden layers"
        _refuse(
            layer, conv, "activation", name_of(own), f"the model has {where}: name the model that the weights are for"
        )


def _check_graph_conv(layer: int, last: bool, conv: Any, model: ModelConfig) -> None:
    _check(layer, last, conv, model)
    if conv._norm not in _NORMS:
        _refuse(layer, conv, "norm", conv._norm, "models normalise by both or right; mggcn.nn.aggregate sums otherwise")
    if _NORMS[conv._norm] != model.norm:
        _refuse(layer, conv, "norm", conv._norm, f"name the model: model=mggcn.GCN(..., norm={_NORMS[conv._norm]!r})")
    if conv.weight is None:
        _refuse(layer, conv, "weight", False, "a model has a matrix in each layer")


_NORMS = MappingProxyType({"both": "symmetric", "right": "mean"})


def _check_sage(layer: int, last: bool, conv: Any, model: ModelConfig) -> None:
    _check(layer, last, conv, model)
    made = _sage_model(conv)
    if conv._aggre_type == "lstm" or conv.norm is not None:
        option, came = ("aggregator_type", "lstm") if conv.norm is None else ("norm", conv.norm)
        _refuse(layer, conv, option, came, "no model has that; write the layer with mggcn.nn")
    if (model.aggregator, model.self_loops) != (made.aggregator, made.self_loops):
        call = f"mggcn.SAGE(..., aggregator={made.aggregator!r}, self_loops={made.self_loops})"
        _refuse(layer, conv, "aggregator_type", conv._aggre_type, f"name the model: model={call}")


def _check_attention(layer: int, last: bool, conv: Any, model: ModelConfig) -> None:
    _check(layer, last, conv, model)
    if model.kind == "gat" and getattr(conv, "fc", None) is None:
        _refuse(layer, conv, "in_feats", "a pair", "a model has one width for sources and destinations")
    if conv.res_fc is not None:
        _refuse(layer, conv, "residual", True, "no model adds that; write the layer with mggcn.nn")
    if getattr(conv, "share_weights", False):
        _refuse(layer, conv, "share_weights", True, "a model has a matrix for each side")
    if conv.leaky_relu.negative_slope != 0.2:
        _refuse(layer, conv, "negative_slope", conv.leaky_relu.negative_slope, "models have the slope 0.2")
    if conv._num_heads != model.heads_of(last):
        setting = "out_heads" if last else "heads"
        _refuse(
            layer, conv, "num_heads", conv._num_heads, f"the model has {setting}={model.heads_of(last)}; name its model"
        )
    if not last and conv._num_heads > 1 and not model.concat_heads:
        _refuse(layer, conv, "num_heads", conv._num_heads, "weights are read of layers whose heads lie side by side")


def _check_gin_conv(layer: int, last: bool, conv: Any, model: ModelConfig) -> None:
    _check(layer, last, conv, model)
    if conv._aggregator_type != "sum" or conv.apply_func is None:
        option, came = ("aggregator_type", conv._aggregator_type) if conv.apply_func else ("apply_func", None)
        _refuse(layer, conv, option, came, "mggcn's GIN sums, and has two dense layers")
    check_gin(layer, last, _Nn(conv.apply_func), model)


def _check_sgc(layer: int, last: bool, conv: Any, model: ModelConfig) -> None:
    if not last:
        raise ConfigError("the module has several SGConv layers, but mggcn's SGC has one matrix; give one layer")
    if (conv._k, "symmetric") != (model.hops, model.norm) or conv.norm is not None:
        _refuse(layer, conv, "k, norm", (conv._k, conv.norm), f"name the model: model=mggcn.SGC(hops={conv._k})")


def _check_relations(layer: int, last: bool, conv: Any, model: ModelConfig) -> None:
    _check(layer, last, conv, model)
    if conv.layer_norm or not conv.self_loop or conv.linear_r.regularizer not in (None, "basis"):
        raise ConfigError(
            f"RelGraphConv {layer} must have self_loop=True, layer_norm=False and the regularizer basis or none, as "
            "mggcn's R-GCN; write others with mggcn.nn"
        )
    if len(conv.linear_r.W) != model.bases:
        _refuse(
            layer,
            conv,
            "bases",
            len(conv.linear_r.W),
            f"name the model: model=mggcn.RGCN(..., bases={len(conv.linear_r.W)})",
        )


def averaged_bias(layer: int, conv: Any) -> dict[str, Any]:
    """Return the bias of the last attention, whose heads are averaged: DGL has one for each head."""
    name = f"attention.{layer}.bias"
    weights = DGL_TWINS[type(conv).__name__].weights(layer, conv)
    if name not in weights:
        return {}
    return {name: weights[name].read().view(conv._num_heads, -1).mean(0)}


def _twin(
    call: str,
    model: Callable[[Any], ModelConfig],
    weights: Callable[[int, Any], dict[str, Weight]],
    check: Callable[[int, bool, Any, ModelConfig], None],
) -> Twin:
    return Twin(model=model, call=call, options=MappingProxyType({}), weights=weights, check=check)


def _attention(kind: str) -> Callable[[Any], ModelConfig]:
    return lambda conv: ModelConfig(kind=kind, heads=conv._num_heads, hidden=(), self_loops=False)  # type: ignore[arg-type]


DGL_TWINS: Final[Mapping[str, Twin]] = MappingProxyType(
    {
        "GraphConv": _twin(
            "mggcn.GCN()",
            lambda conv: ModelConfig(self_loops=False, norm=_NORMS.get(conv._norm, "symmetric")),  # type: ignore[arg-type]
            _graph_conv,
            _check_graph_conv,
        ),
        "SAGEConv": _twin("mggcn.SAGE()", _sage_model, _sage, _check_sage),
        "GATConv": _twin("mggcn.GAT()", _attention("gat"), _gat, _check_attention),
        "GATv2Conv": _twin("mggcn.GATv2()", _attention("gatv2"), _gatv2, _check_attention),
        "GINConv": _twin("mggcn.GIN()", lambda conv: ModelConfig(kind="gin"), _gin, _check_gin_conv),
        "SGConv": _twin(
            "mggcn.SGC()",
            lambda conv: ModelConfig(kind="sgc", hops=conv._k, self_loops=False),
            lambda layer, conv: linear_weights(layer, conv.fc),
            _check_sgc,
        ),
        "RelGraphConv": _twin(
            "mggcn.RGCN()",
            lambda conv: ModelConfig(kind="rgcn", bases=len(conv.linear_r.W)),
            _relations,
            _check_relations,
        ),
    }
)
"""By the name of DGL's class."""
