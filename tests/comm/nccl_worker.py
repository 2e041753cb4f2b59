"""A rank with a GPU of its own, as a process: argv is the mode, for the mode contract a path, then what run_ranks adds."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch

from mggcn.backend.cuda.device import CudaDevice
from mggcn.comm.base import Communicator
from mggcn.comm.nccl_settings import sizes_of, user_settings
from mggcn.comm.rank import gpu_index, rank_main, torchrun_env, torchrun_main
from mggcn.errors import CommError, GraphError
from tests.comm import cases
from tests.comm.test_contract import PLAIN


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=("contract", "fail", "hang"))
    parser.add_argument("path", nargs="?", default="")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--size", type=int, default=1)
    parser.add_argument("--rendezvous", type=Path)
    options = parser.parse_args()
    timeout_s = 10.0 if options.mode == "hang" else 60.0

    def body(comm: Communicator) -> None:
        device = CudaDevice(gpu_index(comm.rank, torch.cuda.device_count()), capture=False)
        with device.torch_device:
            comm.use_stream(device.comm_stream)
            {"contract": contract, "fail": fail, "hang": hang}[options.mode](comm, options.path)
            comm.synchronize()

    if torchrun_env() is not None:
        return torchrun_main(timeout_s, body, "nccl")
    folder = options.rendezvous.parent.parent
    return rank_main(options.rank, options.size, options.rendezvous, timeout_s, folder, body, "nccl")


def contract(comm: Communicator, path: str) -> None:
    for case in (*PLAIN, cases.allocates_nothing_large):
        case(comm)
    taken = comm.device_bytes()
    planned = sizes_of(user_settings(os.environ)).nbytes(comm.size, p2p=True)
    assert 0 < sum(taken.values()) <= planned, f"NCCL took {taken}, {planned} are planned"
    Path(f"{path}-{comm.rank}").write_bytes(b"".join(cases.all_reduce_repeats(comm, 3)))


def fail(comm: Communicator, path: str) -> None:
    make_calls(comm, 100)
    if comm.rank == 1:
        time.sleep(1)
        raise GraphError("row 7 is torn")
    make_calls(comm, 1)
    comm.synchronize()
    raise CommError("the device went on without rank 1")


def hang(comm: Communicator, path: str) -> None:
    make_calls(comm, 100 if comm.rank == 1 else 101)
    comm.synchronize()
    while True:
        comm.check()
        time.sleep(0.1)


def make_calls(comm: Communicator, count: int) -> None:
    """More than are compared before they start; each needs every rank, while a small broadcast may leave its root alone."""
    buf = torch.zeros(1000)
    for _ in range(count):
        comm.all_reduce(buf).wait()


if __name__ == "__main__":
    sys.exit(main())
