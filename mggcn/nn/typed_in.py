"""Sends functions that were typed in to other processes.

multiprocessing sends a function by its name, and has every process import the main module to find it. The main module
of a notebook or of standard input cannot be imported: there cloudpickle sends the function by value.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mggcn.errors import ConfigError


@dataclass(frozen=True, slots=True)
class _ByValue:
    """A function as bytes, from which the receiving process rebuilds it."""

    packed: bytes

    def __call__(self, *arguments: Any) -> Any:
        return pickle.loads(self.packed)(*arguments)


def is_typed_in() -> bool:
    """Return whether the main module is a notebook, a console or standard input, which no other process can import."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    return getattr(main, "__spec__", None) is None and (file is None or not Path(file).is_file())


def portable(body: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function in a form that reaches other processes: itself, if they can import it.

    Raises: ConfigError if it was typed in and cloudpickle is missing, or it refers to something that cannot be pickled.
    """
    if not is_typed_in():
        return body
    try:
        import cloudpickle
    except ImportError as error:
        raise ConfigError(
            "a function typed into a notebook or standard input can be sent to rank processes only with the package "
            "cloudpickle (pip install cloudpickle); or put the function into a module, or use transport='threads'"
        ) from error
    try:
        return _ByValue(cloudpickle.dumps(body))
    except (pickle.PicklingError, AttributeError, TypeError) as error:  # pickle raises all of them
        raise ConfigError(
            f"the function cannot be sent to rank processes, because something that it refers to cannot be pickled "
            f"({error}); leave that out, or use transport='threads'"
        ) from error


@contextlib.contextmanager
def without_main_file() -> Iterator[None]:
    """Hide a main module's `__file__` if it is not a file, such as <stdin>: each new process would try to run it."""
    main = vars(sys.modules["__main__"])
    if not is_typed_in() or "__file__" not in main:
        yield
        return
    file = main.pop("__file__")
    try:
        yield
    finally:
        main["__file__"] = file


def refuse_in_a_starting_process() -> None:
    """Refuse to start ranks while a rank imports the script that starts them. Raises: ConfigError."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigError(
            "a rank process runs the script again to find its function, and reached the call that starts the "
            "ranks; put that call under `if __name__ == \"__main__\":`, or use transport='threads'"
        )
