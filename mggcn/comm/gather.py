"""Collectives of set-up on host tensors: exchange a text of every rank, and check that each uses a GPU of its own."""

from __future__ import annotations

import uuid
from collections import defaultdict

import torch

from mggcn.comm.base import Communicator
from mggcn.comm.calls import name_ranks
from mggcn.errors import BackendError


def gather_texts(comm: Communicator, text: str) -> list[str]:
    """Return the texts of all ranks, in rank order, on every rank. Collective; the transport must carry host tensors.

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


def refuse_shared(comm: Communicator, gpu: str) -> None:
    """Raise an error if another rank uses this rank's GPU. Collective; called before `use_stream`.

    gpu: its UUID, which differs between machines, and between the instances of a divided GPU.
    Raises: BackendError on all ranks, naming those that share one.
    """
    found = torch.zeros(comm.size, 16, dtype=torch.uint8)
    found[comm.rank] = torch.frombuffer(bytearray(uuid.UUID(gpu).bytes), dtype=torch.uint8)
    comm.all_reduce(found).wait()
    ranks_of = defaultdict(list)
    for rank, number in enumerate(found.tolist()):
        ranks_of[bytes(number)].append(rank)
    for number, ranks in ranks_of.items():
        if len(ranks) > 1:
            raise BackendError(
                f"{name_ranks(ranks)} would use the same GPU (UUID {uuid.UUID(bytes=number)}), but each needs its "
                "own; start fewer ranks, have the launcher show each process its own GPU or all of them, or use "
                "--transport threads for several ranks on one GPU"
            )
