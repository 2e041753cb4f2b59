"""Maximum of neighbours and attention over them, as kernels: every device, every type, tile by tile, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mggcn.backend.base import Dropout, KernelBackend, Sparse
from mggcn.backend.neighbours import Heads
from tests.backend.cases import BATTERY, NAMES, Case, clock, host, padded, real_type, reals
from tests.reference import philox

SEED, EPOCH, SITE, SLOPE = 90210, 7, 3, 0.2
SHAPES = [(1, 5), (4, 16), (3, 41), (9, 8), (2, 260)]
"""Heads and columns of a head: fewer than a vector, whole vectors, and with a rest; more heads than a mask's word or a
warp's lanes have room for; more columns than a warp's lanes have.
"""


@pytest.fixture(autouse=True)
def _types(backend: KernelBackend) -> None:
    if backend.dtype == torch.bfloat16:
        pytest.skip("numbers of vertices and maxima have no room in bfloat16; plans refuse it")


def tolerance(backend: KernelBackend) -> dict[str, float]:
    return {"rtol": 3e-5, "atol": 3e-5} if backend.dtype == torch.float32 else {"rtol": 1e-11, "atol": 1e-11}


def matrix_of(backend: KernelBackend, pattern: np.ndarray) -> Sparse:
    """The matrix with as many entries at each place as `pattern` says."""
    indptr = np.concatenate([[0], np.cumsum(pattern.sum(1))]).astype(np.int64)
    indices = np.repeat(np.nonzero(pattern)[1], pattern[pattern > 0])
    return backend.sparse(indptr, indices.astype(np.int32), None)


def tiles_of(pattern: np.ndarray, order: str) -> list[np.ndarray]:
    """Columns of the tiles: one of all, or three, in some order; some without entries."""
    columns = np.arange(pattern.shape[1])
    if order == "whole":
        return [columns]
    parts = np.array_split(columns, 3)
    return parts if order == "forwards" else parts[::-1]


def device_rows(backend: KernelBackend, *parts: Any) -> torch.Tensor:
    """Rows with columns of numbers, or of vertices as integers of the type's size, one after the other; padded."""
    columns = [np.asarray(part) for part in parts]
    width = sum(part.shape[1] for part in columns)
    rows, first = padded(backend, columns[0].shape[0], width)[0], 0
    for part in columns:
        out = rows[:, first : first + part.shape[1]]
        if part.dtype == np.int64:
            out = out.view({4: torch.int32, 8: torch.int64}[out.itemsize])
        out.copy_(torch.from_numpy(np.ascontiguousarray(part)))
        first += part.shape[1]
    return rows


def numbers(rows: torch.Tensor) -> np.ndarray:
    return host(rows.view({4: torch.int32, 8: torch.int64}[rows.itemsize]))


@pytest.mark.covering(1)
@pytest.mark.parametrize("case", BATTERY, **NAMES)
@pytest.mark.parametrize("order", ["whole", "forwards", "backwards"])
@pytest.mark.parametrize("ties", [False, True])
def test_maximum(backend: KernelBackend, case: Case, order: str, ties: bool) -> None:
    """Fails if a tile overwrites the largest value so far, of equal ones another than the lowest number wins, or parallel
    edges from a winner count twice.
    """
    check_maximum(backend, case.adj.toarray() != 0, 37, order, ties=ties)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("order", ["whole", "backwards"])
def test_maximum_of_blocks_of_edges(backend: KernelBackend, order: str, ties: bool) -> None:
    """Fails if a row's edges that are read block by block are not all compared, at the ends of blocks as well."""
    degrees = [0, 1, 15, 16, 17, 0, 31, 32, 33, 50, 0]
    pattern = np.zeros((len(degrees), 50), bool)
    for row, degree in enumerate(degrees):
        pattern[row, np.random.default_rng(row).permutation(50)[:degree]] = True
    check_maximum(backend, pattern, 37, order, ties=ties)


