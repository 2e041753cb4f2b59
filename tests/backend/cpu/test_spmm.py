"""The ways of the CPU's sparse product: the same bits from each, hub rows in parts, what a schedule knows of a matrix."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from mggcn import native
from mggcn.backend.base import Epilogue, KernelBackend, Sparse
from mggcn.backend.cpu.backend import CpuBackend
from mggcn.backend.cpu.spmm import make_schedule
from mggcn.backend.cpu.variants import hub_length, key_of
from mggcn.backend.spmm_choice import SpmmChoice
from mggcn.errors import BackendError
from tests.backend.cases import (
    BATTERY,
    Case,
    filled,
    guards_hold,
    host,
    padded,
    random_dense,
    skewed,
    tight,
    tolerance,
)
from tests.backend.test_spmm import PARTS, epilogue_of, finished, sparse_of

TYPES = [torch.float32, torch.float64, torch.bfloat16]
HUB = 12
"""Most entries of a row that is not cut, in these tests: the densest rows of the battery are then hubs of several parts."""


def _with_loops() -> Case:
    """Ascending rows whose self-loop was added behind them, as set-up does."""
    rng = np.random.default_rng(60113)
    rows = [np.append(np.sort(rng.choice(53, rng.integers(0, 9), replace=False)), v) for v in range(53)]
    indptr = np.cumsum([0, *(len(row) for row in rows)])
    return Case("self-loops last", sp.csr_matrix((rng.normal(size=indptr[-1]), np.concatenate(rows), indptr), (53, 53)))


def _unsorted() -> Case:
    matrix = BATTERY[-1].adj.copy()
    for v in range(matrix.shape[0]):
        row = slice(matrix.indptr[v], matrix.indptr[v + 1])
        matrix.indices[row], matrix.data[row] = matrix.indices[row][::-1].copy(), matrix.data[row][::-1].copy()
    return Case("descending", matrix)


CASES = [*BATTERY, _with_loops(), _unsorted()]


def ways(dtype: torch.dtype, ascending: bool, summed: bool) -> list[SpmmChoice]:
    """Every switch alone and together, as far as a product allows it."""
    line = 64 // dtype.itemsize
    panels = [SpmmChoice("panels", line * k, 1, ahead) for k in (1, 2) for ahead in (0, 7)]
    blocks = [SpmmChoice("blocks", 0, count) for count in (2, 5)] if ascending and summed else []
    return [SpmmChoice(ahead=3), SpmmChoice(ahead=500), *panels, *blocks]


def product(
    backend: CpuBackend,
    adj: Sparse,
    h: torch.Tensor,
    choice: SpmmChoice,
    *,
    make: Any = padded,
    accumulate: bool = False,
    epilogue: Epilogue | None = None,
    result: torch.dtype | None = None,
) -> torch.Tensor:
    """One product between guards."""
    rows, cols = adj.num_rows, h.shape[1]
    out, whole = make(backend, rows, cols, result)
    if accumulate:
        filled(out, random_dense(rows, cols, 18))
    backend.sparse_products.multiply(adj, h, out, accumulate=accumulate, epilogue=epilogue, choice=choice)
    # Sums may go on to the end of a vector of the operand where the row has room for them; what is rounded stops at the
    # last column.
    assert guards_hold(whole, out, 1 if out.dtype == torch.bfloat16 else 32 // h.itemsize)
    return out.clone()


def hubbed(backend: KernelBackend, case: Case, weighted: bool, threads: int, isa: str) -> tuple[Sparse, np.ndarray]:
    """The case with rows of more than HUB entries cut, and as a dense matrix."""
    adj, dense = sparse_of(backend, case, weighted)
    schedule = make_schedule(adj.indptr.numpy(), adj.indices.numpy(), threads, isa, hub=HUB)
    return dataclasses.replace(adj, schedule=schedule), dense


def in_long_chunks(adj: Sparse, count: int) -> Sparse:
    """The same matrix in `count` ranges of many rows, as a large one has them; hubs lie within."""
    chunks = torch.linspace(0, adj.num_rows, count + 1).long()
    return dataclasses.replace(adj, schedule=dataclasses.replace(adj.schedule, chunks=chunks))


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_way_gives_the_same_bits(dtype: torch.dtype, case: Case) -> None:
    """Fails if panels, blocks, rows fetched ahead or threads change the order of a sum, lose an entry or an epilogue."""
    pairs = [(isa, CpuBackend(dtype, 1, isa), CpuBackend(dtype, 2, isa)) for isa in native.isas()]
    results = (torch.bfloat16, torch.float32) if dtype == torch.bfloat16 else (dtype,)
    shapes = list(itertools.product((1, 16, 41, 130), (padded, tight, skewed), (False, True)))
    # A third of them for each case, in turn, and two threads for a third of the ways: seconds instead of minutes. The
    # other switches are drawn, so that over the cases all meet all.
    rng = np.random.default_rng(5200 + CASES.index(case))
    for cols, make, cut in shapes[CASES.index(case) % 3 :: 3]:
        isa, one, two = pairs[rng.integers(len(pairs))]
        weighted, accumulate = rng.random(2) < 0.5
        parts = ((), PARTS, PARTS[:3])[rng.integers(3)]
        result = results[rng.integers(len(results))]
        adj = hubbed(one, case, weighted, 1, isa)[0] if cut else sparse_of(one, case, weighted)[0]
        if rng.random() < 0.5:
            adj = in_long_chunks(adj, rng.integers(1, 4))
        h = filled(make(one, case.adj.shape[1], cols)[0], random_dense(case.adj.shape[1], cols, 17))
        epilogue = epilogue_of(one, parts, adj.num_rows, cols) if parts else None
        options = {"make": make, "accumulate": accumulate, "epilogue": epilogue, "result": result}
        plain = product(one, adj, h, SpmmChoice(), **options)
        for turn, choice in enumerate(ways(dtype, adj.schedule.traits.ascending, result != torch.bfloat16)):
            backend = one if turn % 3 else two
            assert torch.equal(product(backend, adj, h, choice, **options), plain), (cols, choice, options)


@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_bits_do_not_depend_on_padding(isa: str) -> None:
    """Fails if columns behind the last whole vector are summed otherwise than the others."""
    if isa not in native.isas():
        pytest.skip(f"this processor has no {isa}")
    for dtype, cols in itertools.product(TYPES, (5, 41)):
        backend = CpuBackend(dtype, 1, isa)
        adj, dense = sparse_of(backend, BATTERY[-1], True)
        found = []
        for make in (padded, tight):
            h = filled(make(backend, dense.shape[1], cols)[0], random_dense(dense.shape[1], cols, 6))
            found.append(product(backend, adj, h, SpmmChoice(), make=make))
        assert torch.equal(*found)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_hubs_match_float64(dtype: torch.dtype, case: Case) -> None:
    """Fails if a part of a hub row is lost or added twice, or its row is finished early."""
    backend = CpuBackend(dtype, 2)
    close = tolerance(backend)
    for cols, accumulate in itertools.product((8, 41, 130, 200), (False, True)):
        adj, dense = hubbed(backend, case, True, 2, native.isa())
        if cols % 4:
            adj = in_long_chunks(adj, 1)
        h = filled(padded(backend, dense.shape[1], cols)[0], random_dense(dense.shape[1], cols, 3))
        epilogue = epilogue_of(backend, PARTS, dense.shape[0], cols)
        out = product(backend, adj, h, SpmmChoice(), accumulate=accumulate, epilogue=epilogue)
        before = filled(torch.empty(dense.shape[0], cols, dtype=dtype), random_dense(dense.shape[0], cols, 18))
        expected = finished(dense @ host(h) + (host(before) if accumulate else 0), epilogue)
        np.testing.assert_allclose(host(out), expected, rtol=max(5e-5, close["rtol"]), atol=5 * close["atol"])


def test_bfloat16_into_sums() -> None:
    """Fails if a float32 result of bfloat16 operands, such as the gradient of weights, is rounded to bfloat16."""
    backend = CpuBackend(torch.bfloat16, 1)
    cases = itertools.product(CASES, ((16, padded), (41, padded), (41, tight)), ways(torch.bfloat16, False, True))
    for number, (case, (cols, make), choice) in enumerate(cases):
        adj, dense = hubbed(backend, case, True, 2, native.isa())
        h = filled(make(backend, dense.shape[1], cols)[0], random_dense(dense.shape[1], cols, 3))
        accumulate, epilogue = (
            number % 2 == 0,
            epilogue_of(backend, PARTS, dense.shape[0], cols) if number % 3 else None,
        )
        options = {"make": make, "accumulate": accumulate, "epilogue": epilogue}
        out = product(backend, adj, h, choice, result=torch.float32, **options)
        expected = dense @ host(h) + (random_dense(*out.shape, 18) if accumulate else 0)
        expected = expected if epilogue is None else finished(expected, epilogue)
        np.testing.assert_allclose(host(out), expected, rtol=5e-5, atol=5e-5)
    adj, _ = sparse_of(backend, _with_loops(), True)
    h = filled(padded(backend, 53, 40)[0], random_dense(53, 40, 3))
    rows, blocks = (
        product(backend, adj, h, choice, result=torch.float32) for choice in (SpmmChoice(), SpmmChoice("blocks", 0, 4))
    )
    assert torch.equal(rows, blocks)


@pytest.mark.full
def test_parts_of_hubs_are_summed_before_they_are_added() -> None:
    """Fails if a hub is stored while threads still sum its parts: the work space holds another product's."""
    rng = np.random.default_rng(3301)
    case = Case("hubs", sp.csr_matrix((rng.random((9, 4000)) < 0.7) * rng.normal(size=(9, 4000))))
    backend = CpuBackend(torch.float32, 4)
    adj, dense = hubbed(backend, case, True, 4, native.isa())
    operands = [filled(padded(backend, 4000, 40)[0], random_dense(4000, 40, seed)) for seed in (3, 4)]
    for _ in range(20):
        for h in operands:
            out = product(backend, adj, h, SpmmChoice())
            np.testing.assert_allclose(host(out), dense @ host(h), rtol=1e-4, atol=1e-3)


