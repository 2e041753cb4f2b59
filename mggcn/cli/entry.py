"""The command `mggcn`: parses arguments and calls the functions that the Python API calls too.

Exit codes: 0 done, 2 bad input or a plan that does not fit, 129, 130 and 143 interrupted after saving, 1 anything else
(docs/reliability.md).
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn, final

from mggcn import native, output
from mggcn.cli import (
    completion,
    datasets,
    doctor,
    generate,
    partition,
    plan,
    predict,
    prepare,
    report,
    settings,
    status,
    store,
    sweep,
    train,
    tune,
)
from mggcn.cli.answer import printing
from mggcn.cli.colour import painted
from mggcn.cli.remedy import remedy
from mggcn.comm.failure import by_signal, out_of_memory, out_of_processes, signal_of
from mggcn.errors import ConfigError, MggcnError, one_line
from mggcn.version import __version__

MEMORY_REMEDY = "mggcn plan STORE says what a run needs; use more ranks, or end what else runs on this machine"
NO_PROCESS = "no thread or process could be started"
PROCESSES_REMEDY = (
    "raise their number (ulimit -u, pids.max of the container) or, where it has no limit, that of memory (ulimit -v); or "
    "use fewer ranks, and --threads 1"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; mggcn's own errors print one line, others a traceback."""
    native.limit_spinning()
    try:
        arguments = parse(make_parser(), sys.argv[1:] if argv is None else argv)
    except SystemExit as leaving:
        if not leaving.code and (code := _printed(0)):  # of --help and --version
            return code
        raise
    try:
        _require_working_folder()
        with printing(arguments):
            code = int(arguments.run(arguments))
        return _printed(code, trains=arguments.run in (train.run, sweep.run))
    except MggcnError as error:
        print(f"{_name()} {one_line(str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as stop:
        print(f"mggcn: interrupted{by_signal(signal_of(stop))}", file=sys.stderr)
        return 128 + signal_of(stop)
    except Exception as error:
        if out_of_memory(error):
            what, few = one_line(str(error)), out_of_processes(error)
            short, todo = (NO_PROCESS, PROCESSES_REMEDY) if few else ("memory ran out", MEMORY_REMEDY)
            print(f"{_name()} {short}{f': {what}' if what else ''}; {todo}", file=sys.stderr)
            return 1
        if isinstance(error, OSError) and error.filename is not None:
            why = one_line(f"{error.filename}: {error.strerror}")
            print(f"{_name()} {why}; check the path and its rights", file=sys.stderr)
            return 2
        traceback.print_exc()
        return 1


def _printed(code: int, *, trains: bool = False) -> int:
    """Return the exit code of a command that is done: 2 if it could not print what it was asked for; a run is saved."""
    why = output.failure()
    if not why or code:
        return code
    print(
        f"{_name()} standard output could not be written: {why}; all else is done: send the output elsewhere to see it",
        file=sys.stderr,
    )
    return 0 if trains else 2


def _require_working_folder() -> None:
    """Raises: ConfigError if the folder in which the command runs is gone: libraries end the process there."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ConfigError("the working folder was deleted; cd to one that exists, and start again") from None


def _name() -> str:
    """What errors begin with."""
    return painted("mggcn:", "red", sys.stderr)


@final
class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, like all others."""

    def error(self, message: str) -> NoReturn:
        """Print the message, a suggestion, and where to find help; exit code 2."""
        flags = [flag for action in self._actions for flag in action.option_strings]
        self.exit(2, f"{_name()} {one_line(message)}{remedy(message, flags)}; see {self.prog} --help\n")


def parse(parser: argparse.ArgumentParser, given: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of a command. Unknown ones are reported by the command's own parser, which has the flags.

    `mggcn`, and `mggcn help COMMAND`, are `mggcn --help` and `mggcn COMMAND --help`.
    """
    if any("\0" in text for text in given):  # only a program can pass one; no path or name has it
        parser.error("an argument holds a NUL byte")
    if not given or given[0] == "help":
        given = [*(word for word in given[1:] if not word.startswith("-")), "--help"]
    arguments, unknown = parser.parse_known_args(given)
    if unknown:
        arguments.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return arguments


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    modules = (
        *(prepare, store, datasets, partition, plan, train, sweep, predict, status, report),
        *(generate, tune, settings, completion, doctor),
    )
    parser = Parser(
        prog="mggcn", description="Train graph neural networks on the whole graph or on batches, on one to P ranks."
    )
    parser.set_defaults(main=parser)
    parser.add_argument("--version", action="version", version=f"mggcn {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    helped = commands.add_parser("help", help="Print the help of a command.")  # listed here, answered by `parse`
    helped.add_argument("command", nargs="*", choices=[module.__name__.rpartition(".")[2] for module in modules])
    for module in modules:
        name = module.__name__.rpartition(".")[2]
        summary = next(iter((module.__doc__ or "").splitlines()), "")  # python -OO leaves no docstrings
        command = commands.add_parser(name, help=summary, description=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
        _claim(command)
    return parser


def _claim(command: argparse.ArgumentParser) -> None:
    """Have the arguments name the innermost parser that read them: of `store info`, that of `info`."""
    command.set_defaults(parser=command)
    for action in command._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                _claim(inner)
