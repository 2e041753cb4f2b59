"""Convolutions with norms, residuals, jumping knowledge and activations: gradients are those of the dense formulas."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from mggcn.assemble import plan_graph
from mggcn.graph.csr import Graph
from mggcn.memory.arena import BufferSpec
from mggcn.model.kinds import combine, norms
from mggcn.model.lower import aggregations
from mggcn.model.network import make_values
from mggcn.model.values import Adjoint, Value
from tests.covering import covering
from tests.devices import CPU, EMULATED, Where
from tests.graphs import Trained, make_graph, one_epoch, pattern
from tests.model.dense_stack import expected
from tests.train.test_exact import TOLERANCE, config_of
from tests.train.test_mixed import with_run

Case = dict[str, Any]
CONVOLUTIONS = {
    "gcn": {"kind": "gcn"},
    "sage": {"kind": "sage"},
    "sage-mean": {"kind": "sage", "aggregator": "mean"},
    "sage-max": {"kind": "sage", "aggregator": "max"},
    "gat": {"kind": "gat"},
    "gin": {"kind": "gin"},
    "sgc": {"kind": "sgc"},
    "appnp": {"kind": "appnp"},
    "mlp": {"kind": "mlp"},
}
FACTORS: dict[str, list[Any]] = {
    "conv": list(CONVOLUTIONS),
    "ranks": [1, 2, 3, 5],
    "strategy": ["broadcast", "halo", "slice", "delayed"],
    "pattern": ["random", "directed", "weighted", "star", "path", "empty", "hub-row", "disconnected", "few"],
    "hidden": [(6,), (7, 7), (6, 6, 9), (7, 7, 7)],
    "norm_layer": ["none", "layer", "batch"],
    "residual": ["none", "linear", "identity"],
    "jumping": ["last", "concat", "max"],
    "activation": ["relu", "elu", "leaky_relu", "gelu"],
    "dense": ["", "before", "between", "after"],
    "dropout": [(0.0, 0.0), (0.4, 0.0), (0.3, 0.2)],
    "norm": ["symmetric", "mean"],
    "sparse": [False, True],
    "bias": [True, False],
}
SETTINGS = ("norm_layer", "residual", "jumping", "activation", "norm", "bias")


def drawn(count: int) -> list[Case]:
    """Cases in which as many pairs of factors occur as can."""
    rng = random.Random(7919)
    cases = [{name: rng.choice(values) for name, values in FACTORS.items()} for _ in range(count)]
    return [case for case in cases if case["jumping"] != "max" or len(set(case["hidden"])) == 1]


CASES = drawn(160)
FAST = covering([tuple((name, case[name]) for name in FACTORS if name != "pattern") for case in CASES], 1, "stack")

# Of several layers, dense ones behind the convolutions read the last.
FAST.add(
    next(
        number
        for number, case in enumerate(CASES)
        if (case["conv"], case["dense"], case["jumping"]) == ("gcn", "after", "last") and len(case["hidden"]) > 1
    )
)


def model_of(case: Case) -> dict[str, Any]:
    """Settings of the model, without those that a kind does not have."""
    kind = CONVOLUTIONS[case["conv"]]
    model = {name: case[name] for name in SETTINGS} | kind
    dropout, input_dropout = case["dropout"]
    model |= {"dropout": dropout, "input_dropout": input_dropout, "hidden": case["hidden"]}
    model |= {
        "before": {"dense_before": (5,)},
        "between": {"dense_between": True},
        "after": {"dense_after": (8,)},
    }.get(case["dense"], {})
    if case["conv"] in ("sgc", "appnp"):
        for name in ("residual", "jumping", "dense_between", "dense_after"):
            model.pop(name, None)
        model["hops"] = 3
    if case["conv"] == "sgc":
        for name in ("norm_layer", "activation", "dense_before", "hidden", "dropout"):
            model.pop(name, None)
    if case["conv"] == "sage-mean":
        model["self_loops"] = case["sparse"]
    return model


def graph_of(case: Case) -> Graph:
    """A graph of 23 vertices, or of fewer than ranks."""
    few = case["pattern"] == "few"
    adjacency = pattern("path", 3, 6) if few else pattern(case["pattern"], 23, 6)
    sizes: Any = {"num_features": 7, "num_classes": 4, "sparse": case["sparse"], "seed": 8}
    return make_graph(adjacency, weighted=case["pattern"] == "weighted", **sizes)


def trained(case: Case, where: Where = CPU) -> tuple[list[Trained], Graph, Any]:
    graph = graph_of(case)
    whole_rows = case["conv"] == "sage-max" and case["strategy"] == "slice"
    strategy = "broadcast" if case["ranks"] == 1 or whole_rows else case["strategy"]
    # An identity residual reads X as it is; all else may share it sparse, in whatever order of products.
    run = {"prune": "auto", "features": "sparse" if case["sparse"] and case["residual"] != "identity" else "auto"}
    run["products"] = "aggregate-first" if case["norm"] == "mean" else "auto"
    config = where.config(with_run(config_of(case["ranks"], strategy=strategy, **model_of(case)), **run))
    return one_epoch(config, graph, device_of=where.device_of), graph, config.model


def error_of(case: Case, where: Where = CPU) -> float:
    """Largest error of loss, gradients, running statistics and logits, relative to the largest value of each."""
    found, graph, model = trained(case, where)
    loss, gradients, logits, running = expected(graph, model, found[0].weights)
    assert found[0].grads.keys() == gradients.keys()
    assert {name for name in found[0].weights if "running" in name} == running.keys()
    least = 1e-2 * max(float(np.abs(g).max()) for g in gradients.values())
    errors = [abs(found[0].loss - loss) / loss]
    for rank in found:
        errors += [np.abs(rank.grads[n] - g).max() / max(np.abs(g).max(), least) for n, g in gradients.items()]
        errors += [float((rank.weights[n] - r).abs().max() / r.abs().max().clamp(min=1e-2)) for n, r in running.items()]
        if rank.ids.size:
            errors.append(np.abs(rank.logits - logits[rank.ids]).max() / np.abs(logits).max())
    assert not np.isnan(errors).any()
    return max(map(float, errors))


def _parameters() -> list[Any]:
    marks = [[] if n in FAST else [pytest.mark.full] if n % 2 else [pytest.mark.slow] for n in range(len(CASES))]
    on_cpu = [pytest.param(CPU, n, id=f"cpu-{n}", marks=marks[n]) for n in range(len(CASES))]
    some = [n for n in range(len(CASES)) if n % 8 == 3]
    return on_cpu + [pytest.param(EMULATED, n, id=f"emulated-{n}", marks=marks[n]) for n in some]


@pytest.mark.parametrize(("where", "number"), _parameters())
def test_gradients_equal_autograd(where: Where, number: int) -> None:
    """Fails on a wrong formula or adjoint, statistics of a rank's own rows, or storage that is taken over too early."""
    assert error_of(CASES[number], where) < TOLERANCE, CASES[number]


