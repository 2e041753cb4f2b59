"""A model that the package does not have, with kinds of nodes of its own: its derived gradient is the whole graph's."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from mggcn.assemble.plan import STRATEGIES
from mggcn.config import ModelConfig
from mggcn.errors import PlanError
from mggcn.graph.csr import Graph
from mggcn.model.builder import Builder
from mggcn.model.runtime import Runtime
from mggcn.model.values import Adjoint, Op, PlainKind, Value
from tests.devices import CPU, Where, everywhere
from tests.graphs import largest_error, make_graph, one_epoch, pattern
from tests.reference import dense_csr, dense_features, dropout_mask
from tests.train.test_exact import SEED, TOLERANCE, config_of
from tests.train.test_mixed import with_run

EPS = 1e-5


def gin(b: Builder, x: Value, model: ModelConfig) -> Value:
    """GIN (Xu et al. 2019, eq. 4.1, eps = 0) with two dense layers, layer norm and a linear residual."""
    for layer, width in enumerate(model.hidden, start=1):
        h = b.add(x, b.neighbours(x))
        h = b.relu(b.bias(b.linear(h, width)))
        h = b.bias(b.linear(h, width))
        gain = b.parameter(f"norm.{layer}", (width,), "ones")
        h = b.relu(b.node(LayerNorm(gain), h, cols=width))
        x = b.dropout(b.add(h, b.linear(x, width)))
    return b.bias(b.linear(x, b.num_classes))


@dataclass(frozen=True, slots=True)
class LayerNorm(PlainKind):
    """out = gain * (z - mean) / sqrt(variance + eps), row by row."""

    gain: str

    @property
    def has_parameters(self) -> bool:
        return True

    def adjoint(self, value: Value, gradient: Value) -> Adjoint:
        (z,) = value.operands
        g = Value(LayerNormGrad(self.gain), (z, gradient), z.cols)
        return Adjoint((g,), (Value(GainGrad(self.gain), (z, gradient)),))

    def run(self, rt: Runtime, op: Op) -> None:
        rt.buffer(op.out).copy_(normed(op.tensor(rt, 0)) * rt.parameter(self.gain))


@dataclass(frozen=True, slots=True)
class LayerNormGrad(PlainKind):
    """The gradient of z from that of gain * normed(z). Operands z and g."""

    gain: str

    def run(self, rt: Runtime, op: Op) -> None:
        z, g = op.tensor(rt, 0), op.tensor(rt, 1) * rt.parameter(self.gain)
        y, deviation = normed(z), (z.var(1, unbiased=False, keepdim=True) + EPS).sqrt()
        rt.buffer(op.out).copy_((g - g.mean(1, keepdim=True) - y * (g * y).mean(1, keepdim=True)) / deviation)


@dataclass(frozen=True, slots=True)
class GainGrad(PlainKind):
    """The gradient of the gain. Operands z and g."""

    stored = False
    gain: str

    def run(self, rt: Runtime, op: Op) -> None:
        rt.gradient(self.gain).copy_((normed(op.tensor(rt, 0)) * op.tensor(rt, 1)).sum(0))


def normed(z: torch.Tensor) -> torch.Tensor:
    return (z - z.mean(1, keepdim=True)) / (z.var(1, unbiased=False, keepdim=True) + EPS).sqrt()


def reference(
    graph: Graph, model: ModelConfig, weights: dict[str, torch.Tensor], epoch: int
) -> tuple[float, dict[str, np.ndarray], np.ndarray]:
    """Loss, gradients and logits by torch.autograd on dense matrices."""
    p = {name: w.double().clone().requires_grad_() for name, w in weights.items()}
    a_t = torch.from_numpy(dense_csr(graph.adj)).t()
    ids, x = np.arange(graph.num_vertices), torch.from_numpy(dense_features(graph))
    with torch.enable_grad():
        for site, width in enumerate(model.hidden, start=1):
            first, second, skip = (f"layers.{3 * site - k}" for k in (2, 1, 0))
            h = torch.relu((x + a_t @ x) @ p[f"{first}.weight"] + p[f"{first}.bias"])
            h = h @ p[f"{second}.weight"] + p[f"{second}.bias"]
            h = torch.relu(torch.nn.functional.layer_norm(h, (width,), p[f"norm.{site}"], eps=EPS))
            mask = torch.from_numpy(dropout_mask(ids, width, model.dropout, SEED, epoch, site))
            x = (h + x @ p[f"{skip}.weight"]) * mask
        last = f"layers.{3 * len(model.hidden) + 1}"
        z = x @ p[f"{last}.weight"] + p[f"{last}.bias"]
        train = torch.from_numpy(graph.splits["train"].array()[0])
        labels = torch.from_numpy(graph.labels.array().astype(np.int64))  # type: ignore[union-attr]
        loss = torch.nn.functional.cross_entropy(z[train], labels[train])
        loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach()), {name: v.grad.numpy() for name, v in p.items()}, z.detach().numpy()  # type: ignore[union-attr]


CASES = list(itertools.product((1, 2, 3), STRATEGIES, ("random", "directed", "weighted")))


def error_of(case: tuple[int, str, str], where: Where = CPU, **run: str) -> float:
    """Largest error of loss, gradients and logits, relative to the largest value of each."""
    ranks, strategy, kind = case
    graph = make_graph(pattern(kind, 37, 6), num_features=11, num_classes=4, weighted=kind == "weighted", seed=8)
    config = config_of(ranks, strategy=strategy, hidden=(9, 6), dropout=0.4, self_loops=False)
    config = where.config(with_run(config, **run))
    found = one_epoch(config, graph, device_of=where.device_of, network=gin)
    loss, gradients, _ = reference(graph, config.model, found[0].weights, 3)
    still = dataclasses.replace(config.model, dropout=0.0)
    _, _, logits = reference(graph, still, found[0].weights, 3)
    assert float(np.abs(gradients["norm.1"]).max()) > 0
    return largest_error(found, loss, gradients, logits)


@pytest.mark.covering(1)
@pytest.mark.parametrize(("where", "case"), everywhere(CASES, lambda number: number % 5 == 2))
def test_its_gradients_equal_autograd(where: Where, case: tuple[int, str, str]) -> None:
    """Fails if a value that several nodes read loses one's gradient, or storage is taken over while it is still read."""
    prune = "auto" if CASES.index(case) % 2 else "off"
    assert error_of(case, where, prune=prune) < TOLERANCE


