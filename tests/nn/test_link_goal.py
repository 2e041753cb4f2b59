"""Modules of one's own on links: losses and gradients beside autograd of dense formulas, scores, resumption, refusals."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  as everybody calls it

import mggcn
import mggcn.nn
from mggcn.errors import ConfigError
from mggcn.graph.csr import Graph
from mggcn.graph.generate import community
from mggcn.graph.links import split_links
from mggcn.nn import PartitionedGraph, pairs
from mggcn.nn.module_engine import ModuleEngine, forward
from mggcn.nn.module_run import recipe_of
from tests.devices import CPU, WHERE, Where
from tests.nn.test_aggregate import dense_operator, on_ranks
from tests.reference import dense_features
from tests.train.test_links import EPOCH, SEED, config_of, ends_of, graph_of

D, E = 7, 5


class Net(torch.nn.Module):
    """Two layers, and embeddings of 5 columns."""

    def __init__(self, dtype: torch.dtype = torch.float32, features: int = D, columns: int = E) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(811)
        self.first = torch.nn.Linear(features, 8, dtype=dtype)
        self.second = torch.nn.Linear(8, columns, dtype=dtype)
        for weight in self.parameters():
            weight.data.uniform_(-0.6, 0.6, generator=generator)

    def forward(self, x: Tensor, part: PartitionedGraph) -> Tensor:
        return self.embed(x, lambda h: mggcn.nn.aggregate(h, part))

    def embed(self, x: Tensor, aggregated: Callable[[Tensor], Tensor]) -> Tensor:
        embeddings: Tensor = self.second(aggregated(torch.tanh(self.first(aggregated(x)))))
        return embeddings


def hinge(scores: Tensor, labels: Tensor) -> Tensor:
    assert scores.shape == labels.shape
    return torch.relu(1 - (2 * labels - 1) * scores)


def mean_hinge(scores: Tensor, labels: Tensor) -> Tensor:
    return hinge(scores, labels).mean()


LINKS: dict[str, dict[str, Any]] = {
    "dot": {},
    "network": {"decoder": (4, 3), "negatives": 2},
    "in-batch": {"negatives_from": "in-batch", "negatives": 3},
    "a loss of one's own": {"loss": hinge},
    "a mean": {"loss": mean_hinge, "decoder": (4,)},
}


def dense(graph: Graph, module: Any, settings: dict[str, Any]) -> tuple[float, dict[str, np.ndarray]]:
    """The loss and its gradients by autograd of dense matrices in float64."""
    links = {name: value for name, value in settings.items() if name != "loss"}
    config, module = config_of(embedding=E, **links), copy.deepcopy(module).double()
    heads, tails, labels = map(
        torch.from_numpy, ends_of(graph, config, np.arange(graph.links["train"].shape[0]), EPOCH)
    )
    operator = dense_operator(graph, "mean", False)
    x = torch.from_numpy(dense_features(graph))
    z = pairs.users_module(module).embed(x, lambda h: operator @ h)  # type: ignore[operator]  # a method of Net
    h = z[heads] * z[tails]
    for number, layer in enumerate(getattr(module, "decoder", ())):
        h = layer(torch.relu(h) if number else h)
    scores = h[:, 0] if "decoder" in settings else h.sum(1)
    target = labels.double()
    loss = settings.get("loss", F.binary_cross_entropy_with_logits)(scores, target).mean()
    loss.backward()
    return loss.item(), {n: p.grad.numpy() for n, p in module.named_parameters()}  # type: ignore[union-attr]  # all have one


def gradients(part: PartitionedGraph, recipe: Any) -> tuple[float, dict[str, np.ndarray]]:
    engine = ModuleEngine(recipe, part)
    module = engine.module
    loss = engine._goal.loss(module, forward(module, part), SEED, EPOCH, looks=part.num_ranks > 1)
    loss.backward()
    part.sum_gradients(module)
    found = {n: p.grad.cpu().numpy() for n, p in module.named_parameters() if p.grad is not None}
    return part.total(loss).item(), found


def check(name: str, ranks: int, strategy: str, where: Where) -> None:
    graph, settings = graph_of("directed"), LINKS[name]
    parts = {"loss": settings["loss"]} if "loss" in settings else {}
    named = {key: value for key, value in settings.items() if key != "loss"} | {"embedding": E}
    shared = {"precision": "fp64", "norm": "mean"}
    recipe = recipe_of(graph, Net(torch.float64), parts, named | shared)
    body = functools.partial(gradients, recipe=recipe)
    found = on_ranks(graph, ranks, body, where, norm="mean", strategy=strategy)
    loss, expected = dense(graph, recipe.module, settings)
    for total, grads in found:
        assert total == pytest.approx(loss, rel=1e-12)
        assert grads.keys() == expected.keys()
        assert min(np.abs(gradient).max() for weight, gradient in expected.items() if "weight" in weight) > 1e-5
        for weight, gradient in expected.items():
            np.testing.assert_allclose(grads[weight], gradient, atol=1e-11, err_msg=weight)


@pytest.mark.covering(1)
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("strategy", ["broadcast", "halo", "delayed"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", LINKS)
def test_gradients_are_those_of_the_dense_formula(name: str, ranks: int, strategy: str, where: Where) -> None:
    """Fails if a pair is other than its name says, its gradient does not reach both ends on whichever rank, or the loss is
    not the mean over the pairs of all ranks.
    """
    check(name, ranks, strategy, where)


@pytest.mark.parametrize("function", ["pair_dot_grad", "pair_product_grad", "every_row"])
def test_planted_faults_are_seen(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a gradient could be half of what it is, or rows of other ranks could be missing, and nothing be noticed."""
    if function == "every_row":
        monkeypatch.setattr(PartitionedGraph, "sum_over_ranks", lambda part, tensor: tensor)
    else:
        original = getattr(pairs, function)

        def half(backend: Any, g: Tensor, *rest: Any) -> None:
            original(backend, g / 2, *rest)

        monkeypatch.setattr(pairs, function, half)
    with pytest.raises(AssertionError):
        check("network" if function == "pair_product_grad" else "dot", 2, "broadcast", CPU)


