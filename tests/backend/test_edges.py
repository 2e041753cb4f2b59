"""Passes over edges against float64, edge by edge: reductions of messages, and gradients by every kind of operand."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mggcn import native
from mggcn.backend.base import KernelBackend
from mggcn.backend.cpu.backend import CpuBackend
from mggcn.backend.edges import (
    OFS,
    OPS,
    PARTIALS,
    REDUCERS,
    EdgeGradient,
    EdgeRows,
    Of,
    Op,
    Operand,
    Partial,
    Reducer,
    Reduction,
)
from tests.backend.cases import (
    Make,
    device_of,
    filled,
    guards_hold,
    host,
    padded,
    skewed,
    tight,
    tolerance,
    type_name,
)
from tests.backend.edges import BY_NAME, EDGE_CASES, EdgeCase, gradient, messages, reduced

COLS = (1, 3, 8, 41)
KINDS: list[tuple[Of, bool]] = [(of, narrow) for of in OFS for narrow in (False, True)]
MAKES = (padded, tight, skewed)


@pytest.fixture
def backend(backend: KernelBackend) -> KernelBackend:
    """Every backend but for the CPU's bfloat16, whose refusal test_cpu_spmm.py tests."""
    if backend.dtype == torch.bfloat16 and backend.name.startswith("cpu"):
        pytest.skip("messages along edges take float32 and float64 on a CPU")
    return backend


def pairs(cols: int, which: int, step: int) -> Iterator[tuple[tuple[Of, bool], tuple[Of, bool]]]:
    """Every step-th pair of operand kinds of which at least one has all columns."""
    wide = [(a, b) for a, b in itertools.product(KINDS, KINDS) if cols == 1 or not (a[1] and b[1])]
    yield from wide[which % step :: step]


def operand(
    backend: KernelBackend, case: EdgeCase, kind: tuple[Of, bool], cols: int, seed: int, make: Make = padded
) -> tuple[Operand, np.ndarray]:
    """An operand of random numbers away from 0, and the rows (E, cols) that the edges read, in float64."""
    of, narrow = kind
    width = 1 if narrow else cols
    rng = np.random.default_rng(seed)
    values = rng.choice([-1.0, 1.0], (case.num_rows(of), width)) * (0.5 + rng.random((case.num_rows(of), width)))
    rows = filled(make(backend, case.num_rows(of), width)[0], values)
    return Operand(rows, of), np.broadcast_to(host(rows)[case.end(of)], (case.num_edges, cols))


def winners_of(backend: KernelBackend, case: EdgeCase, cols: int, fill: int = 77) -> torch.Tensor:
    return torch.full((case.num_vertices, cols), fill, dtype=torch.int32, device=device_of(backend))


def check_reduce(backend: KernelBackend, case: EdgeCase, op: Op, reducer: Reducer, cols: int, which: int) -> None:
    """One (op, reducer) on some pairs of operands."""
    edges = case.by_destination(backend)
    make = MAKES[which % 3]
    for number, (left, right) in enumerate(pairs(cols, which, 14)):
        if op == "copy" and left[1]:
            continue
        lhs, l_rows = operand(backend, case, left, cols, 10 * which + number, make)
        rhs, r_rows = operand(backend, case, right, cols, 10 * which + number + 5, make)
        out, whole = make(backend, case.num_vertices, cols)
        winners = None if reducer == "sum" else winners_of(backend, case, cols)
        backend.edges.reduce(edges, Reduction(op, reducer, lhs, None if op == "copy" else rhs), out, winners)
        expected, places = reduced(case, reducer, messages(op, l_rows, r_rows))
        np.testing.assert_allclose(host(out), expected, **tolerance(backend))
        assert guards_hold(whole, out, 1)
        if winners is not None and backend.dtype == torch.float64:
            assert np.array_equal(host(winners), places)
        if winners is not None:
            assert consistent(case, messages(op, l_rows, r_rows), host(winners), expected)


def consistent(case: EdgeCase, values: np.ndarray, winners: np.ndarray, extremes: np.ndarray) -> bool:
    """Whether each winner's message is, up to rounding of messages, the extremum."""
    for v in range(case.num_vertices):
        of_v = values[case.starts[v] : case.starts[v + 1]]
        if not len(of_v):
            if not (winners[v] == -1).all():
                return False
        elif not np.allclose(np.take_along_axis(of_v, winners[v][None], 0)[0], extremes[v], rtol=2.0**-8):
            return False
    return True


