"""run.precision mixed: operands of the graph and messages in bfloat16, everything else in float32, in every strategy."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mggcn.assemble.plan import STRATEGIES, plan_shape
from mggcn.assemble.rank import Rank
from mggcn.config import Config, ModelConfig, RunConfig, TrainConfig
from mggcn.errors import ConfigError
from mggcn.graph.csr import Graph
from mggcn.memory.arena import BufferSpec
from mggcn.model.kinds.aggregate import Aggregate
from mggcn.nn.sharing import Sharing
from mggcn.planning.run import SIGNALS
from tests.devices import CPU, WHERE, Where
from tests.graphs import far_from_kinks, make_graph, on_ranks, pattern
from tests.reference import loss_and_gradients
from tests.shapes import shape_of
from tests.train.poisoned import reads_what_it_was_given
from tests.train.test_trainer import assert_repeats_and_resumes, fit

SEED = 20011
NEAR = 0.02
"""Relative error of a gradient: a few operands rounded by 2^-9 at most, one behind the other; slices round results, too."""


def config_of(ranks: int, strategy: str = "broadcast", precision: str = "mixed", **model: Any) -> Config:
    return Config(
        model=ModelConfig(**({"hidden": (24, 8)} | model)),
        train=TrainConfig(seed=SEED, epochs=8),
        run=RunConfig(
            ranks=ranks,
            threads=1,
            transport="threads" if ranks > 1 else "single",
            strategy=strategy,  # type: ignore[arg-type]
            precision=precision,  # type: ignore[arg-type]
        ),
    )


def with_run(config: Config, **run: Any) -> Config:
    return dataclasses.replace(config, run=dataclasses.replace(config.run, **run))


def small(kind: str = "directed", sparse: bool = False, classes: int = 4) -> Graph:
    return make_graph(
        pattern(kind, 41, 9), num_features=19, num_classes=classes, sparse=sparse, weighted=kind == "weighted", seed=3
    )


def errors_of(config: Config, graph: Graph, where: Where) -> tuple[float, bool]:
    """The largest relative error of a gradient, and whether the plan has operands of bfloat16."""

    def body(rank: Rank) -> tuple[dict[str, np.ndarray], dict[str, Any], bool]:
        far_from_kinks(rank)
        rank.trainer.gradients(3)
        weights = rank.trainer.runtime.weights
        grads = {name: grad.cpu().numpy().copy() for name, grad in weights.grads.items()}
        assert all(grad.dtype == np.float32 for grad in grads.values())
        rounds = any(p.spec.dtype == "bf16" for p in rank.plan.train.arena.placements)
        return grads, weights.state_dict(), rounds

    found = on_ranks(where.config(config), graph, body, device_of=where.device_of)
    _, expected, _ = loss_and_gradients(graph, config.model, found[0][1], SEED, 3)
    errors = [np.linalg.norm(grads[n] - e) / np.linalg.norm(e) for grads, *_ in found for n, e in expected.items()]
    return max(errors), found[0][2]


CELLS = list(itertools.product(STRATEGIES, (1, 2, 3), ("gemm-first", "aggregate-first", "auto")))
MODELS: list[dict[str, Any]] = [
    {"dropout": 0.5},
    {"dropout": 0.3, "input_dropout": 0.2, "hidden": (8, 24)},
    {"hidden": ()},
    {"norm": "mean", "hidden": (5, 9, 13)},
]
SORTS = (("directed", False), ("weighted", True), ("random", True))


@pytest.mark.covering(1)
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_gradients_are_near_autograd(where: Where, cell: tuple[str, int, str]) -> None:
    """Fails if an operand, a message or a gradient is read in the wrong type, rounded twice over, or not at all."""
    name, ranks, products = cell
    number = CELLS.index(cell)
    for k in range(2):
        model, (kind, sparse) = MODELS[(number + 2 * k) % len(MODELS)], SORTS[(number + k) % len(SORTS)]
        config = with_run(config_of(ranks, name, **model), products=products)
        error, rounds = errors_of(config, small(kind, sparse), where)
        assert error < NEAR, config
        # A model of one layer may aggregate A X alone, which comes from float32.
        assert rounds or not config.model.hidden
        assert (error > 1e-5) == rounds, config


def test_a_planted_skipped_product_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above itself fails when the backward product of a layer is a copy."""
    original = Aggregate.run

    def skip(self: Aggregate, rt: Any, op: Any) -> None:
        if self.backward and self.site == 2:
            rt.buffer(op.out).copy_(op.tensor(rt, 0))
        else:
            original(self, rt, op)

    monkeypatch.setattr(Aggregate, "run", skip)
    assert errors_of(config_of(3), small(), CPU)[0] > NEAR


