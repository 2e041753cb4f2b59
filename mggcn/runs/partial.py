"""The folder beside a prediction's file in which a prediction from disk keeps what it has computed, until it is whole."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mggcn.assemble.ladder import in_memory
from mggcn.errors import RunError
from mggcn.files import read_object, reason
from mggcn.planning.run import RankPlan
from mggcn.version import __version__

if TYPE_CHECKING:
    from torch import Tensor

SCORES = "scores.npy"
OURS = ("pages-*", "stages-*.json", ".stages-*.json*", SCORES, f".{SCORES}.tmp")
"""What the folder may hold; anything else is somebody's."""


@contextlib.contextmanager
def partial_prediction(target: Path) -> Iterator[Path]:
    """Yield the folder TARGET.partial, made if it is not there; it is gone once the body is through.

    Where the body fails, it stays if it holds a finished stage. The lock ends with this process at the latest.
    Raises: RunError if another prediction is at work there, or it holds other files, or cannot be made, or is in memory.
    """
    folder = target.with_name(f"{target.name}.partial")
    if in_memory(target.absolute().parent):
        raise RunError(
            f"rows on disk would lie beside {target}, where files are in memory; choose --out, or TMPDIR, on a disk"
        )
    try:
        folder.mkdir(exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise RunError(f"the folder {folder} cannot be made: {reason(error)}; choose another --out") from error
    try:
        _lock(descriptor, folder)
        if others := {path.name for path in folder.iterdir()} - {path.name for path in _files(folder)}:
            raise RunError(f"{folder} holds {min(others)}, which no prediction wrote; move it, or choose another --out")
        for name in (SCORES, f".{SCORES}.tmp"):  # a killed prediction's
            (folder / name).unlink(missing_ok=True)
        try:
            yield folder
        except BaseException:
            if not any(map(_stages, folder.glob("stages-*.json"))):
                remove_partial(folder)
            raise
        remove_partial(folder)
    finally:
        os.close(descriptor)


def remove_partial(folder: Path) -> None:
    """Remove the folder with what a prediction wrote into it."""
    for path in _files(folder):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def identity_of(plan: RankPlan, config: str, graph_sha256: str, state: Mapping[str, Tensor]) -> str:
    """Return a digest of what the values in a rank's page file depend on: version, settings, graph, weights, and places."""
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode())
        digest.update(state[name].contiguous().numpy().tobytes())
    disk = plan.disk
    places = "" if disk is None else json.dumps([disk.to_dict(), str(disk.pages)])
    digest.update(json.dumps([__version__, config, graph_sha256, plan.rank, plan.ranks, places]).encode())
    return digest.hexdigest()


def _stages(path: Path) -> int:
    """Return how many stages of the evaluation a rank has recorded."""
    try:
        return int(read_object(path)["stages"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _files(folder: Path) -> list[Path]:
    return [path for pattern in OURS for path in folder.glob(pattern)]


def _lock(descriptor: int, folder: Path) -> None:
    """Keep other predictions out; file systems without locks let them in."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RunError(
            f"another prediction is at work in {folder}; wait for its end, or choose another --out"
        ) from None
    except OSError:
        pass
