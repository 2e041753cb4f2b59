from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mggcn.backend.host import HostStream
from mggcn.comm.base import Communicator
from mggcn.comm.calls import Call
from mggcn.comm.control_store import ROLL_CALL_S, ControlStore
from mggcn.comm.distributed import DistributedCommunicator, connect
from mggcn.errors import CommError
from tests.comm import cases
from tests.comm.pool import GlooPool
from tests.comm.races import Races, RecordingStream, Stream
from tests.comm.worlds import HANGING_S, Gloo, await_files, listening_addresses, meet_in


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_reduce_repeats_bit_for_bit(gloo_pool: GlooPool, size: int) -> None:
    """Fails if gloo sums in the order of arrival: design, 'exactness and repeatability'."""
    repeats = 6
    ranks = Gloo(gloo_pool, size).run(cases.all_reduce_repeats, repeats)
    kinds = len(ranks[0]) // repeats
    for results in ranks:
        for index, bits in enumerate(results):
            assert bits == ranks[0][index % kinds]


def test_listens_on_loopback_only(gloo_pool: GlooPool) -> None:
    """Fails if a port that nobody guards is open to the network."""
    for addresses in Gloo(gloo_pool, 4).run(listening_addresses):
        assert addresses
        assert set(addresses) == {"127.0.0.1"}


def one_waits_longer(comm: Communicator, later_s: float, folder: Path) -> str:
    """Rank 0 waits first, rank 1 `later_s` after it, and rank 2 comes once both have given up."""
    meet_in(folder, comm)
    if comm.rank == 1:
        time.sleep(later_s)
    if comm.rank == 2:
        await_files(folder, "gave-up", range(2))
    with pytest.raises(CommError) as caught:
        comm.barrier()
    (folder / f"gave-up-{comm.rank}").touch()
    return str(caught.value)


def test_timeout_spares_the_rank_that_came_late(gloo_pool: GlooPool, tmp_path: Path) -> None:
    """Fails if ranks do not answer the roll call: rank 1 waits as well, and must not be blamed."""
    timeout_s = 4.0
    later_s = 1.5 * ROLL_CALL_S  # its own time is not over when the roll is called; 3.5 seconds late would be too late
    messages = Gloo(gloo_pool, 3).run(one_waits_longer, later_s, tmp_path, timeout_s=timeout_s)
    assert messages == ["rank 0 waited 4 s for rank 2 in call 1 (barrier)"] * 3


def close_after_others(comm: Communicator) -> tuple[float, float]:
    """When this rank called `close`, and when it went on; the last comes late, and its last message must still arrive."""
    buf = torch.full((100,), float(comm.rank))
    comm.broadcast(buf, 0).wait()
    time.sleep(0.5 * (comm.rank == comm.size - 1))
    called = time.monotonic()
    comm.close()
    return called, time.monotonic()


def test_close_waits_for_the_last_rank(gloo_pool: GlooPool) -> None:
    """Fails if a rank takes the connections away while another may still use them."""
    times = Gloo(gloo_pool, 3).run(close_after_others, timeout_s=2 * HANGING_S)
    assert max(called for called, _ in times) <= min(left for _, left in times)
    assert max(left - called for called, left in times) < HANGING_S


def asks_for_lanes(comm: Communicator) -> str:
    """What the comm stream of a device brings; the host's is accepted."""
    comm.use_stream(HostStream())
    with pytest.raises(CommError) as caught:
        comm.use_stream(RecordingStream(Races(), Stream("of a device")))
    return str(caught.value)


def test_lane_of_a_device_is_refused(gloo_pool: GlooPool) -> None:
    """Fails if addresses of a device could reach gloo."""
    for message in Gloo(gloo_pool, 2).run(asks_for_lanes):
        assert message == "gloo moves host memory; with GPUs use nccl, or threads on one GPU"


def missing_rank(comm: Communicator, path: Path) -> str:
    """Connect as one of comm.size + 1 ranks, of which the last does not come."""
    comm.barrier()
    with pytest.raises(CommError) as caught:
        connect(comm.rank, comm.size + 1, f"file://{path}", 2.0, loopback=True)
    return str(caught.value)


def test_connect_names_the_missing_rank(gloo_pool: GlooPool, tmp_path: Path) -> None:
    """Fails if a rank waits for ever for one that never started, or does not say for which."""
    messages = Gloo(gloo_pool, 2).run(missing_rank, tmp_path / "store")
    assert messages == [f"rank {rank} waited 2 s for rank 2 to start" for rank in range(2)]


def test_connect_explains_a_wrong_address() -> None:
    """Fails if torch's own exception gets through."""
    with pytest.raises(CommError, match="rank 0 of 2 could not connect through nonsense://x"):
        connect(0, 2, "nonsense://x", 0.5, loopback=False)


class OverAfterTheLook:
    """Work that ends just after a slice of waiting for it: well, or badly."""

    def __init__(self, error: str = "") -> None:
        self._error = error
        self._waits = 0

    def wait(self, timeout: object) -> bool:
        self._waits += 1
        if self._waits == 1:
            raise RuntimeError("Operation timed out!")
        if self._error:
            raise RuntimeError(self._error)
        return True

    def is_completed(self) -> bool:
        return True


def test_work_that_ends_between_two_looks_has_not_failed() -> None:
    """Fails if a message that takes as long as a slice of waiting is taken for a lost connection, or a lost one is not."""
    control = ControlStore(dist.HashStore(), 0, 1, 5.0)
    comm = DistributedCommunicator(None, control)  # type: ignore[arg-type]
    comm.finish(OverAfterTheLook(), 1, Call(op="barrier"))  # type: ignore[arg-type]
    said = "[../gloo/pair.cc:525] Read error [127.0.0.1]:2: Connection reset by peer. This is what happens ... GLHF!"
    with pytest.raises(CommError, match=r"lost its connections in call 2 \(barrier\): Connection reset by peer$"):
        comm.finish(OverAfterTheLook(said), 2, Call(op="barrier"))  # type: ignore[arg-type]
