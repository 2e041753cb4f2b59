"""Every kernel that walks rows, on rows that are much longer than others: one of 20,000 entries, and a power law.

The schedules are those of runs: a GPU's kernels meet rows of a warp, of a block, and hubs in parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from mggcn.backend.base import KernelBackend
from mggcn.backend.cuda.spmm import Schedule
from mggcn.backend.edges import EdgeGradient, Of, Operand, Reduction
from tests.backend.cases import filled, host, padded, type_name
from tests.backend.edges import EdgeCase, gradient, reduced
from tests.backend.emulated import emulated_backend
from tests.backend.test_neighbours import Problem, check_attention, check_maximum, device_rows, matrix_of, numbers

HUB = 20_000
"""Entries of the hub, which a GPU's kernels cut into 20 parts: 16 warps add them up."""
BACK = 2_500
"""Enough for a hub; a row each for the others."""
SOURCES = 1_000
"""Vertices from which the hub's edges come, several from each."""


def power_law() -> np.ndarray:
    """800 vertices whose degrees fall with their rank, from 700 to 1."""
    rng = np.random.default_rng(31013)
    degrees = np.maximum(1, 700 * np.arange(1, 801) ** -0.8).astype(int)
    pattern = np.zeros((800, 800), bool)
    for row, degree in zip(rng.permutation(800), degrees, strict=True):
        pattern[row, rng.choice(800, degree, replace=False)] = True
    return pattern


def hub() -> np.ndarray:
    """Six rows: one with all of 20,000 vertices, others with a few."""
    pattern = np.random.default_rng(8).random((6, HUB)) < 1e-4
    pattern[4] = True
    return pattern


PATTERNS: dict[str, Callable[[], np.ndarray]] = {
    "hub": hub,
    "hub backwards": lambda: hub()[:, :BACK].T,
    "power law": power_law,
}
by_graph = pytest.mark.parametrize("graph", PATTERNS)


@pytest.fixture
def backend(backend: KernelBackend) -> KernelBackend:
    """Every backend but for bfloat16, in which few of so many sums' digits are left."""
    if backend.dtype == torch.bfloat16:
        pytest.skip("sums of 20,000 numbers are held in float32 and float64")
    return backend


def close(backend: KernelBackend, got: np.ndarray, expected: np.ndarray) -> None:
    """Rounding grows with what was added up."""
    scale = max(np.abs(expected).max(initial=0), 1.0)
    within = 3e-5 if backend.dtype == torch.float32 else 1e-12
    np.testing.assert_allclose(got / scale, expected / scale, rtol=within, atol=within)


def test_graphs_have_rows_of_every_kind() -> None:
    """Fails if the graphs no longer reach a kernel of long rows or of hubs."""
    backend = emulated_backend(torch.float32, 0)
    found: dict[str, Schedule] = {name: matrix_of(backend, make()).schedule for name, make in PATTERNS.items()}
    assert found["hub"].hubs.shape[0] == 1
    assert found["power law"].num_long(8) > 1


@pytest.mark.covering(1, rest="slow")
@by_graph
def test_products(backend: KernelBackend, graph: str) -> None:
    """Fails if a part of a hub is left out or added twice."""
    pattern = PATTERNS[graph]()
    h = filled(padded(backend, pattern.shape[1], 24)[0], np.random.default_rng(3).normal(size=(pattern.shape[1], 24)))
    out = padded(backend, pattern.shape[0], 24)[0]
    backend.spmm(matrix_of(backend, pattern), h, out, accumulate=False, epilogue=None)
    close(backend, host(out), pattern.astype(float) @ host(h))


@pytest.mark.covering(1, rest="slow")
@by_graph
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_attention(backend: KernelBackend, graph: str, dynamic: bool, p: float) -> None:
    """Fails if a warp's (m, l, z) is lost, rescaled twice, or an edge behind a row's end counts."""
    check_attention(Problem(backend, PATTERNS[graph](), (2, 12), dynamic, p), "whole")


@pytest.mark.covering(1, rest="slow")
@by_graph
def test_maximum(backend: KernelBackend, graph: str) -> None:
    """Fails if a warp's maximum is lost, or what its entries won."""
    check_maximum(backend, PATTERNS[graph](), 60, "whole", ties=False)


