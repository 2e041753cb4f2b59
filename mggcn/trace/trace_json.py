"""timeline.json: the marks of all ranks as a Chrome trace, which chrome://tracing and Perfetto open.

A process is a rank, its threads are the rows "compute" and "communication". Complete events ("ph": "X") carry in `args`:
op, epoch (from 1), step, layer, stage (owner of the tile), bytes, GB/s, flop, GFLOP/s. Messages carry `received` too, and
`measured`: "on stream" (while the comm stream worked) or "in flight" (from the call, or the arrival before, to the end of
the wait, which is no measure of a rate). A message that moved in several parts has its bytes in the first and no rate.
An instant event opens every epoch and carries its seconds. Needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mggcn.errors import RunError
from mggcn.files import LARGEST_HISTORY, read_object, reason, write_text

Event = dict[str, Any]

FILE = "timeline.json"


@dataclass(frozen=True, slots=True)
class Part:
    """The recording of one rank; times of its events in microseconds since its own origin.

    boot: the boot of the machine that it runs on, within which clock_s, the host's clock at the origin, has one meaning.
    """

    rank: int
    boot: str
    clock_s: float
    lost: int
    events: list[Event]


def complete_event(rank: int, row: int, start_s: float, end_s: float, args: Mapping[str, Any]) -> Event:
    """Return a stretch of a row, with the rates that follow from `args`; bytes and flop of 0 are left out."""
    start, end = round(1e6 * start_s, 3), round(1e6 * end_s, 3)
    shown = {key: value for key, value in args.items() if value or key not in ("bytes", "flop")}
    timed = end > start and "parts" not in args and args.get("measured") != "in flight"
    for key, rate in (("bytes", "GB/s"), ("flop", "GFLOP/s")):
        if key in shown and timed:
            shown[rate] = round(shown[key] / (end - start) / 1e3, 3)
    stage = f" {args['stage']}" if "stage" in args else ""
    timing = {"ts": start, "dur": round(end - start, 3)}
    head = {"ph": "X", "name": f"{args['op']}{stage}", "cat": args.get("step") or "epoch"}
    return {**head, "pid": rank, "tid": row, **timing, "args": shown}


def epoch_event(rank: int, epoch: int, start_s: float, end_s: float) -> Event:
    """Return the instant at which an epoch begins, with its length."""
    head = {"ph": "i", "s": "p", "name": f"epoch {epoch}", "pid": rank, "tid": 0, "ts": round(1e6 * start_s, 3)}
    return {**head, "args": {"epoch": epoch, "seconds": round(end_s - start_s, 9)}}


def boot_id() -> str:
    """Return what is the same for all processes of a machine, in containers too, until it starts again."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def write_part(folder: Path, part: Part) -> None:
    """Write what one rank recorded, for `merge_parts`. Raises: RunError if it cannot."""
    _replace(_part_path(folder, part.rank), json.dumps(asdict(part)))


def merge_parts(folder: Path, ranks: int, rows: Sequence[str]) -> Path:
    """Join the parts of all ranks into timeline.json on one axis of time, and remove them. Raises: RunError.

    On one machine the ranks share its clock. Ranks of several machines are aligned at their origins, which lie after a
    barrier: as exact as that lets them go at one time.
    """
    parts = [_read_part(_part_path(folder, rank)) for rank in range(ranks)]
    shared = len({part.boot for part in parts}) == 1
    first_s = min(part.clock_s for part in parts)
    events: list[Event] = []
    for part in parts:
        events += _names(part.rank, rows)
        shift = 1e6 * (part.clock_s - first_s) if shared else 0.0
        events += [event | {"ts": round(event["ts"] + shift, 3)} for event in part.events]
    lost = {str(part.rank): part.lost for part in parts if part.lost}
    other = {"clock": "of the machine" if shared else "aligned at a barrier", "lost": lost}
    path = folder / FILE
    _replace(path, _render(events, other))
    for rank in range(ranks):
        _part_path(folder, rank).unlink()
    return path


def _names(rank: int, rows: Sequence[str]) -> Iterable[Event]:
    head = {"ph": "M", "pid": rank}
    yield {**head, "name": "process_name", "tid": 0, "args": {"name": f"rank {rank}"}}
    yield {**head, "name": "process_sort_index", "tid": 0, "args": {"sort_index": rank}}
    for number, row in enumerate(rows):
        yield {**head, "name": "thread_name", "tid": number, "args": {"name": row}}
        yield {**head, "name": "thread_sort_index", "tid": number, "args": {"sort_index": number}}


def _render(events: Iterable[Event], other: Mapping[str, Any]) -> str:
    """One event a line, so that grep and diff are of use."""
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    return f'{{"displayTimeUnit":"ms","otherData":{json.dumps(other)},"traceEvents":[\n{lines}\n]}}\n'


def _part_path(folder: Path, rank: int) -> Path:
    return folder / f"timeline-{rank}.json"


def _read_part(path: Path) -> Part:
    try:
        return Part(**read_object(path, LARGEST_HISTORY))
    except (OSError, ValueError, TypeError) as error:
        raise RunError(f"{path}, which a rank wrote for {FILE}, cannot be read: {reason(error)}") from error


def _replace(path: Path, text: str) -> None:
    """Write a file whole: a reader sees the old one or the new one."""
    try:
        write_text(path, text)
    except OSError as error:
        raise RunError(f"{path} could not be written: {error.strerror}; free space and run again") from error
