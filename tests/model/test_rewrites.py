"""Every rewrite keeps what a graph means, does what its name says, and leaves alone what it must."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from mggcn.blocks.block import required
from mggcn.config import ModelConfig
from mggcn.model.builder import Builder, Network
from mggcn.model.choices import InputChoice, LayerChoice
from mggcn.model.derive import derive
from mggcn.model.kinds.dense import Linear
from mggcn.model.kinds.ends import Input
from mggcn.model.rewrite.fusion import fuse_bias_gradients, fuse_elementwise, fuse_epilogues, fuse_gradients
from mggcn.model.rewrite.products import keep_sparse, merge_products, order_products, precompute
from mggcn.model.rewrite.scales import push_scales
from mggcn.model.rewrite.storage import block_rows, prune, recompute, round_operands, spare_gradients
from mggcn.model.stack import stack
from mggcn.model.values import Graph, Value
from tests.model.interpreter import CLASSES, Meaning

FEATURES = 5
CONFIGS = [
    ModelConfig(hidden=hidden, norm=norm, dropout=p, input_dropout=q, bias=bias)  # type: ignore[arg-type]
    for hidden, norm, (p, q), bias in itertools.product(
        ((), (4,), (6, 2)), ("symmetric", "mean"), ((0.0, 0.0), (0.5, 0.0), (0.3, 0.4)), (True, False)
    )
]


def residual(b: Builder, x: Value, model: ModelConfig) -> Value:
    """A network in which several nodes read the same value."""
    for width in (*model.hidden, 3):
        h = b.relu(b.bias(b.aggregate(b.linear(x, width))))
        x = b.dropout(b.add(h, b.scale(b.linear(x, width), "col")))
    return b.bias(b.add(b.aggregate(x), b.neighbours(b.neighbours(x))))


def mlp(b: Builder, x: Value, model: ModelConfig) -> Value:
    return stack(b, x, dataclasses.replace(model, kind="mlp"))


def sage(b: Builder, x: Value, model: ModelConfig) -> Value:
    more = {"kind": "sage", "aggregator": "mean", "residual": "linear", "hidden": model.hidden or (3,)}
    changed = dataclasses.replace(model, **more)  # type: ignore[arg-type]
    return stack(dataclasses.replace(b, config=changed), x, changed)


NETWORKS: dict[str, Network] = {"gcn": stack, "mlp": mlp, "residual": residual, "sage": sage}
EVERY = [(name, config) for name in NETWORKS for config in CONFIGS]


def written(name: str, config: ModelConfig) -> tuple[Graph, Meaning]:
    builder = Builder(config, CLASSES, True)
    logits = NETWORKS[name](builder, builder.input(FEATURES), config)
    return Graph((logits,)), Meaning.of(builder.parameters, config.norm)


def labels(graph: Graph) -> Counter[str]:
    return Counter(type(value.kind).__name__ for value in graph.values())


def same(graph: Graph, after: Graph, meaning: Meaning) -> None:
    """Fail if roots or gradients mean anything else."""
    found = [Meaning(meaning.seed, meaning.parameters, meaning.norm) for _ in range(2)]
    roots = [[one.run(g)[root] for root in g.roots] for one, g in zip(found, (graph, after), strict=True)]
    if graph.roots[0].kind.stored:
        np.testing.assert_allclose(roots[1][0], roots[0][0], rtol=1e-12, atol=1e-12)
    assert found[0].gradients.keys() == found[1].gradients.keys()
    for name, expected in found[0].gradients.items():
        np.testing.assert_allclose(found[1].gradients[name], expected, rtol=1e-11, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("name", NETWORKS)
def test_derived_gradients_are_finite_differences(name: str) -> None:
    """Fails if an adjoint is wrong, or a value that several nodes read gets one's gradient alone."""
    for config in CONFIGS[:: 5 if name == "residual" else 7]:
        graph, meaning = written(name, config)
        meaning.run(derive(graph.roots[0]))
        assert meaning.gradients.keys() == meaning.parameters.keys()

        def loss(meaning: Meaning = meaning, graph: Graph = graph) -> float:
            z = meaning.run(graph)[graph.roots[0]]
            return float((np.log(np.exp(z).sum(1)) - z[np.arange(z.shape[0]), meaning.labels]).mean())

        rng = np.random.default_rng(817)
        for parameter, gradient in meaning.gradients.items():
            weights = meaning.parameters[parameter]
            direction, step = rng.normal(size=weights.shape), 1e-6
            ends = []
            for sign in (1, -1):
                meaning.parameters[parameter] = weights + sign * step * direction
                ends.append(loss())
            meaning.parameters[parameter] = weights
            slope = (ends[0] - ends[1]) / (2 * step)
            assert slope == pytest.approx(float((gradient * direction).sum()), rel=1e-4, abs=1e-8), parameter


