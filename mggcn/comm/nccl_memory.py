"""The GPU memory that NCCL takes, in bytes: estimated from its settings, or measured on a machine. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch import Tensor

    from mggcn.comm.base import Communicator

MIB: Final = 2**20
BASE_BYTES: Final = 256 * MIB
"""A communicator without connections: kernels, their local memory, queues. An estimate, with #1685 and #2366 in mind."""
GRAIN: Final = 2 * MIB
"""CUDA hands out memory that other processes may map in these units."""
HEAD_BYTES: Final = 4096
"""Counters in front of a connection's buffers."""
SHARED_SLOTS: Final = 16
MOMENTS: Final = ("start", "broadcast", "all_reduce", "all_to_all")
"""When NCCL takes memory: as its communicator is made, and in the first calls of a kind."""
NODE_PEERS: Final = 7
"""Peers in a node of eight GPUs; sends to those of other nodes share one buffer."""


@dataclass(frozen=True, slots=True)
class NcclSizes:
    """The sizes that determine NCCL's memory."""

    channels: int
    """Channels of rings."""
    p2p_channels: int
    """Channels of sends and receives, to each peer."""
    connection_bytes: int
    """A connection to one peer in one channel, both directions."""
    shared_bytes: int
    """The buffer that sends over a network share."""

    @classmethod
    def of(cls, channels: int, p2p_channels: int, buffers: Sequence[int], chunk_bytes: int) -> NcclSizes:
        """Return the sizes for buffers of each protocol, in bytes, and chunks of what is sent over a network."""
        received = -(-(HEAD_BYTES + sum(buffers)) // GRAIN) * GRAIN
        return cls(channels, p2p_channels, GRAIN + received, SHARED_SLOTS * chunk_bytes * p2p_channels)

    def nbytes(self, ranks: int, p2p: bool) -> int:
        """Return the bytes that NCCL takes on each of `ranks` GPUs: an estimate, rather too high than too low.

        p2p: whether ranks send and receive (all-to-all), not only broadcast and all-reduce.

        A base; the buffer shared by sends over a network, 16 chunks of 512 KiB per p2p channel, which NCCL makes even where
        there is no network unless it connects lazily (NVIDIA/nccl#2363: 512 MiB at 64 channels); for each ring channel a
        connection to the next and, where NCCL connects its trees too, to the previous rank; for each p2p channel one to
        each peer. A connection takes 2 MiB to send and 10 MiB to receive: 0.5, 4.7 and 4 MiB for the protocols, rounded up
        (#1685; src/transport/p2p.cc). With NCCL's own 32 and 32 channels 8 ranks that send and receive would need
        3.9 GiB; #1685 saw 4.3 GB with the CUDA context. Not counted: NVLS, which mggcn turns off.
        """
        neighbours = min(ranks - 1, 2)
        peers = min(ranks - 1, NODE_PEERS) if p2p else 0
        connections = neighbours * self.channels + peers * self.p2p_channels
        return BASE_BYTES + self.shared_bytes + connections * self.connection_bytes


@dataclass(frozen=True, slots=True)
class NcclMeasured:
    """NCCL's memory on a GPU, as measured.

    collective_bytes: at its start and for broadcasts and all-reduces; p2p_bytes: for sends and receives.
    """

    ranks: int
    sizes: NcclSizes
    collective_bytes: int
    p2p_bytes: int


@dataclass(frozen=True, slots=True)
class NcclMemory:
    """NCCL's memory in a plan: sizes that follow from settings, and what was measured on the machine."""

    sizes: NcclSizes
    measured: tuple[NcclMeasured, ...] = ()

    def found(self, ranks: int) -> NcclMeasured | None:
        """Return the measurement for this number of ranks or the next larger one with the same sizes; else None."""
        fitting = [m for m in self.measured if m.sizes == self.sizes and m.ranks >= ranks]
        return min(fitting, key=lambda m: m.ranks, default=None)

    def nbytes(self, ranks: int, p2p: bool) -> int:
        """Return the bytes of one rank: as measured, or else as estimated by NcclSizes.nbytes."""
        found = self.found(ranks)
        if found is None:
            return self.sizes.nbytes(ranks, p2p)
        return found.collective_bytes + (found.p2p_bytes if p2p else 0)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, which `memory_from_dict` reads."""
        return asdict(self) | {"measured": [asdict(m) for m in self.measured]}


def memory_from_dict(content: Mapping[str, Any]) -> NcclMemory:
    """Return the NcclMemory that `to_dict` wrote."""
    measured = (NcclMeasured(**{**m, "sizes": NcclSizes(**m["sizes"])}) for m in content["measured"])
    return NcclMemory(NcclSizes(**content["sizes"]), tuple(measured))


def largest_taken(comm: Communicator, allocate: Callable[[int], Tensor]) -> dict[str, int]:
    """Return the bytes of a device that a transport took at each stage and in total, each the maximum over all ranks.

    allocate: returns bytes of the device, all 0. Collective.
    """
    import torch

    taken = comm.device_bytes()
    mine = [taken.get(moment, 0) for moment in MOMENTS]
    every = allocate(8 * comm.size * (len(MOMENTS) + 1)).view(torch.float64).view(comm.size, -1)
    every[comm.rank] = torch.tensor([*mine, sum(mine)], dtype=torch.float64)
    comm.all_reduce(every).wait()
    return dict(zip((*MOMENTS, "all"), every.amax(0).long().tolist(), strict=True))
