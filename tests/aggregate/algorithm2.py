"""DistGNN-MB's Algorithm 2 once more, for all ranks in one process: dictionaries of vertices, no messages, no kernels.

What a batch draws, and what its edges count, are the feed's. T targets, S sources of a block; float64 throughout.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mggcn.blocks.block import Block, Stack
from mggcn.config import Config
from mggcn.feed.batch import Batch
from mggcn.graph.csr import Graph
from tests.reference import dense_csr, philox

Weights = Mapping[str, torch.Tensor]
Row = tuple[int, np.ndarray]
"""A vertex and its row."""


class Cache:
    """A layer's HEC on one rank: lines in a ring, each with a vertex, its row and the step in which it came."""

    def __init__(self, lines: int) -> None:
        self.lines: list[tuple[int, np.ndarray, int] | None] = [None] * lines
        self.next = 0

    def line_of(self, vertex: int) -> int | None:
        return next((k for k, line in enumerate(self.lines) if line is not None and line[0] == vertex), None)

    def store(self, rows: Sequence[Row], step: int) -> None:
        for vertex, row in rows:
            line = self.line_of(vertex)
            if line is None:
                line, self.next = self.next, (self.next + 1) % len(self.lines)
            self.lines[line] = vertex, row, step

    def load(self, vertex: int, step: int, life: float) -> np.ndarray | None:
        line = self.line_of(vertex)
        if line is None:
            return None
        _, row, came = self.lines[line]  # type: ignore[misc]  # a line that was found is filled
        return row if step - came <= life else None


