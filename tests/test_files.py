"""The one way to read small files, and the one way to write files."""

from __future__ import annotations

import ast
import fcntl
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mggcn
from mggcn import files
from mggcn.errors import one_line, printable, shown
from tests.planted import DAMAGE, plant

READERS: dict[str, Callable[[Path], Any]] = {
    "bytes": files.read_bytes,
    "text": files.read_text,
    "json": files.read_json,
    "object": files.read_object,
    "toml": files.read_toml,
}


@pytest.mark.parametrize("damage", [d for d in DAMAGE if d not in ("empty", "NaN", "a list", "deep", "not UTF-8")])
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_file_or_too_large_is_an_oserror(tmp_path: Path, reader: str, damage: str) -> None:
    """Fails if a reader waits for a FIFO, reads a device without end, or does not say what it found."""
    plant(path := tmp_path / "x", damage)
    with pytest.raises(OSError) as refused:  # noqa: PT011 - the reason is compared below
        READERS[reader](path)
    found = {"huge": "it has 4398046511104 bytes, expected at most"}.get(damage, f"it is a {damage.lower()}")
    assert files.reason(refused.value).lower().startswith(found.lower())
    assert refused.value.filename == str(path)


@pytest.mark.parametrize("damage", ["deep", "not UTF-8", "empty", "a list", "digits"])
@pytest.mark.parametrize("reader", ["object", "toml"])
def test_damaged_content_is_a_valueerror(tmp_path: Path, reader: str, damage: str) -> None:
    """Fails if a reader of a file raises anything else, such as RecursionError, or takes a list for an object."""
    path = tmp_path / "x"
    if damage == "digits":
        path.write_text(f"x = {'9' * 5000}" if reader == "toml" else f'{{"x": {"9" * 5000}}}')
    elif damage == "deep" and reader == "toml":
        path.write_text("x = " + "[" * 100_000)
    else:
        plant(path, damage)
    if (reader, damage) == ("toml", "empty"):
        assert READERS[reader](path) == {}
        return
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - any text
        READERS[reader](path)
    assert type(refused.value).__name__ != "RecursionError"


@pytest.mark.parametrize("kind", ["nothing", "a file", "link", "FIFO", "broken link"])
def test_a_new_file_takes_the_place_of_what_was_there(tmp_path: Path, kind: str) -> None:
    """Fails if a link is followed, a FIFO waited for, or something stays beside the file."""
    (victim := tmp_path / "victim").write_text("precious")
    path = tmp_path / "new"
    if kind == "a file":
        path.write_text("old")
    elif kind != "nothing":
        plant(path, {"link": f"link to {victim}", "broken link": "link to nowhere"}.get(kind, kind))
    files.write_text(path, "new ü")
    assert path.read_text(encoding="utf-8") == "new ü"
    assert stat.S_ISREG(path.lstat().st_mode)
    assert victim.read_text() == "precious"
    assert sorted(os.listdir(tmp_path)) == ["new", "victim"]


def test_a_new_file_has_the_rights_that_the_umask_gives(tmp_path: Path) -> None:
    """Fails if a file is private, or open to all."""
    before = os.umask(0o027)
    try:
        files.write_bytes(tmp_path / "x", b"")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o640


@pytest.mark.parametrize("error", [OSError(28, "full"), KeyboardInterrupt(), ValueError("x")])
def test_after_an_error_the_old_file_stays(tmp_path: Path, error: BaseException) -> None:
    """Fails if a half-written file takes the place of a whole one, or stays beside it."""
    (path := tmp_path / "x").write_text("old")
    with pytest.raises(type(error)), files.new_file(path) as file:  # noqa: PT012 - the error is planted
        file.write(b"half")
        raise error
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["x"]


def test_left_overs_go_but_those_of_the_living_and_of_others_stay(tmp_path: Path) -> None:
    """Fails if what a killed command left stays for good, or a writer takes another's file away."""
    names = [".x.0123abcd.tmp", ".x.89ab0123.tmp", ".y.0123abcd.tmp", ".x.notes.tmp", ".x.tmp"]
    for name in names:
        (tmp_path / name).touch()
    plant(tmp_path / ".x.0000000a.tmp", "FIFO")
    (tmp_path / ".x.0000000b.tmp").symlink_to(tmp_path / ".y.0123abcd.tmp")
    with (tmp_path / names[1]).open() as living:
        fcntl.flock(living, fcntl.LOCK_EX)
        files.write_text(tmp_path / "x", "")
    assert not (tmp_path / names[0]).exists()
    assert all((tmp_path / name).exists() for name in names[1:])


