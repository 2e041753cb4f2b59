"""The models of all kinds as papers write them, on dense float64 matrices for autograd: without builder or rewrites."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import torch
from torch.nn import functional

from mggcn.config import Config, ModelConfig
from mggcn.graph.csr import Graph
from tests.reference import dense_csr, dense_features, dropout_mask, weight_mask
from tests.train.tasks import dense_loss
from tests.train.test_exact import SEED

EPOCH = 3
MOMENTUM = 0.1
ACTIVATIONS = {
    "relu": torch.relu,
    "elu": functional.elu,
    "leaky_relu": functional.leaky_relu,
    "gelu": functional.gelu,
}


def dense_attention(count: torch.Tensor, scores: torch.Tensor, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Attention z (V, H C) from numbers of edges (u, v), scores (u, v, head), values x (u, head, c) and masks."""
    held = torch.where(count[:, :, None] > 0, scores, -torch.inf)
    best = held.amax(0, keepdim=True)
    weights = (held - torch.where(best.isinf(), 0.0, best).detach()).exp() * count[:, :, None]
    weights = weights / weights.sum(0, keepdim=True).clamp(min=1e-300) * mask
    return torch.einsum("uvh,uhc->vhc", weights, x).flatten(1)


def dense_means(graph: Graph) -> torch.Tensor:
    """For each relation the matrix of means over in-neighbours, float64 (R, N, N)."""
    adj, n = graph.adj, graph.num_vertices
    assert adj.types is not None
    rows = np.repeat(np.arange(n), np.diff(adj.indptr.array()))
    weights = np.ones(adj.nnz) if adj.values is None else adj.values.array().astype(np.float64)
    a = np.zeros((graph.num_relations, n, n))
    a[adj.types.array(), adj.indices.array(), rows] = weights
    total = a.sum(2, keepdims=True)
    return torch.from_numpy(np.divide(a, total, out=np.zeros_like(a), where=total != 0))


