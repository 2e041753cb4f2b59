"""Activations of torch, and the dense layers of PyG's GINConv with one between them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from mggcn.config import ModelConfig
from mggcn.errors import ConfigError

ACTIVATIONS: Final[Mapping[str, tuple[str, Mapping[str, object]]]] = MappingProxyType(
    {
        "relu": ("ReLU", {}),
        "elu": ("ELU", {"alpha": 1.0}),
        "leaky_relu": ("LeakyReLU", {"negative_slope": 0.01}),
        "gelu": ("GELU", {"approximate": "none"}),
    }
)
"""By model.activation: the torch module that computes it, and its options."""


def is_activation(part: Any, activation: str) -> bool:
    """Return whether a module or function is the activation that a model's setting model.activation names."""
    name, options = ACTIVATIONS[activation]
    if type(part).__name__ == name:
        return all(getattr(part, option) == value for option, value in options.items())
    return getattr(part, "__name__", "") in (activation, f"{activation}_")


def name_of(part: Any) -> str:
    """Return the name of a module or function for messages, with options of an activation that are not torch's."""
    found = str(getattr(part, "__name__", type(part).__name__))
    known = [activation for activation, (name, _) in ACTIVATIONS.items() if name == found]
    return repr(part) if known and not is_activation(part, known[0]) else found


def gin_layers(conv: Any) -> list[Any]:
    """Return the dense layers of a GINConv."""
    return [part for part in conv.nn.modules() if type(part).__name__ == "Linear"]


def check_gin(layer: int, last: bool, conv: Any, model: ModelConfig) -> None:
    """Refuse a GINConv other than a dense layer, the activation and another dense layer of the same width.

    What the `forward` of a user's own module does cannot be seen: its parts must be these, or the activation a function.
    """
    act = model.activation
    steps = [part for part in _steps(conv.nn) if type(part).__name__ not in _HARMLESS]
    has = ", ".join(map(name_of, steps))
    if steps == [conv.nn] and next(conv.nn.children(), None) is not None:
        strange = [part for part in _leaves(conv.nn) if not (_is_linear(part) or is_activation(part, act))]
        has, good = ", ".join(map(name_of, strange)) or f"{len(gin_layers(conv))} dense layers", not strange
    else:
        # Between layers comes the model's ReLU, to which one at the end of the layer adds nothing.
        twice = not last and (act, model.norm_layer) == ("relu", "none")
        if twice and len(steps) == 4 and is_activation(steps[3], act):
            steps.pop()
        good = [_is_linear(part) for part in steps] == [True, False, True] and is_activation(steps[1], act)
    if not good or len(gin_layers(conv)) != 2:
        raise ConfigError(
            f"GINConv {layer} has {has}; mggcn's GIN has {_GIN.format(ACTIVATIONS[act][0])}, with model.activation {act}; "
            "pass a model with this activation (also to Trainer), or build it with mggcn.nn"
        )
    inner, width = (len(part.weight) for part in gin_layers(conv))
    if inner != width:
        raise ConfigError(
            f"GINConv {layer} has dense layers of widths {inner} and {width}, but in mggcn's GIN both have the width of "
            "the output, and no setting changes that; give them one width, or write the model with mggcn.nn"
        )


_HARMLESS = ("Dropout", "Identity")
_GIN = "two dense layers, an activation between them and none after: Linear, {}, Linear"


def _is_linear(part: Any) -> bool:
    return type(part).__name__ == "Linear"


def _steps(module: Any) -> list[Any]:
    """What a Sequential or PyG's MLP calls, in order; another module is one step."""
    import torch

    if type(module).__name__ == "MLP" and hasattr(module, "plain_last"):
        return _steps_of_mlp(module)
    if isinstance(module, torch.nn.Sequential):
        # Iterated, not by children(), which leave out a module that occurs a second time.
        return [step for part in module for step in _steps(part)]
    return [module]


def _steps_of_mlp(mlp: Any) -> list[Any]:
    """What PyG's MLP calls: the norm and the activation after each dense layer, except a plain last one."""
    act = [] if mlp.act is None else [mlp.act]
    found: list[Any] = []
    for number, linear in enumerate(mlp.lins):
        norm = list(mlp.norms[number : number + 1])
        plain = mlp.plain_last and number == len(mlp.lins) - 1
        found += [linear] if plain else [linear, *act, *norm] if mlp.act_first else [linear, *norm, *act]
    return found


def _leaves(module: Any) -> list[Any]:
    leaves = [part for part in module.modules() if next(part.children(), None) is None]
    return [part for part in leaves if type(part).__name__ not in (*_HARMLESS, "ModuleList", "ModuleDict")]
