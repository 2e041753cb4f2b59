"""`python -m mggcn` is the command; a signal that comes while it loads ends it in one line."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

from mggcn import output
from mggcn.comm.failure import Stopped, by_signal, signal_of, stops
from mggcn.host import settle_malloc


def main() -> int:
    """Run the command. SIGINT, SIGTERM and SIGHUP unwind it where nothing is to be saved; one that is ignored stays so."""
    output.settle()
    settle_malloc()
    try:
        for number in stops():
            if signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL):
                signal.signal(number, _stop)
        from mggcn.cli import entry as cli

        return cli.main()
    except KeyboardInterrupt as stop:
        came = signal_of(stop)
        if os.environ.get("RANK", "0") == "0":  # of torchrun's ranks one speaks
            print(f"mggcn: interrupted{by_signal(came)}", file=sys.stderr)
        return 128 + came


def _stop(number: int, _frame: FrameType | None) -> NoReturn:
    raise Stopped(number)


if __name__ == "__main__":
    sys.exit(main())
