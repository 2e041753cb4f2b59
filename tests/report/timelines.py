"""Hand-made timelines, written as a run writes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mggcn.trace.trace_json import Event, Part, complete_event, epoch_event, merge_parts, write_part

ROWS = ("compute", "communication")


@dataclass
class Made:
    """The events of one rank, times in milliseconds."""

    rank: int
    events: list[Event] = field(default_factory=list)
    clock_s: float = 0.0
    boot: str = "one"
    lost: int = 0

    def add(self, row: str, start_ms: float, end_ms: float, op: str, **args: Any) -> float:
        args = {"op": op, "epoch": 1, **args}
        self.events.append(complete_event(self.rank, ROWS.index(row), start_ms / 1e3, end_ms / 1e3, args))
        return end_ms

    def epoch(self, number: int, start_ms: float, end_ms: float) -> None:
        self.events.append(epoch_event(self.rank, number, start_ms / 1e3, end_ms / 1e3))


def write_timeline(folder: Path, parts: list[Made]) -> Path:
    for part in parts:
        write_part(folder, Part(part.rank, part.boot, part.clock_s, part.lost, part.events))
    return merge_parts(folder, len(parts), ROWS)


def staged_epoch(made: Made, ranks: int, epoch: int = 1, begin_ms: float = 0.0, layers: int = 3) -> float:
    """An epoch of a GCN under staged broadcast as on a GPU: messages on a stream of their own. Returns its end."""
    now = begin_ms + 0.02
    for layer in range(1, layers + 1):
        now = made.add("compute", now, now + 0.8, "gemm", epoch=epoch, step=f"linear {layer}", layer=layer,
                       bytes=90_000_000, flop=10**9)  # fmt: skip
        if layer > 1:
            now = _aggregate(made, ranks, epoch, now + 0.01, f"aggregate {layer}", layer)
    now = made.add("compute", now, now + 0.3, "loss", epoch=epoch, step="loss", bytes=5_000_000)
    for layer in range(layers, 0, -1):
        if layer > 1:
            now = _aggregate(made, ranks, epoch, now + 0.01, f"aggregate-grad {layer}", layer)
        now = made.add("compute", now, now + 0.5, "gemm", epoch=epoch, step=f"weight-grad {layer}", layer=layer,
                       bytes=70_000_000, flop=10**9)  # fmt: skip
        if layer > 1:
            where = {"epoch": epoch, "step": f"input-grad {layer}", "layer": layer}
            now = made.add("compute", now, now + 0.4, "gemm", bytes=50_000_000, flop=10**9, **where)
            now = made.add("compute", now, now + 0.2, "activation-grad", bytes=60_000_000, **where)
    if ranks > 1:
        now = made.add("communication", now, now + 0.15, "all_reduce", epoch=epoch, bytes=400_000, measured="on stream")
    now = made.add("compute", now + 0.02, now + 0.2, "optimizer", epoch=epoch, step="optimizer")
    made.epoch(epoch, begin_ms, now + 0.05)
    return now + 0.05


def _aggregate(made: Made, ranks: int, epoch: int, now: float, step: str, layer: int) -> float:
    """Own tile first, then tile after tile while the next block arrives."""
    where = {"epoch": epoch, "step": step, "layer": layer}
    arrival = dict.fromkeys(range(ranks), now)
    wire = now
    for root in range(ranks if ranks > 1 else 0):
        wire = made.add("communication", wire, wire + 0.5, "broadcast", stage=root, bytes=40_000_000,
                        measured="on stream", **where)  # fmt: skip
        arrival[root] = wire
    order = [made.rank, *(r for r in range(ranks) if r != made.rank)]
    for stage in order:
        start = now if stage == made.rank else max(now, arrival[stage])
        cost = 0.7 + 0.15 * ((made.rank + 2 * stage) % 3)
        now = made.add("compute", start, start + cost, "spmm", stage=stage, bytes=300_000_000, flop=10**8, **where)
    return made.add("compute", now, now + 0.1, "epilogue", bytes=30_000_000, **where)


def staged_run(ranks: int, epochs: int = 2) -> list[Made]:
    parts = []
    for rank in range(ranks):
        made, now = Made(rank), 0.0
        for epoch in range(1, epochs + 1):
            now = staged_epoch(made, ranks, epoch, now) + 0.5
        parts.append(made)
    return parts
