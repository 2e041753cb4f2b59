"""`mggcn tune --store`: times every way of each sparse product that a run makes, and keeps those that beat the model's.

One epoch of the run is made, which asks for all of its products; then rank after rank times its own.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from mggcn.assemble import make_rank, memory_limit, plan_graph
from mggcn.backend.cpu_choice import MatrixTraits, SpmmChoice, SpmmKey, key_of
from mggcn.config import Config
from mggcn.errors import ConfigError
from mggcn.graph.csr import Graph
from mggcn.jobs.local import on_local_ranks

if TYPE_CHECKING:
    import torch

    from mggcn.backend.cpu import CpuBackend
    from mggcn.backend.cpu_spmm import Product
    from mggcn.comm.base import Communicator

KEPT_GAIN = 1.05
"""A way must be faster than the model's by this factor to be kept: less may be chance."""
ROUNDS = 3
"""Each way is timed as often at least, in turn with the others."""


@dataclass(frozen=True, slots=True)
class Timed:
    """A product of one rank and the least seconds of each way, by name: what it takes when nothing else runs."""

    rank: int
    key: SpmmKey
    chosen: SpmmChoice
    """The model's choice."""
    chosen_s: float
    ways: dict[str, SpmmChoice]
    seconds: dict[str, float]

    @property
    def fastest(self) -> str:
        return min(self.seconds, key=lambda name: self.seconds[name])

    @property
    def gain(self) -> float:
        """How many times faster than the model's choice the fastest way was."""
        return self.chosen_s / self.seconds[self.fastest]

    @property
    def kept(self) -> SpmmChoice | None:
        """The way that the table gets, None if the model's choice stays."""
        way = self.ways[self.fastest]
        if self.gain < KEPT_GAIN or _name(way) == _name(self.chosen):
            return None
        reason = f"measured: {self.gain:.2f} times as fast as {_name(self.chosen)}"
        return SpmmChoice(way.way, way.panel, way.blocks, way.ahead, reason)


def tune_products(config: Config, graph: Graph, seconds: float, say: Callable[[str], None]) -> list[Timed]:
    """Time the products of a run, each way of each for about `seconds`; ranks are threads of this process.

    Cost: set-up and an epoch, then the timing; memory as planned, with an operand and a result beside it.
    Raises: ConfigError for a run on a GPU; PlanError if it does not fit; GraphError.
    """
    if config.run.device != "cpu":
        raise ConfigError("mggcn tune --store times the CPU's kernels; set run.device = cpu")
    plan, partition = plan_graph(config, graph)
    plan.check(memory_limit(config))

    def body(comm: Communicator) -> list[Timed]:
        rank = make_rank(config, graph, plan, partition, comm)
        rank.trainer.gradients(0)
        rank.trainer.evaluate()
        backend = cast("CpuBackend", rank.trainer.runtime.backend)
        found: list[Timed] = []
        for turn in range(comm.size):
            comm.barrier()
            if turn == comm.rank:
                products = backend.sparse_products.products
                say(f"{len(products)} sparse products of rank {comm.rank}")
                found = [time_ways(backend, product, seconds, comm.rank) for product in products]
        comm.barrier()
        return found

    return list(itertools.chain(*on_local_ranks(config, body)))


def time_ways(backend: CpuBackend, product: Product, seconds: float, rank: int = 0) -> Timed:
    """Time every way of one product, and the model's choice, in turn, after a call of each as a warm-up."""
    import torch

    from mggcn.backend.base import Sparse

    kernel, pattern = backend.sparse_products, product.pattern
    traits: MatrixTraits = pattern.schedule.traits
    real = torch.float64 if backend.dtype == torch.float64 else torch.float32
    weights = torch.ones(traits.nnz, dtype=real) if product.weighted else None
    adj = Sparse(pattern.indptr, pattern.indices, weights, pattern.schedule)
    h = _matrix(backend, traits.columns, product.width, backend.dtype)
    out = _matrix(backend, traits.rows, product.width, real if product.summed else backend.dtype)
    ways = kernel.candidates(product)
    timed = ways | {"": product.choice}
    taken: dict[str, list[float]] = {name: [] for name in timed}
    began = time.perf_counter()
    for round_ in itertools.count():
        for name, way in timed.items():
            start = time.perf_counter()
            kernel.multiply(adj, h, out, accumulate=False, epilogue=None, choice=way)
            if round_:
                taken[name].append(time.perf_counter() - start)
        if round_ >= ROUNDS and time.perf_counter() - began > seconds * len(timed):
            break
    least = {name: min(values) for name, values in taken.items()}
    key = key_of(traits, product.width, backend.dtype.itemsize, summed=product.summed)
    return Timed(rank, key, product.choice, least.pop(""), ways, least)


def kept_ways(timed: Iterable[Timed]) -> dict[SpmmKey, SpmmChoice | None]:
    """Return what a table gets. Of products that look alike, on several ranks, the one that gained most decides."""
    return {t.key: t.kept for t in sorted(timed, key=lambda t: t.gain)}


def _matrix(backend: CpuBackend, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """Ones in rows that are padded as a run's are; pages that nobody has written would all be one in the cache."""
    ld = -(-cols * dtype.itemsize // 64) * 64 // dtype.itemsize
    whole = backend.allocate(rows * ld * dtype.itemsize).view(dtype).view(rows, ld)
    return whole.fill_(1.0)[:, :cols]


def _name(choice: SpmmChoice) -> str:
    sizes = {"rows": "", "panels": f" of {choice.panel} columns", "blocks": f", {choice.blocks}"}
    return f"{choice.way}{sizes[choice.way]}" + (f", {choice.ahead} ahead" if choice.ahead else "")


def product_lines(timed: list[Timed]) -> list[str]:
    """Return the table of what was timed, and the model's reasons."""
    from mggcn.train.plantext import table

    header = ("rank", "rows", "columns", "nonzeros", "width", "bytes", "the model's way", "ms", "fastest", "ms", "gain")
    rows = [
        (
            t.rank,
            f"{t.key.rows:,}",
            f"{t.key.columns:,}",
            f"{t.key.nnz:,}",
            t.key.width,
            t.key.item,
            _name(t.chosen),
            f"{1e3 * t.chosen_s:.2f}",
            t.fastest if t.kept else "the same",
            f"{1e3 * t.seconds[t.fastest]:.2f}",
            f"{t.gain:.2f}" + (", kept" if t.kept else ""),
        )
        for t in timed
    ]
    reasons = dict.fromkeys(f"  {_name(t.chosen)} (width {t.key.width}): {t.chosen.reason}" for t in timed)
    return [*table(header, rows), "why the model chose:", *reasons]
