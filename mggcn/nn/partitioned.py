"""One rank's part of a shared graph: its rows, and the collective calls that your own training loop needs.

N vertices, P ranks, V rows of this rank, D width. All ranks must call the methods marked collective in one order.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from mggcn.assemble.plan import threads_per_rank
from mggcn.assemble.rank import gpu_of_rank
from mggcn.backend.cuda.base import Device
from mggcn.comm.base import Communicator
from mggcn.config import Config
from mggcn.errors import ConfigError, GraphError
from mggcn.feed.features import FeatureReader
from mggcn.graph.check import refuse_summed
from mggcn.graph.csr import Rows
from mggcn.graph.vertex_data import to_numpy
from mggcn.nn.devices import rank_backend
from mggcn.nn.rank_aggregation import PANEL, RankAggregation
from mggcn.nn.sharing import Shared
from mggcn.train.threads import Cores, ThreadChoice

T = TypeVar("T")
DeviceOf = Callable[[Config, Communicator], Device]
FEW_ROWS = 4096
"""Rows of a rank up to which a module's operations begin with one thread (docs/notes/0022-small-graphs.md)."""


class PartitionedGraph:
    """A rank's part of a graph, which `run` passes to your function. All ranks must make its collective calls in one
    order.

    Raises:
        GraphError: The graph is malformed.
        BackendError: The device is not there.
        ConfigError: The graph is shared out for another number of ranks.
    """

    def __init__(self, shared: Shared, comm: Communicator, device_of: DeviceOf = gpu_of_rank) -> None:
        config, graph = shared.config, shared.graph
        if config.run.ranks != comm.size:
            raise ConfigError(f"the graph is shared out to {config.run.ranks} ranks, but {comm.size} are connected")
        threads = threads_per_rank(config)
        first = 1 if config.run.threads == 0 and graph.num_vertices <= FEW_ROWS * comm.size else threads
        # torch's own sums may differ in the last bits between numbers of threads: theirs depends on the graph alone.
        torch.set_num_threads(first)
        most_edges = graph.num_edges + graph.num_vertices
        self._backend = rank_backend(config, comm, device_of, most_edges, PANEL)
        comm.use_stream(self._backend.comm_stream)
        self.threads: ThreadChoice | None = (
            None if config.run.threads else ThreadChoice(self._backend.team, first, comm.size, Cores())
        )
        """Chooses, step by step, how many threads aggregations take; None: as many as were set."""
        self._comm = comm
        self._graph = graph
        self._partition = shared.partition
        self._host_ids = shared.partition.local_index(comm.rank).owned(comm.rank)
        self.rank: int = comm.rank
        """Number of this rank, from 0."""
        self.num_ranks: int = comm.size
        """Number of ranks, P."""
        self.num_vertices: int = graph.num_vertices
        """Number of vertices of the whole graph, N."""
        self.num_relations: int = graph.num_relations
        """Number of relations, R; 0 if edges have no types."""
        self.num_rows: int = int(self._host_ids.size)
        """Number of this rank's rows, V, copies of other ranks' vertices included."""
        self.links: Mapping[str, Rows] = graph.links
        """Of a graph that is split into links, those of each split, int32 (M, 2), with fixed negatives (M, 2 + K)."""
        self.dtype: torch.dtype = self._backend.dtype
        """Type of the rows that are aggregated."""
        mine = shared.partition.owned(comm.rank)
        self.ids: Tensor = self._backend.upload(self._host_ids)
        """Original id of each row, int64 (V,)."""
        self.device: torch.device = self.ids.device
        """Device of this rank's rows."""
        self.owned: Tensor = self._backend.upload(np.ones(self._host_ids.size, np.bool_) if mine is None else mine)
        """Rows that count in losses and scores, bool (V,): every vertex is owned by one rank."""
        self.has_copies: bool = mine is not None
        """Whether a vertex may have rows on several ranks: under a vertex cut."""
        self.aggregation: RankAggregation = RankAggregation(shared, self._backend, comm)
        """The aggregation of rows, which `mggcn.nn.aggregate` calls."""
        self.clock: Tensor = torch.tensor([shared.sharing.seed, 0], dtype=torch.int64, device=self.device)
        """Seed and epoch of masks, int64 (2,), which `start_epoch` sets."""
        self._sites = 0
        self._owned_counts: Tensor | None = None
        self._features: Tensor | None = None

    @property
    def counts_edges(self) -> bool:
        """Whether stored values are numbers of parallel edges, each of which attention counts.

        Raises:
            GraphError: Edges repeat, and values are sums of their weights.
        """
        refuse_summed(self._graph)
        return self._graph.repeats == "counted"

    @property
    def features(self) -> Tensor:
        """Features of this rank's rows in the graph's type, dense (V, D); read on first use.

        Cost: one sweep over the features.

        Raises:
            GraphError: The graph has no features.
        """
        if self._features is None:
            self._features = self._read_features()
        return self._features

    def _read_features(self) -> Tensor:
        reader = FeatureReader(self._graph, self._partition.local_index(self.rank), self.rank, row_normalize=False)
        dense = torch.zeros(self.num_rows, reader.num_features, dtype=self.dtype, device=self.device)
        for local, block in reader.dense():
            dense[self._backend.upload(local).long()] = self._backend.upload(block).to(dense.dtype)
        return dense

    def labels(self) -> Tensor:
        """Return the classes of this rank's rows, int64 (V,), -1 for unlabelled.

        Raises:
            GraphError: The graph has no labels.
        """
        if self._graph.labels is None:
            raise GraphError(f"{self._graph.name} has no labels; add some when you prepare it, or take(your labels)")
        return self.take(self._graph.labels.array())

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the graph's splits."""
        return tuple(self._graph.splits)

    def split(self, name: str, number: int = 0) -> Tensor:
        """Return which owned rows belong to a split such as "train", bool (V,), False for copies.

        Raises:
            GraphError: The graph has no such split.
        """
        if name not in self._graph.splits:
            known = ", ".join(self._graph.splits) or "none"
            raise GraphError(f"{self._graph.name} has no split {name!r}; it has {known}, or take(your mask)")
        rows = self._graph.splits[name]
        if not 0 <= number < rows.shape[0]:
            raise GraphError(f"split {name!r} of {self._graph.name} has numbers 0 to {rows.shape[0] - 1}, got {number}")
        return self.take(rows.array()[number]) & self.owned

    def take(self, values: Any) -> Tensor:
        """Return this rank's rows (V, ...) of an array or tensor (N, ...) in original order.

        Raises:
            GraphError: It does not have N rows.
        """
        array = values if isinstance(values, np.ndarray) else np.asarray(to_numpy(values))
        if array.ndim == 0 or array.shape[0] != self.num_vertices:
            raise GraphError(
                f"expected one row for each of {self.num_vertices} vertices, got shape {array.shape}; "
                "take() expects values of the whole graph in its own order"
            )
        return self._backend.upload(np.ascontiguousarray(array[self._host_ids]))

    def start_epoch(self, epoch: int, seed: int | None = None) -> None:
        """Begin an epoch, from 0: `dropout` and attention's draw new masks. Every rank calls it, with the same numbers.

        seed: of the masks; by default `seed` of `run`.
        """
        self._sites = 0
        self.clock[1] = epoch
        if seed is not None:
            self.clock[0] = seed

    def next_site(self) -> int:
        """Return the number, from 1, of a layer that draws a mask in this epoch."""
        self._sites += 1
        return self._sites

    @property
    def owned_counts(self) -> Tensor:
        """How many vertices each rank owns, float64 (P,). Collective on first use."""
        # No cached_property: Python 3.11's has one lock for all ranks that are threads, and this waits for the others.
        if self._owned_counts is None:
            counts = torch.zeros(self.num_ranks, dtype=torch.float64, device=self.device)
            counts[self.rank] = self.owned.sum()
            self._owned_counts = self.sum_over_ranks(counts)
        return self._owned_counts

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        """Replace a contiguous tensor by its sum over ranks, and return it. Collective; without a gradient."""
        self._backend.activate()
        self._comm.all_reduce(tensor).wait()
        return tensor

    def total(self, value: Tensor | float) -> Tensor:
        """Return the sum over ranks of a number or tensor, in float64 and without a gradient. Collective."""
        self._backend.activate()
        summed = torch.as_tensor(value, device=self.device).detach().to(torch.float64, copy=True).contiguous()
        self._comm.all_reduce(summed).wait()
        return summed

    def count(self, mask: Tensor) -> int:
        """Return how many rows of all ranks are set in a mask of owned rows. Collective."""
        return int(self.total((mask & self.owned).sum()))

    def gather(self, rows: Tensor) -> Tensor:
        """Return the owned rows (V, ...) of all ranks as (N, ...) in original order, on every rank. Collective.

        Cost: memory for N rows on every rank, and as many bytes sent.
        """
        self._backend.activate()
        every = rows.new_zeros((self.num_vertices, *rows.shape[1:]))
        every[self.ids[self.owned]] = rows.detach()[self.owned]
        self._comm.all_reduce(every).wait()
        return every

    def sum_gradients(self, module: torch.nn.Module) -> None:
        """Replace every gradient by its sum over ranks, as a loss divided by global counts requires. Collective.

        Call it between backward() and the optimiser's step. A parameter without a gradient on any rank keeps none.
        """
        self._backend.activate()
        parameters = [p for p in module.parameters() if p.requires_grad]
        for dtype in dict.fromkeys(p.dtype for p in parameters):  # in one order on all ranks
            self._sum_group([p for p in parameters if p.dtype == dtype])

    def _sum_group(self, group: list[torch.nn.Parameter]) -> None:
        """One message: who has a gradient, and the gradients, zeros where there is none."""
        here = [p.grad is not None for p in group]
        present = torch.tensor(here, dtype=group[0].dtype, device=self.device)
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in group]
        flat = torch.cat([present, *(g.detach().reshape(-1) for g in grads)])
        self._comm.all_reduce(flat).wait()
        found, *sums = flat.split([len(group), *(p.numel() for p in group)])
        anywhere = here if all(here) else found.tolist()  # reads a result, for which the host would wait on a GPU
        for parameter, grad, there, summed in zip(group, grads, anywhere, sums, strict=True):
            parameter.grad = grad.copy_(summed.view_as(grad)) if there else None

    def peak_bytes(self) -> int:
        """Return the peak memory so far of this rank's process, or of its GPU."""
        return self._backend.peak_bytes()

    def share_weights(self, module: torch.nn.Module) -> None:
        """Give every rank the parameters and buffers of rank 0. Collective."""
        self._backend.activate()
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                sent = tensor.detach().contiguous().clone()
                self._comm.broadcast(sent, 0).wait()
                tensor.copy_(sent)


def on_rank(
    body: Callable[[PartitionedGraph], T], shared: Shared, comm: Communicator, device_of: DeviceOf = gpu_of_rank
) -> T:
    """Build a rank's part and call `body` with it; backward passes run in this thread.

    torch would run a GPU's backward passes in one thread of the process, where ranks that are threads would wait for
    each other.
    """
    part = PartitionedGraph(shared, comm, device_of)
    with torch.autograd.set_multithreading_enabled(False), _threads_by_steps(part):
        return body(part)


@contextlib.contextmanager
def _threads_by_steps(part: PartitionedGraph) -> Iterator[None]:
    """Choose a single rank's threads after each step of any of torch's optimisers. Several ranks keep theirs: what they
    would have to agree on is known to none of them.
    """
    if part.threads is None or part.num_ranks > 1 or part.device.type != "cpu":
        yield
        return
    choice, last, own = part.threads, [time.perf_counter()], threading.get_ident()

    def stepped(*_: Any) -> None:
        if threading.get_ident() != own:  # the hook is the whole process's
            return
        now = time.perf_counter()
        choice.after_epoch(now - last[0], 0.0, 0)
        last[0] = now

    hook = register_optimizer_step_post_hook(stepped)
    try:
        yield
    finally:
        hook.remove()
