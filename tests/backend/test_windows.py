"""Calls on windows of rows give the bits of one call on all rows: every kernel that sums over rows, in random cuts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from mggcn import native
from mggcn.backend.base import ENTRY_LOSSES, Dropout, Epilogue, Gradient, LossTarget
from mggcn.backend.cpu.backend import PARTIALS, CpuBackend
from mggcn.backend.cpu.gemm import CpuGemm
from mggcn.backend.cpu.memory import Workspace
from mggcn.backend.cpu.sizes import WindowSum, segments, window_bytes
from mggcn.backend.cpu.windows import Windows
from mggcn.backend.norms import BatchTerms
from mggcn.backend.team import Team
from mggcn.backend.window import STEP, Window
from mggcn.errors import BackendError
from tests.backend.cases import clock
from tests.backend.cpu import amx, wide_tiles

TYPES = [torch.float32, torch.float64, torch.bfloat16]
F64 = torch.float64
TOTALS = (1, 63, 64, 65, 129, 777, 1025, 4097)
"""Rows: fewer than a window, than chunks; one more than whole windows; segments of products that begin at odd rows."""
ROOM = 2**21
"""Bytes that hold what the sums of any test keep."""
Spans = Sequence[tuple[int, int]]
Named = dict[str, Tensor]
Step = Callable[[CpuBackend, Named, Named], None]
"""Calls on some rows: the backend, tensors of these rows, and tensors that rows are summed to."""


def kernel(name: str, kind: str = "", set_: str = "") -> Callable[..., None]:
    """As native.kernel, which it replaces, for instruction sets that are emulated, too."""
    return (amx if set_ == amx.EMULATED else wide_tiles).kernel(name, kind, set_)


@pytest.fixture(autouse=True)
def emulated_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "kernel", kernel)


def made(dtype: torch.dtype, threads: int, isa: str = "", dense: str = "") -> CpuBackend:
    """A backend of an instruction set whose dense products are our own, of a set that may be another."""
    backend = CpuBackend(dtype, threads, isa)
    backend.dense_products = CpuGemm(
        "own", Team(threads), dense or isa or native.isa(), Workspace(), windows=backend.windows
    )
    return backend


def sum_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def numbers(rng: np.random.Generator, *shape: int) -> Tensor:
    """Numbers of very different sizes, so that sums in another order have other bits, and some zeros."""
    values = rng.normal(size=shape) * 10.0 ** rng.uniform(-3, 3, size=shape)
    return torch.from_numpy(values * (rng.random(shape) > 0.2))


def cuts(rng: np.random.Generator, total: int) -> list[Spans]:
    """All rows in one window, in the narrowest, and in random ones."""
    edges = np.arange(0, total, STEP)
    found = [edges[:1], edges]
    for share in (0.15, 0.6):
        found.append(np.union1d([0], edges[rng.random(edges.size) < share]))
    return [list(itertools.pairwise([*(int(edge) for edge in some), total])) for some in found]


def alone(whole: Tensor, first: int, end: int) -> Tensor:
    """A copy of some rows, in memory of their own: behind and beside them lies NaN."""
    rows = whole[first:end]
    if rows.dim() == 1:
        return rows.clone()
    step = 64 // rows.element_size()
    ld = (rows.shape[1] // step + 1) * step
    room = torch.full((step + (rows.shape[0] + 1) * ld,), float("nan"), dtype=rows.dtype)
    return room[step:].as_strided(rows.shape, (ld, 1)).copy_(rows)


def run(backend: CpuBackend, rows: Named, sums: Named, step: Step, spans: Spans | None = None) -> Named:
    """Run a step on all rows, or on windows of them one after the other; return what all tensors are then."""
    rows, sums = ({name: tensor.clone() for name, tensor in of.items()} for of in (rows, sums))
    total = next(iter(rows.values())).shape[0]
    if spans is not None:
        backend.begin_windows(total, torch.full((ROOM,), 77, dtype=torch.uint8))
    for first, end in [(0, total)] if spans is None else spans:
        if spans is not None:
            backend.window(first, end - first)
        local = {name: alone(whole, first, end) for name, whole in rows.items()}
        step(backend, local, sums)
        for name, whole in rows.items():
            whole[first:end] = local[name]
    if spans is not None:
        backend.end_windows()
    return rows | sums


def bits(tensor: Tensor) -> Tensor:
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.element_size()]) if tensor.is_floating_point() else tensor


def different(found: Named, expected: Named) -> list[str]:
    """Names of the tensors that do not have the same bits."""
    return [name for name in expected if not torch.equal(bits(found[name]), bits(expected[name]))]


def check(make: Callable[[int], CpuBackend], rows: Named, sums: Named, step: Step, rng: np.random.Generator) -> Named:
    """Compare every cut, on one to three threads, with one call; return what that gave."""
    expected = run(make(2), rows, sums, step)
    total = next(iter(rows.values())).shape[0]
    for number, spans in enumerate(cuts(rng, total)):
        assert not different(run(make(1 + number % 3), rows, sums, step, spans), expected), (total, spans)
    return expected


def partials(cols: int, sums: int = 1) -> Tensor:
    """Room for column sums, whose old numbers must not count."""
    return torch.full((sums, PARTIALS, cols), float("nan"), dtype=F64)


DENSE = [
    (dtype, result, dense)
    for dtype, result in (
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float64, torch.float64),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    )
    for dense in (*wide_tiles.ISAS, *(amx.TILES if dtype == torch.bfloat16 else ()))
]
"""Types of operands and results, and instruction sets of dense products."""


@pytest.mark.covering(1)
@pytest.mark.parametrize(("dtype", "result", "dense"), DENSE, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (5, 41), (37, 7), (130, 33)], ids=str)
def test_products_over_rows(dtype: torch.dtype, result: torch.dtype, dense: str, shape: tuple[int, int]) -> None:
    """Fails if a segment, or a pair of rows, loses what a window before it summed, or meets rows of another one."""
    rng = np.random.default_rng(shape[0] + 5)

    def step(backend: CpuBackend, rows: Named, sums: Named) -> None:
        for name, accumulate in (("product", False), ("added", True)):
            backend.matmul(rows["x"].t(), rows["g"], sums[name], accumulate=accumulate)

    for total in TOTALS:
        rows = {"x": numbers(rng, total, shape[0]).to(dtype), "g": numbers(rng, total, shape[1]).to(dtype)}
        sums = {name: numbers(rng, *shape).to(result) for name in ("product", "added")}
        found = check(lambda threads: made(dtype, threads, dense=dense), rows, sums, step, rng)
        exact = rows["x"].double().t() @ rows["g"].double()
        tolerance = {torch.float64: 1e-13, torch.float32: 3e-5, torch.bfloat16: 2e-2}[result]
        np.testing.assert_allclose(found["product"].double(), exact, rtol=0, atol=tolerance * float(exact.abs().max()))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_segments_begin_at_odd_rows(dtype: torch.dtype) -> None:
    """Fails if no case above has a pair of rows, in sets that multiply pairs, which the edge of a window takes apart."""
    count = segments(37, 4097, 7, sum_type(dtype).itemsize)
    assert any(4097 * k // count % 2 for k in range(1, count))


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("dtype", "result", "dense"), [c for c in DENSE if c[:2] != (torch.bfloat16, torch.float32)], ids=str
)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_gradients_with_column_sums(
    dtype: torch.dtype, result: torch.dtype, dense: str, fused: bool, scaled: bool
) -> None:
    """Fails if a row's gradient is added to another chunk's sums, twice, in another order or after its scale."""
    rng, cols, inner = np.random.default_rng(31), 41, 9

    def step(backend: CpuBackend, rows: Named, sums: Named) -> None:
        scales = (rows["scale"], 2 * rows["scale"]) if scaled else (None, None)
        gradient = Gradient(True, 1.25, *scales, sums["partials"][0])
        out = None if result == dtype else rows["out"]
        if fused:
            room = torch.empty(0)
            backend.product_grad(rows["g"][:, :inner], sums["weight"].t(), rows["h"], room, gradient, out)
        else:
            backend.activation_grad(rows["g"], rows["h"], gradient, out=out)
        backend.sum_partials(sums["partials"][0], sums["bias"])

    for total in TOTALS:
        rows = {name: numbers(rng, total, cols).to(dtype) for name in ("g", "h")}
        rows |= {"out": torch.zeros(total, cols, dtype=result), "scale": torch.rand(total).to(sum_type(dtype)) + 0.5}
        sums = {"partials": partials(cols), "bias": torch.zeros(cols, dtype=sum_type(dtype))}
        sums["weight"] = numbers(rng, cols, inner).to(dtype)
        check(lambda threads: made(dtype, threads, dense=dense), rows, sums, step, rng)


OTHERS = [(dtype, isa) for dtype in TYPES for isa in ("baseline", "avx2")]
"""Types, and instruction sets of what is no dense product."""


def skip_without(isa: str) -> None:
    if isa not in native.isas():
        pytest.skip(f"this processor has no {isa}")


@pytest.mark.covering(1)
@pytest.mark.parametrize(("dtype", "isa"), OTHERS, ids=str)
@pytest.mark.parametrize("loss", ["plain", "weighted", *ENTRY_LOSSES])
@pytest.mark.parametrize("summed", [False, True])
def test_losses(dtype: torch.dtype, isa: str, loss: str, summed: bool) -> None:
    """Fails if a chunk's loss is lost between windows, counted in each, or another loss's; or column sums are."""
    skip_without(isa)
    rng, cols = np.random.default_rng(57), 7

    def step(backend: CpuBackend, rows: Named, sums: Named) -> None:
        parts = sums["partials"][0] if summed else None
        if loss in ENTRY_LOSSES:
            target = LossTarget(rows["targets"].contiguous(), rows["mask"], 0.01)
            for kind, of in ((loss, parts), ("mse", None)):
                backend.entry_loss(kind, rows["z"], target, rows["scale"], sums["loss"], of)  # type: ignore[arg-type]  # a parameter's name
            return
        weights, smoothing = (sums["weights"], 0.1) if loss == "weighted" else (None, 0.0)
        target = LossTarget(rows["labels"], rows["mask"], 0.01, weights, smoothing)
        backend.softmax_xent(rows["z"], target, rows["scale"], sums["loss"], parts)

    for total in TOTALS:
        targets = numbers(rng, total, cols).abs().clamp(max=1)
        targets[torch.from_numpy(rng.random((total, cols)) < 0.2)] = float("nan")
        rows = {
            "z": numbers(rng, total, cols).clamp(-30, 30).to(dtype),
            "targets": targets.to(sum_type(dtype)),
            "labels": torch.from_numpy(rng.integers(0, cols, total).astype(np.int32)),
            "mask": torch.from_numpy(rng.integers(0, 2, total).astype(np.uint8)),
            "scale": torch.rand(total).to(sum_type(dtype)),
        }
        sums = {"loss": torch.full((1,), 3.25, dtype=F64), "partials": partials(cols)}
        sums["weights"] = torch.rand(cols).to(sum_type(dtype))
        check(lambda threads: made(dtype, threads, isa), rows, sums, step, rng)


@pytest.mark.parametrize(("dtype", "isa"), OTHERS, ids=str)
def test_layer_norm(dtype: torch.dtype, isa: str) -> None:
    """Fails if the sums of gain and bias begin again with a window."""
    skip_without(isa)
    rng, cols = np.random.default_rng(73), 37

    def step(backend: CpuBackend, rows: Named, sums: Named) -> None:
        backend.norms.layer_norm(rows["z"], sums["gain"], sums["bias"], 1e-5, rows["y"])
        backend.norms.layer_norm_grad(rows["g"], rows["z"], sums["gain"], 1e-5, rows["g"], sums["partials"])

    for total in TOTALS:
        rows = {name: numbers(rng, total, cols).to(dtype) for name in ("z", "g", "y")}
        sums = {name: torch.rand(cols).to(sum_type(dtype)) for name in ("gain", "bias")}
        check(lambda threads: made(dtype, threads, isa), rows, sums | {"partials": partials(cols, 2)}, step, rng)


@pytest.mark.parametrize(("dtype", "isa"), OTHERS, ids=str)
def test_batch_norm_in_passes(dtype: torch.dtype, isa: str) -> None:
    """Fails if moments, products of columns or what is made of them differ: a pass for each sum that others need."""
    skip_without(isa)
    rng, cols = np.random.default_rng(91), 37

    def moments(backend: CpuBackend, rows: Named, sums: Named) -> None:
        backend.norms.column_moments(rows["z"], None, rows["once"], sums["partials"][0])

    def squares(backend: CpuBackend, rows: Named, sums: Named) -> None:
        backend.norms.column_moments(rows["z"], sums["mean"], rows["once"], sums["partials"][0])

    def products(backend: CpuBackend, rows: Named, sums: Named) -> None:
        backend.norms.batch_norm(rows["z"], sums["mean"], sums["factor"], sums["shift"], rows["y"])
        backend.norms.column_products(rows["g"], rows["z"], sums["mean"], sums["partials"])
        backend.norms.column_products(rows["g"], rows["y"], None, sums["others"])

    def gradient(backend: CpuBackend, rows: Named, sums: Named) -> None:
        terms = BatchTerms(sums["mean"], sums["factor"], sums["slope"], sums["shift"], rows["once"])
        backend.norms.batch_norm_grad(rows["g"], rows["z"], terms, rows["g"])

    for total in TOTALS:
        rows = {name: numbers(rng, total, cols).to(dtype) for name in ("z", "g", "y")}
        rows["once"] = torch.from_numpy(rng.integers(0, 2, total).astype(np.float64))
        sums = {"partials": partials(cols, 2), "others": partials(cols, 2)}
        sums |= {name: torch.rand(cols, dtype=F64) for name in ("mean", "factor", "shift", "slope")}
        for step in (moments, squares, products, gradient):
            found = check(lambda threads: made(dtype, threads, isa), rows, sums, step, rng)
            rows, sums = ({name: found[name] for name in of} for of in (rows, sums))
            sums["mean"] = sums["partials"][0].sum(0).nan_to_num() / total


@pytest.mark.covering(1)
@pytest.mark.parametrize(("dtype", "result", "dense"), DENSE, ids=str)
def test_rows_know_of_no_windows(dtype: torch.dtype, result: torch.dtype, dense: str) -> None:
    """Fails if a product or an epilogue of a window takes scales, ids or an old result of other rows."""
    rng, cols, inner = np.random.default_rng(13), 41, 65

    def step(backend: CpuBackend, rows: Named, sums: Named) -> None:
        dropout = Dropout(2**30, clock(backend, 5, 6), 2)
        epilogue = Epilogue(rows["scale"], sums["bias"], True, dropout, rows["ids"], 2 * rows["scale"])
        backend.matmul(rows["x"], sums["weight"], rows["out"], accumulate=True, epilogue=epilogue)
        half = rows["out"].shape[0] // 2
        for some in (slice(0, half), slice(half, None)):
            backend.finish(rows["y"][some], rows["y"][some], epilogue, some.start)

    for total in TOTALS:
        rows = {"x": numbers(rng, total, inner).to(dtype), "out": numbers(rng, total, cols).to(result)}
        rows |= {"y": numbers(rng, total, cols).to(dtype), "scale": torch.rand(total).to(sum_type(dtype))}
        rows["ids"] = torch.from_numpy(rng.permutation(total))
        sums = {"weight": numbers(rng, inner, cols).to(dtype), "bias": torch.rand(cols).to(sum_type(dtype))}
        check(lambda threads: made(dtype, threads, dense=dense), rows, sums, step, rng)


def layer(backend: CpuBackend, rows: Named, sums: Named) -> None:
    """What a layer calls, with sums of every kind; two products share a result, of which only the last one stays."""
    backend.matmul(rows["x"].t(), rows["g"], sums["weight"])
    backend.matmul(rows["g"].t(), rows["g"], sums["shared"])
    backend.matmul(rows["x"][:, :3].t(), rows["x"][:, :3], sums["shared"])
    backend.softmax_xent(rows["z"], LossTarget(rows["labels"], rows["mask"], 0.1), None, sums["loss"], None)
    backend.activation_grad(rows["z"], rows["g"], Gradient(True, 1.0, None, None, sums["partials"][0]))


def layer_of(total: int, seed: int) -> tuple[Named, Named]:
    rng = np.random.default_rng(seed)
    rows = {"x": numbers(rng, total, 5), "g": numbers(rng, total, 3), "z": numbers(rng, total, 3)}
    rows = {name: tensor.float() for name, tensor in rows.items()}
    rows["labels"] = torch.from_numpy(rng.integers(0, 3, total).astype(np.int32))
    rows["mask"] = torch.ones(total, dtype=torch.uint8)
    sums = {"weight": torch.zeros(5, 3), "shared": torch.zeros(3, 3), "partials": partials(3)}
    return rows, sums | {"loss": torch.zeros(1, dtype=F64)}


def test_calls_of_a_layer() -> None:
    """Fails if a sum goes on from what another one of the same window has left."""
    for total in TOTALS:
        check(lambda threads: made(torch.float32, threads), *layer_of(total, total), layer, np.random.default_rng(9))


def test_windows_out_of_order_and_lost_ones_change_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a test above could not: planted faults that no check refuses give other bits in every sum."""

    def move(self: Windows, first: int, count: int) -> None:
        assert self._window is not None
        self._window, self._calls = Window(first, count, self._window.total), 0

    monkeypatch.setattr(Windows, "move", move)
    rows, sums = layer_of(1100, 3)
    expected, backend = run(made(torch.float32, 2), rows, sums, layer), made(torch.float32, 2)
    spans = [(0, 192), (192, 448), (448, 1024), (1024, 1100)]
    assert not different(run(backend, rows, sums, layer, spans), expected)
    swapped = [spans[0], spans[2], spans[1], spans[3]]
    summed = {"weight", "shared", "loss", "partials"}
    assert summed - {"partials", "loss"} <= set(different(run(backend, rows, sums, layer, swapped), expected)) & summed
    for lost in (1, 2):
        found = run(backend, rows, sums, layer, spans[:lost] + spans[lost + 1 :])
        assert summed <= set(different(found, expected))


