"""Live ranges, packed into one arena."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest

from mggcn.aggregate.broadcast import BroadcastPlan
from mggcn.blocks.block import OWNED, WHOLE
from mggcn.config import ModelConfig
from mggcn.errors import PlanError
from mggcn.memory.arena import ALIGNMENT, ArenaPlan, BufferSpec, live_ranges, place
from mggcn.model.choices import InputShape
from mggcn.model.lower import lower, lower_setup, panel_width, paper_arena_bytes
from mggcn.model.network import NETWORKS, Choices, make_values
from mggcn.model.runtime import Sizes
from mggcn.partition.order import part_sizes


@dataclass(frozen=True)
class Step:
    label: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


def overlaps(plan: ArenaPlan, steps: list[Step]) -> list[tuple[str, str]]:
    """Pairs of buffers that share a byte at an op where both still matter, found op by op."""
    first = {p.spec.name: None for p in plan.placements}
    last = dict(first)
    for index, step in enumerate(steps):
        for name in (*step.reads, *step.writes):
            first[name] = index if first[name] is None else first[name]  # type: ignore[assignment]
            last[name] = index  # type: ignore[assignment]
    found = []
    for a, b in itertools.combinations(plan.placements, 2):
        both = any(
            first[a.spec.name] <= i <= last[a.spec.name] and first[b.spec.name] <= i <= last[b.spec.name]  # type: ignore[operator]
            for i in range(len(steps))
        )
        if both and a.offset < b.end and b.offset < a.end:
            found.append((a.spec.name, b.spec.name))
    return found


def random_program(seed: int) -> tuple[list[BufferSpec], list[Step]]:
    """A program that reads only what it wrote."""
    rng = np.random.default_rng(seed)
    specs, steps, known = [], [], []  # type: ignore[var-annotated]
    for index in range(int(rng.integers(1, 25))):
        new = [f"b{index}.{k}" for k in range(int(rng.integers(1, 4)))]
        dtypes = [str(rng.choice(["fp32", "fp64", "int64"])) for _ in new]
        specs += [
            BufferSpec(n, int(rng.integers(0, 40)), int(rng.integers(1, 70)), d)
            for n, d in zip(new, dtypes, strict=True)
        ]
        reads = tuple(str(n) for n in rng.choice(known, min(len(known), 2), replace=False)) if known else ()
        steps.append(Step(f"op {index}", reads, tuple(new)))
        known += new
    return specs, steps


@pytest.mark.parametrize("seed", range(150, 190))
def test_no_two_live_buffers_overlap(seed: int) -> None:
    """Fails if live ranges or offsets let a buffer destroy another, or the arena is too small or not aligned."""
    specs, steps = random_program(seed)
    plan = place(specs, steps)
    assert overlaps(plan, steps) == []
    assert all(p.offset % ALIGNMENT == 0 and p.end <= plan.nbytes for p in plan.placements)
    busiest = max(sum(p.spec.nbytes for p in plan.placements if p.first <= i <= p.last) for i in range(len(steps)))
    assert busiest == plan.busiest <= plan.nbytes <= sum(s.nbytes for s in specs)
    assert place(specs, steps) == plan


def test_the_overlap_check_finds_a_planted_overlap() -> None:
    """The property test itself fails when a life is cut short."""
    specs, steps = random_program(163)
    whole = place(specs, steps)
    cut = [Step(s.label, (), s.writes) for s in steps]
    assert whole.nbytes >= place(specs, cut).nbytes
    assert overlaps(place(specs, cut), steps)


def test_rows_are_padded_to_cache_lines() -> None:
    """Fails if a leading dimension is not the next 64 bytes."""
    for dtype, item in (("fp32", 4), ("fp64", 8), ("int64", 8)):
        for cols in (1, 7, 8, 16, 17):
            spec = BufferSpec("x", 3, cols, dtype)
            assert spec.ld * item == -(-cols * item // 64) * 64
            assert spec.nbytes == 3 * spec.ld * item


@pytest.mark.parametrize(
    ("names", "steps", "message"),
    [
        ("a", [Step("one", (), ("a", "b"))], "nothing declares"),
        ("ab", [Step("one", (), ("a",))], "no op uses"),
        ("ab", [Step("one", ("b",), ("a",))], "before anything writes"),
        ("a", [Step("one", ("a",), ("a",))], "before anything writes"),
    ],
)
def test_wrong_programs_are_refused(names: str, steps: list[Step], message: str) -> None:
    """Fails if an op may use what nobody declared, or read what nobody wrote, in place too."""
    with pytest.raises(PlanError, match=message):
        place([BufferSpec(n, 1, 1, "fp32") for n in names], steps)


def test_state_lives_throughout() -> None:
    """Fails if another buffer may take the place of one that outlives its last op."""
    steps = [Step("one", (), ("a",)), Step("two", (), ("s",)), Step("three", (), ("b",))]
    specs = [BufferSpec("a", 1, 1, "fp32"), BufferSpec("s", 1, 1, "fp32", "state"), BufferSpec("b", 1, 1, "fp32")]
    assert {p.spec.name: (p.first, p.last) for p in live_ranges(specs, steps)}["s"] == (0, 2)
    plan = place(specs, steps)
    assert plan["a"].offset == plan["b"].offset != plan["s"].offset
    assert place([], []).nbytes == 0


SHAPES = [(), (16,), (64, 64), (512, 256, 128), (128,) * 5, (256, 16, 256), (40, 40, 40), (1,)]


@pytest.mark.covering(1, rest="slow")
@pytest.mark.parametrize("hidden", SHAPES, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_arena_is_never_more_than_the_papers(hidden: tuple[int, ...], ranks: int, dtype: str) -> None:
    """Fails if a plain gemm-first GCN needs more than MG-GCN's L + 3 buffers (L + 1 on one rank)."""
    rows = 400_003
    counts = part_sizes(rows, ranks)
    for features, classes, aggregated, bias in itertools.product((100, 602), (7, 41), (True, False), (True, False)):
        config = ModelConfig(hidden=hidden, bias=bias)
        # Few nonzeros, and many of A X: X stays as it is.
        nonzeros = None if aggregated else 10
        shape = InputShape(rows=rows, cols=features, nnz=nonzeros, adj_nnz=8 * rows, aggregated_nnz=40 * rows)
        choices = Choices(shape=shape, features="auto", products="gemm-first", precision=dtype)
        values = make_values(NETWORKS["gcn"], config, features, classes, choices)
        assert (values.input.sparse, values.input.aggregated) == (not aggregated, aggregated)
        for rank in {0, ranks - 1}:
            sizes = Sizes(rows={OWNED: counts[rank]}, dtype=dtype, operand=dtype)
            aggregation = BroadcastPlan(rank, counts, (0,) * ranks, (0,) * ranks, True)
            graphs = {"train": values.training, "evaluate": values.evaluation}
            programs = [lower(name, graph, sizes, {WHOLE: aggregation}) for name, graph in graphs.items()]
            limit = max(p.arena.nbytes for p in programs)
            assert limit <= paper_arena_bytes(values.layers, sizes, ranks, max(counts))
            # Panels are no narrower than 16 columns: one class leaves less.
            narrow = 16 * (1 if ranks == 1 else 3) * (max(counts) * (4 if dtype == "fp32" else 8))
            setup = lower_setup(aggregation, sizes, features, panel_width(aggregation, sizes, features, limit))
            assert setup.arena.nbytes <= max(limit, narrow)
            for program in programs:
                steps = [Step(op.label, op.reads, op.writes) for op in program.ops]
                assert overlaps(program.arena, steps) == []
