"""Standard output and error of a process, wherever they are closed, full, left by their reader or short of letters."""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
from typing import TYPE_CHECKING, Any, TextIO, final

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


@final
class _Lasting(io.FileIO):
    """A standard stream that raises nothing: once it cannot be written, /dev/null takes its place."""

    failure: OSError | None = None

    def write(self, data: ReadableBuffer, /) -> int:
        """Write what the stream takes; wait for a pipe that another program has made non-blocking."""
        try:
            while (written := super().write(data)) is None:
                select.select((), (self,), ())
            return written
        except OSError as error:
            self.failure = self.failure or error
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())  # also for what this process starts later, such as ranks
            os.close(nowhere)
            return super().write(data)


def settle() -> None:
    """Make failing prints harmless for this process. Call it first of all, before the process opens a file.

    A closed stream is as /dev/null, and its number is taken: a file that got it would take in what other programs and
    libraries print. Letters that a stream cannot show are escaped.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdin = sys.stdin or open(os.devnull)
    sys.stdout, sys.stderr = _lasting(sys.stdout, 1), _lasting(sys.stderr, 2)


def tell(text: str, stream: TextIO | None, end: str = "\n") -> None:
    """Print and flush, in any program; an error of the stream is ignored."""
    if stream is None:  # pythonw, and services without one
        return
    with contextlib.suppress(OSError, ValueError):  # ValueError: it was closed
        try:
            print(text, end=end, file=stream, flush=True)
        except UnicodeEncodeError:
            print(ascii(text)[1:-1], end=end, file=stream, flush=True)


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a stream is open and shows a terminal."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        return False


def failure() -> str:
    """Return why standard output could not be written; "" if it could, or if its reader has left: it wanted no more."""
    found: OSError | None = None
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
            raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
            found = raw.failure if isinstance(raw, _Lasting) else None
    except OSError as error:  # of a program that calls the command, and has not called `settle`
        found = error
    return "" if found is None or isinstance(found, BrokenPipeError) else found.strerror or str(found)


def _lasting(stream: TextIO | None, number: int) -> TextIO:
    """Return a stream as it is, but lasting. Of a program that has put another one in its place, that one."""
    now: Any = stream
    if stream is not None:
        try:
            ours = stream.fileno() == number and not isinstance(getattr(now.buffer, "raw", None), _Lasting)
        except (AttributeError, OSError, ValueError):  # it is not a regular file
            ours = False
        if not ours:
            return stream
        stream.flush()
    raw = io.BufferedWriter(_Lasting(number, "w", closefd=False))
    errors = "backslashreplace" if stream is None or now.errors in ("strict", "surrogateescape") else now.errors
    at_once = number == 2 or (now is not None and (now.line_buffering or now.write_through))
    return io.TextIOWrapper(raw, getattr(now, "encoding", "utf-8"), errors, line_buffering=at_once)
