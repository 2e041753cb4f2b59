"""What lies behind the rows of a buffer is nobody's: it may be NaN, also for a library that reads whole rows."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mggcn import native
from mggcn.assemble.rank import Rank
from mggcn.backend.cpu import machine as cpu_machine
from mggcn.config import Config
from mggcn.memory.arena import Placement
from mggcn.train import runtime as runtime_module
from tests.graphs import make_graph, on_ranks, pattern
from tests.train.poisoned import Poisoned
from tests.train.test_exact import config_of

PRECISIONS = ("fp32", "fp64", "mixed", "bf16")
STRATEGIES = ("broadcast", "halo", "slice", "delayed-0", "delayed-1")
NETWORKS: tuple[dict[str, Any], ...] = (
    {"hidden": (33, 7)},
    {"hidden": (33, 7), "dropout": 0.5, "input_dropout": 0.5},
    {"hidden": (7, 33), "dropout": 0.5, "input_dropout": 0.5},
    {"hidden": (7,), "kind": "mlp", "input_dropout": 0.5},
)
"""Rows that are no multiple of 32 numbers, nor of a cache line in any type; products first and aggregation first."""
AMX = "vendor_id : GenuineIntel\nflags : fpu avx2 fma avx512f avx512_bf16 amx_bf16 amx_tile\n"
PRODUCTS = ("mm", "addmm", "addmm_", "bmm", "matmul", "mv", "addmv", "addmv_")


class ReadsWholeRows(TorchDispatchMode):
    """A library whose products multiply what lies behind the rows of their left operand by zero, as oneDNN's with AMX do.

    Of the calling thread. It refuses bfloat16, for which such a library needs memory that no plan knows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in PRODUCTS:
            left = args[1] if name.startswith("add") else args[0]
            assert left.dtype != torch.bfloat16
            self.calls += 1
            result.add_(behind_rows(left).to(result.dtype))
        return result


def behind_rows(a: torch.Tensor) -> torch.Tensor:
    """Zero times the sum of what lies behind each row of a matrix, (rows, 1)."""
    padding = a.stride(0) - a.shape[1] if a.stride(1) == 1 else 0
    if padding <= 0 or not a.shape[0]:
        return torch.zeros(a.shape[0], 1, dtype=a.dtype)
    # The last row may end where memory ends.
    rows = a.as_strided((a.shape[0] - 1, padding), a.stride(), a.storage_offset() + a.shape[1])
    return torch.nn.functional.pad((0 * rows).sum(1, keepdim=True), (0, 0, 0, 1))


