"""Two analyses of the papers, for any machine and graph: MG-GCN's of 1.5D partitions, DistGNN's count of aggregation work.

N vertices, E edges, P ranks, d width, c groups of ranks that each hold all rows. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mggcn.cost.machine import Machine


@dataclass(frozen=True, slots=True)
class Partition15D:
    """A 1.5D partition compared with the row partition (1D) on the same ranks."""

    replication: int
    time_ratio: float
    """Seconds of communication over those of 1D."""
    sent_ratio: float
    """Bytes that leave a rank over those of 1D, on average."""


def analyse_15d(machine: Machine, ranks: int) -> Partition15D | str:
    """Return the cost of a 1.5D partition on `machine`, or the reason why it is unknown.

    1D: P broadcasts of N d / P rows, N d / (B l) seconds, with B links for a broadcast and l the rate of one link.
    1.5D: P / c^2 rounds of broadcasts of c N d / P rows within each of c groups, then a reduction of as many between
    them: N d / (c B_g l) + c N d / (P B_r l).
    Source: MG-GCN, section 5.1: c = 2, P = 8 give 1.5 on the links of a DGX-1 and 0.75 on those of a DGX-A100.
    """
    topology = machine.topology
    if topology is None:
        return f"the file of machine {machine.name} has no [topology]"
    c = topology.replication
    if ranks % c**2:
        return f"{c} groups need a multiple of {c**2} ranks, got {ranks}"
    one_d = 1 / topology.broadcast
    rounds = 1 / (c * topology.group_broadcast)
    reduction = c / (ranks * topology.reduction)
    # Per row of N d / P: a root of a group sends to P / c - 1 others, a ring of c ranks 2 (c - 1) / c of c rows.
    sent = (ranks / c - 1) + 2 * (c - 1)
    return Partition15D(c, (rounds + reduction) / one_d, sent / (ranks - 1))


@dataclass(frozen=True, slots=True)
class AggregationWork:
    """DistGNN's operations of one forward pass on one partition. widths: those of the layers' inputs, in order."""

    vertices: int
    degree: float
    widths: tuple[int, ...]

    @property
    def hops(self) -> tuple[float, ...]:
        """Operations of each layer's aggregation."""
        return tuple(self.vertices * self.degree * width for width in self.widths)

    @property
    def total(self) -> float:
        return sum(self.hops)


def aggregation_work(
    num_vertices: int, num_edges: int, widths: Sequence[int], ranks: int = 1, replication: float = 1.0
) -> AggregationWork:
    """Count vertices per partition x average degree x width of every hop, as DistGNN's Tables 7 and 8 do.

    The degree counts the vertex itself and is rounded to one decimal. replication: partitions that hold a vertex, on
    average; 1 for a partition of the rows.
    """
    degree = round((num_edges + num_vertices) / max(num_vertices, 1), 1)
    return AggregationWork(round(num_vertices * replication / ranks), degree, tuple(widths))


def work_lines(work: AggregationWork, ranks: int) -> list[str]:
    """Return the count as text."""
    hops = " + ".join(_billions(hop) for hop in work.hops)
    where = f"on each of {ranks} ranks" if ranks > 1 else "on one rank"
    return [
        f"aggregation work as DistGNN counts it (Table 8): {_billions(work.total)} billion operations {where}",
        f"  {work.vertices:,} vertices x degree {work.degree:.1f} x widths {', '.join(map(str, work.widths))}: {hops}",
    ]


def _billions(count: float) -> str:
    return f"{count / 1e9:.2f}" if count >= 1e8 else f"{count / 1e9:.2g}"
