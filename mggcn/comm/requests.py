"""Ranks ask the owners of rows for them: two uneven exchanges, after which each knows which rows to send to whom.

K rows that a rank asks for, A that it is asked for, P ranks, W numbers that it tells all. Source: DistDGL's feature store
(Zheng et al., IA3 2020), without servers: ranks ask together, because all take every step.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mggcn.comm.base import Communicator, Event

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Requests:
    """What ranks ask each other for. order int64 (K,): places of what this rank asks for, in the order in which it comes.

    wanted, given: how many rows from and to each rank; rows int32 (A,): those that this rank gives, of each asking rank in
    turn. told int64 (P, W): the numbers of each rank.
    """

    order: npt.NDArray[np.int64]
    wanted: list[int]
    given: list[int]
    rows: Tensor
    told: Tensor


def request_rows(
    comm: Communicator, owners: npt.NDArray[Any], rows: npt.NDArray[np.int32], numbers: tuple[int, ...] = ()
) -> Generator[Event, None, Requests]:
    """Tell the owners of rows which of them are wanted, and all ranks some numbers, as many on each.

    owners (K,): a rank for each row; rows (K,): as its owner knows it. Yields the event of each of two messages, to be
    waited for before going on. Collective. Bytes: 8 (1 + W) to each rank, and 4 a row. Raises: CommError.
    """
    order = np.argsort(owners, kind="stable")
    wanted = np.bincount(owners, minlength=comm.size)
    told, heard = (torch.zeros(comm.size, 1 + len(numbers), dtype=torch.int64) for _ in range(2))
    told[:, 0], told[:, 1:] = torch.from_numpy(wanted), torch.tensor(numbers, dtype=torch.int64)
    ones = [1] * comm.size
    yield comm.all_to_all(heard, told, ones, ones)
    counts, given = wanted.tolist(), heard[:, 0].tolist()
    asked = torch.empty(sum(given), dtype=torch.int32)
    yield comm.all_to_all(asked, torch.from_numpy(rows[order]), given, counts)
    return Requests(order=order, wanted=counts, given=given, rows=asked, told=heard[:, 1:])


def finished(exchange: Generator[Event, None, T]) -> T:
    """Wait for every message of an exchange, each in its turn, and return what it gives. Raises: CommError."""
    while True:
        try:
            event = next(exchange)
        except StopIteration as done:
            found: T = done.value
            return found
        event.wait()