def test_what_breaks_the_order_is_refused() -> None:
    """Fails if rows are left out, repeated or begin between steps, or a run that lacks rows ends as if it did not."""
    backend, memory = made(torch.float32, 1), torch.zeros(ROOM, dtype=torch.uint8)
    with pytest.raises(BackendError, match="call begin_windows before"):
        backend.window(0, 64)
    for first, count in ((64, 64), (0, 65), (0, 0), (0, 201), (0, -64)):
        backend.begin_windows(200, memory)
        with pytest.raises(BackendError, match="must begin at row 0 of 200"):
            backend.window(first, count)
    backend.begin_windows(200, memory)
    backend.window(0, 128)
    for first, count in ((0, 64), (64, 64), (192, 8), (128, 8)):
        with pytest.raises(BackendError, match="must begin at row 128 of 200"):
            backend.window(first, count)
    with pytest.raises(BackendError, match="ended at row 128 of 200"):
        backend.end_windows()
    backend.begin_windows(200, memory)
    backend.end_windows(complete=False)
    out = torch.zeros(1, 3)
    backend.matmul(torch.ones(7, 1).expand(7, 4)[:, :1].t(), torch.ones(7, 3), out)


def test_every_window_makes_the_same_calls() -> None:
    """Fails if a sum that a window left out, or one more, goes on from another sum's memory."""
    backend, memory = made(torch.float32, 1), torch.zeros(ROOM, dtype=torch.uint8)
    x, weight = torch.ones(64, 5), torch.zeros(5, 5)

    def sums(columns: Sequence[int]) -> None:
        for cols in columns:
            backend.matmul(x[:, :cols].t(), x, weight[:cols])

    def window_after(columns: Sequence[int]) -> None:
        sums(columns)
        backend.window(128, 64)

    for first, second, error in (
        ([3, 4], [3], r"with 2 sums; the last one made 1"),
        ([3], [4], "its sum 1 was"),
        ([3], [3, 4], "its sum 2 was none"),
    ):
        backend.begin_windows(192, memory)
        backend.window(0, 64)
        sums(first)
        backend.window(64, 64)
        with pytest.raises(BackendError, match=error):
            window_after(second)
    with pytest.raises(BackendError, match="over all of its 64 rows, got 32"):
        backend.matmul(x[:32].t(), x[:32], weight)
    backend.end_windows(complete=False)


