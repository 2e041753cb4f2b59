"""Norms between PyG's layers: those that a model has, and which of its vectors their weights are."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from mggcn.config import ModelConfig
from mggcn.errors import ConfigError
from mggcn.interop.pyg_layers import Weight

EPS: Final = 1e-5
NORMS: Final[Mapping[str, str]] = MappingProxyType({"layer": "LayerNorm", "batch": "BatchNorm1d"})
"""The torch module for each value of model.norm_layer."""


def norms_of(module: Any, inside: set[int], num_hidden: int, model: ModelConfig) -> list[Any]:
    """Return the norms between a module's layers in order; none if the model has none, so that any norm counts as
    unknown.

    inside: ids of the modules that are parts of layers. Raises: ConfigError for another number of norms than hidden layers,
    or norms that compute something else.
    """
    if model.norm_layer == "none":
        return []
    name = NORMS[model.norm_layer]
    found = [part for part in module.modules() if type(part).__name__ == name and id(part) not in inside]
    if len(found) != num_hidden:
        raise ConfigError(
            f"the model has norm_layer={model.norm_layer!r}, a {name} for each of {num_hidden} hidden layers, but the "
            f"module has {len(found)}; give the module as many, or name the model that the weights are for"
        )
    for number, norm in enumerate(found, start=1):
        options = {"eps": EPS, "mode": "node", "affine": True, "elementwise_affine": True, "track_running_stats": True}
        for option, value in options.items():
            if getattr(norm, option, value) != value:
                raise ConfigError(
                    f"{name} {number} has {option}={getattr(norm, option)!r}, but mggcn's norms have {option}={value!r}; "
                    "no model has another value"
                )
    return found


def norm_weights(number: int, norm: Any) -> dict[str, Weight]:
    """Return the parameters of a norm, counted from 1, by mggcn's names: with batch norm running statistics, too."""
    names = ("weight", "bias", "running_mean", "running_var")
    found = {name: getattr(norm, name, None) for name in names}
    return {f"norms.{number}.{name}": Weight(tensor) for name, tensor in found.items() if tensor is not None}
