"""Runs tests on kernels built with ASan and UBSan: `python -m tests.sanitized PYTEST-ARGUMENTS`, as `make sanitize` does.

A report ends the process that made it. Only the CPU kernels are instrumented, not torch, NumPy or Python; what Python leaks
at its end is not looked for. Tests that compile a library of their own, or start processes, run theirs as they are.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from mggcn import native

BUILD = native.CHECKOUT / "build" / "sanitize"
LIBRARY = BUILD / Path(native.LIBRARY).name
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
}


def build() -> None:
    """Compile the kernels of all instruction sets. Raises: CalledProcessError."""
    source = ["-S", str(native.CHECKOUT), "-B", str(BUILD)]
    subprocess.run(["cmake", *source, "-DCMAKE_BUILD_TYPE=Release", "-DMGGCN_SANITIZE=ON"], check=True)
    subprocess.run(["cmake", "--build", str(BUILD), "--parallel"], check=True)


def main() -> int:
    """Build, and run pytest with the runtime of the sanitizers loaded before all else."""
    build()
    runtimes = [
        subprocess.run(
            ["c++", f"-print-file-name={name}.so"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan", "libubsan")
    ]
    command = [sys.executable, "-m", "pytest", "-p", "tests.sanitized", "-p", "no:cacheprovider", *sys.argv[1:]]
    return subprocess.run(
        command, env=OPTIONS | os.environ | {"LD_PRELOAD": " ".join(runtimes)}, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
elif "libasan" in os.environ.get("LD_PRELOAD", ""):
    native.path = lambda: LIBRARY
