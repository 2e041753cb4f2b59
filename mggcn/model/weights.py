"""Weights from and to stacks of PyG's GCNConv, whose options must be those of the model.

Ours: layers.<l>.weight (D, E) and layers.<l>.bias (E,), l from 1. PyG: lin.weight (E, D) and bias (E,) per convolution.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mggcn.config import ModelConfig
from mggcn.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

DEFAULT_MODEL = ModelConfig()
HARMLESS = ("ReLU", "Dropout", "Identity", "TrimToLayer")
"""What may stand between the layers: what stands there in mggcn, too, or nothing (PyG trims sampled graphs alone)."""
SYNONYMS: dict[object, str] = {"sum": "add"}
FIXED = {
    "normalize": (True, 'mggcn.nn.aggregate(norm="none") sums without it'),
    "improved": (False, "give the graph self-loops of weight 2 instead, as PyG does where edges have weights"),
    "aggr": ("sum", 'mggcn.nn.aggregate(norm="mean") averages'),
    "flow": ("source_to_target", "exchange the rows of edge_index instead"),
}
"""Options of a GCNConv that mean another network than any of ours, unless they have this value, and the way out."""


def convolutions(module: Any, model: ModelConfig = DEFAULT_MODEL) -> list[Any]:
    """Return the GCNConv layers of a torch module in order.

    Raises: ConfigError if it has none, or one without sizes, or computes something else than `model` as far as its
    parts tell: an option of a layer, parameters between the layers, an activation other than ReLU.
    """
    if not callable(getattr(module, "modules", None)):
        raise ConfigError(f"expected a torch module with GCNConv layers, got {type(module).__name__}")
    found = [m for m in module.modules() if type(m).__name__ == "GCNConv"]
    if not found:
        raise ConfigError(
            f"expected a module with GCNConv layers, {type(module).__name__} has none; other layers have no twin in mggcn"
        )
    if any(type(conv.lin.weight).__name__ == "UninitializedParameter" for conv in found):
        raise ConfigError(
            "a GCNConv(-1, ...) has no weights before its first call; call the module once, or give sizes"
        )
    _check_rest(module, found)
    for layer, conv in enumerate(found, start=1):
        _check_options(layer, conv, model)
    return found


def _check_rest(module: Any, convs: list[Any]) -> None:
    """Refuse what stands between the layers and is neither ReLU nor dropout, norms without parameters among it."""
    known = {id(parameter) for conv in convs for parameter in conv.parameters()}
    strange = [name for name, parameter in module.named_parameters() if id(parameter) not in known]
    inside = {id(part) for conv in convs for part in conv.modules()} | {id(module)}
    parts = [type(m).__name__ for m in module.modules() if id(m) not in inside and next(m.children(), None) is None]
    if parts and parts[-1] in ("Softmax", "LogSoftmax"):
        parts.pop()  # turns logits into probabilities
    strange += [part for part in parts if part not in (*HARMLESS, "ModuleList", "ModuleDict")]
    act = getattr(module, "act", None)  # of PyG's own GCN, which may be a function
    if callable(act) and type(act).__name__ not in HARMLESS and getattr(act, "__name__", "") not in ("relu", "relu_"):
        strange.append(f"act={getattr(act, '__name__', type(act).__name__)}")
    if strange:
        raise ConfigError(
            f"mggcn's GCN has ReLU and dropout between GCNConv layers, the module also {', '.join(strange[:8])}; give the "
            "layers alone, as a torch.nn.ModuleList, if nothing of that is part of the network"
        )


def _check_options(layer: int, conv: Any, model: ModelConfig) -> None:
    """Refuse a layer whose options give other logits than those of the model."""
    if (model.kind, model.norm) != ("gcn", "symmetric"):
        raise ConfigError(
            f'GCNConv is mggcn.GCN(norm="symmetric"), the model is {model.kind} with norm {model.norm}; choose that one'
        )
    for name, (value, instead) in FIXED.items():
        if getattr(conv, name, value) not in (value, SYNONYMS.get(value)):
            raise ConfigError(
                f"GCNConv {layer} has {name}={getattr(conv, name)!r}, mggcn's GCN computes {name}={value!r}; {instead}"
            )
    if conv.add_self_loops != model.self_loops:
        raise ConfigError(
            f"GCNConv {layer} has add_self_loops={conv.add_self_loops}, the model self_loops={model.self_loops}; name the "
            f"model that the weights are for: model=mggcn.GCN(..., self_loops={conv.add_self_loops}), also for the Trainer"
        )


def check_state(state: Mapping[str, Tensor]) -> None:
    """Refuse weights that are no mapping from names to torch tensors. Raises: ConfigError."""
    import torch

    if not isinstance(state, Mapping):
        raise ConfigError(f"expected weights as a mapping from names to tensors, got {type(state).__name__}")
    for name, value in state.items():
        if not torch.is_tensor(value):
            raise ConfigError(f"{name} must be a torch tensor, got {type(value).__name__}; torch.as_tensor makes one")


def from_pyg(module: Any, model: ModelConfig = DEFAULT_MODEL) -> dict[str, Tensor]:
    """Return the weights of a stack of GCNConv layers as mggcn's state_dict, as copies.

    What the module's own `forward` does cannot be seen: the logits are the same if it calls the layers in order, with ReLU
    (and dropout) between them and nothing else, on the same graph.

    Args:
        module: A torch module with GCNConv layers.
        model: The model that the weights are for: `GCN(self_loops=False)` for layers with add_self_loops=False, and then
            for the Trainer too, since weights do not say how their layers were made.

    Raises:
        ConfigError: A layer has options, or the module has other parts, that the model does not have.
    """
    state: dict[str, Tensor] = {}
    for layer, conv in enumerate(convolutions(module, model), start=1):
        state[f"layers.{layer}.weight"] = conv.lin.weight.detach().t().contiguous().clone()
        if conv.bias is not None:
            state[f"layers.{layer}.bias"] = conv.bias.detach().clone()
    return state


def to_pyg(state: Mapping[str, Tensor], module: Any, model: ModelConfig = DEFAULT_MODEL) -> None:
    """Copy mggcn's weights into the GCNConv layers of a module, in order.

    Args:
        state: Weights as `Trainer.state_dict` returns them.
        module: As of `from_pyg`, which also says when logits agree.
        model: As of `from_pyg`.

    Raises:
        ConfigError: The number of layers, the biases, a shape or an option differs; the module is then unchanged.
    """
    check_state(state)
    convs = convolutions(module, model)
    pairs: list[tuple[str, Any, Tensor]] = []
    names = set(state)
    for layer, conv in enumerate(convs, start=1):
        wanted = [(f"layers.{layer}.weight", conv.lin.weight, True)]
        if conv.bias is not None:
            wanted.append((f"layers.{layer}.bias", conv.bias, False))
        for name, target, transposed in wanted:
            if name not in state:
                raise ConfigError(f"the module needs {name}, the weights are {', '.join(state)}")
            value = state[name].t() if transposed else state[name]
            if value.shape != target.shape:
                raise ConfigError(f"{name} gives {tuple(value.shape)}, the module expects {tuple(target.shape)}")
            names.discard(name)
            pairs.append((name, target, value))
    if names:
        raise ConfigError(f"the module has no place for {', '.join(sorted(names))}")
    for _, target, value in pairs:
        target.data.copy_(value)
