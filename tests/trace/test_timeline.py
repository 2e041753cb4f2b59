"""A recorded run: every kernel and message once, in its row, at its time; and the same bits as without recording."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mggcn.assemble import plan_graph, resolve
from mggcn.assemble_rank import Rank, make_rank
from mggcn.backend.cpu.backend import CpuBackend
from mggcn.backend.cpu.norms import CpuNorms
from mggcn.comm.base import Communicator
from mggcn.comm.single import SingleCommunicator
from mggcn.config import Config
from mggcn.trace.trace_json import FILE
from tests.trace.recorded import MODELS, config_of, events_of, graph, on_ranks, recorded_rank, row_of

KERNELS = {
    "spmm": "spmm",
    "matmul": "gemm",
    "product_grad": "gemm",
    "finish": "epilogue",
    "activation_grad": "activation-grad",
    "sum_partials": "bias-grad",
    "softmax_xent": "loss",
    "dropout_values": "input-dropout",
    "gather_rows": "gather",
    "scatter_rows": "scatter",
    "scatter_add_rows": "scatter",
}
NORMS = {"layer_norm": "layer-norm", "layer_norm_grad": "layer-norm-grad"}


@pytest.fixture
def record(tmp_path: Path) -> Callable[..., list[list[float]]]:
    """Train and record all epochs that `config` asks for; return the losses of every rank."""

    def run(
        config: Config,
        steps: int | None = None,
        between: Callable[[Rank], Any] | None = None,
        sparse: bool = False,
    ) -> list[list[float]]:
        config = resolve(config, graph(sparse))

        def body(comm: Communicator) -> list[float]:
            rank = recorded_rank(config, graph(sparse), comm, tmp_path)
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


Calls = dict[int, list[list[str]]]


@pytest.fixture
def spied(monkeypatch: pytest.MonkeyPatch) -> tuple[Calls, Callable[[Rank], None]]:
    """Note the kernel calls of every rank: those of each epoch, taken by a function that also evaluates unseen."""
    calls: dict[int, list[str]] = {}
    taken: Calls = {}
    named = [(CpuBackend, method, op) for method, op in KERNELS.items()]
    for owner, method, op in [*named, *((CpuNorms, method, op) for method, op in NORMS.items())]:
        original = getattr(owner, method)

        def spy(self: Any, *args: Any, _op: str = op, _original: Any = original, **kwargs: Any) -> None:
            calls.setdefault(threading.get_ident(), []).append(_op)
            _original(self, *args, **kwargs)

        monkeypatch.setattr(owner, method, spy)

    def take(rank: Rank) -> None:
        taken.setdefault(rank.comm.rank, []).append(calls.pop(threading.get_ident()))
        rank.trainer.evaluate()
        calls.pop(threading.get_ident())

    return taken, take


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_every_kernel_call_appears_once(ranks: int, model: str, record: Any, spied: Any, tmp_path: Path) -> None:
    """Fails if a call is lost, doubled, of another kind, in another row, or not of the epochs 3 to 5."""
    taken, take = spied
    record(config_of(ranks, model, epochs=6), between=take, sparse=model == "sparse input")
    events = events_of(tmp_path)
    for rank in range(ranks):
        found = row_of(events, rank, 0)
        expected = [(epoch, op) for epoch in (3, 4, 5) for op in [*taken[rank][epoch - 1], "optimizer"]]
        assert [(e["args"]["epoch"], e["args"]["op"]) for e in found] == expected
        assert len(expected) > 3 * 6
        assert ("gather" in taken[rank][4]) == (model == "sparse input")


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_rows_lie_in_their_epoch_and_do_not_overlap(ranks: int, record: Any, tmp_path: Path) -> None:
    """Fails if two calls of a row overlap, one leaves its epoch, or ranks do not share one axis of time."""
    record(config_of(ranks))
    events = events_of(tmp_path)
    epochs = {(e["pid"], e["args"]["epoch"]): e for e in events_of(tmp_path, "i")}
    assert set(epochs) == {(rank, epoch) for rank in range(ranks) for epoch in (3, 4, 5)}
    for rank in range(ranks):
        for row in (0, 1):
            found = row_of(events, rank, row)
            assert bool(found) == (row == 0 or ranks > 1)
            for one, other in itertools.pairwise(found):
                assert one["ts"] + one["dur"] <= other["ts"] + 1e-3
        for epoch in (3, 4, 5):
            whole = epochs[rank, epoch]
            inside = [e for e in row_of(events, rank, 0) if e["args"]["epoch"] == epoch]
            inside += [e for e in row_of(events, rank, 1) if e["args"]["epoch"] == epoch]
            assert min(e["ts"] for e in inside) >= whole["ts"] - 1e-3
            end = max(e["ts"] + e["dur"] for e in inside)
            assert end <= whole["ts"] + 1e6 * whole["args"]["seconds"] + 1e-3
            # On the host messages move in the thread that computes: the rows exclude each other too.
            assert sum(e["dur"] for e in inside) <= 1e6 * whole["args"]["seconds"] + 1e-3
    for epoch in (3, 4, 5):
        # No rank ends an epoch before all have begun it: the gradients are summed.
        starts, ends = zip(
            *((e["ts"], e["ts"] + 1e6 * e["args"]["seconds"]) for (_, n), e in epochs.items() if n == epoch),
            strict=True,
        )
        assert max(starts) < min(ends)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_messages_carry_the_planned_bytes(ranks: int, model: str, record: Any, tmp_path: Path) -> None:
    """Fails if a message is lost or counted twice, or its bytes are not those that the plan knows."""
    config, sparse = config_of(ranks, model), model == "sparse input"
    record(config, sparse=sparse)
    plan, _ = plan_graph(resolve(config, graph(sparse)), graph(sparse))
    events = [e["args"] for e in events_of(tmp_path) if e["tid"] == 1]
    assert sum(e["received"] for e in events) == 3 * sum(r.bytes_sent(r.train) for r in plan.ranks)
    # Each aggregation is a broadcast from every rank, whose root moves nothing itself; two sums follow.
    broadcasts = plan.ranks[0].messages(plan.ranks[0].train) - 2
    whole = [e["op"] for e in events if "bytes" in e]
    assert whole.count("broadcast") == 3 * broadcasts * (ranks - 1)
    assert whole.count("all_reduce") == 3 * 2 * ranks
    assert {e["measured"] for e in events} == {"on stream"}
    # Gradients are summed between the ops, in no step of the program.
    assert {("step" in e, e["op"]) for e in events} == {(True, "broadcast"), (False, "all_reduce")}


@pytest.mark.parametrize("ranks", [2, 4])
def test_stages_and_layers(ranks: int, record: Any, tmp_path: Path) -> None:
    """Fails if a stage is not the owner of its tile, or an event stands in another step or layer than its op."""
    record(config_of(ranks))
    events = events_of(tmp_path)
    for rank in range(ranks):
        others = [r for r in range(ranks) if r != rank]
        for layer, grad in ((2, ""), (3, ""), (3, "-grad"), (2, "-grad")):
            where = {"epoch": 4, "step": f"aggregate{grad} {layer}", "layer": layer}
            compute, moving = ([e for e in row_of(events, rank, row) if e["args"]["epoch"] == 4] for row in (0, 1))
            spmm = [e for e in compute if e["args"]["op"] == "spmm" and where.items() <= e["args"].items()]
            assert [e["args"]["stage"] for e in spmm] == [rank, *others]
            assert [e["name"] for e in spmm] == [f"spmm {stage}" for stage in [rank, *others]]
            sent = [e["args"]["stage"] for e in moving if where.items() <= e["args"].items()]
            assert sent == others
        assert {e["args"]["step"] for e in row_of(events, rank, 0) if e["args"]["op"] == "loss"} == {"loss"}


def test_events_have_the_fields_of_the_trace_format(record: Any, tmp_path: Path) -> None:
    """Fails if chrome://tracing or Perfetto would refuse or misplace an event, or a rate is not bytes over time."""
    record(config_of(2))
    content = json.loads((tmp_path / FILE).read_text())
    assert set(content) == {"displayTimeUnit", "otherData", "traceEvents"}
    names = {(e["pid"], e["tid"], e["name"]): e["args"] for e in content["traceEvents"] if e["ph"] == "M"}
    for rank in (0, 1):
        assert names[rank, 0, "process_name"] == {"name": f"rank {rank}"}
        for row, name in enumerate(("compute", "communication")):
            assert names[rank, row, "thread_name"] == {"name": name}
    timed = 0
    for event in content["traceEvents"]:
        assert {"ph", "name", "pid", "tid"} <= set(event)
        if event["ph"] != "X":
            continue
        args = event["args"]
        assert all(isinstance(event[key], str) for key in ("name", "cat"))
        assert event["dur"] >= 0
        assert event["ts"] >= 0
        for key, rate in (("bytes", "GB/s"), ("flop", "GFLOP/s")):
            if rate in args:
                timed += 1
                assert args[rate] == pytest.approx(args[key] / event["dur"] / 1e3, abs=1e-3)
    assert timed > 100
    assert not list(tmp_path.glob("timeline-*.json")), "the parts are merged"


