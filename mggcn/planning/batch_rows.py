"""Rows of the input that batches read of other ranks: what fetching them takes, planned, and counted on drawn batches.

M steps, P ranks, N vertices, D features, B batches of a macrobatch. Needs no torch. Sources: BatchGNN, eq. 2 to 5; DistDGL,
figure 10.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from mggcn.blocks.block import Stack
from mggcn.blocks.letters import WORD, AnswerPlan, lead, num_stages, num_words, request_words, row_request_words
from mggcn.blocks.macrobatch import EXCHANGES, PART_COUNTS, FetchPlan, Macrobatches, bytes_fetched, cache_bytes
from mggcn.blocks.slot import SlotPlan
from mggcn.config import Config
from mggcn.memory.arena import ITEM_BYTES
from mggcn.memory.device import STORAGE
from mggcn.memory.units import human
from mggcn.planning.batches import DRAWN_BYTES, ORDER_BYTES, bound_stack, cache_line, slot_plan, steps_of
from mggcn.planning.drawn_edges import edge_bytes
from mggcn.planning.shape import GraphShape

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadRows:
    """What the batches of the first M steps of a run read, int64 (M, P): of each step, on each rank.

    num_vertices, steps: of the graph, and of an epoch, of which M are drawn. inner: rows for which the last hop draws, V of
    eq. 4; read: rows of the input, inner ones and new ones; remote: those of them that others own, but for cached ones;
    served: rows that others read of a rank's; entries: edges of all hops, last: of the last one.
    fetched: by B, rows that a rank fetches for each macrobatch, (M / B rounded up, P); fetched_from: of each owner, an axis
    more, P. asked, told (M, P, L, P): vertices around which a rank has each owner draw in a hop, and the edges of these.
    """

    num_vertices: int
    steps: int
    inner: Counts
    read: Counts
    remote: Counts
    served: Counts
    entries: Counts
    last: Counts
    fetched: Mapping[int, Counts]
    fetched_from: Mapping[int, Counts] = field(default_factory=dict)
    asked: Counts = field(default_factory=lambda: np.zeros((0, 0, 0, 0), np.int64))
    told: Counts = field(default_factory=lambda: np.zeros((0, 0, 0, 0), np.int64))

    @property
    def ranks(self) -> int:
        return int(self.read.shape[1])

    @property
    def drawn(self) -> int:
        """The steps that were drawn, M."""
        return int(self.read.shape[0])

    @property
    def bound(self) -> int:
        """The most that one macrobatch fetches: every row once on every rank that lacks it, (P - 1) N."""
        return (self.ranks - 1) * self.num_vertices

    def num_fetched(self, batches: int) -> int:
        """Return the rows of all ranks that macrobatches of so many batches fetch: counts of eq. 2 for 1, else of eq. 3."""
        return int(self.fetched[batches].sum())

    def bytes_sent(self, batches: int, row_bytes: int) -> int:
        """Return the bytes that all ranks send for them."""
        return bytes_fetched(len(self.fetched[batches]), self.num_fetched(batches), row_bytes, self.ranks)

    @property
    def cached(self) -> tuple[int, int, int]:
        """What a cache of sums depends on, as `cache_bytes` takes it, added up over batches."""
        return int(self.inner.sum()), int((self.read - self.inner).sum()), int(self.last.sum())

    def letters(self, batches: int, row_bytes: int, answers: AnswerPlan) -> list[Counts]:
        """Return the words of letters that ranks send each other if owners draw edges, stage by stage: of each macrobatch
        (M / B rounded up, P, P), from rank to rank.
        """
        firsts, others = np.arange(0, self.drawn, batches), ~np.eye(self.ranks, dtype=np.bool_)
        steps = np.diff(np.append(firsts, self.drawn))[:, None, None, None]
        requests = request_words(steps, np.add.reduceat(self.asked, firsts))
        told, rows = np.add.reduceat(answers.words(self.asked, self.told), firsts), self.fetched_from[batches]
        # Of an axis of who asks and one of who owns; owners answer.
        found = [
            of for hop in range(self.asked.shape[2]) for of in (requests[:, :, hop], told[:, :, hop].swapaxes(1, 2))
        ]
        found += [row_request_words(PART_COUNTS, rows), num_words(rows * row_bytes).swapaxes(1, 2)]
        return [of * others for of in found]

    def letter_bytes(self, batches: int, row_bytes: int, answers: AnswerPlan) -> int:
        """Return the bytes that all ranks send if owners draw edges, for macrobatches of so many batches: letters, and what
        announces them.
        """
        letters = self.letters(batches, row_bytes, answers)
        announced = len(letters) * len(letters[0]) * self.ranks * (self.ranks - 1)
        return WORD * int(announced + sum(of.sum() for of in letters))

    def to_dict(self, row_bytes: int, *, sums: bool = True) -> dict[str, Any]:
        """Return what `read_lines` says as plain values, for JSON. Counts are those of all ranks and drawn steps."""
        names = "inner", "read", "remote", "served", "entries", "last"
        without, cached = cache_bytes(*self.cached, row_bytes) if sums else (None, None)
        return {
            "steps": self.steps,
            "drawn_steps": self.drawn,
            **{name: int(getattr(self, name).sum()) for name in names},
            "balance": {name: balance(getattr(self, name)) for name in ("read", "entries", "served")},
            "fetched": [
                {
                    "batches": batches,
                    "relays": len(self.fetched[batches]),
                    "rows": self.num_fetched(batches),
                    "bytes_sent": self.bytes_sent(batches, row_bytes),
                }
                for batches in sorted(self.fetched)
            ],
            "most_rows": self.bound,
            "bytes_without_sums": without,
            "bytes_with_sums": cached,
        }


def balance(counts: Counts) -> float:
    """Return the largest rank's count over the mean of the ranks, added up over steps: what a step waits for."""
    return float(counts.max(1).sum() / max(counts.mean(1).sum(), 1e-300))


