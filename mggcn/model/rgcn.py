"""Relational graph convolutional network (Schlichtkrull et al. 2018, eq. 2 and 3), as PyG's RGCNConv with a root weight.

H_l = drop(relu(H_(l-1) W_root + sum_r D_r^-1 A_r^T H_(l-1) W_r + b)) with W_r = sum_b a_rb V_b.
"""

from __future__ import annotations

from mggcn.config import ModelConfig
from mggcn.model.builder import Builder
from mggcn.model.values import Value


def rgcn(b: Builder, x: Value, model: ModelConfig) -> Value:
    """Return the logits (V, C)."""

    def convolution(x: Value, width: int) -> Value:
        return b.bias(b.add(b.linear(x, width), b.relations(x, width)))

    for width in model.hidden:
        x = b.dropout(b.relu(convolution(x, width)))
    return convolution(x, b.num_classes)
