"""Weights from and to stacks of PyG's layers, whose options must be those of the model (model/pyg_layers.py).

Ours: layers.<l>.weight (D, E), layers.<l>.bias (E,) and others by kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mggcn.config import ModelConfig
from mggcn.errors import ConfigError
from mggcn.model.pyg_layers import TWINS

if TYPE_CHECKING:
    from torch import Tensor

HARMLESS = ("ReLU", "Dropout", "Identity", "TrimToLayer")
"""What may stand between the layers: what stands there in mggcn, too, or nothing (PyG trims sampled graphs alone)."""
SYNONYMS: dict[object, str] = {"sum": "add"}


def convolutions(module: Any, model: ModelConfig | None = None) -> list[Any]:
    """Return the convolutions of a torch module in order.

    model: which they must make; by default the one that the first makes.
    Raises: ConfigError if it has none or several kinds, or one without sizes, or computes something else than `model` as
    far as its parts tell: an option of a layer, parameters between the layers, an activation other than ReLU.
    """
    if not callable(getattr(module, "modules", None)):
        raise ConfigError(f"expected a torch module with GCNConv layers, got {type(module).__name__}")
    found = [m for m in module.modules() if type(m).__name__ in TWINS]
    if not found:
        raise ConfigError(
            f"expected a module with {' or '.join(TWINS)} layers, {type(module).__name__} has none; other layers have no "
            "twin in mggcn"
        )
    kinds = list(dict.fromkeys(type(conv).__name__ for conv in found))
    if len(kinds) > 1:
        raise ConfigError(f"the module has {' and '.join(kinds)} layers, a model of mggcn has one kind")
    twin = TWINS[kinds[0]]
    if any(type(parameter).__name__ == "UninitializedParameter" for conv in found for parameter in conv.parameters()):
        raise ConfigError(
            f"a {kinds[0]}(-1, ...) has no weights before its first call; call the module once, or give sizes"
        )
    _check_rest(module, found, kinds[0])
    for layer, conv in enumerate(found, start=1):
        _check_options(layer, layer == len(found), conv, twin.model(found[0]) if model is None else model)
    return found


def _check_rest(module: Any, convs: list[Any], kind: str) -> None:
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
            f"mggcn has ReLU and dropout between {kind} layers, the module also {', '.join(strange[:8])}; give the "
            "layers alone, as a torch.nn.ModuleList, if nothing of that is part of the network"
        )


def _check_options(layer: int, last: bool, conv: Any, model: ModelConfig) -> None:
    """Refuse a layer whose options give other logits than those of the model."""
    name = type(conv).__name__
    twin = TWINS[name]
    made = twin.model(conv)
    if model.kind != made.kind or (made.kind == "gcn" and model.norm != made.norm):
        raise ConfigError(f"{name} is {twin.call}, the model is {model.kind} with norm {model.norm}; choose that one")
    for option, (value, instead) in twin.options.items():
        if getattr(conv, option, value) not in (value, SYNONYMS.get(value)):
            raise ConfigError(
                f"{name} {layer} has {option}={getattr(conv, option)!r}, mggcn's {made.kind.upper()} computes "
                f"{option}={value!r}; {instead}"
            )
    twin.check(layer, last, conv, model)


def check_state(state: Mapping[str, Tensor]) -> None:
    """Refuse weights that are no mapping from names to torch tensors. Raises: ConfigError."""
    import torch

    if not isinstance(state, Mapping):
        raise ConfigError(f"expected weights as a mapping from names to tensors, got {type(state).__name__}")
    for name, value in state.items():
        if not torch.is_tensor(value):
            raise ConfigError(f"{name} must be a torch tensor, got {type(value).__name__}; torch.as_tensor makes one")


def from_pyg(module: Any, model: ModelConfig | None = None) -> dict[str, Tensor]:
    """Return the weights of a stack of PyG's convolutions as mggcn's state_dict, as copies.

    What the module's own `forward` does cannot be seen: the logits are the same if it calls the layers in order, with ReLU
    (and dropout) between them and nothing else, on the same graph.

    Args:
        module: A torch module with layers of one kind: GCNConv, RGCNConv, GATConv or GATv2Conv.
        model: The model that the weights are for, by default `GCN()`, `RGCN(bases=...)`, `GAT(heads=...)` or
            `GATv2(heads=...)` as the first layer has them: `GCN(self_loops=False)` for layers with add_self_loops=False,
            and then for the Trainer too, since weights do not say how their layers were made. An RGCNConv without
            `num_bases` has a basis for each relation.

    Raises:
        ConfigError: A layer has options, or the module has other parts, that the model does not have.
    """
    state: dict[str, Tensor] = {}
    for layer, conv in enumerate(convolutions(module, model), start=1):
        twin = TWINS[type(conv).__name__]
        state |= {name: weight.read() for name, weight in twin.weights(layer, conv).items()} | dict(
            twin.added(layer, conv)
        )
    return state


def to_pyg(state: Mapping[str, Tensor], module: Any, model: ModelConfig | None = None) -> None:
    """Copy mggcn's weights into the convolutions of a module, in order.

    Args:
        state: Weights as `Trainer.state_dict` returns them.
        module: As of `from_pyg`, which also says when logits agree.
        model: As of `from_pyg`.

    Raises:
        ConfigError: The number of layers, the biases, a shape or an option differs; the module is then unchanged.
    """
    check_state(state)
    convs = convolutions(module, model)
    pairs: list[tuple[Any, Tensor]] = []
    names = set(state)
    for layer, conv in enumerate(convs, start=1):
        twin = TWINS[type(conv).__name__]
        given = twin.taken(layer, conv, state)
        names -= state.keys() - given.keys()
        for name, weight in twin.weights(layer, conv).items():
            if name not in given:
                raise ConfigError(f"the module needs {name}, the weights are {', '.join(state)}")
            value = given[name].t() if weight.transposed else given[name]
            if value.shape != weight.parameter.shape:
                raise ConfigError(
                    f"{name} gives {tuple(value.shape)}, the module expects {tuple(weight.parameter.shape)}"
                )
            names.discard(name)
            pairs.append((weight.parameter, value))
    if names:
        raise ConfigError(f"the module has no place for {', '.join(sorted(names))}")
    for target, value in pairs:
        target.data.copy_(value)
