"""Every rank has a GPU of its own, however a launcher shows them."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from mggcn.assemble import rank as assemble_rank
from mggcn.backend.cuda import device as cuda_device
from mggcn.backend.cuda.driver import Gpu
from mggcn.comm.base import Communicator
from mggcn.comm.gather import refuse_shared
from mggcn.comm.threads import run_threads
from mggcn.config import Config, RunConfig
from mggcn.errors import BackendError
from tests.backend.gpu_libraries import Card
from tests.comm.worlds import Nccl

CARDS = [Gpu(Card(number, 0).uuid, "") for number in range(4)]


def gpus_of_ranks(shown: list[list[Gpu]], monkeypatch: pytest.MonkeyPatch, launched: bool) -> list[Any]:
    """The GPU that each rank takes of those that it is shown, or what it is told; launched: by torchrun or Slurm."""
    config = Config(run=RunConfig(device="cuda", ranks=len(shown), transport="nccl"))
    monkeypatch.setattr(cuda_device, "CudaDevice", lambda index, capture: index)
    monkeypatch.setattr(assemble_rank, "visible_gpus", lambda: shown[this_rank()])
    env = "mggcn.comm.rank.torchrun_env"
    monkeypatch.setattr(env, lambda: (this_rank(), len(shown), this_rank()) if launched else None)

    def body(comm: Communicator) -> Any:
        try:
            index: Any = assemble_rank.gpu_of_rank(config, comm)
        except BackendError as error:
            return str(error)
        return shown[comm.rank][index]

    return run_threads(len(shown), body, 20.0)


def this_rank() -> int:
    """Of the calling thread, as run_threads names them."""
    return int(threading.current_thread().name.removeprefix("rank "))


@pytest.mark.parametrize("launched", [True, False])
def test_ranks_that_see_all_gpus_take_them_in_order(launched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if two ranks get one GPU, or a rank that of another."""
    assert gpus_of_ranks([CARDS] * 3, monkeypatch, launched) == CARDS[:3]


def test_ranks_that_see_one_gpu_each_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if srun --gpus-per-task=1 is refused, since local rank 1 has no GPU 1."""
    assert gpus_of_ranks([[card] for card in CARDS], monkeypatch, launched=True) == CARDS


def test_ranks_that_share_a_gpu_are_told_so_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if two processes that a launcher shows one GPU go on, or only one of the ranks learns of it."""
    told = gpus_of_ranks([[CARDS[0]], [CARDS[3]], [CARDS[1]], [CARDS[3]]], monkeypatch, launched=True)
    assert len(set(told)) == 1
    assert told[0].startswith(f"ranks 1, 3 would use the same GPU (UUID {CARDS[3].uuid}), but each needs its own;")


def test_ranks_that_are_processes_tell_each_other_before_nccl_starts() -> None:
    """Fails if gloo, which is all that ranks have until then, does not carry it."""

    def rank(comm: Communicator, gpus: list[Gpu]) -> str:
        try:
            refuse_shared(comm, gpus[comm.rank].uuid)
        except BackendError as error:
            return str(error)[:16]
        return ""

    for cards, told in ((CARDS, [""] * 3), ([CARDS[0]] * 3, ["ranks 0, 1, 2 wo"] * 3)):
        world = Nccl(3)
        world.start = False
        assert world.run(rank, cards) == told
