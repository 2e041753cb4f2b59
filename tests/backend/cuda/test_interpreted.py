"""What Triton's interpreter does otherwise than a GPU is mended: tested by a kernel of each operation alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton has no wheel for this machine")

import triton
import triton.language as tl

from tests.backend.cuda.interpreted import in_order, kernels, read_as_tf32


def _multiply(a, b, out, N: tl.constexpr, precision: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's pointers
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at), input_precision=precision))


def _convert(x, out, N: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's pointers
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(x + at).to(out.dtype.element_ty))


def _add(x, out):  # type: ignore[no-untyped-def]  # Triton's pointers
    tl.atomic_add(out, tl.load(x + tl.program_id(0)))


def _interpreted(function):  # type: ignore[no-untyped-def]  # a kernel, which has no type
    kernels()  # mends
    return triton.runtime.interpreter.InterpretedFunction(function)


@pytest.mark.parametrize("precision", ["tf32", "ieee"])
def test_dot_reads_what_a_tensor_core_reads(precision: str) -> None:
    """Fails if float32 operands keep their 13 low bits in products of TF32, or lose them in others."""
    rng = np.random.default_rng(911)
    a, b = (torch.from_numpy(rng.normal(size=(16, 16)).astype(np.float32)) for _ in range(2))
    out = torch.empty(16, 16)
    _interpreted(_multiply)[(1,)](a, b, out, 16, precision)
    read = [torch.from_numpy(read_as_tf32(x.numpy())) if precision == "tf32" else x for x in (a, b)]
    torch.testing.assert_close(out.double(), read[0].double() @ read[1].double(), rtol=1e-6, atol=1e-6)
    assert not torch.allclose(read[0], a, rtol=1e-6) == (precision == "tf32")


def test_dot_of_bfloat16() -> None:
    """Fails if operands are multiplied as the integers that the interpreter keeps them as."""
    rng = np.random.default_rng(912)
    a, b = (torch.from_numpy(rng.normal(size=(16, 16))).bfloat16() for _ in range(2))
    out = torch.empty(16, 16)
    _interpreted(_multiply)[(1,)](a, b, out, 16, "ieee")
    torch.testing.assert_close(out.double(), a.double() @ b.double(), rtol=1e-6, atol=1e-6)


def test_conversion_to_bfloat16_and_back() -> None:
    """Fails if a number is cut off, a tie is not rounded to even, a carry is lost, or NaN becomes infinite."""
    bits = np.array([0x3F800000, 0x3F808000, 0x3F818000, 0x3F80FFFF, 0x3FFFFFFF, 0x7F7FFFFF, 0x7F800001, 0x00000001])
    x = torch.from_numpy(np.concatenate([bits, bits | 0x80000000]).astype(np.uint32).view(np.float32))
    out, back = torch.empty(16, dtype=torch.bfloat16), torch.empty(16)
    _interpreted(_convert)[(1,)](x, out, 16)
    _interpreted(_convert)[(1,)](out, back, 16)
    torch.testing.assert_close(out, x.bfloat16(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(back, x.bfloat16().float(), rtol=0, atol=0, equal_nan=True)


def test_triton_is_as_it_was_after_a_launch() -> None:
    """Fails if the mended functions stay in Triton's modules, where its compiler would meet them."""
    kernels()
    test_dot_of_bfloat16()
    assert isinstance(tl.sum, triton.JITFunction)
    assert isinstance(tl.standard._sum_combine, triton.JITFunction)


def test_blocks_run_in_other_orders() -> None:
    """Fails if a sum in the order in which blocks come has the same bits in all of them."""
    x, found = torch.from_numpy(np.random.default_rng(913).normal(size=64)), set()
    for order in (None, 1, 2, 3):
        out = torch.zeros(1, dtype=torch.float64)
        with in_order(None if order is None else np.random.default_rng(order), 64):
            _interpreted(_add)[(64,)](x, out)
        torch.testing.assert_close(out[0], x.sum())
        found.add(float(out))
    assert len(found) > 1
