"""The convolutions that models are made of: each takes a value and a width and returns the layer's output, bias
included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from mggcn.model.builder import Builder
from mggcn.model.gin import gin
from mggcn.model.values import Value

Convolution = Callable[[Builder, Value, int, bool], Value]
"""Takes a builder, a value, the width of the result and whether this is the model's last layer."""


def gcn(b: Builder, x: Value, width: int, last: bool) -> Value:
    """A_hat x W + b (Kipf & Welling 2017, eq. 2). A rewrite swaps the order of the products where that is less work."""
    return b.bias(b.aggregate(b.linear(x, width)))


def dense(b: Builder, x: Value, width: int, last: bool) -> Value:
    """X W + b: a dense layer, which does not read the graph."""
    return b.bias(b.linear(x, width))


def sage_mean(b: Builder, x: Value, width: int, last: bool) -> Value:
    """X W_r + mean(x) W_n + b (Hamilton et al. 2017, algorithm 1), by edges' weights if there are any; W_n comes first.

    Parameters are those of PyG's SAGEConv.
    """
    neighbours = b.aggregate(b.linear(x, width))
    return b.bias(b.add(neighbours, b.linear(b.own(x), width)))


def sage_max(b: Builder, x: Value, width: int, last: bool) -> Value:
    """X W_r + P W_n + b, P the maximum of the in-neighbours' relu(x W_p + b_p) (Hamilton et al. 2017, eq. 3)."""
    pooled = b.maximum(b.relu(b.bias(b.linear(x, x.cols))))
    return b.bias(b.add(b.linear(b.own(x), width), b.linear(pooled, width)))


def gat(b: Builder, x: Value, width: int, last: bool) -> Value:
    """GAT's attention over x W and a bias (Velickovic et al. 2018, eq. 1 to 6), heads averaged in the last layer."""
    heads, cols, averaged = _heads(b, width, last)
    h = b.attend(b.linear(x, cols), heads)
    return b.attention_bias(b.head_mean(h, heads) if averaged else h)


def gatv2(b: Builder, x: Value, width: int, last: bool) -> Value:
    """GATv2's attention over x W_l + b_l for destinations x W_r + b_r, and a bias (Brody et al. 2022, eq. 7)."""
    heads, cols, averaged = _heads(b, width, last)
    sources, destinations = (b.bias(b.linear(rows, cols)) for rows in (x, b.own(x)))
    h = b.attend_dynamic(sources, destinations, heads)
    return b.attention_bias(b.head_mean(h, heads) if averaged else h)


def _heads(b: Builder, width: int, last: bool) -> tuple[int, int, bool]:
    """Return the number of heads of a layer, the columns of all of them, and whether they are averaged."""
    heads, averaged = b.config.heads_of(last), last or not b.config.concat_heads
    return heads, heads * width if averaged else width, averaged


def rgcn(b: Builder, x: Value, width: int, last: bool) -> Value:
    """X W_r + sum over relations of mean(x) W_r + b (Schlichtkrull et al. 2018, eq. 2 and 3), as PyG's RGCNConv."""
    return b.bias(b.add(b.linear(b.own(x), width), b.relations(x, width)))


CONVOLUTIONS: Final[Mapping[str, Convolution]] = MappingProxyType(
    {
        "gcn": gcn,
        "sage-gcn": gcn,
        "sage-mean": sage_mean,
        "sage-max": sage_max,
        "gin": gin,
        "gat": gat,
        "gatv2": gatv2,
        "rgcn": rgcn,
        "mlp": dense,
    }
)
"""The convolutions by model.kind; for sage, by kind and model.aggregator."""