def test_what_is_bf16_and_what_is_not() -> None:
    """Fails if an activation, a weight or a sum is planned in bfloat16, or an operand or a slot of messages is not."""
    shape = shape_of(2000, 40_000, 128, 64)
    for products, operands in (
        ("gemm-first", {"linear2", "linear3", "input-grad3", "rounded-gradient3"}),
        ("aggregate-first", {"rounded-input2", "rounded-input3", "product-grad2", "product-grad3"}),
    ):
        config = with_run(config_of(4, hidden=(256, 32)), products=products)
        rank = plan_shape(config, shape).ranks[0]
        specs = {p.spec.name: p.spec for p in rank.train.arena.placements}
        narrow = {name for name, spec in specs.items() if spec.dtype == "bf16"}
        assert {name for name in narrow if "." not in name} == operands
        assert {name for name in narrow if "." in name} == {name for name in specs if ".bc" in name}
        assert rank.setup is not None
        assert all(p.spec.dtype == "fp32" for p in rank.setup.arena.placements)
    full = plan_shape(with_run(config, precision="fp32"), shape).ranks[0]
    for region in ("features", "weights and optimiser", "vertex data", "graph"):
        assert rank.regions[region] == full.regions[region]


def test_aggregated_features_are_not_rounded() -> None:
    """Fails if A X, which is computed once, is the sum of rounded rows."""
    kept = [
        on_ranks(
            config_of(3, precision=precision), small(), lambda rank: rank.trainer.runtime.inputs.owned.dense.clone()
        )
        for precision in ("fp32", "mixed")
    ]
    assert all(torch.equal(one, other) for one, other in zip(*kept, strict=True))


