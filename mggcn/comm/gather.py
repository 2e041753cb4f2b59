"""Short texts of every rank on every rank, between host tensors: what ranks tell each other beside the data."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from mggcn.comm.base import Communicator


def gather_texts(comm: Communicator, text: str) -> list[str]:
    """Return the texts of all ranks, in their order, on each. Collective; the transport must carry host tensors.

    Bytes: each text to all other ranks, after a number from every rank.
    """
    mine = text.encode()
    sizes = torch.zeros(comm.size, dtype=torch.int64)
    sizes[comm.rank] = len(mine)
    comm.all_reduce(sizes).wait()
    found: list[str] = []
    for rank, size in enumerate(sizes.tolist()):
        buf = torch.zeros(size, dtype=torch.uint8)
        if rank == comm.rank and size:
            buf.copy_(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
        comm.broadcast(buf, rank).wait()
        found.append(bytes(buf.tolist()).decode())
    return found
