"""The emulator itself: right kernels give right results, planted faults are seen."""

from __future__ import annotations

import mmap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.emulator import module
from tests.emulator.module import EmulatedModule, EmulationError

EXAMPLE = Path(__file__).with_name("example.cu")
SEEDS = (0, 5, 17, 991)
rng = np.random.default_rng(81173)


def run(name: str, grid: int, block: int, *args: Any, seed: int = 0, shared: int = 0) -> None:
    EmulatedModule(EXAMPLE, seed=seed).get_function(name)((grid,), (block,), args, shared_mem=shared)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("width", [1, 16, 41, 64])
def test_spmm(seed: int, width: int) -> None:
    n = 57
    a = rng.random((n, n)) < 0.1
    a[3] = False
    a[7] = True
    indptr = np.r_[0, a.sum(1).cumsum()].astype(np.int64)
    indices = np.nonzero(a)[1].astype(np.int32)
    dense, out = rng.standard_normal((n, width), np.float32), np.full((n, width), np.nan, np.float32)
    grid = (n * 32 + 127) // 128
    run("spmm_csr_warp", grid, 128, indptr, indices, dense, out, np.int64(n), np.int32(width), seed=seed)
    np.testing.assert_allclose(out, a.astype(np.float64) @ dense, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
def test_shuffle_tree(seed: int) -> None:
    x, out = rng.standard_normal((37, 70), np.float32), np.full(37, np.nan, np.float32)
    run("row_sum_shuffle", 10, 128, x, out, np.int32(37), np.int32(70), seed=seed)
    np.testing.assert_allclose(out, x.sum(1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("width", [8, 32])
def test_warp_operations(seed: int, width: int) -> None:
    """Fails if a shuffle takes another lane's value, or a vote counts wrongly."""
    out = np.full((64, 9), -5, np.int32)
    run("collectives", 1, 64, out, np.int32(width), seed=seed)
    t = np.arange(64)
    first, at = t // width * width, t % width
    assert np.array_equal(out[:, 0], 100 + first + 3)
    assert np.array_equal(out[:, 1], 100 + (t ^ 1))
    assert np.array_equal(out[:, 2], 100 + first + np.maximum(at - 1, 0))
    assert np.array_equal(out[:, 3], 100 + first + np.minimum(at + 1, width - 1))
    assert (out[:, 4] == sum(1 << comm_stream for comm_stream in range(0, 32, 3))).all()
    assert out[:, 5:8].tolist() == [[1, 32, 1]] * 64
    assert np.array_equal(out[:, 8], 100 + (t ^ 8))


def scan_is_right(broken: int, seed: int) -> bool:
    x, out = rng.standard_normal(200).astype(np.float32), np.zeros(200, np.float32)
    run("block_scan", 1, 256, x, out, np.int32(200), np.int32(broken), seed=seed, shared=1024)
    return bool(np.allclose(out, x.cumsum(), atol=1e-4))


def reverse_is_right(broken: int, seed: int) -> bool:
    x, out = rng.standard_normal(192).astype(np.float32), np.zeros(192, np.float32)
    run("reverse", 3, 64, x, out, np.int32(broken), seed=seed)
    return bool(np.array_equal(out.reshape(3, 64), x.reshape(3, 64)[:, ::-1]))


def neighbour_is_right(broken: int, seed: int) -> bool:
    x = rng.standard_normal(32).astype(np.float32)
    out = x.copy()
    run("neighbour", 1, 32, out, np.int32(broken), seed=seed)
    return bool(np.array_equal(out, np.roll(x, -1)))


def count_is_right(broken: int, seed: int) -> bool:
    """The fault shows only if a warp runs several steps ahead of another."""
    x, out = rng.integers(0, 9, (16, 128)).astype(np.int32), np.zeros(16, np.int32)
    run("count_warps", 16, 128, x, out, np.int32(broken), seed=seed)
    return bool(np.array_equal(out, x.sum(1)))


@pytest.mark.parametrize("is_right", [scan_is_right, reverse_is_right, neighbour_is_right, count_is_right])
def test_missing_barrier_is_seen(is_right: Any) -> None:
    assert all(is_right(0, seed) for seed in SEEDS)
    assert not any(is_right(1, seed) for seed in SEEDS[1:])


@pytest.mark.parametrize("seed", SEEDS)
def test_divergent_barrier_is_reported(seed: int) -> None:
    with pytest.raises(EmulationError, match="deadlock"):
        run("divergent", 1, 32, np.zeros(32, np.float32), seed=seed)
    assert scan_is_right(0, seed)  # the fault leaves nothing behind


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("how", "said"), [(1, "deadlock"), (2, "different operations"), (3, "different masks")])
def test_warp_operation_without_all_lanes_is_reported(seed: int, how: int, said: str) -> None:
    with pytest.raises(EmulationError, match=said):
        run("lanes_missing", 1, 32, np.zeros(32, np.float32), np.int32(how), seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_value_of_a_lane_that_left_is_undefined(seed: int) -> None:
    data = np.arange(32, dtype=np.float32)
    run("lanes_missing", 1, 32, data, np.int32(0), seed=seed)
    assert np.isnan(data[:16]).all()


FAULTS = ["misaligned", "null", "outside its array", "behind its dynamic", "shift", "more stack"]


@pytest.mark.parametrize("how", range(len(FAULTS)), ids=FAULTS)
def test_forbidden_access_is_reported(how: int) -> None:
    data = np.zeros(64, np.float32)
    with pytest.raises(EmulationError, match=FAULTS[how]):
        run("forbidden", 1, 32, data, np.int32(how), shared=64)


def below_the_stacks(how: int) -> tuple[str, bool]:
    """What a launch says in a thread with stacks of its own, and whether it wrote below them."""

    def launch() -> tuple[str, bool]:
        with pytest.raises(EmulationError) as caught:
            run("forbidden", 1, 32, np.zeros(64, np.float32), np.int32(how), shared=64)
        return str(caught.value), any(module._thread.stacks[mmap.PAGESIZE : module.SPARE_BYTES])

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(launch).result()


@pytest.mark.parametrize("how", range(len(FAULTS)), ids=FAULTS)
def test_nothing_is_written_below_the_stacks(how: int) -> None:
    """Fails if a kernel's frame is larger than a stack: on the lowest one it lay over objects of Python."""
    assert not below_the_stacks(how)[1]


def test_frame_that_leaps_below_the_stacks_is_reported() -> None:
    """Fails if a frame that leaves the mark at its stack's end whole goes unnoticed, or hits what is not the emulator's."""
    said, wrote = below_the_stacks(6)
    assert "thread (0,0,0): a thread needs more stack" in said
    assert wrote


def test_shared_memory_of_a_block_is_poisoned() -> None:
    out = np.zeros(8, np.float32)
    run("unwritten", 4, 1, out, shared=64)
    assert np.isnan(out).all()


@pytest.mark.parametrize(("grid", "block", "shared"), [(0, 32, 0), (1, 1025, 0), (1, 0, 0), (1, 32, 50_000)])
def test_launch_that_a_gpu_refuses(grid: int, block: int, shared: int) -> None:
    with pytest.raises(EmulationError, match="no GPU launches"):
        run("divergent", grid, block, np.zeros(32, np.float32), shared=shared)


@pytest.mark.parametrize("width", [3, np.int64(3), np.float32(3), np.zeros(1, np.int32)])
def test_arguments_of_another_type_are_refused(width: Any) -> None:
    x, out = np.zeros((4, 3), np.float32), np.zeros(4, np.float32)
    with pytest.raises(TypeError, match="NumPy scalar of type i4"):
        run("row_sum_shuffle", 1, 128, x, out, np.int32(4), width)
    with pytest.raises(TypeError, match="takes 4 arguments, got 3"):
        run("row_sum_shuffle", 1, 128, x, out, np.int32(4))


def test_source_that_does_not_compile(tmp_path: Path) -> None:
    (tmp_path / "bad.cu").write_text('extern "C" __global__ void bad(float* out) { out[0] = unknown; }\n')
    with pytest.raises(EmulationError, match="unknown"):
        EmulatedModule(tmp_path / "bad.cu")


def test_options_and_headers_make_new_modules(tmp_path: Path) -> None:
    """Fails if the cache hands out a module that was compiled from something else."""
    path = tmp_path / "number.cu"
    path.write_text('#include "number.cuh"\nextern "C" __global__ void number(int* out) { out[0] = VALUE + kMore; }\n')
    got = []
    for more, value in ((10, 1), (10, 2), (20, 2)):
        (tmp_path / "number.cuh").write_text(f"constexpr int kMore = {more};\n")
        out = np.zeros(1, np.int32)
        EmulatedModule(path, (f"-DVALUE={value}",)).get_function("number")((1,), (1,), (out,))
        got.append(int(out[0]))
    assert got == [11, 12, 22]


def test_threads_may_launch_at_once() -> None:
    """Fails if two launches of one module share their state."""
    results: list[bool] = []

    def work(seed: int) -> None:
        results.extend(scan_is_right(0, seed) for _ in range(30))

    workers = [threading.Thread(target=work, args=(seed,)) for seed in SEEDS]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert results == [True] * 120
