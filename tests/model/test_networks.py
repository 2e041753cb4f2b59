"""Networks that nobody would ship, so that every rewrite meets what it must leave alone: exact beside torch.autograd."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest

from mggcn.aggregate.edge_op import SUM
from mggcn.assemble.plan import STRATEGIES
from mggcn.config import ModelConfig
from mggcn.errors import PlanError
from mggcn.graph.csr import ArrayRows, Graph
from mggcn.model.builder import Builder
from mggcn.model.kinds.dense import Linear
from mggcn.model.values import Value
from tests.graphs import largest_error, make_graph, one_epoch, pattern
from tests.model.torch_builder import EPOCH, expected
from tests.train.test_exact import TOLERANCE, config_of
from tests.train.test_mixed import with_run

FEATURES, CLASSES = 11, 4


def sorted_out(kind: str, sparse: bool, training: int) -> Graph:
    """A small graph; training: vertices that train, 0 for most."""
    graph = make_graph(
        pattern(kind, 41, 6),
        num_features=FEATURES,
        num_classes=CLASSES,
        sparse=sparse,
        weighted=kind == "weighted",
        seed=8,
    )
    if not training:
        return graph
    mask = np.arange(41) < training
    labels = graph.labels.array().copy()  # type: ignore[union-attr]
    labels[mask] = np.arange(training) % CLASSES
    splits = {"train": ArrayRows(mask[None]), "val": ArrayRows((~mask & (labels >= 0))[None])}
    return dataclasses.replace(graph, labels=ArrayRows(labels), splits=splits)


def error_of(network: Any, config: Any, graph: Graph) -> float:
    """Largest error of loss, gradients and logits, relative to the largest value of each."""
    found = one_epoch(config, graph, EPOCH, network=network)
    loss, gradients, logits = expected(network, graph, config.model, found[0].weights)
    return largest_error(found, loss, gradients, logits)


def unscaled_sum_of_x(b: Any, x: Any, model: Any) -> Any:
    return b.linear(b.relu(b.bias(b.neighbours(b.linear(x, 7)))), CLASSES)


def half_scaled_sum_of_x(b: Any, x: Any, model: Any) -> Any:
    return b.linear(b.relu(b.scale(b.neighbours(b.linear(x, 7)), "row")), CLASSES)


def dropout_of_its_own_on_x(b: Any, x: Any, model: Any) -> Any:
    return b.linear(b.relu(b.aggregate(b.linear(b.dropout(x), 7))), CLASSES)


def relu_of_x(b: Any, x: Any, model: Any) -> Any:
    return b.linear(b.relu(b.aggregate(b.linear(b.relu(x), 7))), CLASSES)


def bias_and_scale_of_x(b: Any, x: Any, model: Any) -> Any:
    return b.linear(b.scale(b.bias(x, "first"), "row"), CLASSES)


def two_row_scales(b: Any, x: Any, model: Any) -> Any:
    return b.scale(b.aggregate(b.linear(b.relu(b.linear(x, 5)), CLASSES)), "row")


def residual_of_x(b: Any, x: Any, model: Any) -> Any:
    return b.linear(b.add(x, b.relu(b.aggregate(b.linear(x, FEATURES)))), CLASSES)


def ways_of_many_lengths(b: Any, x: Any, model: Any) -> Any:
    h = b.relu(b.linear(x, 6))
    far = b.aggregate(b.relu(b.aggregate(b.aggregate(h))))
    return b.linear(b.add(b.add(h, far), b.aggregate(h)), CLASSES)


def one_product_two_sums(b: Any, x: Any, model: Any) -> Any:
    h = b.linear(b.relu(b.bias(b.linear(x, 6))), 6)
    return b.linear(b.add(b.aggregate(h), b.neighbours(h)), CLASSES)


def projected_if_wide(b: Any, x: Any, model: Any) -> Any:
    if x.cols > 8:
        x = b.relu(b.bias(b.aggregate(b.linear(x, 8))))
    return b.aggregate(b.linear(b.relu(b.bias(b.aggregate(b.linear(x, 8)))), CLASSES))


def relu_at_the_end(b: Any, x: Any, model: Any) -> Any:
    return b.dropout(b.relu(b.bias(b.aggregate(b.linear(b.add(x, x), CLASSES)))))


NETWORKS = [
    unscaled_sum_of_x,
    half_scaled_sum_of_x,
    dropout_of_its_own_on_x,
    relu_of_x,
    bias_and_scale_of_x,
    two_row_scales,
    residual_of_x,
    ways_of_many_lengths,
    one_product_two_sums,
    projected_if_wide,
    relu_at_the_end,
]
SETTINGS: list[tuple[int, dict[str, Any]]] = [
    (1, {"dropout": 0.4}),
    (1, {"input_dropout": 0.3, "norm": "mean", "bias": False}),
    (2, {"self_loops": False, "dropout": 0.4}),
    (3, {"input_dropout": 0.2, "dropout": 0.3}),
]


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.__name__)
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_odd_networks_are_exact(network: Any, sparse: bool) -> None:
    """Fails if a rewrite fires on what only looks like its pattern, or pruning takes the rows of a shorter way."""
    for number, (ranks, model) in enumerate(SETTINGS):
        strategy = (
            sorted(STRATEGIES)[(number + NETWORKS.index(network)) % len(STRATEGIES)] if ranks > 1 else "broadcast"
        )
        graph = sorted_out(("directed", "weighted", "path", "random")[number], sparse, 3 * (number % 2))
        config = with_run(config_of(ranks, strategy=strategy, **model), prune="auto")
        assert error_of(network, config, graph) < TOLERANCE, config


def drawn(seed: int) -> Any:
    """A random network of up to a dozen nodes, some of which several others read."""

    def network(b: Any, x: Any, model: Any) -> Any:
        rng = random.Random(seed)
        values = [x, b.linear(x, rng.choice([1, 3, 7]))]
        for _ in range(rng.randint(3, 10)):
            v, step = rng.choice(values[-4:]), rng.choice("lnaardsc++")
            if step == "l":
                v = b.linear(v, rng.choice([1, 4, 7]))
            elif step == "n":
                v = b.neighbours(v)
            elif step == "a":
                v = b.aggregate(v)
            elif step == "r":
                v = b.relu(v)
            elif step == "d":
                v = b.dropout(v)
            elif step in "sc":
                v = b.scale(v, "row" if step == "s" else "col")
            else:
                v = b.add(v, rng.choice([other for other in values if other.cols == v.cols]))
            values.append(v)
        z = b.linear(values[-1], b.num_classes)
        for v in values[-3:-1]:
            z = b.add(z, b.linear(v, b.num_classes))
        return b.aggregate(z) if rng.random() < 0.5 else z

    return network


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(4, 40))])
def test_drawn_networks_are_exact(seed: int) -> None:
    """Fails if any combination of nodes, strategies, pruning, dropout and features gives another gradient."""
    rng = random.Random(7 * seed + 1)
    ranks = rng.choice([1, 2, 3])
    graph = sorted_out(
        rng.choice(["directed", "random", "weighted", "path"]), rng.random() < 0.4, rng.choice([0, 0, 2])
    )
    model = {
        "dropout": rng.choice([0.0, 0.4]),
        "input_dropout": rng.choice([0.0, 0.3]),
        "self_loops": rng.random() < 0.5,
        "norm": rng.choice(["symmetric", "mean"]),
        "bias": rng.random() < 0.7,
    }
    config = config_of(ranks, strategy=rng.choice(sorted(STRATEGIES)) if ranks > 1 else "broadcast", **model)
    assert error_of(drawn(seed), with_run(config, prune="auto"), graph) < 10 * TOLERANCE, config


class Other:
    """Arithmetic that is no sum."""

    def __getattr__(self, name: str) -> Any:
        return getattr(SUM, name)


def test_what_models_are_refused() -> None:
    """Fails if a weight with two readers, no weight at all, or sparse features that cannot stay so, go on in silence."""
    graph = sorted_out("path", True, 0)

    def tied(b: Builder, x: Value, model: ModelConfig) -> Value:
        h = b.relu(b.linear(x, x.cols))
        return b.linear(b.node(Linear("layers.1.weight", 1), h, cols=x.cols), CLASSES)

    for network, run, message in (
        (tied, {}, "several nodes of the model read layers.1.weight"),
        (lambda b, x, model: b.bias(b.neighbours(x)) if x.cols == CLASSES else x, {}, "columns for"),
        (residual_of_x, {"features": "sparse"}, "only dense layers read X"),
    ):
        with pytest.raises(PlanError, match=message):
            one_epoch(with_run(config_of(1), **run), graph, network=network)


def test_only_sums_change_places_with_products() -> None:
    """Fails if max(H W) becomes max(H) W."""
    from mggcn.model.choices import LayerChoice
    from mggcn.model.rewrite.products import order_products
    from mggcn.model.values import Graph as Values

    for op, same in ((SUM, False), (Other(), True)):
        b = Builder(ModelConfig(), CLASSES, True)
        graph = Values((b.neighbours(b.linear(b.input(FEATURES), CLASSES), op),))  # type: ignore[arg-type]
        layer = LayerChoice(layer=1, d_in=FEATURES, d_out=CLASSES, products="aggregate-first", reason="")
        assert (order_products(graph, {1: layer}) == graph) == same
