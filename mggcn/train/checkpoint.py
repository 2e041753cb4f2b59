"""Checkpoints: safetensors and JSON in a folder of their own, complete or absent, the newest named by `latest`.

`latest` holds the name and the SHA-256 of progress.json, which holds those of all parts: a byte that changes is noticed.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from mggcn.errors import RunError


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


Tensors = Mapping[str, torch.Tensor]


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def save_tensors(tensors: Tensors, path: Path) -> None:
    """Write tensors as safetensors with the permissions that the umask gives.

    safetensors writes a private temporary file (mode 0600) and renames it: others could not read the run.
    """
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    path.chmod(mode)


def _free_name(folder: Path, stem: str) -> str:
    """An unused name: an old checkpoint is deleted only after the one that replaces it is complete."""
    return next(n for i in itertools.count() if not (folder / (n := f"{stem}-{i}" if i else stem)).exists())


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


def save_checkpoint(folder: Path, progress: Progress, parts: Mapping[str, Tensors]) -> None:
    """Write a checkpoint beside the last one, then make it the latest and delete older ones.

    parts: "weights", "best", "optimizer" (named tensors, empty ones are left out); the staged states of all ranks become
    parts "rank-<r>". A full disk or a crash leaves the last checkpoint as it was. Raises: RunError if it fails.
    """
    name = _free_name(folder, f"run-{progress.run:03d}-epoch-{progress.epoch:06d}")
    final, temporary = folder / name, folder / f".{name}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        filled = {key: tensors for key, tensors in parts.items() if tensors}
        for key, tensors in filled.items():
            save_tensors(tensors, temporary / f"{key}.safetensors")
        staged = sorted((folder / STAGED).glob("rank-*.safetensors"))
        for file in staged:
            file.rename(temporary / file.name)
        names = sorted([*filled, *(file.stem for file in staged)])
        digests = {part: _sha256(temporary / f"{part}.safetensors") for part in names}
        fields = {f: getattr(progress, f) for f in Progress.__dataclass_fields__} | {"parts": digests}
        (temporary / "progress.json").write_text(json.dumps(fields, indent=1))
        for path in (*temporary.iterdir(), temporary):
            _sync(path)
        digest = _sha256(temporary / "progress.json")
        temporary.rename(final)
        marker = folder / ".latest.tmp"
        marker.write_text(f"{name} {digest}\n")
        _sync(marker)
        marker.rename(folder / "latest")
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
    with path.open("rb") as file:
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
        name, *digest = marker.read_text().split()
        path = folder / name
        fields = json.loads(_intact(path / "progress.json", digest[0] if digest else None).read_text())
        parts = fields.pop("parts")
        progress = Progress(**fields)
        return progress, path, dict(parts) if digest else dict.fromkeys(parts)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise _damaged(path, error) from error


def load_checkpoint(folder: Path) -> tuple[Progress, dict[str, dict[str, torch.Tensor]]] | None:
    """Return the latest checkpoint: progress and the named parts; None if there is none.

    Raises: RunError if it is damaged.
    """
    if (found := read_progress(folder)) is None:
        return None
    progress, path, digests = found
    try:
        return progress, {name: load_file(_intact(path / f"{name}.safetensors", d)) for name, d in digests.items()}
    except (OSError, ValueError, SafetensorError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> RunError:
    return RunError(f"the checkpoint {path} is damaged: {error}; delete it and start the run again")