class Algorithm2:
    """Steps of all ranks. batches: of each rank, step after step; weights: those of the start; products: of each layer."""

    def __init__(
        self,
        graph: Graph,
        config: Config,
        owner: np.ndarray,
        stack: Stack,
        batches: Sequence[Sequence[Batch]],
        weights: Mapping[str, torch.Tensor],
        products: Mapping[int, str],
        steps: int,
    ) -> None:
        self.graph, self.config, self.owner, self.stack, self.batches = graph, config, owner, stack, batches
        self.p = {name: w.double().clone() for name, w in weights.items()}
        self.products, self.steps = products, steps
        self.ranks = range(config.run.ranks)
        self.edges = dense_csr(graph.adj_t) != 0
        self.reads = [  # of each rank, the vertices of each other that its own rows read
            [
                np.flatnonzero(self.edges[owner == q].any(0) & (owner == p)) if p != q else np.zeros(0, int)
                for p in self.ranks
            ]
            for q in self.ranks
        ]
        halo = [sum(of.size for of in self.reads[q]) for q in self.ranks]
        lines, depth = config.sample.history_lines, len(stack.blocks)
        self.caches = [[Cache(min(lines, halo[q])) for _ in range(depth)] for q in self.ranks]
        self.flying: list[dict[int, Any]] = [{} for _ in range(depth)]
        self.hits: dict[int, np.ndarray] = defaultdict(lambda: np.zeros((depth, 2), int))

    def run(self) -> list[float]:
        """Train all steps; return the loss of each."""
        losses = []
        for step in range(len(self.batches[0])):
            p = {name: w.clone().requires_grad_() for name, w in self.p.items()}
            with torch.enable_grad():
                loss = self.loss(p, step)
                loss.backward()  # type: ignore[no-untyped-call]  # torch's
            rate = self.config.train.lr
            self.p = {name: w.detach() - rate * w.grad for name, w in p.items() if w.grad is not None}
            losses.append(float(loss.detach()))
        return losses

    def loss(self, p: Weights, step: int) -> torch.Tensor:
        batches = [self.batches[q][step] for q in self.ranks]
        features = self.graph.features.read(0, self.graph.num_vertices)
        x = [torch.from_numpy(features[b.rows[self.stack.blocks[0].sources]].astype(np.float64)) for b in batches]
        for layer, block in enumerate(self.stack.blocks):
            last = layer + 1 == len(self.stack.blocks)
            before = [self.before(p, layer, of, batch, block) for of, batch in zip(x, batches, strict=True)]
            filled = self.exchanged(step, layer, block, before)
            x = [self.after(p, layer, x[q], *filled[q], batches[q], block) for q in self.ranks]
            x = x if last else [torch.relu(of) for of in x]
        labels = self.graph.labels.read(0, self.graph.num_vertices)  # type: ignore[union-attr]  # it has some
        total = torch.zeros((), dtype=torch.float64)
        for batch, z in zip(batches, x, strict=True):
            wanted = torch.from_numpy(labels[batch.rows[self.stack.seeds]].astype(np.int64))
            total = total + torch.nn.functional.cross_entropy(z, wanted, reduction="sum") / batch.seeds.size
        return total

    def number(self, layer: int) -> int:
        """The first dense product of a layer."""
        return layer + 1 if self.config.model.kind == "gcn" else 2 * layer + 1

    def before(self, p: Weights, layer: int, x: torch.Tensor, batch: Batch, block: Block) -> torch.Tensor:
        """What is summed over neighbours."""
        number = self.number(layer)
        col = None if batch.scales is None or self.config.model.kind == "gin" else batch.scales[block.sources][1]
        if col is not None:
            x = torch.from_numpy(col)[:, None] * x
        return x if self.products[number] == "aggregate-first" else x @ p[f"layers.{number}.weight"]

    def after(
        self, p: Weights, layer: int, x: torch.Tensor, z: torch.Tensor, missing: list[bool], batch: Batch, block: Block
    ) -> torch.Tensor:
        """The layer's result, without ReLU. z: what is summed, with the rows of other ranks as these sent them, and zeros
        for those that are missing.
        """
        kind, number, edges = self.config.model.kind, self.number(layer), batch.edges[block]
        rows = edges.indptr.size - 1
        a = torch.from_numpy(matrix(edges, rows, z.shape[0]))
        share = torch.ones(rows, dtype=torch.float64)
        if self.config.sample.history_missing == "rest":
            all_of, left = a.abs().sum(1), a[:, ~torch.tensor(missing)].abs().sum(1)
            share = torch.where(left > 0, all_of / left, 0.0)
        sums = share[:, None] * (a @ z)
        if kind == "gin":
            w, eps, h = p[f"layers.{number}.weight"], p[f"layers.{number}.eps"], x[:rows]
            h = torch.relu((1 + eps) * (h @ w) + sums + p[f"layers.{number}.bias"])
            return h @ p[f"layers.{number + 1}.weight"] + p[f"layers.{number + 1}.bias"]
        row = None if batch.scales is None else batch.scales[block.targets][0]
        sums = sums if row is None else torch.from_numpy(row)[:, None] * sums
        if self.products[number] == "aggregate-first":
            sums = sums @ p[f"layers.{number}.weight"]
        if kind == "gcn":
            return sums + p[f"layers.{number}.bias"]
        return sums + x[:rows] @ p[f"layers.{number + 1}.weight"] + p[f"layers.{number + 1}.bias"]

    def exchanged(
        self, step: int, layer: int, block: Block, before: Sequence[torch.Tensor]
    ) -> list[tuple[torch.Tensor, list[bool]]]:
        """Lines 7 to 25 for a layer of all ranks."""
        sample, k, flying = self.config.sample, step % self.steps, self.flying[layer]
        delay, ends = sample.history_delay, sample.history_ends == "paper"
        sends = not ends or k < self.steps - delay
        if sends:
            flying[step] = {
                (p, q): self.pushed(step, layer, block, p, q, before[p])
                for p in self.ranks
                for q in self.ranks
                if p != q
            }
        came = flying.pop(step - delay, None)
        found = []
        for q in self.ranks:
            for p in self.ranks:
                if came is not None and p != q:
                    self.caches[q][layer].store(came[p, q], step)
            found.append(self.fill(step, layer, block, q, before[q], reads=not ends or k >= delay))
        return found

    def fill(
        self, step: int, layer: int, block: Block, q: int, z: torch.Tensor, *, reads: bool
    ) -> tuple[torch.Tensor, list[bool]]:
        """Lines 10 to 12: rows of other ranks come from the cache, or are zeros, without gradients; says which."""
        batch, sample = self.batches[q][step], self.config.sample
        constant = layer == 0 and self.products[self.number(0)] == "aggregate-first"
        life = np.inf if constant else sample.history_life
        ids, seeds, out, missing = batch.rows[block.sources].tolist(), batch.rows[self.stack.seeds].size, [], []
        for place, vertex in enumerate(ids):
            if place < seeds or self.owner[vertex] == q:
                out.append(z[place])
                missing.append(False)
                continue
            row = self.caches[q][layer].load(vertex, step, life) if reads else None
            out.append(torch.zeros_like(z[place]).detach() if row is None else torch.from_numpy(row))
            missing.append(row is None)
            self.hits[step // self.steps][layer] += row is not None, 1
        return torch.stack(out), missing

    def pushed(self, step: int, layer: int, block: Block, p: int, q: int, z: torch.Tensor) -> list[Row]:
        """Lines 15 to 22: the rows of rank p that q reads, those with the largest keys if they are too many."""
        ids, wanted = self.batches[p][step].rows[block.sources].tolist(), set(self.reads[q][p].tolist())
        some = [(place, v) for place, v in enumerate(ids) if v in wanted]
        most = min(self.config.sample.history_rows, len(wanted))
        if len(some) > most:
            names = np.array([[0xD0000000 + layer, v, 0, 0] for _, v in some], np.uint64)
            words = philox(names, (self.config.train.seed, step))
            keys = np.log((words[:, 0] * 2.0**32 + words[:, 1] + 0.5) / 2.0**64)
            keys /= [max(self.edges[v].sum(), 1) for _, v in some]
            chosen = set(np.argsort(-keys)[:most].tolist())
            some = [one for number, one in enumerate(some) if number in chosen]
        return [(v, z[place].detach().numpy().copy()) for place, v in some]


def matrix(edges: Any, rows: int, sources: int) -> np.ndarray:
    """A block's matrix (T, S), dense."""
    a = np.zeros((rows, sources))
    of_row = np.repeat(np.arange(rows), np.diff(edges.indptr))
    np.add.at(a, (of_row, edges.indices), 1.0 if edges.values is None else edges.values)
    return a
