"""The communicator: what a rank may ask of the others, ordered by events so that any transport can overlap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol, final

if TYPE_CHECKING:  # the parent of the ranks reads this room too, and needs no torch
    from torch import Tensor


class Event(Protocol):
    """A point in a rank's work that other work waits for."""

    def wait(self) -> None:
        """Return when the work is done (CPU) or ordered before what follows (GPU).

        Raises: CommError if another rank failed or the transport's timeout passed.
        """
        ...


@final
class Done:
    """The event of work that is complete already."""

    __slots__ = ()

    def wait(self) -> None: ...


DONE: Final = Done()


class Communicator(Protocol):
    """Collectives of one rank. All ranks call the same ones in the same order, with equal sizes and types.

    Every operation is asynchronous: it starts after the event `after` (None: at once) and returns an event; buffers
    belong to the transport until that event has been waited for, on the sending side too. A rank must wait for each of
    its events, in the order of the calls. Tensors are contiguous; one thread of a rank makes its calls.
    Any call or wait may raise CommError: another rank failed or did not come, or the ranks asked for different things.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

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

    def abort(self, reason: str) -> None:
        """Make every wait of every rank, now and later, raise CommError(reason); never blocks, may be called twice.

        The first reason counts. Any thread may call it. A wait for something that was complete before may still return.
        """
        ...

    def close(self) -> None:
        """Release the transport; collective if nothing was aborted."""
        ...
