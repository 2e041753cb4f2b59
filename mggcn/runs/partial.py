"""The folder beside a prediction's file in which a prediction from disk keeps what it has computed, until it is whole."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

from mggcn.assemble.ladder import in_memory
from mggcn.errors import RunError
from mggcn.files import read_object, reason, write_bytes
from mggcn.planning.run import RankPlan
from mggcn.version import __version__

if TYPE_CHECKING:
    from torch import Tensor

SCORES: Final = "scores.npy"
WHOLE: Final = "whole.json"
"""File that says of what the scores are, once they are whole."""
VALUES: Final = ("pages-*", "stages-*.json", ".stages-*.json*")
"""What scores are computed from."""
OURS: Final = (WHOLE, f".{WHOLE}.*", *VALUES, SCORES, f".{SCORES}.tmp")
"""What the folder may hold; anything else is somebody's."""


@final
@dataclass(frozen=True, slots=True)
class PartialPrediction:
    """A prediction from disk that is not whole yet, in a folder that no other process has."""

    folder: Path

    @property
    def scores(self) -> Path:
        """The file of all scores."""
        return self.folder / SCORES

    def holds(self, identity: str) -> bool:
        """Return whether the scores are whole and of this identity, as a killed prediction may leave them; others are
        removed.
        """
        try:
            found = read_object(self.folder / WHOLE).get("identity") == identity and self.scores.exists()
        except (OSError, ValueError):
            found = False
        if not found:
            _remove(self.folder, WHOLE, SCORES)
        return found

    def keep(self, identity: str) -> None:
        """Record that the scores are whole, and remove what they were computed from: the rest needs space, too."""
        with contextlib.suppress(OSError):  # of a full disk; the last stage is then computed again
            write_bytes(self.folder / WHOLE, json.dumps({"identity": identity}).encode())
            _remove(self.folder, *VALUES)


@contextlib.contextmanager
def partial_prediction(target: Path, scratch: str = "") -> Iterator[PartialPrediction]:
    """Yield the prediction in the folder TARGET.partial, made if it is not there; it is gone once the body is through.

    scratch: the run's, in which it may be although files there are in memory. Where the body fails, it stays if it holds a
    finished stage. The lock ends with this process at the latest.
    Raises: RunError if another prediction is at work there, or it holds other files, or cannot be made, or is in memory.
    """
    folder, beside = target.with_name(f"{target.name}.partial"), target.absolute().parent
    if in_memory(beside) and not (scratch and beside.is_relative_to(Path(scratch).absolute())):
        raise RunError(f"rows on disk would lie beside {target}, where files are in memory; choose --out on a disk")
    try:
        folder.mkdir(exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise RunError(f"the folder {folder} cannot be made: {reason(error)}; choose another --out") from error
    try:
        _lock(descriptor, folder)
        if others := _others(folder):
            raise RunError(f"{folder} holds {min(others)}, which no prediction wrote; move it, or choose another --out")
        _remove(folder, f".{SCORES}.tmp")  # a killed prediction's
        try:
            yield PartialPrediction(folder)
        except BaseException:
            if not (folder / WHOLE).exists() and not any(map(_stages, folder.glob("stages-*.json"))):
                _remove_all(folder)
            raise
        _remove_all(folder)
    finally:
        os.close(descriptor)


def discard_partial(target: Path) -> None:
    """Remove what a killed prediction from disk has left for a file that is whole: it was made in another way."""
    folder = target.with_name(f"{target.name}.partial")
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _others(folder):
                _remove_all(folder)
        finally:
            os.close(descriptor)


def _remove_all(folder: Path) -> None:
    """Remove the folder with what a prediction wrote into it."""
    _remove(folder, *OURS)
    with contextlib.suppress(OSError):
        folder.rmdir()


def _remove(folder: Path, *patterns: str) -> None:
    for path in _files(folder, *patterns):
        path.unlink(missing_ok=True)


def scores_identity(
    folder: Path, config: str, graph_sha256: str, weights: str, seed: int | None, *, probabilities: bool
) -> str:
    """Return a digest of what the scores of a run depend on: version, settings, graph, and weights by their checkpoint.

    folder: the run's. weights, seed: as of `predict`.
    """
    from mggcn.train.checkpoint import newest

    checkpoint = hashlib.sha256(newest(folder / "checkpoints")).hexdigest()
    parts = [__version__, config, graph_sha256, checkpoint, weights, seed, probabilities]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


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


def _others(folder: Path) -> set[str]:
    """Return the names of files that no prediction wrote."""
    return {path.name for path in folder.iterdir()} - {path.name for path in _files(folder, *OURS)}


def _files(folder: Path, *patterns: str) -> list[Path]:
    return [path for pattern in patterns for path in folder.glob(pattern)]


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
