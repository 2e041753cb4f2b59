"""Batches for training loops of your own: seeds, what is drawn around them, and the features of all rows.

N vertices, S rows of a batch, B seeds of it, D features, E edges.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mggcn.assemble.batches import mapped_once
from mggcn.blocks.block import Stack
from mggcn.blocks.capacities import hops_of
from mggcn.blocks.draws import bounds
from mggcn.blocks.sampler import Sampler
from mggcn.blocks.slot import SlotPlan
from mggcn.config import SampleConfig
from mggcn.errors import ConfigError, GraphError
from mggcn.feed.batch import Batch
from mggcn.feed.edge_values import EdgeValues
from mggcn.feed.features import VertexFeatures
from mggcn.feed.gather import GatheredRows
from mggcn.feed.memory import BatchMemoryPlan
from mggcn.feed.norm_scales import NormScales
from mggcn.feed.sampled import SampledFeed
from mggcn.feed.seeds import RankSeeds, Seeds
from mggcn.graph.csr import Graph, most_own_entries
from mggcn.graph.ids import rows_of
from mggcn.graph.vertex_data import to_numpy
from mggcn.memory.device import STORAGE, scale_dtype
from mggcn.nn.devices import BackendOf, backends
from mggcn.nn.sampled_block import SampledBlock
from mggcn.nn.sharing import Norm, Sharing
from mggcn.planning.batches import draws_of
from mggcn.train.runtime import DTYPES


class SampledBatch:
    """Some seeds and what was drawn around them, which `batches` makes. Rows are numbered from the seeds outwards.

    It has memory of its own, so that it stays valid. `batch_size`, `x`, `y` and `edge_index` are what a batch of PyG's
    NeighborLoader has, but that `y` is that of the seeds alone.
    """

    def __init__(self, ids: Tensor, x: Tensor, y: Tensor | None, blocks: tuple[SampledBlock, ...]) -> None:
        self.ids: Tensor = ids
        """Vertex of each row, int64 (S,), those of the seeds first: its row in the graph's arrays, also where the graph was
        given ids; `graph.ids.take(ids.numpy())` are these."""
        self.x: Tensor = x
        """Features of all rows, (S, D)."""
        self.y: Tensor | None = y
        """Labels of the seeds: int64 (B,), -1 where unknown, or (B, T) of the features' type, NaN where unknown."""
        self.blocks: tuple[SampledBlock, ...] = blocks
        """A block for each layer, the input's first; the targets of each are the sources of the next."""
        self.seeds: int = blocks[-1].num_targets
        """Number of seeds, B."""

    @property
    def batch_size(self) -> int:
        """Number of seeds, B, by PyG's name."""
        return self.seeds

    @functools.cached_property
    def edge_index(self) -> Tensor:
        """Sources and targets of rows, int64 (2, E), for layers that all run over all rows: of each row the edges of the
        hop that reached it first. What further draws of a nearer row reached stays apart: no row reads it.
        """
        return torch.cat([block.edge_index()[:, first:] for block, first in self._hops()], 1)

    @functools.cached_property
    def edge_weight(self) -> Tensor | None:
        """What each edge of `edge_index` counts (`SampledBlock.edge_weight`), (E,); None if all count 1."""
        found = [block.edge_weight for block in self.blocks[::-1]]
        parts = [weight[first:] for weight, (_, first) in zip(found, self._hops(), strict=True) if weight is not None]
        return torch.cat(parts) if parts else None

    def _hops(self) -> Iterator[tuple[SampledBlock, int]]:
        """Blocks from the seeds outwards, each with the first edge of the rows that the ones before it do not have."""
        done = 0
        for block in self.blocks[::-1]:
            yield block, int(block.indptr[done])
            done = block.num_targets


