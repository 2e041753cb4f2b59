"""Plots, memory map and one HTML page about a run; `mggcn doctor`."""

from __future__ import annotations

from pathlib import Path


def write_report(run: Path) -> list[Path]:
    """Write `run/report/{curves,memory,tiles}.png` and the self-contained `run/report/index.html`; return their paths.

    A run that recorded a timeline gets `{breakdown,timeline,stages}.png` too, the last on several ranks only. A run that
    was interrupted gets what its history and plan hold, with a note.
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
    timeline = read_timeline(recorded) if recorded.is_file() else None
    folder = run / "report"
    try:
        folder.mkdir(exist_ok=True)
        images = [
            draw_curves(record, folder / "curves.png"),
            draw_memory(record.plan, folder / "memory.png"),
            draw_tiles(record.plan, folder / "tiles.png"),
        ]
        moments = draw_timeline(timeline, folder) if timeline else []
        section = timeline_section(timeline, moments) if timeline else ()
        return [*images, *moments, write_page(record, images, folder / "index.html", section)]
    except OSError as error:
        raise RunError(f"cannot write the report into {folder}: {error}") from error
