"""What messages between ranks cost on this machine, over threads and over gloo: run by every rank, as ranks really run.

`python -m mggcn.jobs.tune_links FOLDER ... --rank R --size P --rendezvous FILE` is one rank process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mggcn import native
from mggcn.comm.control_store import CHECKED_CALLS
from mggcn.comm.launch import run_ranks
from mggcn.comm.rank import rank_main
from mggcn.errors import CommError

if TYPE_CHECKING:
    from torch import Tensor

    from mggcn.comm.base import Communicator, Event

SMALL, LARGE = 16, 2**22
"""Numbers of float32 values to each receiver: 64 bytes show the latency, 16 MiB the rate."""
TURNS: Final = 2
"""Buffers of each kind that take turns."""
TIMEOUT_S: Final = 60.0
KINDS: Final = ("broadcast", "all_to_all", "all_reduce")


def measure_links(
    ranks: Sequence[int], cores: int, seconds: float, folder: Path, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Return the [[link]] tables of both transports for each number of ranks. Raises: CommError."""
    links = []
    for size in ranks:
        say(f"messages of {size} ranks that are threads")
        links.append(link_table("threads", size, cores, _on_threads(size, seconds)))
        say(f"messages of {size} ranks over gloo")
        links.append(link_table("gloo", size, cores, _on_processes(size, cores, seconds, folder)))
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
    return {
        "transport": transport,
        "ranks": size,
        "rates": rates,
        "latency_s": latency,
        "pooled": True,
        "busy": round(busy, 2),
    }


def _on_threads(size: int, seconds: float) -> dict[str, Any]:
    from mggcn.comm.threads import run_threads

    return run_threads(size, lambda comm: measure(comm, seconds, 1), TIMEOUT_S)[0]


def _on_processes(size: int, cores: int, seconds: float, folder: Path) -> dict[str, Any]:
    result = folder / f"links-{size}.json"
    result.unlink(missing_ok=True)
    threads = max(1, cores // size)
    settings = ["--seconds", str(seconds), "--threads", str(threads), "--result", str(result)]
    command = [sys.executable, "-m", "mggcn.jobs.tune_links", str(folder), *settings]
    run_ranks(command, size, folder, timeout_s=TIMEOUT_S)
    try:
        found: dict[str, Any] = json.loads(result.read_text())
    except (OSError, ValueError) as error:
        raise CommError(f"{size} ranks over gloo have left no result in {result}: {error}") from error
    return found


def measure(comm: Communicator, seconds: float, threads: int) -> dict[str, Any]:
    """Measure on one rank, by kind: median seconds of small and large messages, processor time of all ranks for a large
    one. Collective.
    """
    import torch

    torch.set_num_threads(threads)
    size, me = comm.size, comm.rank

    def messages(count: int) -> dict[str, Message]:
        # In an epoch no message finds its buffers in the cache: the next ones take turns.
        pairs = [(torch.zeros(size - 1, count), torch.zeros(size - 1, count)) for _ in range(TURNS)]
        turns, root = {kind: cycle(pairs) for kind in KINDS}, cycle(range(size))
        # As strategies do: nothing goes from a rank to itself.
        rows = [0 if rank == me else 1 for rank in range(size)]
        sends: dict[str, Callable[[], Event]] = {
            "broadcast": lambda: comm.broadcast(next(turns["broadcast"])[1][0], next(root)),
            "all_to_all": lambda: comm.all_to_all(*next(turns["all_to_all"]), rows, rows),
            "all_reduce": lambda: comm.all_reduce(next(turns["all_reduce"])[1][0]),
        }
        sent = {kind: [buf if kind == "all_to_all" else buf[0] for _, buf in pairs] for kind in KINDS}
        return {kind: Message(sent[kind], sends[kind]) for kind in KINDS}

    for _ in range(-(-CHECKED_CALLS // 2)):  # the first calls of a run are compared over ranks, later ones are not
        comm.all_reduce(torch.zeros(1)).wait()
        comm.broadcast(torch.zeros(1), 0).wait()
    small, large = (_timed(comm, messages(count), seconds, calls) for count, calls in ((SMALL, 5), (LARGE, 1)))
    processor = torch.tensor([spent for _, spent in large.values()], dtype=torch.float64)
    comm.all_reduce(processor).wait()
    return {
        "small_s": {kind: usual for kind, (usual, _) in small.items()},
        "large_s": {kind: usual for kind, (usual, _) in large.items()},
        "processor_s": dict(zip(KINDS, processor.tolist(), strict=True)),
    }


@dataclass(frozen=True, slots=True)
class Message:
    """A kind of message: the buffers that this rank sends in turn, and what sends the next one."""

    buffers: Sequence[Tensor]
    send: Callable[[], Event]

    def write(self) -> None:
        """Pass over what is sent, as the kernels of a run do: no rank is done at the same time as the others."""
        for buffer in self.buffers:
            buffer.mul_(1.0)


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
        for kind, message in messages.items():
            message.write()
            began, processor = time.perf_counter(), time.process_time()
            for _ in range(calls):
                message.send().wait()
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


def main() -> int:
    """Run one rank process and leave the measurements of rank 0."""
    native.limit_spinning()
    parser = argparse.ArgumentParser(prog="mggcn.jobs.tune_links")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--rendezvous", type=Path, required=True)
    a = parser.parse_args()

    def body(comm: Communicator) -> None:
        found = measure(comm, a.seconds, a.threads)
        if comm.rank == 0:
            temporary = a.result.with_suffix(".tmp")
            temporary.write_text(json.dumps(found))
            os.replace(temporary, a.result)

    return rank_main(a.rank, a.size, a.rendezvous, TIMEOUT_S, a.folder, body)


if __name__ == "__main__":
    sys.exit(main())
