"""Plots, memory map and one HTML page about a run, a sweep or several runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def write_report(run: Path) -> list[Path]:
    """Write `run/report/{curves,memory}.png` and the self-contained `run/report/index.html`; return their paths.

    A module of one's own has no memory to show. A run on several ranks gets `tiles.png` too. One that recorded a timeline
    gets `{breakdown,timeline,stages}.png`, the last on several ranks only. One that was interrupted gets what its history
    and plan hold, with a note.
    Raises: RunError naming the file or key that is missing or damaged; BackendError without matplotlib.
    """
    from mggcn.errors import RunError
    from mggcn.report.curves import draw_curves
    from mggcn.report.figure import require_matplotlib
    from mggcn.report.memory import draw_memory
    from mggcn.report.page import write_page
    from mggcn.report.run_folder import read_run
    from mggcn.report.tiles import draw_tiles
    from mggcn.report.timeline import read_timeline
    from mggcn.report.timeline_page import draw_timeline, timeline_section

    require_matplotlib()
    record = read_run(run)
    recorded = run / "timeline.json"
    timeline = read_timeline(recorded) if recorded.exists() else None
    folder = run / "report"
    try:
        folder.mkdir(exist_ok=True)
        images = {"curves": draw_curves(record, folder / "curves.png")}
        if "module" not in record.plan:  # whose memory is torch's, and not planned
            images["memory"] = draw_memory(record.plan, folder / "memory.png")
        if record.plan["ranks"] > 1:
            images["tiles"] = draw_tiles(record.plan, folder / "tiles.png")
        moments = draw_timeline(timeline, folder) if timeline else []
        section = timeline_section(timeline, moments) if timeline else ()
        return [*images.values(), *moments, write_page(record, images, folder / "index.html", section)]
    except OSError as error:
        raise RunError(f"cannot write the report into {folder}: {error}") from error


def write_reports(runs: Sequence[Path], out: Path | None = None) -> list[Path]:
    """Write the report of a run or a sweep, or the page that compares several runs; return paths.

    out: the page of several runs, by default comparison.html in the folder that they have in common.
    Raises: as `write_report`.
    """
    import os

    from mggcn.report.compare import write_comparison, write_sweep_page
    from mggcn.runs.sweep import read_sweep
    from mggcn.runs.sweep_folder import FILE

    if len(runs) > 1:
        common = Path(os.path.commonpath([run.resolve().parent for run in runs]))
        return [write_comparison(runs, out or common / "comparison.html")]
    if (runs[0] / FILE).is_file():
        return [write_sweep_page(read_sweep(runs[0])[0], runs[0] / "report" / "index.html")]
    return write_report(runs[0])
