"""Layers of PyG and their twins in mggcn: the model that they correspond to, the options that they must have, and the
names of weights.

D input width, E output width, R relations, B bases, H heads; layers count from 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from mggcn.config import ModelConfig
from mggcn.errors import ConfigError
from mggcn.interop.pyg_gin import check_gin, gin_layers

if TYPE_CHECKING:
    from torch import Tensor

State = Mapping[str, "Tensor"]
"""Weights by mggcn's names."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter of PyG's layer, or a view of it, and whether mggcn's is its transpose."""

    parameter: Any
    transposed: bool = False

    def read(self) -> Tensor:
        """Return a copy in mggcn's layout."""
        value: Tensor = self.parameter.detach()
        return (value.t().contiguous() if self.transposed else value).clone()


@dataclass(frozen=True, slots=True)
class Twin:
    """How mggcn represents a PyG layer. model: its default description; options: those that it must have, with advice
    for other values.

    weights: the parameters of a layer, given its number, by mggcn's names. check: raises ConfigError for a layer (number,
    whether it is the last, module) that belongs to another model. added: parameters that only mggcn has; taken: the
    state in the layer's form, where mggcn has more.
    """

    model: Callable[[Any], ModelConfig]
    call: str
    options: Mapping[str, tuple[object, str]]
    weights: Callable[[int, Any], dict[str, Weight]]
    check: Callable[[int, bool, Any, ModelConfig], None]
    added: Callable[[int, Any], State] = lambda layer, conv: {}
    taken: Callable[[int, Any, State], State] = lambda layer, conv, state: state


FLOW = {"flow": ("source_to_target", "exchange the rows of edge_index instead")}


def _bias(name: str, conv: Any) -> dict[str, Weight]:
    return {} if conv.bias is None else {f"{name}.bias": Weight(conv.bias)}


def _check_self_loops(layer: int, conv: Any, model: ModelConfig, call: str) -> None:
    if conv.add_self_loops != model.self_loops:
        raise ConfigError(
            f"{type(conv).__name__} {layer} has add_self_loops={conv.add_self_loops}, but the model has "
            f"self_loops={model.self_loops}; name the model that the weights are for: "
            f"model=mggcn.{call}(..., self_loops={conv.add_self_loops}), also for the Trainer"
        )


def _gcn_weights(layer: int, conv: Any) -> dict[str, Weight]:
    return {f"layers.{layer}.weight": Weight(conv.lin.weight, transposed=True)} | _bias(f"layers.{layer}", conv)


def _check_gcn(layer: int, last: bool, conv: Any, model: ModelConfig) -> None:
    _check_self_loops(layer, conv, model, "GCN")


def _check_sgc(layer: int, last: bool, conv: Any, model: ModelConfig) -> None:
    if not last:
        raise ConfigError("the module has several SGConv layers, but mggcn's SGC has one matrix; give one layer")
    if (conv.K, "symmetric") != (model.hops, model.norm):
        raise ConfigError(
            f"SGConv has K={conv.K} and the symmetric norm, but the model has hops={model.hops} and norm={model.norm!r}; "
            f"name the model that the weights are for: model=mggcn.SGC(hops={conv.K}), also for the Trainer"
        )
    _check_self_loops(layer, conv, model, "SGC")


def _rgcn_weights(layer: int, conv: Any) -> dict[str, Weight]:
    name = f"layers.{layer}"
    found = {} if conv.root is None else {f"{name}.weight": Weight(conv.root)}
    found[f"{name}.bases"] = Weight(conv.weight)
    if conv.comp is not None:
        found[f"{name}.coefficients"] = Weight(conv.comp)
    return found | _bias(name, conv)


def _bases(conv: Any) -> int:
    """The number of bases of a layer; a layer without decomposition has one for each relation."""
    return int(conv.num_bases or conv.num_relations)


def _check_rgcn(layer: int, last: bool, conv: Any, model: ModelConfig) -> None:
    if conv.root is None:
        raise ConfigError(
            f"RGCNConv {layer} has root_weight=False, but mggcn's R-GCN has one; give the layer a root weight"
        )
    if _bases(conv) != model.bases:
        has = f"num_bases={conv.num_bases}" if conv.num_bases else f"{conv.num_relations} relations without bases"
        raise ConfigError(
            f"RGCNConv {layer} has {has}, but the model has bases={model.bases}; name the model that the weights are for: "
            f"model=mggcn.RGCN(..., bases={_bases(conv)}), also for the Trainer"
        )


