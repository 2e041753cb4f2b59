"""What learned rows of vertices add to a plan: gradients, moments, the best rows, and the messages of a batch's rows.

V rows of this rank, S rows of a batch's input at most, P ranks, D columns. Needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from mggcn.blocks.block import Stack
from mggcn.blocks.macrobatch import ID_BYTES
from mggcn.config import Config, TrainConfig
from mggcn.memory.arena import ITEM_BYTES, BufferSpec
from mggcn.memory.device import STORAGE
from mggcn.memory.units import human
from mggcn.planning.shape import GraphShape

MOVED_ROWS: Final = 4096
"""Rows of a batch that are moved at a time: their moments stay in the cache between two passes."""
MOVED_COPIES: Final = 6
"""Rows in memory beside each that is moved: itself, its gradient, moments, and what torch computes of them."""
ROW_BYTES: Final = 48
"""Bytes a row of a batch, or one that is asked for, takes in ids, owners, places and their order."""


def row_moments(train: TrainConfig, *, batches: bool) -> tuple[str, ...]:
    """Return the names of what an optimiser keeps of every learned row. batches: whether a step moves some rows alone."""
    if batches:
        return ("exp_avg", "exp_avg_sq") if train.row_optimizer == "adam" else ("sum",)
    return ("exp_avg", "exp_avg_sq") if train.optimizer != "sgd" else ("momentum",) if train.momentum else ()


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnedPlan:
    """What learned rows take on a rank beside the rows themselves, and send in a step.

    bytes_sent: of a batch as large as planned, all of whose rows are other ranks': their numbers there, the rows, which
    come back, and their gradients. bytes_moved: read and written by the optimiser.
    """

    nbytes: int
    bytes_moved: int
    messages: int = 0
    bytes_sent: int = 0


def plan_learned(config: Config, shape: GraphShape, rows: int, stack: Stack | None) -> LearnedPlan | None:
    """Plan the learned rows of a rank with so many vertices; None if a run has none. stack: the blocks of a step."""
    if not config.data.learned:
        return None
    dtype, ranks = STORAGE[config.run.precision], config.run.ranks
    of = BufferSpec("", rows, shape.num_features, dtype)
    # Those of the best validation score, and moments.
    moments = len(row_moments(config.train, batches=stack is not None))
    # A checkpoint takes a copy of all that it saves: rows without their padding; safetensors before 0.6 copies them anyway.
    saved = (2 + moments) * rows * of.cols * ITEM_BYTES[dtype]
    kept, passes = of.nbytes * (1 + moments) + saved, 3 + 2 * moments
    if stack is None:
        return LearnedPlan(nbytes=kept + of.nbytes, bytes_moved=passes * of.nbytes)
    sources = stack.capacities[0].sources
    row, batch = shape.num_features * ITEM_BYTES[dtype], BufferSpec("", sources, shape.num_features, dtype)
    moved = passes * batch.nbytes
    kept += 2 * batch.nbytes + 4 * rows + MOVED_COPIES * min(MOVED_ROWS, sources * ranks) * of.ld * ITEM_BYTES[dtype]
    if ranks == 1:
        return LearnedPlan(nbytes=kept + ROW_BYTES * sources, bytes_moved=moved)
    rooms = room_rows(rows, sources, ranks)
    kept += sum(rooms.values()) * row + (sources + rooms["asked"]) * ROW_BYTES
    sent = 8 * (ranks - 1) + sources * (ID_BYTES + 2 * row)
    return LearnedPlan(nbytes=kept, bytes_moved=moved, messages=4, bytes_sent=sent)


def room_rows(rows: int, sources: int, ranks: int) -> dict[str, int]:
    """Return the most rows of each room for messages on a rank with so many vertices (LearnedRows in train/learned.py).

    A step may read its own rows alone, and the next one none of them. Every rank may ask for any row of this one, of which
    some have the same gradients to add.
    """
    own = min(rows, sources)
    asked = (ranks - 1) * own
    return {"own": own, "there": sources, "asked": asked, "sums": min(rows, asked + own)}


def learned_lines(config: Config, shape: GraphShape, planned: LearnedPlan | None) -> list[str]:
    """Say how learned rows move, and what a step sends of them."""
    if planned is None:
        return []
    how = f"inputs: {shape.num_features:,} learned numbers for each vertex, on the rank that owns it"
    if not config.sample.batch:
        return ["", f"{how}; an epoch moves all, by {config.train.optimizer}"]
    lines = ["", f"{how}; a step moves those that it reads, by {config.train.row_optimizer}"]
    if planned.messages:
        lines.append(
            f"  for each row of another rank a step sends {ID_BYTES} bytes, the row and its gradient: at most "
            f"{human(planned.bytes_sent)} of each rank on average"
        )
    return lines
