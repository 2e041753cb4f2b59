"""The timeline on the page: its pictures, sums by kind of op, and how much communication is hidden under computation."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from mggcn.report.breakdown import draw_breakdown
from mggcn.report.busy import Total, breakdown, overlap, totals
from mggcn.report.figure import format_bytes, format_count
from mggcn.report.gantt import draw_epoch, draw_stages
from mggcn.report.markup import details, escape, image, table
from mggcn.report.timeline import COMMUNICATION, COMPUTE, Timeline

_HOW = (
    "Recorded by --timeline with torch's profiler, and without repeating whole epochs as the device might: a small epoch "
    "takes longer than without. Bytes and FLOP are those of the plan, with the padding of rows; a sparse product reads one "
    "row for each nonzero, whatever the caches save."
)
_IN_FLIGHT = (
    "The transport moves data on threads of its own: its messages are shown in flight, from the call or the arrival before "
    "to the end of the wait, which is longer than they move."
)


def draw_timeline(timeline: Timeline, folder: Path) -> list[Path]:
    """Write breakdown.png, timeline.png and, if tiles were multiplied in stages, stages.png; return their paths."""
    drawn = (
        draw_breakdown(timeline, folder / "breakdown.png"),
        draw_epoch(timeline, folder / "timeline.png"),
        draw_stages(timeline, folder / "stages.png"),
    )
    return [path for path in drawn if path is not None]


def timeline_section(timeline: Timeline, images: Iterable[Path]) -> Iterable[str]:
    """Return the timeline's section of the report as HTML."""
    texts = {
        "breakdown.png": "time of an epoch by kind of op and rank",
        "timeline.png": "every op of one epoch by rank and stream",
        "stages.png": "the stages of the longest aggregation by rank and stream",
    }
    yield "<h2>Timeline</h2>"
    yield f'<p class="under">{escape(_how(timeline))}</p>'
    yield from (f'<p class="note">{escape(note)}</p>' for note in timeline.notes)
    yield from (image(path, texts[path.name]) for path in images)
    yield _ranks(timeline)
    for rank in timeline.ranks:
        body = _totals(totals(timeline, rank))
        yield body if len(timeline.ranks) == 1 else details(f"Kinds of op on rank {rank}", body)


def _how(timeline: Timeline) -> str:
    waited = any(s.measured == "in flight" for s in timeline.stretches)
    return f"{_HOW} {_IN_FLIGHT}" if waited else _HOW


def _ranks(timeline: Timeline) -> str:
    """One row for each rank: the length of an epoch, the time spent computing and moving data, and their overlap."""
    shares, kinds = overlap(timeline), breakdown(timeline)
    epochs = len(timeline.common_epochs)
    rows = []
    for rank in timeline.ranks:
        busy = (sum(s.seconds for s in timeline.of(rank, row)) / epochs for row in (COMPUTE, COMMUNICATION))
        share = shares[rank]
        under = "-" if share is None else f"{100 * share:.1f} %"
        rows.append((rank, *map(_duration, (sum(kinds[rank].values()), *busy)), under))
    head = ("rank", "epoch", "computing", "communicating", "communication under computation")
    return table(head, rows, numeric=range(len(head)))


def _totals(rows: Iterable[Total]) -> str:
    head = ("per epoch", "calls", "time", "moved", "GB/s", "GFLOP/s")
    lines = [
        (
            total.op,
            f"{total.calls:g}",
            _duration(total.seconds),
            format_bytes(total.nbytes) if total.nbytes else "-",
            _rate(total.nbytes, total),
            _rate(total.flop, total),
        )
        for total in rows
    ]
    return table(head, lines, numeric=range(1, len(head)))


def _rate(amount: float, total: Total) -> str:
    """Amount per second in units of 10^9."""
    if not (amount and total.timed and total.seconds):
        return "-"
    rate = amount / total.seconds / 1e9
    return format_count(rate) if rate >= 1000 else f"{rate:.3g}"


def _duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} µs"