def messages(rank: Rank) -> list[int]:
    """Bytes that an epoch and an evaluation send beside the sums over ranks, which are as planned."""
    found = []
    trainer, plan, comm = rank.trainer, rank.plan, rank.comm
    for program, run in ((plan.train, lambda: trainer.step(0)), (plan.evaluate, trainer.evaluate)):
        comm.bytes_sent = comm.messages = 0
        run()
        assert comm.bytes_sent == plan.bytes_sent(program)
        assert comm.messages == plan.messages(program)
        sums = (plan.gradient_bytes, 8 * SIGNALS) if program is plan.train else plan.score_bytes
        found.append(comm.bytes_sent - sum(2 * n * (plan.ranks - 1) // plan.ranks for n in sums))
    return found


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_messages_are_half_of_those_in_float32(name: str, ranks: int) -> None:
    """Fails if a message carries float32, or bytes differ from the plan's. Widths are whole lines of either type."""
    graph = small("random", sparse=True, classes=96)
    halves, wholes = (
        on_ranks(config_of(ranks, name, precision, hidden=(192,), dropout=0.4), graph, messages)
        for precision in ("mixed", "fp32")
    )
    assert [[2 * sent for sent in rank] for rank in halves] == wholes
    assert sum(map(sum, halves)) > 0


@pytest.mark.parametrize("delay", ["none", "2"])
def test_messages_in_flight_are_half(delay: str) -> None:
    """Fails if what cd-r keeps of other ranks is float32, or its messages differ from the plan's."""
    graph, sent, kept = small("random", sparse=True, classes=96), [], []

    def body(rank: Rank) -> tuple[int, int]:
        rank.comm.bytes_sent = 0
        for epoch in range(4):
            rank.trainer.step(epoch)
        sums = sum(2 * n * (rank.plan.ranks - 1) // rank.plan.ranks for n in (rank.plan.gradient_bytes, 8 * SIGNALS))
        state = rank.plan.regions.get("messages and sums in flight", 0)
        return rank.comm.bytes_sent - 4 * sums, state

    for precision in ("mixed", "fp32"):
        config = with_run(config_of(3, "delayed", precision, hidden=(192,)), delay=delay)
        found = on_ranks(config, graph, body)
        sent.append([nbytes for nbytes, _ in found])
        kept.append([nbytes for _, nbytes in found])
    assert [2 * n for n in sent[0]] == sent[1]
    assert [2 * n for n in kept[0]] == kept[1]
    assert (sum(sent[0]) > 0) == (delay != "none")


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("ranks", [2, 3])
def test_copies_of_a_vertex_stay_equal(where: Where, ranks: int) -> None:
    """Fails if the root of a split vertex goes on with a total that its leaves got rounded."""

    def body(rank: Rank) -> tuple[np.ndarray, np.ndarray]:
        rank.trainer.evaluate()
        return rank.trainer.runtime.inputs.owned.ids.cpu().numpy(), rank.trainer.logits().cpu().numpy().copy()

    config = where.config(config_of(ranks, "delayed"))
    logits: dict[int, np.ndarray] = {}
    copies = 0
    for ids, rows in on_ranks(config, small("random"), body, device_of=where.device_of):
        for vertex, row in zip(ids.tolist(), rows, strict=True):
            copies += vertex in logits
            assert np.array_equal(logits.setdefault(vertex, row), row)
    assert copies


RUNS = [*((name, "0") for name in STRATEGIES), ("delayed", "none"), ("delayed", "3")]


@pytest.mark.covering(0, rest=1)
@pytest.mark.parametrize(("name", "delay"), RUNS)
def test_a_run_repeats_and_resumes_bit_for_bit(name: str, delay: str, tmp_path: Path) -> None:
    """Fails if a checkpoint loses what a strategy keeps in bfloat16, or a bit depends on threads or on time."""
    config = with_run(config_of(3, name, hidden=(6, 5), dropout=0.5), delay=delay)
    whole = assert_repeats_and_resumes(config, small("random"), tmp_path, with_run(config, threads=2))
    plain = fit(with_run(config, precision="fp32"), small("random"), None)
    assert any(not torch.equal(plain[1][n], w) for n, w in whole[1].items())


@pytest.mark.covering(0)
@pytest.mark.parametrize("name", STRATEGIES)
def test_no_op_reads_memory_it_was_not_given(name: str) -> None:
    """Fails if live ranges of operands are too short: buffers are NaN before and after their planned life."""
    for ranks, hidden, p in itertools.product((1, 3), ((16, 5), (5, 16), ()), (0.0, 0.5)):
        config = config_of(ranks, name, hidden=hidden, dropout=p, input_dropout=p)
        assert all(on_ranks(config, small(), reads_what_it_was_given))


def test_the_arena_is_no_larger_than_in_float32() -> None:
    """Fails if operands of their own take more than they save where the graph is gathered by several ranks."""
    shape = shape_of(200_000, 4_000_000, 128, 40)
    sizes = {}
    for precision in ("fp32", "mixed"):
        rank = plan_shape(config_of(4, precision=precision, hidden=(256, 256)), shape).ranks[0]
        sizes[precision] = rank.arena_bytes
        blocks = [p.spec for p in rank.train.arena.placements if p.spec.name.endswith((".sums", ".block"))]
        sizes[f"{precision} blocks"] = sum(map(_nbytes, blocks))
    assert sizes["mixed"] <= sizes["fp32"] + sizes["mixed blocks"]


def _nbytes(spec: BufferSpec) -> int:
    return spec.nbytes


def test_what_mixed_is_not_for() -> None:
    """Fails if a setting with which mixed does not run is found out only in the run."""
    with pytest.raises(ConfigError, match="mixed needs --spmm own"):
        RunConfig(precision="mixed", spmm="cusparse", device="cuda")
    with pytest.raises(ConfigError, match="precision mixed keeps rows in two types"):
        Sharing(precision="mixed")