Forward = Callable[[Graph], Graph]
AGGREGATED = InputChoice(aggregated=True, nbytes=0)


def turned(graph: Graph) -> Graph:
    """All layers aggregate first."""
    layers = {n: LayerChoice(layer=n, d_in=0, d_out=0, products="aggregate-first", reason="") for n in range(1, 9)}
    return order_products(graph, layers)


def constants(graph: Graph, norm: str = "symmetric") -> Graph:
    """A X is the input, if it is normalised so."""
    return precompute(turned(graph), AGGREGATED, norm)


FORWARD: dict[str, Forward] = {
    "order of products": turned,
    "constants": lambda graph: constants(constants(graph, "mean"), "symmetric"),
    "scales": push_scales,
    "elementwise": fuse_elementwise,
    "one product": lambda graph: merge_products(fuse_elementwise(graph)),
    "sparse": lambda graph: keep_sparse(fuse_elementwise(push_scales(graph)), InputChoice(sparse=True, nbytes=0)),
}


@pytest.mark.parametrize("rewrite", FORWARD)
def test_rewrites_of_a_model_keep_its_meaning(rewrite: str) -> None:
    """Fails if a rewrite changes the logits, or the gradients that are derived from what it leaves."""
    for name, config in EVERY[len(rewrite) % 3 :: 3]:
        if rewrite == "sparse" and name in ("residual", "sage"):
            continue  # the input has several readers: it is not kept sparse
        graph, meaning = written(name, config)
        after = FORWARD[rewrite](graph)
        same(graph, after, meaning)
        same(derive(graph.roots[0]), derive(after.roots[0]), meaning)


def fused(graph: Graph) -> Graph:
    """The training graph before anything that follows fusion."""
    return fuse_epilogues(fuse_gradients(fuse_bias_gradients(derive(fuse_elementwise(push_scales(graph)).roots[0]))))


WHOLE: dict[str, tuple[Forward, Forward]] = {
    "bias gradients": (lambda g: derive(g.roots[0]), fuse_bias_gradients),
    "gradients": (lambda g: fuse_bias_gradients(derive(g.roots[0])), fuse_gradients),
    "gradients alone": (lambda g: derive(fuse_elementwise(g).roots[0]), fuse_gradients),
    "epilogues": (lambda g: derive(fuse_elementwise(g).roots[0]), fuse_epilogues),
    "recompute": (fused, recompute),
    "rounding": (fused, round_operands),
    "pruning": (fused, lambda g: prune(g, {1: required(0)})),
    "blocks": (fused, lambda g: block_rows(g, lambda cols, rows: 1 + cols)),
    "spare gradients": (fused, spare_gradients),
}


@pytest.mark.parametrize("rewrite", WHOLE)
def test_rewrites_of_a_program_keep_its_meaning(rewrite: str) -> None:
    """Fails if a rewrite changes a gradient, or loses one."""
    before, after = WHOLE[rewrite]
    for name, config in EVERY[len(rewrite) % 3 :: 3]:
        graph, meaning = written(name, config)
        whole = before(graph)
        same(whole, after(whole), meaning)