class DenseStack:
    """One pass of a model. weights: by mggcn's names; running: statistics of batch norms, which training writes."""

    def __init__(
        self,
        graph: Graph,
        model: ModelConfig,
        weights: Mapping[str, torch.Tensor],
        running: dict[str, torch.Tensor],
        *,
        training: bool,
    ) -> None:
        self.model, self.p, self.running, self.training = model, weights, running, training
        adj, count = dense_csr(graph.adj), dense_csr(dataclasses.replace(graph.adj, values=None))
        for matrix in (adj, count) if model.self_loops else ():
            np.fill_diagonal(matrix, np.where(np.diagonal(matrix) == 0, 1.0, np.diagonal(matrix)))
        self.a_t, self.x = torch.from_numpy(adj.T.copy()), torch.from_numpy(dense_features(graph))
        self.count = torch.from_numpy(count)
        self.means = dense_means(graph) if model.kind == "rgcn" else None
        degree = self.a_t.sum(1, keepdim=True)
        symmetric = model.norm == "symmetric" and model.kind != "sage"
        scale = torch.where(degree > 0, degree ** (-0.5 if symmetric else -1), torch.zeros(1).double())
        self.a_hat = scale * self.a_t * (scale.t() if symmetric else 1)
        self.ids = np.arange(graph.num_vertices)
        self.layers = self.norms = self.masks = self.attentions = 0

    def matrix(self, x: torch.Tensor) -> torch.Tensor:
        self.layers += 1
        return x @ self.p[f"layers.{self.layers}.weight"]

    def bias(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.p[f"layers.{self.layers}.bias"] if self.model.bias else x

    def dense(self, x: torch.Tensor) -> torch.Tensor:
        return self.bias(self.matrix(x))

    def around(self, x: torch.Tensor) -> torch.Tensor:
        """A dense layer around convolutions."""
        x = self.matrix(x)
        return x + self.p[f"layers.{self.layers}.bias"]

    def dropped(self, x: torch.Tensor, p: float, site: int) -> torch.Tensor:
        return x * torch.from_numpy(dropout_mask(self.ids, x.shape[1], p, SEED, EPOCH, site)) if self.training else x

    def end(self, x: torch.Tensor) -> torch.Tensor:
        """Norm, activation, dropout."""
        x = ACTIVATIONS[self.model.activation](self.norm(x))
        self.masks += 1
        return self.dropped(x, self.model.dropout, self.masks)

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        if self.model.norm_layer == "none":
            return x
        self.norms += 1
        name = f"norms.{self.norms}"
        both = self.p[f"{name}.weight"], self.p[f"{name}.bias"]
        if self.model.norm_layer == "layer":
            return functional.layer_norm(x, both[0].shape, *both)
        mean, variance = f"{name}.running_mean", f"{name}.running_var"
        if not self.training:
            return functional.batch_norm(x, self.running[mean], self.running[variance], *both)
        centre, spread = x.mean(0), x.var(0, unbiased=False)
        self.running[mean] = MOMENTUM * centre.detach()
        self.running[variance] = 1 - MOMENTUM + MOMENTUM * x.var(0, unbiased=True).detach()
        return (x - centre) / (spread + 1e-5).sqrt() * both[0] + both[1]

    def conv(self, x: torch.Tensor, *, last: bool = False) -> torch.Tensor:
        kind = self.model.kind if self.model.kind != "sage" else f"sage-{self.model.aggregator}"
        if kind == "mlp":
            return self.dense(x)
        if kind == "gin":
            h = (1 + self.p[f"layers.{self.layers + 1}.eps"]) * x + self.a_t @ x
            return self.dense(ACTIVATIONS[self.model.activation](self.dense(h)))
        if kind == "sage-mean":
            neighbours = self.matrix(self.a_hat @ x)
            return self.bias(neighbours + self.matrix(x))
        if kind == "sage-max":
            pooled, linked = torch.relu(self.dense(x)), self.count.t()[:, :, None] > 0
            # torch.max gives the gradient to the first of equal values.
            best = torch.where(linked, pooled[None], -torch.inf).max(1).values
            own = self.matrix(x)
            return self.bias(own + self.matrix(torch.where(best.isinf(), 0.0, best)))
        if kind == "rgcn":
            assert self.means is not None
            own, name = self.matrix(x), f"layers.{self.layers}"
            weights = torch.einsum("rb,bde->rde", self.p[f"{name}.coefficients"], self.p[f"{name}.bases"])
            return self.bias(own + torch.einsum("rnm,md,rde->ne", self.means, x, weights))
        if kind in ("gat", "gatv2"):
            return self.attention(x, last=last)
        return self.bias(self.matrix(self.a_hat @ x))

    def attention(self, x: torch.Tensor, *, last: bool) -> torch.Tensor:
        """Attention and a bias; the last layer averages its heads, and a hidden one that does not join them."""
        self.attentions += 1
        heads, p = (
            (self.model.out_heads or self.model.heads) if last else self.model.heads,
            self.model.attention_dropout if self.training else 0.0,
        )
        if self.model.kind == "gat":
            h = self.matrix(x).unflatten(1, (heads, -1))
            s, t = ((h * self.p[f"layers.{self.layers}.{end}"]).sum(2) for end in ("source", "destination"))
            scores = functional.leaky_relu(s[:, None] + t[None], 0.2)
        else:
            h, y = (self.dense(x).unflatten(1, (heads, -1)) for _ in range(2))
            q = functional.leaky_relu(h[:, None] + y[None], 0.2)
            scores = (q * self.p[f"layers.{self.layers}.attention"]).sum(3)
        mask = torch.ones(1).double()
        if p:
            mask = weight_mask(len(self.ids), heads, p, (SEED, EPOCH), self.attentions).transpose(0, 1)
        z = dense_attention(self.count, scores, h, mask)
        z = z.unflatten(1, (heads, -1)).mean(1) if last or not self.model.concat_heads else z
        return z + self.p[f"attention.{self.attentions}.bias"] if self.model.bias else z

    def logits(self) -> torch.Tensor:
        model, x = self.model, self.dropped(self.x, self.model.input_dropout, 0)
        if model.kind == "sgc":
            return self.dense(torch.linalg.matrix_power(self.a_hat, model.hops) @ x)
        for _ in model.dense_before:
            x = self.end(self.dense(x) if model.kind == "appnp" else self.around(x))
        if model.kind == "appnp":
            for _ in model.hidden:
                x = self.end(self.dense(x))
            z = first = self.dense(x)
            for _ in range(model.hops):
                z = (1 - model.teleport) * self.a_hat @ z + model.teleport * first
            return z
        layers = []
        for width in model.hidden:
            h = self.conv(x)
            if model.residual == "linear":
                h = h + self.around(x)
            elif model.residual == "identity" and x.shape[1] == width:
                h = h + x
            x = self.end(h)
            x = self.end(self.around(x)) if model.dense_between else x
            layers.append(x)
        if model.head == "convolution":
            return self.conv(x, last=True)
        if model.jumping == "concat":
            x = torch.cat(layers, 1)
        for other in reversed(layers[:-1] if model.jumping == "max" else []):
            x = torch.where(other >= x, other, x)
        for _ in model.dense_after:
            x = self.end(self.around(x))
        return self.around(x)


def expected(
    graph: Graph, config: Config, weights: Mapping[str, torch.Tensor]
) -> tuple[float, dict[str, np.ndarray], np.ndarray, dict[str, torch.Tensor]]:
    """Loss and gradients of a training epoch; then logits of an evaluation, and the running statistics that it reads."""
    running: dict[str, torch.Tensor] = {}
    p = {name: w.double().clone().requires_grad_() for name, w in weights.items() if "running" not in name}
    with torch.enable_grad():
        loss = dense_loss(graph, config.train, DenseStack(graph, config.model, p, running, training=True).logits())
        loss.backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        logits = DenseStack(graph, config.model, p, running, training=False).logits().numpy()
    gradients = {name: np.zeros(v.shape) if v.grad is None else v.grad.numpy() for name, v in p.items()}
    return float(loss.detach()), gradients, logits, running