def test_a_planted_wrong_adjoint_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above itself fails when one of two ways back is forgotten."""
    from mggcn.model.kinds.elementwise import Add
    from mggcn.model.network import make_values

    make_values.cache_clear()
    monkeypatch.setattr(Add, "adjoint", lambda self, value, gradient: Adjoint((gradient, None)))
    try:
        assert error_of((2, "broadcast", "random")) > 1e-3
    finally:
        make_values.cache_clear()


def test_what_cannot_be_trained_is_refused() -> None:
    """Fails if a kind without an adjoint, another number of classes or no parameter is found out only in the run."""
    graph = make_graph(pattern("path", 9, 1), num_features=5, num_classes=3, seed=8)
    config = config_of(1, hidden=(4,))

    def stuck(b: Builder, x: Value, model: ModelConfig) -> Value:
        return b.node(GainGrad("none"), b.linear(x, 3), cols=3)

    def narrow(b: Builder, x: Value, model: ModelConfig) -> Value:
        return b.linear(x, 2)

    def bare(b: Builder, x: Value, model: ModelConfig) -> Value:
        return b.add(b.node(LayerNormGrad("none"), x, x, cols=3), b.node(LayerNormGrad("none"), x, x, cols=3))

    def twice(b: Builder, x: Value, model: ModelConfig) -> Value:
        return b.linear(x, len(b.parameter("a", (2,))) + len(b.parameter("a", (2,))))

    for network, message in (
        (stuck, "has no adjoint; give GainGrad one"),
        (narrow, "returns 2 columns for 3 classes"),
        (bare, "the model has no dense layer"),
        (twice, "makes the parameter a twice"),
    ):
        with pytest.raises(PlanError, match=message):
            one_epoch(config, graph, network=network)
