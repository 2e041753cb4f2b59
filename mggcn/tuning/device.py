"""What this machine's cores and memory do: mggcn's own kernels on operands of several sizes.

The best of several tries counts: what the machine does when nothing else runs on it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mggcn.backend.base import Epilogue
from mggcn.memory.units import free_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from mggcn.backend.base import KernelBackend

FOOTPRINTS: Final = tuple(2**k for k in (18, 20, 22, 23, 24, 25, 26, 28))
"""Bytes of the operands that are gathered from and copied, as far as the free memory allows."""
WIDE, NARROW, DEGREE = 128, 16, 24
"""Widths of the gathered rows, and nonzeros of a row of the sparse matrix."""
GATHERED: Final = 2**28
"""Bytes that one sparse product gathers: some 10 to 50 ms."""
GEMM: Final = (8192, 256, 256)
PRECISIONS: Final = ("fp32", "bf16", "fp64")
CALLS: Final = 5
SEED: Final = 271828


def device_table(
    backend_of: Callable[[int, str], KernelBackend], threads: int, seconds: float, report: Callable[[str], None]
) -> dict[str, Any]:
    """Return the [device] table of this machine's cores together, each figure measured for about `seconds`.

    backend_of: returns the CPU's kernels for a number of threads and a precision.
    """
    import torch

    footprints = [size for size in FOOTPRINTS if size <= free_bytes() // 8] or [FOOTPRINTS[0]]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        probe = Probe(backend_of(threads, "fp32"), seconds)
        report("rows gathered at random, by bytes of the operand")
        row_s, gather = probe.gather(footprints)
        report("passes over matrices")
        copy = [_digits(probe.copy(size)) for size in footprints]
        report("dense products and calls")
        gemm = {name: _digits(Probe(backend_of(threads, name), seconds).gemm()) for name in PRECISIONS}
        call_s = probe.call()
    finally:
        torch.set_num_threads(before)
    sizes = [float(size) for size in footprints]
    return {
        "kind": "cpu",
        "count": 1,
        "shared": True,
        "cores": threads,
        "memory_bytes": free_bytes(),
        "copy": [list(pair) for pair in zip(sizes, copy, strict=True)],
        "gather": [list(pair) for pair in zip(sizes, map(_digits, gather), strict=True)],
        "row_s": _digits(row_s),
        "call_s": _digits(call_s),
        "gemm": gemm,
    }


def fastest(function: Callable[[], None], seconds: float) -> float:
    """Return the seconds of the fastest of at least three calls, repeated for about `seconds`, after a warm-up."""
    function()
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - began < seconds:
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def _digits(value: float) -> float:
    return float(f"{value:.3g}")


@dataclass(frozen=True, slots=True)
class Probe:
    """Measurements through one backend, each lasting about `seconds`."""

    backend: KernelBackend
    seconds: float

    def gather(self, footprints: list[int]) -> tuple[float, list[float]]:
        """Return the seconds of a gathered row beside its bytes, and the rates of its bytes by footprint.

        Rows of two widths from an operand in the cache give the first: their times differ by their bytes alone.
        """
        wide, narrow = 4.0 * WIDE, 4.0 * NARROW
        wide_s, narrow_s = (self._gathered_row(footprints[0], width) for width in (WIDE, NARROW))
        by_bytes = (wide_s - narrow_s) / (wide - narrow)
        row_s = min(max(narrow_s - narrow * by_bytes, 0.0), 0.5 * wide_s)
        rates = [wide / (self._gathered_row(size, WIDE) - row_s) for size in footprints]
        # Where a disturbed try makes a row cheaper than its overhead, there is no rate: the least that a file may have.
        return row_s, [max(rate, 1.0) for rate in rates]

    def _gathered_row(self, footprint: int, width: int) -> float:
        """Seconds of a sparse product per nonzero, columns at random from an operand of `footprint` bytes."""
        columns = max(1, footprint // (4 * width))
        rows = GATHERED // (4 * width * DEGREE)
        indices = np.random.default_rng(SEED).integers(0, columns, rows * DEGREE).astype(np.int32)
        adj = self.backend.sparse(np.arange(rows + 1, dtype=np.int64) * DEGREE, indices, None)
        dense, out = self._matrix(columns, width), self._matrix(rows, width)
        return self._fastest(lambda: self._multiply(adj, dense, out)) / (rows * DEGREE)

    def copy(self, footprint: int) -> float:
        """Return bytes per second, read plus written, of a pass from one matrix to another, both `footprint` bytes."""
        rows = max(1, footprint // (2 * 4 * WIDE))
        source, out = self._matrix(rows, WIDE), self._matrix(rows, WIDE)
        return 2 * 4 * WIDE * rows / self._fastest(lambda: self.backend.finish(source, out, Epilogue()))

    def gemm(self) -> float:
        """Return FLOP per second of a dense product of the shape of a layer."""
        rows, inner, cols = GEMM
        a, b, out = self._matrix(rows, inner), self._matrix(inner, cols), self._matrix(rows, cols)
        return 2.0 * math.prod(GEMM) / self._fastest(lambda: self.backend.matmul(a, b, out))

    def call(self) -> float:
        """Return the seconds of a call with next to no work, the average of a sparse and a dense product."""
        adj = self.backend.sparse(np.array([0, 1], np.int64), np.array([0], np.int32), None)
        a, b, out = self._matrix(1, NARROW), self._matrix(NARROW, NARROW), self._matrix(1, NARROW)

        def run() -> None:
            for _ in range(CALLS):
                self._multiply(adj, a, out)
                self.backend.matmul(a, b, out)

        return self._fastest(run) / (2 * CALLS)

    def _fastest(self, function: Callable[[], None]) -> float:
        return fastest(function, self.seconds)

    def _multiply(self, adj: Any, dense: Tensor, out: Tensor) -> None:
        self.backend.spmm(adj, dense, out, accumulate=False, epilogue=None)

    def _matrix(self, rows: int, cols: int) -> Tensor:
        dtype = self.backend.dtype
        matrix = self.backend.allocate(rows * cols * dtype.itemsize).view(dtype).view(rows, cols)
        return matrix.fill_(1.0)