@pytest.fixture(params=["own", "torch"])
def way(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A processor that says it has AMX, with dense kernels of our own, or none of them so that torch multiplies."""
    (tmp_path / "cpuinfo").write_text(AMX)
    monkeypatch.setattr(cpu_machine, "CPUINFO", tmp_path / "cpuinfo")
    if request.param == "torch":
        monkeypatch.setattr(native, "dense_isa", lambda: "baseline")
    remembered = [found for found in vars(cpu_machine).values() if hasattr(found, "cache_clear")]
    for function in remembered:
        function.cache_clear()
    yield request.param if native.dense_isa() != "baseline" else "torch"
    for function in remembered:
        function.cache_clear()


def poison_behind(a: torch.Tensor) -> torch.Tensor:
    """Fill what lies behind the rows of a matrix with NaN."""
    if a.is_floating_point() and a.stride(0) > a.shape[1] and a.shape[0]:
        a.as_strided((a.shape[0], a.stride(0) - a.shape[1]), a.stride(), a.storage_offset() + a.shape[1]).fill_(
            math.nan
        )
    return a


def fill_arena(rank: Rank, byte: int) -> None:
    """Fill all buffers of a rank with one byte, the padding of their rows too; 255 makes NaN of every type."""
    buffer = next(iter(rank.trainer.runtime.programs["train"].views.values()))
    torch.empty(0, dtype=torch.uint8).set_(buffer.untyped_storage()).fill_(byte)  # type: ignore[call-overload]


def results(config: Config, sparse: bool, *, poisoned: bool) -> tuple[list[torch.Tensor], int]:
    """Signals, gradients and weights of an evaluation and some epochs, and how many products the library made.

    poisoned: with NaN behind all rows, before anything is written to them.
    """
    graph = make_graph(pattern("directed", 41, 6), num_features=38, num_classes=7, sparse=sparse, seed=8)

    def body(rank: Rank) -> tuple[list[torch.Tensor], int]:
        runtime, found, library = rank.trainer.runtime, [], ReadsWholeRows()
        if poisoned and runtime.inputs.owned.dense is not None:
            poison_behind(runtime.inputs.owned.dense)
        with library:
            if config.run.delay == "0":  # else messages of earlier epochs are part of a program
                for program in ("evaluate", "train"):
                    runtime.signals.zero_()
                    fill_arena(rank, 255 if poisoned else 0)
                    (Poisoned(runtime) if poisoned else runtime).run(runtime.programs[program])
                    found += [runtime.signals.clone(), runtime.weights.grad.clone()]
            for epoch in range(3):
                fill_arena(rank, 255 if poisoned else 0)
                found.append(torch.tensor(rank.trainer.step(epoch)))
        return [*found, runtime.weights.flat.clone()], library.calls

    ranks = on_ranks(config, graph, body)
    return [tensor for tensors, _ in ranks for tensor in tensors], sum(calls for _, calls in ranks)


@pytest.mark.covering(0, rest=1)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_result_depends_on_what_lies_behind_rows(
    strategy: str,
    precision: Literal["fp32", "fp64", "mixed", "bf16"],
    way: str,
    monkeypatch: pytest.MonkeyPatch,
    sample: Any,
) -> None:
    """Fails if a product, an epilogue or a message takes in the padding of rows, in any type and on any number of ranks."""
    view, (name, _, delay) = runtime_module.buffer_view, strategy.partition("-")

    def poisoned_view(arena: torch.Tensor, placement: Placement) -> torch.Tensor:
        return poison_behind(view(arena, placement))

    offset = STRATEGIES.index(strategy) + PRECISIONS.index(precision)
    places = enumerate(itertools.product(NETWORKS, (1, 2, 3)))
    # Of the others, another precision or strategy has each.
    for number, (network, ranks) in sample((place for place in places if (place[0] + offset) % 2 == 0), 2):
        sparse = bool((number + offset) % 4)
        config = config_of(ranks, strategy=name, **network)
        run = dataclasses.replace(config.run, precision=precision, delay=delay if ranks > 1 and delay else "0")
        config = dataclasses.replace(config, run=run)
        expected, _ = results(config, sparse, poisoned=False)
        with monkeypatch.context() as patched:
            patched.setattr(runtime_module, "buffer_view", poisoned_view)
            found, calls = results(config, sparse, poisoned=True)
        assert (calls > 0) == (way == "torch")
        for tensor, other in zip(found, expected, strict=True):
            assert tensor.isfinite().all()
            assert torch.equal(tensor, other)


def test_the_stand_in_shows_what_is_read_behind_rows() -> None:
    """Fails if the stand-in has gone blind: it must turn NaN behind a row into NaN in the product, and refuse bfloat16."""
    whole = torch.full((70, 32), math.nan)
    whole[:, :7] = 1
    rows, b = whole[:, :7], torch.ones(7, 5)
    with ReadsWholeRows() as library:
        products = [rows @ b, torch.mm(rows, b, out=torch.zeros(70, 5)), torch.zeros(70, 5).addmm_(rows, b)]
        assert all(product[:-1].isnan().all() for product in products)
        assert library.calls == len(products)
        with pytest.raises(AssertionError):
            rows.bfloat16() @ b.bfloat16()
