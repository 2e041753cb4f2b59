"""How many nodes the CUDA graph of an epoch has: small graphs are as slow as their launches are many."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from mggcn.assemble.rank import Rank
from mggcn.config import Config, ModelConfig, RunConfig, TrainConfig
from mggcn.graph.csr import Graph
from mggcn.model.kinds.ends import Loss
from tests.emulator.launches import CountingDevice, UncountedError
from tests.graphs import csr, make_graph, on_ranks

KIPF = {"lr": 0.01, "optimizer": "adam", "weight_decay": 5e-4, "weight_decay_on": "first"}
CORA_BOUND = 20
"""Nodes of Cora's epoch at most."""
CORA = Counter(spmm_balanced=6, mm=4, softmax_xent=1, sum_partials=2, activation_grad=1, clip_factor=1, end_epoch=1)
"""Two layers of aggregations and two products with the sparse input; mm: one that is split, two that are not."""
ARXIV = Counter(
    spmm_balanced=4,
    spmm_hubs=4,
    mm=41,
    finish_rows=11,
    activation_grad=22,
    softmax_xent=1,
    sum_partials=3,
    clip_factor=1,
    end_epoch=1,
)
"""Dense products in eleven blocks of rows where something follows them; A X is a constant."""


def epoch_nodes(
    graph: Graph, device: CountingDevice, precision: Any, train: dict[str, Any], **model: Any
) -> Counter[str]:
    """Nodes of one training epoch of a rank alone."""
    config = Config(
        model=ModelConfig(**model),
        train=TrainConfig(seed=4211, epochs=3, eval_every=0, **train),
        run=RunConfig(threads=1, device="cuda", transport="single", precision=precision),
    )

    def body(rank: Rank) -> Counter[str]:
        rank.trainer._epoch.start(4211, 0)
        rank.trainer.runtime.begin_epoch(0)
        return device.count(rank.trainer._epoch._work.step)

    found: Counter[str] = on_ranks(config, graph, body, device_of=lambda *_: device)[0]
    return found


def graph_of(rows: Any, cols: Any, vertices: int, features: int, classes: int) -> Graph:
    """A symmetric graph with these edges and random dense features."""
    adj = sp.coo_matrix((np.ones(len(rows), np.float32), (rows, cols)), (vertices, vertices)).tocsr()
    adj.setdiag(0)
    adj.eliminate_zeros()
    adj = ((adj + adj.T) > 0).astype(np.float32)
    return make_graph(adj, num_features=features, num_classes=classes, seed=5)


@pytest.fixture(scope="module")
def cora() -> Graph:
    """As many vertices, edges, features, classes and nonzeros of the features as Cora has."""
    graph = graph_of(*np.random.default_rng(27).integers(0, 2708, (2, 5278)), 2708, 1, 7)
    words = sp.random(2708, 1433, 49_216 / (2708 * 1433), "csr", np.float32, np.random.default_rng(3))
    return dataclasses.replace(graph, features=csr(words, True))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("input_dropout", [0.0, 0.5])
def test_cora(cora: Graph, input_dropout: float, precision: str) -> None:
    """Fails if an epoch of Kipf and Welling's two layers becomes a fill, a copy or a kernel longer."""
    found = epoch_nodes(
        cora, CountingDevice(3), precision, KIPF, hidden=(16,), dropout=0.5, input_dropout=input_dropout
    )
    assert found == CORA + Counter(dropout_values=1, gather_rows=1) if input_dropout else found == CORA
    assert found.total() == (18 if input_dropout else 16)
    assert found.total() <= CORA_BOUND


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_no_optimiser_takes_more(cora: Graph, optimizer: str) -> None:
    """Fails if another rule than Adam's, or decay of all weights, is more than one kernel."""
    train = {"optimizer": optimizer, "weight_decay": 0.1, "momentum": 0.9 * (optimizer == "sgd")}
    assert epoch_nodes(cora, CountingDevice(work=False), "fp32", train, hidden=(16,)) == CORA


@pytest.mark.full
def test_arxiv_like() -> None:
    """Fails if three layers of width 256 on a graph of ogbn-arxiv's size, with hubs, take another number of nodes."""
    vertices, hub = 169_343, 5000
    ring = np.arange(vertices)
    rows, cols = np.append(ring, np.zeros(hub, int)), np.append((ring + 1) % vertices, np.arange(hub))
    graph = graph_of(rows, cols, vertices, 128, 40)
    found = epoch_nodes(graph, CountingDevice(work=False), "fp32", {}, hidden=(256, 256))
    assert found == ARXIV
    assert found.total() == 88


@pytest.mark.parametrize("fault", ["fill", "unknown"])
def test_planted_nodes_are_counted(fault: str, cora: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test itself fails when an op clears a buffer by a launch of its own, or does what nobody counted."""
    original = Loss.run

    def run(self: Loss, rt: Any, op: Any) -> None:
        if fault == "fill":
            rt.buffer(op.scratch["partials"]).zero_()
        else:
            rt.buffer(op.out).clamp_(-1e9, 1e9)
        original(self, rt, op)

    monkeypatch.setattr(Loss, "run", run)
    device = CountingDevice(work=False)
    if fault == "fill":
        assert epoch_nodes(cora, device, "fp32", {}, hidden=(16,)) == CORA + Counter(zero_=1)
    else:
        with pytest.raises(UncountedError, match="clamp_"):
            epoch_nodes(cora, device, "fp32", {}, hidden=(16,))
