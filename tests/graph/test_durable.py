"""Folders that appear whole: also where several ranks write the same one at once."""

from __future__ import annotations

import errno
import fcntl
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mggcn.graph import durable
from mggcn.graph.durable import move_folder, new_folder


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


def written(target: Path, content: str) -> None:
    with new_folder(target) as temporary:
        (temporary / "meta.json").write_text(content)
        move_folder(temporary, target, overwrite=True)


def test_a_folder_is_replaced_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a process that is killed on the way could leave no folder of the name."""
    target = tmp_path / "store"
    written(target, "old")
    (tmp_path / "other").mkdir()
    if not durable.exchange(target, tmp_path / "other"):
        pytest.skip("this file system cannot exchange two folders")
    assert not list(target.iterdir())
    assert durable.exchange(target, tmp_path / "other")

    def renamed(*_: object) -> None:
        raise OSError(5, "the old folder was renamed away")

    monkeypatch.setattr(os, "rename", renamed)
    written(target, "new")
    assert (target / "meta.json").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "store"]
    with pytest.raises(FileNotFoundError):
        durable.exchange(target, tmp_path / "nowhere")


@pytest.mark.parametrize("can", [True, False])
def test_the_next_one_removes_what_a_killed_one_left(
    can: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a half-written store stays for ever, or a living process loses its folder, or another's is taken."""
    if not can:
        monkeypatch.setattr(durable, "exchange", lambda *_: False)
    target = tmp_path / "a store[1]"
    for name in (
        ".a store[1].0a1b2c3d.tmp",
        ".a store[1].00000000.old",
        ".other.0a1b2c3d.tmp",
        ".a store[1].notes.tmp",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "indptr.npy").touch()
    with new_folder(target) as living:
        assert not (tmp_path / ".a store[1].0a1b2c3d.tmp").exists()
        assert (tmp_path / ".a store[1].00000000.old").exists()  # the only one that is whole
        written(target, "first")
        written(target, "second")
        assert living.is_dir()
    left = [".a store[1].notes.tmp", ".other.0a1b2c3d.tmp", "a store[1]"]
    assert sorted(path.name for path in tmp_path.iterdir()) == left
    assert (target / "meta.json").read_text() == "second"


def test_without_locks_nothing_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the folder of a process that may be alive goes, or a file system without locks is refused."""

    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    (tmp_path / ".store.0a1b2c3d.tmp").mkdir()
    monkeypatch.setattr(fcntl, "flock", unsupported)
    written(tmp_path / "store", "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".store.0a1b2c3d.tmp", "store"]
