"""What parts measure with: the gather kernel, operands, budgets, and rows about what failed."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import gpu_lab
import numpy as np
import pytest
import torch
from gpu_lab import Lab, OutOfTimeError, Settings, attempt

from tests.emulator.module import EmulatedModule

GATHER = Path(gpu_lab.__file__).with_name("gather.cu")


@pytest.mark.parametrize("seed", [0, 71, 803])
@pytest.mark.parametrize("vectors", [1, 3, 40])
def test_gather_sums_the_rows_of_an_index(seed: int, vectors: int) -> None:
    """Fails on a wrong row, lane or last block."""
    groups, degree = 19, 16
    generator = torch.Generator().manual_seed(6113)
    dense = torch.randn(57, 4 * vectors, generator=generator)
    index = torch.randint(57, (groups * degree,), dtype=torch.int32, generator=generator)
    out = torch.full((groups + 1, 4 * vectors), 7.0)
    addresses = [np.uint64(t.data_ptr()) for t in (index, dense, out)]
    kernel = EmulatedModule(GATHER, (), seed).get_function("gather")
    grid = (-(-groups * vectors // 128),)
    kernel(grid, (128,), (*addresses, np.int64(groups), np.int32(degree), np.int32(vectors)), shared_mem=0)
    expected = dense[index.long()].view(groups, degree, -1).double().sum(1)
    torch.testing.assert_close(out[:groups].double(), expected, rtol=1e-5, atol=1e-5)
    assert (out[groups] == 7).all()


def lab_of(toy: Settings, **changes: float) -> tuple[Lab, io.StringIO]:
    log = io.StringIO()
    return Lab(dataclasses.replace(toy, **changes), log), log


def test_operands_are_padded_and_rotate(toy: Settings) -> None:
    """Fails if rows are not padded as planned buffers are, or small operands would stay in the cache."""
    lab, _ = lab_of(toy)
    h = lab.random(5, 41)
    assert (h.shape, h.stride()) == ((5, 41), (48, 1))
    assert not torch.equal(h, lab.random(5, 41))
    l2 = lab.device.traits.l2_bytes
    assert [lab.copies(n) for n in (l2 // 2, 3 * l2, 1)] == [6, 1, gpu_lab.MAX_COPIES]


def test_every_call_is_timed_equally_often(toy: Settings) -> None:
    lab, _ = lab_of(toy, rounds=3)
    called = [0, 0]

    def call(which: int) -> None:
        called[which] += 1

    found = lab.time_calls([lambda: call(0), lambda: call(1)])
    assert called[0] == called[1] >= 4
    assert found["min"] <= found["median"] <= found["max"]
    assert found["copies"] == 2


def test_what_fails_is_a_row_and_the_rest_goes_on(toy: Settings) -> None:
    """Fails if one contender's refusal ends the part, or is lost."""
    lab, log = lab_of(toy)

    def refuse(reason: str) -> dict[str, float]:
        raise ValueError(reason)

    attempt(lab, {"kind": "a"}, refuse, "too large\nand more")
    attempt(lab, {"kind": "b"}, lambda: {"median": 1.0})
    rows = [json.loads(line) for line in log.getvalue().splitlines()]
    assert rows == [{"kind": "a", "error": "ValueError: too large"}, {"kind": "b", "median": 1.0}]


def test_a_spent_budget_ends_the_part(toy: Settings) -> None:
    lab, log = lab_of(toy, budget_s=0.0)
    with pytest.raises(OutOfTimeError, match="budget of 0 s spent"):
        attempt(lab, {"kind": "a"}, lambda: {"median": 1.0})
    assert log.getvalue() == ""