def check_maximum(backend: KernelBackend, pattern: np.ndarray, cols: int, order: str, *, ties: bool) -> None:
    """Compare the maximum and its gradient with the dense formula. pattern (V, N)."""
    rng = np.random.default_rng(5)
    entries = pattern * rng.integers(1, 3, pattern.shape)
    num_rows, n = pattern.shape
    x = (rng.integers(-2, 2, (n, cols)) if ties else rng.normal(size=(n, cols))).astype(np.float32)
    ids = rng.permutation(n).astype(np.int64)
    rows = device_rows(backend, x, ids[:, None])
    out, winners = (padded(backend, num_rows, cols)[0] for _ in range(2))
    tiles = tiles_of(pattern, order)
    for number, tile in enumerate(tiles):
        last = number + 1 == len(tiles) and order != "backwards"
        found = matrix_of(backend, entries[:, tile])
        backend.neighbours.maximum(found, rows[tile[0] : tile[-1] + 1], out, winners, begins=number == 0, ends=last)
    if order == "backwards":
        backend.neighbours.maximum(None, rows, out, winners, begins=False, ends=True)
    expected, who = np.zeros((num_rows, cols)), np.full((num_rows, cols), -1)
    for v in range(num_rows):
        sources = np.flatnonzero(pattern[v])
        sources = sources[np.argsort(ids[sources])]
        if sources.size:
            expected[v] = x[sources].max(0)
            who[v] = ids[sources[x[sources].argmax(0)]]
    np.testing.assert_array_equal(host(out), expected)
    nobody = np.iinfo(np.int32 if winners.itemsize == 4 else np.int64).max
    np.testing.assert_array_equal(np.where(numbers(winners) == nobody, -1, numbers(winners)), who)

    g = rng.normal(size=(num_rows, cols)).astype(np.float32).astype(np.float64)
    message, grad = device_rows(backend, g, numbers(winners).astype(np.int64)), padded(backend, n, cols)[0]
    tiles = tiles_of(pattern.T, order) if num_rows else [np.arange(0)]
    for number, tile in enumerate(tiles):
        found = matrix_of(backend, entries.T[:, tile])
        some = message[tile[0] : tile[-1] + 1] if tile.size else message
        backend.neighbours.maximum_grad(found, some, backend.upload(ids), grad, begins=number == 0)
    whole = np.zeros((n, cols))
    for u in range(n):
        whole[u] = (g * (who == ids[u]) * pattern[:, u : u + 1]).sum(0)
    np.testing.assert_allclose(host(grad), whole, **tolerance(backend))


def test_nan_is_the_maximum(backend: KernelBackend) -> None:
    """Fails if a broken value is lost among others."""
    x = np.array([[1.0], [np.nan], [3.0], [np.nan]])
    rows, ids = device_rows(backend, x, np.array([[4], [9], [1], [2]])), np.ones((1, 4), bool)
    out, winners = (padded(backend, 1, 1)[0] for _ in range(2))
    backend.neighbours.maximum(matrix_of(backend, ids), rows, out, winners, begins=True, ends=True)
    assert np.isnan(host(out)).all()
    assert numbers(winners).item() == 2


