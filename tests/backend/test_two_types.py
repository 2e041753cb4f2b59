"""Kernels between float32 and bfloat16: products with the graph, passes, rows that move, gradients that are rounded."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from mggcn import native
from mggcn.backend.base import Epilogue, Gradient, KernelBackend
from mggcn.backend.cpu.backend import CpuBackend
from mggcn.backend.cpu.variants import key_of
from mggcn.backend.spmm_choice import SpmmChoice
from tests.backend.cases import (
    BATTERY,
    NAMES,
    RANDOM,
    Case,
    Make,
    filled,
    guards_hold,
    host,
    padded,
    random_dense,
    reals,
    skewed,
    tight,
    zeros,
)
from tests.backend.conftest import CPU, EMULATED, _cpu, _emulated, _gpu, slow
from tests.backend.cpu import wide_tiles
from tests.backend.cpu.test_spmm import CASES, hubbed, product, ways
from tests.backend.test_product_grad import own_products
from tests.backend.test_spmm import PARTS, epilogue_of, finished, multiply, sparse_of

F32, BF16 = torch.float32, torch.bfloat16
CLOSE = {F32: {"rtol": 5e-5, "atol": 2e-5}, BF16: {"rtol": 2.0**-8, "atol": 2e-5}}
"""Of a result of either type that is rounded once."""
WAYS = [(BF16, F32), (F32, BF16)]
"""Types of an operand and of a result."""


@pytest.fixture(
    params=[
        *(pytest.param((_cpu, v), id=f"{v[1]}-{v[2]}") for v in CPU if v[0] == F32),
        *(pytest.param((_emulated, v), id=f"emulated-{v[1]}", marks=slow(v[1])) for v in EMULATED if v[0] == F32),
        pytest.param((_gpu, (F32,)), id="cuda", marks=pytest.mark.cuda),
    ]
)
def backend(request: pytest.FixtureRequest) -> KernelBackend:
    make, how = request.param
    made: KernelBackend = make(*how)
    return made


def _multiplied(
    backend: KernelBackend, case: Case, cols: int, types: tuple[torch.dtype, torch.dtype], **options: Any
) -> None:
    """Run one product between guards and compare it with float64."""
    # Sums of bfloat16 may overwrite padding up to the end of a group, and float32 to that of a vector.
    out, expected = multiply(backend, case, cols, types=types, padding=16, **options)
    np.testing.assert_allclose(host(out), expected, **CLOSE[types[1]])


@pytest.mark.covering(1, rest="slow")
@pytest.mark.parametrize("types", WAYS, ids=str)
@pytest.mark.parametrize("case", BATTERY, **NAMES)
def test_spmm(backend: KernelBackend, case: Case, types: tuple[torch.dtype, torch.dtype], sample: Any) -> None:
    """Fails on rows read in the wrong type, a lost accumulate, a tail of columns, or a result rounded on the way."""
    either = (False, True)
    for cols, weighted, accumulate in sample(itertools.product((1, 7, 16, 41, 129, 512), either, either), 3):
        if case is RANDOM and cols not in (7, 41, 129):
            continue
        _multiplied(backend, case, cols, types, weighted=weighted, accumulate=accumulate)


@pytest.mark.covering(1)
@pytest.mark.parametrize("types", WAYS, ids=str)
@pytest.mark.parametrize("make", [tight, skewed])
def test_spmm_without_padding(backend: KernelBackend, make: Make, types: tuple[torch.dtype, torch.dtype]) -> None:
    """Fails if a row is read or written beyond its end: rows of float32 may end in the middle of 8 columns of bfloat16."""
    for cols, accumulate in itertools.product((1, 4, 12, 40, 41), (False, True)):
        _multiplied(backend, BATTERY[2], cols, types, weighted=True, accumulate=accumulate, make=make)


@pytest.mark.covering(1)
@pytest.mark.parametrize("types", WAYS, ids=str)
@pytest.mark.parametrize("parts", [PARTS[:3], PARTS], ids="+".join)
def test_spmm_with_an_epilogue(
    backend: KernelBackend, parts: tuple[str, ...], types: tuple[torch.dtype, torch.dtype]
) -> None:
    """Fails if the epilogue comes after the rounding, or takes the vectors of another row."""
    for cols, accumulate, case in itertools.product((8, 41, 129), (False, True), (RANDOM, BATTERY[1])):
        epilogue = epilogue_of(backend, parts, case.adj.shape[0], cols)
        _multiplied(backend, case, cols, types, weighted=True, accumulate=accumulate, epilogue=epilogue)


@pytest.mark.parametrize("types", WAYS, ids=str)
@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_every_way_and_hubs_on_a_cpu(types: tuple[torch.dtype, torch.dtype], isa: str) -> None:
    """Fails if panels, parts of hubs or rows fetched ahead read or round another type, or ways differ in a bit."""
    if isa not in native.isas():
        pytest.skip(f"this processor has no {isa}")
    backend = CpuBackend(F32, 2, isa)
    for number, (case, (cols, make)) in enumerate(itertools.product(CASES, ((16, padded), (41, padded), (41, tight)))):
        adj, dense = hubbed(backend, case, True, 2, isa)
        h = filled(make(backend, dense.shape[1], cols, types[0])[0], random_dense(dense.shape[1], cols, 3))
        epilogue = epilogue_of(backend, PARTS, dense.shape[0], cols) if number % 3 else None
        results = [
            product(backend, adj, h, choice, result=types[1], make=make, epilogue=epilogue)
            for choice in ways(types[0], False, False)
        ]
        expected = dense @ host(h)
        expected = expected if epilogue is None else finished(expected, epilogue)
        np.testing.assert_allclose(host(results[0]), expected, rtol=CLOSE[types[1]]["rtol"], atol=1e-4)
        assert all(torch.equal(results[0], other) for other in results[1:])


def test_operands_of_either_type_go_their_own_way() -> None:
    """Fails if a product of bfloat16 goes the way that was chosen for float32, whose panels have half of its columns."""
    adj, dense = sparse_of(CpuBackend(F32, 1), RANDOM, False)
    measured = {key_of(adj.schedule.traits, 41, 4, summed=True): SpmmChoice("panels", 16)}
    backend = CpuBackend(F32, 1, choices=measured)
    for dtype, way in ((F32, "panels"), (BF16, "rows")):
        h = filled(padded(backend, dense.shape[1], 41, dtype)[0], random_dense(dense.shape[1], 41, 17))
        out = padded(backend, dense.shape[0], 41)[0]
        backend.spmm(adj, h, out, accumulate=False, epilogue=None)
        np.testing.assert_allclose(host(out), dense @ host(h), **CLOSE[F32])
        assert backend.sparse_products.choice(adj, h, out).way == way
    assert [found.item for found in backend.sparse_products.products] == [4, 2]


@pytest.mark.covering(2)
@pytest.mark.parametrize("types", WAYS, ids=str)
@pytest.mark.parametrize("make", [padded, tight, skewed])
def test_finish(backend: KernelBackend, make: Make, types: tuple[torch.dtype, torch.dtype]) -> None:
    """Fails if a pass takes the vectors of other rows, changes what it reads, or rounds before its end."""
    rows, first = 13, 7
    for cols, parts in itertools.product((1, 3, 40, 129, 1100), ((), PARTS[:3], PARTS)):
        epilogue = epilogue_of(backend, parts, rows + first, cols)
        source = filled(make(backend, rows, cols, types[0])[0], random_dense(rows, cols, 3))
        before = source.clone()
        all_rows = np.zeros((rows + first, cols))
        all_rows[first:] = host(source)
        out, whole = make(backend, rows, cols, types[1])
        backend.finish(source, out, epilogue, first)
        np.testing.assert_allclose(host(out), finished(all_rows, epilogue)[first:], **CLOSE[types[1]])
        assert torch.equal(source, before)
        assert guards_hold(whole, out, 1)


def test_numbers_are_rounded_as_torch_does(backend: KernelBackend) -> None:
    """Fails if a tie goes to an odd neighbour, a large number does not become infinite, or NaN becomes a number."""
    bits = np.random.default_rng(31).integers(0, 2**32, (64, 40), np.uint64).astype(np.uint32)
    bits[:, :8] = (bits[:, :8] & 0xFFFF0000) | 0x8000  # ties
    bits[0, 8:] = [0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0x00000001, 0x80000000] * 4
    z = backend.upload(bits.view(np.float32))
    normal = np.isnan(bits.view(np.float32)) | (np.abs(bits.view(np.float32)) >= 2.0**-126)  # a GPU may flush the rest
    index = backend.upload(np.arange(64, dtype=np.int32))
    for write in (
        lambda out: backend.finish(z, out, Epilogue()),
        lambda out: backend.gather_rows(z, index, out),
        lambda out: backend.scatter_rows(z, index, out),
    ):
        out = zeros(backend, 64, 40, dtype=BF16)
        write(out)
        np.testing.assert_array_equal(host(out)[normal], host(z.to(BF16))[normal])


@pytest.mark.covering(2)
@pytest.mark.parametrize("types", WAYS, ids=str)
@pytest.mark.parametrize("make", [padded, tight, skewed])
def test_rows_move(backend: KernelBackend, make: Make, types: tuple[torch.dtype, torch.dtype]) -> None:
    """Fails if rows are mixed up, converted twice or not at all, or a neighbour is written."""
    order = np.random.default_rng(55).permutation(23)[:11]
    index = backend.upload(order.astype(np.int32))
    for cols in (1, 7, 40, 530):
        source = filled(make(backend, 23, cols, types[0])[0], random_dense(23, cols, 1))
        out, whole = make(backend, 11, cols, types[1])
        backend.gather_rows(source, index, out)
        assert torch.equal(out, source[index.long()].to(types[1]))
        assert guards_hold(whole, out, 1)
        for move, added in ((backend.scatter_rows, 0.0), (backend.scatter_add_rows, 1.25)):
            target, whole = make(backend, 23, cols, types[1])
            target.fill_(1.25)
            move(source[:11], index, target)
            expected = np.full((23, cols), 1.25)
            expected[order] = host(source)[:11] + added
            assert np.array_equal(host(target), host(torch.from_numpy(expected).to(F32).to(types[1])))
            assert guards_hold(whole, target, 1)


@pytest.mark.parametrize("make", [padded, skewed])
def test_activation_grad_beside_its_activation(backend: KernelBackend, make: Make) -> None:
    """Fails on a wrong mask, factor or row, a bias gradient of rounded numbers, or an activation that changes.

    Rows from 0 on must begin the sums, later ones add to them.
    """
    rng, either = np.random.default_rng(38), (False, True)
    for rows, cols, masked, scaled, first in itertools.product((0, 1, 200), (1, 41), either, either, (0, 5)):
        g, h = (filled(make(backend, rows, cols)[0], rng.normal(size=(rows, cols))) for _ in range(2))
        h[:, ::3] = 0
        before = h.clone()
        out, whole = make(backend, rows, cols, BF16)
        h_scale, out_scale = (reals(backend, rng.random(rows + first) + 0.5) for _ in range(2))
        partials = zeros(backend, backend.partials, cols, dtype=torch.float64)
        if first == 0:
            partials.fill_(torch.nan)
        backend.activation_grad(
            g,
            h,
            Gradient(
                masked=masked,
                keep_scale=1.25,
                h_scale=h_scale if scaled else None,
                out_scale=out_scale if scaled else None,
                partials=partials,
            ),
            first_row=first,
            out=out,
        )
        expected = host(g) * 1.25 * ((host(h) != 0) if masked else 1) * (host(h_scale)[first:, None] if scaled else 1)
        bias = zeros(backend, cols, dtype=F32)
        backend.sum_partials(partials, bias)
        np.testing.assert_allclose(host(bias), expected.sum(0), rtol=2e-5, atol=2e-4)
        expected = expected * (host(out_scale)[first:, None] if scaled else 1)
        np.testing.assert_allclose(host(out), expected, **CLOSE[BF16])
        assert torch.equal(h, before)
        assert guards_hold(whole, out, 1)


def check_product_grad(backend: KernelBackend, rows: int, inner: int, cols: int) -> list[torch.Tensor]:
    """Compare a gradient that is rounded beside its activation with float64; return it and its column sums."""
    rng = np.random.default_rng(rows + 7)
    g = filled(padded(backend, rows, inner)[0], rng.normal(size=(rows, inner)))
    w = filled(tight(backend, cols, inner)[0], rng.normal(size=(cols, inner)) / inner**0.5)
    h = filled(padded(backend, rows, cols)[0], rng.normal(size=(rows, cols)) * (rng.random((rows, cols)) > 0.4))
    before = h.clone()
    out, whole = padded(backend, rows, cols, BF16)
    h_scale, out_scale = (reals(backend, rng.random(rows) + 0.5) for _ in range(2))
    partials = zeros(backend, backend.partials, cols, dtype=torch.float64).fill_(torch.nan)
    block = zeros(backend, max(1, rows // 3), cols, dtype=F32)
    backend.product_grad(g, w.t(), h, block, Gradient(True, 1.25, h_scale, out_scale, partials), out)
    expected = host(g) @ host(w).T * 1.25 * (host(h) != 0) * host(h_scale)[:, None]
    bias = zeros(backend, cols, dtype=F32)
    backend.sum_partials(partials, bias)
    np.testing.assert_allclose(host(bias), expected.sum(0), rtol=1e-4, atol=2e-4 * (rows + 1) ** 0.5)
    np.testing.assert_allclose(host(out), expected * host(out_scale)[:, None], rtol=2.0**-8, atol=4e-5)
    assert torch.equal(h, before)
    assert guards_hold(whole, out, 1)
    return [out.clone(), bias]


SHAPES = ((0, 3, 5), (1, 1, 1), (37, 7, 41), (700, 129, 50), (4200, 7, 9))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_product_grad_beside_its_activation(backend: KernelBackend, shape: tuple[int, int, int]) -> None:
    """Fails on a wrong mask, factor or row, sums that are not begun, or a row that is left out between blocks."""
    check_product_grad(backend, *shape)


@pytest.mark.parametrize("isa", wide_tiles.ISAS)
def test_rounded_products_of_every_instruction_set(monkeypatch: pytest.MonkeyPatch, isa: str) -> None:
    """Fails if an epilogue meets other rows, a tail of columns is lost, or bits depend on the number of threads."""
    monkeypatch.setattr(native, "kernel", wide_tiles.kernel)
    for rows, inner, cols in SHAPES:
        results = []
        for threads in (1, 2, 5):
            backend = own_products(F32, isa, threads)
            a = filled(padded(backend, rows, inner)[0], random_dense(rows, inner, 1))
            b = filled(tight(backend, inner, cols)[0], random_dense(inner, cols, 2))
            for epilogue in (None, epilogue_of(backend, PARTS, rows, cols)):
                out, whole = padded(backend, rows, cols, BF16)
                backend.matmul(a, b, out, epilogue=epilogue)
                expected = host(a) @ host(b)
                expected = expected if epilogue is None else finished(expected, epilogue)
                np.testing.assert_allclose(host(out), expected, rtol=2.0**-8, atol=1e-4)
                assert guards_hold(whole, out, 1)
                results.append(out.clone())
            results += check_product_grad(backend, rows, inner, cols)
        count = len(results) // 3
        assert all(torch.equal(one, results[k % count]) for k, one in enumerate(results))
