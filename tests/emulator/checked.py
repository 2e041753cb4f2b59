"""Runs tests on emulated kernels that look for more: `python -m tests.emulator.checked memory|races PYTEST-ARGUMENTS`.

memory: AddressSanitizer; a read or write outside a tensor's memory ends the process with a report. races: the build of
races.hpp; an access that nothing orders after another thread's fails the launch, whatever came out of it.
"""

from __future__ import annotations

import os
import sys

import pytest

from tests.emulator import module

PLUGIN = "tests.emulator.checked"


def main() -> int:
    mode, *arguments = sys.argv[1:]
    if mode == "memory":
        from tests import sanitized  # as a plugin beside libasan it loads CPU kernels of its own

        sanitized.BUILD.mkdir(parents=True, exist_ok=True)
        return sanitized.run(PLUGIN, arguments)
    return int(pytest.main(["-p", PLUGIN, *arguments]))


if __name__ == "__main__":
    sys.exit(main())
else:
    # The runtime of AddressSanitizer, without which its builds do not load, says which of the two it is.
    mode = "memory" if "libasan" in os.environ.get("LD_PRELOAD", "") else "races"
    module.CHECKS = (*module.CHECKS, *module.MORE_CHECKS[mode])