PLAIN: Case = {name: values[0] for name, values in FACTORS.items()} | {"conv": "gcn", "hidden": (7, 7), "ranks": 2}


def case_of(**changes: Any) -> Case:
    return PLAIN | changes


def _same(kind: Any) -> Callable[[pytest.MonkeyPatch], None]:
    """The gradient goes back as if the node did nothing to it."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        def adjoint(self: Any, value: Value, gradient: Value) -> Adjoint:
            found = before(self, value, gradient)
            return Adjoint(tuple(gradient for _ in found.operands), found.effects)

        before = kind.adjoint
        monkeypatch.setattr(kind, "adjoint", adjoint)

    return plant


def _no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of a vertex count like vertices."""
    monkeypatch.setattr(norms, "counted_once", lambda rt, once: once.fill_(1)[:, None])


FAULTS: list[tuple[str, Callable[[pytest.MonkeyPatch], None], Case]] = [
    ("layer-norm", _same(norms.LayerNorm), case_of(norm_layer="layer")),
    ("batch-norm", _same(norms.BatchNorm), case_of(norm_layer="batch")),
    ("copies", _no_copies, case_of(norm_layer="batch", strategy="delayed")),
    ("elu", _same(combine.Activation), case_of(activation="elu")),
    ("leaky_relu", _same(combine.Activation), case_of(activation="leaky_relu")),
    ("gelu", _same(combine.Activation), case_of(activation="gelu")),
    ("maximum", _same(combine.Larger), case_of(jumping="max")),
    ("teleport", _same(combine.Blend), case_of(conv="appnp")),
]


@pytest.mark.parametrize(("fault", "case"), [pytest.param(*fault[1:], id=fault[0]) for fault in FAULTS])
def test_planted_faults_are_seen(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None], case: Case
) -> None:
    """The comparison above fails when an adjoint forgets what its node did."""
    assert error_of(case) < TOLERANCE
    make_values.cache_clear()
    fault(monkeypatch)
    try:
        assert error_of(case) > 1e-6
    finally:
        make_values.cache_clear()


@pytest.mark.parametrize(("ranks", "strategy", "norm"), [(1, "broadcast", "mean"), (3, "halo", "symmetric")])
def test_sgc_sums_its_constant_features_once(ranks: int, strategy: str, norm: str) -> None:
    """Fails if an epoch computes what no epoch changes, set-up forgets a step, or A^3 X takes more memory than X."""
    case = case_of(conv="sgc", ranks=ranks, strategy=strategy, norm=norm, pattern="directed")
    assert error_of(case) < TOLERANCE
    found = config_of(ranks, strategy=strategy, **model_of(case)), graph_of(case)
    plan = plan_graph(*found)[0]
    assert "constants: A^3 X is computed once" in plan.ranks[0].values.explained
    for rank in plan.ranks:
        assert rank.input.aggregated == 3
        assert not aggregations((*rank.train.ops, *rank.evaluate.ops))
        assert rank.input.nbytes == BufferSpec("", rank.sizes.rows, 7, rank.sizes.dtype).nbytes
    changing = plan_graph(
        dataclasses.replace(found[0], model=dataclasses.replace(found[0].model, input_dropout=0.1)), found[1]
    )[0].ranks[0]
    assert not changing.input.aggregated
    assert len(aggregations(changing.train.ops)) == 6


@pytest.mark.parametrize("strategy", ["halo", "slice", "delayed"])
def test_batch_norm_of_ranks_is_that_of_one_process(strategy: str) -> None:
    """Fails if copies of a vertex cut, or a rank's own rows alone, make the statistics."""
    alone = trained(case_of(conv="sage-mean", norm_layer="batch", ranks=1))[0][0]
    for rank in trained(case_of(conv="sage-mean", norm_layer="batch", ranks=3, strategy=strategy))[0]:
        names = [name for name in alone.weights if "running" in name]
        assert names
        for name in names:
            torch.testing.assert_close(rank.weights[name], alone.weights[name], rtol=1e-10, atol=1e-12)
