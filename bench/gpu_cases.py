"""The acceptance cases of training epochs: layers x width, a graph and the hidden widths."""

from __future__ import annotations

CASES: dict[str, tuple[str, tuple[int, ...]]] = {
    "cora 2x16": ("cora", (16,)),
    "arxiv-like 3x256": ("arxiv-like", (256, 256)),
    "products-like 3x256": ("products-like", (256, 256)),
    "reddit-like 2x16": ("reddit-like", (16,)),
    "reddit-like 2x512": ("reddit-like", (512,)),
}
