"""Runs whose values lie on disk (run.capacity = disk): the bits of runs in memory, and bytes as planned."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mggcn.assemble.plan import plan_graph, plan_recorded, plan_shape, resolve
from mggcn.assemble.rank import Rank
from mggcn.backend.cpu.backend import CpuBackend
from mggcn.config import Config, DataConfig, ModelConfig, RunConfig, SampleConfig, TrainConfig
from mggcn.errors import ConfigError, DivergedError, PlanError
from mggcn.graph.csr import Graph
from mggcn.memory import device
from mggcn.memory.units import MIB
from mggcn.model.kinds.dense import Linear
from mggcn.model.values import PlainKind
from mggcn.planning import regions
from mggcn.planning.record import to_dict
from mggcn.train.pages import PageFile
from tests.graphs import assert_sent_as_planned, make_graph, on_ranks, pattern
from tests.model.test_rgcn import typed_graph
from tests.shapes import shape_of
from tests.train.test_trainer import assert_repeats_and_resumes

ROWS = 331
"""Vertices of most graphs: six windows of 64 rows on one rank, three on two, and a short last one."""
DROPS: dict[str, Any] = {"hidden": (48, 40), "dropout": 0.4}
MODELS: dict[str, dict[str, Any]] = {
    "gcn": DROPS,
    "gcn, layer norm, residuals": DROPS | {"norm_layer": "layer", "residual": "linear", "activation": "gelu"},
    "gcn, jumping": DROPS | {"jumping": "max", "residual": "identity", "hidden": (40, 40), "activation": "elu"},
    "sage mean": DROPS | {"kind": "sage", "aggregator": "mean", "jumping": "concat"},
    "sage max": DROPS | {"kind": "sage", "aggregator": "max"},
    "gin": DROPS | {"kind": "gin", "norm_layer": "batch"},
    "gat": DROPS | {"kind": "gat", "heads": 2, "attention_dropout": 0.3, "out_heads": 2},
    "gatv2": DROPS | {"kind": "gatv2", "heads": 2},
    "sgc": {"kind": "sgc", "hops": 2, "hidden": ()},
    "appnp": DROPS | {"kind": "appnp", "hops": 3},
    "mlp": DROPS | {"kind": "mlp", "bias": False},
}
FLOATS = ("gat", "gatv2", "sage max")
"""Models that keep numbers of vertices, which bfloat16 cannot hold."""


def config_of(
    ranks: int = 1, strategy: str = "broadcast", train: dict[str, Any] | None = None, **tables: Any
) -> Config:
    run: dict[str, Any] = {"ranks": ranks, "strategy": strategy, "threads": 1} | tables.get("run", {})
    return Config(
        model=ModelConfig(**tables.get("model", DROPS)),
        train=TrainConfig(**({"seed": 9341, "epochs": 3} | (train or {}))),
        run=RunConfig(transport="threads" if ranks > 1 else "single", **run),
    )


def on_disk(config: Config, limit: int = 1) -> Config:
    """The same run from disk, by default with as few rows and columns in memory as there can be."""
    return dataclasses.replace(config, run=dataclasses.replace(config.run, capacity="disk", memory_limit=limit))


@functools.cache
def graph_of(sparse: bool = False, kind: str = "directed") -> Graph:
    return make_graph(pattern(kind, ROWS, 6), num_features=70, num_classes=5, sparse=sparse, seed=8)


def trained(config: Config, graph: Graph) -> list[Any]:
    """Losses, weights, scores and logits on every rank."""

    def body(rank: Rank) -> Any:
        losses = [rank.trainer.step(epoch) for epoch in range(config.train.epochs)]
        weights = rank.trainer.runtime.weights.state_dict()
        return losses, weights, rank.trainer.evaluate(), rank.trainer.scores()

    return on_ranks(config, graph, body)


def assert_the_same_bits(config: Config, graph: Graph, limit: int = 1) -> None:
    for one, other in zip(trained(config, graph), trained(on_disk(config, limit), graph), strict=True):
        assert one[0] == other[0]
        assert np.isfinite(one[0]).all()
        assert all(torch.equal(weight, other[1][name]) for name, weight in one[1].items())
        assert one[2] == other[2]
        np.testing.assert_array_equal(one[3], other[3])


@pytest.mark.covering(1, rest="slow")
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("prune", ["auto", "off"])
@pytest.mark.parametrize(
    ("ranks", "strategy"), [(1, "broadcast"), (2, "broadcast"), (2, "halo"), (3, "slice"), (2, "delayed")]
)
@pytest.mark.parametrize("precision", ["fp32", "fp64", "bf16", "mixed"])
@pytest.mark.parametrize("name", MODELS)
def test_the_same_bits(name: str, precision: str, ranks: int, strategy: str, prune: str, sparse: bool) -> None:
    """Fails if a window or a panel is read from or written to the wrong place, or a sum, a mask or a rounding differs."""
    if name in FLOATS and precision in ("bf16", "mixed"):
        precision = "fp32"
    if name == "sage max" and strategy == "slice":
        strategy = "halo"  # slice refuses it
    run = {"precision": precision, "prune": prune}
    assert_the_same_bits(config_of(ranks, strategy, model=MODELS[name], run=run), graph_of(sparse))


@pytest.mark.parametrize("features", ["dense", "sparse"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_input_dropout(ranks: int, features: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the mask of X, or the sums over blocks of rows that are made again, are others on disk."""
    monkeypatch.setitem(device.DEVICES, "cpu", dataclasses.replace(device.DEVICES["cpu"], most_block_rows=64))
    model = DROPS | {"input_dropout": 0.3}
    assert_the_same_bits(config_of(ranks, model=model, run={"features": features}), graph_of(True))


