"""Layers of PyG and their twins in mggcn: the model that they make, the options that they must have, names of weights.

D input width, E output width, R relations, B bases. A weight's name stands behind layers.<l>.
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

State = dict[str, "Tensor"]
"""Weights of one layer by mggcn's names."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter of PyG's layer, and whether mggcn's is its transpose."""

    parameter: Any
    transposed: bool = False

    def read(self) -> Tensor:
        """Return a copy as mggcn has it."""
        value: Tensor = self.parameter.detach()
        return (value.t().contiguous() if self.transposed else value).clone()


@dataclass(frozen=True, slots=True)
class Twin:
    """A layer of PyG's in mggcn. model: its description by default; options: those that it must have, and the way out.

    weights: its parameters by mggcn's names. check: raises ConfigError for a layer (number, layer) that another model has.
    added, taken: what mggcn has beside the weights, and how the layer takes a state in which mggcn has more.
    """

    model: Callable[[Any], ModelConfig]
    call: str
    options: Mapping[str, tuple[object, str]]
    weights: Callable[[Any], dict[str, Weight]]
    check: Callable[[int, Any, ModelConfig], None]
    added: Callable[[Any], State] = lambda conv: {}
    taken: Callable[[Any, State], State] = lambda conv, state: state


def _gcn_weights(conv: Any) -> dict[str, Weight]:
    return {"weight": Weight(conv.lin.weight, transposed=True)} | _bias(conv)


def _bias(conv: Any) -> dict[str, Weight]:
    return {} if conv.bias is None else {"bias": Weight(conv.bias)}


def _check_gcn(layer: int, conv: Any, model: ModelConfig) -> None:
    if conv.add_self_loops != model.self_loops:
        raise ConfigError(
            f"GCNConv {layer} has add_self_loops={conv.add_self_loops}, the model self_loops={model.self_loops}; name the "
            f"model that the weights are for: model=mggcn.GCN(..., self_loops={conv.add_self_loops}), also for the Trainer"
        )


def _rgcn_weights(conv: Any) -> dict[str, Weight]:
    found = {} if conv.root is None else {"weight": Weight(conv.root)}
    found["bases"] = Weight(conv.weight)
    return found | ({} if conv.comp is None else {"coefficients": Weight(conv.comp)}) | _bias(conv)


def _bases(conv: Any) -> int:
    """The bases of a layer; one without decomposition has one for each relation."""
    return int(conv.num_bases or conv.num_relations)


def _check_rgcn(layer: int, conv: Any, model: ModelConfig) -> None:
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


def _one_basis_for_each(conv: Any) -> State:
    """The coefficients of a layer without decomposition."""
    import torch

    if conv.comp is not None:
        return {}
    return {"coefficients": torch.eye(conv.num_relations, dtype=conv.weight.dtype)}


def _composed(conv: Any, state: State) -> State:
    """The matrices of relations for a layer without decomposition: W_r = sum_b a_rb V_b."""
    import torch

    if conv.comp is not None or not {"bases", "coefficients"} <= state.keys():
        return state
    rest = {name: value for name, value in state.items() if name != "coefficients"}
    return rest | {"bases": torch.einsum("rb,bde->rde", state["coefficients"], state["bases"])}


_RGCN = Twin(
    model=lambda conv: ModelConfig(kind="rgcn", bases=_bases(conv)),
    call="mggcn.RGCN()",
    options=MappingProxyType(
        {
            "aggr": ("mean", "mggcn.nn.reduce_edges reduces otherwise"),
            "num_blocks": (None, "use num_bases"),
            "flow": ("source_to_target", "exchange the rows of edge_index instead"),
        }
    ),
    weights=_rgcn_weights,
    check=_check_rgcn,
    added=_one_basis_for_each,
    taken=_composed,
)
TWINS: Final[Mapping[str, Twin]] = MappingProxyType(
    {
        "GCNConv": Twin(
            model=lambda conv: ModelConfig(),
            call='mggcn.GCN(norm="symmetric")',
            options=MappingProxyType(
                {
                    "normalize": (True, 'mggcn.nn.aggregate(norm="none") sums without it'),
                    "improved": (
                        False,
                        "give the graph self-loops of weight 2 instead, as PyG does where edges have weights",
                    ),
                    "aggr": ("sum", 'mggcn.nn.aggregate(norm="mean") averages'),
                    "flow": ("source_to_target", "exchange the rows of edge_index instead"),
                }
            ),
            weights=_gcn_weights,
            check=_check_gcn,
        ),
        "RGCNConv": _RGCN,
        "FastRGCNConv": _RGCN,
    }
)
"""By the name of PyG's class."""
