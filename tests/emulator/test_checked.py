"""What only other builds of emulated kernels see: accesses outside tensors, and races that leave results right."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tests.emulator import module
from tests.emulator.module import EmulationError
from tests.emulator.test_emulator import SEEDS, count_is_right, neighbour_is_right, reverse_is_right, run, scan_is_right
from tests.sanitized import OPTIONS, preload

BLOCKS = 5
FAULTS = {
    1: "reads what another block wrote, without a fence and an atomic between",
    2: "(reads|writes) what another block (wrote|read), without a fence and an atomic between",
    3: "writes what another thread wrote, without a barrier between",
    4: "behind its dynamic shared memory",
    5: "(reads|writes) what another thread (wrote|read), without a barrier between",
    6: "reads what another block wrote, without a fence and an atomic between",
}
OUTSIDE = """
import numpy as np
from tests.emulator import module
module.CHECKS = (*module.CHECKS, *module.MORE_CHECKS["memory"])
from tests.emulator.test_emulator import run
for room, by in ((32, 0), ({room}, {by})):
    run("shifted", 1, 32, np.zeros(32, np.float32), np.zeros(room, np.float32), np.int32(by))
    print("survived")
"""


@pytest.fixture
def races(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compiled to find races."""
    monkeypatch.setattr(module, "CHECKS", (*module.CHECKS, *module.MORE_CHECKS["races"]))


def sum_of_blocks(broken: int, seed: int) -> tuple[int, int]:
    """What sum_blocks says, and what is right."""
    x, out = np.arange(32 * BLOCKS, dtype=np.int32), np.zeros(1, np.int32)
    sums, arrived = np.zeros(BLOCKS, np.int32), np.zeros(1, np.uint32)
    run("sum_blocks", BLOCKS, 32, x, sums, arrived, out, np.int32(broken), seed=seed, shared=128)
    return int(out[0]), int(x.sum())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("broken", FAULTS)
def test_races_that_change_nothing_are_seen(broken: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a race is only seen by what came out of it, or what is ordered counts as one."""
    plain, right = sum_of_blocks(broken, seed)
    assert plain == right
    monkeypatch.setattr(module, "CHECKS", (*module.CHECKS, *module.MORE_CHECKS["races"]))
    for ordered in (0, 7):
        assert sum_of_blocks(ordered, seed) == (right, right)
    with pytest.raises(EmulationError, match=FAULTS[broken]):
        sum_of_blocks(broken, seed)


@pytest.mark.usefixtures("races")
@pytest.mark.parametrize("is_right", [scan_is_right, reverse_is_right, neighbour_is_right, count_is_right])
def test_missing_barrier_is_seen_in_every_order(is_right: Any) -> None:
    """Fails if the natural order of threads hides it, or a barrier of a block or a warp does not count."""
    for seed in SEEDS:
        assert is_right(0, seed)
        with pytest.raises(EmulationError, match="without a barrier between"):
            is_right(1, seed)


@pytest.mark.parametrize(
    ("room", "by", "said"), [(32, 1, "READ"), pytest.param(31, 0, "WRITE", marks=pytest.mark.full)]
)
def test_accesses_outside_a_tensor_are_seen(room: int, by: int, said: str) -> None:
    """Fails if a kernel may read or write behind a tensor, which on a GPU may go well for years."""
    env = os.environ | preload() | {"ASAN_OPTIONS": OPTIONS["ASAN_OPTIONS"].rpartition(":")[0]}
    command = [sys.executable, "-c", OUTSIDE.format(room=room, by=by)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert f"{said} of size 4" in done.stderr
    assert done.stdout == "survived\n"


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        pytest.param("memory", "READ of size 4", marks=pytest.mark.full),
        ("races", "planted.py::test_races"),
        pytest.param("fused", "planted.py::test_fused", marks=pytest.mark.full),
    ],
)
def test_the_command_finds_what_was_planted(mode: str, said: str) -> None:
    """Fails if the checks of a mode do not reach the tests that the command runs, in its workers too."""
    planted = ["tests/emulator/planted.py", "-q", "-p", "no:cacheprovider", "-n", "1"]
    command = [sys.executable, "-m", "tests.emulator.checked", mode, *planted]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode
    assert said in done.stdout + done.stderr
    if mode != "memory":  # whose report ends the process
        assert "1 failed, 2 passed" in done.stdout
    plain = [sys.executable, "-m", "pytest", *planted]
    assert mode != "races" or subprocess.run(plain, capture_output=True, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", ["memory", "races"])
def test_no_kernel_does_either(mode: str) -> None:
    """Fails if a kernel reads or writes outside a tensor, or its threads or blocks race, in a test of tests/backend."""
    command = [sys.executable, "-m", "tests.emulator.checked", mode, "tests/backend", "-k", "emulated", "-q", "-n", "2"]
    command += ["--timeout", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
