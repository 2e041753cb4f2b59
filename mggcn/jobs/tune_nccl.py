"""What NCCL takes of the memory of this machine's GPUs: measured by every rank, as ranks really run.

`python -m mggcn.jobs.tune_nccl FOLDER --result FILE --rank R --size P --rendezvous FILE` is one rank process.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mggcn import native
from mggcn.comm.launch import run_ranks
from mggcn.comm.nccl_settings import sizes_of, user_settings
from mggcn.comm.rank import gpu_index, rank_main
from mggcn.errors import CommError
from mggcn.jobs.nccl_record import MOMENTS, largest_taken

if TYPE_CHECKING:
    from torch import Tensor

    from mggcn.comm.base import Communicator

COUNT: Final = 2**20
"""Values of float32 to each receiver: 4 MiB, so that NCCL takes the protocol of large messages."""
TIMEOUT_S: Final = 120.0


def sizes_at_hand(ranks: Sequence[int]) -> list[int]:
    """Return those numbers of ranks that can have a GPU each here, and that of all GPUs; none without two usable GPUs."""
    from mggcn.backend.cuda.driver import visible_gpus
    from mggcn.backend.cuda.presence import missing_for_cuda

    if missing_for_cuda():
        return []
    gpus = len(visible_gpus())
    return sorted({size for size in (*ranks, gpus) if 2 <= size <= gpus})


def measure_nccl(ranks: Sequence[int], folder: Path, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return the [[nccl]] table for each number of ranks; none on a machine without two GPUs. Raises: CommError."""
    tables = []
    for size in sizes_at_hand(ranks):
        say(f"NCCL's memory between {size} GPUs")
        tables.append(nccl_table(size, _on_processes(size, folder)))
    return tables


def nccl_table(size: int, taken: dict[str, int]) -> dict[str, Any]:
    """Turn what NCCL took, by moment, into a [[nccl]] table for plans under the same settings."""
    sizes = sizes_of(user_settings(os.environ))
    p2p = taken["all_to_all"]
    collective = sum(taken[moment] for moment in MOMENTS) - p2p
    return {"ranks": size, **dataclasses.asdict(sizes), "collective_bytes": collective, "p2p_bytes": p2p}


def _on_processes(size: int, folder: Path) -> dict[str, int]:
    result = folder / f"nccl-{size}.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "mggcn.jobs.tune_nccl", str(folder), "--result", str(result)]
    run_ranks(command, size, folder, timeout_s=TIMEOUT_S)
    try:
        taken: dict[str, int] = json.loads(result.read_text())
    except (OSError, ValueError) as error:
        raise CommError(f"{size} ranks over NCCL have left no result in {result}: {error}") from error
    return taken


def measure(comm: Communicator, zeros: Callable[[int], Tensor]) -> dict[str, int]:
    """Send one message of each kind to every rank; return what that took, by moment, of the rank that lost most.

    zeros: returns as many bytes of the device. Collective.
    """
    import torch

    rows = [0 if peer == comm.rank else 1 for peer in range(comm.size)]
    out, buf = (zeros(4 * COUNT * sum(rows)).view(torch.float32).view(-1, COUNT) for _ in range(2))
    comm.broadcast(buf, 0).wait()
    comm.all_reduce(buf).wait()
    comm.all_to_all(out, buf, rows, rows).wait()
    return largest_taken(comm, zeros)


def main() -> int:
    """Run one rank process, with a GPU of its own, and leave the measurements of rank 0."""
    native.limit_spinning()
    parser = argparse.ArgumentParser(prog="mggcn.jobs.tune_nccl")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--rendezvous", type=Path, required=True)
    a = parser.parse_args()

    def body(comm: Communicator) -> None:
        import torch

        from mggcn.backend.cuda.device import CudaDevice
        from mggcn.backend.cuda.driver import visible_gpus

        device = CudaDevice(gpu_index(comm.rank, len(visible_gpus())), capture=False)
        comm.use_stream(device.comm_stream)
        taken = measure(comm, lambda n: torch.zeros(n, dtype=torch.uint8, device=device.torch_device))
        if comm.rank == 0:
            temporary = a.result.with_suffix(".tmp")
            temporary.write_text(json.dumps(taken))
            os.replace(temporary, a.result)

    return rank_main(a.rank, a.size, a.rendezvous, TIMEOUT_S, a.folder, body, "nccl")


if __name__ == "__main__":
    sys.exit(main())
