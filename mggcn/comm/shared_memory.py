"""Memory that the ranks of one machine share: one writes rows that all read, and no message is sent."""

from __future__ import annotations

import contextlib
import mmap
import os

import torch
from torch import Tensor

from mggcn.comm.base import Communicator
from mggcn.errors import CommError
from mggcn.files import reason


def shared_memory(nbytes: int, comm: Communicator) -> Tensor:
    """Return zeroed bytes, the same ones on every rank, threads or processes of one machine. Collective.

    The memory has no name that could outlive the ranks: the others open rank 0's descriptor. What one rank writes, another
    may read after a barrier. Raises: CommError for a rank on another machine.
    """
    size, descriptor = max(nbytes, 64), -1
    # Process, descriptor and inode of rank 0's memory.
    found = torch.zeros(3, dtype=torch.float64)
    if comm.rank == 0:
        descriptor = os.memfd_create("mggcn-rows")
        os.truncate(descriptor, size)
        found.copy_(torch.tensor([os.getpid(), descriptor, os.fstat(descriptor).st_ino], dtype=torch.float64))
    comm.all_reduce(found).wait()
    pid, number, inode = (int(part) for part in found.tolist())
    try:
        if comm.rank:
            descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
        if os.fstat(descriptor).st_ino != inode:
            raise CommError(f"rank {comm.rank} is on another machine than rank 0, and cannot share memory with it")
        memory = mmap.mmap(descriptor, size)
    except OSError as error:
        raise CommError(
            f"rank {comm.rank} cannot open the memory that rank 0 shares: {reason(error)}; put all ranks on one machine, "
            "as one user"
        ) from error
    with contextlib.suppress(OSError):  # a kernel without huge pages gives small ones
        memory.madvise(mmap.MADV_HUGEPAGE)
    comm.barrier()
    os.close(descriptor)
    return torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]
