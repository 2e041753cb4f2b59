"""torch's backend `nccl`: the process group that moves tensors of GPUs.

Messages are launched on the stream that is current, the comm stream; no thread of mggcn calls CUDA beside the rank's own
while it trains. torch's own watchdog, a thread of C++ that needs no Python, is the last resort where the rank's thread
waits in a launch or a copy: it ends the process by SIGABRT once a message takes longer than its time limit, or NCCL
reports an error. Its monitor ends the process if the watchdog itself hangs. Neither sees the messages of a CUDA graph:
for those `DistributedCommunicator.synchronize` keeps the time limit.

Verified without a GPU: the names of torch that are used here, against a CUDA build (tests/comm/torch_nccl.json), and the
communicator's calls over a stand-in with a stream (tests/comm/fake_nccl.py). On GPUs nothing has been verified yet:
tests/comm/test_gpu.py does it (`-m cuda` with one rank, `-m nccl` with several).
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from datetime import timedelta
from typing import final

import torch
import torch.distributed as dist

from mggcn.comm.nccl_settings import make_settings
from mggcn.errors import BackendError


@final
class Nccl:
    """Makes NCCL's group of this process; NCCL reads its settings from `environ`, to which mggcn's are added first.

    Raises: BackendError if torch has no NCCL.
    """

    def __init__(self, environ: MutableMapping[str, str] = os.environ) -> None:
        self._device: torch.device | None = None
        if not dist.is_nccl_available():
            raise BackendError(
                "run.transport nccl needs a torch that is built with NCCL, and this one is not; install torch for CUDA on "
                "Linux (docs/install.md)"
            )
        make_settings(environ)

    def open(self, device: torch.device, timeout: timedelta) -> dist.ProcessGroup:
        """Return a group of all ranks, connected. Collective, without a time limit of its own.

        timeout: after which torch's watchdog gives a message up.
        """
        self._device = device
        self._enter_thread()
        # torch before 2.8 moves messages on a stream of its own, beside the comm stream.
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timeout
        group: dist.ProcessGroup = dist.new_group(backend="nccl", timeout=timeout, pg_options=options)
        group._get_backend(device).eager_connect_single_device(device)
        return group

    def close(self, group: dist.ProcessGroup) -> None:
        """Release the group. NCCL waits for CUDA graphs that hold its messages."""
        self._enter_thread()
        dist.destroy_process_group(group)

    def _enter_thread(self) -> None:
        """Have this thread use the rank's GPU: that of a new one is GPU 0, where NCCL would make a context, too."""
        if self._device is not None:
            torch.cuda.set_device(self._device)
