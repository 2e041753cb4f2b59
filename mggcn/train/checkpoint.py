"""Checkpoints: safetensors and JSON in a folder of their own, complete or absent, the newest named by `latest`.

`latest` holds the name and the SHA-256 of progress.json, which holds those of all parts: a byte that changes is noticed.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from mggcn.errors import RunError
from mggcn.files import (
    LARGEST,
    new_file,
    open_file,
    read_bytes,
    read_object,
    read_text,
    reason,
    require_file,
    write_text,
)


@dataclass(kw_only=True, slots=True)
class Progress:
    """The progress of a run: everything but tensors that a resumed run needs."""

    run: int = 0
    """Number of the repeat, from 0."""
    epoch: int = 0
    """Epochs done of this repeat."""
    best: dict[str, Any] | None = None
    """Epoch and scores of the best validation score so far."""
    last: dict[str, Any] | None = None
    """Epoch and scores of the last evaluation."""
    waited: int = 0
    """Evaluations since the best one."""
    rate: float | None = None
    """The learning rate that the plateau schedule has reached; None: train.lr, still unchanged."""
    peak: float | None = None
    """The validation score that a later one must pass to count as better for the plateau schedule."""
    stalled: int = 0
    """Evaluations without a better score since then, or since the last cut."""
    history_lines: int = 0
    """Lines of history.jsonl that belong to it."""
    finished: list[dict[str, Any]] = field(default_factory=list)
    """Results of the repeats that are complete."""
    step: int = 0
    """Steps done of the next epoch; 0 where an epoch has one."""
    steps: int = 1
    """Steps of an epoch."""
    loss_sum: float = 0.0
    """Sum of the losses of the steps done of the next epoch, in their order."""
    seconds: float = 0.0
    """Seconds of these steps."""


WITHIN = ("step", "steps", "loss_sum", "seconds")
"""Fields that only checkpoints of runs with several steps an epoch hold: earlier versions read the others."""
Tensors = Mapping[str, torch.Tensor]


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def save_tensors(tensors: Tensors, path: Path) -> None:
    """Write tensors as safetensors, with the SHA-256 of what they hold and the permissions that the umask gives.

    safetensors writes a private temporary file (mode 0600) and renames it: others could not read the run.
    """
    content = {name: tensor.contiguous() for name, tensor in tensors.items()}
    with new_file(path, durable=False) as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        save_file(content, file.name, metadata={"sha256": _content_sha256(content)})
        os.chmod(file.name, mode)


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return what `save_tensors` wrote; files of earlier versions have no digest.

    Raises: OSError, SafetensorError, or ValueError if the tensors are not those that were written.
    """
    with safe_open(require_file(path), "pt") as file:
        metadata = file.metadata() or {}
        found = {name: file.get_tensor(name) for name in file.keys()}
    if "sha256" in metadata and metadata["sha256"] != _content_sha256(found):
        raise ValueError(f"{path.name} is not as it was written, its SHA-256 differs")
    return found