def edges_of(graph: str) -> EdgeCase:
    """The same entries as edges, those of the hub from few vertices: the emulator takes as long for a short row."""
    pattern = PATTERNS[graph]()
    destination, source = np.nonzero(pattern)
    sources = min(pattern.shape[1], SOURCES)
    return EdgeCase(graph, max(pattern.shape[0], sources), source % sources, destination)


@pytest.mark.covering(1, rest="slow")
@by_graph
def test_edges(backend: KernelBackend, graph: str) -> None:
    """Fails if passes over edges lose one of a long row, in either direction."""
    case, cols = edges_of(graph), 5
    by_destination, by_source = case.by_destination(backend), case.by_source(backend)
    rng = np.random.default_rng(6)
    x, g = (
        filled(padded(backend, case.num_vertices, cols)[0], rng.normal(size=(case.num_vertices, cols))) for _ in "xg"
    )
    out = padded(backend, case.num_vertices, cols)[0]
    for reducer in ("sum", "max"):
        backend.edges.reduce(by_destination, Reduction("copy", reducer, Operand(x, "source"), None), out, None)
        close(backend, host(out), reduced(case, reducer, host(x)[case.source])[0])
    ends: tuple[tuple[Of, Any], ...] = (("source", by_source), ("destination", by_destination))
    for of, rows in ends:
        a = Operand(x, "destination" if of == "source" else "source")
        backend.edges.gradient(rows, EdgeGradient(of, "times", 1.0, a, None), g, None, out)
        close(backend, host(out), gradient(case, of, "times", 1.0, host(g), None, host(x)[case.end(a.of)], None))


def results(backend: KernelBackend, graph: str, dynamic: bool, p: float) -> list[bytes]:
    """Bytes of every kernel's results on a graph, of inputs that are the same in each call."""
    pattern, case, rng = PATTERNS[graph](), edges_of(graph), np.random.default_rng(4)
    found: list[Any] = list(Problem(backend, pattern, (2, 12), dynamic, p).run("whole").values())
    matrix, (v, n) = matrix_of(backend, pattern), pattern.shape
    x = filled(padded(backend, n, 12)[0], rng.normal(size=(n, 12)))
    out, winners = (padded(backend, v, 11)[0] for _ in range(2))
    backend.spmm(matrix, x[:, :11], out, accumulate=False, epilogue=None)
    found.append(host(out))
    x[:, 11:].view({4: torch.int32, 8: torch.int64}[x.itemsize]).copy_(torch.arange(n)[:, None])
    backend.neighbours.maximum(matrix, x, out, winners, begins=True, ends=True)
    found += [host(out), host(winners)]
    grad, message = (
        padded(backend, n, 11)[0],
        device_rows(backend, rng.normal(size=(v, 11)), numbers(winners).astype(np.int64)),
    )
    ids = backend.upload(np.arange(n))
    backend.neighbours.maximum_grad(matrix_of(backend, pattern.T), message, ids, grad, begins=True)
    found.append(host(grad))
    wide = filled(padded(backend, case.num_vertices, 5)[0], rng.normal(size=(case.num_vertices, 5)))
    for reducer in ("sum", "max"):
        sums = padded(backend, case.num_vertices, 5)[0]
        backend.edges.reduce(
            case.by_destination(backend),
            Reduction("copy", reducer, Operand(wide, "source"), None),
            sums,
            None,
        )
        found.append(host(sums))
    ends: tuple[tuple[Of, Any], ...] = (("source", case.by_source), ("destination", case.by_destination))
    for of, rows_of in ends:
        a = Operand(wide, "destination" if of == "source" else "source")
        back = padded(backend, case.num_vertices, 5)[0]
        backend.edges.gradient(rows_of(backend), EdgeGradient(of, "times", 1.0, a, None), wide, None, back)
        found.append(host(back))
    return [value.tobytes() for value in found]


@pytest.mark.emulated
@pytest.mark.covering(1, rest="slow")
@by_graph
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=type_name)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_bits_do_not_depend_on_the_order_of_threads(graph: str, dtype: torch.dtype, dynamic: bool, p: float) -> None:
    """Fails if warps or blocks are combined in the order in which they happen to run."""
    first, *others = (results(emulated_backend(dtype, seed), graph, dynamic, p) for seed in (0, 5, 991))
    assert all(other == first for other in others), type_name(dtype)
