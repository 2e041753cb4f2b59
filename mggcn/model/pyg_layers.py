"""Layers of PyG and their twins in mggcn: the model that they make, the options that they must have, names of weights.

D input width, E output width, R relations, B bases, H heads; layers count from 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from mggcn.config import ModelConfig
from mggcn.errors import ConfigError

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
        """Return a copy as mggcn has it."""
        value: Tensor = self.parameter.detach()
        return (value.t().contiguous() if self.transposed else value).clone()


@dataclass(frozen=True, slots=True)
class Twin:
    """A layer of PyG's in mggcn. model: its description by default; options: those that it must have, and the way out.

    weights: the parameters of a layer, given its number, by mggcn's names. check: raises ConfigError for a layer (its
    number, whether it is the last, itself) that another model has. added, taken: what mggcn has beside these weights, and
    a state as the layer takes it, where mggcn has more.
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
            f"{type(conv).__name__} {layer} has add_self_loops={conv.add_self_loops}, the model "
            f"self_loops={model.self_loops}; name the model that the weights are for: "
            f"model=mggcn.{call}(..., self_loops={conv.add_self_loops}), also for the Trainer"
        )


def _gcn_weights(layer: int, conv: Any) -> dict[str, Weight]:
    return {f"layers.{layer}.weight": Weight(conv.lin.weight, transposed=True)} | _bias(f"layers.{layer}", conv)


def _check_gcn(layer: int, last: bool, conv: Any, model: ModelConfig) -> None:
    _check_self_loops(layer, conv, model, "GCN")


def _rgcn_weights(layer: int, conv: Any) -> dict[str, Weight]:
    name = f"layers.{layer}"
    found = {} if conv.root is None else {f"{name}.weight": Weight(conv.root)}
    found[f"{name}.bases"] = Weight(conv.weight)
    if conv.comp is not None:
        found[f"{name}.coefficients"] = Weight(conv.comp)
    return found | _bias(name, conv)


def _bases(conv: Any) -> int:
    """The bases of a layer; one without decomposition has one for each relation."""
    return int(conv.num_bases or conv.num_relations)


def _check_rgcn(layer: int, last: bool, conv: Any, model: ModelConfig) -> None:
    if conv.root is None:
        raise ConfigError(
            f"RGCNConv {layer} has root_weight=False, mggcn's R-GCN has one; give the layer a root weight"
        )
    if _bases(conv) != model.bases:
        has = f"num_bases={conv.num_bases}" if conv.num_bases else f"{conv.num_relations} relations without bases"
        raise ConfigError(
            f"RGCNConv {layer} has {has}, the model bases={model.bases}; name the model that the weights are for: "
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
        found[f"layers.{number}.weight"] = Weight(linear.weight, transposed=True)
        found |= _bias(f"layers.{number}", linear)
    found[f"layers.{2 * layer}.attention"] = Weight(conv.att.data[0])
    return found | _bias(f"attention.{layer}", conv)


def _check_attention(layer: int, last: bool, conv: Any, model: ModelConfig) -> None:
    call, name = {"gat": "GAT", "gatv2": "GATv2"}[model.kind], f"{type(conv).__name__} {layer}"
    if conv.heads != model.heads:
        raise ConfigError(
            f"{name} has heads={conv.heads}, the model heads={model.heads} in each layer; name the model that the weights "
            f"are for: model=mggcn.{call}(..., heads={conv.heads}), also for the Trainer"
        )
    if conv.heads > 1 and conv.concat is last:
        raise ConfigError(
            f"{name} has concat={conv.concat}, mggcn's {call} joins heads in hidden layers and averages those of the last; "
            f"give it concat={not last}"
        )
    _check_self_loops(layer, conv, model, call)


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
    call='mggcn.GCN(norm="symmetric")',
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
        "GATConv": _attention("gat", "GAT", _gat_weights),
        "GATv2Conv": _attention("gatv2", "GATv2", _gatv2_weights),
    }
)
"""By the name of PyG's class."""
