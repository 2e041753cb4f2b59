"""MG-GCN's staged broadcast (section 5.1, figure 2): P stages, rank j sends its rows in stage j.

Every rank first multiplies its own tile, which needs no message, while the first two blocks are on the wire; then tile
after tile, while the next block arrives in the other of two slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mggcn.backend.base import Epilogue, Event, KernelBackend, Sparse
from mggcn.plan.memory import BufferSpec

if TYPE_CHECKING:
    from torch import Tensor

    from mggcn.comm.base import Communicator


@dataclass(frozen=True, slots=True)
class BroadcastPlan:
    """Slots and messages of the staged broadcast for one rank; counts: rows of every rank."""

    rank: int
    counts: tuple[int, ...]

    @property
    def num_slots(self) -> int:
        return min(2, len(self.counts) - 1)

    def buffers(self, op: str, cols: int, dtype: str) -> tuple[BufferSpec, ...]:
        others = [c for r, c in enumerate(self.counts) if r != self.rank]
        return tuple(BufferSpec(f"{op}.bc{s + 1}", max(others), cols, dtype) for s in range(self.num_slots))

    @property
    def num_spmm(self) -> int:
        return len(self.counts)

    @property
    def messages(self) -> int:
        return len(self.counts) if len(self.counts) > 1 else 0

    def bytes_sent(self, spec: BufferSpec) -> int:
        return spec.nbytes * (len(self.counts) - 1)


class Broadcast:
    """The strategy on one rank; tiles and tiles_t hold one sparse matrix per owner of the columns."""

    exact = True

    def __init__(
        self,
        plan: BroadcastPlan,
        tiles: Sequence[Sparse],
        tiles_t: Sequence[Sparse],
        comm: Communicator,
        backend: KernelBackend,
    ) -> None:
        self._plan = plan
        self._tiles = tiles
        self._tiles_t = tiles_t
        self._comm = comm
        self._backend = backend

    def begin_epoch(self, epoch: int) -> None:
        return

    def forward(self, h: Tensor, out: Tensor, buffers: Sequence[Tensor], layer: int, epilogue: Epilogue | None) -> None:
        self._staged(self._tiles, h, out, buffers, epilogue)

    def backward(
        self, g: Tensor, out: Tensor, buffers: Sequence[Tensor], layer: int, epilogue: Epilogue | None
    ) -> None:
        self._staged(self._tiles_t, g, out, buffers, epilogue)

    def state(self) -> Mapping[str, Any]:
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        return

    def _staged(
        self, tiles: Sequence[Sparse], dense: Tensor, out: Tensor, slots: Sequence[Tensor], epilogue: Epilogue | None
    ) -> None:
        me, size = self._plan.rank, len(self._plan.counts)
        remote = [j for j in range(size) if j != me]
        last = remote[-1] if remote else me
        blocks = {j: slots[k % len(slots)][: self._plan.counts[j]] for k, j in enumerate(remote)}
        blocks[me] = dense
        arrivals: list[Event] = []
        for root in range(min(2, size)):
            arrivals.append(self._send(blocks[root], root, self._backend.record()))
        self._multiply(tiles[me], dense, out, False, epilogue if last == me else None)
        for j in range(size):
            arrivals[j].wait()
            if j != me:
                self._multiply(tiles[j], blocks[j], out, True, epilogue if j == last else None)
            if j + 2 < size:
                # The slot of stage j + 2 fed a multiply that this event has seen: stage j's, or stage j - 1's if j is ours.
                arrivals.append(self._send(blocks[j + 2], j + 2, self._backend.record()))

    def _send(self, block: Tensor, root: int, after: Event) -> Event:
        # Rows travel with their padding, so that a message is one contiguous range.
        return self._comm.broadcast(block.as_strided((block.shape[0], block.stride(0)), block.stride()), root, after)

    def _multiply(self, tile: Sparse, dense: Tensor, out: Tensor, accumulate: bool, epilogue: Epilogue | None) -> None:
        if accumulate and tile.nnz == 0 and epilogue is None:
            return
        self._backend.spmm(tile, dense, out, accumulate=accumulate, epilogue=epilogue)
