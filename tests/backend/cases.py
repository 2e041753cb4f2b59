"""The battery of matrices that every backend multiplies, and buffers with guards around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch

GUARD = 12345.0
"""Fills what a kernel must not touch."""
TYPES = {torch.float32: np.float32, torch.float64: np.float64}


@dataclass(frozen=True)
class Case:
    name: str
    adj: Any
    """scipy CSR (V, N), unweighted pattern with weights of its own."""


def _case(name: str, dense: np.ndarray, seed: int) -> Case:
    rng = np.random.default_rng(seed)
    weights = rng.normal(size=dense.shape)
    matrix = sp.csr_matrix(dense * weights)
    matrix.sort_indices()
    return Case(name, matrix)


def _battery() -> list[Case]:
    rng = np.random.default_rng(90210)
    n = 37
    star, path, hub, halves = (np.zeros((n, n)) for _ in range(4))
    star[0, 1:] = star[1:, 0] = 1
    path[np.arange(n - 1), np.arange(1, n)] = 1
    hub[:] = rng.random((n, n)) < 0.05
    hub[n // 2] = 1
    halves[:18, :18] = rng.random((18, 18)) < 0.3
    empty_rows = (rng.random((n, n)) < 0.2) * (np.arange(n) % 3 > 0)[:, None]
    return [
        _case("identity", np.eye(n), 1),
        _case("empty rows", empty_rows, 2),
        _case("one dense row", hub, 3),
        _case("star", star, 4),
        _case("path", path, 5),
        _case("disconnected", halves, 6),
        _case("no edges", np.zeros((n, n)), 7),
        _case("no rows", np.zeros((0, n)), 8),
        _case("rectangular", rng.random((601, 53)) < 0.1, 9),
    ]


BATTERY = _battery()
RANDOM = BATTERY[-1]
NAMES = {"ids": lambda case: case.name}


def padded(rows: int, cols: int, dtype: torch.dtype, fill: float = GUARD) -> tuple[torch.Tensor, torch.Tensor]:
    """A (rows, cols) view with rows padded to 64 bytes, and the whole buffer with 64 guard elements on both sides."""
    step = 64 // dtype.itemsize
    ld = -(-cols // step) * step
    whole = torch.full((64 + rows * ld + 64,), fill, dtype=dtype)
    return whole[64 : 64 + rows * ld].as_strided((rows, cols), (ld, 1)), whole


def tight(rows: int, cols: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A contiguous (rows, cols) view, and the buffer with guards around it."""
    whole = torch.full((64 + rows * cols + 64,), GUARD, dtype=dtype)
    return whole[64 : 64 + rows * cols].view(rows, cols), whole


def guards_hold(whole: torch.Tensor, view: torch.Tensor, vector: int) -> bool:
    """Whether nothing outside the rows changed, and in a row nothing beyond the next multiple of `vector` columns."""
    rows, cols = view.shape
    ld = view.stride(0)
    rest = whole.clone()
    rest[64:].as_strided((rows, min(ld, -(-cols // vector) * vector)), (ld, 1)).fill_(GUARD)
    return bool((rest == GUARD).all())


def random_dense(rows: int, cols: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, cols))


def filled(view: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    view.copy_(torch.from_numpy(np.ascontiguousarray(values)))
    return view