@dataclass(kw_only=True)
class SampledLoader:
    """The batches of `batches`, epoch after epoch: each iteration is another epoch, and may run beside others."""

    graph: Graph
    feed: Callable[[], SampledFeed]
    steps: int
    seed: int
    dtype: torch.dtype
    backend_of: BackendOf
    epoch: int = 0
    """Number of the next iteration. Draws are named by it: set it to continue where another loop ended."""
    _idle: list[SampledFeed] = field(default_factory=list, init=False, repr=False)

    def __len__(self) -> int:
        """Return the batches of an epoch."""
        return self.steps

    def __iter__(self) -> Iterator[SampledBatch]:
        number, self.epoch = self.epoch, self.epoch + 1
        return self._batches(number)

    def _batches(self, number: int) -> Iterator[SampledBatch]:
        # A feed has the memory and threads of one iteration; another one that runs beside it has a feed of its own.
        feed = self._idle.pop() if self._idle else self.feed()
        try:
            # Closed first, so that no thread still writes into what the next iteration takes.
            with contextlib.closing(feed.epoch(self.seed, number)) as drawn:
                for step, batch in enumerate(drawn, start=number * self.steps):
                    yield self._on_device(batch, feed.stack, step)
        finally:
            self._idle.append(feed)

    def _on_device(self, batch: Batch, stack: Stack, step: int) -> SampledBatch:
        """The batch on the device, but for edges: blocks bring these when they are used."""
        upload, features, scales = self.backend_of(self.dtype, 1).upload, batch.features, batch.scales or {}
        ids, labels = upload(batch.rows[stack.blocks[0].sources]), self._labels(batch.rows[stack.seeds])
        shared: dict[str, Any] = {"graph": self.graph, "dtype": self.dtype, "backend_of": self.backend_of}
        shared |= {"clock": upload(np.array([self.seed, step])), "sites": itertools.count(1)}
        blocks = tuple(
            SampledBlock(
                batch.edges[b], ids[: batch.rows[b.sources].size], (scales[b.targets], scales[b.sources]), **shared
            )
            for b in stack.blocks
        )
        assert features is not None  # which this room's feeds gather
        return SampledBatch(ids, features.to(ids.device), None if labels is None else labels.to(ids.device), blocks)

    def _labels(self, ids: npt.NDArray[np.int64]) -> Tensor | None:
        labels, task = self.graph.labels, self.graph.task
        if labels is None:
            return None
        found = torch.from_numpy(labels.take(ids))
        numbers = found.long() if task == "classes" else found.to(self.dtype)
        return torch.where(found < 0, torch.nan, numbers) if task == "labels" else numbers


def batches(
    graph: Graph,
    seeds: Any,
    *,
    fanout: Sequence[int | str],
    batch: int = 1024,
    seed: int = 1,
    draw: str = "uniform",
    weights: str = "unbiased",
    norm: Norm = "none",
    self_loops: bool = False,
    shuffle: bool = True,
    drop_last: bool = False,
    ahead: int = 2,
    precision: str = "fp32",
    device: str = "cpu",
    threads: int = 0,
    backend_of: BackendOf | None = None,
) -> SampledLoader:
    """Return the batches of an epoch, to be iterated epoch after epoch, for a training loop of your own.

    Each iteration draws anew; draws are named by seed and step, so that two loops with one seed read the same batches,
    whatever `ahead` and `threads` are.

    Cost: with a norm, of graphs with weights or `self_loops`, the degrees that were read, 4 bytes a vertex (fp64: 8);
    memory for ahead + 1 batches from the first
    iteration on for as long as the loader lives, and as many for each iteration that runs beside others.

    Args:
        graph: A graph with features from `mggcn.load`.
        seeds: "train", "val", "test" or another split of the graph, vertices (B,), each once, by the ids that the graph
            was given, as in splits and `predict`, or else by row numbers; or a mask bool (N,) of rows.
        fanout: In-neighbours that are drawn of each row, a number for each layer, that of the layer next to the output
            first; -1 or "all": every one.
        batch: Seeds of a batch.
        seed: Of order and draws.
        draw: "uniform", "replace", "weight", "labor" or "labor-one", as `sample.draw`.
        weights: What a drawn edge counts in `aggregate`: "unbiased", "mean" or "block", as `sample.weights`.
        norm: S_r and S_c of `aggregate`, as `run` takes it.
        self_loops: Give every row an edge from itself, which is never drawn.
        shuffle: Whether each epoch has an order of its own; False keeps the order of the seeds.
        drop_last: Leave out the last batch if it is smaller than the others.
        ahead: Batches that threads draw and gather beside the loop; 0: none.
        precision: "fp32", "fp64" or "bf16".
        device: "cpu" or "cuda": where batches are when they are given.
        threads: Threads of the CPU's kernels; 0 takes as many as torch.
        backend_of: Kernels other than the device's own, for tests.

    Raises:
        ConfigError: A setting is unknown or does not fit.
        GraphError: The graph has no features or no such split, or seeds are no vertices, none, or repeat.

    Examples:
        >>> edges, x = np.array([[0, 1, 2], [1, 2, 0]]), np.eye(3, dtype=np.float32)
        >>> loader = mggcn.nn.batches(mggcn.load(edges, features=x), [2, 0], fanout=[1], batch=2, shuffle=False)
        >>> for batch in loader:
        ...     print(batch.ids.tolist(), mggcn.nn.aggregate(batch.x, batch.blocks[0]).tolist())
        [2, 0, 1] [[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """
    if not isinstance(graph, Graph):
        raise GraphError(f"expected a graph from mggcn.load(...), got {type(graph).__name__}")
    given: dict[str, Any] = {"fanout": fanout, "batch": batch, "draw": draw, "weights": weights}
    if ahead < 0:
        raise ConfigError(f"ahead expects 0 or more batches that are made beside the loop, got {ahead}")
    if batch in (0, "all"):
        raise ConfigError(
            f"batch expects the seeds of a batch, 1 or more, such as the number of all seeds; got {batch}"
        )
    sample = SampleConfig(**given, drop_last=drop_last, ahead=ahead)
    sample.require_fanout()
    if sample.draws_by_type:
        raise ConfigError(
            f"fanout has numbers by relation, {sample.fanout}, and blocks of batches have no types of edges; give a number "
            "for each layer, or train R-GCN on batches with mggcn.Trainer(graph, mggcn.RGCN(...), batch=..., fanout=...)"
        )
    sharing = Sharing(norm=norm, self_loops=self_loops, precision=precision, device=device, threads=threads, seed=seed)
    sharing.config(1, "auto")  # which refuses what a run would
    order = Seeds(seeds_of(graph, seeds), sample.batch, drop_last, shuffle=shuffle)
    own = most_own_entries(graph.adj_t) if self_loops else 0  # relations tell repeated columns
    graph = mapped_once(graph.untyped())
    adj_t, draws, real = graph.adj_t, draws_of(sample), scale_dtype(precision)
    weighted, n = adj_t.values is not None, graph.num_vertices
    capacities = bounds(order.most, draws, num_vertices=n, num_edges=adj_t.nnz, own_entries=own)
    plan = SlotPlan(draws=draws, capacities=capacities, num_vertices=n, places=weighted)
    sampler = Sampler(adj_t, draws, self_loops=self_loops)
    rows = GatheredRows(VertexFeatures(graph, False), None, DTYPES[STORAGE[precision]])
    values = EdgeValues(adj_t, sample, self_loops=self_loops, corrected=True, stored=weighted, real=real)
    scales = NormScales(adj_t, norm, self_loops=self_loops, real=real)

    def feed() -> SampledFeed:
        memory = BatchMemoryPlan(
            stack=hops_of(capacities), slots=plan, values=values, features=lambda _: rows, norm=scales
        )
        return SampledFeed(sampler, RankSeeds(order), memory, sample.ahead, keep=True)

    backend_of = backend_of or backends(device, threads, max(size.edges for size in capacities))
    dtype = DTYPES[STORAGE[precision]]
    return SampledLoader(graph=graph, feed=feed, steps=order.num_steps, seed=seed, dtype=dtype, backend_of=backend_of)


