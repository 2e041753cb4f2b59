"""Weights from and to stacks of PyG's layers, and from DGL's, whose options must be those of the model (pyg_layers.py).

Ours: layers.<l>.weight (D, E), layers.<l>.bias (E,) and others by kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from mggcn.config import ModelConfig
from mggcn.errors import ConfigError
from mggcn.interop.dgl_layers import DGL_TWINS, averaged_bias, library_of
from mggcn.interop.pyg_gin import ACTIVATIONS, is_activation, name_of
from mggcn.interop.pyg_layers import TWINS, Twin, Weight
from mggcn.interop.pyg_norms import NORMS, norm_weights, norms_of
from mggcn.model.runtime import check_state

if TYPE_CHECKING:
    from torch import Tensor

HARMLESS = ("Dropout", "Identity", "TrimToLayer", "ModuleList", "ModuleDict")
"""Modules that may stand between the layers besides norms and the activation: mggcn has them there, too, or they do
nothing.
"""
PLAIN = MappingProxyType(
    {
        "residual": "none",
        "jumping": "last",
        "head": "convolution",
        "dense_before": (),
        "dense_between": False,
        "dense_after": (),
    }
)
"""The settings that a model must not use if its layers are to match PyG's in order."""
SYNONYMS: Mapping[object, str] = MappingProxyType({"sum": "add"})


@dataclass(frozen=True, slots=True)
class Stack:
    """The convolutions of a module in order, and the norms after hidden ones, if the model has norms."""

    layers: list[Any]
    norms: list[Any]
    twins: Mapping[str, Twin]

    def weights(self) -> dict[str, Weight]:
        """Return all parameters by mggcn's names."""
        found: dict[str, Weight] = {}
        for number, conv in enumerate(self.layers, start=1):
            found |= self.twins[type(conv).__name__].weights(number, conv)
            if number <= len(self.norms):
                found |= norm_weights(number, self.norms[number - 1])
        return found


def stack_of(module: Any, model: ModelConfig | None = None, twins: Mapping[str, Twin] = TWINS) -> Stack:
    """Return the convolutions and norms of a torch module.

    model: the model that they must match; by default the one that the first layer describes. twins: the library's layers.
    Raises: ConfigError if the module has no convolutions, several kinds of them, or one without sizes, or if its parts
    show that it computes something else than `model`: an option of a layer, parameters between the layers, another
    activation.
    """
    if not callable(getattr(module, "modules", None)):
        raise ConfigError(f"expected a torch module with {' or '.join(twins)} layers, got {type(module).__name__}")
    _refuse_other_library(module, twins)
    found = [m for m in module.modules() if type(m).__name__ in twins]
    if not found:
        raise ConfigError(
            f"expected a module with {' or '.join(twins)} layers, but {type(module).__name__} has none; other layers have "
            "no twin in mggcn"
        )
    kinds = list(dict.fromkeys(type(conv).__name__ for conv in found))
    if len(kinds) > 1:
        raise ConfigError(f"the module has {' and '.join(kinds)} layers, but a model of mggcn has only one kind")
    if any(type(parameter).__name__ == "UninitializedParameter" for conv in found for parameter in conv.parameters()):
        raise ConfigError(
            f"a {kinds[0]}(-1, ...) has no weights before its first call; call the module once, or give sizes"
        )
    made = twins[kinds[0]].model(found[0]) if model is None else model
    if more := [name for name, default in PLAIN.items() if getattr(made, name) != default]:
        raise ConfigError(
            f"mggcn exchanges weights only with stacks of convolutions, norms and activations, but the model has "
            f"{', '.join(more)}; "
            "copy tensors by name with Trainer.state_dict and scores_of"
        )
    inside = {id(part) for conv in found for part in conv.modules()} | {id(module)}
    norms = norms_of(module, inside, len(found) - 1, made)
    _check_rest(module, found, norms, made, twins)
    for layer, conv in enumerate(found, start=1):
        _check_options(layer, layer == len(found), conv, made, twins[kinds[0]])
    return Stack(found, norms, twins)


