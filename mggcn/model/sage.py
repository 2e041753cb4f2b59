"""GraphSAGE (Hamilton et al. 2017, algorithm 1), by model.aggregator.

gcn: the average over a vertex and its neighbours, a GCN whose A_hat ModelConfig sets. max: pooling (eq. 3),
H_l = drop(relu(H_(l-1) W_r + P W_n + b_l)), P the maximum over the in-neighbours of relu(H_(l-1) W_p + b_p), as wide as
H_(l-1). Parameters are those of PyG's SAGEConv(aggr="max", project=True).
"""

from __future__ import annotations

from mggcn.config import ModelConfig
from mggcn.model.builder import Builder
from mggcn.model.gcn import gcn
from mggcn.model.values import Value


def sage(b: Builder, x: Value, model: ModelConfig) -> Value:
    """Return the logits (V, C)."""
    if model.aggregator == "gcn":
        return gcn(b, x, model)
    for width in model.hidden:
        x = b.dropout(b.relu(max_conv(b, x, width)))
    return max_conv(b, x, b.num_classes)


def max_conv(b: Builder, x: Value, width: int) -> Value:
    """Return what a vertex and the maximum of its neighbours give, with its bias."""
    pooled = b.maximum(b.relu(b.bias(b.linear(x, x.cols))))
    return b.bias(b.add(b.linear(x, width), b.linear(pooled, width)))
