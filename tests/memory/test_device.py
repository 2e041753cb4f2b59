"""Row blocks of dense products: how many rows a cache holds."""

from __future__ import annotations

import dataclasses

import pytest

from mggcn.assemble.plan import plan_shape
from mggcn.config import from_tables
from mggcn.memory.arena import ITEM_BYTES, BufferSpec
from mggcn.memory.device import DEVICES, TILE_ROWS
from mggcn.model.kinds.dense import Linear
from tests.shapes import shape_of

A100, H100 = 20 * 2**20, 25 * 2**20
"""Halves of the L2 caches: each may hold a copy."""


def test_blocks_of_a_gpu_fit_half_of_the_cache() -> None:
    """Fails if a block does not stay in the cache, a tile is cut, or an A100's blocks would not do for an H100."""
    cuda = DEVICES["cuda"]
    assert cuda.cache_bytes == A100
    for dtype in ("bf16", "fp32", "fp64"):
        for width in (16, 41, 64, 100, 128, 208, 256, 512, 602, 1433):
            row_bytes = BufferSpec("", 1, width, dtype).nbytes
            rows = cuda.block_rows(row_bytes)
            assert rows % TILE_ROWS == 0
            assert rows * row_bytes <= A100 < 2 * rows * row_bytes
            on_h100 = dataclasses.replace(cuda, cache_bytes=H100).block_rows(row_bytes)
            assert on_h100 in (rows, 2 * rows)
    assert cuda.block_rows(1024) == dataclasses.replace(cuda, cache_bytes=H100).block_rows(1024) == 16384
    assert cuda.block_rows(2**30) == TILE_ROWS
    assert {DEVICES["cpu"].block_rows(row_bytes) for row_bytes in (64, 1024, 2**20)} == {2048}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_blocks_follow_the_width_of_each_product(precision: str) -> None:
    """Fails if one number of rows serves all widths, or the scratch of a block is not as large as its rows."""
    shape = shape_of(500_000, 5_000_000, 100, 41)
    settings = {"model": {"hidden": (512, 64)}, "run": {"device": "cuda", "precision": precision}}
    sizes = (plan := plan_shape(from_tables(settings), shape).ranks[0]).sizes
    cut = {op.kind.layer: op.kind.block_rows for op in plan.train.ops if isinstance(op.kind, Linear)}
    item = ITEM_BYTES[sizes.dtype]
    assert {layer: rows * item for layer, rows in cut.items()} == {1: 2**15, 2: 2**18, 3: 2**18}
    block = plan.train.arena["input-grad2.block"].spec
    assert (block.rows, block.cols) == (sizes.block_rows(512), 512)
    assert block.nbytes == 2**24
