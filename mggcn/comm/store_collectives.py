"""Collectives on small host tensors through the store: what ranks on GPUs exchange before and beside the data.

A path, a peak or a score needs no device, no capture and no second transport that could fail to connect.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Final, final

import torch
from torch import Tensor

from mggcn.backend.host import HostStream
from mggcn.comm.base import DONE, CommStream, Event, Moving
from mggcn.comm.calls import Call, all_reduce_call, all_to_all_call, broadcast_call
from mggcn.comm.control_store import ControlStore
from mggcn.errors import CommError

MAX_BYTES: Final = 4 << 20
"""The store is a log file or one server for all ranks: larger messages belong on the device."""


@final
class StoreCommunicator:
    """One rank; every operation is complete when it returns, and every call is compared with the other ranks'.

    Bytes: every rank reads what all others posted. Sums are formed in rank order: the same bits everywhere.
    """

    def __init__(self, control: ControlStore) -> None:
        self._control = control

    @property
    def rank(self) -> int:
        return self._control.rank

    @property
    def size(self) -> int:
        return self._control.size

    def use_stream(self, comm_stream: CommStream, moving: Moving = nullcontext) -> None:
        if comm_stream != HostStream():
            raise CommError("the store carries host tensors; with GPUs use nccl, or threads on one GPU")

    def broadcast(self, buf: Tensor, root: int, after: Event | None = None) -> Event:
        posted = self._meet(broadcast_call(buf, root, self.size), buf if root == self.rank else None, after)
        if root != self.rank:
            _fill(buf, posted[root][1])
        return DONE

    def all_reduce(self, buf: Tensor, after: Event | None = None) -> Event:
        posted = self._meet(all_reduce_call(buf), buf, after)
        _fill(buf, posted[0][1])
        for _, text in posted[1:]:
            buf.add_(_tensor(text, buf.dtype).view(buf.shape))
        return DONE

    def all_to_all(
        self, out: Tensor, buf: Tensor, out_rows: Sequence[int], buf_rows: Sequence[int], after: Event | None = None
    ) -> Event:
        call = all_to_all_call(out, buf, out_rows, buf_rows, self.size)
        row_bytes = call.count * buf.itemsize
        posted = self._meet(call, buf, after)
        mine: list[bytes] = []
        for sender, text in posted:
            first = sum(sender.sends[: self.rank]) * row_bytes
            mine.append(text[first : first + sender.sends[self.rank] * row_bytes])
        _fill(out, b"".join(mine))
        return DONE

    def barrier(self) -> None:
        self._meet(Call(op="barrier"), None, None)

    def check(self) -> None:
        self._control.check()

    def device_bytes(self) -> dict[str, int]:
        return {}

    def abort(self, reason: str) -> None:
        self._control.abort(reason)

    def close(self) -> None:
        """Meet once more; after an abort there is nothing to do."""
        if self._control.failure is None:
            self._control.leave()

    def _meet(self, call: Call, buf: Tensor | None, after: Event | None) -> list[tuple[Call, bytes]]:
        """Compare the call with the other ranks', and exchange the bytes of `buf`."""
        (after or DONE).wait()
        self._control.begin(call)
        if buf is None:
            return self._control.compare()
        if buf.nbytes > MAX_BYTES:
            raise CommError(
                f"{call} is {buf.nbytes} bytes of host memory; at most {MAX_BYTES} go through the store: "
                "put the tensor on the device"
            )
        return self._control.compare(buf.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())


def _tensor(text: bytes, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=dtype) if text else torch.empty(0, dtype=dtype)


def _fill(buf: Tensor, text: bytes) -> None:
    buf.view(-1).copy_(_tensor(text, buf.dtype))
