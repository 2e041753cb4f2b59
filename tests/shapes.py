"""Bare shapes of graphs to plan: the papers', and others in a line."""

from __future__ import annotations

from typing import Any

from mggcn.planning.shape import GraphShape


def shape_of(vertices: int, edges: int, features: int, classes: int, **more: Any) -> GraphShape:
    """A shape, of a symmetric graph unless `more` says otherwise."""
    sizes = {"num_vertices": vertices, "num_edges": edges, "num_features": features, "num_classes": classes}
    return GraphShape(**({"name": "shape", "symmetric": True} | sizes | more))  # type: ignore[arg-type]


PAPERS = shape_of(111_059_956, 1_615_685_872, 128, 172, name="papers100M", symmetric=False)
PROTEINS = shape_of(8_745_542, 1_309_240_502, 128, 256, name="proteins", symmetric=False)
PRODUCTS = shape_of(2_449_029, 123_718_280, 100, 47, name="products")
