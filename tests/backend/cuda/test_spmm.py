"""The sparse kernels of the GPU one by one: schedules, the choice of a kernel, and every variant at toy sizes.

What all backends must do is in test_spmm.py. Here long rows and hubs are made of short ones, so that every path runs.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from mggcn.backend.base import Epilogue, KernelBackend, Sparse
from mggcn.backend.cuda.kernels import Kernels
from mggcn.backend.cuda.sizes import (
    H100,
    LONG_ROW,
    WINDOW,
    max_parts,
    schedule_bytes,
    segment_length,
    workspace_bytes,
)
from mggcn.backend.cuda.spmm import OwnSpmm, Schedule, key_of, make_schedule
from mggcn.backend.cuda.variants import Variant, choose, sliced
from mggcn.backend.gather_rates import SLICES
from mggcn.backend.spmm_choice import SpmmChoice, SpmmKey
from mggcn.errors import BackendError
from tests.backend.cases import filled, guards_hold, host, numpy_reals, padded, random_dense, tight, tolerance
from tests.backend.emulated import emulated_backend
from tests.backend.test_spmm import PARTS, epilogue_of, finished
from tests.emulator.device import EmulatedDevice

SMALL = {"shortest": 4, "segment": 80}
"""Rows of more than 4, 8 or 16 nonzeros are long, of more than 160 hubs. The warps of a block take 32 at a time each."""
SHAPES = {
    "simple": Variant("simple"),
    "groups": Variant("groups", 8, 2, 4),
    "narrow groups": Variant("balanced", 4, 1, 4),
    "three pieces": Variant("balanced", 4, 3, 2),
    "wide groups": Variant("balanced", 32, 2, 2),
    "one column per lane": Variant("balanced", 16, 3, 2, aligned=False),
}


def hub_matrix() -> Any:
    """Rows of 0 to 12 nonzeros, some of up to 31, some of rounds of a block, hubs, and a nearly empty last window."""
    rng = np.random.default_rng(55120)
    lengths = rng.integers(0, 13, WINDOW + 21)
    lengths[rng.choice(lengths.size, 40, replace=False)] = rng.integers(13, 32, 40)
    lengths[[7, 60, 133]] = (66, 101, 159)
    lengths[[3, 100, WINDOW + 20]] = (190, 161, 177)
    columns = [np.sort(rng.choice(200, n, replace=False)) for n in lengths]
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    return sp.csr_matrix((rng.normal(size=indptr[-1]), np.concatenate(columns), indptr), (lengths.size, 200))


HUBS = hub_matrix()


class Bench:
    """Products of HUBS by one variant on one device."""

    def __init__(self, backend: KernelBackend, compiler: Any) -> None:
        self.backend = backend
        real = torch.float64 if backend.dtype == torch.float64 else torch.float32
        self.workspace = torch.full((2**14,), float("nan"), dtype=real, device=backend.upload(np.zeros(1)).device)
        self.own = OwnSpmm(Kernels(compiler, backend.dtype), H100, self.workspace)

    def sparse(self, weighted: bool) -> tuple[Sparse, np.ndarray]:
        values = self.backend.upload(numpy_reals(self.backend, HUBS.data)) if weighted else None
        pointers = HUBS.indptr.astype(np.int64)
        arrays = (self.backend.upload(a) for a in (pointers, HUBS.indices.astype(np.int32)))
        schedule = make_schedule(pointers, self.backend.upload, **SMALL)
        dense = HUBS.toarray()
        return Sparse(*arrays, values, schedule), dense if weighted else (dense != 0).astype(float)

    def key(self, cols: int) -> SpmmKey:
        """The key of a product of HUBS by an operand of `cols` columns, into rows of its own type."""
        return key_of(self.sparse(False)[0], padded(self.backend, HUBS.shape[1], cols)[0], cols, summed=False)

    def run(self, cols: int, variant: Variant | None, **how: Any) -> tuple[torch.Tensor, np.ndarray]:
        """Multiply between guards; return (out, expected). how: weighted, accumulate, epilogue, make, out_dtype."""
        adj, dense = self.sparse(how.get("weighted", False))
        make = how.get("make", padded)
        h = filled(make(self.backend, dense.shape[1], cols)[0], random_dense(dense.shape[1], cols, 17))
        out, whole = make(self.backend, dense.shape[0], cols, how.get("out_dtype"))
        accumulate, epilogue = how.get("accumulate", False), how.get("epilogue")
        before = host(filled(out, random_dense(dense.shape[0], cols, 18))) if accumulate else 0
        self.own.multiply(adj, h, out, accumulate=accumulate, epilogue=epilogue, variant=variant)
        assert guards_hold(whole, out, 1)
        expected = dense @ host(h) + before
        return out, expected if epilogue is None else finished(expected, epilogue)


def emulated(dtype: torch.dtype, seed: int) -> Bench:
    return Bench(emulated_backend(dtype, seed), EmulatedDevice(seed).compile)


def on_gpu(dtype: torch.dtype, seed: int) -> Bench:
    from mggcn.backend.cuda.backend import CudaBackend
    from mggcn.backend.cuda.device import CudaDevice
    from mggcn.backend.cuda.presence import missing_for_cuda

    missing = missing_for_cuda()
    if missing:
        pytest.skip(missing)
    device = CudaDevice(0, capture=False)
    return Bench(CudaBackend(dtype, device), device.compile)


MAKERS = [pytest.param(emulated, id="emulated"), pytest.param(on_gpu, id="cuda", marks=pytest.mark.cuda)]
TYPES = [torch.float32, torch.float64, torch.bfloat16]


@pytest.mark.covering(1, rest="slow")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("dtype", TYPES)
def test_every_variant_is_right(dtype: torch.dtype, make: Any, shape: str) -> None:
    """Fails if a path loses a row, a part of a hub, a column, the accumulate, the weights or the epilogue."""
    bench = make(dtype, 5)
    close = tolerance(bench.backend)
    weighted = shape != "narrow groups"
    for cols, accumulate, parts in ((7, False, ()), (41, True, ()), (41, False, PARTS), (129, True, PARTS)):
        epilogue = epilogue_of(bench.backend, parts, HUBS.shape[0], cols) if parts else None
        how = {"weighted": weighted, "accumulate": accumulate, "epilogue": epilogue}
        out, expected = bench.run(cols, SHAPES[shape], **how)
        np.testing.assert_allclose(host(out), expected, rtol=max(5e-5, close["rtol"]), atol=5 * close["atol"])


@pytest.mark.covering(0, rest="slow")
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("dtype", TYPES)
def test_chosen_variants_at_every_width(dtype: torch.dtype, make: Any) -> None:
    """Fails if a width gets a shape that does not cover it, or reads what is not aligned as if it were."""
    bench = make(dtype, 17)
    close = tolerance(bench.backend)
    widths = (1, 3, 16, 40, 64, 256, 512) if dtype == torch.float32 else (3, 64, 129)
    for cols, layout in ((w, m) for w in widths for m in (padded, tight)):
        out, expected = bench.run(cols, None, make=layout)
        np.testing.assert_allclose(host(out), expected, rtol=close["rtol"], atol=5 * close["atol"])


@pytest.mark.parametrize("make", MAKERS)
def test_out_in_the_accumulation_type(make: Any) -> None:
    """Fails if a weight gradient of bfloat16 operands is rounded to bfloat16, or hubs store the wrong type."""
    bench = make(torch.bfloat16, 991)
    for variant in (None, SHAPES["simple"], SHAPES["groups"]):
        out, expected = bench.run(40, variant, out_dtype=torch.float32, accumulate=True)
        np.testing.assert_allclose(host(out), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("make", MAKERS)
def test_bits_do_not_depend_on_the_order_of_threads(make: Any) -> None:
    """Fails if a barrier is missing, or a sum depends on which warp or block comes first."""
    for shape in ("groups", "narrow groups", "wide groups"):
        weighted = shape != "narrow groups"
        first, *others = (make(torch.float32, s).run(129, SHAPES[shape], weighted=weighted)[0] for s in (0, 5, 331))
        assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("shape", ["simple", "groups", "three pieces"])
def test_nan_reaches_its_neighbours_only(shape: str, make: Any) -> None:
    """Fails if NaN in padding spreads, if a shorter row takes what its warp reads beyond its end, or ReLU hides NaN."""
    bench = make(torch.float32, 5)
    adj, dense = bench.sparse(True)
    h, _ = padded(bench.backend, dense.shape[1], 41, fill=float("nan"))
    for column in (int(HUBS.indices[0]), int(HUBS.indices[-1])):
        filled(h, random_dense(dense.shape[1], 41, 17))
        h[column, 5] = float("nan")
        out, _ = padded(bench.backend, dense.shape[0], 41)
        bench.own.multiply(adj, h, out, accumulate=False, epilogue=Epilogue(relu=True), variant=SHAPES[shape])
        expected = np.zeros(out.shape, bool)
        expected[dense[:, column] != 0, 5] = True
        assert np.array_equal(np.isnan(host(out)), expected)


def test_workspace_too_small_is_refused() -> None:
    """Fails if hubs of a matrix that nobody planned for are written behind the workspace."""
    bench = emulated(torch.float32, 0)
    adj, dense = bench.sparse(False)
    own = OwnSpmm(Kernels(EmulatedDevice().compile, torch.float32), H100, bench.workspace[:64])
    out = torch.full((dense.shape[0], 16), 3.0)
    with pytest.raises(BackendError, match="elements of workspace"):
        own.multiply(adj, torch.ones(dense.shape[1], 16), out, accumulate=False, epilogue=None)
    assert (out == 3).all()


def last_columns(backend: KernelBackend, rows: int, cols: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The last columns of a tensor of more than four times as many, whose memory ends with them, and the whole tensor."""
    whole = torch.zeros(rows, -(-cols // 4) * 20)
    return whole[:, -(-(-cols // 4) * 4) :][:, :cols], whole


@pytest.mark.parametrize("layout", [padded, tight, last_columns])
def test_only_ragged_kernels_may_read_behind_a_row(layout: Any) -> None:
    """Fails if a kernel that reads all columns of its tiles is given rows that end earlier, which nothing else shows."""
    backend = emulated_backend(torch.float32, 0)
    compiled: list[tuple[str, ...]] = []

    class NoAggregation:
        def get_function(self, name: str) -> Any:
            return lambda *args, **rest: None

    def compiler(path: Any, options: tuple[str, ...]) -> NoAggregation:
        compiled.append(options)
        return NoAggregation()

    ragged = 0
    pointers = np.array([0, 1, 3], np.int64)
    indices = torch.zeros(3, dtype=torch.int32)
    adj = Sparse(torch.from_numpy(pointers), indices, None, make_schedule(pointers, torch.from_numpy))
    for cols in range(1, 140):
        own = OwnSpmm(Kernels(compiler, torch.float32), H100, torch.empty(0))
        h, out = layout(backend, 5, cols)[0], layout(backend, 2, cols)[0]
        own.multiply(adj, h, out, accumulate=False, epilogue=None)
        options = compiled[-1]
        lanes, pieces = (int(options[i].partition("=")[2]) for i in (2, 3))
        tile = lanes * pieces * (1 if "-DMGGCN_TIGHT" in options else 4)
        if "-DMGGCN_RAGGED" in options:
            ragged += 1
        else:
            covered = -(-cols // tile) * tile
            assert covered <= h.stride(0)
            assert h.storage_offset() + 4 * h.stride(0) + covered <= h.untyped_storage().nbytes() // 4
    assert 0 < ragged < 139


@pytest.mark.emulated
def test_nothing_behind_an_array_is_touched(part: list[str]) -> None:
    """Fails if a kernel reads an index, a weight or a row of the operand behind the last: a GPU may survive it or not."""
    command = [sys.executable, "-m", "tests.backend.cpu.guard_pages", *part]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


def test_nothing_is_launched_for_nothing() -> None:
    """Fails if an empty product compiles or launches a kernel."""

    def no_compiler(path: Any, options: Any) -> Any:
        raise AssertionError(f"compiled {path} {options}")

    own = OwnSpmm(Kernels(no_compiler, torch.float32), H100, torch.empty(0))
    for rows in (0, 5):
        pointers = np.zeros(rows + 1, np.int64)
        empty = torch.empty(0, dtype=torch.int32)
        adj = Sparse(torch.from_numpy(pointers), empty, None, make_schedule(pointers, torch.from_numpy))
        own.multiply(adj, torch.ones(4, 8), torch.zeros(rows, 8), accumulate=True, epilogue=None)


LENGTHS = {
    "none": np.zeros(0, np.int64),
    "one": np.array([7]),
    "empty rows": np.zeros(2 * WINDOW + 1, np.int64),
    "mixed": np.random.default_rng(7731).integers(0, 400, 3000),
    "hubs": np.random.default_rng(7732).choice([1, 2049, 2048, 2047, 5000, 10**6], 500),
    "just hubs": np.full(4000, 2049),
    "one hub": np.array([3, 10**9, 0]),
    "at the limits": np.repeat([64, 65, 128, 129, 256, 257, 512, 513], 33),
}


def schedule_of(lengths: np.ndarray, **small: Any) -> tuple[Schedule, np.ndarray]:
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return make_schedule(indptr, torch.from_numpy, **small), indptr


@pytest.mark.parametrize("unroll", [2, 4, 8])
@pytest.mark.parametrize("small", [{}, SMALL], ids=["default", "small"])
@pytest.mark.parametrize("name", LENGTHS)
def test_a_schedule_covers_every_nonzero_once(name: str, small: dict[str, int], unroll: int) -> None:
    """Fails if a row is left out, done twice, or done both by a group and by a block."""
    lengths = LENGTHS[name] if not small else np.minimum(LENGTHS[name], 10**5)
    schedule, indptr = schedule_of(lengths, **small)
    order = schedule.order.numpy().astype(np.int64)
    assert order.size % WINDOW == 0
    rows = np.arange(order.size) // WINDOW * WINDOW + order
    assert np.array_equal(np.sort(rows), np.arange(order.size))
    assert np.array_equal(np.sort(rows[: lengths.size]), np.arange(lengths.size))
    limit, num_long = schedule.limit(unroll), schedule.num_long(unroll)
    by_groups = np.flatnonzero(lengths <= limit)
    by_blocks = schedule.long_rows.numpy()[:num_long]
    hubs, parts = schedule.hubs.numpy(), schedule.parts.numpy()
    done = np.concatenate([by_groups, by_blocks, hubs[:, 0]])
    assert np.array_equal(np.sort(done), np.arange(lengths.size))
    assert np.array_equal(parts[:, 3], np.arange(len(parts)))
    for row, first, count, _ in hubs[:: max(1, len(hubs) // 50)]:
        own = parts[first : first + count]
        assert (own[:, 0] == row).all()
        assert own[0, 1] == 0
        assert np.array_equal(own[1:, 1], (own[:, 1] + own[:, 2])[:-1])
        assert own[-1, 1] + own[-1, 2] == lengths[row]
        assert own[:, 2].max() <= (small.get("segment") or segment_length(int(indptr[-1])))
    assert hubs[:, 2].sum() == len(parts)


@pytest.mark.parametrize("name", LENGTHS)
def test_longest_work_comes_first(name: str) -> None:
    """Fails if a row of a longer class waits behind shorter ones, or lengths in a window are out of order."""
    lengths = LENGTHS[name]
    schedule, _ = schedule_of(lengths)
    ordered = np.full(schedule.order.shape[0], -1)
    rows = np.arange(ordered.size) // WINDOW * WINDOW + schedule.order.numpy()
    ordered[rows < lengths.size] = np.minimum(lengths[rows[rows < lengths.size]], 32767)
    assert (np.diff(ordered.reshape(-1, WINDOW), axis=1) <= 0).all()
    classes = np.ceil(np.log2(lengths[schedule.long_rows.numpy()]))
    assert (np.diff(classes) <= 0).all()


@pytest.mark.parametrize("name", LENGTHS)
def test_planned_bytes_hold(name: str) -> None:
    """Fails if a schedule or its workspace can be larger than what is planned from rows and nonzeros alone."""
    lengths = LENGTHS[name]
    schedule, indptr = schedule_of(lengths)
    nnz = int(indptr[-1])
    tensors = (schedule.order, schedule.long_rows, schedule.parts, schedule.hubs)
    assert sum(t.nbytes for t in tensors) <= schedule_bytes(lengths.size, nnz) <= schedule_bytes(lengths.size)
    assert schedule.parts.shape[0] <= max_parts(nnz)
    assert 4 * 48 * schedule.parts.shape[0] <= workspace_bytes(nnz, 41, 4)


def test_the_bound_of_parts_is_nearly_met() -> None:
    """Fails if the plan reserves far more workspace than the worst lengths take: rows of just more than two segments."""
    schedule, indptr = schedule_of(np.full(2000, 2049))
    assert schedule.parts.shape[0] == 6000
    assert max_parts(int(indptr[-1])) < 6010
    assert workspace_bytes(2**31 - 1, 512, 4) <= 25 * 2**20


@pytest.mark.parametrize("itemsize", [2, 4, 8])
@pytest.mark.parametrize("aligned", [True, False])
def test_shapes_fit_the_kernels(itemsize: int, aligned: bool) -> None:
    """Fails if a shape breaks what cuda/spmm_rows.cuh demands, or idles most of its lanes."""
    for width in (*range(1, 300), 512, 1000, 4097):
        for weighted in (False, True):
            v = choose(width, itemsize, aligned, weighted=weighted)
            assert v.kernel == "balanced"
            assert v.lanes in (4, 8, 16, 32)
            assert v.lanes % v.unroll == 0
            assert v.unroll in (2, 4, 8)
            assert v.pieces <= (3 if itemsize == 4 or not aligned else 2)
            tile = v.tile(itemsize)
            needed = max(width, 4 * (16 // itemsize if aligned else 1))
            assert -(-width // tile) * tile < 2 * needed


def test_known_shapes() -> None:
    """Fails if the measured widths change their kernel unnoticed: bench results are of these."""
    found = {w: choose(w, 4, True) for w in (16, 41, 64, 128, 129, 256, 512)}
    assert {w: (v.lanes, v.pieces, v.unroll) for w, v in found.items()} == {
        16: (4, 1, 4),
        41: (4, 3, 2),
        64: (8, 2, 4),
        128: (16, 2, 4),
        129: (16, 3, 2),
        256: (32, 2, 4),
        512: (32, 2, 4),
    }


@pytest.mark.parametrize("itemsize", [2, 4, 8])
@pytest.mark.parametrize("size", SLICES)
def test_a_slice_is_one_tile(size: int, itemsize: int) -> None:
    """Fails if the lanes of a slice cover more or less than its columns, or an operand that is not aligned gets slices."""
    for weighted in (False, True):
        panel = sliced(size, itemsize).panel
        assert choose(1000, itemsize, True, panel, weighted=weighted).tile(itemsize) == panel == size // itemsize
        whole = choose(1000, itemsize, False, weighted=weighted)
        assert choose(1000, itemsize, False, panel, weighted=weighted) == whole


@pytest.mark.covering(0, rest="slow")
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("dtype", TYPES)
def test_every_slice_width_is_right_and_repeats(dtype: torch.dtype, make: Any, sample: Any) -> None:
    """Fails if a slice loses or doubles a column, a hub or a long row, or its bits depend on the order of threads."""
    close = tolerance(make(dtype, 5).backend)
    cols = 600 // dtype.itemsize + 1
    for size in sample(SLICES, 2):
        runs = []
        for seed in (5, 331):
            bench = make(dtype, seed)
            own, item = bench.own, dtype.itemsize
            bench.own = OwnSpmm(own._kernels, H100, bench.workspace, {bench.key(cols): sliced(size, item)})
            epilogue = epilogue_of(bench.backend, PARTS, HUBS.shape[0], cols)
            out, expected = bench.run(cols, None, weighted=True, accumulate=True, epilogue=epilogue)
            product = bench.own.product(bench.sparse(True)[0], padded(bench.backend, HUBS.shape[1], cols)[0], out)
            assert product.choice.panel * item == size
            np.testing.assert_allclose(host(out), expected, rtol=max(5e-5, close["rtol"]), atol=5 * close["atol"])
            runs.append(out)
        assert torch.equal(*runs)


@pytest.mark.emulated
def test_a_kept_way_that_is_no_slicing_is_left_aside() -> None:
    """Fails if a table of a CPU's ways, or of another version's slices, reaches the kernels of a GPU."""
    for way in (SpmmChoice("blocks", 0, 4), SpmmChoice("panels", 7), SpmmChoice("rows", 0, 1, 16)):
        bench = emulated(torch.float32, 0)
        bench.own = OwnSpmm(bench.own._kernels, H100, bench.workspace, {bench.key(64): way})
        out, expected = bench.run(64, None)
        np.testing.assert_allclose(host(out), expected, rtol=5e-5, atol=1e-4)
        product = bench.own.product(bench.sparse(False)[0], padded(bench.backend, HUBS.shape[1], 64)[0], out)
        assert product.choice == SpmmChoice()


def test_a_matrix_and_its_transpose_have_their_own_keys() -> None:
    """Fails if slices measured for A are taken for A^T, which has as many rows, columns and nonzeros."""
    bench = emulated(torch.float32, 0)
    hub = np.concatenate([[0], np.full(200, 199)])
    even = np.minimum(np.arange(201), 199)
    matrices = []
    for pointers in (hub, even):
        arrays = (bench.backend.upload(a) for a in (pointers, np.zeros(199, np.int32)))
        matrices.append(Sparse(*arrays, None, make_schedule(pointers, bench.backend.upload, **SMALL)))
    h = padded(bench.backend, 200, 8)[0]
    first, second = (key_of(adj, h, 8, summed=False) for adj in matrices)
    assert (first.rows, first.columns, first.nnz) == (second.rows, second.columns, second.nnz)
    assert first != second


def test_length_of_long_rows_follows_the_unroll() -> None:
    """Fails if the rows left to groups may take more than 32 steps, which is what the tail of a launch can last."""
    schedule, _ = schedule_of(np.arange(2000))
    for unroll in (2, 4, 8):
        assert schedule.limit(unroll) == 32 * unroll
        assert schedule.num_long(unroll) == 1999 - 32 * unroll
    assert schedule.limit(2) == LONG_ROW