def _refuse_other_library(module: Any, twins: Mapping[str, Twin]) -> None:
    """Refuse layers of DGL's where PyG's are read, the other way round, and a user's own: classes have the same names."""
    wanted = "DGL" if twins is DGL_TWINS else "PyG"
    for part in module.modules():
        name, library = type(part).__name__, library_of(part)
        if name in {**TWINS, **DGL_TWINS} and library not in (wanted, ""):
            raise ConfigError(
                f"{name} is {library}'s layer; mggcn.from_{library.lower()}(module, model) reads its weights"
            )
        if name in twins and not library:
            raise ConfigError(
                f"{name} is a class of {type(part).__module__}, not {wanted}'s layer: what it computes is not known; copy "
                "tensors by name with Trainer.state_dict and scores_of"
            )


def _check_rest(module: Any, convs: list[Any], norms: list[Any], model: ModelConfig, twins: Mapping[str, Twin]) -> None:
    """Refuse modules between the layers that are not a norm, activation or dropout of the model."""
    own = [*convs, *norms]
    known = {id(parameter) for one in own for parameter in one.parameters()}
    names = [name for name, parameter in module.named_parameters() if id(parameter) not in known]
    inside = {id(part) for one in own for part in one.modules()} | {id(module)}
    parts = [m for m in module.modules() if id(m) not in inside and next(m.children(), None) is None]
    if parts and type(parts[-1]).__name__ in ("Softmax", "LogSoftmax"):
        parts.pop()  # turns logits into probabilities
    names += [name_of(part) for part in parts if _is_strange(part, model)]
    act = getattr(module, "act", None)  # of PyG's own GCN, which may be a function
    if callable(act) and _is_strange(act, model):
        names.append(f"act={name_of(act)}")
        parts.append(act)
    if names:
        between = {"none": "", "layer": "layer norm, ", "batch": "batch norm, "}[model.norm_layer]
        raise ConfigError(
            f"mggcn has {between}{ACTIVATIONS[model.activation][0]} and dropout between {type(convs[0]).__name__} layers, "
            f"the module also has {', '.join(names[:8])}; if the network does not use these, give its layers alone, as a "
            f"torch.nn.ModuleList; if it does, {_advice(twins[type(convs[0]).__name__], [*norms, *parts])}"
        )


def _is_strange(part: Any, model: ModelConfig) -> bool:
    return type(part).__name__ not in HARMLESS and not is_activation(part, model.activation)


def _advice(twin: Twin, parts: list[Any]) -> str:
    """Name the model that has these modules around its layers, if there is one."""
    found: set[tuple[str, str]] = set()
    for part in parts:
        settings = [("activation", name) for name in ACTIVATIONS if is_activation(part, name)]
        settings += [("norm_layer", name) for name, norm in NORMS.items() if type(part).__name__ == norm]
        if type(part).__name__ not in HARMLESS:
            found.update(settings or [("", "")])
    keys = sorted(key for key, _ in found)
    if twin.call == "mggcn.SGC()" or keys not in (["activation"], ["norm_layer"], ["activation", "norm_layer"]):
        return "write the model with mggcn.nn"
    given = ", ".join(f"{key}={value!r}" for key, value in sorted(found))
    call = twin.call.partition("(")[0]
    return f"name the model that has them: model={call}(..., {given}), also for the Trainer"


def _check_options(layer: int, last: bool, conv: Any, model: ModelConfig, twin: Twin) -> None:
    """Refuse a layer whose options give other logits than those of the model."""
    name = type(conv).__name__
    made = twin.model(conv)
    call = twin.call.replace("()", f'(norm="{made.norm}")') if made.kind == "gcn" else twin.call
    if model.kind != made.kind or (made.kind == "gcn" and model.norm != made.norm):
        raise ConfigError(f"{name} is {call}, but the model is {model.kind} with norm {model.norm}; choose that one")
    for option, (value, instead) in twin.options.items():
        if getattr(conv, option, value) not in (value, SYNONYMS.get(value)):
            raise ConfigError(
                f"{name} {layer} has {option}={getattr(conv, option)!r}, but mggcn's {made.kind.upper()} computes "
                f"{option}={value!r}; {instead}"
            )
    twin.check(layer, last, conv, model)