def test_a_way_that_does_not_fit_is_refused() -> None:
    """Fails if blocks run over rows that are not sorted or into rounded sums, or panels break a cache line."""
    single, half = CpuBackend(torch.float32, 1), CpuBackend(torch.bfloat16, 1)
    cases = [
        (single, _unsorted(), SpmmChoice("blocks", 0, 2), "ascend in each row"),
        (half, BATTERY[1], SpmmChoice("blocks", 0, 2), r"result of torch\.bfloat16"),
        (single, BATTERY[1], SpmmChoice("blocks", 16, 2), "all columns at once"),
        (single, BATTERY[1], SpmmChoice("panels", 24), "multiples of 16 columns; got 24"),
        (half, BATTERY[1], SpmmChoice("panels", 16), "multiples of 32 columns; got 16"),
    ]
    for backend, case, choice, message in cases:
        adj, dense = sparse_of(backend, case, False)
        with pytest.raises(BackendError, match=message):
            product(backend, adj, padded(backend, dense.shape[1], 48)[0].zero_(), choice)


def test_edges_of_bfloat16_are_refused() -> None:
    """Fails if passes over edges read bfloat16 as another type."""
    with pytest.raises(BackendError, match="float32 or float64 on a CPU, got bfloat16"):
        _ = CpuBackend(torch.bfloat16, 1).edges


