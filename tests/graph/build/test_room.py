"""What tells a source from another one of its name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mggcn.graph.build.room import fingerprint


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("changed", ["edited in place", "replaced", "nothing"])
def test_a_change_with_size_and_time_as_before_is_noticed(tmp_path: Path, changed: str, inside: bool) -> None:
    """Fails if a source whose size and time of change are set back is taken for the one that was read."""
    folder = tmp_path / "source"
    folder.mkdir()
    (path := folder / "edges.txt").write_text("0 1\n")
    source, times = folder if inside else path, path.stat()
    before = fingerprint(source)
    if changed == "edited in place":
        path.write_text("1 0\n")
    elif changed == "replaced":
        (other := tmp_path / "other").write_text("1 0\n")
        os.replace(other, path)
    if changed != "nothing":
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert (fingerprint(source) == before) == (changed == "nothing")
