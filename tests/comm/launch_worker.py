"""A program of several ranks that fails as told: the tests of launch.py start it."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

from mggcn.comm.launch import Interrupted, rank_main, torchrun_env, torchrun_main
from mggcn.errors import GraphError

EPOCHS = 400
COMPARED = 64
"""Calls that ranks compare before they start them (control_store.CHECKED_CALLS); it would import torch."""
BAD_EPOCH = 3


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", required=True)
    parser.add_argument("--bad-rank", type=int, default=1)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--transport", default="gloo")
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--size", type=int, default=1)
    parser.add_argument("--rendezvous", type=Path)
    options = parser.parse_args()

    def body(comm) -> None:  # type: ignore[no-untyped-def]
        if options.transport == "nccl":
            from tests.comm.fake_nccl import FakeStream

            comm._device.library.absent = {0, 1} if options.mode == "start" else set()
            comm.use_stream(FakeStream(comm._device.library, comm.rank, lazy=True))
        work(comm, options.mode, options.bad_rank, options.folder)

    if torchrun_env() is not None:
        return torchrun_main(60.0, body)
    if options.transport == "nccl":
        stand_in(options.rank, options.size, options.rendezvous.parent)
    # The time limit is for what goes wrong alone: all ranks begin once all have loaded what takes long.
    import torch.distributed as dist

    dist.is_available()
    (options.folder / f"ready-{options.rank}").touch()
    while not all((options.folder / f"ready-{rank}").exists() for rank in range(options.size)):
        time.sleep(0.01)
    return rank_main(
        options.rank, options.size, options.rendezvous, options.timeout, options.folder, body, options.transport
    )


def stand_in(rank: int, size: int, folder: Path) -> None:
    """Have messages of a device go over the stand-in for NCCL."""
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    from mggcn.comm import distributed
    from tests.comm.fake_nccl import FakeNccl

    store = FileStore(str(folder / "device"), size)
    distributed.Nccl = lambda: FakeNccl().of(store, rank, size)  # type: ignore[assignment,misc]


def work(comm, mode: str, bad_rank: int, folder: Path) -> None:  # type: ignore[no-untyped-def]
    """Add up ones for some epochs, about 50 a second."""
    import torch

    signals: list[int] = []
    if mode == "stop":
        signal.signal(signal.SIGTERM, lambda signum, _frame: signals.append(signum))
    (folder / f"pid-{comm.rank}").write_text(str(os.getpid()))
    if mode == "fewer":
        for _ in range(COMPARED + 10 - (comm.rank == bad_rank)):
            comm.all_reduce(torch.ones(5)).wait()
        comm.synchronize()
        return
    if mode.startswith("late"):
        for _ in range(COMPARED):
            comm.all_reduce(torch.ones(1)).wait()
    for epoch in range(EPOCHS if mode != "short" else 3):
        (folder / f"epoch-{comm.rank}").write_text(str(epoch))
        if comm.rank == bad_rank and epoch == BAD_EPOCH:
            print(f"rank {comm.rank} is about to fail", file=sys.stderr, flush=True)
            fail(mode.removeprefix("late "))
        stop = torch.tensor([len(signals)])
        comm.all_reduce(stop).wait()
        comm.synchronize()
        if int(stop):
            (folder / f"saved-{comm.rank}").write_text(str(epoch))
            time.sleep(0.5 * comm.rank)
            raise Interrupted(signal.SIGTERM)
        time.sleep(0.02)


def fail(mode: str) -> None:
    if mode == "raise":
        raise GraphError("row 7 points at vertex 9 of 8")
    if mode == "exit":
        sys.exit(0)
    if mode == "leave":
        os._exit(0)
    if mode == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "halt":
        os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    sys.exit(main())
