"""What bench/spmm.py multiplies and with what: graphs, the ways of our kernel one by one, and other libraries."""

from __future__ import annotations

import dataclasses
import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import WORKLOADS, Workload

# Of products only the graph is made like: a sparse product reads no features.
GRAPHS = {name: dataclasses.replace(work, features=1) for name, work in WORKLOADS.items()} | {
    "products-like": Workload("products-like", 600_000, 7_500_000, 1, 47, ())
}
PLAIN = "rows"
CHOSEN = "chosen"
LINE = 64
"""Bytes of a cache line."""


@dataclass
class Operands:
    """A graph and dense operands, as every contender reads them."""

    indptr: Any
    indices: Any
    width: int
    threads: int

    @property
    def num_rows(self) -> int:
        return int(self.indptr.size) - 1

    def moved(self, item: int) -> int:
        """Bytes that the product touches if nothing stays in a cache: ids and rows of the operand, pointers, the result."""
        return int(self.indices.size) * (4 + item * self.width) + self.num_rows * (8 + item * self.width)


def load(store: Path, width: int, threads: int) -> Operands:
    import numpy as np

    return Operands(np.load(store / "indptr.npy"), np.load(store / "indices.npy"), width, threads)


def own(data: Operands, kind: str, every_way: bool) -> tuple[dict[str, Callable[[], Any]], Any]:
    """Our kernel for a storage type, in the plain and the chosen way or in every one; and the choice."""
    import torch

    from mggcn.backend.cpu.backend import CpuBackend

    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[kind]
    backend = CpuBackend(dtype, data.threads)
    adj = backend.sparse(data.indptr, data.indices, None)
    dense, out = (matrix(backend, data.num_rows, data.width) for _ in range(2))
    dense.copy_(values(data))
    kernel = backend.sparse_products
    chosen = kernel.choice(adj, dense, out)
    named = kernel.candidates(kernel.products[0])
    named = {PLAIN: named[PLAIN], CHOSEN: chosen} | (named if every_way else {})

    def runner(choice: Any) -> Callable[[], Any]:
        def run() -> Any:
            kernel.multiply(adj, dense, out, accumulate=False, epilogue=None, choice=choice)
            return out

        return run

    return {f"{name}, {kind}": runner(choice) for name, choice in named.items()}, chosen


def matrix(backend: Any, rows: int, cols: int) -> Any:
    """A matrix as a run has it: rows padded to cache lines, in the backend's own memory."""
    item = backend.dtype.itemsize
    ld = -(-cols * item // LINE) * LINE // item
    return backend.allocate(rows * ld * item).view(backend.dtype).view(rows, ld)[:, :cols]


def values(data: Operands) -> Any:
    import torch

    return torch.randn(data.num_rows, data.width, generator=torch.Generator().manual_seed(90217))


def peers(data: Operands) -> dict[str, Callable[[], Any]]:
    """torch.sparse CSR and SciPy (one thread), PyG's EdgeIndex and DGL's copy_u if they are installed; all in float32."""
    import numpy as np
    import scipy.sparse as sp
    import torch

    n, dense = data.num_rows, values(data)
    ones = np.ones(data.indices.size, np.float32)
    scipy_csr = sp.csr_matrix((ones, data.indices, data.indptr), (n, n))
    parts = (torch.from_numpy(data.indptr).int(), torch.from_numpy(data.indices), torch.from_numpy(ones))
    torch_csr = torch.sparse_csr_tensor(*parts, (n, n))
    found: dict[str, Callable[[], Any]] = {
        "torch CSR": lambda: torch_csr @ dense,
        "SciPy": lambda: torch.from_numpy(scipy_csr @ dense.numpy()),
    }
    if importlib.util.find_spec("torch_geometric"):
        found["PyG EdgeIndex"] = edge_index(data, dense)
    if importlib.util.find_spec("dgl"):
        found["DGL copy_u"] = copy_u(data, dense)
    return found


def edge_index(data: Operands, dense: Any) -> Callable[[], Any]:
    import numpy as np
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch_geometric import EdgeIndex

    rows = np.repeat(np.arange(data.num_rows), np.diff(data.indptr))
    pairs = torch.from_numpy(np.stack([rows, data.indices.astype(np.int64)]))
    graph = EdgeIndex(pairs, sparse_size=(data.num_rows, data.num_rows), sort_order="row")
    return lambda: graph.matmul(dense)


def copy_u(data: Operands, dense: Any) -> Callable[[], Any]:
    import dgl
    import torch

    csc = ("csc", (torch.from_numpy(data.indptr), torch.from_numpy(data.indices.astype("int64")), []))
    graph = dgl.graph(csc, num_nodes=data.num_rows).int()
    return lambda: dgl.ops.copy_u_sum(graph, dense)
