"""One setting of threads for every library that computes on the CPU: torch, NumPy's BLAS, and our kernels with them.

Without threadpoolctl (a checkout that is not installed, on a GPU's machine) BLAS libraries keep their threads, and nothing
multiplies by NumPy's (cpu_machine.py).
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import torch


def _limit_blas(threads: int) -> Any:
    """Give the BLAS libraries of this process their threads; what comes back is a context that ends with the old ones."""
    if importlib.util.find_spec("threadpoolctl") is None:
        return contextlib.nullcontext()
    import threadpoolctl

    return threadpoolctl.threadpool_limits(threads, user_api="blas")


def set_threads(threads: int) -> None:
    """Give torch's operators in this thread, and BLAS libraries in this process, that many threads.

    Our kernels get their number with each call. Cost: some milliseconds, to find the libraries.
    """
    torch.set_num_threads(threads)
    _limit_blas(threads)


@contextlib.contextmanager
def threads_set(threads: int) -> Iterator[None]:
    """As set_threads while the block runs; afterwards what was set before."""
    before = torch.get_num_threads()
    with _limit_blas(threads):
        torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)