class Problem:
    """Attention on one matrix, by hand in float64 with torch.autograd. pattern (V, N)."""

    def __init__(
        self,
        backend: KernelBackend,
        pattern: np.ndarray,
        shape: tuple[int, int],
        dynamic: bool,
        p: float = 0.0,
        scale: float = 1.0,
    ) -> None:
        self.backend, self.dynamic, (self.heads, self.cols) = backend, dynamic, shape
        self.pattern = pattern
        (v, n), rng = self.pattern.shape, np.random.default_rng(17)
        width = self.heads * self.cols

        def numbers(*size: int) -> np.ndarray:
            return rng.normal(size=size).astype(np.float32).astype(np.float64)

        self.x, self.g, self.a = numbers(n, width), numbers(v, width), numbers(*shape)
        self.a = (self.a / self.cols**0.5).astype(np.float32).astype(np.float64)  # scores of about one, however wide
        self.s = numbers(n, self.heads) * np.float32(scale)
        self.own = numbers(v, width if dynamic else self.heads) * np.float32(scale)
        self.ids, self.ids_t = rng.permutation(n + 3)[:v].astype(np.int64), rng.permutation(n).astype(np.int64)
        if v > n + 3:
            self.ids = rng.permutation(v).astype(np.int64)
        self.p = p
        drop = Dropout(p, clock(backend, SEED, EPOCH), SITE) if p else None
        self.drop = drop
        self.mask = self._mask(drop)

    def _mask(self, drop: Dropout | None) -> np.ndarray:
        if drop is None:
            return np.ones((*self.pattern.shape, self.heads))
        groups = -(-self.heads // 8)
        counter = np.zeros((*self.pattern.shape, groups, 4), np.uint64)
        counter[..., 0] = np.arange(groups)
        counter[..., 1], counter[..., 2] = self.ids_t[None, :, None], self.ids[:, None, None]
        counter[..., 3] = 1 << 31 | SITE
        words = philox(counter, (SEED, EPOCH))
        halves = np.stack([words & np.uint64(0xFFFF), words >> np.uint64(16)], axis=-1)
        halves = halves.reshape(*self.pattern.shape, 8 * groups)
        return (halves[..., : self.heads] >= drop.threshold) * float(np.float32(drop.keep_scale))

    def of(self, ids: np.ndarray) -> Heads:
        a = reals(self.backend, self.a) if self.dynamic else None
        return Heads(self.heads, self.cols, SLOPE, a, self.drop, self.backend.upload(ids))

    def reference(self) -> dict[str, np.ndarray]:
        x, s, own, a = (torch.from_numpy(t).requires_grad_() for t in (self.x, self.s, self.own, self.a))
        with torch.enable_grad():
            by_head = x.unflatten(1, (self.heads, self.cols))
            if self.dynamic:
                q = by_head[None] + own.unflatten(1, (self.heads, self.cols))[:, None]
                scores = (torch.nn.functional.leaky_relu(q, SLOPE) * a).sum(3)
            else:
                scores = torch.nn.functional.leaky_relu(s[None] + own[:, None], SLOPE)
            pattern = torch.from_numpy(self.pattern)[:, :, None]
            held = torch.where(pattern, scores, -torch.inf)
            best = held.amax(1, keepdim=True).detach() if held.shape[1] else held
            weights = (held - torch.where(best.isinf(), 0.0, best)).exp()
            weights = weights / weights.sum(1, keepdim=True).clamp(min=1e-300) * torch.from_numpy(self.mask)
            z = torch.einsum("vuh,uhc->vhc", weights, by_head).flatten(1)
            (z * torch.from_numpy(self.g)).sum().backward()  # type: ignore[no-untyped-call]
        grads = {name: t.grad for name, t in {"x": x, "s": s, "own": own, "a": a}.items()}
        return {"z": z.detach().numpy()} | {n: g.numpy() for n, g in grads.items() if g is not None}

    def forwards(self) -> torch.Tensor:
        scores = () if self.dynamic else (self.s,)
        return device_rows(self.backend, self.x, *scores, *((self.ids_t[:, None],) if self.p else ()))

    def run(self, order: str) -> dict[str, np.ndarray]:
        backend, (v, n), width = self.backend, self.pattern.shape, self.heads * self.cols
        rows, own, heads = self.forwards(), device_rows(backend, self.own), self.of(self.ids)
        out, state = padded(backend, v, width)[0], padded(backend, v, 2 * self.heads)[0]
        tiles = tiles_of(self.pattern, order)
        for number, tile in enumerate(tiles):
            last, found = number + 1 == len(tiles) and order != "backwards", matrix_of(backend, self.pattern[:, tile])
            some = rows[tile[0] : tile[-1] + 1]
            backend.neighbours.attend(heads, found, some, own, out, state, begins=number == 0, ends=last)
        if order == "backwards":
            backend.neighbours.attend(heads, None, rows, own, out, state, begins=False, ends=True)
        result = {"z": host(out)}
        held = host(state)
        with np.errstate(divide="ignore"):
            inverse = 1 / held[:, self.heads :]
        dots = (self.g * host(out)).reshape(v, self.heads, self.cols).sum(2)
        numbered = (self.ids[:, None],) if self.p else ()
        message = device_rows(backend, self.g, dots, self.own, held[:, : self.heads], inverse, *numbered)
        grad = padded(backend, n, width + (0 if self.dynamic else self.heads))[0]
        back = tiles_of(self.pattern.T, order) if v else [np.arange(0)]
        for number, tile in enumerate(back):
            some = message[tile[0] : tile[-1] + 1] if tile.size else message
            found = matrix_of(backend, self.pattern.T[:, tile])
            backend.neighbours.attend_sources(self.of(self.ids_t), found, some, rows, grad, begins=number == 0)
        result |= {"x": host(grad)[:, :width]}
        if not self.dynamic:
            result["s"] = host(grad)[:, width:]
        along = padded(backend, v, width if self.dynamic else self.heads)[0]
        beside = padded(backend, v, width)[0] if self.dynamic else None
        for number, tile in enumerate(tiles):
            found, some = matrix_of(backend, self.pattern[:, tile]), rows[tile[0] : tile[-1] + 1]
            backend.neighbours.attend_destinations(heads, found, some, message, along, beside, begins=number == 0)
        result["own"] = host(along)
        if beside is not None:
            result["a"] = host(beside).sum(0).reshape(self.a.shape)
        return result


@pytest.mark.covering(1, rest="slow")
@pytest.mark.parametrize("case", BATTERY, **NAMES)
@pytest.mark.parametrize("order", ["whole", "forwards", "backwards"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_attention(
    backend: KernelBackend, case: Case, order: str, shape: tuple[int, int], dynamic: bool, p: float
) -> None:
    """Fails if a tile is not rescaled, a weight is normed twice, a mask depends on the tile, or a gradient loses a part."""
    check_attention(Problem(backend, case.adj.toarray() != 0, shape, dynamic, p), order)


def check_attention(problem: Problem, order: str) -> None:
    """Compare all passes with autograd of the dense formula."""
    expected, found = problem.reference(), problem.run(order)
    for name, value in found.items():
        scale = max(np.abs(expected[name]).max(initial=0), 1.0)
        close = tolerance(problem.backend)
        np.testing.assert_allclose(value / scale, expected[name] / scale, **close, err_msg=name)


@pytest.mark.parametrize("order", ["whole", "backwards"])
def test_huge_scores(backend: KernelBackend, order: str) -> None:
    """Fails if weights are computed from exp of a score, or from m + log l, which forgets l beside a large m."""
    check_huge_scores(backend, order)


def check_huge_scores(backend: KernelBackend, order: str) -> None:
    """Compare with autograd of the dense formula."""
    problem = Problem(backend, BATTERY[2].adj.toarray() != 0, (4, 5), False, scale=1e30)
    problem.s[:] = 1e30  # all equal: the weights are one over the degree
    expected, found = problem.reference(), problem.run(order)
    for name in ("z", "x"):
        assert np.isfinite(found[name]).all()
        np.testing.assert_allclose(found[name], expected[name], **tolerance(backend), err_msg=name)


@pytest.mark.parametrize("dynamic", [False, True])
def test_triples_combine(backend: KernelBackend, dynamic: bool) -> None:
    """Fails if partial results of two ranks do not give the whole: the copies of a split vertex have some edges each."""
    problem = Problem(backend, BATTERY[-1].adj.toarray() != 0, (3, 11), dynamic, scale=3.0)
    rows, own, (v, n) = problem.forwards(), device_rows(backend, problem.own), problem.pattern.shape
    heads, parts = problem.of(problem.ids), []
    for columns in (np.arange(n // 4), np.arange(n // 4, n)):
        out, state = padded(backend, v, 33)[0], padded(backend, v, 6)[0]
        found = matrix_of(backend, problem.pattern[:, columns])
        some = rows[columns[0] : columns[-1] + 1]
        backend.neighbours.attend(heads, found, some, own, out, state, begins=True, ends=False)
        parts.append((out, state))
    (out, state), (other, other_state) = parts
    index = np.random.default_rng(3).permutation(v).astype(np.int32)
    message = device_rows(backend, host(other)[index], host(other_state)[index])
    backend.neighbours.attend_combine(heads, message, backend.upload(index), out, state)
    backend.neighbours.attend(heads, None, rows, own, out, state, begins=False, ends=True)
    np.testing.assert_allclose(host(out), problem.reference()["z"], **tolerance(backend))


def test_head_dots(backend: KernelBackend) -> None:
    """Fails if a head reads another one's columns, or one row for all is taken for a matrix."""
    rng = np.random.default_rng(8)
    x, y = rng.normal(size=(2, 13, 3 * 41)).astype(np.float32)
    for other in (y, y[0]):
        out = padded(backend, 13, 3)[0]
        rows = device_rows(backend, other) if other.ndim == 2 else reals(backend, other)
        backend.neighbours.head_dots(device_rows(backend, x), rows, out)
        expected = (x.astype(np.float64) * other).reshape(13, 3, 41).sum(2)
        np.testing.assert_allclose(host(out), expected, **tolerance(backend))
    assert rows.dtype == real_type(backend)
