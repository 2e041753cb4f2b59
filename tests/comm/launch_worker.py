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
BAD_EPOCH = 3


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", required=True)
    parser.add_argument("--bad-rank", type=int, default=1)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--size", type=int, default=1)
    parser.add_argument("--rendezvous", type=Path)
    options = parser.parse_args()

    def body(comm) -> None:  # type: ignore[no-untyped-def]
        work(comm, options.mode, options.bad_rank, options.folder)

    if torchrun_env() is not None:
        return torchrun_main(60.0, body)
    return rank_main(options.rank, options.size, options.rendezvous, 60.0, options.folder, body)


def work(comm, mode: str, bad_rank: int, folder: Path) -> None:  # type: ignore[no-untyped-def]
    """Add up ones for some epochs, about 50 a second."""
    import torch

    signals: list[int] = []
    if mode == "stop":
        signal.signal(signal.SIGTERM, lambda signum, _frame: signals.append(signum))
    (folder / f"pid-{comm.rank}").write_text(str(os.getpid()))
    for epoch in range(EPOCHS if mode != "short" else 3):
        (folder / f"epoch-{comm.rank}").write_text(str(epoch))
        if comm.rank == bad_rank and epoch == BAD_EPOCH:
            print(f"rank {comm.rank} is about to fail", file=sys.stderr, flush=True)
            fail(mode)
        stop = torch.tensor([len(signals)])
        comm.all_reduce(stop).wait()
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
    if mode == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
