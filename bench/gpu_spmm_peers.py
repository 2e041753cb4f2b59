"""Others' sparse products on the same matrix: cuSPARSE by its generic interface, torch.sparse, PyTorch Geometric."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from gpu_lab import Lab
from torch import Tensor

from mggcn.backend.base import Epilogue, Sparse
from mggcn.backend.cuda.cusparse import Algorithm, CusparseSpmm

Product = Callable[[Tensor, Tensor], object]
ALGORITHMS: dict[str, Algorithm] = {"cuSPARSE ALG2": "alg2", "cuSPARSE ALG3": "alg3"}


def cusparse_products(lab: Lab, adj: Sparse) -> dict[str, Callable[[], Product]]:
    """CuSPARSE's row-major algorithms, the second prepared before; none where there is no cuSPARSE."""
    if lab.emulated:
        return {}
    return {name: functools.partial(cusparse_product, lab, adj, kind) for name, kind in ALGORITHMS.items()}


def cusparse_product(lab: Lab, adj: Sparse, algorithm: Algorithm) -> Product:
    def allocate(nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=lab.device.torch_device)

    def finish(z: Tensor, out: Tensor, epilogue: Epilogue) -> None:
        raise ValueError("products are timed without an epilogue")

    spmm = CusparseSpmm(lab.device.cusparse, allocate, finish, algorithm)
    return lambda h, out: spmm.multiply(adj, h, out, accumulate=False, epilogue=None)


def torch_product(adj: Sparse) -> Product:
    """torch.sparse CSR with ones; 32-bit row pointers, as cuSPARSE's faster path wants them."""
    ones = torch.ones(adj.nnz, device=adj.indices.device)
    csr = (adj.indptr.int(), adj.indices, ones, (adj.num_rows, adj.num_rows))
    matrix = torch.sparse_csr_tensor(*csr, check_invariants=False)
    return lambda h, out: torch.mm(matrix, h, out=out)


def pyg_product(adj: Sparse) -> Product:
    """EdgeIndex.matmul of the transposed edges, as PyG's convolutions aggregate; a new result at each call."""
    from torch_geometric import EdgeIndex

    n = adj.num_rows
    rows = torch.repeat_interleave(torch.arange(n, dtype=torch.int32, device=adj.indices.device), adj.indptr.diff())
    edges: Any = EdgeIndex(torch.stack([adj.indices, rows]), sparse_size=(n, n), sort_order="col")
    edges.fill_cache_()
    return lambda h, out: edges.matmul(h, transpose=True)