def first_window(backend: CpuBackend, total: int, room: Tensor, x: Tensor, g: Tensor, out: Tensor) -> None:
    """Begin two products and a loss in windows, and leave them after the first."""
    target = LossTarget(torch.zeros(64, dtype=torch.int32), torch.ones(64, dtype=torch.uint8), 1.0)
    backend.begin_windows(total, room)
    backend.window(0, 64)
    for _ in range(2):
        backend.matmul(x[:64].t(), g[:64], out)
    backend.softmax_xent(torch.ones(64, 3, dtype=x.dtype), target, None, torch.zeros(1, dtype=F64), None)
    backend.end_windows(complete=False)


@pytest.mark.covering(1)
@pytest.mark.parametrize(("dtype", "result", "dense"), DENSE, ids=str)
def test_sums_keep_what_is_planned(dtype: torch.dtype, result: torch.dtype, dense: str) -> None:
    """Fails if a sum keeps more than `window_bytes` says, which would lie in other memory, or far less."""
    rng = np.random.default_rng(8)
    for total, m, n in ((100, 3, 5), (4097, 37, 41), (3000, 33, 1), (65, 1, 70)):
        x, g = alone(numbers(rng, total, m).to(dtype), 0, total), alone(numbers(rng, total, n).to(dtype), 0, total)
        of = WindowSum(m, n, total, dtype.itemsize, sum_type(dtype).itemsize)
        backend, planned = made(dtype, 1, dense=dense), window_bytes([of, of], 1, tiles=dense.startswith("amx"))
        memory = torch.full((planned + 4096,), 77, dtype=torch.uint8)
        out = torch.zeros(m, n, dtype=result)
        first_window(backend, total, memory[:planned], x, g, out)
        assert bool((memory[planned:] == 77).all())
        assert int((memory[:planned] != 77).sum()) >= (0.9 if dense.startswith("amx") else 0.2) * planned
        with pytest.raises(BackendError, match="plan them with window_bytes"):
            first_window(backend, total, memory[: planned // 2], x, g, out)


def test_products_of_torch_are_refused() -> None:
    """Fails if windows run where a library multiplies, whose sums of some rows have other bits."""
    with pytest.raises(BackendError, match="torch does"):
        CpuBackend(torch.float32, 1, "baseline").begin_windows(100, torch.zeros(64, dtype=torch.uint8))


def test_sums_of_blocks_stand_apart() -> None:
    """Fails if a block of rows, whose sum is added to the result at once, is taken for a window."""
    rng, block = np.random.default_rng(4), 128

    def step(backend: CpuBackend, rows: Named, sums: Named) -> None:
        with backend.apart():
            for first in range(0, rows["x"].shape[0], block):
                some = slice(first, first + block)
                backend.matmul(rows["x"][some].t(), rows["g"][some], sums["weight"], accumulate=True)

    rows, sums = {name: numbers(rng, 1000, 9).float() for name in ("x", "g")}, {"weight": torch.zeros(9, 9)}
    expected = run(made(torch.float32, 2), rows, sums, step)
    for spans in ([(0, 1000)], [(0, 256), (256, 384), (384, 1000)]):
        assert not different(run(made(torch.float32, 2), rows, sums, step, spans), expected)


def test_no_rows() -> None:
    """Fails if a rank without vertices leaves old numbers in its sums."""
    rows, sums = layer_of(0, 1)
    for spans in (None, [(0, 0)]):
        found = run(made(torch.float32, 2), rows, {name: tensor + 1 for name, tensor in sums.items()}, layer, spans)
        assert not found["weight"].any()
        assert not found["partials"].any()
        assert found["loss"] == 1
