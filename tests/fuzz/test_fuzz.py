from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from tests.fuzz.__main__ import fuzz, table
from tests.fuzz.flips import flip_all
from tests.fuzz.mutate import mutate
from tests.fuzz.targets import Target
from tests.fuzz.worker import outcome


def test_changes_are_those_of_the_seed() -> None:
    """Fails if a case cannot be run again, or nothing is changed."""
    content, others = bytes(range(200)), [b"0 1\n1 2\n"]
    found = [mutate(content, others, random.Random(seed)) for seed in range(300)]
    assert found == [mutate(content, others, random.Random(seed)) for seed in range(300)]
    assert sum(changed != content for changed in found) > 250
    assert {len(changed) == len(content) for changed in found} == {True, False}
    assert mutate(b"", [b""], random.Random(3)) is not None


def test_a_traceback_is_a_finding(tmp_path: Path) -> None:
    """Fails if the fuzzer has gone blind."""

    def raising(folder: Path, rng: random.Random) -> None:
        raise IndexError("planted")

    def greedy(folder: Path, rng: random.Random) -> None:
        raise MemoryError

    assert outcome(Target("planted", 1, raising), tmp_path, random.Random(1))[0] == "traceback"
    assert outcome(Target("planted", 1, greedy), tmp_path, random.Random(1))[0] == "memory"
    assert outcome(Target("planted", 1, lambda folder, rng: None), tmp_path, random.Random(1)) == ("accepted", "")


@pytest.mark.full
def test_some_cases_find_nothing() -> None:
    """Fails if a changed input crashes, hangs, or ends in a traceback."""
    found = fuzz(math.inf, seed=2718, jobs=1, cases=range(80))
    assert not found.bad, found.bad
    assert sum(found.counts.values()) == 80, table(found)


def test_flipped_bits_change_no_result_in_silence(tmp_path: Path) -> None:
    """Fails if a bit of a store or a checkpoint changes what a command gives, or ends it in a traceback."""
    totals, wrong = flip_all(tmp_path, 20, 15, 131, seed=314, commands=1)
    assert not wrong, wrong
    assert {kind for kind, *_ in totals} >= {"array", "tensors", "meta.json", "header of an array", "header of tensors"}
    assert sum(count for (*_, found), count in totals.items() if found == "refused") > 60
