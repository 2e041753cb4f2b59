"""Runs tests on emulated kernels that look for more: `python -m tests.emulator.checked MODE PYTEST-ARGUMENTS`.

memory: AddressSanitizer; a read or write outside a tensor's memory ends the process with a report. races: the build of
races.hpp; an access that nothing orders after another thread's fails the launch, whatever came out of it. fused: products
are fused with what is added to them, as a GPU's compiler does.
"""

from __future__ import annotations

import os
import sys

import pytest

from tests.emulator import module

PLUGIN, MODE = "tests.emulator.checked", "MGGCN_EMULATOR_CHECKS"


def main() -> int:
    mode, *arguments = sys.argv[1:]
    if mode == "memory":
        from tests import sanitized  # as a plugin beside libasan it loads CPU kernels of its own

        sanitized.BUILD.mkdir(parents=True, exist_ok=True)
        return sanitized.run(PLUGIN, arguments)
    os.environ[MODE] = mode  # for the workers, too
    return int(pytest.main(["-p", PLUGIN, *arguments]))


if __name__ == "__main__":
    sys.exit(main())
else:
    # The runtime of AddressSanitizer is needed by its builds alone.
    mode = "memory" if "libasan" in os.environ.get("LD_PRELOAD", "") else os.environ[MODE]
    module.CHECKS = (*module.CHECKS, *module.MORE_CHECKS[mode])
