"""torch's process-wide switches of float32 products: consistent while a run trains, and given back when it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from mggcn.assemble.plan import dense_products
from mggcn.backend.cuda.products import float32_products
from mggcn.comm.base import Communicator
from mggcn.config import Config, RunConfig
from mggcn.runs.local import on_local_ranks, on_threads

MATMUL = torch.backends.cuda.matmul
NEWER = hasattr(MATMUL, "fp32_precision")


def readings() -> dict[str, Any]:
    """What torch.compile and other libraries read; "raises" for a reader that the switches contradict."""

    def read(reader: Callable[[], Any]) -> Any:
        try:
            return reader()
        except RuntimeError:
            return "raises"

    readers: dict[str, Callable[[], Any]] = {
        "precision": torch.get_float32_matmul_precision,
        "allow_tf32": lambda: MATMUL.allow_tf32,
        "bf16": lambda: MATMUL.allow_bf16_reduced_precision_reduction,
    }
    if NEWER:
        readers["cuda"] = lambda: MATMUL.fp32_precision
        readers["cpu"] = lambda: torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    return {name: read(reader) for name, reader in readers.items()}


@pytest.fixture(autouse=True)
def torch_as_it_was() -> Iterator[None]:
    with float32_products(tf32=False):
        yield


def medium() -> None:
    torch.set_float32_matmul_precision("medium")


def newer_name() -> None:
    if NEWER:
        MATMUL.fp32_precision = "tf32"


def bf16_sums() -> None:
    MATMUL.allow_bf16_reduced_precision_reduction = True


@pytest.mark.parametrize("chosen", [medium, newer_name, bf16_sums])
@pytest.mark.parametrize("tf32", [True, False])
def test_switches_are_readable_during_a_run_and_as_before_after_it(chosen: Callable[[], None], tf32: bool) -> None:
    """Fails if torch.compile beside a run meets switches that contradict each other, or the user's choice is lost."""
    chosen()
    before = readings()
    with float32_products(tf32=tf32):
        found = readings()
        assert (found["precision"], found["allow_tf32"], found["bf16"]) == ("high" if tf32 else "highest", tf32, False)
    assert readings() == before


@pytest.mark.parametrize(("precision", "allowed"), [("tf32", True), ("fp32", False), ("bf16", False)])
@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_of_a_gpu_leave_the_process_as_it_was(precision: Any, allowed: bool, ranks: int) -> None:
    """Fails if a run does not multiply as run.precision says, or leaves that behind, also after an error."""
    transport: Any = "threads" if ranks > 1 else "single"
    config = Config(run=RunConfig(device="cuda", precision=precision, ranks=ranks, transport=transport))
    medium()
    before, seen = readings(), []

    def body(comm: Communicator) -> None:
        comm.barrier()
        seen.append(readings()["allow_tf32"])
        comm.barrier()
        if comm.rank == ranks - 1:
            raise ArithmeticError("the loss is not finite")

    with pytest.raises(ArithmeticError, match="not finite"):
        on_local_ranks(config, body)
    assert seen == [allowed] * ranks
    assert readings() == before


def test_who_multiplies_by_himself_keeps_his_switches() -> None:
    """Fails if ranks of mggcn.nn, whose modules are the user's, or a run on CPUs touches torch's switches."""
    medium()
    before = readings()
    gpu = Config(run=RunConfig(device="cuda", precision="fp32", transport="single"))
    assert on_threads(gpu, lambda comm: readings()) == [before]
    with dense_products(Config()):
        assert readings() == before


@pytest.mark.cuda
def test_the_switch_reaches_the_products() -> None:
    """Fails if TF32 is not used when allowed, or used when not: its 10 bits of mantissa show."""
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("TF32 came with compute capability 8.0")
    a, b = torch.rand(1024, 64, device="cuda"), torch.rand(64, 1024, device="cuda")
    exact = a.double() @ b.double()
    errors = {}
    for tf32 in (False, True):
        with float32_products(tf32=tf32):
            errors[tf32] = float(((a @ b) / exact - 1).abs().max())
    assert errors[False] < 5e-6 < 2e-5 < errors[True]
