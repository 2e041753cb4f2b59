"""The transports on real GPUs: the contract of cases.py on device tensors, with the device's own streams."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mggcn.backend.cuda.device import CudaDevice
from mggcn.backend.cuda.presence import missing_for_cuda
from mggcn.comm.base import Communicator
from mggcn.comm.distributed import DistributedCommunicator, connect
from mggcn.comm.launch import run_ranks
from mggcn.comm.threads import run_threads
from mggcn.errors import CommError, GraphError
from tests.comm import cases
from tests.comm.test_contract import PLAIN
from tests.comm.test_launch import ENV
from tests.comm.worlds import HANGING_S

CASES = (*PLAIN, cases.allocates_nothing_large)


def need_gpus(count: int) -> None:
    if missing := missing_for_cuda():
        pytest.skip(missing)
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs, this machine shows {torch.cuda.device_count()}")


def on_one_gpu(size: int, case: Callable[..., object]) -> list[object]:
    def rank(comm: Communicator) -> object:
        device = CudaDevice(0, capture=False)
        with device.torch_device:
            comm.use_stream(device.comm_stream)
            result = case(comm)
            device.synchronize()
        return result

    return run_threads(size, rank, 60.0)


@pytest.mark.cuda
@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("case", PLAIN, ids=lambda case: case.__name__)
def test_logical_ranks_share_a_gpu(size: int, case: Callable[[Communicator], None]) -> None:
    """Fails if the threads transport, right on the host, needs an order that streams do not give."""
    need_gpus(1)
    assert on_one_gpu(size, case) == [None] * size


@pytest.mark.cuda
def test_logical_ranks_sum_as_on_the_host() -> None:
    """Fails if a sum on the device is formed in another order than on the host."""
    need_gpus(1)

    def sums(comm: Communicator) -> object:
        return cases.all_reduce_repeats(comm, 2)

    assert on_one_gpu(4, sums) == run_threads(4, sums, 60.0)


def one_rank(folder: Path, timeout_s: float = 60.0) -> DistributedCommunicator:
    return connect(0, 1, f"file://{folder}/store", timeout_s, True, "nccl")


@pytest.mark.cuda
def test_nccl_with_one_rank(tmp_path: Path) -> None:
    """Fails if a call does not fit torch's NCCL, or its events do not order the streams."""
    need_gpus(1)
    device = CudaDevice(0, capture=False)
    comm = one_rank(tmp_path)
    with device.torch_device:
        comm.use_stream(device.comm_stream)
        for case in CASES:
            case(comm)
        device.synchronize()
    comm.close()


@pytest.mark.cuda
def test_nccl_in_a_cuda_graph(tmp_path: Path) -> None:
    """Fails if a message cannot be recorded, or is not repeated with the rest; and if its graph blocks the end."""
    need_gpus(1)
    device = CudaDevice(0, capture=True)
    comm = one_rank(tmp_path)
    with device.torch_device:
        comm.use_stream(device.comm_stream)
        buf, total = torch.ones(1000), torch.zeros(1000)

        def epoch() -> None:
            buf.mul_(2)
            comm.all_reduce(buf, device.record()).wait()
            total.add_(buf)

        repeated = device.repeatable(epoch)
        for _ in range(6):
            repeated()
        comm.synchronize()
        assert repeated.state == "captured"
        assert torch.all(buf == 64)
        assert torch.all(total == 126)
    del repeated
    started = time.monotonic()
    comm.close()
    assert time.monotonic() - started < HANGING_S


@pytest.mark.cuda
def test_nccl_abort_with_one_rank(tmp_path: Path) -> None:
    """Fails if a failure is not raised by calls, or keeps the rank from its end."""
    need_gpus(1)
    device = CudaDevice(0, capture=False)
    comm = one_rank(tmp_path)
    with device.torch_device:
        comm.use_stream(device.comm_stream)
        buf = torch.ones(1000)
        comm.all_reduce(buf).wait()
        comm.synchronize()
        comm.abort("disk full")
        with pytest.raises(CommError, match="disk full"):
            comm.all_reduce(buf)
        device.synchronize()
    comm.close()
    dist.destroy_process_group()  # the process goes on here


def worker(mode: str) -> list[str]:
    return [sys.executable, str(Path(__file__).with_name("nccl_worker.py")), mode]


@pytest.mark.nccl
@pytest.mark.parametrize("size", [2, 4, 8])
def test_nccl_contract(size: int, tmp_path: Path) -> None:
    """Fails if NCCL between GPUs breaks the contract, or sums to other bits on another rank or in another run."""
    need_gpus(size)
    for run in ("a", "b"):
        run_ranks([*worker("contract"), str(tmp_path / run)], size, tmp_path, timeout_s=120.0, env=ENV)
    sums = {path.read_bytes() for run in ("a", "b") for path in tmp_path.glob(f"{run}-*")}
    assert len(list(tmp_path.glob("?-[0-9]*"))) == 2 * size
    assert len(sums) == 1


@pytest.mark.nccl
def test_nccl_failure_of_a_rank(tmp_path: Path) -> None:
    """Fails if a rank whose device waits for one that failed is not freed, or the failure is not the one reported."""
    need_gpus(2)
    started = time.monotonic()
    with pytest.raises(GraphError, match="rank 1: row 7 is torn"):
        run_ranks(worker("fail"), 2, tmp_path, timeout_s=60.0, env=ENV)
    assert time.monotonic() - started < 60


@pytest.mark.nccl
def test_nccl_hang(tmp_path: Path) -> None:
    """Fails if unequal calls hang the devices beyond the time limit."""
    need_gpus(2)
    with pytest.raises(CommError, match=r"waited 10 s for rank 1: its device stands still"):
        run_ranks(worker("hang"), 2, tmp_path, timeout_s=60.0, env=ENV)


@pytest.mark.nccl
def test_nccl_under_torchrun(tmp_path: Path) -> None:
    """Fails if ranks that torchrun starts do not find each other, or share a GPU."""
    need_gpus(2)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *worker("contract")[1:]]
    done = subprocess.run([sys.executable, *command, str(tmp_path / "a")], env={**ENV}, timeout=180, check=False)
    assert done.returncode == 0
    assert len(list(tmp_path.glob("a-*"))) == 2
