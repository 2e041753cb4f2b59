"""A recorded run: every op and message once, at its time, with its planned work; and the same bits as without recording."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mggcn.assemble.plan import plan_graph, resolve
from mggcn.assemble.rank import Rank, make_rank
from mggcn.comm.base import Communicator
from mggcn.comm.single import SingleCommunicator
from mggcn.comm.threads import run_threads
from mggcn.config import Config, ModelConfig, RunConfig, TrainConfig
from mggcn.errors import BackendError, RunError
from mggcn.graph.csr import Graph
from mggcn.graph.generate import community
from mggcn.model.kinds.aggregate import Aggregate
from mggcn.planning.run import RunPlan
from mggcn.report.timeline import Timeline as Read
from mggcn.report.timeline import read_timeline
from mggcn.train import timeline as timeline_module
from mggcn.train.timeline import FILE, Timeline, recorded_epochs
from tests.graphs import make_graph, pattern

SEED = 2718
MODELS: dict[str, dict[str, Any]] = {
    "gemm first": {"hidden": (24, 16), "dropout": 0.5},
    "aggregate first": {"hidden": (8, 40), "dropout": 0.5, "bias": False},
    "sparse input": {"hidden": (24,), "input_dropout": 0.3},
    "batch norm": {"hidden": (24, 16), "norm_layer": "batch"},
    "attention": {"kind": "gat", "hidden": (16,)},
}

ATTENTION = {"attention", "gradient of attention", "gradient of attention's destinations"}


def config_of(ranks: int, model: str = "gemm first", **train: Any) -> Config:
    return Config(
        model=ModelConfig(**MODELS[model]),
        train=TrainConfig(**({"seed": SEED, "epochs": 5} | train)),
        run=RunConfig(
            ranks=ranks,
            threads=1,
            transport="threads" if ranks > 1 else "single",
            features="sparse" if model == "sparse input" else "auto",
        ),
    )


@functools.cache
def graph(sparse: bool = False) -> Graph:
    if sparse:
        adj = pattern("random", 120, 5)
        return make_graph(adj, num_features=90, num_classes=4, sparse=True, seed=SEED)
    return community(501, 2000, 40, 4, seed=SEED)


def on_ranks(config: Config, body: Callable[[Communicator], Any]) -> list[Any]:
    return run_threads(config.run.ranks, body, 60) if config.run.ranks > 1 else [body(SingleCommunicator())]


def plan_of(config: Config, sparse: bool = False) -> RunPlan:
    return plan_graph(resolve(config, graph(sparse)), graph(sparse))[0]


Record = Callable[..., list[list[float]]]


@pytest.fixture
def record(tmp_path: Path) -> Record:
    """Train and record all epochs that `config` asks for; return the losses of every rank."""

    def run(
        config: Config, steps: int | None = None, between: Callable[[Rank], Any] | None = None, sparse: bool = False
    ) -> list[list[float]]:
        config = resolve(dataclasses.replace(config, run=dataclasses.replace(config.run, timeline=True)), graph(sparse))

        def body(comm: Communicator) -> list[float]:
            plan, owners = plan_graph(config, graph(sparse))
            rank = make_rank(config, graph(sparse), plan, owners, comm, folder=tmp_path)
            losses = []
            for number in range(config.train.epochs if steps is None else steps):
                losses.append(rank.trainer.step(number))
                if between is not None:
                    between(rank)
            rank.watch.close()
            comm.barrier()
            return losses

        return on_ranks(config, body)

    return run


def events_of(folder: Path) -> list[dict[str, Any]]:
    content = json.loads((folder / FILE).read_text())
    return [event for event in content["traceEvents"] if event["ph"] == "X"]


def of_epoch(found: Read, rank: int, row: str, epoch: int) -> list[Any]:
    return sorted((s for s in found.of(rank, row) if s.epoch == epoch), key=lambda s: s.start_s)


@pytest.mark.parametrize(
    ("first", "epochs", "expected"),
    [
        (0, 200, range(2, 5)),
        (0, 5, range(2, 5)),
        (0, 4, range(1, 4)),
        (0, 3, range(3)),
        (0, 1, range(1)),
        (90, 200, range(92, 95)),
        (198, 200, range(198, 200)),
    ],
)
def test_which_epochs_are_recorded(first: int, epochs: int, expected: range) -> None:
    """Fails if a short or continued run records nothing, or a long one its first epochs."""
    assert recorded_epochs(first, epochs) == expected


@pytest.mark.covering(1, rest="slow")
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_every_op_appears_once(ranks: int, model: str, record: Record, tmp_path: Path) -> None:
    """Fails if an op is lost, doubled, out of order or not of the epochs 3 to 5, also between unseen evaluations."""
    config, sparse = config_of(ranks, model, epochs=6), model == "sparse input"
    record(config, between=lambda rank: rank.trainer.evaluate(), sparse=sparse)
    found = read_timeline(tmp_path / FILE)
    assert set(found.epochs) == {(rank, epoch) for rank in range(ranks) for epoch in (3, 4, 5)}
    plan = plan_of(config, sparse)
    for rank, epoch in found.epochs:
        ops = of_epoch(found, rank, "compute", epoch)
        labels = [op.label for op in plan.ranks[rank].train.ops]
        assert [step for step, _ in itertools.groupby(ops, lambda s: s.step)] == [*labels, "optimizer"]
        assert [s.step for s in ops if s.nbytes] == [*labels, "optimizer"]
        kinds = {s.step: s.op for s in ops}
        assert {kinds[label] for label in labels if label.startswith(("linear", "weight-grad"))} <= {"gemm"}
        along_edges = {kinds[op.label] for op in plan.ranks[rank].train.ops if isinstance(op.kind, Aggregate)}
        assert along_edges == (ATTENTION if model == "attention" else {"spmm"})
        assert {kinds[label] for label in labels if label.startswith("sparse")} <= {"spmm"}
        assert (kinds["loss"], kinds["optimizer"]) == ("loss", "optimizer")
        assert ("batch-norm" in kinds.values()) == (model == "batch norm")


def test_work_is_that_of_the_plan(record: Record, tmp_path: Path) -> None:
    """Fails if the FLOP or bytes of an op are another one's, or of another rank."""
    config = config_of(2)
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, prune="off"))
    record(config)
    plan, found = plan_of(config), read_timeline(tmp_path / FILE)
    for rank in range(2):
        rows, nnz = plan.ranks[rank].sizes.owned, plan.ranks[rank].nnz
        flop = {s.step: s.flop for s in of_epoch(found, rank, "compute", 4) if s.nbytes}
        assert flop["linear 1"] == 2 * rows * 40 * 24
        assert flop["weight-grad 2"] == 2 * rows * 24 * 16
        # Rows of 16 values fill a line of 64 bytes, those of 4 a quarter.
        assert flop["aggregate 2"] == flop["aggregate 3"] == 2 * nnz * 16
        moved = {s.step: s.nbytes for s in of_epoch(found, rank, "compute", 4) if s.nbytes}
        assert moved["aggregate 2"] > nnz * (4 + 64)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_rows_lie_in_their_epoch_and_do_not_overlap(ranks: int, record: Record, tmp_path: Path) -> None:
    """Fails if a rank computes while it waits, leaves its epoch, or ranks do not share one axis of time."""
    record(config_of(ranks))
    found = read_timeline(tmp_path / FILE)
    for (rank, epoch), (start, end) in found.epochs.items():
        moved = of_epoch(found, rank, "communication", epoch)
        assert bool(moved) == (ranks > 1)
        # On the host messages move in the thread that computes: the rows exclude each other.
        inside = sorted([*of_epoch(found, rank, "compute", epoch), *moved], key=lambda s: s.start_s)
        assert inside[0].start_s >= start - 1e-9
        assert max(s.end_s for s in inside) <= end + 1e-9
        for one, other in itertools.pairwise(inside):
            assert one.end_s <= other.start_s + 1e-8
    for epoch in (3, 4, 5):
        # No rank ends an epoch before all have begun it: the gradients are summed.
        starts, ends = zip(*(span for (_, number), span in found.epochs.items() if number == epoch), strict=True)
        assert max(starts) < min(ends)