@pytest.mark.covering(1)
@pytest.mark.parametrize("reducer", REDUCERS)
@pytest.mark.parametrize("op", OPS)
def test_every_op_and_reducer(backend: KernelBackend, op: Op, reducer: Reducer) -> None:
    """Fails on a wrong operand row, broadcast, order of sub and div, tail of columns, winner, or empty neighbourhood."""
    for which, (cols, case) in enumerate(itertools.product(COLS, (EDGE_CASES[1], EDGE_CASES[5]))):
        check_reduce(backend, case, op, reducer, cols, which)


@pytest.mark.covering(1)
@pytest.mark.parametrize("case", EDGE_CASES, **BY_NAME)
def test_every_graph(backend: KernelBackend, case: EdgeCase) -> None:
    """Fails if a hub, an isolated vertex, a self-loop, a repeated edge or a graph without edges is treated wrongly."""
    for which, (op, reducer) in enumerate([("sub", "sum"), ("mul", "max"), ("copy", "min"), ("div", "sum")]):
        check_reduce(backend, case, op, reducer, (3, 41, 8, 1)[which], which + len(case.name))  # type: ignore[arg-type]


def check_gradient(
    backend: KernelBackend, case: EdgeCase, of: Of, partial: Partial, cols: int, which: int, *, selects: bool
) -> None:
    edges = case.by_source(backend) if of == "source" else case.by_destination(backend)
    make = MAKES[which % 3]
    rng = np.random.default_rng(which)
    g = filled(make(backend, case.num_vertices, cols)[0], rng.normal(size=(case.num_vertices, cols)))
    degree = np.diff(case.starts)[:, None]
    chosen = np.where(degree > 0, rng.integers(0, 2**20, (case.num_vertices, cols)) % np.maximum(degree, 1), -1)
    winners = winners_of(backend, case, cols).copy_(torch.from_numpy(chosen)) if selects else None
    for number, (left, right) in enumerate(pairs(cols, which, 17)):
        a, a_rows = operand(backend, case, left, cols, which + number, make)
        b, b_rows = operand(backend, case, right, cols, which + number + 31, make)
        scale = (1.0, -1.0)[number % 2]
        expected = gradient(case, of, partial, scale, host(g), chosen if selects else None, a_rows, b_rows)
        for narrow in (False, True):
            out, whole = make(backend, case.num_rows(of), 1 if narrow else cols)
            args = (a if partial != "one" else None, b if partial == "ratio" else None)
            backend.edges.gradient(edges, EdgeGradient(of, partial, scale, *args), g, winners, out)
            wanted = expected.sum(1, keepdims=True) if narrow else expected
            close = tolerance(backend)
            # A sum over many columns and edges is compared with what was added, not with what is left of it.
            np.testing.assert_allclose(host(out), wanted, rtol=close["rtol"], atol=close["atol"] * 30)
            assert guards_hold(whole, out, 1)


@pytest.mark.covering(1)
@pytest.mark.parametrize("partial", PARTIALS)
@pytest.mark.parametrize("of", OFS)
def test_every_gradient(backend: KernelBackend, of: Of, partial: Partial) -> None:
    """Fails if a gradient goes to another row, misses an edge, takes a loser, or a narrow operand misses a column."""
    for which, (cols, case) in enumerate(itertools.product(COLS, (EDGE_CASES[1], EDGE_CASES[5]))):
        check_gradient(backend, case, of, partial, cols, which, selects=which % 3 > 0)


@pytest.mark.covering(1)
@pytest.mark.parametrize("case", EDGE_CASES, **BY_NAME)
def test_gradients_of_every_graph(backend: KernelBackend, case: EdgeCase) -> None:
    """Fails if the gradient of a hub, an isolated vertex, a self-loop or a repeated edge is wrong."""
    for which, of in enumerate(OFS):
        check_gradient(backend, case, of, "times", (41, 3, 8)[which], which + len(case.name), selects=which != 1)


def test_first_of_equal_values_wins(backend: KernelBackend) -> None:
    """Fails if ties go to another edge than the first in its row, in any lane, group or block."""
    for case in (EDGE_CASES[2], EDGE_CASES[5]):
        edges = case.by_destination(backend)
        for cols, reducer in itertools.product((1, 5, 40), REDUCERS[1:]):
            values = np.random.default_rng(cols).integers(0, 3, (case.num_edges, cols)).astype(float)
            rows = filled(padded(backend, case.num_edges, cols)[0], values)
            out, winners = padded(backend, case.num_vertices, cols)[0], winners_of(backend, case, cols)
            backend.edges.reduce(edges, Reduction("copy", reducer, Operand(rows, "edge"), None), out, winners)
            expected, places = reduced(case, reducer, values[case.ids])
            assert np.array_equal(host(out), expected)
            assert np.array_equal(host(winners), places)