def test_a_table_overrides_the_choice() -> None:
    """Fails if a measured choice is not taken, or taken for another product."""
    case = BATTERY[-1]
    rows, columns = case.adj.shape
    measured = SpmmChoice("panels", 16, 1, 5, "measured")
    adj, _ = sparse_of(CpuBackend(torch.float32, 1), case, False)
    backend = CpuBackend(torch.float32, 1, choices={key_of(adj.schedule.traits, 41, 4, summed=True): measured})
    for cols, expected in ((41, measured), (40, None)):
        h, out = padded(backend, columns, cols)[0], padded(backend, rows, cols)[0]
        found = backend.sparse_products.choice(adj, h, out)
        assert (found == measured) == (expected is not None)


def test_products_that_differ_have_keys_of_their_own() -> None:
    """Fails if a matrix and its transpose, or a result of another type, share what was measured."""
    rng = np.random.default_rng(90911)
    # Two popular columns, so that the transpose has two long rows.
    columns = np.where(rng.random(20_000) < 0.7, rng.integers(0, 2, 20_000), rng.integers(0, 600, 20_000))
    matrix = sp.csr_matrix((np.ones(20_000), (rng.integers(0, 600, 20_000), columns)), (600, 600))
    matrix.sort_indices()
    backend = CpuBackend(torch.bfloat16, 1)
    keys = []
    for adj in (matrix, matrix.T.tocsr()):
        schedule = make_schedule(adj.indptr.astype(np.int64), adj.indices.astype(np.int32), 1, native.isa())
        keys += [key_of(schedule.traits, 41, 2, summed=summed) for summed in (False, True)]
    assert len({(key.rows, key.columns, key.nnz, key.width) for key in keys}) == 1
    assert len(set(keys)) == 4
    adj, dense = sparse_of(backend, _with_loops(), True)
    into_sums = {key_of(adj.schedule.traits, 40, 2, summed=True): SpmmChoice("blocks", 0, 2)}
    backend = CpuBackend(torch.bfloat16, 1, choices=into_sums)
    h = filled(padded(backend, 53, 40)[0], random_dense(53, 40, 3))
    for result, way in ((torch.float32, "blocks"), (torch.bfloat16, "rows")):
        out = torch.zeros(53, 40, dtype=result)
        assert backend.sparse_products.choice(adj, h, out).way == way
        backend.spmm(adj, h, out, accumulate=False, epilogue=None)
        np.testing.assert_allclose(host(out), dense @ host(h), rtol=2.0**-8, atol=2e-5)


