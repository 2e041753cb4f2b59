"""Hand-made timelines, and a trace as torch's profiler and a run write it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mggcn.report.timeline import Stretch, Timeline


@dataclass
class Made:
    """What one rank did, times in milliseconds."""

    rank: int
    stretches: list[Stretch] = field(default_factory=list)
    epochs: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)

    def add(self, row: str, start_ms: float, end_ms: float, op: str, *, epoch: int = 1, **more: Any) -> float:
        start_s, end_s = start_ms / 1e3, end_ms / 1e3
        self.stretches.append(
            Stretch(rank=self.rank, row=row, op=op, epoch=epoch, start_s=start_s, end_s=end_s, **more)
        )
        return end_ms

    def epoch(self, number: int, start_ms: float, end_ms: float) -> None:
        self.epochs[self.rank, number] = start_ms / 1e3, end_ms / 1e3


def timeline_of(parts: list[Made]) -> Timeline:
    epochs = {key: span for part in parts for key, span in part.epochs.items()}
    return Timeline(stretches=tuple(s for part in parts for s in part.stretches), epochs=epochs)


Event = dict[str, Any]


def block(name: str, start_ms: float, end_ms: float, rank: int = 0, **args: Any) -> Event:
    """A block of a rank's own thread."""
    return event("user_annotation", name, start_ms, end_ms, rank, 4000 + rank, **args)


def event(cat: str, name: str, start_ms: float, end_ms: float, rank: int, tid: int, **args: Any) -> Event:
    times = {"ts": 1e3 * start_ms, "dur": 1e3 * (end_ms - start_ms)}
    return {"ph": "X", "cat": cat, "name": name, "pid": rank, "tid": tid, **times, "args": args}


def write_trace(folder: Path, events: list[Event], *, in_flight: bool = False, clock: str = "of the machine") -> Path:
    path = folder / "timeline.json"
    other = {"clock": clock, "in flight": in_flight}
    path.write_text(json.dumps({"otherData": other, "traceEvents": events}))
    return path


def staged_epoch(made: Made, ranks: int, epoch: int = 1, begin_ms: float = 0.0, layers: int = 3) -> float:
    """An epoch of a GCN under staged broadcast as on a GPU: messages on a stream of their own. Returns its end."""
    now = begin_ms + 0.02
    for layer in range(1, layers + 1):
        now = made.add("compute", now, now + 0.8, "gemm", epoch=epoch, step=f"linear {layer}",
                       nbytes=90_000_000, flop=10**9)  # fmt: skip
        if layer > 1:
            now = _aggregate(made, ranks, epoch, now + 0.01, f"aggregate {layer}")
    now = made.add("compute", now, now + 0.3, "loss", epoch=epoch, step="loss", nbytes=5_000_000)
    for layer in range(layers, 0, -1):
        if layer > 1:
            now = _aggregate(made, ranks, epoch, now + 0.01, f"aggregate-grad {layer}")
        now = made.add("compute", now, now + 0.5, "gemm", epoch=epoch, step=f"weight-grad {layer}",
                       nbytes=70_000_000, flop=10**9)  # fmt: skip
        if layer > 1:
            where = {"epoch": epoch, "step": f"input-grad {layer}"}
            now = made.add("compute", now, now + 0.4, "gemm", nbytes=50_000_000, flop=10**9, **where)
            now = made.add("compute", now, now + 0.2, "activation-grad", nbytes=60_000_000, **where)
    if ranks > 1:
        now = made.add("communication", now, now + 0.15, "all_reduce", epoch=epoch, nbytes=400_000)
    now = made.add("compute", now + 0.02, now + 0.2, "optimizer", epoch=epoch, step="optimizer")
    made.epoch(epoch, begin_ms, now + 0.05)
    return now + 0.05


def _aggregate(made: Made, ranks: int, epoch: int, now: float, step: str) -> float:
    """Own tile first, then tile after tile while the next block arrives."""
    where = {"epoch": epoch, "step": step}
    arrival = dict.fromkeys(range(ranks), now)
    wire = now
    for root in range(ranks if ranks > 1 else 0):
        wire = made.add("communication", wire, wire + 0.5, "broadcast", stage=root, nbytes=40_000_000, **where)
        arrival[root] = wire
    order = [made.rank, *(r for r in range(ranks) if r != made.rank)]
    for stage in order:
        start = now if stage == made.rank else max(now, arrival[stage])
        cost = 0.7 + 0.15 * ((made.rank + 2 * stage) % 3)
        now = made.add("compute", start, start + cost, "spmm", stage=stage, nbytes=300_000_000, flop=10**8, **where)
    return made.add("compute", now, now + 0.1, "elementwise", nbytes=30_000_000, **where)


def staged_run(ranks: int, epochs: int = 2) -> list[Made]:
    parts = []
    for rank in range(ranks):
        made, now = Made(rank), 0.0
        for epoch in range(1, epochs + 1):
            now = staged_epoch(made, ranks, epoch, now) + 0.5
        parts.append(made)
    return parts