def row_bytes_of(config: Config, num_features: int) -> int:
    """Return the bytes of a row on its way, in the type of activations."""
    return ITEM_BYTES[STORAGE[config.run.precision]] * num_features


def read_lines(rows: ReadRows, row_bytes: int, *, sums: bool = True, answers: AnswerPlan | None = None) -> list[str]:
    """Describe the rows that batches read of other ranks, by BatchGNN's equations, and whether fewer relays or a cache of
    sums would pay. sums: whether all hops were drawn, so that a cache has something to save. answers:
    what owners tell of the edges that they draw, if they do.
    """
    few, whole = rows.num_fetched(1), max(rows.fetched)
    of = f"{rows.drawn:,} of an epoch's {rows.steps:,} steps" if rows.drawn < rows.steps else f"{rows.steps:,} steps"
    lines = [
        f"rows of other ranks that batches read, counted on {of} of {rows.ranks} ranks: "
        f"{rows.remote.mean():,.0f} of {rows.read.mean():,.0f} rows of the input of a rank's batch; the largest rank has "
        f"{balance(rows.read):.3f} times the mean in rows, {balance(rows.entries):.3f} in edges, and sends "
        f"{balance(rows.served):.3f} times"
    ]
    for batches in sorted(rows.fetched):
        fetched, relays = rows.num_fetched(batches), len(rows.fetched[batches])
        name = "BatchGNN eq. 2, batch by batch" if batches == 1 else f"BatchGNN eq. 3, macrobatches of {batches:,}"
        lines.append(
            f"  {name}: {fetched:,} rows in {relays:,} relay{'s' * (relays > 1)}, "
            f"{human(rows.bytes_sent(batches, row_bytes))} sent by all"
        )
    least = rows.num_fetched(whole)
    saved = few / max(least, 1)
    pays = (
        f"pay: all {whole:,} together send {saved:.2f} times fewer rows"
        if least < few
        else "do not pay: no row is read twice"
    )
    lines.append(f"  macrobatches {pays}; the bound is (P - 1) N, {rows.bound:,} rows of one relay")
    if answers is not None:
        lines += _letter_lines(rows, row_bytes, answers)
    return [*lines, *([f"  {cache_line(*rows.cached, row_bytes)}"] if sums else [])]