def _one_basis_for_each(layer: int, conv: Any) -> State:
    """The coefficients of a layer without decomposition."""
    import torch

    if conv.comp is not None:
        return {}
    return {f"layers.{layer}.coefficients": torch.eye(conv.num_relations, dtype=conv.weight.dtype)}


def _composed(layer: int, conv: Any, state: State) -> State:
    """The matrices of relations for a layer without decomposition: W_r = sum_b a_rb V_b."""
    import torch

    bases, coefficients = f"layers.{layer}.bases", f"layers.{layer}.coefficients"
    if conv.comp is not None or not {bases, coefficients} <= state.keys():
        return state
    rest = {name: value for name, value in state.items() if name != coefficients}
    return rest | {bases: torch.einsum("rb,bde->rde", state[coefficients], state[bases])}


def _gat_weights(layer: int, conv: Any) -> dict[str, Weight]:
    name = f"layers.{layer}"
    return {
        f"{name}.weight": Weight(conv.lin.weight, transposed=True),
        f"{name}.source": Weight(conv.att_src.data[0]),
        f"{name}.destination": Weight(conv.att_dst.data[0]),
    } | _bias(f"attention.{layer}", conv)


def _gatv2_weights(layer: int, conv: Any) -> dict[str, Weight]:
    found: dict[str, Weight] = {}
    for number, linear in ((2 * layer - 1, conv.lin_l), (2 * layer, conv.lin_r)):
        found |= linear_weights(number, linear)
    found[f"layers.{2 * layer}.attention"] = Weight(conv.att.data[0])
    return found | _bias(f"attention.{layer}", conv)


def _check_attention(layer: int, last: bool, conv: Any, model: ModelConfig) -> None:
    call, name = {"gat": "GAT", "gatv2": "GATv2"}[model.kind], f"{type(conv).__name__} {layer}"
    if model.kind == "gat" and getattr(conv, "lin", None) is None:
        raise ConfigError(
            f"{name} has a matrix for sources and one for destinations, expected one for both: GATConv(D, ...)"
        )
    if conv.heads != model.heads_of(last):
        setting = "out_heads" if last else "heads"
        raise ConfigError(
            f"{name} has heads={conv.heads}, but the model has {setting}={model.heads_of(last)}; name the model that "
            f"the weights are for: model=mggcn.{call}(..., {setting}={conv.heads}), also for the Trainer"
        )
    if last and conv.heads > 1 and conv.concat:
        raise ConfigError(
            f"{name} has concat=True, but mggcn's {call} averages the heads of the last; give it concat=False"
        )
    if not last and conv.heads > 1 and conv.concat is not model.concat_heads:
        raise ConfigError(
            f"{name} has concat={conv.concat}, but the model has concat_heads={model.concat_heads}; name the model that "
            f"the weights are for: model=mggcn.{call}(..., concat_heads={conv.concat}), also for the Trainer"
        )
    _check_self_loops(layer, conv, model, call)


def linear_weights(number: int, linear: Any) -> dict[str, Weight]:
    """Return the matrix and bias of a dense layer by mggcn's names."""
    return {f"layers.{number}.weight": Weight(linear.weight, transposed=True)} | _bias(f"layers.{number}", linear)


def _sage_weights(layer: int, conv: Any) -> dict[str, Weight]:
    if conv.aggr == "max":
        pool, root, neighbours = 3 * layer - 2, 3 * layer - 1, 3 * layer
        return (
            linear_weights(pool, conv.lin) | linear_weights(root, conv.lin_r) | linear_weights(neighbours, conv.lin_l)
        )
    neighbours, root = 2 * layer - 1, 2 * layer
    return {f"layers.{neighbours}.weight": Weight(conv.lin_l.weight, transposed=True)} | {
        f"layers.{root}.weight": Weight(conv.lin_r.weight, transposed=True),
        **_bias(f"layers.{root}", conv.lin_l),
    }