@pytest.mark.parametrize("ranks", [1, 4])
def test_recording_changes_no_bit(ranks: int, record: Any) -> None:
    """Fails if a loss depends on whether somebody watches."""
    config = config_of(ranks)
    watched = record(config)

    def body(comm: Communicator) -> list[float]:
        plan, owners = plan_graph(resolve(config, graph()), graph())
        rank = make_rank(resolve(config, graph()), graph(), plan, owners, comm)
        return [rank.trainer.step(epoch) for epoch in range(config.train.epochs)]

    assert on_ranks(config, body) == watched


def test_a_run_that_ends_early_keeps_what_it_has(record: Any, tmp_path: Path) -> None:
    """Fails if an early stop loses the timeline."""
    record(config_of(2, epochs=50), steps=4)
    assert {e["args"]["epoch"] for e in events_of(tmp_path)} == {3, 4}


def test_a_run_that_ends_before_the_first_recorded_epoch_writes_nothing(record: Any, tmp_path: Path) -> None:
    """Fails if an empty timeline replaces one that a run has already."""
    record(config_of(1, epochs=50), steps=2)
    assert not list(tmp_path.iterdir())


def test_ranges_are_opened_for_every_op(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a profiler would miss an op of an epoch, recorded or not."""
    opened: list[str] = []

    @contextmanager
    def ranges(label: str) -> Iterator[None]:
        opened.append(label)
        yield

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.nvtx.range", ranges)
    rank = recorded_rank(resolve(config_of(1), graph()), graph(), SingleCommunicator(), tmp_path)
    rank.trainer.step(0)
    assert opened == [*(op.label for op in rank.plan.train.ops), "optimizer"]
