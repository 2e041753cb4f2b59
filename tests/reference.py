"""The dense formula in float64 by torch.autograd, with NumPy's own Philox masks: what every run is held to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch

from mggcn.config import ModelConfig
from mggcn.graph.csr import CSR, Graph

MASK32 = np.uint64(0xFFFFFFFF)


def philox(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Philox4x32-10 of uint64 counters (..., 4) holding 32-bit words."""
    c = counter.astype(np.uint64).copy()
    k0, k1 = np.uint64(key[0]), np.uint64(key[1])
    for _ in range(10):
        p0 = np.uint64(0xD2511F53) * c[..., 0]
        p1 = np.uint64(0xCD9E8D57) * c[..., 2]
        c = np.stack(
            [
                (p1 >> np.uint64(32)) ^ c[..., 1] ^ k0,
                p1 & MASK32,
                (p0 >> np.uint64(32)) ^ c[..., 3] ^ k1,
                p0 & MASK32,
            ],
            axis=-1,
        )
        k0 = (k0 + np.uint64(0x9E3779B9)) & MASK32
        k1 = (k1 + np.uint64(0xBB67AE85)) & MASK32
    return c


def dropout_mask(ids: np.ndarray, width: int, p: float, seed: int, epoch: int, layer: int) -> np.ndarray:
    """keep / (1 - p) as float64 (len(ids), width)."""
    threshold = min(round(65536 * p), 65535)
    if threshold == 0:
        return np.ones((len(ids), width))
    groups = -(-width // 8)
    counter = np.zeros((len(ids), groups, 4), np.uint64)
    counter[..., 0] = np.arange(groups)
    counter[..., 1] = (ids.astype(np.uint64) & MASK32)[:, None]
    counter[..., 2] = (ids.astype(np.uint64) >> np.uint64(32))[:, None]
    counter[..., 3] = layer
    words = philox(counter, (seed, epoch))
    halves = np.stack([words & np.uint64(0xFFFF), words >> np.uint64(16)], axis=-1).reshape(len(ids), groups * 8)
    scale = float(np.float32(65536 / (65536 - threshold)))
    return (halves[:, :width] >= threshold) * scale


def weight_mask(n: int, heads: int, p: float, key: tuple[int, int], site: int) -> torch.Tensor:
    """keep / (1 - p) of attention's weights for every [destination, source, head]; key: seed and epoch."""
    threshold = min(round(65536 * p), 65535)
    counter = np.zeros((n, n, -(-heads // 8), 4), np.uint64)
    counter[..., 0] = np.arange(counter.shape[2])
    counter[..., 1] = np.arange(n)[None, :, None]
    counter[..., 2] = np.arange(n)[:, None, None]
    counter[..., 3] = 2**31 + site
    words = philox(counter, key)
    halves = np.stack([words & np.uint64(0xFFFF), words >> np.uint64(16)], -1).reshape(n, n, -1)[..., :heads]
    return torch.from_numpy((halves >= threshold) * float(np.float32(65536 / (65536 - threshold))))


def dense_csr(csr: CSR) -> np.ndarray:
    """A small CSR as a dense float64 matrix."""
    values = np.ones(csr.nnz) if csr.values is None else csr.values.array()
    matrix = sp.csr_matrix((values, csr.indices.array(), csr.indptr.array()), (csr.num_rows, csr.num_cols))
    return np.asarray(matrix.todense(), np.float64)


def dense_features(graph: Graph) -> np.ndarray:
    features = graph.features
    return dense_csr(features) if isinstance(features, CSR) else np.asarray(features.array(), np.float64)  # type: ignore[union-attr]


def normalized(graph: Graph, model: ModelConfig) -> np.ndarray:
    """A_hat = S_r A^T S_c, dense."""
    adj = dense_csr(graph.adj)
    if model.kind == "sage":
        # A vertex counts as often as its stored self-loop says, once without one.
        own = np.where(np.diagonal(adj) == 0, 1.0, np.diagonal(adj))
        neighbours = adj.T - np.diag(np.diagonal(adj))
        return (neighbours + np.diag(own)) / (neighbours.sum(1) + own)[:, None]
    if model.self_loops:
        diagonal = np.einsum("ii->i", adj)
        diagonal[diagonal == 0] = 1.0
    degree = adj.sum(0)
    with np.errstate(divide="ignore"):
        scale = 1 / degree if model.norm == "mean" else 1 / np.sqrt(degree)
    scale[~np.isfinite(scale)] = 0
    return scale[:, None] * adj.T * (1 if model.norm == "mean" else scale[None, :])


def loss_and_gradients(
    graph: Graph, model: ModelConfig, weights: Mapping[str, torch.Tensor], seed: int, epoch: int
) -> tuple[float, dict[str, np.ndarray], np.ndarray]:
    """Loss, gradient of every weight and logits of one training epoch in float64."""
    ids = np.arange(graph.num_vertices)
    params = {n: w.to(torch.float64).clone().requires_grad_(True) for n, w in weights.items()}
    a_hat = torch.from_numpy(normalized(graph, model)) if model.aggregates else torch.eye(graph.num_vertices).double()
    h = torch.from_numpy(dense_features(graph))
    h = h * torch.from_numpy(dropout_mask(ids, h.shape[1], model.input_dropout, seed, epoch, 0))
    layers = len(model.hidden) + 1
    with torch.enable_grad():
        for layer in range(1, layers + 1):
            h = a_hat @ (h @ params[f"layers.{layer}.weight"])
            if model.bias:
                h = h + params[f"layers.{layer}.bias"]
            if layer < layers:
                h = torch.relu(h)
                h = h * torch.from_numpy(dropout_mask(ids, h.shape[1], model.dropout, seed, epoch, layer))
        train = torch.from_numpy(np.asarray(graph.splits["train"].array()[0]))
        labels = torch.from_numpy(np.asarray(graph.labels.array()).astype(np.int64))  # type: ignore[union-attr]
        loss = torch.nn.functional.cross_entropy(h[train], labels[train])
        loss.backward()  # type: ignore[no-untyped-call]
    grads: dict[str, Any] = {n: p.grad.numpy() for n, p in params.items()}  # type: ignore[union-attr]
    return float(loss.detach()), grads, h.detach().numpy()
