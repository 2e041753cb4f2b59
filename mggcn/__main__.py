"""`python -m mggcn` is the command; a signal that comes while it loads ends it in one line."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

from mggcn.comm.failure import Terminated


def main() -> int:
    """Run the command. SIGTERM unwinds it as Ctrl-C does, wherever nothing is to be saved."""
    try:
        signal.signal(signal.SIGTERM, _terminate)
        from mggcn import cli

        return cli.main()
    except KeyboardInterrupt as stop:
        if os.environ.get("RANK", "0") == "0":  # of torchrun's ranks one speaks
            print(f"mggcn: interrupted{' by SIGTERM' * isinstance(stop, Terminated)}", file=sys.stderr)
        return 128 + (signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT)


def _terminate(_number: int, _frame: FrameType | None) -> NoReturn:
    raise Terminated


if __name__ == "__main__":
    sys.exit(main())
