"""What the stand-ins of other tests stand for: the real CuPy with the real NVRTC, and cuSPARSE's header and library."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from mggcn.backend.cuda import cusparse
from mggcn.backend.cuda.kernels import folder
from tests.backend.cases import RANDOM
from tests.backend.cuda.test_cusparse import FakeCusparse, made, sparse
from tests.cuda import cupys
from tests.cuda.test_compile import found_or_skip

pytestmark = pytest.mark.slow
NAMED = {
    **{
        "CUSPARSE_INDEX_32I": cusparse.INDEX_32,
        "CUSPARSE_ORDER_ROW": cusparse.ROW_MAJOR,
        "CUSPARSE_INDEX_BASE_ZERO": 0,
    },
    **{"CUSPARSE_OPERATION_NON_TRANSPOSE": 0, "CUSPARSE_SPMM_CSR_ALG2": cusparse.ALGORITHMS["alg2"]},
    **{"CUSPARSE_SPMM_CSR_ALG3": cusparse.ALGORITHMS["alg3"], "CUDA_R_32F": cusparse.TYPES[torch.float32]},
    **{"CUDA_R_64F": cusparse.TYPES[torch.float64], "CUDA_R_16BF": cusparse.TYPES[torch.bfloat16]},
}
"""Numbers that cusparse.py knows by heart."""
REFERENCE = type(ctypes.byref(ctypes.c_int()))


@pytest.fixture(params=cupys.CUDAS, ids=lambda cuda: f"cuda{cuda}")
def cupy(request: pytest.FixtureRequest) -> Path:
    return found_or_skip(cupys.find(request.param), f"CuPy for CUDA {request.param} (make .venv/cupys)")


@pytest.fixture
def headers(cupy: Path) -> str:
    return "".join(
        next(cupy.glob(f"nvidia/*/include/{name}")).read_text() for name in ("cusparse.h", "library_types.h")
    )


@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", ["F32", "F64", "BF16"])
def test_every_file_compiles_by_cupy(cupy: Path, dtype: str, tmp_path: Path) -> None:
    """Fails if CuPy takes other arguments, gives other than machine code of our kernels, or warns of a stream."""
    kinds = [f"{path.name}:{dtype}" for path in sorted(folder().glob("*.cu"))]
    answer = cupys.ask(cupy, tmp_path, kinds)
    assert answer["nvrtc"][0] == int(cupy.name)
    assert answer["kernels"] == dict.fromkeys(kinds, True)
    assert (answer["missing"], answer["stream"]) == ([], 4096)
    assert len(list(tmp_path.glob("mggcn-*.bin"))) == len(kinds)


def test_another_cupy_is_seen(cupy: Path, tmp_path: Path) -> None:
    """Fails if the answer does not depend on CuPy: here one whose compiler has another signature."""
    package = tmp_path / "cupy"
    package.mkdir()
    (tmp_path / "nvidia").symlink_to(cupy / "nvidia")
    (package / "__init__.py").write_text(
        f"import sys\nsys.path.insert(0, {str(cupy)!r})\ndel sys.modules['cupy']\nimport cupy\n"
        "def compile_using_nvrtc(source, options=(), arch=None): ...\n"
        "cupy.cuda.compiler.compile_using_nvrtc = compile_using_nvrtc\n"
    )
    with pytest.raises(RuntimeError, match="unexpected keyword argument 'filename'"):
        cupys.ask(tmp_path, tmp_path / "cache", ["rows.cu:F32"])


class Noting(FakeCusparse):
    """A library that notes with which types its functions were called."""

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[str, list[type]] = {}

    def __getattr__(self, name: str) -> Any:
        function = super().__getattr__(name)

        def noted(*args: Any) -> Any:
            self.given[name] = [type(arg) for arg in args]
            return function(*args)

        return noted if name.startswith("cusparse") else function


def declared(header: str, name: str) -> list[type]:
    """The types with which ctypes has to call a function: pointers may also be references."""
    found = re.search(rf"cusparseStatus_t CUSPARSEAPI\s+{name}\(([^)]*)\);", header)
    assert found is not None, f"cusparse.h declares no {name}"
    return [ctyped(part) for part in found[1].split(",")]


def ctyped(parameter: str) -> type:
    if "*" in parameter or re.search(r"(Handle|Descr|cudaStream)_t", parameter):
        return ctypes.c_void_p
    return ctypes.c_int64 if "int64_t" in parameter else ctypes.c_int


def called() -> dict[str, list[type]]:
    """What a product and the end of its descriptors call."""
    fake = Noting()
    products = made(fake, "alg3")  # type: ignore[arg-type]  # a stand-in
    n = RANDOM.adj.shape
    products.multiply(sparse(RANDOM, None), torch.ones(n[1], 8), torch.ones(n[0], 8), accumulate=False, epilogue=None)
    del products
    return fake.given


def unlike(header: str, given: dict[str, list[type]]) -> list[str]:
    """The functions that are called with other types than the header declares."""
    seen = {name: [ctypes.c_void_p if t is REFERENCE else t for t in types] for name, types in given.items()}
    return [name for name, types in seen.items() if types != declared(header, name)]


def test_cusparse_is_called_as_its_header_says(headers: str, cupy: Path) -> None:
    """Fails on a lost or swapped argument, an integer of another size, a renamed function or a renumbered constant."""
    given = called()
    assert {"cusparseSpMM", "cusparseSpMM_preprocess", "cusparseDestroyDnMat", "cusparseDestroy"} <= set(given)
    assert unlike(headers, given) == []
    values = {name: int(re.search(rf"\b{name}\s*=\s*(\d+)", headers)[1]) for name in NAMED}  # type: ignore[index]  # found
    assert values == NAMED
    library = next(cupy.glob(f"nvidia/*/lib/{cusparse.NAME}")).read_bytes()
    assert [name for name in given if b"\0" + name.encode() + b"\0" not in library] == []


def test_another_header_is_seen(headers: str) -> None:
    """Fails if the comparison with the header finds nothing to compare."""
    given = called()
    assert unlike(headers.replace("cusparseSpMM(", "cusparseSpMM(int device, "), given) == ["cusparseSpMM"]
    assert unlike(re.sub(r"int64_t(\s+ld)\b", r"int\1", headers), given) == ["cusparseCreateDnMat"]
    with pytest.raises(AssertionError, match="no cusparseDnMatSetValues"):
        unlike(headers.replace("cusparseDnMatSetValues(", "cusparseDnMatSetPointer("), given)