def test_writers_of_one_file_at_once(tmp_path: Path) -> None:
    """Fails if one of several writers loses its file to another that takes it for a left-over."""
    path, errors = tmp_path / "x", list[BaseException]()

    def write(text: str) -> None:
        try:
            for _ in range(40):
                files.write_text(path, text, durable=False)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(letter * 1000,)) for letter in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert path.read_text() in [letter * 1000 for letter in "abcd"]
    assert os.listdir(tmp_path) == ["x"]


def test_a_trial_of_a_place_changes_nothing(tmp_path: Path) -> None:
    """Fails if asking whether a file can be written writes it."""
    (path := tmp_path / "x").write_text("old")
    with files.new_file(path, keep=False) as file:
        file.write(b"new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("anew", [False, True])
@pytest.mark.parametrize("kind", ["link", "FIFO", "device", "folder"])
def test_logs_follow_nothing(tmp_path: Path, kind: str, anew: bool) -> None:
    """Fails if what a process prints goes through a link, or waits for a reader."""
    (victim := tmp_path / "victim").write_text("precious")
    plant(path := tmp_path / "log", f"link to {victim}" if kind == "link" else kind)
    if anew and kind != "folder":
        files.open_log(path, anew=True).close()
        assert stat.S_ISREG(path.lstat().st_mode)
    else:
        with pytest.raises(OSError):  # noqa: PT011 - the system's words
            files.open_log(path, anew=anew)
    assert victim.read_text() == "precious"


def test_what_a_terminal_acts_on_is_escaped() -> None:
    """Fails if a control character, one of writing direction or half of a surrogate pair is printed as it is."""
    for character in ["\x1b", "\x07", "\r", "\x7f", "\x9b", "\x85", "\u202e", "\u2066", "\u200b", "\u2028", "\udcff"]:
        for text in (printable(f"a{character}b"), shown(f"a{character}b"), one_line(f"a{character}b")):
            assert text.isprintable()
        assert printable(f"a{character}b") not in ("ab", "a b")
    assert printable("ä 数 é/x_y") == "ä 数 é/x_y"
    assert shown("a\nb\x1b") == "a\nb\\x1b"


OWN = {
    "mggcn/files.py": "the one way",
    "mggcn/host.py": "/proc",
    "mggcn/forks.py": "/proc",
    "mggcn/backend/cpu/backend.py": "/proc",
    "mggcn/backend/cpu/cores.py": "/sys",
    "mggcn/backend/cpu/machine.py": "/proc",
    "mggcn/backend/cuda/compile.py": "kernels of the package",
    "mggcn/backend/cuda/kernels.py": "kernels of the package",
    "mggcn/comm/call.py": "a private folder",
    "mggcn/comm/failure.py": "/proc",
    "mggcn/comm/nccl_settings.py": "NCCL's own file",
    "mggcn/comm/launch.py": "a private folder",
    "mggcn/comm/rank.py": "a private folder",
    "mggcn/assemble/ladder.py": "/proc",
    "mggcn/cli/building.py": "/proc",
    "mggcn/graph/sources/archive.py": "a private folder",
    "mggcn/graph/durable.py": "a private folder",
    "mggcn/graph/build/staging.py": "columns, written in parts",
    "mggcn/runs/folder.py": "config.toml, exclusively",
    "mggcn/runs/predict.py": "scores that it has just made, exclusively",
    "mggcn/runs/prediction_files.py": "scores that a rank has just made, to be mapped",
    "mggcn/output.py": "/dev/null",
    "mggcn/doctor/cpu.py": "/proc",
    "mggcn/report/markup.py": "files of the package",
    "mggcn/train/heartbeat.py": "/proc",
}
"""Modules that open files in ways of their own, and which."""
OPENERS = ("read_text", "read_bytes", "write_text", "write_bytes")


def test_nobody_reads_or_writes_files_in_a_way_of_his_own() -> None:
    """Fails if a module opens a file past `mggcn.files`, where a FIFO, a device or a link may lie."""
    root = Path(mggcn.__file__).parent.parent
    found = {}
    for path in sorted((root / "mggcn").rglob("*.py")):
        calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        bare = [f.id for f in calls if isinstance(f, ast.Name) and f.id == "open"]
        methods = [f.attr for f in calls if isinstance(f, ast.Attribute) and f.attr in OPENERS]
        opens = [
            "open"
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "open"
            if node.args and isinstance(node.args[0], ast.Constant) and str(node.args[0].value)[:1] in "rwax"
        ]
        if bare or methods or opens:
            found[str(path.relative_to(root))] = [*bare, *methods, *opens]
    assert {name: calls for name, calls in found.items() if name not in OWN} == {}


NEVER_READ = Path("/proc/self/mem")
"""A file that opens and fails with EIO when it is read, as one on a bad disk does."""


@pytest.mark.skipif(not NEVER_READ.exists(), reason="Linux")
@pytest.mark.parametrize("reader", ["read_bytes", "read_text", "read_json", "read_toml", "lines", "into"])
def test_errors_of_reading_name_the_file(reader: str) -> None:
    """Fails if an error of the disk says nothing of the file, so that a command ends in a traceback."""
    with pytest.raises(OSError, match="Input/output error: '/proc/self/mem'") as caught:  # noqa: PT012
        if reader in ("lines", "into"):
            with files.open_file(NEVER_READ) as file:
                assert file.readline() if reader == "lines" else file.readinto(bytearray(1 << 20))
        else:
            getattr(files, reader)(NEVER_READ)
    assert caught.value.filename == str(NEVER_READ)


def abandoned(place: Path, name: str, owner: str | None = None) -> Path:
    """Return a folder as a killed process leaves it."""
    (folder := place / name).mkdir(mode=0o700)
    (folder / "graph").mkdir()
    (folder / "graph" / "indptr.npy").touch()
    (folder / files.OWNER).write_text(os.uname().nodename if owner is None else owner)
    return folder


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place for temporary folders."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_temporary_folders_of_killed_processes_go(place: Path) -> None:
    """Fails if what a killed process left stays, or the folder of this one does."""
    left = abandoned(place, "mggcn-abcd_123")
    with files.temporary_folder() as folder:
        assert not left.exists()
        (folder / "x").touch()
        with files.temporary_folder() as other:  # the first is locked
            assert (folder / "x").exists()
            assert other != folder
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert list(place.iterdir()) == []


@pytest.mark.parametrize(
    "kind", ["locked", "own name", "no owner", "link", "linked owner", "FIFO", "other machine", "other user", "file"]
)
def test_temporary_folders_of_others_stay(place: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Fails if a folder goes that a process holds, that mggcn did not make, or to which a link leads."""
    (elsewhere := place / "elsewhere").mkdir()
    name = "mggcn-data" if kind == "own name" else "mggcn-abcdefgh"
    folder = abandoned(elsewhere if kind == "link" else place, name, "far" if kind == "other machine" else None)
    owner, held = folder / files.OWNER, os.open(folder, os.O_RDONLY)
    if kind == "locked":
        fcntl.flock(held, fcntl.LOCK_EX)
    elif kind == "link":
        (place / name).symlink_to(folder)
    elif kind == "file":
        (place / "mggcn-12345678").touch()
    elif kind == "other user":
        monkeypatch.setattr(os, "getuid", lambda: 1 + folder.stat().st_uid)
    if kind in ("no owner", "linked owner", "FIFO", "file"):
        owner.rename(elsewhere / "owner")
        if kind != "no owner":
            plant(owner, f"link to {elsewhere / 'owner'}" if kind == "linked owner" else "FIFO")
    with files.temporary_folder():
        pass
    os.close(held)
    assert (folder / "graph" / "indptr.npy").exists()
    assert (place / "mggcn-12345678").exists() == (kind == "file")


def test_a_temporary_folder_holds_what_a_link_leads_to(place: Path) -> None:
    """Fails if a link in an abandoned folder is followed when that is removed."""
    left = abandoned(place, "mggcn-zyxwvuts")
    (kept := place / "kept").mkdir()
    (kept / "x").write_text("precious")
    (left / "link").symlink_to(kept)
    with files.temporary_folder():
        assert not left.exists()
    assert (kept / "x").read_text() == "precious"
