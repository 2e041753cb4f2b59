"""All shapes of our sparse kernel on one graph: found, rather than predicted, what cuda_choice.py should choose."""

from __future__ import annotations

import functools
import itertools

import torch
from gpu_graphs import find_store
from gpu_lab import Lab, attempt
from gpu_spmm import WIDTHS, Trial, load, own_product, sample_rows

from mggcn.backend.cuda_choice import Variant

LANES, PIECES, UNROLL = (4, 8, 16, 32), (1, 2, 3), (2, 4, 8)
MAX_TILES = 8


def measure(lab: Lab, case: str) -> None:
    """Write a row per width, type and shape; the widths that matter most come first."""
    settings = lab.settings
    matrix = load(lab, find_store(case, settings.scale, settings.cache, settings.data))
    sample = sample_rows(matrix.lengths)
    for width in WIDTHS[:1] if settings.quick else (256, 128, 512, 41, 64, 16):
        for dtype in (torch.float32, torch.bfloat16):
            trial = Trial(lab, matrix, width, dtype, sample)
            for variant in shapes(width, dtype.itemsize)[: 2 if settings.quick else None]:
                shape = {"lanes": variant.lanes, "pieces": variant.pieces, "unroll": variant.unroll}
                what = {"kind": "spmm", "width": width, "type": str(dtype)[6:], "contender": "own shape", **shape}
                attempt(lab, what, trial.one, functools.partial(own_product, lab, matrix, width, dtype, variant))


def shapes(width: int, itemsize: int) -> list[Variant]:
    """Shapes that waste at most half of their lanes and need few tiles."""
    found = []
    for lanes, pieces, unroll in itertools.product(LANES, PIECES, UNROLL):
        variant = Variant("balanced", lanes, pieces, unroll, True)
        tile = variant.tile(itemsize)
        tiles = -(-width // tile)
        if unroll <= lanes and tiles <= MAX_TILES and (tile * tiles <= 2 * width or lanes * pieces == LANES[0]):
            found.append(variant)
    return found
