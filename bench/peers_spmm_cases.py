"""What bench/peers_spmm.py compares: kinds of products, the library of each, and what one call of it does."""

from __future__ import annotations

from dataclasses import dataclass

OWN = "mggcn"
ORDERED = "mggcn, order by locality"
PLAIN = "mggcn, plain rows"

KINDS: dict[str, tuple[str, str]] = {
    OWN: (OWN, "the way that mggcn chooses; S X lies ready, as a training epoch keeps it, S is in the epilogue"),
    ORDERED: (OWN, "the same, vertices in the order by locality, which is not timed here"),
    PLAIN: (OWN, "the row kernel with every switch off"),
    "mggcn bf16": (OWN, "as mggcn, on bfloat16"),
    "mggcn bf16, order by locality": (OWN, "the same, in the order by locality"),
    "DGL copy_u + scaling": ("dgl", "two row scalings around dgl.ops.copy_u_sum, as GraphConv does"),
    "DGL copy_u alone": ("dgl", "dgl.ops.copy_u_sum of S X, unscaled: DGL's kernel and nothing else"),
    "DGL u_mul_e": ("dgl", "dgl.ops.u_mul_e_sum with the weights of the edges"),
    "torch CSR": ("torch", "a torch.sparse CSR matrix with int32 indices times X"),
    "torch reduce": ("torch", "torch.sparse.mm(A, X, 'sum') with int64 indices, the kernel of PyG's CSR path"),
    "PyG EdgeIndex": ("pyg", "EdgeIndex.matmul with the weights of the edges"),
    "PyG SparseTensor": ("torch-sparse", "torch_sparse.matmul"),
    "SciPy": ("scipy", "csr_matrix @ X, one thread"),
    "MKL": ("mkl", "sparse_dot_mkl.dot_product_mkl into a matrix that is there"),
}
"""Library and meaning of every kind of product S A S X, S the -1/2-th powers of the degrees."""
UNSCALED = {"DGL copy_u alone"}
"""Kinds without the last scaling: their numbers are scaled before they are compared."""
NEEDS_PYG_BEST = ("PyG EdgeIndex", "PyG SparseTensor", "torch CSR", "torch reduce")
"""PyG's ways: the fastest is what a goal against PyG means."""


@dataclass(frozen=True)
class Goal:
    """How many times faster than DGL mggcn must be on a graph at a width; ordered: it may have the order by locality."""

    graph: str
    width: int
    over_dgl: float
    ordered: bool = False


GOALS = (
    Goal("reddit-like", 512, 2.5),
    Goal("reddit-like", 128, 1.6),
    Goal("products-like", 128, 1.8, ordered=True),
    Goal("arxiv-like", 128, 1.2),
)
NOWHERE_BELOW = 0.85
OVER_TORCH = 3.0
"""Over torch CSR and over PyG's fastest way, on every goal's row."""
BF16_OVER_FP32, BF16_FROM_WIDTH = 1.5, 64
DGL = "DGL copy_u + scaling"
DRAWN = (DGL, "torch CSR", "PyG EdgeIndex", "MKL", ORDERED, PLAIN, "mggcn bf16")
"""What a plot shows beside mggcn, which is its line at 1."""
