"""Ranks that call a function of the process that starts them: `python -m mggcn.comm.call FOLDER` is one of them.

The function goes by its name, and each rank imports the main module under another name to find it, as multiprocessing's
spawn does. The main module of a notebook or of standard input cannot be imported: cloudpickle sends the function by value.
"""

from __future__ import annotations

import argparse
import multiprocessing
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.spawn import get_preparation_data, prepare
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mggcn import native
from mggcn.comm.failure import stops
from mggcn.comm.launch import run_ranks
from mggcn.comm.rank import rank_main
from mggcn.errors import CommError, ConfigError
from mggcn.files import write_bytes
from mggcn.host import python

if TYPE_CHECKING:
    from mggcn.comm.base import Communicator

CALL = "call"
"""File of a call's folder: what a rank needs before it can find the function, and the function."""


def call_ranks(
    body: Callable[[Communicator], bytes],
    size: int,
    folder: Path,
    transport: str,
    timeout_s: float,
    poll: Callable[[], None] | None = None,
) -> list[bytes]:
    """Call `body` on each of P processes of this machine, which write where this one does; return what it returned.

    folder: one of this user's alone, for the call, its results and reports. poll: as of `run_ranks`.
    Raises: ConfigError if body cannot be sent, or an unguarded script calls this in a rank; otherwise as `run_ranks`.
    """
    write_bytes(folder / CALL, pickle.dumps((transport, timeout_s, *packed(body))), durable=False)
    # As multiprocessing does: -W, -X and -O of the caller hold in the ranks, whose function is the caller's. Python has no
    # public name for them, so its stubs know none.
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    command = [*python("mggcn.comm.call", flags), str(folder)]
    run_ranks(command, size, folder, timeout_s=timeout_s, poll=poll, logs=False)
    results = [_result_path(folder, rank) for rank in range(size)]
    for rank, result in enumerate(results):
        if not result.exists():
            raise CommError(f"rank {rank} exited with code 0 before the work was done")
    return [result.read_bytes() for result in results]


def packed(body: Callable[..., Any]) -> tuple[dict[str, Any], bytes]:
    """Return what a process needs before it can find the function (path, arguments, main module), and the function.

    Raises: ConfigError if it cannot be sent, or this is a rank that imports the script that starts the ranks.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigError(
            "a rank process runs the script again to find its function, and reached the call that starts the "
            "ranks; put that call under `if __name__ == \"__main__\":`, or use transport='threads'"
        )
    preparation, dumps = get_preparation_data("rank"), pickle.dumps
    preparation["authkey"] = bytes(preparation["authkey"])  # pickle refuses it as it is
    if is_typed_in():
        preparation.pop("init_main_from_path", None)  # <stdin> is no file
        try:
            import cloudpickle
        except ImportError as error:
            raise ConfigError(
                "a function typed into a notebook or standard input can be sent to rank processes only with the package "
                "cloudpickle (pip install cloudpickle); or put the function into a module, or use transport='threads'"
            ) from error
        dumps = cloudpickle.dumps
    try:
        return preparation, dumps(body)
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:  # pickle raises all of them
        raise ConfigError(
            "a function that rank processes run must be picklable: one at the top of a module, functools.partial of one, "
            f"or one typed into a notebook, and so must all that it refers to ({error}); or use transport='threads'"
        ) from error


def is_typed_in() -> bool:
    """Return whether the main module is a notebook, a console or standard input, which no other process can import."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    return getattr(main, "__spec__", None) is None and (file is None or not Path(file).is_file())


def unpacked(preparation: dict[str, Any], function: bytes) -> Callable[..., Any]:
    """Make the function again in another process. Raises: whatever the script raises when it is imported."""
    process: Any = multiprocessing.current_process()
    process._inheriting = True  # multiprocessing's own mark of a process that imports the script
    try:
        prepare(preparation)
        found: Callable[..., Any] = pickle.loads(function)
        return found
    finally:
        del process._inheriting


def _result_path(folder: Path, rank: int) -> Path:
    return folder / f"result-{rank}"


def main() -> int:
    """Run the rank."""
    for number in stops():  # nothing is to be saved; a body that saves has handlers of its own
        signal.signal(number, signal.SIG_DFL)
    native.limit_spinning()
    parser = argparse.ArgumentParser(prog="mggcn.comm.call")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--rendezvous", type=Path, required=True)
    a = parser.parse_args()
    transport, timeout_s, preparation, function = pickle.loads((a.folder / CALL).read_bytes())
    sys.path = preparation["sys_path"]  # the script may have added the folder of torch

    def work(comm: Communicator) -> None:
        write_bytes(_result_path(a.folder, a.rank), unpacked(preparation, function)(comm), durable=False)

    return rank_main(a.rank, a.size, a.rendezvous, timeout_s, a.folder, work, transport)


if __name__ == "__main__":
    sys.exit(main())