@pytest.mark.covering(1, rest="slow")
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_messages_carry_the_planned_bytes(ranks: int, model: str, record: Record, tmp_path: Path) -> None:
    """Fails if a message is lost or counted twice, or its bytes are not those that the plan knows."""
    config, sparse = config_of(ranks, model), model == "sparse input"
    record(config, sparse=sparse)
    plan, found = plan_of(config, sparse), read_timeline(tmp_path / FILE)
    moved = [s for s in found.stretches if s.row == "communication"]
    # The root of a broadcast moves nothing itself.
    broadcast, summed = (sum(s.nbytes for s in moved if s.op == op) for op in ("broadcast", "all_reduce"))
    assert broadcast + summed * 2 * (ranks - 1) // ranks == 3 * sum(r.bytes_sent(r.train) for r in plan.ranks)
    assert {s.measured for s in moved} == {"on stream"}
    # Gradients are summed between the ops, in no step of the program.
    aggregations = {op.label for op in plan.ranks[0].train.ops if isinstance(op.kind, Aggregate)}
    assert {s.step for s in moved if s.op == "broadcast"} == aggregations
    assert sum(s.nbytes > 0 and not s.step for s in moved) == 3 * 2 * ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_stages(ranks: int, record: Record, tmp_path: Path) -> None:
    """Fails if a stage is not the owner of its tile, in the products or in the messages."""
    record(config_of(ranks))
    found = read_timeline(tmp_path / FILE)
    for rank, step in itertools.product(range(ranks), ("aggregate 2", "aggregate-grad 3")):
        others = [r for r in range(ranks) if r != rank]
        compute, moving = (
            [s.stage for s in of_epoch(found, rank, row, 4) if s.step == step] for row in ("compute", "communication")
        )
        assert compute[0] == rank
        assert set(compute) == set(range(ranks))
        assert [stage for stage, _ in itertools.groupby(compute) if stage != rank] == others
        assert moving == others


