"""Threads of a rank's epochs, as the work of its plan says."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mggcn
from mggcn import native
from mggcn.aggregate.edge_op import EDGE_KERNELS
from mggcn.aggregate.steps import Send
from mggcn.assemble.plan import plan_graph, plan_shape, this_machine, with_ahead
from mggcn.backend.cpu.figures import ASSUMED
from mggcn.backend.cuda import presence, triton_kernels
from mggcn.backend.norms import NormKernels
from mggcn.config import Config, ModelConfig, RunConfig, SampleConfig
from mggcn.cost.batches import CROWD, LOCK_S, MATRIX_CALLS, NONZERO_S
from mggcn.cost.machine import RateTable, find_machine
from mggcn.cost.work import Staged, Work, work_seconds
from mggcn.errors import PlanError
from mggcn.model.kinds import norms
from mggcn.planning.advice import require_pinned
from mggcn.planning.batches import gather_threads
from mggcn.planning.cost_text import summed_widths
from mggcn.planning.op_cost import SMALL_ROWS, batch_cost, epoch_cost, epoch_threads, first_sums_s
from mggcn.planning.op_work import items_by_op, program_items, stage_items
from mggcn.planning.record import plan_from_dict, to_dict
from tests.graphs import make_graph, on_ranks, pattern
from tests.shapes import shape_of
from tests.train.test_exact import config_of
from tests.train.test_mixed import with_run


def _trainer(vertices: int, *hidden: int, norm_layer: str = "none", **settings: object) -> mggcn.Trainer:
    """Train a GCN on a ring, on two threads."""
    ring = np.arange(vertices)
    edges = np.stack([np.tile(ring, 2), np.append(np.roll(ring, 1), np.roll(ring, -1))])
    labels, splits = ring % 3, {"train": ring[::2], "val": ring[1::2]}
    graph = mggcn.load(edges, features=np.eye(vertices, 7, dtype=np.float32), labels=labels, splits=splits)
    return mggcn.Trainer(graph, mggcn.GCN(hidden=hidden, norm_layer=norm_layer), threads=2, **settings)


@pytest.mark.parametrize(
    ("vertices", "hidden", "ranks", "threads"),
    [
        (900, (128,), 1, 1),
        (SMALL_ROWS, (16,), 1, 1),
        (900, (2048, 2048), 1, 2),
        (SMALL_ROWS + 1, (16,), 1, 2),
        (SMALL_ROWS + 1, (16,), 2, 1),
    ],
)
def test_small_epochs_have_one_thread(vertices: int, hidden: tuple[int, ...], ranks: int, threads: int) -> None:
    """Fails if a second thread waits in epochs that it cannot shorten, or if wide layers or large graphs lose theirs."""
    plan = _trainer(vertices, *hidden, ranks=ranks, transport="threads" if ranks > 1 else "auto").plan.run
    assert epoch_threads(plan, 2) == threads


@pytest.mark.parametrize(("vertices", "named"), [(60, "1 thread"), (SMALL_ROWS + 1, "2 threads")])
def test_a_run_says_how_many_threads_its_epochs_had(vertices: int, named: str) -> None:
    """Fails if ranks do not compute as `epoch_threads` says, or a record names threads that were not there."""
    trainer = _trainer(vertices, 4)
    trainer.fit(epochs=1)
    assert trainer.result()["versions"]["device"].endswith(f", {named}")


def test_waiting_is_limited_before_torch_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if threads of a run from Python spin for milliseconds after each kernel, which only the command prevented."""
    asked = []
    monkeypatch.setattr(native, "limit_spinning", lambda: asked.append("limited"))
    _trainer(60, 4)
    assert asked == ["limited"] * 2


ROWS, COLS = 40, 9


class Counting:
    """Kernels of norms that count the matrices that calls read and write."""

    def __init__(self, inner: NormKernels) -> None:
        self.inner = inner
        self.passes = 0

    def __getattr__(self, name: str) -> Callable[..., None]:
        def counted(*args: Any) -> None:
            self.passes += sum(isinstance(arg, torch.Tensor) and arg.shape == (ROWS, COLS) for arg in args)
            getattr(self.inner, name)(*args)

        return counted


