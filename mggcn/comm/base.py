"""The communicator: what a rank may ask of the others, ordered by events so that any transport can overlap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from mggcn.backend.events import DONE, CommStream, Done, Event

__all__ = ["DONE", "CommStream", "Communicator", "Done", "Event"]

if TYPE_CHECKING:  # the parent of the ranks reads this room too, and needs no torch
    from torch import Tensor


class Communicator(Protocol):
    """Collectives of one rank. All ranks call the same ones in the same order, with equal sizes and types.

    Every operation is asynchronous: it starts after the event `after` (None: after the rank's work so far) and returns
    an event; buffers belong to the transport until that event has been waited for, on the sending side too. A rank must
    wait for each of its events, all ranks in the same order; a rank may wait for a message long after it has waited for
    later ones. Tensors are contiguous; one thread of a rank makes its calls.
    Any call or wait may raise CommError: another rank failed or did not come, or the ranks made different calls.
    On a device that runs asynchronously, a message that fails after the wait shows in `synchronize`.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def use_stream(self, comm_stream: CommStream) -> None:
        """Move the tensors of all later calls in `comm_stream`; earlier calls take host tensors. Collective, called at
        most once.

        Raises: CommError if the transport cannot move data there.
        """
        ...

    def broadcast(self, buf: Tensor, root: int, after: Event | None = None) -> Event:
        """Send `buf` of rank `root` into `buf` of all others. Bytes: nbytes (P - 1) leave the root."""
        ...

    def all_reduce(self, buf: Tensor, after: Event | None = None) -> Event:
        """Replace `buf` on every rank by the sum over ranks, the same bits on each and in each run."""
        ...

    def all_to_all(
        self, out: Tensor, buf: Tensor, out_rows: Sequence[int], buf_rows: Sequence[int], after: Event | None = None
    ) -> Event:
        """Send buf_rows[q] rows of `buf` (in order of q) to rank q, receive out_rows[q] rows from it into `out`.

        Zero counts are allowed; dtype and trailing shape agree on all ranks.
        """
        ...

    def barrier(self) -> None:
        """Return once every rank has called it. Raises: CommError as Event.wait."""
        ...

    def check(self) -> None:
        """Raises: CommError if this or another rank is known to have failed. Never blocks."""
        ...

    def synchronize(self) -> None:
        """Return once the device has done all of the rank's work so far. Raises: CommError as Event.wait.

        Call it before reading a result that messages may hold up: a wait of the device's own (.cpu(), .item()) ends only
        when they do.
        """
        ...

    def device_bytes(self) -> Mapping[str, int]:
        """Return the device memory, in bytes, that the transport itself has taken: at its "start", and by kind of
        message.

        Measured in the calls that are compared, which come first, and exact if nobody else takes memory of the device then;
        empty where a transport takes nothing.
        """
        ...

    def abort(self, reason: str) -> None:
        """Make every wait of every rank, now and later, raise CommError(reason); never blocks, may be called twice.

        The first reason counts. Any thread may call it. A wait for an operation that was already complete may still
        return.
        """
        ...

    def close(self) -> None:
        """Release the transport; collective if nothing was aborted."""
        ...
