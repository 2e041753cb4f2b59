"""Graph convolutional network (Kipf & Welling 2017, eq. 2): H_l = drop(relu(A_hat H_(l-1) W_l + b_l)).

GraphSAGE with the GCN aggregator (DistGNN 6.1) is the same network with A_hat as the average over a vertex and its
neighbours, which ModelConfig sets for kind "sage".
"""

from __future__ import annotations

from mggcn.config import ModelConfig
from mggcn.model.builder import Builder
from mggcn.model.values import Value


def gcn(b: Builder, x: Value, model: ModelConfig) -> Value:
    """Return the logits (V, C). Every layer multiplies first; a rewrite turns the order round where that is less work."""
    for width in model.hidden:
        x = b.dropout(b.relu(b.bias(b.aggregate(b.linear(x, width)))))
    return b.bias(b.aggregate(b.linear(x, b.num_classes)))