def test_not_finite_values(backend: KernelBackend) -> None:
    """Fails if NaN is lost in an extremum or spreads to other columns or vertices, or -inf counts as no value."""
    case = EDGE_CASES[2]
    rng = np.random.default_rng(99)
    for cols, reducer in itertools.product((1, 5, 40), REDUCERS):
        values = rng.normal(size=(case.num_edges, cols))
        values[rng.random(values.shape) < 0.02] = np.nan
        values[rng.random(values.shape) < 0.2] = -np.inf
        values[rng.random(values.shape) < 0.02] = np.inf
        rows = filled(padded(backend, case.num_edges, cols)[0], values)
        out, winners = padded(backend, case.num_vertices, cols)[0], winners_of(backend, case, cols)
        edges = case.by_destination(backend)
        backend.edges.reduce(edges, Reduction("copy", reducer, Operand(rows, "edge"), None), out, winners)
        expected, places = reduced(case, reducer, host(rows)[case.ids])
        np.testing.assert_allclose(host(out), expected, **tolerance(backend))
        assert reducer == "sum" or np.array_equal(host(winners), places)


def test_losers_and_zero_gradients_give_zero(backend: KernelBackend) -> None:
    """Fails if 0 * inf or 0 / 0 of an edge that did not win reaches a gradient."""
    case = EDGE_CASES[0]
    g = filled(padded(backend, case.num_vertices, 3)[0], np.ones((case.num_vertices, 3)))
    winners = winners_of(backend, case, 3, fill=-1)
    zeros = Operand(padded(backend, case.num_edges, 3, fill=0.0)[0], "edge")
    for of, partial in itertools.product(OFS, PARTIALS[1:]):
        edges = case.by_source(backend) if of == "source" else case.by_destination(backend)
        out = padded(backend, case.num_rows(of), 3)[0]
        backend.edges.gradient(edges, EdgeGradient(of, partial, 1.0, zeros, zeros), g, winners, out)
        assert not out.any()


def one_pass(backend: KernelBackend, by_destination: EdgeRows, by_source: EdgeRows, case: EdgeCase) -> list[Any]:
    """Bytes of a reduction and of gradients of every kind, of inputs that are the same in each call."""
    results = []
    lhs, _ = operand(backend, case, ("source", False), 41, 3)
    rhs, _ = operand(backend, case, ("edge", True), 41, 4)
    g = filled(padded(backend, case.num_vertices, 41)[0], np.random.default_rng(5).normal(size=(case.num_vertices, 41)))
    for reducer in REDUCERS:
        out, winners = tight(backend, case.num_vertices, 41)[0], winners_of(backend, case, 41)
        backend.edges.reduce(by_destination, Reduction("mul", reducer, lhs, rhs), out, winners)
        results += [out, winners]
    for of, width in (("source", 41), ("edge", 1), ("destination", 1)):
        edges = by_source if of == "source" else by_destination
        out = tight(backend, case.num_rows(of), width)[0]  # type: ignore[arg-type]
        backend.edges.gradient(
            edges, EdgeGradient(of, "times", 1.0, lhs if width == 1 else rhs, None), g, results[3], out
        )  # type: ignore[arg-type]
        results.append(out)
    return [t.cpu().contiguous().view(torch.uint8).numpy() for t in results]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=type_name)
@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_bits_do_not_depend_on_threads(dtype: torch.dtype, isa: str) -> None:
    """Fails if sums depend on who computes them."""
    if isa not in native.isas():
        pytest.skip(f"this processor has no {isa}")
    case = EDGE_CASES[2]
    found = []
    for threads in (1, 2, 3, 2):
        backend = CpuBackend(dtype, threads, isa)
        found.append(one_pass(backend, case.by_destination(backend), case.by_source(backend), case))
    for other in found[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.emulated
def test_nothing_behind_an_array_is_touched(part: list[str]) -> None:
    """Fails if a kernel of either device reads or writes one element behind an operand, its lists or its result."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.backend.cpu.edge_guard_pages", *part],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stderr}"
