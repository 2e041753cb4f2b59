"""No result, size or message of a run changes unnoticed: 96 configurations beside what was recorded of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mggcn import native
from tests.covering import everything_runs
from tests.golden.cases import allowed, covering_array, name_of, pairs

RECORDED = Path(__file__).with_name("recorded.json")


def compared(found: dict[str, Any], recorded: dict[str, Any], *, bits: bool) -> list[str]:
    """Return what differs. A smaller arena is welcome; losses are compared where bits cannot be."""
    problems = []
    for name, kept in recorded.items():
        if name not in found:
            problems.append(f"missing: {name}")
            continue
        now = found[name]
        same = [key for key in ("products", "sent", *(["bits"] if bits else [])) if now[key] != kept[key]]
        if any(new > old for new, old in zip(now["arena"], kept["arena"], strict=True)):
            same.append("arena")
        if not abs(now["loss"] - kept["loss"]) <= 1e-2 * abs(kept["loss"]):
            same.append("loss")
        problems += [f"{key}: was {kept[key]}, is {now[key]} in {name}" for key in same]
    return problems


def test_nothing_changed(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Fails if a bit of a training, a size, or a message differs from the record, of which the fast suite takes a third."""
    if "avx2" not in native.isas():
        pytest.skip("the record is of processors with AVX2")
    command = [sys.executable, "-m", "tests.golden.record", str(tmp_path / "now.json")]
    every = 1 if everything_runs(request.config) else 3
    command += ["--every", str(every)]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2], timeout=280)
    now, recorded = (json.loads(path.read_text()) for path in (tmp_path / "now.json", RECORDED))
    here, there = now.pop("torch"), recorded.pop("torch")
    recorded = dict(list(recorded.items())[::every])
    assert now.keys() == recorded.keys()
    assert compared(now, recorded, bits=here == there) == []
    if here != there:
        pytest.skip(f"bits are those of torch {there}, here is {here}: sizes, messages and losses were compared")


def test_a_difference_is_told() -> None:
    """Fails if the comparison has gone blind to one of its figures, or calls a smaller arena a fault."""
    kept = {"loss": 1.0, "bits": "a", "products": [[4, 2]], "sent": [[10, 1]], "arena": [100]}
    for key, value in (("bits", "b"), ("products", [[5, 2]]), ("sent", [[10, 2]]), ("arena", [101]), ("loss", 1.1)):
        (problem,) = compared({"case": kept | {key: value}}, {"case": kept}, bits=True)
        assert problem.startswith(f"{key}: was ")
    assert compared({"case": kept | {"arena": [99]}}, {"case": kept}, bits=True) == []
    assert compared({"case": kept | {"bits": "b"}}, {"case": kept}, bits=False) == []
    assert compared({}, {"case": kept}, bits=True) == ["missing: case"]


def test_every_pair_of_settings_is_covered() -> None:
    """Fails if the cases repeat, break a rule, or leave out a value of a setting beside one of another."""
    cases = covering_array()
    assert len({name_of(case) for case in cases}) == len(cases) >= 80
    assert all(map(allowed, cases))
    covered = set().union(*map(pairs, cases))
    assert (("ranks", 3), ("strategy", "delayed-none")) in covered
    assert (("precision", "bf16"), ("edges", "weighted")) in {(b, a) for a, b in covered} | covered
    assert len(covered) == 1064
