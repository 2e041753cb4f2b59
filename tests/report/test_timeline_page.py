"""timeline_page.py: a run with a timeline gets its pictures and figures on the page."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import pytest

from mggcn.errors import RunError
from mggcn.report import write_report
from mggcn.report.timeline_page import timeline_section
from tests.report.run_folders import HOSTILE, write_run
from tests.report.test_timeline import staged
from tests.report.timelines import Made, timeline_of, write_trace


@pytest.mark.full
@pytest.mark.covering(0)
@pytest.mark.parametrize(("ranks", "names"), [(1, ["breakdown", "timeline"]), (2, ["breakdown", "timeline", "stages"])])
def test_a_report_shows_the_timeline(ranks: int, names: list[str], tmp_path: Path) -> None:
    """Fails if a picture is not drawn or not on the page, or one rank is said to overlap something."""
    run = write_run(tmp_path / "run", ranks=ranks, epochs=3)
    events = [one for rank in range(ranks) for one in staged(rank) if ranks > 1 or "message" not in one["name"]]
    write_trace(run, events, in_flight=ranks > 1)
    paths = write_report(run)
    pictures = ["curves", "memory", *["tiles"][: ranks - 1], *names]
    assert [path.name for path in paths[:-1]] == [f"{name}.png" for name in pictures]
    page = paths[-1].read_text(encoding="utf-8")
    images = [base64.b64decode(data) for data in re.findall(r"data:image/png;base64,([^\"]+)", page)]
    assert images == [path.read_bytes() for path in paths[1:-1]]  # curves are drawn on the page itself
    assert "<h2>Timeline</h2>" in page
    shares = re.findall(r"([\d.]+) %</td></tr>", page)
    assert shares == ([] if ranks == 1 else ["18.2", "20.0"])


def test_a_run_without_a_timeline_has_no_section(tmp_path: Path) -> None:
    """Fails if every report claims a timeline."""
    paths = write_report(write_run(tmp_path / "run", epochs=3))
    assert "Timeline" not in paths[-1].read_text(encoding="utf-8")


def test_a_damaged_timeline_is_named(tmp_path: Path) -> None:
    """Fails if a report silently leaves out what it cannot read."""
    run = write_run(tmp_path / "run", epochs=3)
    (run / "timeline.json").write_text("{}")
    with pytest.raises(RunError, match=r"timeline\.json is not a timeline"):
        write_report(run)


def test_figures_are_those_of_an_average_epoch() -> None:
    """Fails if calls, times, bytes or rates are of all epochs, or an unmeasurable rate is shown."""
    made = Made(0)
    for epoch, start in ((1, 0.0), (2, 100.0)):
        made.epoch(epoch, start, start + 20)
        made.add("compute", start, start + 4, "spmm", epoch=epoch, nbytes=8 * 2**20, flop=2 * 10**9)
        made.add("communication", start + 2, start + 10, "broadcast", epoch=epoch, nbytes=2**20, measured="in flight")
        made.add("compute", start + 10, start + 10.5, HOSTILE, epoch=epoch, nbytes=1)
    html = "".join(timeline_section(timeline_of([made]), []))
    rows = [re.findall(r"<td[^>]*>([^<]*)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", html)]
    assert ["0", "20 ms", "4.5 ms", "8 ms", "25.0 %"] in rows
    assert ["spmm", "1", "4 ms", "8.00 MiB", "2.1", "500"] in rows
    assert ["broadcast", "1", "8 ms", "1.00 MiB", "-", "-"] in rows
    assert "in flight" in html
    assert "<script>" not in html
