"""What every communicator must do: functions that a rank runs, in a thread or a process. They assert for themselves.

Their tensors lie on torch's default device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import final

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mggcn.comm.base import Communicator, Event
from mggcn.comm.gather import gather_texts
from mggcn.errors import CommError
from tests.comm.worlds import await_files, meet_in

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.uint8)


def broadcast_from_each_root(comm: Communicator) -> None:
    for dtype in DTYPES:
        for root in range(comm.size):
            buf = torch.arange(12).reshape(4, 3).add(20 * comm.rank).to(dtype)
            comm.broadcast(buf, root).wait()
            torch.testing.assert_close(buf, torch.arange(12).reshape(4, 3).add(20 * root).to(dtype), rtol=0, atol=0)


def several_in_flight(comm: Communicator) -> None:
    rank, size = comm.rank, comm.size
    one, two, ones = torch.full((1000,), rank + 1.0), torch.full((50, 3), rank + 100.0), torch.ones(77)
    events = [comm.broadcast(one, 0), comm.broadcast(two, size - 1), comm.all_reduce(ones)]
    for event in events:
        event.wait()
    assert torch.all(one == 1)
    assert torch.all(two == size + 99)
    assert torch.all(ones == size)
    for event in events:
        event.wait()
    assert torch.all(one == 1)


def buffers_are_free_after_wait(comm: Communicator) -> None:
    """The root and every summand overwrite their buffer at once, while the others come late."""
    rank, size = comm.rank, comm.size
    for root in range(size):
        buf = torch.full((4096,), float(rank))
        event = comm.broadcast(buf, root)
        time.sleep(0.02 * (rank != root))
        event.wait()
        got = buf.clone()
        buf.fill_(-1)
        assert torch.all(got == root)
    buf = torch.full((4096,), float(rank))
    for late in range(size):
        buf.fill_(rank)
        event = comm.all_reduce(buf)
        time.sleep(0.02 * (rank == late))
        event.wait()
        got = buf.clone()
        buf.fill_(-1)
        assert torch.all(got == size * (size - 1) / 2)
        out = torch.zeros(size)
        buf[:size] = rank
        event = comm.all_to_all(out, buf[:size], [1] * size, [1] * size)
        time.sleep(0.02 * (rank == late))
        event.wait()
        buf.fill_(-1)
        assert out.tolist() == list(range(size))


def summand(rank: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(7919 + rank)
    drawn = torch.randn(count, generator=generator, dtype=torch.float64, device="cpu")
    return drawn.to(dtype).to(torch.get_default_device())


def all_reduce_sums(comm: Communicator) -> dict[str, bytes]:
    """Returns the bits of each sum, for comparison between ranks."""
    bits: dict[str, bytes] = {}
    for dtype in DTYPES:
        for count in (1, 2, 1001):
            if dtype.is_floating_point:
                values = [summand(rank, count, dtype) for rank in range(comm.size)]
            else:
                values = [torch.arange(count).add(rank).remainder(40).to(dtype) for rank in range(comm.size)]
            exact = torch.stack([value.double() for value in values]).sum(0)
            buf = values[comm.rank].clone()
            comm.all_reduce(buf).wait()
            tolerance = 3 * comm.size * torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
            torch.testing.assert_close(buf.double(), exact, rtol=tolerance, atol=tolerance)
            bits[f"{dtype} {count}"] = buf.cpu().view(torch.uint8).numpy().tobytes()
    return bits


def all_reduce_repeats(comm: Communicator, repeats: int) -> list[bytes]:
    """Sums whose bits depend on their order; the lengths span gloo's segments."""
    results: list[bytes] = []
    for _ in range(repeats):
        for count in (5, 1000, 300_001):
            buf = summand(comm.rank, count)
            comm.all_reduce(buf).wait()
            results.append(buf.cpu().numpy().tobytes())
    return results


