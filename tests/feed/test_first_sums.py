"""sample.first = full: the first layer reads A X; with all neighbours elsewhere the gradient is the whole graph's."""

from __future__ import annotations

import dataclasses
import errno
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mggcn.assemble import first_sums
from mggcn.assemble.rank import Rank
from mggcn.config import Config, SampleConfig
from mggcn.errors import PlanError
from mggcn.graph.csr import Graph
from mggcn.train.runtime import RankRuntime
from tests.devices import Where, everywhere
from tests.feed.test_blocks import MODELS, graph_of
from tests.feed.test_sampled import ALL, sampled
from tests.graphs import make_graph, on_ranks, pattern
from tests.model.test_rgcn import typed_graph

LINEAR = ["gcn", "gcn-wide", "sage", "gin", "residual", "jumping"]
MORE: dict[str, dict[str, Any]] = {
    "gcn-loops": {"kind": "gcn", "self_loops": True},
    "sage-gcn": {"kind": "sage", "aggregator": "gcn", "self_loops": True},
    "mean": {"kind": "gcn", "norm": "mean"},
    "identity": {"kind": "gcn", "residual": "identity", "hidden": (7,)},
    "between": {"kind": "sage", "aggregator": "mean", "dense_between": True, "head": "linear", "hidden": (6, 5)},
    "sgc": {"kind": "sgc", "hops": 2, "hidden": ()},
    "gin-elu": {"kind": "gin", "activation": "elu", "norm_layer": "layer"},
}


def graphs() -> dict[str, Graph]:
    sizes: dict[str, Any] = {"num_features": 7, "num_classes": 4, "seed": 4}
    return {
        "directed": graph_of(),
        "weighted": make_graph(pattern("weighted", 61, 5), weighted=True, **sizes),
        "hub": make_graph(pattern("hub-row", 61, 5), **sizes),
        "sparse": make_graph(pattern("directed", 61, 5), sparse=True, **sizes),
    }


def full(ranks: int, model: dict[str, Any], fanout: tuple[int, ...] = (60, ALL), **sample: Any) -> Config:
    return sampled(ranks, model, fanout, **({"batch": 1000, "first": "full"} | sample))


def compare(config: Config, graph: Graph, where: Where | None = None) -> None:
    """The gradient is that of the whole graph."""
    run = dataclasses.replace(config.run, batches="independent")
    whole = dataclasses.replace(config, sample=SampleConfig(), run=run)
    of: dict[str, Any] = {} if where is None else {"device_of": where.device_of}
    found = [
        on_ranks(
            one if where is None else where.config(one),
            graph,
            lambda rank: (rank.trainer.gradients(0), grads(rank)),
            **of,
        )[0]
        for one in (config, whole)
    ]
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-12)
    for key, gradient in found[1][1].items():
        atol = 1e-10 * (np.abs(gradient).max() or 1)
        np.testing.assert_allclose(found[0][1][key], gradient, atol=atol, err_msg=key)


def grads(rank: Rank) -> dict[str, Any]:
    return {n: g.cpu().numpy().copy() for n, g in rank.trainer.runtime.weights.grads.items()}


@pytest.mark.parametrize("name", [*LINEAR, *MORE])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("graph", graphs())
@pytest.mark.covering(1)
def test_all_neighbours_give_the_whole_graphs_gradient(graph: str, ranks: int, name: str) -> None:
    """Fails if A X is not exact, lacks a scale, a weight, a self-loop or a rank's rows, or the vertex itself reads it."""
    compare(full(ranks, (MODELS | MORE)[name]), graphs()[graph])


@pytest.mark.parametrize(("where", "name"), everywhere(["gcn", "sage", "gin"]))
def test_gradients_on_every_device(where: Where, name: str) -> None:
    """Fails if a device reads X in place of A X, or rows of another batch."""
    compare(full(1, MODELS[name]), graph_of(), where)


@pytest.mark.parametrize("name", ["gcn", "sage", "gin"])
def test_ranks_that_share_a_batch(name: str) -> None:
    """Fails if ranks that share a batch read the sums of other rows than their own, or lose one that they exchange."""
    config = full(2, MODELS[name])
    compare(dataclasses.replace(config, run=dataclasses.replace(config.run, batches="cooperative")), graph_of())


@pytest.mark.parametrize("name", ["gcn-loops", "sage-gcn"])
def test_repeated_own_edges_all_count(name: str) -> None:
    """Fails if of several edges from a vertex to itself, of other types, a draw has one, or A X none."""
    graph = typed_graph("weighted")
    targets = np.repeat(np.arange(graph.num_vertices), np.diff(graph.adj_t.indptr.array()))
    own = targets[targets == graph.adj_t.indices.array()]
    assert np.unique(own).size < own.size
    for first in ("drawn", "full"):
        compare(sampled(1, MORE[name], (ALL, ALL), batch=1000, first=first), graph)


def test_pieces_of_rows_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a row whose edges come in several pieces loses one, or has its self-loop twice."""
    monkeypatch.setattr("mggcn.assemble.first_sums.PIECE_BYTES", 8 * 7 * 5)
    for graph in (graphs()["hub"], graphs()["weighted"], graph_of()):
        compare(full(2, MORE["gcn-loops"]), graph)


def test_each_machine_has_sums_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if ranks read a file of another machine, or the ranks of one leave out rows that others compute elsewhere."""
    monkeypatch.setattr(first_sums, "_first_ranks", lambda runtime: [0, 1, 1])
    made: list[bytes] = []
    make = first_sums._made_file
    monkeypatch.setattr(first_sums, "_made_file", lambda nbytes: made.append(make(nbytes)) or made[-1])
    compare(full(3, MODELS["gcn"]), graph_of())
    assert len(set(made)) == 2