@pytest.mark.parametrize(("ranks", "strategy"), [(1, "broadcast"), (2, "halo")])
def test_relations(ranks: int, strategy: str) -> None:
    """Fails if sums by relation, whose ops need all columns, differ on disk."""
    model = {"kind": "rgcn", "hidden": (12,), "bases": 2}
    assert_the_same_bits(config_of(ranks, strategy, model=model), typed_graph("random"))


@pytest.mark.parametrize("delay", ["none", "2"])
def test_delayed_messages(delay: str) -> None:
    """Fails if what is kept from epoch to epoch is of panels, not of all columns."""
    assert_the_same_bits(config_of(2, "delayed", {"epochs": 5}, run={"delay": delay}), graph_of(kind="random"))


@pytest.mark.parametrize("order", ["permute", "locality"])
def test_orders(order: str) -> None:
    """Fails if the features of a row are another vertex's."""
    assert_the_same_bits(config_of(run={"order": order}), graph_of())


@pytest.mark.parametrize("threads", [1, 2])
def test_the_bits_do_not_depend_on_memory(threads: int) -> None:
    """Fails if more rows or columns at a time, up to all, give other bits."""
    graph, config = graph_of(), config_of(run={"threads": threads})
    for limit in (1, 200 * MIB, 2**40):
        assert_the_same_bits(config, graph, limit)