def test_the_file_has_the_fields_of_the_trace_format(record: Record, tmp_path: Path) -> None:
    """Fails if chrome://tracing or Perfetto would refuse or misplace an event, or torch's own ops are missing."""
    record(config_of(2))
    content = json.loads((tmp_path / FILE).read_text())
    assert content["otherData"] == {"clock": "of the machine", "in flight": False}
    names = {(e["pid"], e["name"]): e["args"] for e in content["traceEvents"] if e["ph"] == "M"}
    for rank in (0, 1):
        assert names[rank, "process_name"] == {"name": f"rank {rank}"}
        assert names[rank, "thread_name"] == {"name": "host"}
    events = events_of(tmp_path)
    assert {event["pid"] for event in events} == {0, 1}
    assert min(event["ts"] for event in events) == 0
    assert all(event["dur"] >= 0 and isinstance(event["tid"], int) for event in events)
    assert "aten::copy_" in {event["name"] for event in events}
    assert not list(tmp_path.glob("timeline-*.json")), "the parts are merged"


@pytest.mark.parametrize("ranks", [1, 4])
def test_recording_changes_no_bit(ranks: int, record: Record) -> None:
    """Fails if a loss depends on whether somebody watches."""
    config = config_of(ranks)
    watched = record(config)

    def body(comm: Communicator) -> list[float]:
        plan, owners = plan_graph(resolve(config, graph()), graph())
        rank = make_rank(resolve(config, graph()), graph(), plan, owners, comm)
        return [rank.trainer.step(epoch) for epoch in range(config.train.epochs)]

    assert on_ranks(config, body) == watched


def test_a_run_that_ends_early_keeps_what_it_has(record: Record, tmp_path: Path) -> None:
    """Fails if an early stop loses the timeline."""
    record(config_of(2, epochs=50), steps=4)
    assert read_timeline(tmp_path / FILE).common_epochs == (3, 4)


