"""Folders that appear whole: also where several ranks write the same one at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mggcn.graph.durable import move_folder


def test_ranks_may_write_the_same_folder_at_once(tmp_path: Path) -> None:
    """Fails if two ranks that keep the same partition get in each other's way, or leave more than the one folder."""

    def write(number: int) -> None:
        temporary = tmp_path / f".cut.{number}.tmp"
        temporary.mkdir()
        (temporary / "meta.json").write_text(str(number))
        move_folder(temporary, tmp_path / "cut", overwrite=True)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(400)))
    assert [path.name for path in tmp_path.iterdir()] == ["cut"]
    assert (tmp_path / "cut" / "meta.json").read_text() in {str(number) for number in range(400)}


def test_a_folder_in_the_way_stays(tmp_path: Path) -> None:
    """Fails if a folder is replaced without being asked to."""
    for name in ("new", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    with pytest.raises(OSError, match="not empty"):
        move_folder(tmp_path / "new", tmp_path / "there", overwrite=False)
    assert (tmp_path / "there" / "there").exists()
