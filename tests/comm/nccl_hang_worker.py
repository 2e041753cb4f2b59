"""A rank whose NCCL hangs at the start, as a process of its own: argv is the folder, then what run_ranks adds."""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path

from mggcn.comm import nccl, watchdog
from mggcn.comm.base import Communicator
from mggcn.comm.rank import rank_main
from tests.comm.fake_nccl import FakeNccl, FakeStream


class Hanging:
    """A library whose start never returns."""

    def get_unique_id(self) -> bytes:
        return bytes(128)

    def NcclCommunicator(self, ndev: int, unique_id: bytes, rank: int) -> None:  # noqa: N802
        time.sleep(600)


def body(comm: Communicator) -> None:
    comm.use_stream(FakeStream(FakeNccl()))


if __name__ == "__main__":
    folder, _, rank, _, size, _, rendezvous = sys.argv[1:]
    nccl.nccl_library = Hanging  # type: ignore[assignment]
    watchdog.Watchdog.__init__.__kwdefaults__["leave_s"] = 0.5  # type: ignore[index]
    # The time limit is for the hang alone: both ranks begin once both have loaded what takes long.
    importlib.import_module("torch.distributed")
    Path(folder, f"ready-{rank}").touch()
    while not all(Path(folder, f"ready-{other}").exists() for other in range(int(size))):
        time.sleep(0.01)
    sys.exit(rank_main(int(rank), int(size), Path(rendezvous), 3.0, Path(folder), body, "nccl"))
