"""Processes with torch that tests start are forks of the tests' own process, which has loaded it.

A new interpreter needs two seconds of processor time to load torch, a fork some 0.1 s. The processes of a fork are forks
too. What a test has replaced in the package, and what the package remembers, a fork has as well, and a new interpreter has
not: a test that replaces something of a program that it starts is to name an interpreter. New interpreters start where a
test names one (`python -m mggcn`, -c, a shell), and for the ranks and trials of such a command: tests/test_output.py,
tests/cli/test_signals.py, test_entry.py and test_sweep.py, tests/comm/test_folders.py.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from mggcn.host import python

OWN = ("mggcn", "mggcn.runs.worker", "mggcn.comm.call", "mggcn.runs.sweep_worker")
"""Programs of the package, as it starts them itself: ranks, and trials of a sweep; `mggcn` is tests/cli/runs.py's."""
GUARDS = ("edge_guard_pages", "gemm_guard_pages", "guard_pages", "spmm_guard_pages")
HERE = Path(__file__).resolve().parent
PROGRAMS = {
    **{tuple(python(module)): module for module in OWN},
    **{(sys.executable, "-m", f"tests.backend.cpu.{name}"): f"tests.backend.cpu.{name}" for name in GUARDS},
    (sys.executable, str(HERE / "comm" / "launch_worker.py")): "tests.comm.launch_worker",
    (sys.executable, str(HERE / "cli" / "fault_worker.py")): "tests.cli.fault_worker",
}
"""Modules by the beginning of the command that runs them."""
LENGTHS = sorted({len(begin) for begin in PROGRAMS})


class Popen(subprocess.Popen[Any]):
    """subprocess.Popen that forks for the commands of PROGRAMS."""

    def _execute_child(
        self, args: Any, executable: Any, preexec: Any, close: Any, kept: Any, cwd: Any, env: Any, *rest: Any
    ) -> None:
        """Start the child. Of `rest` the pipes and the session are heeded: these programs are started with nothing else."""
        command = () if isinstance(args, str | bytes | os.PathLike) else tuple(args)
        length = next((n for n in LENGTHS if command[:n] in PROGRAMS), 0)
        if not length or preexec is not None or kept:
            super()._execute_child(args, executable, preexec, close, kept, cwd, env, *rest)  # type: ignore[misc]  # private
            return
        _, _, _, stdin, parents_in, parents_out, stdout, parents_err, stderr, *_, session, _ = rest
        with warnings.catch_warnings():
            # Python 3.12 warns of other threads' locks: pytest's and xdist's, which the child never asks for.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if not self.pid:
            argv, module = ["-c", *command[length:]], PROGRAMS[command[:length]]
            _be_the_child(
                argv, module, (stdin, stdout, stderr), os.environ.copy() if env is None else env, cwd, session
            )
        self._child_created = True
        self._close_pipe_fds(stdin, parents_in, parents_out, stdout, parents_err, stderr)  # type: ignore[attr-defined]  # private


def _be_the_child(
    argv: list[str], module: str, streams: Sequence[int], env: Mapping[str, str], cwd: str | None, session: bool
) -> NoReturn:
    """Run the module and end, with what a new interpreter would have, but for what is imported, replaced and remembered."""
    code = 1
    try:
        atexit._clear()  # the parent's
        gc.freeze()  # files of the parent that nobody reaches would close the child's of the same number
        if session:
            os.setsid()
        for number, stream in enumerate(streams):
            if stream != -1:
                os.dup2(stream, number)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        sys.stdin, sys.stdout = (open(fd, mode, closefd=False) for fd, mode in enumerate("rw"))
        sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)
        given = dict(env)
        os.environ.clear()
        os.environ.update(given)
        os.chdir(cwd or ".")
        _forget()
        sys.argv = argv
        sys.modules.pop(module, None)
        code = _exit_code(module)
    except BaseException as error:
        traceback.print_exc()
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    finally:
        _end(code)


def _forget() -> None:
    """Signals and warnings do what they do in a new interpreter: the parent's handlers and filters are the tests'."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)


def _exit_code(module: str) -> int:
    """Run the module as a program."""
    try:
        runpy.run_module(module, run_name="__main__")
    except SystemExit as leaving:
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
            return 1
        return leaving.code or 0
    return 0


def _end(code: int) -> NoReturn:
    """End as an interpreter does: after its threads and what is registered for its end, or by Ctrl-C."""
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]  # private
        atexit._run_exitfuncs()
    _flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # it is full, its reader has left, or it is closed
            continue


def install() -> None:
    """Have this process, and its forks, fork for PROGRAMS."""
    subprocess.Popen = Popen  # type: ignore[misc]  # for subprocess.run too
