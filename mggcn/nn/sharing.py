"""The settings by which a graph is divided among ranks for your own module, and the resulting partition.

N vertices, P ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from mggcn.assemble.plan import STRATEGIES, partition_graph, resolve
from mggcn.config import Config, RunConfig, TrainConfig, from_tables
from mggcn.errors import ConfigError
from mggcn.graph.csr import Graph
from mggcn.partition.base import Partition, PartitionStats
from mggcn.partition.make import stats_of

Norm = Literal["none", "mean", "symmetric"]
NORMS: tuple[Norm, ...] = get_args(Norm)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    """Settings of a shared graph, which `run` takes by name.

    Raises:
        ConfigError: A value is unknown, or two contradict each other.
    """

    strategy: str = "broadcast"
    """How neighbours' rows arrive: broadcast, halo, slice, or delayed (a vertex cut, here always exact: cd-0)."""
    order: str = "random"
    """Which vertices each rank owns: random, permute or none."""
    norm: Norm = "none"
    """S_r and S_c in the result S_r A^T S_c x of `aggregate`. none: the sum over in-neighbours; mean: divided by the
    in-degree; symmetric: in-degree^-1/2 on both sides, as in GCN."""
    self_loops: bool = False
    """Insert the self-loops that the graph lacks, with weight 1."""
    precision: str = "fp32"
    """Type of the rows: fp32, fp64 or bf16."""
    device: str = "cpu"
    """cpu or cuda."""
    threads: int = 0
    """Threads of each rank; 0 divides the cores among the ranks."""
    seed: int = 1
    """Seed of the partition."""

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ConfigError(f"strategy must be one of {', '.join(STRATEGIES)}, got {self.strategy!r}")
        if self.norm not in NORMS:
            raise ConfigError(f"norm must be one of {', '.join(NORMS)}, got {self.norm!r}")
        if self.precision == "tf32":
            raise ConfigError(
                "precision tf32 rounds dense products, which torch computes here; use fp32, and set TF32 in torch"
            )
        if self.precision == "mixed":
            raise ConfigError("precision mixed keeps rows in two types, a user's own module in one; use fp32 or bf16")
        self.config(1, "auto")

    def config(self, ranks: int, transport: str) -> Config:
        """Return a run's configuration with these settings."""
        run = {
            "ranks": ranks,
            "transport": transport,
            "strategy": self.strategy,
            "order": self.order,
            "precision": self.precision,
            "device": self.device,
            "threads": self.threads,
        }
        return from_tables({"run": run}, Config(run=RunConfig(), train=TrainConfig(seed=self.seed)))


@dataclass(frozen=True, slots=True)
class Shared:
    """A graph and its partition, the same on all ranks."""

    graph: Graph
    sharing: Sharing
    config: Config
    partition: Partition
    stats: PartitionStats


def share(graph: Graph, sharing: Sharing, ranks: int, transport: str = "auto") -> Shared:
    """Share out a graph among P ranks. Cost: some sweeps over the edges, or a vertex cut, which is kept for later.

    Raises: ConfigError, GraphError, StoreError.
    """
    config = resolve(sharing.config(ranks, transport), graph)
    partition = partition_graph(config, graph)
    return Shared(graph, sharing, config, partition, stats_of(graph, partition, self_loops=sharing.self_loops))
