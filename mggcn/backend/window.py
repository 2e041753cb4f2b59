"""Windows of rows: a pass over many rows, cut into calls on some of them at a time, that gives the bits of one call.

V rows of all windows. Between `begin_windows` and `end_windows` a backend's calls are on rows first, ... of V: the result
for a row is that of a call over all rows, and sums over rows (a^T b, column sums, a loss) go on from the window before.
They are complete behind the last window.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from mggcn.backend.base import KernelBackend

if TYPE_CHECKING:
    from torch import Tensor

STEP = 64
"""Windows begin at multiples of so many rows: no kernel sums more than 32 rows at once (AMX's tiles)."""


@dataclass(frozen=True, slots=True)
class Window:
    """Rows first, ..., first + count - 1 of `total`."""

    first: int
    count: int
    total: int

    @property
    def end(self) -> int:
        return self.first + self.count

    @property
    def is_first(self) -> bool:
        return self.first == 0

    @property
    def is_last(self) -> bool:
        return self.end == self.total


class WindowedBackend(KernelBackend, Protocol):
    """A backend whose calls may be on windows of rows.

    Every window makes the same calls in the same order, with the same weights. Operands, results and vectors of rows (ids,
    scales, labels, masks) are those of the window's rows alone, and `first_row` counts from its first. Calls with sums over
    rows are on all rows of the window:

    - `matmul` with a transposed left operand: `out` is written, or with `accumulate` added to, in the last window alone;
    - column sums (`activation_grad`, `product_grad`, losses, norms): `partials` is overwritten in the first window and
      added to in others, and must stay as it is between them;
    - `softmax_xent`, `entry_loss`: `loss` is added to in the last window alone.

    The rows of a left operand of one column must lie apart in memory: else its transpose is a row itself, not a sum.
    Sums over entries of a matrix (`spmm`, edges, neighbours) and rows that are moved know of no windows.
    """

    def begin_windows(self, total: int, memory: Tensor) -> None:
        """Begin windows over `total` rows; memory: uint8, `window_bytes` of it, aligned to 8 bytes, for nothing else until
        they end.

        Raises: BackendError if products of some rows could have other bits than those of all.
        """
        ...

    def window(self, first: int, count: int) -> None:
        """Let calls be on rows first, ..., first + count - 1 from now on: those behind the window before, a multiple of
        STEP unless they are the last.

        Raises: BackendError for other rows, or if the window before lacks a call with sums.
        """
        ...

    def end_windows(self, *, complete: bool = True) -> None:
        """Let calls be on all rows again. complete: whether all windows have been, which is checked; not after an error.

        Raises: BackendError for windows or calls that are missing.
        """
        ...

    def apart(self) -> AbstractContextManager[None]:
        """Return a context in which calls stand alone, as if there were no windows: for sums over blocks of rows that end
        where windows end, each added to the result.
        """
        ...

    def glance_at_memory(self) -> None:
        """Have `peak_bytes` know the memory of this process at this moment. Cost: some 50 us, on any thread."""
        ...