def _letter_lines(rows: ReadRows, row_bytes: int, answers: AnswerPlan) -> list[str]:
    """Say what owners are asked to draw, and what they answer."""
    others = ~np.eye(rows.ranks, dtype=np.bool_)
    far, edges = (int((counts.sum((0, 2)) * others).sum()) for counts in (rows.asked, rows.told))
    lines = [
        f"  edges drawn by owners: {far:,} of {rows.asked.sum():,} vertices are other ranks', which send {edges:,} of "
        f"{rows.told.sum():,} edges"
    ]
    for batches in sorted(rows.fetched):
        sent = rows.letter_bytes(batches, row_bytes, answers)
        many = "step by step" if batches == 1 else f"macrobatches of {batches:,}"
        lines.append(f"    {many}: {human(sent)} sent by all for edges and rows, {human(sent // rows.drawn)} a step")
    return lines


def fetch_plan(config: Config, shape: GraphShape, owned: int) -> FetchPlan:
    """Return what a rank with so many vertices holds of other ranks' rows, if it fetches those of its batches.

    A macrobatch reads at most all that others own, and what fan-outs allow: also a step that comes in halves.
    """
    macros, stack = Macrobatches(steps_of(config, shape), config.sample.macro), bound_stack(config, shape)
    others, ahead = shape.num_vertices - owned, max(config.sample.ahead, 0)
    cached = min(config.sample.cache_rows, others)
    return FetchPlan(
        num_vertices=shape.num_vertices,
        ranks=config.run.ranks,
        owned=owned,
        row_bytes=row_bytes_of(config, shape.num_features),
        rows=min(others - cached, macros.batches * stack.capacities[0].sources),
        # Rows of waves are kept when all of a macrobatch have come, others where they arrive.
        at_once=macros.at_once(ahead + (1 if config.draws_at_owners else EXCHANGES) * (ahead > 0)),
        cached=cached,
    )


def relay_slots(config: Config, shape: GraphShape, stack: Stack) -> SlotPlan:
    """Return what the memory of a batch depends on of which only the input's vertices are read."""
    return dataclasses.replace(slot_plan(config, shape, stack, 0), places=False)


def fetched_bytes(config: Config, shape: GraphShape, stack: Stack, owned: int) -> int:
    """Return the bytes of a rank for rows that are fetched: held, on their way, and drawn once more to be found."""
    training = ORDER_BYTES + DRAWN_BYTES * (config.sample.deal == "by-class")
    order = training * (shape.num_training or shape.num_vertices)
    if config.draws_at_owners:
        found = edge_bytes(config, shape, stack, owned)
    else:
        found = relay_slots(config, shape, stack).nbytes
    return fetch_plan(config, shape, owned).nbytes + order + found


def fetch_lines(config: Config, shape: GraphShape, owned: int, nbytes: int) -> list[str]:
    """Say how rows of other ranks come to a rank with so many vertices; nothing where every rank reads all."""
    if not config.fetches_rows:
        return []
    plan, macros = fetch_plan(config, shape, owned), Macrobatches(steps_of(config, shape), config.sample.macro)
    many = f"{macros.batches:,} steps together" if macros.batches > 1 else "each step"
    cached = f"; {plan.cached:,} rows are kept throughout" if plan.cached else ""
    what, waves = "features", ""
    if config.draws_at_owners:
        hops = len(config.sample.fanout)
        early = lead(num_stages(hops), config.sample.ahead)
        what, waves = (
            "edges and features",
            (
                f", and edges of steps up to {early} messages ahead, one message a step"
                if early
                else f", and edges of a step, {2 * num_stages(hops)} messages"
            ),
        )
    return [
        f"  a rank reads the {what} of its own vertices alone; those of others come from their owners, for "
        f"{many}: at most {plan.rows:,} rows of {human(plan.row_bytes)} in each of {macros.per_epoch:,} relays an "
        f"epoch{cached}",
        f"  they take {human(nbytes)} of a rank, with rows of {plan.at_once} relay{'s' * (plan.at_once > 1)} at a "
        f"time{waves}; --explain counts the bytes that they send, on drawn batches",
    ]