def uneven_all_to_all(comm: Communicator) -> None:
    """Zero, one and more rows; at P > 2 rank 1 neither sends nor receives any."""
    rank, size = comm.rank, comm.size
    for dtype in DTYPES:

        def rows(sender: int, receiver: int) -> int:
            idle = size > 2 and 1 in (sender, receiver)
            return 0 if idle else (2 * sender + 3 * receiver + 1) % 4

        sends = [rows(rank, peer) for peer in range(size)]
        receives = [rows(peer, rank) for peer in range(size)]
        buf = torch.cat([torch.full((n, 2, 3), 10 * rank + peer).to(dtype) for peer, n in enumerate(sends)])
        out = torch.full((sum(receives), 2, 3), 99).to(dtype)
        comm.all_to_all(out, buf, receives, sends).wait()
        want = torch.cat([torch.full((n, 2, 3), 10 * peer + rank).to(dtype) for peer, n in enumerate(receives)])
        torch.testing.assert_close(out, want, rtol=0, atol=0)


def row_order_in_all_to_all(comm: Communicator) -> None:
    size = comm.size
    buf = 100 * comm.rank + torch.arange(2 * size)
    out = torch.zeros_like(buf)
    comm.all_to_all(out, buf, [2] * size, [2] * size).wait()
    assert out.tolist() == [100 * peer + 2 * comm.rank + i for peer in range(size) for i in (0, 1)]


def empty_tensors(comm: Communicator) -> None:
    zeros = [0] * comm.size
    for shape in ((0,), (0, 4), (3, 0)):
        buf = torch.empty(shape)
        comm.broadcast(buf, comm.size - 1).wait()
        comm.all_reduce(buf).wait()
    comm.all_to_all(torch.empty(0, 4), torch.empty(0, 4), zeros, zeros).wait()
    ones = [1] * comm.size
    comm.all_to_all(torch.empty(comm.size, 0), torch.empty(comm.size, 0), ones, ones).wait()
    # The transport is still in step.
    buf = torch.ones(3)
    comm.all_reduce(buf).wait()
    assert buf.tolist() == [comm.size] * 3


def barrier_times(comm: Communicator) -> tuple[float, float]:
    """When this rank called, and when it went on."""
    comm.barrier()
    time.sleep(0.03 * comm.rank)
    called = time.monotonic()
    comm.barrier()
    return called, time.monotonic()


@final
class FillWhenWaited:
    """An event whose work is a fill, done no earlier than somebody waits for it."""

    def __init__(self, buf: Tensor, value: float) -> None:
        self.buf, self.value = buf, value
        if buf.is_cuda:  # the fill runs on another stream than what made `buf`
            torch.cuda.synchronize()

    def wait(self) -> None:
        self.buf.fill_(self.value)


def starts_after_the_given_event(comm: Communicator) -> None:
    rank, size = comm.rank, comm.size
    buf, out = torch.zeros(size), torch.zeros(size)
    comm.broadcast(buf, 0, after=FillWhenWaited(buf, 3.0 + rank)).wait()
    assert torch.all(buf == 3)
    comm.all_reduce(buf, after=FillWhenWaited(buf, 2.0)).wait()
    assert torch.all(buf == 2 * size)
    comm.all_to_all(out, buf, [1] * size, [1] * size, after=FillWhenWaited(buf, 5.0)).wait()
    assert torch.all(out == 5)


