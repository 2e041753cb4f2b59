"""Dense products on the CPU whose arrays end where memory ends: a read or write behind one kills this process.

    python -m tests.backend.cpu.gemm_guard_pages [COUNT]

Run by backend/cpu/test_gemm.py in a process of its own; COUNT: how many of the checks, drawn at random, if not all.
"""

from __future__ import annotations

import itertools

import torch

from mggcn import native
from mggcn.backend.cpu.gemm import CpuGemm
from mggcn.backend.cpu.memory import Workspace
from mggcn.backend.cpu.sizes import WindowSum, window_bytes
from mggcn.backend.cpu.windows import Windows
from mggcn.backend.team import Team
from tests.backend.cpu import wide_tiles
from tests.backend.cpu.guard_pages import chosen, guarded


class GuardedWorkspace(Workspace):
    """Gives memory of exactly the size asked for, in whole cache lines, before a page that nobody may touch."""

    def take(self, nbytes: int) -> torch.Tensor:
        self._memory = guarded(torch.zeros(nbytes, dtype=torch.uint8))
        return self._memory


def in_windows(gemm: CpuGemm, windows: Windows, h: torch.Tensor, g: torch.Tensor, out: torch.Tensor) -> None:
    """Sum h^T g over windows of 64 rows, each in memory of its own, as is what sums keep between them."""
    rows, real = h.shape[0], max(h.itemsize, 4)
    kept = window_bytes([WindowSum(h.shape[1], g.shape[1], rows, h.itemsize, real)], 0)
    windows.begin(rows, guarded(torch.zeros(kept, dtype=torch.uint8)))
    for first in range(0, rows, 64):
        some = slice(first, first + 64)
        windows.move(first, h[some].shape[0])
        gemm.multiply(guarded(h[some]).t(), guarded(g[some]), out, accumulate=False)
    windows.end(complete=True)


def main() -> None:
    native.kernel = wide_tiles.kernel
    sizes = ((1, 1, 1), (9, 5, 41), (67, 130, 17), (300, 24, 150), (1500, 260, 3))
    for dtype, isa in chosen(itertools.product((torch.float32, torch.float64, torch.bfloat16), wide_tiles.ISAS)):
        real = torch.float64 if dtype == torch.float64 else torch.float32
        windows = Windows()
        gemm = CpuGemm("own", Team(2), isa, GuardedWorkspace(), windows=windows)
        for rows, d, e in sizes:
            generator = torch.Generator().manual_seed(rows)
            h, w, g = (
                guarded(torch.randn(*shape, generator=generator).to(dtype)) for shape in ((rows, d), (d, e), (rows, e))
            )
            for a, b, kind in ((h, w, dtype), (g, w.t(), dtype), (h.t(), g, real)):
                out = guarded(torch.zeros(a.shape[0], b.shape[1], dtype=kind))
                gemm.multiply(a, b, out, accumulate=False)
                torch.testing.assert_close(out.double(), a.double() @ b.double(), rtol=1e-2, atol=0.3)
            again = torch.empty_like(out)
            in_windows(gemm, windows, h, g, again)
            assert torch.equal(again, out)


if __name__ == "__main__":
    main()
