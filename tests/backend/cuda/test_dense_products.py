"""Triton's kernels of dense products, interpreted on the CPU and compiled for a GPU: errors, masks, bits, code."""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mggcn.assemble.rank import Rank
from mggcn.backend.base import Dropout, Epilogue, Gradient, KernelBackend
from mggcn.backend.cpu.backend import CpuBackend
from mggcn.backend.cuda import triton_kernels
from mggcn.backend.cuda.backend import CudaBackend
from mggcn.backend.cuda.dense_blocks import Options, dense_bytes
from mggcn.backend.cuda.dense_products import DenseProducts
from mggcn.backend.cuda.triton_kernels import NO_SCRATCH, Args, Constants, compile_kernel, is_aligned, kind
from mggcn.config import Config, ModelConfig, RunConfig, TrainConfig
from mggcn.errors import BackendError
from tests.backend import test_product_grad, test_two_types
from tests.backend.cases import (
    Make,
    clock,
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
from tests.backend.test_far_rows import far
from tests.devices import EMULATED
from tests.emulator.device import EmulatedDevice
from tests.graphs import make_graph, on_ranks, pattern

pytest.importorskip("triton", reason="Triton has no wheel for this machine")

import triton

from tests.backend.cuda.interpreted import InterpretedKernels

F32, BF16 = torch.float32, torch.bfloat16
SHAPES = ((0, 3, 5), (1, 1, 1), (37, 7, 41), (300, 129, 50), (129, 40, 200))
"""Rows, inner width, columns: none, one, less than a block, one element more than a block, several blocks of columns."""
CLOSE = {F32: {"rtol": 2e-5, "atol": 2e-5}, BF16: {"rtol": 2.0**-8, "atol": 2e-5}}
ROOM = 2**24


def fused(dtype: torch.dtype, parts: int = 2, room: int = ROOM, order: int | None = None) -> CudaBackend:
    """A backend whose dense products are interpreted. order: a seed of the order of blocks."""
    return CudaBackend(dtype, EmulatedDevice(block_kernels=InterpretedKernels(order)), room, parts=parts)


def on_gpu(dtype: torch.dtype, parts: int = 2, room: int = ROOM, order: int | None = None) -> CudaBackend:
    from mggcn.backend.cuda.device import CudaDevice
    from mggcn.backend.cuda.presence import missing_for_cuda

    missing = missing_for_cuda()
    if missing:
        pytest.skip(missing)
    device = CudaDevice(0, capture=False)
    if device.block_kernels is None:
        pytest.skip("Triton's kernels were not measured on this GPU")
    return CudaBackend(dtype, device, room, parts=parts)


BackendOf = Callable[..., CudaBackend]


@pytest.fixture(params=[pytest.param(fused, id="interpreted"), pytest.param(on_gpu, id="cuda", marks=pytest.mark.cuda)])
def backend_of(request: pytest.FixtureRequest) -> BackendOf:
    made: BackendOf = request.param
    return made


def _epilogue(backend: KernelBackend, rows: int, cols: int, first: int) -> Epilogue:
    rng = np.random.default_rng(rows + 71)
    vectors = [reals(backend, rng.random(n) + 0.5) for n in (rows + first, cols, rows + first)]
    ids = backend.upload(rng.permutation(rows + first) + (np.int64(5) << 33))
    drop = Dropout(0.3, clock(backend, 2**40 + 5081, 17), 3)
    return Epilogue(vectors[0], vectors[1] - 1, True, drop, ids, vectors[2])


def _expected(a: torch.Tensor, b: torch.Tensor, before: np.ndarray | float, first: int) -> np.ndarray:
    """The product in float64, and the epilogue of the CPU's kernels, whose masks are those of all."""
    exact = torch.from_numpy(host(a) @ host(b) + before).float()
    cpu = CpuBackend(F32, 1)
    if first:
        cpu.finish(exact, exact, _epilogue(cpu, *exact.shape, first), first)
    return exact.numpy()


@pytest.mark.covering(2)
@pytest.mark.parametrize("make", [padded, tight, skewed])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows(backend_of: BackendOf, shape: tuple[int, int, int], dtype: torch.dtype, make: Make) -> None:
    """Fails on a wrong offset, edge, transposition, epilogue or mask, sums that are not accumulated, or foreign writes."""
    rows, inner, cols = shape
    backend = backend_of(dtype)
    (a, around_a), (b, around_b) = make(backend, rows, inner), tight(backend, inner, cols)
    for around in (around_a, around_b):
        around.fill_(torch.nan)  # what is read around an operand shows in a sum
    filled(a, random_dense(rows, inner, 1))
    filled(b, random_dense(inner, cols, 2) / inner**0.5)
    for accumulate, first, weight in ((True, 0, b.t().contiguous().t()), (False, 3, b)):
        out, whole = make(backend, rows, cols)
        filled(out, random_dense(rows, cols, 3))
        expected = _expected(a, b, host(out) * accumulate, first)
        epilogue = _epilogue(backend, rows, cols, first) if first else None
        backend.matmul(a, weight, out, accumulate=accumulate, epilogue=epilogue, first_row=first)
        np.testing.assert_allclose(host(out), expected, **CLOSE[dtype])
        assert not first or ((host(out) == 0) == (expected == 0)).all()
        assert guards_hold(whole, out, 1)


def test_rows_far_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a row of an operand or a result is multiplied by its stride in 32 bits."""
    monkeypatch.setattr(sys.modules[__name__], "guards_hold", lambda *_: True)
    for dtype in (F32, BF16):
        test_rows(fused, (37, 20, 9), dtype, far)


@pytest.mark.parametrize(
    "shape",
    [
        *SHAPES[0:3:2],
        pytest.param((130, 65, 50), marks=pytest.mark.full),
        pytest.param(SHAPES[3], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_gradients(backend_of: BackendOf, shape: tuple[int, int, int]) -> None:
    """Fails on a wrong mask, factor or row, or on sums of other rows, of either type or between them."""
    for dtype in (F32, BF16):
        test_product_grad.check(backend_of(dtype), *shape)
    test_two_types.check_product_grad(backend_of(F32), *shape)


def test_results_of_bfloat16(backend_of: BackendOf) -> None:
    """Fails if a float32 product is rounded before its epilogue."""
    backend = backend_of(F32)
    a = filled(padded(backend, 77, 40)[0], random_dense(77, 40, 1))
    b = filled(tight(backend, 40, 21)[0], random_dense(40, 21, 2))
    out, whole = padded(backend, 77, 21, BF16)
    backend.matmul(a, b, out, epilogue=_epilogue(backend, 77, 21, 5), first_row=5)
    np.testing.assert_allclose(host(out), _expected(a, b, 0, 5), rtol=2.0**-8, atol=2e-5)
    assert guards_hold(whole, out, 1)


@pytest.mark.parametrize("spread", [0.0, 8.0])
def test_error_of_three_products(backend_of: BackendOf, spread: float) -> None:
    """Fails if a part is lost: two parts of 11 bits keep what float32 keeps, one a thousandth of it."""
    rng = np.random.default_rng(731)
    left, right = (rng.normal(size=n) * np.exp(spread * rng.normal(size=n)) for n in ((64, 200), (200, 64)))
    worst = {}
    for parts in (1, 2):
        backend = backend_of(F32, parts)
        a, b = (filled(tight(backend, *x.shape)[0], x) for x in (left, right))
        out = tight(backend, 64, 64)[0]
        backend.matmul(a, b, out)
        exact, scale = host(a) @ host(b), abs(host(a)) @ abs(host(b))
        worst[parts] = float((abs(host(out) - exact) / scale).max())
    # Of each product 2^-22 for either lower part's rounding and 2^-22 for the product that is left out; float32's sums.
    assert worst[2] < 2.0**-20
    assert worst[1] > 2.0**-15


def test_infinity_and_nan_are_seen(backend_of: BackendOf) -> None:
    """Fails if a broken activation becomes an ordinary number."""
    backend = backend_of(F32)
    b = filled(tight(backend, 9, 5)[0], random_dense(9, 5, 1))
    for broken in (torch.inf, -torch.inf, torch.nan):
        a = filled(tight(backend, 3, 9)[0], random_dense(3, 9, 2))
        a[1, 4] = broken
        out = tight(backend, 3, 5)[0]
        backend.matmul(a, b, out, epilogue=Epilogue(relu=True))
        assert not np.isfinite(host(out)[1]).all()
        assert np.isfinite(host(out)[0::2]).all()


def test_bits_repeat(backend_of: BackendOf) -> None:
    """Fails if the order of sums depends on when a block runs: the interpreter's run in other orders."""
    found = []
    for order in (None, 1, 2):
        backend = backend_of(F32, order=order)
        a = filled(padded(backend, 700, 60)[0], random_dense(700, 60, 1))
        b = filled(tight(backend, 60, 40)[0], random_dense(60, 40, 2))
        h, partials = torch.ones_like(a @ b), zeros(backend, 1024, 40, dtype=torch.float64)
        backend.product_grad(a, b, h, h, Gradient(partials=partials))
        found.append((h, partials))
    for of in zip(*found, strict=True):
        assert all(torch.equal(of[0], other) for other in of[1:])


def test_the_record_names_the_products(backend_of: BackendOf) -> None:
    """Fails if a run's record does not tell by what its bits came about."""
    assert backend_of(F32).name.endswith("(dense products: Triton, float32 as three products of TF32)")
    assert backend_of(F32, parts=1).name.endswith("as one product of TF32)")
    assert "Triton" not in backend_of(F32, parts=0).name
    assert not backend_of(F32, parts=0).fuses_products


def test_products_without_room_are_cublas(backend_of: BackendOf) -> None:
    """Fails if a product that is no layer's writes behind the work space."""
    backend = backend_of(F32, room=64)
    a = filled(tight(backend, 40, 30)[0], random_dense(40, 30, 1))
    b = filled(tight(backend, 30, 20)[0], random_dense(30, 20, 2))
    out, grad = tight(backend, 40, 20)[0], tight(backend, 30, 20)[0]
    backend.matmul(a, b, out, epilogue=Epilogue(relu=True))
    backend.matmul(a.t(), out, grad)
    assert torch.equal(out, (a @ b).relu())
    assert torch.equal(grad, a.t() @ out)


@pytest.mark.parametrize(("d_in", "d_out"), [(1433, 16), (16, 7), (256, 256), (602, 512), (1, 1)])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_planned_bytes_suffice(d_in: int, d_out: int, dtype: torch.dtype) -> None:
    """Fails if a layer's product finds no room, and so is not fused, or a plan reserves more than is used."""
    room = dense_bytes(d_in, d_out, dtype.itemsize)
    h, g = (torch.empty(9, n, dtype=dtype, device="meta") for n in (d_in, d_out))
    w = torch.empty(d_in, d_out, dtype=dtype, device="meta")
    for space, taken in ((room, True), (room - 64, False)):
        dense = DenseProducts(InterpretedKernels(), torch.empty(space, dtype=torch.uint8), 2)
        assert (dense.take(h, w) and dense.take(g, w.t())) == taken


def test_gradients_of_weights_are_cublas() -> None:
    """Fails if h^T is read as rows, also where it has one column or one row."""
    dense = DenseProducts(InterpretedKernels(), torch.empty(ROOM, dtype=torch.uint8), 2)
    for rows, cols in ((9, 5), (9, 1), (64, 1)):
        h = torch.empty(rows, cols)
        assert not dense.take(h.t(), h)
        assert dense.take(h, torch.empty(cols, 3))


class Compiled:
    """BlockKernels that are compiled, not run."""

    def __init__(self) -> None:
        self.shared: dict[str, int] = {}

    def launch(self, kernel: str, blocks: int, args: Args, constants: Constants, options: Options) -> None:
        kinds = {name: of for name, value in args.items() if (of := kind(name, value)) != "constexpr"}
        aligned = frozenset(name for name, value in args.items() if is_aligned(name, value))
        code = compile_kernel(kernel, kinds, aligned, constants, options, (9, 0))
        assert code.binary[:4] == b"\x7fELF"
        assert code.name == kernel
        assert dict(code.arguments) == kinds
        self.shared[kernel] = code.shared_bytes


@pytest.mark.full
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_kernels_compile_for_a_gpu(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the compiler of Triton refuses what the interpreter runs, a block needs more memory than an H100 has, or a
    version of Triton gives kernels other arguments than a launch passes.
    """
    taken, compile_it = dict[str, int](), triton.compile

    def noted(source: Any, *how: Any) -> Any:
        made = compile_it(source, *how)
        _, _, behind = made.asm["ptx"].partition(".entry ")
        taken[made.metadata.name] = behind[: behind.index("{")].count(".param ")
        expected[made.metadata.name] = len(NO_SCRATCH) + sum(of != "constexpr" for of in source.signature.values())
        return made

    expected = dict[str, int]()
    monkeypatch.setattr(triton, "compile", noted)
    compiled, cpu = Compiled(), CpuBackend(F32, 1)
    dense = DenseProducts(compiled, torch.empty(ROOM, dtype=torch.uint8), 2)
    h, g, w = padded(cpu, 64, 100, dtype)[0], padded(cpu, 64, 256, dtype)[0], tight(cpu, 100, 256, dtype)[0]
    dense.rows(h, w, g, epilogue=_epilogue(cpu, 64, 256, 0))
    dense.rows_grad(g, w.t(), h, Gradient(partials=torch.empty(64, 100, dtype=torch.float64)))
    assert set(compiled.shared) == {"pack", "product_rows", "product_rows_grad"}
    assert taken == expected
    assert taken.keys() == compiled.shared.keys()
    assert 0 < max(compiled.shared.values()) <= 227 * 1024


@pytest.mark.parametrize("named", ["TRITON_CACHE_DIR", "TRITON_HOME"])
def test_a_cache_that_cannot_be_written(
    named: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Fails if a run ends where its home cannot be written, says so for each kernel, or leaves another cache behind."""
    (tmp_path / "file").touch()
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv(named, str(tmp_path / "file"))
    triton_kernels._say_not_kept.cache_clear()
    compiled, b = Compiled(), torch.empty(8, 8)
    DenseProducts(compiled, torch.empty(ROOM, dtype=torch.uint8), 2).rows(b, b, b)
    assert set(compiled.shared) == {"pack", "product_rows"}
    (line,) = caplog.messages
    assert line.startswith("dense products cannot be kept for later processes: ")
    assert triton.knobs.cache.dir.startswith(str(tmp_path / "file"))


def test_no_folder_can_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fails if a run ends without a word on what to do."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    b = torch.empty(8, 8)
    with pytest.raises(BackendError, match="let TRITON_CACHE_DIR name one that can be written"):
        DenseProducts(Compiled(), torch.empty(ROOM, dtype=torch.uint8), 2).rows(b, b, b)


@pytest.mark.parametrize("precision", ["fp32", "mixed", "bf16"])
def test_training(precision: Any) -> None:
    """Fails if a run gives these kernels other operands, rows or masks than the passes that they take the place of."""
    graph = make_graph(pattern("directed", 41, 9), num_features=19, num_classes=4, seed=3)
    model = ModelConfig(hidden=(24, 8), dropout=0.5)
    config = Config(
        model=model, train=TrainConfig(seed=551, epochs=3, lr=0.02), run=RunConfig(threads=1, precision=precision)
    )

    def losses(rank: Rank) -> list[float]:
        assert rank.trainer.runtime.backend.fuses_products
        return [rank.trainer.step(epoch) for epoch in range(3)]

    blocks = lambda *_: EmulatedDevice(block_kernels=InterpretedKernels())  # noqa: E731, a device for the run below alone
    found = on_ranks(EMULATED.config(config), graph, losses, device_of=blocks)[0]
    expected = on_ranks(dataclasses.replace(config), graph, losses)[0]
    np.testing.assert_allclose(found, expected, rtol=2e-6 if precision == "fp32" else 5e-3)
