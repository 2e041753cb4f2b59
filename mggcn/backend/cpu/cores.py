"""Cores of a rank: on a machine with several memory nodes (NUMA), those of one node."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

SYSTEM = Path("/sys/devices/system")
PCI_DEVICES = Path("/sys/bus/pci/devices")

_before_binding: set[int] = set()


def usable_cores() -> int:
    """Return how many cores this process may use, or could use before `bind_rank` or `bind_gpu` bound it."""
    return len(_before_binding or os.sched_getaffinity(0))


def usable_names() -> str:
    """Return the cores of `usable_cores` as Linux writes them: 0-3,8."""
    cores = sorted(_before_binding or os.sched_getaffinity(0))
    begins = [core for core in cores if core - 1 not in cores]
    ends = [core for core in cores if core + 1 not in cores]
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in zip(begins, ends, strict=True))


def bind_rank(rank: int, ranks: int, threads: int, system: Path = SYSTEM) -> list[int]:
    """Bind this process, one of `ranks` on this machine, to the cores of its threads; return them.

    Memory lies on the node of the core that first writes it, so a rank's memory is then local to its cores. Call this
    before threads are started. Does nothing, and returns none, on a machine of one node, where the ranks have more
    threads than cores, and where nodes have no room for the threads of whole ranks.
    """
    allowed = os.sched_getaffinity(0)
    cores = cores_of_rank(rank, ranks, threads, [[c for c in node if c in allowed] for node in nodes(system)])
    if cores:
        _before_binding.update(allowed)
        os.sched_setaffinity(0, cores)
    return cores


def bind_beside_gpu(pci: str, threads: int, devices: Path = PCI_DEVICES) -> list[int]:
    """Bind this process, which uses a GPU, to the cores of the memory node that the GPU is attached to; return them.

    The process that launches kernels, and the memory that it copies to the GPU, are then close to it. Several ranks
    share a node's cores. Otherwise it works as `bind_rank`; it also does nothing where the system does not name the
    node, as in some virtual machines.
    """
    allowed = os.sched_getaffinity(0)
    cores = [core for core in cores_beside(pci, devices) if core in allowed]
    if len(cores) in (0, len(allowed)) or len(cores) < threads:
        return []
    _before_binding.update(allowed)
    os.sched_setaffinity(0, cores)
    return cores


def cores_beside(pci: str, devices: Path = PCI_DEVICES) -> list[int]:
    """Return the cores of the memory node of a PCI device, such as 0000:1b:00.0; none if the system does not say."""
    try:
        node = int((devices / pci / "numa_node").read_text())
        return cores_in((devices / pci / "local_cpulist").read_text()) if node >= 0 else []
    except (OSError, ValueError):
        return []


def cores_of_rank(rank: int, ranks: int, threads: int, free: Sequence[Sequence[int]]) -> list[int]:
    """Return `threads` cores of one node for a rank, or none if not all ranks can get as many.

    free: the free cores of each node, the best first.

    Ranks go to the nodes in turn, so that all memories are used.
    """
    nodes_in_use = [node for node in free if node]
    if len(nodes_in_use) < 2:
        return []
    rooms = [(k, number) for number, node in enumerate(nodes_in_use) for k in range(len(node) // threads)]
    if len(rooms) < ranks:
        return []
    k, number = sorted(rooms)[rank]
    return list(nodes_in_use[number][k * threads : (k + 1) * threads])


def nodes(system: Path = SYSTEM) -> list[list[int]]:
    """Return the cores of every memory node, each node's physical cores before their second threads.

    Nodes without memory or cores are left out; the list is empty if the system does not name any.
    """
    found = []
    for folder in sorted((system / "node").glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        try:
            cores = cores_in((folder / "cpulist").read_text())
            first = {core: _siblings(system, core).index(core) for core in cores}
        except (OSError, ValueError):
            return []
        found.append(sorted(cores, key=lambda core: (first[core], core)))
    return [node for node in found if node]


def cores_in(text: str) -> list[int]:
    """Return the numbers of a list such as 0-3,8-11. Raises: ValueError for anything else."""
    ranges = [part.split("-") for part in text.strip().split(",") if part]
    return [core for ends in ranges for core in range(int(ends[0]), int(ends[-1]) + 1)]


def _siblings(system: Path, core: int) -> list[int]:
    """Threads of the physical core of `core`."""
    try:
        return cores_in((system / "cpu" / f"cpu{core}" / "topology" / "thread_siblings_list").read_text())
    except OSError:
        return [core]
