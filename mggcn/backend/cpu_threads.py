"""One setting of threads for every library that computes on the CPU: torch, NumPy's BLAS, and our kernels with them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import threadpoolctl
import torch


def set_threads(threads: int) -> None:
    """Give torch's operators in this thread, and BLAS libraries in this process, that many threads.

    Our kernels get their number with each call. Cost: some milliseconds, to find the libraries.
    """
    torch.set_num_threads(threads)
    threadpoolctl.threadpool_limits(threads, user_api="blas")


@contextlib.contextmanager
def threads_set(threads: int) -> Iterator[None]:
    """As set_threads while the block runs; afterwards what was set before."""
    before = torch.get_num_threads()
    with threadpoolctl.threadpool_limits(threads, user_api="blas"):
        torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)
