"""Models, graphs, tasks and runs in which every pair of settings occurs, and their error beside the dense formulas.

Depth counts convolutions, and sums over neighbours of SGC and APPNP.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from mggcn.config import Config
from mggcn.graph.convert import from_arrays
from mggcn.graph.csr import ArrayRows, Graph
from mggcn.graph.options import GraphOptions
from tests.covering import Value, covering, pairwise
from tests.devices import CPU, Where
from tests.graphs import Trained, make_graph, one_epoch, pattern
from tests.model.dense_stack import expected
from tests.train.tasks import TASKS, labelled
from tests.train.test_exact import config_of
from tests.train.test_mixed import with_run

Case = dict[str, Any]
FEATURES = 7
CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "gcn": {"kind": "gcn"},
    "sage": {"kind": "sage"},
    "sage-mean": {"kind": "sage", "aggregator": "mean"},
    "sage-max": {"kind": "sage", "aggregator": "max"},
    "gat": {"kind": "gat"},
    "gatv2": {"kind": "gatv2"},
    "gin": {"kind": "gin"},
    "rgcn": {"kind": "rgcn", "bases": 2},
    "sgc": {"kind": "sgc"},
    "appnp": {"kind": "appnp"},
    "mlp": {"kind": "mlp"},
}
LEVELS: dict[str, list[Any]] = {
    "conv": list(CONVOLUTIONS),
    "pattern": ["random", "directed", "star", "path", "empty", "hub-row", "disconnected", "few"],
    "task": list(TASKS),
    "ranks": [1, 2, 3, 5],
    "strategy": ["broadcast", "halo", "slice", "delayed"],
    "order": ["random", "permute", "none", "locality"],
    "depth": [1, 2, 3, 4],
    "widths": ["equal", "different"],
    "heads": [1, 2, 3],
    "concat_heads": [True, False],
    "out_heads": [0, 1, 2],
    "attention_dropout": [0.0, 0.3],
    "norm_layer": ["none", "layer", "batch"],
    "residual": ["none", "linear", "identity"],
    "jumping": ["last", "concat", "max"],
    "head": ["convolution", "linear"],
    "activation": ["relu", "elu", "leaky_relu", "gelu"],
    "dense": ["", "before", "between", "after"],
    "dropout": [0.0, 0.4],
    "input_dropout": [0.0, 0.2],
    "norm": ["symmetric", "mean"],
    "self_loops": [True, False],
    "bias": [True, False],
    "weighted": [False, True],
    "typed": [False, True],
    "features": ["dense", "sparse or not", "sparse"],  # of sparse data stored as the plan chooses, or sparse
    "products": ["auto", "gemm-first", "aggregate-first"],
    "prune": ["auto", "off"],
    "recompute": ["off", "on"],
}
MODEL = ("attention_dropout", "norm_layer", "residual", "jumping", "head", "activation", "dropout", "input_dropout", "norm",
         "self_loops", "bias", "heads", "concat_heads", "out_heads")  # fmt: skip
"""Factors that are settings of the model by the same name."""


_STRANGERS: list[tuple[tuple[str, ...], str, list[Any], str]] = [
    (("sgc",), "norm_layer", ["layer", "batch"], "model.norm_layer belongs to"),
    (("sgc",), "activation", ["elu", "leaky_relu", "gelu"], "model.activation belongs to"),
    (("sgc",), "dropout", [0.4], "model.dropout belongs to"),
    (("sgc",), "dense", ["before"], "model.dense_before belongs to"),
    (("sgc", "appnp"), "residual", ["linear", "identity"], "model.residual belongs to"),
    (("sgc", "appnp"), "jumping", ["concat", "max"], "model.jumping belongs to"),
    (("sgc", "appnp"), "head", ["linear"], "model.head belongs to"),
    (("sgc", "appnp"), "dense", ["between", "after"], "model.dense_(between|after) belongs to"),
    (tuple(set(CONVOLUTIONS) - {"gat", "gatv2"}), "heads", [2, 3], "model.heads belongs to gat, gatv2"),
    (tuple(set(CONVOLUTIONS) - {"gat", "gatv2"}), "concat_heads", [False], "model.concat_heads belongs to gat, gatv2"),
    (tuple(set(CONVOLUTIONS) - {"gat", "gatv2"}), "out_heads", [1, 2], "model.out_heads belongs to gat, gatv2"),
    (tuple(set(CONVOLUTIONS) - {"gat", "gatv2"}), "attention_dropout", [0.3], "model.attention_dropout belongs to gat"),
    (("sage",), "self_loops", [False], "adds every vertex to its neighbours"),
    (("rgcn",), "typed", [False], "edges have no types"),
    (("sage-max", "rgcn"), "strategy", ["slice"], "needs whole rows"),
]


_LINEAR_HEADS = (("head", "linear"), ("jumping", "concat"), ("jumping", "max"), ("dense", "after"))


def _refused() -> Iterator[tuple[Value, Value, str]]:
    for convolutions, factor, values, message in _STRANGERS:
        for conv in sorted(convolutions):
            for value in values:
                yield ("conv", conv), (factor, value), message
    for heads, (factor, value) in itertools.product((1, 2), _LINEAR_HEADS):
        yield (factor, value), ("out_heads", heads), "model.out_heads .* is for a convolution that gives the logits"


REFUSED = list(_refused())
"""Pairs that the package refuses, with the error."""


def linear_head(case: Case) -> bool:
    """Whether the last layer is no convolution."""
    return case["head"] == "linear" or case["jumping"] != "last" or case["dense"] == "after"


def hidden_of(case: Case) -> tuple[int, ...]:
    """Hidden widths, multiples of the number of heads; SGC has none, APPNP as many as it has sums."""
    if case["conv"] == "sgc":
        return ()
    count = case["depth"] if linear_head(case) or case["conv"] == "appnp" else case["depth"] - 1
    widths = (7, 7, 7, 7) if case["widths"] == "equal" else (9, 5, 5, 12)
    return tuple(width * case["heads"] for width in widths[:count])


def legal(case: Case) -> bool:
    """Whether three settings go together, and every setting of hidden layers has some to act on."""
    hidden = hidden_of(case)
    before = 5 if case["dense"] == "before" else FEATURES
    kept = [width == above for width, above in zip((before, *hidden), hidden, strict=False)]
    if case["residual"] == "identity" and not any(kept):
        return False
    if case["jumping"] == "max" and len(set(hidden)) > 1:
        return False
    if case["features"] == "sparse" and case["dense"] != "before":
        # Something else than a dense layer reads X.
        if case["conv"] == "rgcn" or (case["residual"] == "identity" and kept[0]):
            return False
    plain = {"norm_layer": "none", "residual": "none", "dropout": 0.0, "activation": "relu"}
    return bool(hidden) or (case["dense"] != "between" and all(case[name] == value for name, value in plain.items()))


CASES = pairwise(LEVELS, [(one, other) for one, other, _ in REFUSED], legal, "stack")
FAST, EMULATED_TOO = (covering([tuple(case.items()) for case in CASES], 1, seed) for seed in ("stack", "emulated"))
"""Numbers of cases in which every setting occurs: of the fast suite, and of those that run under the emulator."""
PLAIN: Case = {name: values[0] for name, values in LEVELS.items()} | {"ranks": 2, "depth": 2, "head": "linear"}


def case_of(**changes: Any) -> Case:
    """Two ranks, two convolutions and a dense layer, with changes."""
    return PLAIN | changes


def model_of(case: Case) -> dict[str, Any]:
    """Settings of the model; what a kind does not have is left out where it has its default."""
    model = CONVOLUTIONS[case["conv"]] | {"hidden": hidden_of(case)}
    model |= {name: case[name] for name in MODEL}
    if case["conv"] in ("sgc", "appnp"):
        model["hops"] = case["depth"]
    dense: dict[str, dict[str, Any]] = {
        "before": {"dense_before": (5,)},
        "between": {"dense_between": True},
        "after": {"dense_after": (8,)},
    }
    return model | dense.get(case["dense"], {})


def config_of_case(case: Case) -> Config:
    run = {name: case[name] for name in ("products", "prune", "recompute")}
    run["features"] = "sparse" if case["features"] == "sparse" else "auto"
    config = config_of(case["ranks"], case["order"], case["strategy"], **model_of(case))
    return with_run(dataclasses.replace(config, train=dataclasses.replace(config.train, **TASKS[case["task"]])), **run)


@functools.cache
def _graph(kind: str, task: str, weighted: bool, typed: bool, sparse: bool) -> Graph:
    adjacency = pattern("path", 3, 6) if kind == "few" else pattern(kind, 23, 6)
    n = adjacency.shape[0]
    if weighted:
        # Eighths: the sums by relation that a graph holds in float32 are exact.
        by_edge = np.random.default_rng(4).integers(1, 16, (n, n)).astype(np.float32) / 8
        adjacency = adjacency * (by_edge + by_edge.T)
    sizes: Any = {"num_features": FEATURES, "num_classes": 4, "sparse": sparse, "seed": 8}
    graph = make_graph(adjacency, weighted=weighted, **sizes)
    labels = graph.labels.array()  # type: ignore[union-attr]
    labels[0] = 0  # of the training vertex that all graphs have; no task ignores it
    graph = dataclasses.replace(graph, labels=ArrayRows(labels))
    return labelled(with_types(graph, adjacency) if typed else graph, task)


def with_types(graph: Graph, adjacency: np.ndarray) -> Graph:
    """The graph with 4 relations, one without edges; a third of the edges have a parallel one of another relation."""
    rng = np.random.default_rng(12)
    edges = np.stack(np.nonzero(adjacency))
    types, again = rng.integers(0, 3, edges.shape[1]), rng.random(edges.shape[1]) < 1 / 3
    n = graph.num_vertices
    made = from_arrays(
        edges=np.concatenate([edges, edges[:, again]], axis=1),
        edge_types=np.concatenate([types, (types[again] + 1) % 3]),
        weights=None
        if graph.adj.values is None
        else adjacency[tuple(np.concatenate([edges, edges[:, again]], axis=1))],
        num_relations=4,
        num_vertices=n,
        features=np.zeros((n, 1), np.float32),
        labels=np.zeros(n, np.int64),
        splits={"train": np.ones(n, bool)},
        options=GraphOptions(duplicates="sum"),
    )
    return dataclasses.replace(graph, adj=made.adj, adj_t=made.adj_t, num_relations=4)


def graph_of(case: Case) -> Graph:
    """A graph of 23 vertices, or of fewer than ranks."""
    return _graph(case["pattern"], case["task"], case["weighted"], case["typed"], case["features"] != "dense")


def trained(case: Case, where: Where = CPU) -> tuple[list[Trained], Graph, Config]:
    graph, config = graph_of(case), where.config(config_of_case(case))
    return one_epoch(config, graph, device_of=where.device_of), graph, config


def error_of(case: Case, where: Where = CPU) -> float:
    """Largest error of loss, gradients, running statistics and logits, relative to the largest value of each."""
    found, graph, config = trained(case, where)
    loss, gradients, logits, running = expected(graph, config, found[0].weights)
    assert found[0].grads.keys() == gradients.keys()
    assert {name for name in found[0].weights if "running" in name} == running.keys()
    least = max(1e-2 * max(float(np.abs(g).max()) for g in gradients.values()), 1e-3)
    errors = [abs(found[0].loss - loss) / abs(loss)]
    for rank in found:
        errors += [np.abs(rank.grads[n] - g).max() / max(np.abs(g).max(), least) for n, g in gradients.items()]
        errors += [float((rank.weights[n] - r).abs().max() / r.abs().max().clamp(min=1e-2)) for n, r in running.items()]
        if rank.ids.size:
            errors.append(np.abs(rank.logits - logits[rank.ids]).max() / max(np.abs(logits).max(), 1e-3))
    assert not np.isnan(errors).any()
    return max(map(float, errors))
