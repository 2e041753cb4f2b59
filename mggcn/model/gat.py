"""Graph attention networks: GAT (Velickovic et al. 2018, eq. 1 to 6) and GATv2 (Brody et al. 2022, eq. 7).

H_l = drop(relu(attention(H_(l-1) W_l) + b_l)), heads side by side, so that a hidden width is that of all heads; the last
layer has a column per class in every head, and averages the heads. Parameters are those of PyG's GATConv and GATv2Conv.
"""

from __future__ import annotations

from collections.abc import Callable

from mggcn.config import ModelConfig
from mggcn.model.builder import Builder
from mggcn.model.values import Value

Convolution = Callable[[Builder, Value, int], Value]


def gat_conv(b: Builder, x: Value, width: int) -> Value:
    """Return GAT's attention over W x, `width` columns in model.heads heads, before its bias."""
    return b.attend(b.linear(x, width), b.config.heads)


def gatv2_conv(b: Builder, x: Value, width: int) -> Value:
    """Return GATv2's attention over W_l x + b_l, for destinations that have W_r x + b_r, before its bias."""
    sources, destinations = (b.bias(b.linear(x, width)) for _ in range(2))
    return b.attend_dynamic(sources, destinations, b.config.heads)


def gat(b: Builder, x: Value, model: ModelConfig) -> Value:
    """Return the logits (V, C) of GAT."""
    return _network(b, x, gat_conv)


def gatv2(b: Builder, x: Value, model: ModelConfig) -> Value:
    """Return the logits (V, C) of GATv2."""
    return _network(b, x, gatv2_conv)


def _network(b: Builder, x: Value, conv: Convolution) -> Value:
    for layer, width in enumerate(b.config.hidden, start=1):
        x = b.dropout(b.relu(b.bias(conv(b, x, width), f"attention.{layer}.bias")))
    heads, last = b.config.heads, len(b.config.hidden) + 1
    return b.bias(b.head_mean(conv(b, x, heads * b.num_classes), heads), f"attention.{last}.bias")