def seeds_of(graph: Graph, seeds: Any) -> npt.NDArray[np.int64]:
    """Return the rows of the seeds that a split, a mask or vertices name, these by the graph's ids where it was given some.

    Raises: GraphError.
    """
    if isinstance(seeds, str):
        if seeds not in graph.splits:
            known = ", ".join(graph.splits) or "none"
            raise GraphError(f"{graph.name} has no split {seeds!r}; it has {known}: name one, or give ids or a mask")
        given = np.asarray(graph.splits[seeds].array()[0])
    else:
        given = np.array(to_numpy(seeds))
    if given.dtype == np.bool_ and given.shape == (graph.num_vertices,):
        return _distinct(np.flatnonzero(given))
    if graph.ids is not None and not isinstance(seeds, str):
        try:
            return _distinct(given if not given.size else rows_of(graph, given, "seeds"), given)
        except ConfigError as error:
            raise GraphError(str(error)) from error
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise GraphError(
            f"seeds must be a split's name, ids of one dimension or a mask of {graph.num_vertices} vertices, got "
            f"{given.dtype} of shape {given.shape}"
        )
    if given.size and (given.min() < 0 or given.max() >= graph.num_vertices):
        wrong = given[(given < 0) | (given >= graph.num_vertices)][0]
        raise GraphError(f"seeds must be vertices 0 .. {graph.num_vertices - 1}, got {wrong}")
    return _distinct(given)


def _distinct(rows: npt.NDArray[Any], names: npt.NDArray[Any] | None = None) -> npt.NDArray[np.int64]:
    """Return the rows of seeds. names: of these in errors. Raises: GraphError if there are none, or one is there twice."""
    if not rows.size:
        raise GraphError("there are no seeds; give one vertex or more")
    _, first, counts = np.unique(rows, return_index=True, return_counts=True)
    if first.size < rows.size:
        twice = (rows if names is None else names)[first[counts > 1][0]]
        raise GraphError(f"vertex {twice} is twice among the seeds; give each vertex once")
    return np.asarray(rows, np.int64)