def test_what_the_rewrites_do() -> None:
    """Fails if a rewrite does nothing, or less than it could, on a GCN of two layers."""
    config = ModelConfig(hidden=(4,), dropout=0.5)
    graph, _ = written("gcn", config)
    assert labels(graph) == Counter(Input=1, Linear=2, Aggregate=2, Elementwise=8)
    assert labels(turned(graph)) == labels(graph)
    kinds = [type(value.kind).__name__ for value in turned(graph).values()]
    assert kinds.index("Aggregate") < kinds.index("Linear")
    assert labels(constants(graph)) == Counter(Input=1, Linear=2, Aggregate=1, Elementwise=6)
    pushed = fuse_elementwise(push_scales(graph))
    assert labels(pushed) == Counter(Input=1, Linear=2, Aggregate=2, Elementwise=3)
    assert labels(fuse_elementwise(graph))["Elementwise"] == 4  # S_c of layer 2 stays behind its product
    whole = derive(pushed.roots[0])
    summed = fuse_bias_gradients(whole)
    assert (labels(whole)["BiasGrad"], labels(summed)["BiasGrad"]) == (2, 0)
    gradients = fuse_gradients(summed)
    assert [labels(gradients)[kind] for kind in ("InputGrad", "ActivationGrad", "LinearGrad")] == [1, 0, 0]
    assert labels(fuse_epilogues(gradients)) == Counter(
        Input=1, Elementwise=1, Linear=2, Aggregate=4, Loss=1, InputGrad=1, WeightGrad=2
    )
    assert labels(recompute(fuse_epilogues(gradients)))["Elementwise"] == 0
    rounded = round_operands(fuse_epilogues(gradients))
    assert labels(rounded)["Rounded"] == 1
    assert sum(value.operand for value in rounded.values()) == 4
    two = ModelConfig(hidden=(4, 4))
    separate, merged = (rewrite(written("sage", two)[0]) for rewrite in (fuse_elementwise, FORWARD["one product"]))
    assert [labels(graph)[kind] for graph in (separate, merged) for kind in ("Linear", "Add")] == [8, 5, 6, 3]
    assert [value.kind.added for value in merged.values() if isinstance(value.kind, Linear) and value.kind.added] == [
        "layers.3.weight",
        "layers.6.weight",
    ]


def test_what_the_rewrites_leave_alone() -> None:
    """Fails if a value that something else reads is fused away, pushed into, precomputed, or used up."""
    graph, _ = written("residual", ModelConfig(hidden=(4,)))
    assert merge_products(graph) == graph  # products of the same rows, of which one goes through the graph
    assert labels(constants(graph))["Input"] == 1
    assert Input(aggregated=True) not in [value.kind for value in constants(graph).values()]
    whole = spare_gradients(derive(graph.roots[0]))
    users: dict[Value, list[Value]] = whole.users()
    for value in whole.values():
        for index in value.kind.overwrites:
            assert users[value.operands[index]] == [value]


def test_an_equal_graph_is_equal() -> None:
    """Fails if graphs that compute the same differ, or others do not."""
    first, second = (written("gcn", ModelConfig(hidden=(4,)))[0] for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert first != written("gcn", ModelConfig(hidden=(5,)))[0]
    assert first != push_scales(first)
    assert str(first).splitlines()[0] == "v0 = X()  5 columns"


def test_planted_wrong_rewrites_are_caught() -> None:
    """The tests above themselves fail for elementwise steps that are lost."""
    graph, meaning = written("gcn", ModelConfig(hidden=(4,)))

    def lost(graph: Graph) -> Graph:
        return graph.rewritten(lambda old, new: new.operands[0] if new.kind.label.startswith("elementwise") else new)

    with pytest.raises(AssertionError):
        same(graph, lost(graph), meaning)