def test_what_is_drawn_is_that_of_the_other_hops() -> None:
    """Fails if the hops that are left draw otherwise than without A X, or the last one is drawn all the same."""

    def body(rank: Rank) -> Any:
        batch = next(rank.feed.epoch(8123, 1))
        targets = [*batch.rows.values()][:-1]
        pairs = zip(targets, batch.edges.values(), strict=True)
        return [(ids.copy(), edges.indices.copy()) for ids, edges in pairs]

    drawn, left = (
        on_ranks(sampled(1, MODELS["gcn"], (3, 2), first=first), graph_of(), body)[0] for first in ("drawn", "full")
    )
    assert (len(drawn), len(left)) == (2, 1)
    assert all(np.array_equal(a, b) for a, b in zip(drawn[0], left[0], strict=True))


def test_batches_and_epochs_train_alike_on_ranks() -> None:
    """Fails if the batches of several ranks read other rows of A X than those of one, or of another epoch."""
    losses = []
    for ranks, ahead in ((1, 0), (1, 2), (2, 2), (3, 1)):
        config = full(ranks, MODELS["sage"] | {"dropout": 0.3}, (3, 2), batch=9, ahead=ahead)
        losses.append(on_ranks(config, graph_of(), lambda rank: [rank.trainer.step(e) for e in range(3)])[0])
    assert losses[0] == losses[1]
    np.testing.assert_allclose(losses, np.broadcast_to(losses[0], (4, 3)), rtol=1e-11)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "mixed"])
def test_every_precision_trains(precision: str) -> None:
    """Fails if A X is gathered in another type than activations have."""
    config = full(1, MODELS["sage"], (5, 2), batch=20)
    precisions: list[Any] = ["fp64", precision]
    configs = [dataclasses.replace(config, run=dataclasses.replace(config.run, precision=p)) for p in precisions]
    exact, rounded = (on_ranks(one, graph_of(), loss)[0] for one in configs)
    assert rounded == pytest.approx(exact, rel=1e-5 if precision == "fp32" else 0.03)


def loss(rank: Rank) -> float:
    return rank.trainer.gradients(0)


def test_the_exact_gradient_beside_it() -> None:
    """Fails if a comparison with the whole graph's gradient is not with that of X itself."""
    config = full(2, MODELS["gin"], compare_gradient=1)
    (found, _) = on_ranks(config, graph_of(), lambda rank: rank.trainer.compare(0))
    assert found["gradient_cosine"] == pytest.approx(1, abs=1e-12)
    assert found["gradient_ratio"] == pytest.approx(1, abs=1e-12)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "attention": ({"kind": "gat", "heads": 2, "hidden": (8,)}, "of the first layer is no plain sum over neighbours"),
    "maximum": (MODELS["sage-max"], "of the first layer is no plain sum over neighbours"),
    "input dropout": ({"kind": "gcn", "input_dropout": 0.2}, "model.input_dropout changes X in every step"),
    "a dense layer": ({"kind": "gcn", "dense_before": (5,)}, "not one of X, but of what a layer computes"),
    "appnp": ({"kind": "appnp", "hops": 2}, "not one of X, but of what a layer computes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_models_are_refused(name: str) -> None:
    """Fails if a model whose first layer does not sum X trains on something else than it says."""
    model, words = REFUSED[name]
    with pytest.raises(PlanError, match=f"sample.first full reads A X, computed once, and .*{words}; choose drawn"):
        on_ranks(full(1, model), graph_of(), lambda rank: None)


def test_a_file_without_room_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fails if a full disk ends a run while it writes, or a file is left behind, also by runs that end well."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    on_ranks(full(2, MODELS["gcn"]), graph_of(), lambda rank: None)
    assert list(tmp_path.iterdir()) == []

    def no_room(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    with pytest.raises(PlanError, match=r"needs .* in .* for A X \(No space left on device\); set TMPDIR"):
        on_ranks(full(1, MODELS["gcn"]), graph_of(), lambda rank: None)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fails if A X is written to another folder than TMPDIR names, or a machine without one ends in a traceback."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "lacking"))
    with pytest.raises(PlanError, match=r"in .*lacking for A X \(No such file or directory\); set TMPDIR"):
        on_ranks(full(1, MODELS["gcn"]), graph_of(), lambda rank: None)
    monkeypatch.delenv("TMPDIR")

    def nowhere() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    with pytest.raises(
        PlanError, match=r"in a temporary folder for A X \(No usable temporary directory .*; set TMPDIR"
    ):
        on_ranks(full(1, MODELS["gcn"]), graph_of(), lambda rank: None)


def test_a_file_that_a_rank_cannot_open_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fails if ranks with folders of their own end in a traceback, or the file stays where mapping it fails."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    def elsewhere(path: str, *_: Any, **__: Any) -> None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    monkeypatch.setattr(np, "memmap", elsewhere)
    with pytest.raises(PlanError, match=r"rank \d cannot open .*sums-.*needs one TMPDIR for all ranks of a machine"):
        on_ranks(full(2, MODELS["gcn"]), graph_of(), lambda rank: None)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_leaves_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fails if what ends a run before all ranks have mapped the file leaves it on the disk."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    add = RankRuntime.sum_over_ranks

    def ends(self: RankRuntime, tensor: Any) -> None:
        if tensor.numel() >= 4096:
            raise KeyboardInterrupt
        add(self, tensor)

    monkeypatch.setattr(RankRuntime, "sum_over_ranks", ends)
    with pytest.raises(KeyboardInterrupt):
        on_ranks(full(1, MODELS["gcn"]), graph_of(), lambda rank: None)
    assert list(tmp_path.iterdir()) == []
