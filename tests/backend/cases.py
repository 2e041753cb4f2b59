"""The battery of matrices that every backend multiplies, and buffers with guards around them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch

from mggcn.backend.base import KernelBackend

GUARD = 12352.0
"""Fills what a kernel must not touch; the same number in every type."""
Make = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""padded, tight or skewed: (backend, rows, cols) to a view and the buffer around it."""
NAMES_OF_TYPES = {torch.float32: "f32", torch.float64: "f64", torch.bfloat16: "bf16"}


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


def type_name(dtype: torch.dtype) -> str:
    return NAMES_OF_TYPES[dtype]


def real_type(backend: KernelBackend) -> torch.dtype:
    """Type of sums, scales, bias and edge values."""
    return torch.float64 if backend.dtype == torch.float64 else torch.float32


def tolerance(backend: KernelBackend) -> dict[str, Any]:
    """How far a result may lie from the float64 result of the same inputs; bfloat16 is rounded once, at the store."""
    exact = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 2.0**-8}[backend.dtype]
    return {"rtol": exact, "atol": 1e-12 if backend.dtype == torch.float64 else 2e-5}


def device_of(backend: KernelBackend) -> torch.device:
    return backend.upload(np.zeros(1)).device


def zeros(backend: KernelBackend, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device_of(backend))


def reals(backend: KernelBackend, values: np.ndarray) -> torch.Tensor:
    """Numbers on the device in the type of sums."""
    return torch.from_numpy(np.ascontiguousarray(values)).to(device_of(backend), real_type(backend))


def numpy_reals(backend: KernelBackend, values: np.ndarray) -> np.ndarray:
    """Numbers on the host in the type of sums, as KernelBackend.sparse takes them."""
    return values.astype(np.float64 if backend.dtype == torch.float64 else np.float32)


def host(tensor: torch.Tensor) -> np.ndarray:
    """A copy of the numbers of a tensor: as float64, or integers as they are."""
    tensor = tensor.detach().cpu().clone()
    return (tensor.double() if tensor.is_floating_point() else tensor).numpy()


def clock(backend: KernelBackend, seed: int, epoch: int) -> torch.Tensor:
    return backend.upload(np.array([seed, epoch], np.int64))


def padded(
    backend: KernelBackend, rows: int, cols: int, dtype: torch.dtype | None = None, fill: float = GUARD
) -> tuple[torch.Tensor, torch.Tensor]:
    """A (rows, cols) view with rows padded to 64 bytes, and the whole buffer with 64 guard elements on both sides."""
    dtype = dtype or backend.dtype
    step = 64 // dtype.itemsize
    ld = -(-cols // step) * step
    whole = torch.full((64 + rows * ld + 64,), fill, dtype=dtype, device=device_of(backend))
    return whole[64 : 64 + rows * ld].as_strided((rows, cols), (ld, 1)), whole


def tight(
    backend: KernelBackend, rows: int, cols: int, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A contiguous (rows, cols) view, and the buffer with guards around it."""
    whole = torch.full((64 + rows * cols + 64,), GUARD, dtype=dtype or backend.dtype, device=device_of(backend))
    return whole[64 : 64 + rows * cols].view(rows, cols), whole


def skewed(
    backend: KernelBackend, rows: int, cols: int, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows with gaps whose beginnings are aligned to one element only."""
    ld = cols + 3
    whole = torch.full((65 + rows * ld + 63,), GUARD, dtype=dtype or backend.dtype, device=device_of(backend))
    return whole[65:].as_strided((rows, cols), (ld, 1)), whole


def guards_hold(whole: torch.Tensor, view: torch.Tensor, vector: int) -> bool:
    """Whether nothing outside the rows changed, and in a row nothing beyond the next multiple of `vector` columns."""
    rows, cols = view.shape
    ld = view.stride(0)
    rest = whole.clone()
    rest[view.storage_offset() :].as_strided((rows, min(ld, -(-cols // vector) * vector)), (ld, 1)).fill_(GUARD)
    return bool((rest == GUARD).all())


def random_dense(rows: int, cols: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, cols))


def filled(view: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Write numbers into a view, rounded to its type; read them back with `host`."""
    view.copy_(torch.from_numpy(np.ascontiguousarray(values)))
    return view