@final
class LargestAllocation(TorchDispatchMode):
    """Notes the largest storage that an operation makes, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        known = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in known:
                self.nbytes = max(self.nbytes, leaf.untyped_storage().nbytes())
        return result


def allocates_nothing_large(comm: Communicator) -> None:
    size = comm.size
    rows = 20_000
    buf, out = torch.ones(rows * size, 4), torch.ones(rows * size, 4)
    with LargestAllocation() as seen:
        comm.broadcast(buf, 0).wait()
        comm.all_reduce(buf).wait()
        comm.all_to_all(out, buf, [rows] * size, [rows] * size).wait()
        comm.barrier()
    assert seen.nbytes <= 64 * 1024
    with LargestAllocation() as seen:
        buf.add(1)
    assert seen.nbytes > 64 * 1024


def refuses_what_no_transport_carries(comm: Communicator) -> None:
    buf, counts = torch.ones(4, 4), [0] * comm.size
    wrong: list[tuple[str, Callable[[], object]]] = [
        ("contiguous", lambda: comm.broadcast(buf.t(), 0)),
        ("complex64", lambda: comm.all_reduce(torch.ones(2, dtype=torch.complex64))),
        ("expected a rank", lambda: comm.broadcast(buf, comm.size)),
        ("expected a rank", lambda: comm.broadcast(buf, -1)),
        ("sum to the rows of out", lambda: comm.all_to_all(buf, torch.ones(0, 4), counts, counts)),
        (
            "one device, one dtype and one shape",
            lambda: comm.all_to_all(torch.ones(0, 4), torch.ones(0, 3), counts, counts),
        ),
    ]
    for message, call in wrong:
        with pytest.raises(CommError, match=message):
            call()
    comm.barrier()


MISMATCHES = ("size", "dtype", "root", "operation", "rows")


def mismatch(comm: Communicator, kind: str) -> str:
    """The last rank asks for something else. Returns the error, which every rank gets."""
    odd = comm.rank == comm.size - 1
    size = comm.size

    def call() -> None:
        if kind == "size":
            comm.broadcast(torch.ones(4 if odd else 3), 0).wait()
        elif kind == "dtype":
            comm.all_reduce(torch.ones(3, dtype=torch.float64 if odd else torch.float32)).wait()
        elif kind == "root":
            comm.broadcast(torch.ones(3), 1 if odd else 0).wait()
        elif kind == "operation":
            (comm.all_reduce(torch.ones(3)) if odd else comm.broadcast(torch.ones(3), 0)).wait()
        else:
            rows = 2 if odd else 1
            comm.all_to_all(torch.ones(size), torch.ones(rows * size), [1] * size, [rows] * size).wait()
        comm.barrier()  # a rank that needs only the root may get through the broadcast

    with pytest.raises(CommError) as caught:
        call()
    return str(caught.value)


def failure(call: Callable[[], object]) -> str:
    """What a call raises; its traceback, which holds a group of ranks, goes at once."""
    try:
        call()
    except CommError as error:
        return str(error)
    pytest.fail("no CommError was raised")


def finish(comm: Communicator, message: Event) -> None:
    """Wait for a message, on the device, too."""
    message.wait()
    comm.synchronize()


def last_rank_comes_too_late(comm: Communicator, folder: Path) -> tuple[str, float]:
    """The last rank comes once the others have given up. Returns the error and the seconds until it came."""
    last = comm.size - 1
    meet_in(folder, comm)
    started = time.monotonic()
    if comm.rank == last:
        await_files(folder, "gave-up", range(last))
    with pytest.raises(CommError) as caught:
        finish(comm, comm.all_reduce(torch.ones(5)))
    seconds = time.monotonic() - started
    (folder / f"gave-up-{comm.rank}").touch()
    with pytest.raises(CommError):
        comm.barrier()
    return str(caught.value), seconds


def last_rank_aborts(comm: Communicator, in_flight: bool) -> tuple[str, float]:
    """Returns the error and the seconds from the abort until it came."""
    buf = torch.ones(5)
    if comm.rank == comm.size - 1:
        time.sleep(0.4)
        started = time.monotonic()
        comm.abort("disk full")
        comm.abort("something else")
        blocked_s = time.monotonic() - started
        return failure(lambda: comm.all_reduce(buf).wait()), blocked_s
    started = time.monotonic() + 0.4
    meet = (lambda: finish(comm, comm.broadcast(buf, comm.size - 1))) if in_flight else comm.barrier
    message = failure(meet)
    came_s = time.monotonic() - started
    with pytest.raises(CommError, match="disk full"):
        comm.all_reduce(buf).wait()
    return message, came_s


def gathered_texts(comm: Communicator) -> list[str]:
    return gather_texts(comm, f"{'ä' * 300} of rank {comm.rank}" if comm.rank != 1 else "")
