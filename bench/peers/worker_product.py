"""The process of one kind of product in bench/peers/products.py: the normalised adjacency times a dense matrix.

Each `prepare` is for another width of the same graph. An epoch is `repeats` calls, so that a short product is timed over
some hundredths of a second.
"""

from __future__ import annotations

import functools
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.process import Contender, serve

BUSY_S, MAX_REPEATS = 0.05, 20


@dataclass(frozen=True)
class Product:
    """One call, from its value to the (N, D) product in the order of the store, and facts."""

    run: Callable[[], Any]
    values: Callable[[Any], Any]
    facts: dict[str, Any]


@functools.cache
def structure(store: str) -> tuple[Any, Any]:
    """CSR with self-loops, NumPy arrays."""
    from bench.arrays import with_loops

    return with_loops(Path(store))


def own(job: dict[str, Any]) -> Product:
    """Return mggcn's product: in the order of the store or by locality, chosen or plain, float32 or bfloat16."""
    import torch

    from bench.arrays import operand
    from bench.cpu.ways import own_graph
    from mggcn.backend.base import Epilogue
    from mggcn.backend.spmm_choice import SpmmChoice

    kind, width = job["kind"], job["width"]
    precision = "bf16" if "bf16" in kind else "fp32"
    graph = own_graph(job["store"], job["threads"], precision, "locality" in kind)
    dense, out = graph.buffers(width)
    dense[graph.place] = (torch.from_numpy(operand(dense.shape[0], width)) * graph.scale[graph.place].view(-1, 1)).to(
        dense.dtype
    )
    products, epilogue = graph.backend.sparse_products, Epilogue(row_scale=graph.scale)
    choice = SpmmChoice() if "plain" in kind else products.choice(graph.adj, dense, out)

    def run() -> None:
        products.multiply(graph.adj, dense, out, accumulate=False, epilogue=epilogue, choice=choice)

    way = f"{choice.text}: {choice.reason}"
    return Product(run, lambda _: out[graph.place].float().numpy(), {"order_seconds": graph.order_s, "way": way})


@functools.cache
def dgl_graph(store: str) -> Any:
    import dgl
    import torch

    indptr, indices = structure(store)
    csc = ("csc", (torch.from_numpy(indptr), torch.from_numpy(indices).long(), []))
    return dgl.graph(csc, num_nodes=indptr.size - 1).int().formats(["csc"])


def dgl_product(job: dict[str, Any]) -> Product:
    """Return one of DGL's ways to multiply."""
    import dgl
    import torch

    from bench.arrays import edge_values, operand, scales

    torch.set_grad_enabled(False)
    torch.set_num_threads(job["threads"])
    graph, (indptr, indices) = dgl_graph(job["store"]), structure(job["store"])
    x = torch.from_numpy(operand(indptr.size - 1, job["width"]))
    scale = torch.from_numpy(scales(indptr)).view(-1, 1)
    if job["kind"] == "DGL u_mul_e":
        values = torch.from_numpy(edge_values(indptr, indices)).view(-1, 1)
        return Product(lambda: dgl.ops.u_mul_e_sum(graph, x, values), to_numpy, {})
    if job["kind"] == "DGL copy_u alone":
        scaled = x * scale
        return Product(lambda: dgl.ops.copy_u_sum(graph, scaled), lambda y: (y * scale).numpy(), {})
    return Product(lambda: dgl.ops.copy_u_sum(graph, x * scale) * scale, to_numpy, {})


def to_numpy(tensor: Any) -> Any:
    return tensor.numpy()


@functools.cache
def torch_graph(store: str, kind: str) -> tuple[Any, Any]:
    """The matrix as a kind of product takes it, and its values."""
    import torch

    from bench.arrays import edge_values

    warnings.filterwarnings("ignore", "Sparse")
    indptr, indices = structure(store)
    n, values = indptr.size - 1, torch.from_numpy(edge_values(indptr, indices))
    pointers, columns = torch.from_numpy(indptr), torch.from_numpy(indices)
    if kind == "torch CSR":
        return torch.sparse_csr_tensor(pointers.int(), columns, values, (n, n)), values
    columns = columns.long()
    if kind == "torch reduce":
        return torch.sparse_csr_tensor(pointers, columns, values, (n, n)), values
    rows = torch.repeat_interleave(torch.arange(n), pointers.diff())
    if kind == "PyG SparseTensor":
        from torch_sparse import SparseTensor

        return SparseTensor(row=rows, rowptr=pointers, col=columns, value=values, sparse_sizes=(n, n)), values
    from torch_geometric import EdgeIndex

    return EdgeIndex(torch.stack([rows, columns]), sparse_size=(n, n), sort_order="row").fill_cache_(), values


def torch_product(job: dict[str, Any]) -> Product:
    """Return one of the ways of torch and PyG."""
    import torch

    from bench.arrays import operand

    torch.set_grad_enabled(False)
    torch.set_num_threads(job["threads"])
    kind = job["kind"]
    graph, values = torch_graph(job["store"], kind)
    x = torch.from_numpy(operand(structure(job["store"])[0].size - 1, job["width"]))
    runs = {
        "torch CSR": lambda: graph @ x,
        "torch reduce": lambda: torch.sparse.mm(graph, x, "sum"),
        "PyG EdgeIndex": lambda: graph.matmul(x, input_value=values),
        "PyG SparseTensor": lambda: graph.matmul(x),
    }
    return Product(runs[kind], to_numpy, {})


@functools.cache
def scipy_graph(store: str) -> Any:
    import numpy as np
    import scipy.sparse as sp

    from bench.arrays import edge_values

    indptr, indices = structure(store)
    n = indptr.size - 1
    return sp.csr_matrix((edge_values(indptr, indices), indices, indptr.astype(np.int32)), (n, n))


def scipy_product(job: dict[str, Any]) -> Product:
    """Return SciPy's product, or MKL's on the same matrix."""
    import numpy as np

    from bench.arrays import operand

    adj = scipy_graph(job["store"])
    x = operand(adj.shape[0], job["width"])
    if job["kind"] == "SciPy":
        return Product(lambda: adj @ x, lambda y: y, {})
    libraries = sorted(Path(sys.prefix, "lib").glob("libmkl_rt.so*"))
    if libraries:
        os.environ.setdefault("MKL_RT", str(libraries[0]))
    from sparse_dot_mkl import dot_product_mkl

    out = np.zeros_like(x)
    return Product(lambda: dot_product_mkl(adj, x, out=out, out_scalar=0.0), lambda y: y, {})


LIBRARIES = {
    "mggcn": own,
    "dgl": dgl_product,
    "torch": torch_product,
    "pyg": torch_product,
    "torch-sparse": torch_product,
    "scipy": scipy_product,
    "mkl": scipy_product,
}


def prepare(job: dict[str, Any]) -> Contender:
    """Build a kind of product, and find how many calls are worth timing together."""
    from bench.arrays import sample_of
    from bench.peers.products import KINDS

    product = LIBRARIES[KINDS[job["kind"]][0]](job)
    product.run()
    began = time.perf_counter()
    last = product.run()
    repeats = max(1, min(MAX_REPEATS, round(BUSY_S / (time.perf_counter() - began))))

    def epoch() -> float:
        for _ in range(repeats):
            product.run()
        return 0.0

    sample = sample_of(product.values(last))
    return Contender(epoch, product.facts | {"repeats": repeats}, lambda: sample)


if __name__ == "__main__":
    serve(prepare)