def _check_sage(layer: int, last: bool, conv: Any, model: ModelConfig) -> None:
    if conv.aggr not in ("mean", "max") or conv.project is not (conv.aggr == "max"):
        raise ConfigError(
            f"SAGEConv {layer} has aggr={conv.aggr!r} with project={conv.project}; mggcn's GraphSAGE takes the mean of "
            "neighbours, or the maximum of what project=True makes of them"
        )
    if (model.aggregator, model.self_loops) != (conv.aggr, False):
        raise ConfigError(
            f"SAGEConv {layer} has aggr={conv.aggr!r} and no self-loops, but the model has aggregator={model.aggregator!r} "
            f"and self_loops={model.self_loops}; name the model that the weights are for: "
            f"model=mggcn.SAGE(..., aggregator={conv.aggr!r}, self_loops=False), also for the Trainer"
        )


def _sage(conv: Any) -> ModelConfig:
    return ModelConfig(kind="sage", aggregator="max" if conv.aggr == "max" else "mean", self_loops=False)


def _gin_weights(layer: int, conv: Any) -> dict[str, Weight]:
    first, second = gin_layers(conv)
    eps = {f"layers.{2 * layer - 1}.eps": Weight(conv.eps)}
    return linear_weights(2 * layer - 1, first) | eps | linear_weights(2 * layer, second)


def _attention(kind: str, call: str, weights: Callable[[int, Any], dict[str, Weight]]) -> Twin:
    return Twin(
        model=lambda conv: ModelConfig(kind=kind, heads=conv.heads, hidden=()),  # type: ignore[arg-type]
        call=f"mggcn.{call}()",
        options=MappingProxyType(
            {
                "negative_slope": (0.2, "no model has another slope"),
                "edge_dim": (None, "no model reads features of edges"),
                "residual": (False, "give the layer alone, if nothing is added to it"),
                "share_weights": (False, "give both sides the same weights"),
                **FLOW,
            }
        ),
        weights=weights,
        check=_check_attention,
    )


_RGCN = Twin(
    model=lambda conv: ModelConfig(kind="rgcn", bases=_bases(conv)),
    call="mggcn.RGCN()",
    options=MappingProxyType(
        {
            "aggr": ("mean", "mggcn.nn.reduce_edges reduces otherwise"),
            "num_blocks": (None, "use num_bases"),
            **FLOW,
        }
    ),
    weights=_rgcn_weights,
    check=_check_rgcn,
    added=_one_basis_for_each,
    taken=_composed,
)
_GCN = Twin(
    model=lambda conv: ModelConfig(),
    call="mggcn.GCN()",
    options=MappingProxyType(
        {
            "normalize": (True, 'mggcn.nn.aggregate(norm="none") sums without it'),
            "improved": (False, "give the graph self-loops of weight 2 instead, as PyG does where edges have weights"),
            "aggr": ("sum", 'mggcn.nn.aggregate(norm="mean") averages'),
            **FLOW,
        }
    ),
    weights=_gcn_weights,
    check=_check_gcn,
)
TWINS: Final[Mapping[str, Twin]] = MappingProxyType(
    {
        "GCNConv": _GCN,
        "RGCNConv": _RGCN,
        "FastRGCNConv": _RGCN,
        "SAGEConv": Twin(
            model=_sage,
            call='mggcn.SAGE(aggregator="mean", self_loops=False)',
            options=MappingProxyType(
                {
                    "normalize": (False, "no model divides rows by their length"),
                    "root_weight": (True, "GCN(norm='mean') has no weights for the vertex itself"),
                    **FLOW,
                }
            ),
            weights=_sage_weights,
            check=_check_sage,
        ),
        "SGConv": Twin(
            model=lambda conv: ModelConfig(kind="sgc", hops=conv.K),
            call="mggcn.SGC()",
            options=MappingProxyType({"aggr": ("sum", "no model sums otherwise"), **FLOW}),
            weights=lambda layer, conv: linear_weights(layer, conv.lin),
            check=_check_sgc,
        ),
        "GINConv": Twin(
            model=lambda conv: ModelConfig(kind="gin"),
            call="mggcn.GIN()",
            options=MappingProxyType({"aggr": ("sum", "no model sums otherwise"), **FLOW}),
            weights=_gin_weights,
            check=check_gin,
        ),
        "GATConv": _attention("gat", "GAT", _gat_weights),
        "GATv2Conv": _attention("gatv2", "GATv2", _gatv2_weights),
    }
)
"""By the name of PyG's class."""
