"""What parts measure with: the gather kernel, operands, budgets, and rows about what failed."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.gpu import lab as gpu_lab
from bench.gpu.lab import MAX_BEGUN, AgainError, Lab, OutOfTimeError, Settings, attempt
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
    assert [row.pop("took_s") < 10 for row in rows if "took_s" in row] == [True] * 2
    assert [row for row in rows if row["kind"] != "begun"] == [
        {"kind": "a", "error": "ValueError: too large and more"},
        {"kind": "b", "median": 1.0},
    ]


def test_a_spent_budget_ends_the_part(toy: Settings) -> None:
    lab, log = lab_of(toy, budget_s=0.0)
    with pytest.raises(OutOfTimeError, match="does not fit the time that is left"):
        attempt(lab, {"kind": "a"}, lambda: {"median": 1.0})
    assert log.getvalue() == ""


def test_a_row_that_takes_longer_than_what_is_left_waits(toy: Settings) -> None:
    """Fails if a process begins what it cannot finish, though it knows how long its rows take."""
    log = io.StringIO()
    lab = Lab(dataclasses.replace(toy, budget_s=50.0), log, [{"kind": "a", "took_s": 60.0}])
    with pytest.raises(OutOfTimeError):
        attempt(lab, {"kind": "b"}, dict)


def test_rows_that_are_there_are_left_out(toy: Settings) -> None:
    """Fails if a row is measured again, or one that ended its process twice is tried for ever."""
    log = io.StringIO()
    begun = [{"kind": "begun", "what": {"kind": "b"}}] * MAX_BEGUN
    lab = Lab(toy, log, [{"kind": "a", "width": 16, "median": 1.0}, *begun])

    def never() -> dict[str, float]:
        raise AssertionError("measured again")

    attempt(lab, {"kind": "a", "width": 16}, never)
    attempt(lab, {"kind": "b"}, never)
    (row,) = [json.loads(line) for line in log.getvalue().splitlines()]
    assert row == {"kind": "b", "error": "begun 2 times and never finished: it ended its process or took too long"}


def test_nothing_is_measured_behind_a_refused_capture(toy: Settings) -> None:
    """Fails if a contender shares its process with one that was captured, or anything with one that was refused."""
    lab, log = lab_of(toy)
    lab.emulated, lab.forget = False, lambda: None  # type: ignore[method-assign]
    attempt(lab, {"kind": "a"}, lambda: {"mode": lab.noted("captured")})
    attempt(lab, {"kind": "b"}, lambda: {"mode": lab.noted("eager")})
    with pytest.raises(AgainError):
        attempt(lab, {"kind": "c"}, dict, alone=True)
    attempt(lab, {"kind": "d"}, lambda: {"mode": lab.noted("refused: RuntimeError: no")})
    with pytest.raises(AgainError):
        attempt(lab, {"kind": "e"}, dict)
    rows = [json.loads(line) for line in log.getvalue().splitlines()]
    assert [row["mode"] for row in rows if "mode" in row] == ["captured", "eager", "refused: RuntimeError: no"]
    fresh = Lab(toy, io.StringIO(), rows)
    attempt(fresh, {"kind": "c"}, dict, alone=True)
    assert fresh.find(kind="c")
