"""Launches of attention and the maximum on a GPU: how a warp's lanes share a row, and how long the longest row takes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from mggcn.backend.base import Sparse
from mggcn.backend.cuda.backend import CudaBackend
from mggcn.backend.cuda.neighbours import Lanes, lanes_of
from mggcn.backend.neighbours import Heads
from tests.backend.cases import filled, padded
from tests.backend.emulated import emulated_backend
from tests.backend.test_neighbours import check_huge_scores
from tests.emulator import module
from tests.emulator.reads import ReadingDevice

ROWS, LONGEST = 2500, 2100


def power_law(backend: CudaBackend) -> Sparse:
    """A graph whose degrees fall with their rank, from 2100, a hub, to 4."""
    rng = np.random.default_rng(51)
    degrees = (LONGEST * np.arange(1, ROWS + 1) ** -0.8).astype(int)
    rows = [np.sort(rng.choice(ROWS, degree, replace=False)) for degree in rng.permutation(degrees)]
    indptr = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    return backend.sparse(indptr, np.concatenate(rows).astype(np.int32), None)


def numbers(backend: CudaBackend, cols: int) -> torch.Tensor:
    return filled(padded(backend, ROWS, cols)[0], np.random.default_rng(cols).normal(size=(ROWS, cols)))


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_longest_row_takes_an_eighth(dynamic: bool) -> None:
    """Fails if one thread walks as many entries as an eighth of a hub's, or heads read the same entry again.

    A warp per row and head, without entries in flight, read each index 128 times, and 2100 of them in one thread.
    """
    device = ReadingDevice()
    backend = CudaBackend(torch.float32, device, 2**22)
    matrix = power_law(backend)
    device.watched = matrix.indices
    heads, cols = 4, 64
    width, scored = heads * cols, heads * cols if dynamic else heads
    a = torch.ones(heads, cols) if dynamic else None
    how, travels = Heads(heads, cols, 0.2, a, None, torch.arange(ROWS)), width + (0 if dynamic else heads)
    rows, own, message = (numbers(backend, n) for n in (travels, scored, width + 3 * heads + scored))
    out, state, kernels = numbers(backend, width), numbers(backend, 2 * heads), backend.neighbours
    kernels.attend(how, matrix, rows, own, out, state, begins=True, ends=True)
    kernels.attend_sources(how, matrix, message, rows, numbers(backend, travels), begins=True)
    beside = out if dynamic else None
    kernels.attend_destinations(how, matrix, rows, message, numbers(backend, scored), beside, begins=True)
    check(
        device, {"attend": (1, 4), **dict.fromkeys(("attend_sources", "attend_destinations"), (1, 2 if dynamic else 4))}
    )


def test_the_longest_row_of_a_maximum_takes_an_eighth() -> None:
    """Fails as above: a warp for all 32 columns at a time read an index of 256 columns 256 times, 16,800 in one thread."""
    device = ReadingDevice()
    backend = CudaBackend(torch.float32, device, 2**22)
    matrix = power_law(backend)
    device.watched = matrix.indices
    out = numbers(backend, 256)
    backend.neighbours.maximum(matrix, numbers(backend, 257), out, numbers(backend, 256), begins=True, ends=True)
    backend.neighbours.maximum_grad(matrix, numbers(backend, 512), torch.arange(ROWS), out, begins=True)
    # The gradient also reads the index before, to see parallel edges.
    check(device, {"maximum": (1, 4), "maximum_grad": (2, 2)})


def check(device: ReadingDevice, kernels: dict[str, tuple[int, int]]) -> None:
    """kernels: how often each reads an entry's index, and how many entries it has in flight."""
    assert device.watched is not None
    for kernel, (each, flight) in kernels.items():
        by_all, most = device.reads[kernel]
        # The entries in flight are read ahead, and blocks that share a row meet within a few.
        assert most <= each * (LONGEST / 8 + flight + 4), kernel
        # By the lanes of one warp, and once more what is read ahead behind the ends of short rows.
        assert by_all <= 2 * 32 * each * device.watched.numel(), kernel


@pytest.mark.parametrize(
    ("heads", "cols", "itemsize", "drops", "expected"),
    [
        (4, 64, 4, False, Lanes(2, 8, 32)),
        (8, 8, 4, False, Lanes(1, 2, 16)),
        (8, 8, 4, True, Lanes(1, 4, 32)),
        (1, 256, 4, False, Lanes(2, 32, 32)),
        (1, 257, 4, False, Lanes(1, 32, 32)),
        (3, 41, 4, True, Lanes(2, 8, 32)),
        (2, 64, 8, False, Lanes(1, 32, 32)),
        (64, 1, 4, False, Lanes(1, 1, 32)),
    ],
)
def test_lanes_of_heads(heads: int, cols: int, itemsize: int, drops: bool, expected: Lanes) -> None:
    """Fails if lanes are no power of two, idle without need, or a head's are fewer than the masks that they share."""
    assert lanes_of(heads, cols, itemsize, drops=drops) == expected


@pytest.mark.emulated
@pytest.mark.skipif(" fma " not in Path("/proc/cpuinfo").read_text(), reason="the processor has no fused multiply-add")
@pytest.mark.parametrize("order", ["whole", "backwards"])
def test_huge_scores_where_products_are_fused(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a score that is a product is not rounded before its equal is taken from it, as happened on a GPU alone."""
    monkeypatch.setattr(module, "CHECKS", (*module.CHECKS, *module.MORE_CHECKS["fused"]))
    check_huge_scores(emulated_backend(torch.float32, 0), order)
