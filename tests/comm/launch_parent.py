"""A parent of ranks as a process of its own, for tests that send it signals: argv is the folder, then the command."""

from __future__ import annotations

import sys
from pathlib import Path

from mggcn.comm.launch import run_ranks
from mggcn.errors import MggcnError

if __name__ == "__main__":
    try:
        run_ranks(sys.argv[2:], 2, Path(sys.argv[1]), timeout_s=60.0)
    except MggcnError as error:
        print(f"{type(error).__name__}: {error}; torch imported: {'torch' in sys.modules}", flush=True)
        sys.exit(error.exit_code)
