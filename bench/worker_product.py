"""The process of one kind of product in bench/peers_spmm.py: the normalised adjacency times a dense matrix.

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

from common import Contender, serve

BUSY_S, MAX_REPEATS = 0.05, 20
LINE = 64
"""Bytes of a cache line, to which mggcn pads its rows."""


@dataclass(frozen=True)
class Product:
    """One call, from its value to the (N, D) product in the order of the store, and facts."""

    run: Callable[[], Any]
    values: Callable[[Any], Any]
    facts: dict[str, Any]


@functools.cache
def structure(store: str) -> tuple[Any, Any]:
    """CSR with self-loops, NumPy arrays."""
    from peers_data import with_loops

    return with_loops(Path(store))


@functools.cache
def own_graph(store: str, threads: int, precision: str, ordered: bool) -> tuple[Any, ...]:
    """Return the backend and its matrix, the scales by row, the row of each vertex, and the seconds of the order."""
    import numpy as np
    import torch

    from mggcn.assemble import plan_shape
    from mggcn.assemble_rank import make_backend
    from mggcn.config import from_tables
    from mggcn.graph.store import open_store
    from mggcn.partition.locality.order import LocalitySettings, locality
    from mggcn.partition.order import assign
    from mggcn.partition.rows.tiles import build_tiles
    from mggcn.planning.shape import GraphShape

    config = from_tables({"run": {"threads": threads, "precision": precision}})
    backend = make_backend(
        config,
        plan_shape(
            config, GraphShape(name="tiny", num_vertices=2, num_edges=2, num_features=1, num_classes=1, symmetric=True)
        ).ranks[0],
        no_gpu,
    )
    torch.set_num_threads(threads)
    graph, began = open_store(store), time.perf_counter()
    owners = assign(graph.num_vertices, 1, "none", 0)
    if ordered:
        owners = locality(graph, LocalitySettings(parts=1, seed=1), threads).owners
    seconds = time.perf_counter() - began
    (tile,) = build_tiles(graph.adj_t, owners, 0, self_loops=True, dtype="float32", threads=threads)
    scale = torch.from_numpy((np.diff(tile.indptr) ** -0.5).astype(np.float32))
    place = torch.from_numpy(owners.local.astype(np.int64))
    return backend, backend.sparse(tile.indptr, tile.indices, tile.values), scale, place, seconds


def no_gpu() -> Any:
    raise RuntimeError("the products of this benchmark are the CPU's")


def own(job: dict[str, Any]) -> Product:
    """Return mggcn's product: in the order of the store or by locality, chosen or plain, float32 or bfloat16."""
    from mggcn import native

    native.limit_spinning()
    import torch
    from peers_data import operand

    from mggcn.backend.base import Epilogue

    kind, width = job["kind"], job["width"]
    precision = "bf16" if "bf16" in kind else "fp32"
    backend, adj, scale, place, seconds = own_graph(job["store"], job["threads"], precision, "locality" in kind)
    item, n = backend.dtype.itemsize, place.numel()
    ld = -(-width * item // LINE) * LINE // item
    dense, out = (backend.allocate(n * ld * item).view(backend.dtype).view(n, ld)[:, :width] for _ in range(2))
    dense[place] = (torch.from_numpy(operand(n, width)) * scale[place].view(-1, 1)).to(backend.dtype)
    run, way = plain_or_chosen(backend, (adj, dense, out), Epilogue(row_scale=scale), "plain" in kind)
    return Product(run, lambda _: out[place].float().numpy(), {"order_seconds": seconds, "way": way})


def plain_or_chosen(backend: Any, matrices: tuple[Any, ...], epilogue: Any, plain: bool) -> tuple[Any, str]:
    """Return one product, and how it is done: as the backend chooses, or row by row with every switch off."""
    if plain:
        from mggcn.backend.spmm_choice import SpmmChoice

        multiply = functools.partial(backend.sparse_products.multiply, choice=SpmmChoice())
        return lambda: multiply(*matrices, accumulate=False, epilogue=epilogue), "rows"
    way = ""
    if hasattr(backend, "sparse_products"):
        choice = backend.sparse_products.choice(*matrices)
        way = f"{choice.way} {choice.panel or choice.blocks}, {choice.ahead} ahead: {choice.reason}"
    return lambda: backend.spmm(*matrices, accumulate=False, epilogue=epilogue), way


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
    from peers_data import edge_values, operand, scales

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
    from peers_data import edge_values

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
    from peers_data import operand

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
    from peers_data import edge_values

    indptr, indices = structure(store)
    n = indptr.size - 1
    return sp.csr_matrix((edge_values(indptr, indices), indices, indptr.astype(np.int32)), (n, n))


def scipy_product(job: dict[str, Any]) -> Product:
    """Return SciPy's product, or MKL's on the same matrix."""
    import numpy as np
    from peers_data import operand

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
    from peers_data import sample_of
    from peers_spmm_cases import KINDS

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
