"""The sequence of cuSPARSE calls, against a library of the same C interface that multiplies on the CPU."""

from __future__ import annotations

import ctypes
import gc
from collections import Counter
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from mggcn.backend.base import Epilogue, Sparse
from mggcn.backend.cuda.cusparse import Algorithm, CusparseSpmm, Library
from mggcn.backend.cuda.sizes import cusparse_bytes
from mggcn.errors import BackendError
from tests.backend.cases import BATTERY, NAMES, Case

DTYPES = {0: torch.float32, 1: torch.float64, 14: torch.bfloat16}
BUFFER_BYTES = 640


class FakeCusparse:
    """Functions of libcusparse by name: handles are numbers, descriptors tuples of what they were made with."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.alive: dict[int, Any] = {}
        self.prepared: dict[int, int] = {}
        self.status = 0

    def __getattr__(self, name: str) -> Any:
        def function(*args: Any) -> int:
            self.calls.append(name)
            if not self.status:
                getattr(self, f"_{name.removeprefix('cusparse')}")(*args)
            return self.status

        return function

    def _made(self, made: Any, what: Any) -> None:
        made._obj.value = 1000 + len(self.calls)
        self.alive[made._obj.value] = what

    def _Create(self, made: Any) -> None:  # noqa: N802
        self._made(made, "handle")

    def _Destroy(self, descriptor: Any) -> None:  # noqa: N802
        del self.alive[descriptor.value]

    _DestroySpMat = _DestroyDnMat = _Destroy

    def _SetStream(self, handle: Any, stream: Any) -> None:  # noqa: N802
        assert (self.alive[handle.value], stream.value) == ("handle", 77)

    def _CreateCsr(self, made: Any, *args: Any) -> None:  # noqa: N802
        rows, cols, nnz, offsets, indices, values, *kinds = (a.value for a in args)
        assert kinds[:3] == [2, 2, 0]
        self._made(made, (rows, cols, nnz, offsets, indices, values, DTYPES[kinds[3]]))

    def _CreateDnMat(self, made: Any, *args: Any) -> None:  # noqa: N802
        rows, cols, ld, values, kind, order = (a.value for a in args)
        assert order == 2
        self._made(made, [rows, cols, ld, values, DTYPES[kind]])

    def _DnMatSetValues(self, descriptor: Any, values: Any) -> None:  # noqa: N802
        self.alive[descriptor.value][3] = values.value

    def _SpMM_bufferSize(self, *args: Any) -> None:  # noqa: N802
        args[-1]._obj.value = BUFFER_BYTES

    def _SpMM_preprocess(self, *args: Any) -> None:  # noqa: N802
        self.prepared[args[4].value] = args[-1].value

    def _SpMM(self, handle: Any, op_a: Any, op_b: Any, alpha: Any, *rest: Any) -> None:  # noqa: N802
        csr, h, beta, out, compute, algorithm, buffer = rest
        assert (op_a.value, op_b.value, alpha._obj.value) == (0, 0, 1.0)
        assert algorithm.value == (12 if csr.value in self.prepared else 6)
        assert self.prepared.get(csr.value, buffer.value) == buffer.value
        rows, cols, nnz, offsets, indices, values, dtype = self.alive[csr.value]
        assert DTYPES[compute.value] == (torch.float64 if dtype == torch.float64 else torch.float32)
        counts = ((values, nnz, dtype), (indices, nnz, torch.int32), (offsets, rows + 1, torch.int32))
        parts = tuple(_at(*array).double().numpy() for array in counts)
        dense = torch.from_numpy(sp.csr_matrix(parts, (rows, cols)).toarray())
        result = _matrix(self.alive[out.value])
        product = dense @ _matrix(self.alive[h.value]).double()
        result.copy_(product + (result.double() if beta._obj.value else 0))


def _at(address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(address), dtype=dtype)


def _matrix(what: Any) -> torch.Tensor:
    rows, cols, ld, values, dtype = what
    return _at(values, (rows - 1) * ld + cols, dtype).as_strided((rows, cols), (ld, 1))


def allocate(nbytes: int) -> torch.Tensor:
    return torch.full((nbytes,), 255, dtype=torch.uint8)


def finish(z: torch.Tensor, out: torch.Tensor, epilogue: Epilogue) -> None:
    assert epilogue.relu
    out.copy_(z.relu())


def made(fake: FakeCusparse, algorithm: Algorithm = "alg3") -> CusparseSpmm:
    return CusparseSpmm(Library(lambda: 77, lambda name: fake), allocate, finish, algorithm)


def sparse(case: Case, values: torch.dtype | None) -> Sparse:
    m = case.adj
    weights = None if values is None else torch.from_numpy(m.data).to(values)
    return Sparse(torch.from_numpy(m.indptr.astype(np.int64)), torch.from_numpy(m.indices), weights, None)


@pytest.mark.parametrize("case", BATTERY, **NAMES)
@pytest.mark.parametrize("algorithm", ["alg2", "alg3"])
def test_products_are_right(case: Case, algorithm: Algorithm) -> None:
    """Fails on swapped arguments, a wrong type or leading dimension, a lost accumulate, or stale addresses."""
    spmm = made(FakeCusparse(), algorithm)
    for dtype, weighted in ((torch.float32, True), (torch.float64, False), (torch.bfloat16, False)):
        adj = sparse(case, dtype if weighted else None)
        dense = torch.from_numpy(case.adj.toarray() if weighted else (case.adj.toarray() != 0).astype(float))
        for seed, accumulate in ((3, False), (4, True), (5, False)):
            random = torch.Generator().manual_seed(seed)
            h = torch.randn(dense.shape[1], 24, generator=random).to(dtype)[:, :19]
            out = torch.randn(dense.shape[0], 19, generator=random).to(dtype)
            expected = dense @ h.double() + (out.double() if accumulate else 0)
            spmm.multiply(adj, h, out, accumulate=accumulate, epilogue=Epilogue(relu=True) if seed == 5 else None)
            expected = expected.relu() if seed == 5 else expected
            torch.testing.assert_close(out.double(), expected.to(dtype).double(), rtol=1e-5, atol=1e-5)


def test_everything_is_made_once_and_destroyed() -> None:
    """Fails if a repeated product allocates or prepares anew, widths share a descriptor, or something is leaked."""
    fake = FakeCusparse()
    spmm = made(fake)
    adj = sparse(BATTERY[2], None)
    for cols in (8, 16, 8, 16, 8):
        out = torch.empty(37, cols, dtype=torch.float32)
        spmm.multiply(adj, torch.ones(37, cols), out, accumulate=False, epilogue=None)
    calls = Counter(fake.calls)
    assert (calls["cusparseSpMM"], calls["cusparseSpMM_preprocess"], calls["cusparseSpMM_bufferSize"]) == (5, 2, 2)
    assert (calls["cusparseCreateCsr"], calls["cusparseCreateDnMat"], calls["cusparseCreate"]) == (2, 4, 1)
    assert len(fake.prepared) == 2
    del spmm
    gc.collect()
    assert fake.alive == {}
    assert fake.calls[-1] == "cusparseDestroy"


def test_a_failure_names_the_call() -> None:
    """Fails if a status is ignored, so that a product that was not computed is trained on."""
    fake = FakeCusparse()
    spmm = made(fake)
    h, out = torch.ones(37, 8), torch.empty(37, 8)
    spmm.multiply(sparse(BATTERY[0], None), h, out, accumulate=False, epilogue=None)
    fake.status = 3
    with pytest.raises(BackendError, match=r"cusparse\w+ failed with cuSPARSE status 3"):
        spmm.multiply(sparse(BATTERY[0], None), h, out, accumulate=False, epilogue=None)
    fake.status = 0


def test_refusals() -> None:
    """Fails if edge values would be rounded to bfloat16 silently, or a missing library is a traceback."""
    h, out = torch.ones(37, 8, dtype=torch.bfloat16), torch.empty(37, 8, dtype=torch.bfloat16)
    with pytest.raises(BackendError, match="use --spmm own"):
        made(FakeCusparse()).multiply(sparse(BATTERY[0], torch.float32), h, out, accumulate=False, epilogue=None)

    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    with pytest.raises(BackendError, match=r"needs libcusparse\.so\.12"):
        Library(lambda: 77, missing)


def test_a_matrix_with_values_needs_no_ones() -> None:
    """Fails if the plan counts ones that only a matrix without values needs, or forgets the 32-bit row pointers."""
    assert cusparse_bytes(200, 5000, True, 4) == 1024
    assert cusparse_bytes(200, 5000, False, 4) == 1024 + 20480
