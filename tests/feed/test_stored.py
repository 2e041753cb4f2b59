"""Features that a step reads where they are stored: the same bits as of gathered ones, and none of their memory."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import mggcn
from mggcn import native
from mggcn.assemble.plan import plan_graph, resolve
from mggcn.assemble.rank import Rank, make_rank
from mggcn.comm.single import SingleCommunicator
from mggcn.config import Config
from mggcn.errors import GraphError, PlanError
from mggcn.feed import gather
from mggcn.feed.gather import StoredFeatures
from mggcn.graph.csr import Graph
from mggcn.graph.vertex_data import MappedRows
from mggcn.host import MachineMemory
from mggcn.memory.arena import BufferSpec
from mggcn.model.kinds.ends import StoredRows
from mggcn.planning import decisions
from mggcn.planning.run import RunPlan
from tests.feed.test_blocks import graph_of
from tests.feed.test_sampled import ALL, DRAWS, sampled, weighted_graph
from tests.graphs import make_graph, on_ranks, pattern

WIDE = {"hidden": (20,)}
"""Wider than the seven features, so that the first layer sums first."""
MODELS: dict[str, dict[str, Any]] = {
    "sage": {"kind": "sage", "aggregator": "mean", **WIDE},
    "sage-loops": {"kind": "sage", "aggregator": "mean", "self_loops": True, **WIDE},
    "sage-gcn": {"kind": "sage", "aggregator": "gcn", "self_loops": True, **WIDE},
    "mean": {"kind": "gcn", "norm": "mean", **WIDE},
    "residual": {"kind": "sage", "aggregator": "mean", "residual": "linear", "norm_layer": "layer", **WIDE},
    "jumping": {
        "kind": "sage",
        "aggregator": "mean",
        "hidden": (20, 20),
        "head": "linear",
        "jumping": "concat",
        "dropout": 0.4,
    },
}
GATHERED: dict[str, dict[str, Any]] = {
    "columns are scaled": {"kind": "gcn", **WIDE},
    "the product comes first": {"kind": "sage", "aggregator": "mean"},
    "X is dropped": {"kind": "sage", "aggregator": "mean", "input_dropout": 0.3, **WIDE},
    "attention": {"kind": "gat", "heads": 2, **WIDE},
    "gin": {"kind": "gin", **WIDE},
    "maxima": {"kind": "sage", "aggregator": "max", **WIDE},
}


def single(
    ranks: int, model: dict[str, Any], fanout: tuple[int, ...] = (3, 2), threads: int = 1, **sample: Any
) -> Config:
    config = sampled(ranks, model, fanout, **sample)
    return dataclasses.replace(config, run=dataclasses.replace(config.run, precision="fp32", threads=threads))


def gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan as if features could not be read where they are."""
    monkeypatch.setattr(decisions, "may_read_stored", lambda config, shape: False)


def plan_of(config: Config, graph: Graph) -> RunPlan:
    return plan_graph(resolve(config, graph), graph)[0]


def trained(rank: Rank) -> tuple[bool, list[float], dict[str, Any]]:
    """Whether the step reads X where it is, losses of three epochs, and weights."""
    losses = [rank.trainer.step(epoch) for epoch in range(3)]
    weights = rank.trainer.runtime.weights.state_dict()
    return rank.plan.values.reads_stored, losses, {name: w.numpy().tobytes() for name, w in weights.items()}


