"""What messages between ranks cost on this machine: seconds over threads and gloo, memory of GPUs with NCCL.

Measured by every rank, as ranks really run: `python -m mggcn.runs.messages KIND FOLDER --result FILE --arguments JSON
--rank R --size P --rendezvous FILE` is one rank process.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mggcn import native
from mggcn.comm.control_store import CHECKED_CALLS
from mggcn.comm.launch import run_ranks
from mggcn.comm.nccl_memory import MOMENTS, largest_taken
from mggcn.comm.nccl_settings import sizes_of, user_settings
from mggcn.comm.rank import gpu_index, rank_main
from mggcn.errors import CommError
from mggcn.files import read_object, reason
from mggcn.host import python
from mggcn.train.log import write_json

if TYPE_CHECKING:
    from torch import Tensor

    from mggcn.comm.base import Communicator, Event

SMALL, LARGE = 16, 2**22
"""Numbers of float32 values to each receiver: 64 bytes show the latency, 16 MiB the rate."""
NCCL_COUNT: Final = 2**20
"""As many for NCCL's memory: 4 MiB, so that it takes the protocol of large messages."""
TURNS: Final = 2
"""Buffers of each kind that take turns."""
TIMEOUTS_S: Final = {"gloo": 60.0, "nccl": 120.0}
KINDS: Final = ("broadcast", "all_to_all", "all_reduce")


