"""The parts of the ranks become one trace, on one axis of time."""

from __future__ import annotations

from pathlib import Path

import pytest

from mggcn.errors import RunError
from mggcn.trace.trace_json import FILE, Part, complete_event, epoch_event, merge_parts, write_part
from tests.trace.recorded import events_of


def made_part(rank: int, boot: str, clock_s: float) -> Part:
    args = {"op": "spmm", "epoch": 1, "bytes": 4000, "flop": 0}
    events = [complete_event(rank, 0, 0.001, 0.003, args), epoch_event(rank, 1, 0.0, 0.004)]
    return Part(rank, boot, clock_s, 0, events)


@pytest.mark.parametrize(("boots", "shift"), [(("a", "a"), 250.0), (("a", "b"), 0.0)])
def test_ranks_share_one_axis_of_time(boots: tuple[str, str], shift: float, tmp_path: Path) -> None:
    """Fails if the clocks of two machines are compared, or those of one are not."""
    for rank in (0, 1):
        write_part(tmp_path, made_part(rank, boots[rank], 77.0 + 250e-6 * rank))
    merge_parts(tmp_path, 2, ("compute", "communication"))
    assert [e["ts"] for e in events_of(tmp_path)] == [1000.0, 1000.0 + shift]
    assert [e["ts"] for e in events_of(tmp_path, "i")] == [0.0, shift]
    assert [e["args"]["GB/s"] for e in events_of(tmp_path)] == [0.002, 0.002]


def test_a_part_that_cannot_be_written_or_read_is_named(tmp_path: Path) -> None:
    """Fails if a full disk or a rank that wrote nothing shows as a traceback."""
    with pytest.raises(RunError, match=r"timeline-1\.json could not be written: No such file"):
        write_part(tmp_path / "absent", made_part(1, "a", 0.0))
    write_part(tmp_path, made_part(0, "a", 0.0))
    with pytest.raises(RunError, match=r"timeline-1\.json, which a rank wrote .* cannot be read"):
        merge_parts(tmp_path, 2, ("compute", "communication"))
    assert not (tmp_path / FILE).exists()
