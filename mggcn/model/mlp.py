"""Multilayer perceptron: the GCN without its graph, to see what the graph is worth."""

from __future__ import annotations

from mggcn.config import ModelConfig
from mggcn.model.builder import Builder
from mggcn.model.values import Value


def mlp(b: Builder, x: Value, model: ModelConfig) -> Value:
    """Return the logits (V, C)."""
    for width in model.hidden:
        x = b.dropout(b.relu(b.bias(b.linear(x, width))))
    return b.bias(b.linear(x, b.num_classes))