def measure_links(
    ranks: Sequence[int], cores: int, seconds: float, folder: Path, report: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Return the [[link]] tables of both transports for each number of ranks. Raises: CommError."""
    from mggcn.comm.threads import run_threads

    links = []
    for size in ranks:
        report(f"messages of {size} ranks that are threads")
        found = run_threads(size, lambda comm: message_seconds(comm, seconds, 1), TIMEOUTS_S["gloo"])[0]
        links.append(link_table("threads", size, cores, found))
        report(f"messages of {size} ranks over gloo")
        found = _on_processes("gloo", size, folder, seconds=seconds, threads=max(1, cores // size))
        links.append(link_table("gloo", size, cores, found))
    return links


def link_table(transport: str, size: int, cores: int, found: dict[str, Any]) -> dict[str, Any]:
    """Turn rank 0's measurements into a [[link]] table.

    A message takes latency + bytes that reach any rank / rate. Threads move a message while they wait for it, so that
    nothing overlaps; what gloo takes from computing is the processor time of all ranks, over all cores.
    """
    moved = {"broadcast": size - 1, "all_to_all": size * (size - 1), "all_reduce": 2 * (size - 1)}
    latency, rates = {}, {}
    for kind in KINDS:
        small, large = found["small_s"][kind], found["large_s"][kind]
        latency[kind] = float(f"{small:.3g}")
        rates[kind] = float(f"{moved[kind] * 4 * LARGE / max(large - small, 0.1 * large):.3g}")
    # Processor time is the same beside other load.
    share = sum(found["processor_s"].values()) / (sum(found["large_s"].values()) * cores)
    busy = 1.0 if transport == "threads" else min(1.0, share)
    named = {"transport": transport, "ranks": size, "rates": rates, "latency_s": latency}
    return named | {"pooled": True, "busy": round(busy, 2)}


def measure_nccl(ranks: Sequence[int], folder: Path, report: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return the [[nccl]] table for those numbers of ranks that can have a GPU each here, and for all GPUs.

    None on a machine without two usable GPUs. Raises: CommError.
    """
    from mggcn.backend.cuda.driver import visible_gpus
    from mggcn.backend.cuda.presence import missing_for_cuda

    tables: list[dict[str, Any]] = []
    gpus = 0 if missing_for_cuda() else len(visible_gpus())
    for size in sorted({size for size in (*ranks, gpus) if 2 <= size <= gpus}):
        report(f"NCCL's memory between {size} GPUs")
        taken = _on_processes("nccl", size, folder)
        p2p = taken["all_to_all"]
        collective = sum(taken[moment] for moment in MOMENTS) - p2p
        settings = dataclasses.asdict(sizes_of(user_settings(os.environ)))
        tables.append({"ranks": size, **settings, "collective_bytes": collective, "p2p_bytes": p2p})
    return tables


def _on_processes(transport: str, size: int, folder: Path, **arguments: float) -> dict[str, Any]:
    """Return what rank 0 of as many processes has measured. arguments: as for `message_seconds`."""
    result = folder / f"{transport}-{size}.json"
    result.unlink(missing_ok=True)
    settings = ["--result", str(result), "--arguments", json.dumps(arguments)]
    command = [*python("mggcn.runs.messages"), transport, str(folder), *settings]
    run_ranks(command, size, folder, timeout_s=TIMEOUTS_S[transport])
    try:
        found = read_object(result)
    except (OSError, ValueError) as error:
        name = transport.replace("nccl", "NCCL")
        raise CommError(f"{size} ranks over {name} have left no result in {result}: {reason(error)}") from error
    return found


def message_seconds(comm: Communicator, seconds: float, threads: int) -> dict[str, Any]:
    """Measure on one rank, by kind: median seconds of small and large messages, processor time of all ranks for a large
    one. Collective.
    """
    import torch

    torch.set_num_threads(threads)
    for _ in range(-(-CHECKED_CALLS // 2)):  # the first calls of a run are compared over ranks, later ones are not
        comm.all_reduce(torch.zeros(1)).wait()
        comm.broadcast(torch.zeros(1), 0).wait()
    small, large = (_timed(comm, _messages(comm, count), seconds, calls) for count, calls in ((SMALL, 5), (LARGE, 1)))
    processor = torch.tensor([spent for _, spent in large.values()], dtype=torch.float64)
    comm.all_reduce(processor).wait()
    return {
        "small_s": {kind: usual for kind, (usual, _) in small.items()},
        "large_s": {kind: usual for kind, (usual, _) in large.items()},
        "processor_s": dict(zip(KINDS, processor.tolist(), strict=True)),
    }


Message = tuple[Sequence["Tensor"], Callable[[], "Event"]]
"""The buffers that this rank sends in turn, and what sends the next one."""


def _messages(comm: Communicator, count: int) -> dict[str, Message]:
    import torch

    # In an epoch no message finds its buffers in the cache: the next ones take turns.
    pairs = [(torch.zeros(comm.size - 1, count), torch.zeros(comm.size - 1, count)) for _ in range(TURNS)]
    whole, rows, root = [buf for _, buf in pairs], [buf[0] for _, buf in pairs], cycle(range(comm.size))
    broadcast, exchanged, summed = cycle(rows), cycle(pairs), cycle(rows)
    counts = _to_others(comm)
    return {
        "broadcast": (rows, lambda: comm.broadcast(next(broadcast), next(root))),
        "all_to_all": (whole, lambda: comm.all_to_all(*next(exchanged), counts, counts)),
        "all_reduce": (rows, lambda: comm.all_reduce(next(summed))),
    }


def _to_others(comm: Communicator) -> list[int]:
    """Rows that each rank gets: as strategies do, nothing goes from a rank to itself."""
    return [0 if rank == comm.rank else 1 for rank in range(comm.size)]


def _timed(
    comm: Communicator, messages: Mapping[str, Message], seconds: float, calls: int
) -> dict[str, tuple[float, float]]:
    """Return, by kind, the seconds of one message, the median of groups of `calls`, and this rank's processor time for it.

    Kinds take turns, since a plan compares them and a machine is not as fast in every second. Ranks wait for each other in
    every message, so what usually happens counts: the best try is one in which no rank was late. All ranks make the same
    number of turns, three at least. Collective.
    """
    times: dict[str, list[float]] = {kind: [] for kind in messages}
    spent = dict.fromkeys(messages, 0.0)
    done, turns, started = 0, 3, time.perf_counter()
    while done < turns:
        for kind, (buffers, send) in messages.items():
            for buffer in buffers:
                # As the kernels of a run, which write what is sent: no rank is done at the same time as the others.
                buffer.mul_(1.0)
            began, processor = time.perf_counter(), time.process_time()
            for _ in range(calls):
                send().wait()
            spent[kind] += time.process_time() - processor
            times[kind].append(_slowest(comm, (time.perf_counter() - began) / calls))
        done += 1
        if done == turns == 3:
            turns = 3 + min(200, int(seconds * len(messages) / _slowest(comm, (time.perf_counter() - started) / 3)))
    return {kind: (statistics.median(values), spent[kind] / (done * calls)) for kind, values in times.items()}


def _slowest(comm: Communicator, seconds: float) -> float:
    """Return the seconds of the rank that took longest. Collective."""
    import torch

    every = torch.zeros(comm.size, dtype=torch.float64)
    every[comm.rank] = seconds
    comm.all_reduce(every).wait()
    return float(every.max())


def nccl_bytes(comm: Communicator, zeros: Callable[[int], Tensor]) -> dict[str, int]:
    """Send one message of each kind to every rank; return the device memory taken, by stage, on the worst rank.

    zeros: returns as many bytes of the device. Collective.
    """
    import torch

    rows = _to_others(comm)
    out, buf = (zeros(4 * NCCL_COUNT * sum(rows)).view(torch.float32).view(-1, NCCL_COUNT) for _ in range(2))
    comm.broadcast(buf, 0).wait()
    comm.all_reduce(buf).wait()
    comm.all_to_all(out, buf, rows, rows).wait()
    return largest_taken(comm, zeros)


def _on_gpu(comm: Communicator) -> dict[str, int]:
    """Measure `nccl_bytes` on this rank's GPU."""
    import torch

    from mggcn.backend.cuda.device import CudaDevice
    from mggcn.backend.cuda.driver import visible_gpus

    device = CudaDevice(gpu_index(comm.rank, len(visible_gpus())), capture=False)
    comm.use_stream(device.comm_stream)
    return nccl_bytes(comm, lambda n: torch.zeros(n, dtype=torch.uint8, device=device.torch_device))


def main() -> int:
    """Run one rank process; rank 0 writes the measurements to --result."""
    native.limit_spinning()
    parser = argparse.ArgumentParser(prog="mggcn.runs.messages")
    parser.add_argument("transport", choices=("gloo", "nccl"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--arguments", type=json.loads, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--rendezvous", type=Path, required=True)
    a = parser.parse_args()

    def body(comm: Communicator) -> None:
        found = _on_gpu(comm) if a.transport == "nccl" else message_seconds(comm, **a.arguments)
        if comm.rank == 0:
            write_json(a.result, found)

    return rank_main(a.rank, a.size, a.rendezvous, TIMEOUTS_S[a.transport], a.folder, body, a.transport)


if __name__ == "__main__":
    sys.exit(main())