def test_every_kind_by_rows_is_run_by_windows() -> None:
    """Fails if a kind says that it works row by row, and no case above runs it over windows."""
    found = set[str]()
    for name, model in MODELS.items():
        precision = "fp32" if name in FLOATS else "mixed"
        for products in ("auto", "aggregate-first"):
            run = {"precision": precision, "products": products, "recompute": "on"}
            plan, _ = plan_graph(on_disk(resolve(config_of(model=model, run=run), graph_of())), graph_of())
            assert plan.ranks[0].disk is not None
            for program in plan.ranks[0].disk.programs.values():
                for stage in program.stages:
                    if stage.how == "rows":
                        assert len(stage.parts) == -(-ROWS // 64)
                        found |= {type(op.kind).__name__ for op in stage.program.ops}
    kinds = {kind for kind in PlainKind.__subclasses__() if kind.__module__.startswith("mggcn.model.kinds.")}
    assert len(kinds) > 40
    missing = {kind.__name__ for kind in kinds if kind.by_rows} - found
    assert not missing, missing


@pytest.mark.parametrize(("ranks", "strategy"), [(1, "broadcast"), (2, "broadcast"), (2, "slice"), (2, "delayed")])
def test_bytes_and_messages_are_as_planned(ranks: int, strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a step or an evaluation moves a byte, sends a message or allocates memory that the plan does not know."""
    made, allocated = list[PageFile](), list[int]()
    start, allocate = PageFile.__init__, CpuBackend.allocate

    def kept_start(self: PageFile, *args: Any) -> None:
        made.append(self)
        start(self, *args)

    def counted(self: CpuBackend, nbytes: int) -> torch.Tensor:
        allocated.append(nbytes)
        return allocate(self, nbytes)

    monkeypatch.setattr(PageFile, "__init__", kept_start)
    monkeypatch.setattr(CpuBackend, "allocate", counted)

    def body(rank: Rank) -> Any:
        assert_sent_as_planned(rank)
        return rank.plan

    plans = on_ranks(on_disk(config_of(ranks, strategy)), graph_of(), body)
    for plan in plans:
        disk = plan.disk
        assert disk is not None
        assert plan.regions["arena"] == disk.arena_bytes
        allocated.remove(disk.arena_bytes)
        allocated.remove(disk.pages.staging_bytes)
    programs = [plan.disk.programs for plan in plans]
    read, written = (sum(getattr(one, what) for of in programs for one in of.values()) for what in ("read", "written"))
    x = sum(plan.disk.x.nbytes for plan in plans)
    assert sum(file.bytes_read for file in made) == read > 0
    assert sum(file.bytes_written for file in made) == written + x


def test_a_run_repeats_and_resumes_bit_for_bit(tmp_path: Any) -> None:
    """Fails if an interrupted run from disk goes on with other bits, or differs from one in memory."""
    config = config_of(2, train={"epochs": 8}, model={"hidden": (40,), "dropout": 0.5})
    whole = assert_repeats_and_resumes(on_disk(config), graph_of(), tmp_path, config)
    assert whole[0]


def test_the_plan_is_rebuilt_from_its_record() -> None:
    """Fails if a continued run has other windows than plan.json says."""
    for limit in (1, 200 * MIB, 2**40):
        config = resolve(on_disk(config_of(2), limit), graph_of())
        plan, _ = plan_graph(config, graph_of(), limit=limit)
        again = plan_recorded(config, json.loads(json.dumps(to_dict(plan))))
        assert [rank.disk for rank in again.ranks] == [rank.disk for rank in plan.ranks]


def test_another_host_has_the_same_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a host on which Python takes more memory plans messages of another width than plan.json says."""
    shape = shape_of(2_400_000, 120_000_000, 100, 47, name="products")
    config = Config(model=ModelConfig(hidden=(256, 256)), run=RunConfig(ranks=2, transport="threads", threads=1))
    differ = 0
    for limit in range(1500 * MIB, 1700 * MIB, 8 * MIB):
        plan = plan_shape(on_disk(config, limit), shape)
        with monkeypatch.context() as other:
            other.setattr(regions, "runtime_bytes", lambda *_: 200 * MIB)
            anew, again = plan_shape(on_disk(config, limit), shape), plan_recorded(plan.config, to_dict(plan))
        panels = [one.ranks[0].disk.panel for one in (plan, anew, again) if one.ranks[0].disk is not None]
        assert panels[0] == panels[2]
        differ += panels[0] != panels[1]
    assert differ, "no limit tells the hosts apart"


def test_less_memory_means_more_panels_and_smaller_windows() -> None:
    """Fails if the plan leaves its limit, takes less than it may, or needs as much as in memory."""
    shape = shape_of(2_400_000, 120_000_000, 100, 47, name="products")
    config = Config(model=ModelConfig(hidden=(256, 256)), run=RunConfig(threads=2))
    whole = plan_shape(config, shape).largest
    panels = []
    for share in (2, 4):
        limit = whole.total_bytes // share
        plan = plan_shape(on_disk(config, limit), shape).largest
        assert plan.disk is not None
        panels.append(-(-256 // plan.disk.panel))
        assert plan.total_bytes <= limit
    assert panels[0] < panels[1]


def test_edges_are_in_mapped_files() -> None:
    """Fails if what is planned as mapped is held in memory, or the other way round."""
    config, graph = config_of(), graph_of()
    whole, disk = (plan_graph(resolve(one, graph), graph)[0].largest for one in (config, on_disk(config)))
    assert disk.disk is not None
    assert whole.regions["graph"] - disk.regions["graph"] == disk.disk.edge_bytes > 0
    assert disk.disk.file_bytes == disk.disk.pages.nbytes + disk.disk.edge_bytes

    def are_mapped(rank: Rank) -> bool:
        aggregation: Any = next(iter(rank.trainer.runtime.programs["train"].aggregations.values()))
        address = aggregation.tiles[0].indices.data_ptr()
        lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "(deleted)" in line]
        spans = [[int(end, 16) for end in line[0].split("-")] for line in lines]
        return any(first <= address < last for first, last in spans)

    assert on_ranks(on_disk(config), graph, are_mapped) == [True]
    assert on_ranks(config, graph, are_mapped) == [False]


@pytest.mark.parametrize("name", ["gcn", "sage mean", "gin"])
def test_without_room_to_read_ahead(name: str) -> None:
    """Fails if panels that take the place of the ones before have other bits, or take more memory than others."""
    config, graph = config_of(model=MODELS[name]), graph_of()
    turns = []
    for limit in (1, 2**40):
        disk = plan_graph(resolve(on_disk(config, limit), graph), graph)[0].largest.disk
        assert disk is not None
        turns.append([s.turns for s in disk.programs["train"].stages if s.how == "columns" and len(s.parts) > 1])
    assert turns[0]
    assert set(turns[0]) == {1}
    assert_the_same_bits(config, graph)


def test_the_layer_of_what_is_not_finite_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a run from disk names another op than the one whose result is not finite, in whatever window."""
    run = Linear.run

    def planted(self: Linear, rt: Any, op: Any) -> None:
        run(self, rt, op)
        if self.layer == 2 and rt.continues and int(rt.clock[1]) == 1:
            rt.buffer(op.out)[3, 2] = float("inf")

    monkeypatch.setattr(Linear, "run", planted)

    def body(rank: Rank) -> str:
        rank.trainer.step(0)
        with pytest.raises(DivergedError) as caught:
            rank.trainer.step(1)
        return str(caught.value)

    assert "layer 2 (linear 2), on rank 0" in on_ranks(on_disk(config_of()), graph_of(), body)[0]


def test_what_cannot_run_from_disk_is_refused(tmp_path: Any) -> None:
    """Fails if a run whose values change from step to step is planned from disk, or a folder that is not there is taken."""
    shape = shape_of(1000, 9000, 10, 4, name="small")
    with pytest.raises(ConfigError, match=r"run\.capacity disk is for CPUs"):
        plan_shape(on_disk(Config(run=RunConfig(device="cuda"))), shape)
    batches = dataclasses.replace(on_disk(config_of()), sample=SampleConfig(batch=32, fanout=(5, 5, 5)))
    with pytest.raises(ConfigError, match=r"set run\.capacity=memory"):
        plan_graph(resolve(batches, graph_of()), graph_of())
    learned = dataclasses.replace(on_disk(config_of()), data=DataConfig(inputs="learned:8"))
    with pytest.raises(ConfigError, match=r"set run\.capacity=memory"):
        plan_graph(resolve(learned, graph_of()), graph_of())
    config = on_disk(config_of())
    lost = dataclasses.replace(config, run=dataclasses.replace(config.run, scratch=str(tmp_path / "none")))
    with pytest.raises(PlanError, match="name a folder that exists"):
        on_ranks(lost, graph_of(), lambda rank: None)


@pytest.mark.parametrize(("ranks", "strategy"), [(1, "broadcast"), (2, "halo")])
@pytest.mark.parametrize("name", ["gcn", "mlp", "gat"])
def test_scores_that_nothing_needs_at_once_are_not_kept(name: str, ranks: int, strategy: str) -> None:
    """Fails if an evaluation from disk has all scores in memory, hands over others, or counts less than all."""
    config, graph = config_of(ranks, strategy, model=MODELS[name]), graph_of()

    def body(rank: Rank) -> Any:
        rank.trainer.step(0)
        found, firsts = rank.trainer.scores(), list[tuple[int, int]]()
        rank.trainer.each_scores(lambda first, logits: firsts.append((first, len(logits))))
        return found, firsts, rank.trainer.evaluate(), rank.trainer.runtime.programs["evaluate"], rank.plan

    for (scores, _, evaluated, _, _), (others, firsts, again, bound, plan) in zip(
        on_ranks(config, graph, body), on_ranks(on_disk(config), graph, body), strict=True
    ):
        np.testing.assert_array_equal(others, scores)
        assert evaluated == again
        assert not bound.keeps_result
        assert not plan.disk.resident["evaluate"].placements
        assert firsts == [(first, min(64, len(scores) - first)) for first in range(0, len(scores), 64)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_scores_that_are_ranked_are_kept(ranks: int) -> None:
    """Fails if a metric over all scores finds none, or others, or what keeps them is not planned."""
    config = config_of(ranks, train={"metric": "roc_auc"})
    assert_the_same_bits(config, graph_of())
    plan, _ = plan_graph(on_disk(resolve(config, graph_of())), graph_of())
    disk = plan.ranks[0].disk
    assert disk is not None
    (kept,) = disk.resident["evaluate"].placements
    assert (kept.spec.name, kept.spec.cols) == ("result", 5)
