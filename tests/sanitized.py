"""Runs tests on kernels built with ASan and UBSan: `python -m tests.sanitized PYTEST-ARGUMENTS`, as `make sanitize` does.

A report ends the process that made it. Only the CPU kernels are instrumented, not torch, NumPy or Python; what Python leaks
at its end is not looked for. Tests that compile a library of their own, or start processes, run theirs as they are: for
emulated kernels of GPUs see tests/emulator/checked.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mggcn import native

BUILD = native.CHECKOUT / "build" / "sanitize"
LIBRARY = BUILD / Path(native.LIBRARY).name
REPORT = BUILD / "report"
"""Where a report goes, and with the number of its process: pytest holds what goes to stderr when the process ends."""
OPTIONS = {
    "ASAN_OPTIONS": f"detect_leaks=0:allocator_may_return_null=1:log_path={REPORT}",
    "UBSAN_OPTIONS": f"print_stacktrace=1:halt_on_error=1:log_path={REPORT}",
}


LEFT_OUT = {
    "test_memory_is_as_planned": "sanitizers take memory of their own",
    "test_bits_do_not_depend_on_padding": "without -O3 the compiler joins products and sums otherwise in rests of rows",
    "test_a_column_has_the_same_bits_alone": "as test_bits_do_not_depend_on_padding",
}


def build() -> None:
    """Compile the kernels of all instruction sets. Raises: CalledProcessError."""
    source = ["-S", str(native.CHECKOUT), "-B", str(BUILD)]
    subprocess.run(["cmake", *source, "-DCMAKE_BUILD_TYPE=Release", "-DMGGCN_SANITIZE=ON"], check=True)
    # A number for the reason that native.build has.
    subprocess.run(["cmake", "--build", str(BUILD), "--parallel", str(len(os.sched_getaffinity(0)))], check=True)


def preload() -> dict[str, str]:
    """Return what has a process load the runtimes of the sanitizers before all else."""
    find = [["c++", f"-print-file-name={name}.so"] for name in ("libasan", "libubsan")]
    found = (subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() for command in find)
    return {"LD_PRELOAD": " ".join(found)}


def run(plugin: str, arguments: list[str]) -> int:
    """Run pytest with the sanitizers' runtimes, print their reports, and return its status."""
    for old in BUILD.glob(f"{REPORT.name}.*"):
        old.unlink()
    options = ["-p", plugin, "-p", "no:cacheprovider", "--capture=sys"]  # UBSan writes to the real stderr
    command = [sys.executable, "-m", "pytest", *options, *arguments]
    env = OPTIONS | os.environ | preload()
    code = subprocess.run(command, env=env, check=False).returncode
    reports = sorted(BUILD.glob(f"{REPORT.name}.*"))
    for report in reports:
        print(report.read_text(errors="replace"))
    return code or int(bool(reports))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what holds for the build without sanitizers alone."""
    for item in items:
        if reason := LEFT_OUT.get(item.originalname):  # type: ignore[attr-defined]
            item.add_marker(pytest.mark.skip(reason=reason))


if __name__ == "__main__":
    build()
    sys.exit(run("tests.sanitized", sys.argv[1:]))
elif "libasan" in os.environ.get("LD_PRELOAD", ""):
    native.path = lambda: LIBRARY
