"""A kernel that the package does not have, in the place of the CPU's sparse product: it passes the battery."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mggcn.backend.base import Epilogue, KernelBackend, Sparse
from mggcn.backend.cpu.backend import CpuBackend
from tests.backend.cases import BATTERY, NAMES, RANDOM, Case, host, tolerance
from tests.backend.test_spmm import PARTS, epilogue_of, multiply

SOURCE = """
// spmm_plain: out[v, :] (+)= sum over e in row v of values[e] * dense[indices[e], :].
// in    indptr int64 [V+1], indices int32 [nnz], values double [nnz] or null (ones), dense double [N, D], leading ld
// out   double [V, D], leading ld_out; accumulate != 0 adds to it. One thread, no atomics.
extern "C" void spmm_plain(const long long* indptr, const int* indices, const double* values, const double* dense,
                           double* out, long long rows, long long cols, long long ld, long long ld_out, int accumulate) {
  for (long long v = 0; v < rows; ++v)
    for (long long d = 0; d < cols; ++d) {
      double sum = accumulate ? out[v * ld_out + d] : 0.0;
      for (long long e = indptr[v]; e < indptr[v + 1]; ++e) sum += (values ? values[e] : 1.0) * dense[indices[e] * ld + d];
      out[v * ld_out + d] = sum;
    }
}
"""


class WithOwnSpmm:
    """The CPU's kernels in float64 with another sparse product."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._inner = CpuBackend(torch.float64, 1)
        self._spmm = library.spmm_plain

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def spmm(self, adj: Sparse, h: Tensor, out: Tensor, *, accumulate: bool, epilogue: Epilogue | None) -> None:
        addresses = [t if t is None else t.data_ptr() for t in (adj.indptr, adj.indices, adj.values, h, out)]
        sizes = [adj.num_rows, out.shape[1], h.stride(0), out.stride(0)]
        self._spmm(*map(ctypes.c_void_p, addresses), *map(ctypes.c_longlong, sizes), int(accumulate))
        if epilogue is not None:
            self.finish(out, out, epilogue)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> KernelBackend:
    folder: Path = tmp_path_factory.mktemp("kernel")
    (folder / "spmm_plain.cpp").write_text(SOURCE)
    compiler = shutil.which("c++") or "g++"
    command = [compiler, "-O2", "-shared", "-fPIC", "-o", folder / "own.so", folder / "spmm_plain.cpp"]
    subprocess.run(command, check=True)
    return WithOwnSpmm(ctypes.CDLL(str(folder / "own.so")))


@pytest.mark.parametrize("case", BATTERY, **NAMES)
def test_the_battery_holds(own: KernelBackend, case: Case) -> None:
    """Fails if the battery needs more of a kernel than the contract says."""
    for cols, weighted, accumulate in itertools.product((1, 7, 40), (False, True), (False, True)):
        out, expected = multiply(own, case, cols, weighted, accumulate=accumulate)
        np.testing.assert_allclose(host(out), expected, **tolerance(own))


def test_its_epilogue_holds(own: KernelBackend) -> None:
    """Fails if an epilogue cannot be left to the backend's own pass over the rows."""
    for cols in (8, 41):
        epilogue = epilogue_of(own, PARTS, RANDOM.adj.shape[0], cols)
        out, expected = multiply(own, RANDOM, cols, True, epilogue=epilogue)
        np.testing.assert_allclose(host(out), expected, rtol=5e-5, atol=1e-12)