def from_pyg(module: Any, model: ModelConfig | None = None) -> dict[str, Tensor]:
    """Return the weights of a stack of PyG's convolutions as mggcn's state_dict, as copies.

    What the module's own `forward` does cannot be seen: the logits are the same if it calls the layers in order, with ReLU
    (and dropout) between them and nothing else, on the same graph.

    Args:
        module: A torch module with layers of one kind: GCNConv, SAGEConv, GINConv, GATConv, GATv2Conv or RGCNConv; or one
            SGConv.
        model: The model that the weights are for, by default `GCN()`, `RGCN(bases=...)`, `GAT(heads=...)` or
            `GATv2(heads=...)` as the first layer has them: `GCN(self_loops=False)` for layers with add_self_loops=False,
            and then for the Trainer too, since weights do not say how their layers were made. An RGCNConv without
            `num_bases` has a basis for each relation.

    Raises:
        ConfigError: A layer has options, or the module has other parts, that the model does not have.

    Examples:
        >>> from torch_geometric.nn import GCNConv
        >>> layers = torch.nn.ModuleList([GCNConv(8, 4), GCNConv(4, 3)])
        >>> sorted(mggcn.from_pyg(layers))
        ['layers.1.bias', 'layers.1.weight', 'layers.2.bias', 'layers.2.weight']
    """
    stack = stack_of(module, model)
    state = {name: weight.read() for name, weight in stack.weights().items()}
    for layer, conv in enumerate(stack.layers, start=1):
        state |= TWINS[type(conv).__name__].added(layer, conv)
    return state


def from_dgl(module: Any, model: ModelConfig | None = None) -> dict[str, Tensor]:
    """Return the weights of a stack of DGL's convolutions as mggcn's state_dict, as copies.

    The logits are the same if the module's `forward` calls the layers in order, flattens the heads of hidden attention and
    averages those of the last, has the model's activation (ReLU) between layers, and nothing else, on the same graph
    without weights: DGL's layers add no self-loops, so give the model `self_loops=False`, or leave `dgl.add_self_loop` to
    it.
    GraphConv(norm="both") scales by out- and in-degrees, mggcn by in-degrees: the same where edges go both ways.
    RelGraphConv must be called with norm, 1 / the in-degree of an edge's target in its relation.

    Args:
        module: A torch module with layers of one kind: GraphConv, SAGEConv (mean, pool, gcn), GINConv, GATConv,
            GATv2Conv or RelGraphConv; or one SGConv.
        model: The model that the weights are for, by default the one that the first layer describes, without self-loops.

    Raises:
        ConfigError: A layer has options, or the module has other parts, that the model does not have.
    """
    stack = stack_of(module, model, DGL_TWINS)
    state = {name: weight.read() for name, weight in stack.weights().items()}
    if type(stack.layers[-1]).__name__ in ("GATConv", "GATv2Conv"):
        state |= averaged_bias(len(stack.layers), stack.layers[-1])
    return state


def weights_of_module(module: Any, model: ModelConfig) -> dict[str, Tensor]:
    """Return the weights of PyG's or DGL's layers. Raises: ConfigError as `from_pyg` and `from_dgl`."""
    parts = module.modules() if callable(getattr(module, "modules", None)) else ()
    return (from_dgl if any(library_of(part) == "DGL" for part in parts) else from_pyg)(module, model)


def to_pyg(state: Mapping[str, Tensor], module: Any, model: ModelConfig | None = None) -> None:
    """Copy mggcn's weights into the convolutions of a module, in order.

    Args:
        state: Weights as `Trainer.state_dict` returns them.
        module: As for `from_pyg`, which also says when logits agree.
        model: As for `from_pyg`.

    Raises:
        ConfigError: The number of layers, the biases, a shape or an option differs; the module is then unchanged.
    """
    check_state(state)
    stack, given = stack_of(module, model), state
    for layer, conv in enumerate(stack.layers, start=1):
        given = TWINS[type(conv).__name__].taken(layer, conv, given)
    pairs: list[tuple[Any, Tensor]] = []
    names = set(given)
    for name, weight in stack.weights().items():
        if name not in given:
            raise ConfigError(f"the module needs {name}, but the weights are {', '.join(state)}")
        value = given[name].t() if weight.transposed else given[name]
        if value.shape != weight.parameter.shape:
            raise ConfigError(
                f"{name} has shape {tuple(value.shape)}, but the module expects {tuple(weight.parameter.shape)}"
            )
        names.discard(name)
        pairs.append((weight.parameter, value))
    if names:
        raise ConfigError(f"the module has no place for {', '.join(sorted(names))}")
    for target, value in pairs:
        target.data.copy_(value)
