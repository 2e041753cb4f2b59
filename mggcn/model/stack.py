"""The model for all kinds: dense layers, convolutions with the steps around them, and the layers that give the logits.

A layer is drop(f(norm(conv(x) + residual(x)))), f being model.activation: the order of "Classic GNNs are strong baselines"
(Luo et al. 2024). With defaults a GCN is Kipf & Welling's (2017, eq. 2).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from mggcn.config import ModelConfig
from mggcn.errors import PlanError
from mggcn.model.builder import Builder
from mggcn.model.convolutions import CONVOLUTIONS, Convolution
from mggcn.model.kinds.pairs import PairDot, PairProduct, scored_pairs
from mggcn.model.values import Value


def stack(b: Builder, x: Value, model: ModelConfig) -> Value:
    """Return the logits (V, C)."""
    x, *layers = _hidden(b, x, model, len(model.hidden))
    if model.head == "convolution":
        return _convolution(model)(b, layers[-1] if layers else x, b.num_classes, True)
    x = _joined(b, layers or [x])
    for width in model.dense_after:
        x = _ended(b, b.dense(x, width))
    return b.dense(x, b.num_classes)


def propagated(b: Builder, x: Value, model: ModelConfig) -> Value:
    """Return the logits (V, C) of SGC and APPNP, whose weights act on single vertices before results are propagated.

    sgc: A_hat^K X W + b (Wu et al. 2019, eq. 8), W first. appnp: Z_0 = mlp(X), Z_k = (1 - a) A_hat Z_(k-1) + a Z_0
    (Klicpera et al. 2019, eq. 5), K = model.hops, a = model.teleport.
    """
    if model.kind == "sgc":
        x = b.linear(x, b.num_classes)
        for _ in range(model.hops):
            x = b.aggregate(x)
        return b.bias(x)
    x = _hidden(b, x, model, len(model.hidden))[-1]
    z = first = b.bias(b.linear(x, b.num_classes))
    for _ in range(model.hops):
        z = b.blend(b.aggregate(z), first, model.teleport)
    return z


@dataclass(frozen=True, slots=True)
class PairScoring:
    """How a step scores pairs of embeddings. decoder: hidden widths of a network on their product, none for a dot product.

    num_vertices: N where pairs are of the rows of all ranks, else 0. dtype: of activations.
    """

    decoder: tuple[int, ...]
    num_vertices: int
    dtype: str

    def __call__(self, b: Builder, x: Value) -> Value:
        """Return the scores of a step's pairs (M, 1), as logits of a link."""
        x = scored_pairs(x, self.num_vertices, self.dtype)
        if not self.decoder:
            return Value(PairDot(), (x,), 1)
        x = Value(PairProduct(), (x,), x.cols)
        for width in self.decoder:
            x = b.relu(b.dense(x, width))
        return b.dense(x, 1)


@dataclass(frozen=True, slots=True)
class HiddenLayer:
    """A run's model as far as the output of hidden layer `number`, from 1; its parameters are a part of the run's."""

    number: int

    def __call__(self, b: Builder, x: Value, model: ModelConfig) -> Value:
        """Return what follows the layer's norm and activation, (V, model.hidden[number - 1])."""
        return _hidden(b, x, model, self.number)[-1]


def _convolution(model: ModelConfig) -> Convolution:
    """Return what a layer computes first; the hidden layers of APPNP are those of an MLP."""
    names = {"sage": f"sage-{model.aggregator}", "appnp": "mlp"}
    return CONVOLUTIONS[names.get(model.kind, model.kind)]


def _hidden(b: Builder, x: Value, model: ModelConfig, number: int) -> list[Value]:
    """Return what the first hidden layer reads, and the outputs of the first `number` ones."""
    if model.residual == "identity" and model.hidden:
        _check_identity(x.cols, model)
    for width in model.dense_before:
        x = _ended(b, b.bias(b.linear(x, width)) if model.kind == "appnp" else b.dense(x, width))
    layers = [x]
    for width in model.hidden[:number]:
        layers.append(_layer(b, layers[-1], width, _convolution(model)))
    return layers


def _check_identity(features: int, model: ModelConfig) -> None:
    """Refuse model.residual identity where no hidden layer is as wide as what it reads, so that nothing would be added.

    Raises: PlanError.
    """
    widths = [(features, *model.dense_before)[-1], *model.hidden]
    if all(before != width for before, width in pairwise(widths)):
        raise PlanError(
            f"model.residual identity adds what a layer reads where the widths agree, and none of {widths} do; give hidden "
            "layers of one width, or choose residual linear"
        )


def _layer(b: Builder, x: Value, width: int, conv: Convolution) -> Value:
    h = conv(b, x, width, False)
    if b.config.residual == "linear":
        h = b.add(h, b.dense(_beside(b, x, h), width))
    elif b.config.residual == "identity" and x.cols == width:
        h = b.add(h, x)
    h = _ended(b, h)
    return _ended(b, b.dense(h, width)) if b.config.dense_between else h


def _beside(b: Builder, x: Value, h: Value) -> Value:
    """Return the rows of x that h has: beside a convolution those of its targets."""
    return x if h.rows == x.rows else b.own(x)


def _ended(b: Builder, h: Value) -> Value:
    """What follows a convolution or dense layer."""
    return b.dropout(b.activation(b.norm(h)))


def _joined(b: Builder, layers: list[Value]) -> Value:
    """Jumping knowledge (Xu et al. 2018, section 4)."""
    if b.config.jumping == "concat":
        return b.concat(layers)
    found = layers[-1]
    if b.config.jumping == "max":
        found = layers[0]
        for layer in layers[1:]:
            found = b.larger(found, layer)
    return found