@pytest.mark.parametrize("unfit", [SpmmChoice("blocks", 0, 2), SpmmChoice("panels", 24), SpmmChoice("panels", 2**30)])
def test_a_measured_way_that_does_not_fit_is_not_taken(unfit: SpmmChoice) -> None:
    """Fails if a table that was measured for other kernels ends a run, or its way is taken without being checked."""
    case = BATTERY[-1]
    adj, dense = sparse_of(CpuBackend(torch.bfloat16, 1), case, False)
    key = key_of(adj.schedule.traits, 40, 2, summed=False)
    backend = CpuBackend(torch.bfloat16, 1, choices={key: unfit})
    h = filled(padded(backend, dense.shape[1], 40)[0], random_dense(dense.shape[1], 40, 3))
    out = torch.zeros(dense.shape[0], 40, dtype=torch.bfloat16)
    backend.spmm(adj, h, out, accumulate=False, epilogue=None)
    chosen = backend.sparse_products.choice(adj, h, out)
    assert (chosen.way, chosen.panel, chosen.blocks) == ("rows", 0, 1)
    assert "not as measured: " in chosen.reason
    np.testing.assert_allclose(host(out), dense @ host(h), rtol=2e-2, atol=2e-2)


def test_hub_rows_are_cut_into_all_their_entries() -> None:
    """Fails if parts overlap, leave an entry out, are longer than half a hub, or a short row is cut."""
    lengths = np.array([0, 5, 13, 12, 40, 1, 100, 24, 25])
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    schedule = make_schedule(indptr, np.zeros(int(indptr[-1]), np.int32), 1, native.isa(), hub=HUB)
    assert schedule.hubs[:, 0].tolist() == np.flatnonzero(lengths > HUB).tolist()
    next_part = 0
    for row, first, count in schedule.hubs.tolist():
        assert first == next_part
        parts = schedule.parts[first : first + count].tolist()
        assert [parts[0][0], *(end for _, end in parts)] == [begin for begin, _ in parts] + [indptr[row + 1]]
        assert parts[0][0] == indptr[row]
        assert max(end - begin for begin, end in parts) <= HUB // 2
        next_part += count
    assert next_part == schedule.parts.shape[0]


def test_rows_of_real_graphs_are_rarely_cut() -> None:
    """Fails if rows are cut by something else than the matrix, or so short that sums of usual graphs change."""
    for nnz in (0, 10**4, 10**6, 10**8):
        assert hub_length(nnz) >= 8192
        assert hub_length(nnz) >= nnz / 256
    indptr = np.array([0, 3 * hub_length(0)], np.int64)
    assert make_schedule(indptr, np.zeros(int(indptr[1]), np.int32), 1, native.isa()).parts.shape[0] == 6


def test_what_a_schedule_knows_of_a_matrix() -> None:
    """Fails if the order of entries, the extents or the working sets of consecutive entries are wrong."""
    rng = np.random.default_rng(7771)
    for case, ascending in ((BATTERY[0], True), (_with_loops(), True), (_unsorted(), False), (BATTERY[6], True)):
        traits = make_schedule(
            case.adj.indptr.astype(np.int64), case.adj.indices.astype(np.int32), 2, native.isa()
        ).traits
        assert traits.ascending is ascending
        assert (traits.rows, traits.nnz) == (case.adj.shape[0], case.adj.nnz)
        assert traits.empty == int((np.diff(case.adj.indptr) == 0).sum())
        assert traits.columns == (int(case.adj.indices.max()) + 1 if case.adj.nnz else 0)
    indices = rng.zipf(1.3, 40_000).clip(max=9000).astype(np.int32)
    for threads in (1, 2):
        traits = make_schedule(np.array([0, 40_000], np.int64), indices, threads, native.isa()).traits
        starts = [40_000 * s // 4 for s in range(4)]
        expected = [(n, sum(np.unique(indices[s : s + n]).size for s in starts) // 4) for n in (1024, 2048, 4096, 8192)]
        assert list(traits.reuse) == expected


def test_nothing_outside_the_arrays_is_touched() -> None:
    """Fails if entries fetched ahead, vectors or panels reach behind an array: the process would die."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.backend.cpu.spmm_guard_pages"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr}"
