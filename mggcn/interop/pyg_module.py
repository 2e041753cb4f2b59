"""A trained model as a torch module of PyG's layers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from mggcn.config import ModelConfig
from mggcn.errors import BackendError, ConfigError
from mggcn.interop.pyg_norms import NORMS
from mggcn.interop.weights import PLAIN, to_pyg

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module


def pyg_module(state: Mapping[str, Tensor], model: ModelConfig, width: int, outputs: int, relations: int = 0) -> Module:
    """Return a module of PyG's layers with these weights, called as module(x, edge_index), R-GCN with edge_type too.

    Raises: ConfigError if PyG's layers have no such model; BackendError without PyG.
    """
    import torch

    try:
        from torch_geometric import nn as pyg
    except ImportError as error:
        raise BackendError('to_pyg needs PyTorch Geometric: pip install "mggcn[pyg]"') from error
    make = _layer(model, pyg, relations)
    widths = [width, *model.hidden, outputs]
    layers = [make(d, e, number == len(widths) - 2) for number, (d, e) in enumerate(itertools.pairwise(widths))]
    norms = [getattr(torch.nn, NORMS[model.norm_layer])(e) for e in model.hidden] if model.norm_layer != "none" else []
    activation = {"relu": torch.nn.ReLU, "elu": torch.nn.ELU, "leaky_relu": torch.nn.LeakyReLU, "gelu": torch.nn.GELU}
    names = "x, edge_index, edge_type" if model.kind == "rgcn" else "x, edge_index"
    steps: list[Any] = []
    for number, layer in enumerate(layers):
        steps.append((layer, f"{names} -> x"))
        if number < len(layers) - 1:
            steps += [(norms[number], "x -> x")] if norms else []
            steps += [(activation[model.activation](), "x -> x"), (torch.nn.Dropout(model.dropout), "x -> x")]
    if model.input_dropout:
        steps.insert(0, (torch.nn.Dropout(model.input_dropout), "x -> x"))
    module: Module = pyg.Sequential(names, steps).to(next(iter(state.values())).dtype)
    to_pyg(state, module, model)
    return module.eval()


def _layer(model: ModelConfig, pyg: Any, relations: int) -> Callable[[int, int, bool], Any]:
    """Return what makes a layer of two widths, the last one or not. Raises: ConfigError."""
    kind, loops = model.kind, model.self_loops
    odd = [f"{name}={getattr(model, name)!r}" for name, default in PLAIN.items() if getattr(model, name) != default]
    odd += ['norm="mean"'] if kind in ("gcn", "sgc") and model.norm != "symmetric" else []
    odd += [f"{kind} with aggregator={model.aggregator!r} and self_loops={loops}"] if (
        kind == "sage" and (model.aggregator == "gcn" or (model.aggregator == "mean" and loops))
    ) else []  # fmt: skip
    makers: dict[str, Callable[[int, int, bool], Any]] = {
        "gcn": lambda d, e, last: pyg.GCNConv(d, e, add_self_loops=loops, bias=model.bias),
        "sgc": lambda d, e, last: pyg.SGConv(d, e, K=model.hops, add_self_loops=loops, bias=model.bias),
        "sage": lambda d, e, last: pyg.SAGEConv(
            d, e, aggr=model.aggregator, project=model.aggregator == "max", bias=model.bias
        ),
        "gin": lambda d, e, last: _gin(d, e, model, pyg),
        "gat": lambda d, e, last: _attention(pyg.GATConv, d, e, last, model),
        "gatv2": lambda d, e, last: _attention(pyg.GATv2Conv, d, e, last, model),
        "rgcn": lambda d, e, last: pyg.RGCNConv(d, e, relations, num_bases=model.bases, bias=model.bias),
    }
    if odd or kind not in makers:
        raise ConfigError(
            f"PyG's layers have no {', '.join(odd) or kind}, so to_pyg cannot build the module; take the tensors by name "
            "from Trainer.state_dict"
        )
    return makers[kind]


def _gin(d: int, e: int, model: ModelConfig, pyg: Any) -> Any:
    import torch

    activation = {"relu": torch.nn.ReLU, "elu": torch.nn.ELU, "leaky_relu": torch.nn.LeakyReLU, "gelu": torch.nn.GELU}
    dense = torch.nn.Sequential(
        torch.nn.Linear(d, e, bias=model.bias), activation[model.activation](), torch.nn.Linear(e, e, bias=model.bias)
    )
    return pyg.GINConv(dense, train_eps=True)


def _attention(conv: Any, d: int, e: int, last: bool, model: ModelConfig) -> Any:
    heads = model.heads_of(last)
    joined = not last and model.concat_heads
    width = e // heads if joined else e
    return conv(
        d,
        width,
        heads=heads,
        concat=joined,
        add_self_loops=model.self_loops,
        bias=model.bias,
        dropout=model.attention_dropout,
    )