def test_norms_cost_their_arithmetic() -> None:
    """Fails if plans predict norms by their bytes alone."""
    plan = _trainer(60, 9, norm_layer="layer").plan.run
    work = {label: items for label, items in items_by_op(plan, plan.ranks[0], plan.ranks[0].train) if "norm" in label}
    for name, instructions in (("layer-norm 1", 12), ("layer-norm-grad 1", 25)):
        (norm,) = work[name]
        assert isinstance(norm, Work)
        assert (norm.flop, norm.precision) == (2 * instructions * 60 * 9, "fp64")


@pytest.mark.parametrize("norm_layer", ["layer", "batch"])
def test_norms_cost_the_passes_that_they_make(norm_layer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a norm reads or writes rows more or less often than plans count."""
    kinds = [norms.LayerNorm, norms.LayerNormGrad, norms.BatchNorm, norms.BatchNormGrad, norms.RunningNorm]
    seen = []
    for kind in kinds:

        def run(self: Any, rt: Any, op: Any, before: Any = kind.run) -> None:
            counting = Counting(rt.backend.norms)
            with monkeypatch.context() as patched:
                patched.setattr(type(rt.backend), "norms", counting)
                before(self, rt, op)
            seen.append((type(self), counting.passes))

        monkeypatch.setattr(kind, "run", run)
    settings = {"num_features": 5, "num_classes": 3, "sparse": False, "weighted": False, "seed": 11}
    graph = make_graph(pattern("random", ROWS, 6), **settings)  # type: ignore[arg-type]
    config = with_run(config_of(1, hidden=(COLS,), norm_layer=norm_layer), precision="fp32")

    def body(rank: Any) -> None:
        rank.trainer.step(0)
        rank.trainer.evaluate()

    on_ranks(config, graph, body)
    assert len(seen) == 3, seen
    for kind, counted in seen:
        assert counted == kind.passes, kind


@pytest.mark.parametrize(
    ("model", "widths"),
    [
        ({"kind": "sage", "hidden": (16, 8)}, (100, 16, 8)),
        ({"kind": "gat", "hidden": (16, 8), "heads": 4}, (16, 8, 20)),
        ({"kind": "gat", "hidden": (16, 8), "heads": 4, "head": "linear"}, (16, 8)),
        ({"kind": "gin", "hidden": (16,), "dense_before": (6,), "head": "linear"}, (6,)),
        ({"kind": "appnp", "hidden": (16,), "hops": 3}, (5, 5, 5)),
    ],
)
def test_work_is_counted_where_neighbours_are_summed(model: dict[str, Any], widths: tuple[int, ...]) -> None:
    """Fails if the columns of a layer's input are counted where attention sums those of its heads, or a head sums none."""
    assert summed_widths(ModelConfig(**model), 100, 5) == widths


@pytest.mark.parametrize("strategy", ["broadcast", "slice"])
@pytest.mark.parametrize(("precision", "item"), [("fp32", 1), ("fp64", 2)])
def test_attention_costs_its_arithmetic(strategy: str, precision: str, item: int) -> None:
    """Fails if an epoch of attention takes the seconds of its bytes alone, or a rank that has half of the heads, or rows of
    narrower numbers, takes as long as all.
    """
    run = RunConfig(ranks=2, transport="threads", strategy=strategy, precision=precision)  # type: ignore[arg-type]  # parameters of the test
    config = Config(model=ModelConfig(kind="gat", hidden=(64,), heads=4, head="linear"), run=run)
    plan = plan_shape(config, shape_of(1000, 9000, 16, 4))
    rank = plan.ranks[0]
    items = program_items(plan, rank, rank.train)
    works = [work for work in items if isinstance(work, Work) and work.along is not None and work.rows]
    parts = 2 if strategy == "slice" else 1
    assert {(work.along.kernel, work.along.heads, work.along.columns) for work in works if work.along} == {
        (kernel, 4 * item / parts, 64 * item / parts) for kernel in ("gat", "gat_sources", "gat_destinations")
    }
    machine = find_machine("assumed-cpu")
    slow = dataclasses.replace(machine.device, edge_s=dict.fromkeys(EDGE_KERNELS, (1e-3, 0.0, 0.0)))
    more = epoch_cost(plan, dataclasses.replace(machine, device=slow)).step_s - epoch_cost(plan, machine).step_s
    edges = 8 * sum(min(work.rows, max(work.results, work.rows / 8 + work.results * 7 / 16)) for work in works)
    assert edges > sum(work.rows for work in works)  # the last ones of a row take as long as eight
    assert more == pytest.approx(1e-3 * edges * 2 / machine.device.cores, rel=0.2)


def test_passes_over_what_they_read_are_in_place() -> None:
    """Fails if a pass that writes its operand's memory counts as one between two matrices, or a copy as one in place."""
    config = Config(model=ModelConfig(kind="gat", hidden=(64, 64), heads=4))
    plan = plan_shape(config, shape_of(1000, 9000, 16, 4))
    rank = plan.ranks[0]
    found = {
        label: {one.in_place for one in items if isinstance(one, Work) and one.kind == "elementwise"}
        for label, items in items_by_op(plan, rank, rank.train)
    }
    assert found["elementwise 3"] == {True}
    assert found["elementwise 1"] == {False}
    assert found["attention-message 1"] == {False}
    assert found["scores 2"] == {False}
    assert found["scores-grad 2"] == {False, True}
    rates = find_machine("assumed-cpu").device
    faster = dataclasses.replace(rates, in_place=RateTable(((1.0, 1e15),)))
    before, after = (
        epoch_cost(plan, dataclasses.replace(find_machine("assumed-cpu"), device=d)) for d in (rates, faster)
    )
    assert after.train.seconds < before.train.seconds


@pytest.mark.parametrize("ranks", [1, 8])
def test_batches_on_gpus_are_priced(ranks: int) -> None:
    """Fails if a step on batches leaves out the way to the GPU or the host, or a batch as drawn is priced by its bounds."""
    shape = dataclasses.replace(shape_of(200_000, 4_000_000, 128, 16), num_training=100_000)
    run = RunConfig(ranks=ranks, device="cuda", transport="nccl" if ranks > 1 else "single")
    sample = SampleConfig(batch=1024 * ranks, fanout=(10, 5), ahead=2)
    config = Config(model=ModelConfig(hidden=(64,)), run=run, sample=sample)
    plan, machine = plan_shape(config, shape), find_machine("dgx-h100")
    cost = epoch_cost(plan, machine)
    assert cost.batch is not None
    stack = plan.stack
    assert stack is not None
    features = 512 * stack.capacities[0].sources
    assert features / 50e9 < cost.batch.upload_s < 1.2 * features / 50e9
    host_s = (cost.batch.sample_s + LOCK_S) * (1 + CROWD) / 2
    assert cost.step_s == max(cost.train.seconds, cost.batch.upload_s, host_s, LOCK_S)
    need = plan.ranks[0].pinned_bytes
    assert need > 3 * features
    require_pinned(plan, ranks, ranks * need)
    with pytest.raises(
        PlanError, match=r"of the host's memory, most of it pinned, but .* are free; set sample.ahead below 2, fewer"
    ):
        require_pinned(plan, ranks, ranks * need - 1)
    assert 2 * features < plan.ranks[0].regions["batches on their way"] < 2.5 * features
    mean = tuple((size.sources // 2, size.edges // 2) for size in stack.capacities)
    drawn = batch_cost(dataclasses.replace(plan, stack=dataclasses.replace(stack, mean=mean)), machine)
    assert drawn is not None
    assert drawn.upload_s == pytest.approx(cost.batch.upload_s - features / 2 / 50e9, rel=1e-3)
    assert drawn.sample_s == pytest.approx(cost.batch.sample_s / 2, rel=0.05)


def test_the_cores_beside_a_gpu_share_batches() -> None:
    """Fails if a batch for a GPU is gathered by one core while others idle, or by those of other batches or ranks."""
    found = []
    for device, ranks, ahead, threads in (
        ("cuda", 1, 2, 16),
        ("cuda", 1, 12, 16),
        ("cuda", 1, 0, 4),
        ("cpu", 1, 2, 16),
    ):
        run = RunConfig(ranks=ranks, device=device, threads=threads)  # type: ignore[arg-type]  # parameters of the test
        found.append(gather_threads(Config(run=run, sample=SampleConfig(batch=64, fanout=(4, 3, 2), ahead=ahead))))
    assert found == [7, 1, 2, 1]


def test_so_many_batches_are_made_ahead() -> None:
    """Fails if the cores beside a GPU idle by default, those of a CPU's run are taken from its kernels, or what the user
    says is not done.
    """
    found = []
    for device, threads, ahead in (
        ("cpu", 16, -1),
        ("cuda", 1, -1),
        ("cuda", 12, -1),
        ("cuda", 64, -1),
        ("cuda", 16, 0),
    ):
        run = RunConfig(device=device, threads=threads)  # type: ignore[arg-type]  # parameters of the test
        config = Config(run=run, sample=SampleConfig(batch=64, fanout=(4, 3, 2), ahead=ahead))
        found.append(with_ahead(config).sample.ahead)
    assert found == [2, 2, 9, 12, 0]


def test_unpadded_batches_wait_for_the_step() -> None:
    """Fails if the upload of a batch of R-GCN, or of one that ranks share, is priced beside the step."""
    shape = dataclasses.replace(shape_of(20_000, 400_000, 128, 16), num_training=10_000)
    sample = SampleConfig(batch=2048, fanout=(10, 5))
    found = []
    for batches in ("independent", "cooperative"):
        run = RunConfig(ranks=2, device="cuda", transport="nccl", batches=batches)
        config = Config(model=ModelConfig(hidden=(64,)), run=run, sample=sample)
        cost = batch_cost(plan_shape(config, shape), find_machine("dgx-h100"))
        assert cost is not None
        found.append(cost.beside)
    assert found == [True, False]


def test_sparse_rows_are_priced_by_their_nonzeros() -> None:
    """Fails if a batch of sparse features is priced as dense rows, its products by those of all vertices, or the transpose
    of own rows is left out.
    """
    shape = shape_of(18_000, 160_000, 6_000, 15, feature_nnz=18_000 * 60, num_training=10_000)
    model = ModelConfig(kind="sage", aggregator="mean", hidden=(128,), self_loops=False)
    sample = SampleConfig(batch=128, fanout=(10, 5))
    found = {}
    for features in ("sparse", "dense"):
        plan = plan_shape(Config(model=model, sample=sample, run=RunConfig(features=features)), shape)  # type: ignore[arg-type]  # a loop's
        cost = batch_cost(plan, find_machine("dgx-h100"))
        assert cost is not None
        [rank] = plan.ranks
        works = [item for _, items in items_by_op(plan, rank, rank.train) for item in items if isinstance(item, Work)]
        found[features] = cost.sample_s, sum(work.rows for work in works if work.kind == "sparse"), works
    inputs, targets, edges = 128 * 11 * 6, 128 * 11, 128 * 10 + 128 * 11 * 5
    gained = inputs * 6_000 * 4 / 8e9 - (inputs + targets) * 60 * NONZERO_S
    assert found["dense"][0] - found["sparse"][0] == pytest.approx(gained)
    # Of sparse rows each product, forth and back, gathers a row for each nonzero; the sums of both hops go both ways.
    assert found["sparse"][1] == 2 * (inputs + targets) * 60 + 2 * edges
    assert found["dense"][1] < found["sparse"][1]
    flops = [sum(work.flop for work in works) for _, _, works in found.values()]
    assert flops[0] < flops[1] / 30


def test_sums_of_the_first_layer_take_time_once() -> None:
    """Fails if a run does not say how long A X takes, or ranks do not share the work."""
    shape = dataclasses.replace(shape_of(20_000, 400_000, 128, 16), num_training=10_000)
    found = []
    for ranks, first in ((1, "drawn"), (1, "full"), (2, "full")):
        run = RunConfig(ranks=ranks, transport="threads" if ranks > 1 else "single")
        sample = SampleConfig(batch=2048, fanout=(10, 5), first=first)  # type: ignore[arg-type]  # a parameter of the test
        found.append(first_sums_s(plan_shape(Config(model=ModelConfig(hidden=(64,)), run=run, sample=sample), shape)))
    assert found[0] == 0
    assert found[1] == 2 * found[2] == pytest.approx(400_000 * (3.5e-8 + 512 / 8e9))


@pytest.mark.parametrize("precision", ["fp32", "mixed", "bf16", "fp64"])
def test_products_of_rows_are_priced_with_what_follows(precision: Any) -> None:
    """Fails if a plan counts passes that fused products do not make, leaves out bytes that they move, or fuses others."""
    run = RunConfig(device="cuda", precision=precision)
    plan = plan_shape(Config(model=ModelConfig(hidden=(256, 256)), run=run), shape_of(169_343, 2_340_000, 128, 40))
    [rank] = plan.ranks
    device = find_machine("hgx-h200").device
    for of in (device, device.unfused, None):
        ops = {label: items for label, items in items_by_op(plan, rank, rank.train, device=of)}
        found = {label: [(i.kind, i.fused) for i in items if isinstance(i, Work)] for label, items in ops.items()}
        assert found["weight-grad 2"] == [("dense", "")]
        if of is not device or precision == "fp64":
            assert found["linear 2"][0] == found["input-grad 2"][0] == ("dense", "")
            assert ("elementwise", "") in found["input-grad 2"]
            continue
        assert found["linear 1"] == found["linear 2"] == [("dense", "rows")]
        assert found["input-grad 2"] == found["input-grad 3"] == [("dense", "gradient")]
        (linear,), (grad,), (narrow,) = ops["linear 2"], ops["input-grad 2"], ops["linear 3"]
        assert isinstance(linear, Work)
        assert isinstance(grad, Work)
        assert isinstance(narrow, Work)
        item, sent = {"fp32": (4, 4), "mixed": (4, 2), "bf16": (2, 2)}[precision]
        assert linear.streamed == 169_343 * 256 * (item + sent)
        assert grad.streamed == 169_343 * 256 * 3 * item
        assert narrow.flop == 2 * 169_343 * 256 * 64  # blocks of 64 columns, of which 40 are there


def test_fused_products_take_what_they_took() -> None:
    """Fails if products of another graph than that of the file's rates miss their measured seconds (note 0038)."""
    device = find_machine("hgx-h200").device
    for precision, linear_s, grad_s in (("fp32", 2.61e-4, 3.46e-4), ("bf16", 1.16e-4, 1.48e-4)):
        run = RunConfig(device="cuda", precision=precision)  # type: ignore[arg-type]  # parameters of the test
        plan = plan_shape(Config(model=ModelConfig(hidden=(256, 256)), run=run), shape_of(169_343, 2_340_000, 128, 40))
        ops = dict(items_by_op(plan, plan.ranks[0], plan.ranks[0].train, device=device))
        for label, seconds in (("linear 2", linear_s), ("input-grad 2", grad_s)):
            (work,) = ops[label]
            assert isinstance(work, Work)
            assert work_seconds(work, device, 1)[0] == pytest.approx(seconds, rel=0.12)


def test_products_are_priced_by_what_this_machine_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fails if a plan for this machine counts on Triton where it is not, or on a GPU whose kernels were not measured."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    config = Config(run=RunConfig(device="cuda"))
    monkeypatch.setattr(presence, "gpu_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, installed, fuses in (((9, 0), True, True), ((9, 0), False, False), ((8, 0), True, False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        monkeypatch.setattr(triton_kernels, "TRIED", ("",) if installed else ("none",))
        monkeypatch.setattr(triton_kernels.metadata, "version", lambda _: "3.6.0")
        monkeypatch.setattr(triton_kernels.importlib.util, "find_spec", lambda _: object())
        device = this_machine(config).device
        assert bool(device.fused) == bool(device.fused_grad) == fuses
        assert device.gemm == find_machine("hgx-h200").device.gemm


@pytest.mark.parametrize("batches", ["independent", "cooperative"])
def test_steps_of_a_cpu_are_priced_as_batches_are_drawn(batches: Any) -> None:
    """Fails if a step on a CPU, which computes what a batch has, is priced as large as it may be, also where little memory
    is at stake and bounds are planned.
    """
    graph = make_graph(pattern("random", 400, 5), num_features=19, num_classes=4, seed=5)
    ranks, transport = (2, "threads") if batches == "cooperative" else (1, "single")
    run = RunConfig(ranks=ranks, transport=transport, threads=1, batches=batches)  # type: ignore[arg-type]
    config = Config(model=ModelConfig(hidden=(8,)), run=run, sample=SampleConfig(batch=16, fanout=(4, 3)))
    machine = find_machine("m5.24xlarge")
    plan, _ = plan_graph(config, graph, machine)
    stack = plan.stack
    assert stack is not None
    assert all(mean[0] <= size.sources for mean, size in zip(stack.mean, stack.capacities, strict=True))
    assert stack.mean[0][1] < stack.capacities[0].edges
    bounds = dataclasses.replace(plan, stack=dataclasses.replace(stack, mean=()))
    priced, largest = (epoch_cost(one, machine) for one in (plan, bounds))
    assert priced.train.seconds < largest.train.seconds
    assert priced.batch is not None
    assert largest.batch is not None
    assert priced.batch.sample_s < largest.batch.sample_s
    # The memory is that of the bounds.
    assert plan.process_bytes == bounds.process_bytes
    # LABOR passes over the rows of its targets.
    labor = dataclasses.replace(config, sample=dataclasses.replace(config.sample, draw="labor"))
    passing, _ = plan_graph(labor, graph, machine)
    assert passing.stack is not None
    assert passing.stack.looked > 16 * 5
    looking, blind = (
        batch_cost(dataclasses.replace(passing, stack=dataclasses.replace(passing.stack, looked=looked)), machine)
        for looked in (passing.stack.looked, 0)
    )
    assert looking is not None
    assert blind is not None
    assert looking.sample_s > blind.sample_s
    read = plan_from_dict(labor, json.loads(json.dumps(to_dict(passing))), passing.strategy)
    assert read.stack == passing.stack


def test_rows_read_where_they_are_stored_come_from_all_vertices() -> None:
    """Fails if rows of X that a step reads by their ids are priced as near as those of a batch, or a batch's matrices,
    which the thread that computes makes, take no time.
    """
    graph = make_graph(pattern("random", 400, 5), num_features=19, num_classes=4, seed=5)
    run, model = RunConfig(threads=1), ModelConfig(kind="sage", aggregator="mean", hidden=(64,))
    config = Config(model=model, run=run, sample=SampleConfig(batch=16, fanout=(4, 3)))
    machine = find_machine("m5.24xlarge")
    plan, _ = plan_graph(config, graph, machine)
    [rank] = plan.ranks
    assert rank.values.reads_stored
    works = [(op, one) for op, items in items_by_op(plan, rank, rank.train) for one in items if isinstance(one, Work)]
    stored = [one for op, one in works if op in ("aggregate 1", "gather X")]
    assert len(stored) == 3  # forwards, and rows of the targets backwards, too
    assert all(one.rows and one.footprint == 400 * one.row_bytes for one in stored)
    assert all(one.footprint < 400 * one.row_bytes for op, one in works if op == "aggregate 2")
    cost = batch_cost(plan, machine)
    assert cost is not None
    assert cost.lock_s == 4 * MATRIX_CALLS * machine.device.call_s
    assert cost.step_s(1.0) == pytest.approx(1.0 + cost.lock_s + 2 * cost.sample_s / machine.device.cores)
    measured = dataclasses.replace(machine, device=dataclasses.replace(machine.device, matrix_s=0.25))
    cost = batch_cost(plan, measured)
    assert cost is not None
    assert cost.lock_s == 4 * 0.25


@pytest.mark.parametrize("strategy", ["broadcast", "halo"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_an_op_begins_once_and_behind_each_wait(ranks: int, strategy: Any) -> None:
    """Fails if an op of many calls pays for its beginning at each, or one, the optimiser among them, never; or if threads
    that have waited for a message are taken to be awake.
    """
    graph = make_graph(pattern("random", 400, 5), num_features=19, num_classes=4, seed=5)
    run = RunConfig(threads=1, ranks=ranks, strategy=strategy)
    plan, _ = plan_graph(Config(model=ModelConfig(kind="gat", hidden=(64,), heads=4), run=run), graph)
    for rank in plan.ranks:
        for op, items in items_by_op(plan, rank, rank.train):
            plain = [one for item in items for one in (item.plain() if isinstance(item, Staged) else (item,))]
            asleep = True
            for one in plain:
                if isinstance(one, Work):
                    assert one.begins == int(asleep), op
                asleep = not isinstance(one, Work) and (asleep or not isinstance(one, Send))


def test_an_op_from_disk_begins_in_each_part() -> None:
    """Fails if an op that runs once for each part of a stage's rows or columns begins once in all, or in none."""
    graph = make_graph(pattern("random", 400, 5), num_features=70, num_classes=4, seed=5)
    run = RunConfig(threads=1, capacity="disk", memory_limit=1)
    plan, _ = plan_graph(Config(model=ModelConfig(kind="gcn", hidden=(64, 64)), run=run), graph)
    [rank] = plan.ranks
    assert rank.disk is not None
    stages, several = rank.disk.programs["train"].stages, set[str]()
    for stage in stages:
        works = [item for item in stage_items(plan, rank, stage, 0, None) if isinstance(item, Work)]
        assert sum(work.begins for work in works) == len(stage.parts) * len(stage.program.ops)
        several |= {stage.how} if len(stage.parts) > 1 else set()
    assert several == {"rows", "columns"}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_products_of_a_cpu_finish_in_the_same_call(device: Any) -> None:
    """Fails if what the CPU's products do in their own call is priced as passes beside them, or a GPU's is not."""
    config = Config(model=ModelConfig(hidden=(32, 32)), run=RunConfig(device=device, threads=2))
    plan = plan_shape(config, shape_of(20_000, 400_000, 128, 16))
    [rank] = plan.ranks
    labelled = {label: items for label, items in items_by_op(plan, rank, rank.train)}
    found = {label: [one.kind for one in items if isinstance(one, Work)] for label, items in labelled.items()}
    gradients = [kinds for label, kinds in found.items() if label.startswith("input-grad")]
    assert gradients
    assert all(
        kinds == (["dense"] if device == "cpu" else ["dense", "elementwise", "elementwise"]) for kinds in gradients
    )


def test_sparse_products_are_priced_by_the_variant_that_is_chosen() -> None:
    """Fails if a variant that the figures call faster changes no price, or figures that nobody measured do."""
    config = Config(model=ModelConfig(hidden=(512, 512)), run=RunConfig(threads=2))
    plan = plan_shape(config, shape_of(60_000, 14_000_000, 512, 16))
    # Near rows take a fiftieth of what far ones do.
    rows = tuple(tuple(width * 1e-11 * factor for factor in (1, 1, 50, 50)) for width in ASSUMED.widths)
    steep = dataclasses.replace(ASSUMED, plain_s=rows, ahead_s=rows)
    gains = []
    for measured in (True, False):
        figures = dataclasses.replace(steep, measured=measured)
        with_figures = dataclasses.replace(plan, figures=figures)
        [rank] = with_figures.ranks
        items = [item for _, found in items_by_op(with_figures, rank, rank.train) for item in found]
        gains.append({item.gain for item in items if isinstance(item, Work) and item.kind == "sparse"})
    assert max(gains[0]) > 1.1
    assert gains[1] == {1.0}
