"""Weights from and to stacks of PyG's GCNConv.

Ours: layers.<l>.weight (D, E) and layers.<l>.bias (E,), l from 1. PyG: lin.weight (E, D) and bias (E,) per convolution.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mggcn.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


def convolutions(module: Any) -> list[Any]:
    """Return the GCNConv layers of a torch module in order. Raises: ConfigError if it has none, or one without sizes."""
    found = [m for m in module.modules() if type(m).__name__ == "GCNConv"]
    if not found:
        raise ConfigError(f"expected a module with GCNConv layers, {type(module).__name__} has none")
    if any(type(conv.lin.weight).__name__ == "UninitializedParameter" for conv in found):
        raise ConfigError(
            "a GCNConv(-1, ...) has no weights before its first call; call the module once, or give sizes"
        )
    return found


def from_pyg(module: Any) -> dict[str, Tensor]:
    """Return the weights of a stack of GCNConv layers as mggcn's state_dict (copies)."""
    state: dict[str, Tensor] = {}
    for layer, conv in enumerate(convolutions(module), start=1):
        state[f"layers.{layer}.weight"] = conv.lin.weight.detach().t().contiguous().clone()
        if conv.bias is not None:
            state[f"layers.{layer}.bias"] = conv.bias.detach().clone()
    return state


def to_pyg(state: Mapping[str, Tensor], module: Any) -> None:
    """Copy mggcn's weights into the GCNConv layers of a module, in order.

    Raises: ConfigError if the number of layers, the biases or a shape differ; the module is unchanged then.
    """
    convs = convolutions(module)
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
