"""DistGNN's Algorithm 4 once more, for all partitions in one process: dictionaries of vertices, no messages, no kernels.

A sum is written as it is defined: neighbours in the order of the stored row, then partitions in order of their number.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mggcn.aggregate.edge_op import Target
from mggcn.backend.base import Epilogue, KernelBackend
from mggcn.graph.csr import CSR, Graph
from mggcn.partition.cut.vertex_cut import VertexCut

Vectors = dict[int, np.ndarray]
"""By vertex."""


class Algorithm4:
    """r >= 1 epochs of delay; keep_last: every copy adds what last came from the others, else Algorithm 4 as written.

    A partial sum to which nothing has come stands for the whole one: it is scaled by the degree that it lacks.
    """

    def __init__(self, graph: Graph, cut: VertexCut, r: int, keep_last: bool) -> None:
        self.ranks = range(cut.num_parts)
        self.r, self.keep_last = r, keep_last
        self.owner = cut.owner.tolist()
        self.lies_in = {v: [p for p in self.ranks if v in set(cut.members(p).tolist())] for v in range(len(self.owner))}
        split = [v for v in self.lies_in if len(self.lies_in[v]) > 1]
        by_root = sorted(split, key=lambda v: (self.owner[v], v))
        self.bins = [{v for i, v in enumerate(by_root) if i % r == b} for b in range(r)]
        self.into = self._neighbours(graph.adj_t, cut.edge_part_t.read(0, graph.num_edges))
        self.out_of = self._neighbours(graph.adj, cut.edge_part.read(0, graph.num_edges))
        degree = [{v: len(near) for v, near in self.into[p].items()} for p in self.ranks]
        whole = {v: sum(d.get(v, 0) for d in degree) for v in self.lies_in}
        self.missing = {
            (v, p): whole[v] / degree[p][v] if degree[p].get(v) else 1.0 for v in split for p in self.lies_in[v]
        }
        self.up: dict[tuple[str, int], Any] = {}
        self.down: dict[tuple[str, int], Any] = {}
        self.last_up: dict[str, dict[tuple[int, int], np.ndarray]] = defaultdict(dict)
        self.last_down: dict[str, dict[tuple[int, int], np.ndarray]] = defaultdict(dict)

    def _neighbours(self, matrix: CSR, part: np.ndarray) -> list[dict[int, list[int]]]:
        """Neighbours of each vertex in each partition, the vertex itself last if it lacks a self-loop."""
        indptr, indices = matrix.indptr.read(0, matrix.num_rows + 1), matrix.indices.read(0, matrix.nnz)
        result: list[dict[int, list[int]]] = [defaultdict(list) for _ in self.ranks]
        for v in range(matrix.num_rows):
            row = range(indptr[v], indptr[v + 1])
            for e in row:
                result[part[e]][v].append(int(indices[e]))
            if all(indices[e] != v for e in row):
                result[self.owner[v]][v].append(v)
        return result

    def forward(self, op: str, epoch: int, h: Sequence[Vectors]) -> list[Vectors]:
        return self.exchange(op, epoch, self._local(self.into, h))

    def backward(self, op: str, epoch: int, g: Sequence[Vectors]) -> list[Vectors]:
        return self._local(self.out_of, self.exchange(op, epoch, g))

    def _local(self, neighbours: Sequence[Mapping[int, list[int]]], h: Sequence[Vectors]) -> list[Vectors]:
        sums: list[Vectors] = []
        for p in self.ranks:
            mine: Vectors = {}
            for v in h[p]:
                total = np.zeros_like(h[p][v])
                for u in neighbours[p].get(v, []):
                    total = total + h[p][u]
                mine[v] = total
            sums.append(mine)
        return sums

    def exchange(self, op: str, epoch: int, f: Sequence[Vectors]) -> list[Vectors]:
        """Lines 9 to 21; f[p][v]: the local aggregate of v in partition p."""
        local, f = f, [dict(vectors) for vectors in f]
        r, owner = self.r, self.owner
        turn = self.bins[epoch % r]
        leaves = [(v, p) for v in turn for p in self.lies_in[v] if p != owner[v]]
        self.up[op, epoch] = {(v, p): local[p][v] for v, p in leaves}
        from_leaves, from_roots = {}, {}
        if epoch >= r:
            came = self.up.pop((op, epoch - r))
            self.last_up[op].update(came)
            from_leaves = self.last_up[op] if self.keep_last else came
        if epoch >= 2 * r:
            came = self.down.pop((op, epoch - r))
            self.last_down[op].update(came)
            from_roots = self.last_down[op] if self.keep_last else came
        told = {(v, owner[v]) for v, _ in from_leaves} | set(from_roots)
        for (v, p), share in self.missing.items():
            if (v, p) not in told:
                f[p][v] = f[p][v] * share
        for (v, _), vector in sorted(from_leaves.items(), key=lambda item: item[0]):
            f[owner[v]][v] = f[owner[v]][v] + vector
        if epoch >= r:
            parts = self.last_up[op]
            self.down[op, epoch] = {
                (v, p): f[owner[v]][v] - parts[v, p] if self.keep_last else f[owner[v]][v] for v, p in leaves
            }
        for (v, p), vector in from_roots.items():
            f[p][v] = f[p][v] + vector if self.keep_last else vector
        return f


class Simulated:
    """Stands in for a rank's aggregation: the ranks' threads meet, and one of them runs the simulator for all."""

    exact = False

    def __init__(
        self, simulator: Algorithm4, rank: int, ids: np.ndarray, backend: KernelBackend, barrier: threading.Barrier
    ) -> None:
        self._simulator, self._rank, self._ids = simulator, rank, ids
        self._backend, self._barrier = backend, barrier
        self._epoch = 0
        self.shared: dict[str, Any] = {}

    def begin_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def forward(self, h: torch.Tensor, target: Target, buffers: object, layer: int, *_: object) -> None:
        self._run(self._simulator.forward, f"forward {layer}", h, target.out, target.epilogue)

    def backward(self, g: torch.Tensor, target: Target, buffers: object, layer: int, *_: object) -> None:
        self._run(self._simulator.backward, f"backward {layer}", g, target.out, target.epilogue)

    def _run(self, step: Any, op: str, dense: torch.Tensor, out: torch.Tensor, epilogue: Epilogue | None) -> None:
        rows = dense.numpy().copy()
        self.shared[f"in {self._rank}"] = dict(zip(self._ids.tolist(), rows, strict=True))
        if self._barrier.wait() == 0:
            given = [self.shared[f"in {p}"] for p in self._simulator.ranks]
            self.shared["out"] = step(op, self._epoch, given)
        self._barrier.wait()
        mine = self.shared["out"][self._rank]
        out.copy_(torch.from_numpy(np.array([mine[v] for v in self._ids.tolist()]).reshape(out.shape)))
        if epilogue is not None:
            self._backend.finish(out, out, epilogue)

    def state(self) -> dict[str, torch.Tensor]:
        return {}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        return
