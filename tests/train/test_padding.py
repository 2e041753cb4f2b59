"""What lies behind the rows of a buffer is nobody's: it may be NaN, also for a library that reads whole rows."""

from __future__ import annotations

import dataclasses
import itertools
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from mggcn import native
from mggcn.assemble import Rank
from mggcn.backend import cpu_gemm, cpu_machine
from mggcn.config import Config
from mggcn.train.runtime import Poisoned
from tests.graphs import make_graph, on_ranks, pattern
from tests.train.test_exact import STRATEGIES, config_of

HIDDEN = (33, 7)
"""Rows that are no multiple of 32 numbers, nor of a cache line in any type."""
AMX = "model name : A Processor\nflags : fpu avx2 fma avx512f avx512_bf16 amx_bf16 amx_tile\n"


def with_padding(a: torch.Tensor) -> torch.Tensor:
    """What is added to each row of a product by a library that multiplies what lies behind the rows of `a` by zero."""
    padding = a.stride(0) - a.shape[1] if a.stride(1) == 1 else 0
    if padding <= 0 or not a.shape[0]:
        return torch.zeros(a.shape[0], 1, dtype=a.dtype)
    # The last row may end where memory ends.
    rows = a.as_strided((a.shape[0] - 1, padding), a.stride(), a.storage_offset() + a.shape[1])
    return torch.nn.functional.pad((0 * rows).sum(1, keepdim=True), (0, 0, 0, 1))


class ReadsWholeRows(types.ModuleType):
    """torch, with a matrix product that reads whole padded rows, as oneDNN's with AMX does."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def mm(self, a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        torch.mm(a, b, out=out)
        return out.add_(with_padding(a).to(out.dtype))


@pytest.fixture(params=["own", "torch"])
def library(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ReadsWholeRows]:
    """The stand-in, on a processor that says it has AMX, with kernels of our own or (torch) none but the baseline."""
    stand_in, addmm = ReadsWholeRows(), torch.Tensor.addmm_

    def adding(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        stand_in.calls += 1
        return addmm(out, a, b).add_(with_padding(a).to(out.dtype))

    monkeypatch.setattr(cpu_gemm, "torch", stand_in)
    monkeypatch.setattr(torch.Tensor, "addmm_", adding)
    (tmp_path / "cpuinfo").write_text(AMX)
    monkeypatch.setattr(cpu_machine, "CPUINFO", tmp_path / "cpuinfo")
    if request.param == "torch":
        monkeypatch.setattr(native, "dense_isa", lambda: "baseline")
    remembered = [found for found in vars(cpu_machine).values() if hasattr(found, "cache_clear")]
    for function in remembered:
        function.cache_clear()
    yield stand_in
    for function in remembered:
        function.cache_clear()
    assert (stand_in.calls > 0) == (native.dense_isa() == "baseline")


def fill_arena(rank: Rank, byte: int) -> None:
    """Fill all buffers of a rank with one byte, the padding of their rows too; 255 makes NaN of every type."""
    buffer = next(iter(rank.trainer.runtime.views["train"].values()))
    torch.empty(0, dtype=torch.uint8).set_(buffer.untyped_storage()).fill_(byte)  # type: ignore[call-overload]


def results(config: Config, *, poisoned: bool) -> list[torch.Tensor]:
    """Signals and gradients of an evaluation and an epoch; poisoned: with NaN behind all rows before they are written."""
    graph = make_graph(pattern("directed", 41, 6), num_features=11, num_classes=7, sparse=False, weighted=False, seed=8)

    def body(rank: Rank) -> list[torch.Tensor]:
        runtime = rank.trainer.runtime
        runner = Poisoned(runtime) if poisoned else runtime
        found = []
        for program in (rank.plan.evaluate, rank.plan.train):
            runtime.signals.zero_()
            fill_arena(rank, 255 if poisoned else 0)
            runner.run(program)
            found += [runtime.signals.clone(), runtime.weights.grad.clone()]
        return found

    return [tensor for rank in on_ranks(config, graph, body) for tensor in rank]


@pytest.mark.parametrize("precision", ["fp32", "fp64", "bf16"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_result_depends_on_what_lies_behind_rows(
    strategy: str, precision: Literal["fp32", "fp64", "bf16"], library: ReadsWholeRows
) -> None:
    """Fails if a product, an epilogue or a message takes in the padding of rows, in any type and on any number of ranks."""
    for ranks, p in itertools.product((1, 2, 3), (0.0, 0.5)):
        config = config_of(ranks, strategy=strategy, hidden=HIDDEN, dropout=p, input_dropout=p)
        config = dataclasses.replace(config, run=dataclasses.replace(config.run, precision=precision))
        for found, expected in zip(results(config, poisoned=True), results(config, poisoned=False), strict=True):
            assert found.isfinite().all()
            assert torch.equal(found, expected)


def test_the_stand_in_shows_what_is_read_behind_rows(library: ReadsWholeRows) -> None:
    """Fails if the stand-in has gone blind: it must turn NaN behind a row into NaN in the product."""
    whole = torch.full((70, 32), float("nan"))
    whole[:, :7] = 1
    out = torch.zeros(70, 5)
    library.mm(whole[:, :7], torch.ones(7, 5), out=out)
    assert out[:-1].isnan().all()
    assert out.zero_().addmm_(whole[:, :7], torch.ones(7, 5))[:-1].isnan().all()
    library.calls = int(native.dense_isa() == "baseline")