def trainer_of(graph: Graph, **settings: Any) -> mggcn.Trainer:
    return mggcn.Trainer(graph, Net(), **({"threads": 1, "norm": "mean", "lr": 0.03, "seed": 59} | settings))


@pytest.mark.parametrize("decoder", [(), (4,)], ids=["dot", "network"])
def test_runs_are_the_same_on_every_number_of_ranks(decoder: tuple[int, ...]) -> None:
    """Fails if losses or scores depend on the number of ranks, or embeddings, pairs and scores are of other weights."""
    graph, histories = graph_of(), list[Any]()
    more: dict[str, Any] = {"decoder": decoder, "embedding": E} if decoder else {}
    for ranks in (1, 2, 3):
        trainer = trainer_of(graph, ranks=ranks, **more)
        histories.append([(row["loss"], row["val"]) for row in trainer.fit(epochs=5)])
        assert all(row["train"] is None for row in trainer.fit(epochs=1))
        trainer.fit(epochs=5)
        np.testing.assert_allclose(histories[-1], histories[0], rtol=2e-5)
        z, links = trainer.predict(), graph.links["val"].array()
        assert z.shape == (graph.num_vertices, E)
        both = [np.stack([links[:, 0], other], 1) for other in links.T[1:]]
        scores = np.stack([trainer.predict(pairs=one) for one in both], 1)
        if not decoder:
            np.testing.assert_allclose(scores[:, 0], (z[links[:, 0]] * z[links[:, 1]]).sum(1, dtype=float), rtol=1e-5)
        labels = np.zeros(scores.shape)
        labels[:, 0] = 1
        auc = roc_auc_score(labels.ravel(), scores.ravel())
        assert trainer.evaluate("val") == pytest.approx(auc, rel=1e-9)
        result = trainer.result()
        assert result["links"]["val"]["roc_auc"] == pytest.approx(result["best"]["val"], rel=1e-12)
        assert result["links"].keys() == {"val", "test"}
        inside = trainer.predict(pairs=[[0, 1]], probabilities=True)
        assert inside == pytest.approx(1 / (1 + np.exp(-trainer.predict(pairs=[[0, 1]]))))


def test_a_run_resumes_with_the_same_bits(tmp_path: Path) -> None:
    """Fails if a run that goes on draws other pairs, or begins with another network on pairs."""
    graph, settings = graph_of(), {"decoder": (4,), "embedding": E, "ranks": 2}
    whole = trainer_of(graph, **settings).fit(epochs=6)
    trainer_of(graph, out=tmp_path / "run", **settings).fit(epochs=3)
    rows = mggcn.Trainer.from_run(tmp_path / "run", graph, Net()).resume(epochs=6)
    assert [row["loss"] for row in rows] == [row["loss"] for row in whole]
    assert [row["test"] for row in rows] == [row["test"] for row in whole]


def test_links_are_learnt() -> None:
    """Fails if a module does not learn which vertices are linked."""
    graph = split_links(community(400, 4000, 16, 4, seed=5), (0.8, 0.1, 0.1), seed=2)
    trainer = mggcn.Trainer(graph, Net(features=16, columns=16), lr=0.01, seed=7, threads=1, norm="symmetric")
    losses = [row["loss"] for row in trainer.fit(epochs=80)]
    assert losses[-1] < losses[0]
    assert trainer.evaluate("test") > 0.7


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "metric": ({"metric": lambda scores, labels: 1.0}, "choose one of roc_auc, mrr"),
    "a named metric": ({"metric": "accuracy"}, "roc_auc, mrr, hits@1"),
    "bf16": ({"precision": "bf16"}, "would round the sums over pairs"),
    "mixed": ({"precision": "mixed", "decoder": (4,)}, "keeps rows in two types"),
    "tf32": ({"precision": "tf32", "device": "cuda", "decoder": (4,)}, "which torch computes here"),
    "batches": ({"batch": 3, "fanout": (2, 2)}, "belong to the models of mggcn"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_with_links_is_refused(name: str) -> None:
    """Fails if a setting that nothing reads is taken."""
    settings, text = REFUSED[name]
    with pytest.raises(ConfigError, match=text):
        trainer_of(graph_of(), **settings)


def test_columns_that_the_network_does_not_read_are_refused() -> None:
    """Fails if the widths of embeddings and network differ without a word of which setting says so."""
    with pytest.raises(ConfigError, match=r"Net returns 5 columns, .*; set embedding=5"):
        trainer_of(graph_of(), decoder=(4,)).fit(epochs=1)
    with pytest.raises(ConfigError, match=r"links.embedding = 9; set embedding=5"):
        trainer_of(graph_of(), embedding=9).fit(epochs=1)
    double = Net()
    double.register_forward_hook(lambda module, given, z: z.double())
    with pytest.raises(ConfigError, match=r"of torch.float64; embeddings need one at least"):
        mggcn.Trainer(graph_of(), double, threads=1).fit(epochs=1)
    with pytest.raises(ConfigError, match="negatives is for predicting links"):
        trainer_of(community(60, 300, D, 2, seed=1, train=0.3), negatives=2)