def test_a_run_that_ends_before_the_first_recorded_epoch_writes_nothing(record: Record, tmp_path: Path) -> None:
    """Fails if an empty timeline replaces one that a run has already."""
    record(config_of(1, epochs=50), steps=2)
    assert not list(tmp_path.iterdir())


def test_only_the_first_repeat_is_recorded(tmp_path: Path) -> None:
    """Fails if a second run through the same epochs is recorded over the first."""
    watch = Timeline(plan_of(config_of(1, epochs=3)), SingleCommunicator(), tmp_path)
    for repeat in ("first", "second"):
        for number in range(3):
            with watch.epoch(number), watch.doing(repeat):
                pass
        watch.close()
    assert [event["name"] for event in events_of(tmp_path) if "epoch" not in event["name"]] == ["first"] * 3


def profiled(folder: Path, rank: int, base_ns: int, start_us: float) -> None:
    """What torch's profiler writes of a rank that is a process."""
    block = {"ph": "X", "cat": "user_annotation", "pid": 7000 + rank, "tid": 7000 + rank, "args": {"Ev Idx": 1}}
    events = [
        {"ph": "M", "name": "process_name", "pid": 7000 + rank, "tid": 0, "ts": start_us, "args": {"name": "python"}},
        block | {"name": "gloo:all_reduce", "ts": start_us - 300, "dur": 2.0},
        block | {"name": f"rank {rank}, epoch 1", "ts": start_us, "dur": 90.5},
        block | {"name": "linear 1", "ts": start_us + 1.125, "dur": 40.0},
        {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "x", "ts": 0, "dur": 9},
    ]
    content = {"baseTimeNanoseconds": base_ns, "traceEvents": events}
    (folder / f"timeline-{rank}.json").write_text(json.dumps(content))


def joined(folder: Path, boots: list[str]) -> list[dict[str, Any]]:
    config = config_of(2, epochs=1)
    plan = plan_of(dataclasses.replace(config, run=dataclasses.replace(config.run, transport="gloo")))
    watch: Any = Timeline(plan, SingleCommunicator(), folder)
    watch._comm, watch._boots = type("Two", (), {"rank": 0, "size": 2})(), boots
    watch._join()
    return events_of(folder)


@pytest.mark.parametrize(("boots", "shift"), [(["a", "a"], 250.0), (["a", "b"], 0.0)])
def test_ranks_share_one_axis_of_time(boots: list[str], shift: float, tmp_path: Path) -> None:
    """Fails if the clocks of two machines are compared, those of one are not, or nanoseconds are lost on the way."""
    base = 1_790_857_026_000_000_000
    profiled(tmp_path, 0, base, 4_740_117_675_109.5)
    profiled(tmp_path, 1, base + 250_000, 4_740_117_675_109.5)
    found = [(e["pid"], e["name"], e["ts"]) for e in joined(tmp_path, boots)]
    assert found == [
        (0, "rank 0, epoch 1", 0.0),
        (0, "linear 1", 1.125),
        (1, "rank 1, epoch 1", shift),
        (1, "linear 1", shift + 1.125),
    ]
    assert len(read_timeline(tmp_path / FILE).notes) == (shift == 0.0)


def test_a_part_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """Fails if a full disk or a rank that wrote nothing shows as a traceback."""
    profiled(tmp_path, 0, 0, 5.0)
    with pytest.raises(RunError, match=r"timeline-1\.json, which a rank wrote .* cannot be read"):
        joined(tmp_path, ["a", "a"])
    assert not (tmp_path / FILE).exists()


def test_an_old_torch_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fails if a version of torch that profiles one thread only shows as a traceback."""

    def old(**options: bool) -> None:
        raise TypeError(f"incompatible constructor arguments: {options}")

    monkeypatch.setattr(timeline_module, "_ExperimentalConfig", old)
    watch = Timeline(plan_of(config_of(1)), SingleCommunicator(), tmp_path)
    with pytest.raises(BackendError, match=r"run\.timeline needs torch 2\.7 or later"), watch.epoch(2):
        pass