def compare(config: Config, graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = on_ranks(config, graph, trained)
    with monkeypatch.context() as patch:
        gathered(patch)
        other = on_ranks(config, graph, trained)
    assert all(found[0] for found in stored)
    assert not any(found[0] for found in other)
    assert [found[1:] for found in stored] == [found[1:] for found in other]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.covering(2)
def test_bits_are_those_of_gathered_rows(name: str, ranks: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if an edge names another vertex, a layer's own rows are others, or a sum is taken in another order."""
    compare(single(ranks, MODELS[name], threads=threads), graph_of(), monkeypatch)


@pytest.mark.parametrize(("draw", "weighted"), [*itertools.product(DRAWS, (False, True)), ("weight", True)])
def test_bits_of_every_draw(draw: str, weighted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if what a drawn edge counts depends on how its source is named."""
    sample = DRAWS.get(draw, {"draw": "weight"})
    compare(single(1, MODELS["sage"], **sample), weighted_graph() if weighted else graph_of(), monkeypatch)


@pytest.mark.parametrize("cols", [1, 16, 33, 130])
@pytest.mark.parametrize("fanout", [(3, 2), (60, ALL)])
def test_bits_of_every_width(cols: int, fanout: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if rows that no gap pads, or a hub among whole rows, are added up otherwise than padded ones."""
    graph = make_graph(pattern("hub-row", 61, 5), num_features=cols, num_classes=4, seed=4)
    model = MODELS["sage"] | {"hidden": (2 * cols + 6,)}
    compare(single(1, model, fanout, ahead=1), graph, monkeypatch)


def test_a_step_in_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the parts of a step that is larger than planned name vertices of one another."""
    config = single(1, MODELS["sage"], plan="run")
    graph, halves = graph_of(), list[int]()

    def counted(rank: Rank) -> Any:
        plan_to = rank.feed._drawn  # type: ignore[attr-defined]  # of a SampledFeed

        def small(step: Any, seeds: Any) -> Any:
            halves.append(seeds.size)
            return None if seeds.size > 5 else plan_to(step, seeds)

        rank.feed._drawn = small  # type: ignore[attr-defined]  # as above
        return trained(rank)

    found = on_ranks(config, graph, counted)
    assert min(halves) <= 5 < max(halves)
    with monkeypatch.context() as patch:
        gathered(patch)
        assert on_ranks(config, graph, counted)[0][1:] == found[0][1:]


def test_a_wrong_vertex_changes_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the comparison of bits does not see an edge that names another vertex."""
    prepare = StoredFeatures.prepare

    def wrong(self: StoredFeatures, ids: npt.NDArray[np.int64], indices: npt.NDArray[np.int32]) -> None:
        prepare(self, ids, indices)
        indices[0] = (indices[0] + 1) % self.rows.shape[0]

    config, graph = single(1, MODELS["sage"]), graph_of()
    right = on_ranks(config, graph, trained)[0]
    monkeypatch.setattr(StoredFeatures, "prepare", wrong)
    assert on_ranks(config, graph, trained)[0][2] != right[2]

    def outside(self: StoredFeatures, ids: npt.NDArray[np.int64], indices: npt.NDArray[np.int32]) -> None:
        indices[0] = self.rows.shape[0]

    monkeypatch.setattr(StoredFeatures, "prepare", outside)
    with pytest.raises(PlanError, match="an edge from outside its 61 sources"):
        on_ranks(config, graph, trained)


@pytest.mark.parametrize("why", GATHERED)
def test_other_models_have_gathered_rows(why: str) -> None:
    """Fails if a model that reads X otherwise than in plain sums is given edges that name vertices."""
    plan = plan_of(single(1, GATHERED[why]), graph_of())
    assert not plan.ranks[0].values.reads_stored
    assert "X is gathered" in plan.ranks[0].input.reason


@pytest.mark.parametrize(
    "changed",
    [
        {"run": {"precision": "fp64"}},
        {"run": {"precision": "bf16"}},
        {"run": {"precision": "mixed"}},
        {"run": {"products": "gemm-first"}},
        {"data": {"row_normalize": True}},
        {"sample": {"first": "full"}},
        {"sample": {"rows": "owners"}, "run": {"ranks": 2, "transport": "threads"}},
        {"sample": {"halo": "history"}, "run": {"ranks": 2, "transport": "threads"}},
        {"run": {"batches": "cooperative", "ranks": 2, "transport": "threads"}},
        {"data": {"inputs": "learned:7"}},
    ],
    ids=str,
)
def test_other_runs_have_gathered_rows(changed: dict[str, dict[str, Any]]) -> None:
    """Fails if features are read where they are stored by what needs them as activations are kept, or from others."""
    config = single(1, MODELS["sage"])
    parts = {name: dataclasses.replace(getattr(config, name), **some) for name, some in changed.items()}
    assert plan_of(config, graph_of()).ranks[0].values.reads_stored
    assert not plan_of(dataclasses.replace(config, **parts), graph_of()).ranks[0].values.reads_stored


def test_a_plan_leaves_out_what_is_not_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if rows of batches on their way, or lists of them, are counted and not held, or held and not counted."""
    config, graph = resolve(single(1, MODELS["sage"], ahead=2), graph_of()), graph_of()
    plan = plan_of(config, graph)
    assert plan.stack is not None
    with monkeypatch.context() as patch:
        gathered(patch)
        other = plan_of(config, graph)
    rows = plan.stack.capacities[0].sources
    of_one = BufferSpec("", rows, graph.num_features, "fp32").nbytes + 4 * rows
    counted = [one.ranks[0].regions["batches on their way"] for one in (other, plan)]
    assert counted[0] - counted[1] == 3 * of_one
    places = on_ranks(config, graph, lambda rank: rank.feed._places)[0]  # type: ignore[attr-defined]  # of a SampledFeed
    assert [place.features for place in places] == [None] * 3
    # What a layer reads by itself is gathered twice, and its memory is free meanwhile.
    gathers = [op for op in plan.ranks[0].train.ops if isinstance(op.kind, StoredRows)]
    labels = [op.label for op in plan.ranks[0].train.ops]
    assert [op.label for op in gathers] == ["gather X"] * 2
    assert labels.index("gather X") < labels.index("aggregate 1")
    assert {op.rows for op in gathers} == {plan.stack.blocks[0].targets}
    kept = {place.spec.name for place in plan.ranks[0].train.arena.placements if place.spec.lifetime == "kept"}
    assert not kept & {op.out for op in gathers}
    assert not [op for op in plan_of(single(1, MODELS["sage-gcn"]), graph).ranks[0].train.ops if op.label == "gather X"]


@pytest.mark.parametrize("cols", [7, 2500])
def test_rows_that_are_far_are_touched_by_the_feed(cols: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a step waits for the disk for pages of a file that memory may not hold, or has other bits then."""
    graph = make_graph(pattern("directed", 61, 5), num_features=cols, num_classes=4, seed=4)
    config = single(1, MODELS["sage"] | {"hidden": (cols + 3,)})
    near = on_ranks(config, graph, trained)[0]
    touched, prepared, starts = list[npt.NDArray[np.int32]](), list[npt.NDArray[np.int64]](), set[int]()
    touch, kernel = StoredFeatures._touch, native.kernel

    def noted(self: StoredFeatures, index: npt.NDArray[np.int32]) -> None:
        touched.append(index)

        def noting(*name: str) -> Any:
            def called(at: int, *rest: Any) -> None:
                starts.add(at - self.rows.data_ptr())
                kernel(*name)(at, *rest)

            return called

        with monkeypatch.context() as patch:
            patch.setattr(native, "kernel", noting)
            touch(self, index)

    monkeypatch.setattr(gather, "machine_memory", lambda: MachineMemory(1 << 30, 0, None))
    monkeypatch.setattr(StoredFeatures, "_touch", noted)
    prepare = StoredFeatures.prepare

    def noted_ids(self: StoredFeatures, ids: npt.NDArray[np.int64], indices: npt.NDArray[np.int32]) -> None:
        prepared.append(ids.copy())
        prepare(self, ids, indices)

    monkeypatch.setattr(StoredFeatures, "prepare", noted_ids)
    one_thread = dataclasses.replace(config, sample=dataclasses.replace(config.sample, ahead=0))
    assert on_ranks(one_thread, graph, trained)[0] == near
    assert np.array_equal(np.concatenate(touched), np.concatenate(prepared))
    assert min(starts) == 0
    assert max(starts) == 4 * (cols - 1)
    assert max(np.diff(sorted(starts))) <= 4096


def test_features_that_are_stored_otherwise_are_refused() -> None:
    """Fails if features that no file or array holds as planned are read as if one did."""
    graph = graph_of()
    config = resolve(single(1, MODELS["sage"]), graph)
    plan, partition = plan_graph(config, graph)
    rows: Any = graph.features
    other = dataclasses.replace(graph, features=MappedRows(rows, lambda array: 2 * array))
    with pytest.raises(GraphError, match="plan the run again"):
        make_rank(config, other, plan, partition, SingleCommunicator())
    # Planned for what they are, they are gathered.
    assert not on_ranks(config, other, trained)[0][0]


def test_a_store_has_the_bits_of_arrays(tmp_path: Path) -> None:
    """Fails if a mapped file is read otherwise than an array."""
    graph, config = graph_of(), single(1, MODELS["sage"])
    mggcn.save(graph, tmp_path / "store")
    found = [on_ranks(config, one, trained)[0] for one in (graph, mggcn.load(tmp_path / "store"))]
    assert found[0] == found[1]
    assert found[1][0]


def test_a_short_file_of_features_is_refused(tmp_path: Path) -> None:
    """Fails if rows are read beyond the end of a file that was cut since it was planned."""
    graph = graph_of()
    config = resolve(single(1, MODELS["sage"]), graph)
    mggcn.save(graph, tmp_path / "store")
    stored = mggcn.load(tmp_path / "store")
    plan, partition = plan_graph(config, stored)
    (file,) = (tmp_path / "store").glob("*features*.npy")
    file.write_bytes(file.read_bytes()[:-64])
    with pytest.raises(mggcn.MggcnError, match="features"):
        make_rank(config, stored, plan, partition, SingleCommunicator())
