"""What compute-sanitizer is asked and what it answers, without it; tests/cuda/sanitizer.py needs a GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.cuda.sanitizer import GROUPS, ONLY, Found, parse

MEMCHECK = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at shifted+0x90
=========     by thread (0,0,0) in block (0,0,0)
=========     Address 0x7f1c00a00 is out of bounds
=========     Saved host backtrace up to driver entry point at kernel launch time
========= ERROR SUMMARY: 32 errors
"""
RACECHECK = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at reverse+0xb0
=========     and Read access at reverse+0x120 [192 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


def test_logs_are_read() -> None:
    """Fails if an error of a tool counts as none, or a tool that was cut off as one that found nothing."""
    assert parse(MEMCHECK).errors == 32
    assert parse(MEMCHECK).first.startswith("Invalid __global__ read of size 4 bytes; at shifted+0x90; by thread")
    assert parse(RACECHECK).errors == 1
    assert "and Read access at reverse" in parse(RACECHECK).first
    assert parse("========= ERROR SUMMARY: 0 errors\n") == Found(0, "")
    assert parse("========= COMPUTE-SANITIZER\n") == Found(None, "")


@pytest.mark.slow
def test_every_file_has_tests() -> None:
    """Fails if a test is renamed, so that a tool runs over nothing."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "cuda", "-p", "no:cacheprovider"]
    for files, select in GROUPS.values():
        done = subprocess.run([*command, *files, "-k", select + ONLY], capture_output=True, text=True, check=False)
        assert 3 <= done.stdout.count("::") <= 12, done.stdout