def map_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return what `save_tensors` wrote, mapped: what is read of it is in memory, and its content is not checked.

    Raises: OSError, SafetensorError.
    """
    with safe_open(require_file(path), "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}


def _content_sha256(tensors: Tensors) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _free_name(folder: Path, stem: str) -> str:
    """An unused name: an old checkpoint is deleted only after the one that replaces it is complete."""
    return next(n for i in itertools.count() if not (folder / (n := f"{stem}-{i}" if i else stem)).exists())


LARGEST_MARKER = 1 << 12
"""Bytes of `latest`: a name and a digest."""
TRIES = 10
"""Checkpoints that a run may write while one is read."""
STAGED = ".states"
"""Folder in which ranks leave the state of their strategies, until rank 0 makes it part of a checkpoint."""


def stage_state(folder: Path, rank: int, state: Tensors) -> None:
    """Save the state that a rank's strategy keeps between epochs, for the checkpoint that rank 0 writes after a barrier.

    Raises: RunError if it fails.
    """
    if not state:
        return
    try:
        (folder / STAGED).mkdir(parents=True, exist_ok=True)
        save_tensors(state, folder / STAGED / f"rank-{rank}.safetensors")
    except (OSError, SafetensorError) as error:
        raise RunError(f"rank {rank} could not save its state in {folder}: {error}; free space and resume") from error


def save_checkpoint(folder: Path, progress: Progress, parts: Mapping[str, Tensors], ranks: int = 1) -> None:
    """Write a checkpoint beside the last one, then make it the latest and delete older ones.

    parts: "weights", "best", "optimizer" (named tensors, empty ones are left out); the staged states of the run's ranks
    become parts "rank-<r>", those that an attempt on more ranks has left do not. A full disk or a crash leaves the last
    checkpoint as it was. Raises: RunError if it fails.
    """
    within = f"-step-{progress.step:06d}" if progress.step else ""
    name = _free_name(folder, f"run-{progress.run:03d}-epoch-{progress.epoch:06d}{within}")
    final, temporary = folder / name, folder / f".{name}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        filled = {key: tensors for key, tensors in parts.items() if tensors}
        for key, tensors in filled.items():
            save_tensors(tensors, temporary / f"{key}.safetensors")
        staged = [folder / STAGED / f"rank-{rank}.safetensors" for rank in range(ranks)]
        staged = [file for file in staged if file.exists()]
        for file in staged:
            file.rename(temporary / file.name)
        names = sorted([*filled, *(file.stem for file in staged)])
        digests = {part: _sha256(temporary / f"{part}.safetensors") for part in names}
        saved = [f for f in Progress.__dataclass_fields__ if progress.steps > 1 or f not in WITHIN]
        fields = {f: getattr(progress, f) for f in saved} | {"parts": digests}
        write_text(temporary / "progress.json", json.dumps(fields, indent=1), durable=False)
        for path in (*temporary.iterdir(), temporary):
            _sync(path)
        digest = _sha256(temporary / "progress.json")
        temporary.rename(final)
        write_text(folder / "latest", f"{name} {digest}\n")
        _sync(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise RunError(
            f"the checkpoint {final} could not be written: {error}; free space and resume the run"
        ) from error
    for old in folder.iterdir():
        if old.is_dir() and old.name != name:
            shutil.rmtree(old, ignore_errors=True)


def _sha256(path: Path) -> str:
    if path.suffix == ".safetensors":
        with safe_open(require_file(path), "pt"):
            pass  # compares the size of the file with its header: a digest would read whatever is behind
    with open_file(path, None if path.suffix == ".safetensors" else LARGEST) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _intact(path: Path, digest: str | None) -> Path:
    """Return the path of a file after checking its digest (None: unchecked). Raises: ValueError if the digest differs."""
    if digest is not None and _sha256(path) != digest:
        raise ValueError(f"{path.name} is not as it was written, its SHA-256 differs")
    return path


def read_progress(folder: Path) -> tuple[Progress, Path, dict[str, str | None]] | None:
    """Return the latest checkpoint's progress, its folder, and its parts with their digests; None if there is none.

    Checkpoints that older versions wrote have no digests. Raises: RunError if it is damaged.
    """
    marker = folder / "latest"
    if not marker.exists():
        return None
    path = folder
    try:
        name, *digest = read_text(marker, LARGEST_MARKER).split()
        path = folder / name
        fields = read_object(_intact(path / "progress.json", digest[0] if digest else None))
        parts = fields.pop("parts")
        progress = _checked(Progress(**fields))
        digests: dict[str, str | None] = dict(parts) if digest else dict.fromkeys(parts)
        if odd := [part for part in digests if not re.fullmatch(r"[\w-]+", part)]:
            raise ValueError(f"unexpected file {odd[0]!r} in the checkpoint")
        return progress, path, digests
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise _damaged(path, error) from error


def _checked(progress: Progress) -> Progress:
    """Refuse values of other types: files of earlier versions have no digest. Raises: TypeError."""
    numbers = (progress.run, progress.epoch, progress.waited, progress.stalled, progress.history_lines, progress.step)
    if any(type(number) is not int or number < 0 for number in numbers):
        raise TypeError("expected whole numbers as its counts")
    if type(progress.steps) is not int or progress.step >= progress.steps:
        raise TypeError("expected an epoch to have more steps than are done of it")
    if any(not isinstance(value, int | float | None) for value in (progress.rate, progress.peak)):
        raise TypeError("rate and peak must be numbers")
    if any(type(value) not in (int, float) for value in (progress.loss_sum, progress.seconds)):
        raise TypeError("losses and seconds must be numbers")
    scored = [run.get(name) for run in progress.finished for name in ("best", "final")]
    for scores in (progress.best, progress.last, *scored):
        if scores is not None and (
            type(scores["epoch"]) is not int
            or not all(isinstance(value, int | float | None) for value in scores.values())
        ):
            raise TypeError("expected scores as numbers")
    if any(type(run[name]) is not int for run in progress.finished for name in ("seed", "epochs")):
        raise TypeError("expected whole numbers as seeds and epochs")
    return progress


Wanted = Callable[[Sequence[str]], Sequence[str]]
"""Takes the names of all parts of a checkpoint, and gives those that are to be read."""


def of_rank(rank: int, size: int) -> Wanted:
    """Return which parts a rank restores: what all ranks share, and its own; those of all ranks where there were others."""

    def wanted(names: Sequence[str]) -> Sequence[str]:
        others = {name for name in names if name.startswith("rank-")}
        left_out = others - {f"rank-{rank}"} if len(others) == size else set[str]()
        return [name for name in names if name not in left_out]

    return wanted


def shared_parts(names: Sequence[str]) -> Sequence[str]:
    """Return the parts that all ranks share."""
    return [name for name in names if not name.startswith("rank-")]


def load_checkpoint(
    folder: Path, wanted: Wanted = list, *, mapped: bool = False
) -> tuple[Progress, dict[str, dict[str, torch.Tensor]]] | None:
    """Return the latest checkpoint: progress and the named parts, by default all; None if there is none.

    mapped: whether parts are mapped, as `map_tensors` does. If a run replaces it while it is read, the next one is read.
    Raises: RunError if it is damaged.
    """
    for left in reversed(range(TRIES)):
        latest = newest(folder)
        try:
            return _load(folder, wanted, mapped=mapped)
        except RunError:
            if not left or newest(folder) == latest:
                raise
    return None


def newest(folder: Path) -> bytes:
    """Return what names the latest checkpoint, no other one alike; nothing if there is none."""
    try:
        return read_bytes(folder / "latest", LARGEST_MARKER)
    except OSError:
        return b""


def _load(folder: Path, wanted: Wanted, *, mapped: bool) -> tuple[Progress, dict[str, dict[str, torch.Tensor]]] | None:
    if (found := read_progress(folder)) is None:
        return None
    progress, path, digests = found
    try:
        names, read = wanted(list(digests)), map_tensors if mapped else load_tensors
        parts = {name: read(_intact(path / f"{name}.safetensors", digests[name])) for name in names}
        if "weights" not in parts:
            raise ValueError("it has no weights")
        return progress, parts
    except (OSError, ValueError, SafetensorError) as error:
        raise _damaged(path, error) from error


@contextlib.contextmanager
def refusing_strangers(folder: Path | None) -> Iterator[None]:
    """Refuse tensors whose names or shapes are those of another model, optimiser or strategy. Raises: RunError."""
    try:
        yield
    except (KeyError, RuntimeError) as error:
        raise RunError(
            f"the checkpoint in {folder} is not of this run: {error} is missing or has another shape; delete its "
            "checkpoints and start the run again"
        ) from error


def _damaged(path: Path, error: Exception) -> RunError:
    return RunError(f"the checkpoint {path} is damaged: {reason(error)}; delete it and start the run again")
