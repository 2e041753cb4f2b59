"""The acceptance cases of training epochs (layers x width: a graph and the hidden widths), and the precisions of mggcn."""

from __future__ import annotations

import typing

from mggcn.config import RunConfig

CASES: dict[str, tuple[str, tuple[int, ...]]] = {
    "cora 2x16": ("cora", (16,)),
    "arxiv-like 3x256": ("arxiv-like", (256, 256)),
    "arxiv-ordered 3x256": ("arxiv-ordered", (256, 256)),
    "products-like 3x256": ("products-like", (256, 256)),
    "reddit-like 2x16": ("reddit-like", (16,)),
    "reddit-like 2x512": ("reddit-like", (512,)),
}
PRECISIONS = tuple(
    name
    for name in ("fp32", "mixed", "bf16", "tf32")
    if name in typing.get_args(typing.get_type_hints(RunConfig)["precision"])
)
"""Those of run.precision that are measured; tf32 last, whose setting is the process's."""
