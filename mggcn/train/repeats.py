"""Complete repeats of a run: which one represents it, their scores, and the weights of each, in a folder of its own.

Checkpoints hold the newest repeat's weights alone. Needs no torch before weights are written or read.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mggcn.config import TrainConfig
from mggcn.errors import RunError
from mggcn.files import reason
from mggcn.planning.task import LOWER_IS_BETTER

if TYPE_CHECKING:
    from torch import Tensor

    from mggcn.train.checkpoint import Progress

FOLDER = "repeats"


def best_repeat(finished: Sequence[dict[str, Any]], metric: str) -> dict[str, Any]:
    """Return the first of the repeats with the best validation score; the last one if nothing was validated."""
    scores = [run["best"]["val"] for run in finished]
    known = [score for score in scores if score is not None]
    best = min if metric in LOWER_IS_BETTER else max
    return finished[scores.index(best(known))] if known else finished[-1]


def is_kept(run_folder: Path, seed: int) -> bool:
    """Return whether the weights of a complete repeat exist; runs of earlier versions lack them."""
    return (run_folder / FOLDER / f"seed-{seed}").is_dir()


def keep_repeat(run_folder: Path, seed: int, parts: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Write the weights of a complete repeat; parts: "best" (validation), if there is one, and "weights" (last epoch).

    The folder is complete or absent; a resumed run that trains the end of a repeat again writes the same files. Raises:
    RunError if it fails.
    """
    from safetensors import SafetensorError

    from mggcn.train.checkpoint import save_tensors

    final = run_folder / FOLDER / f"seed-{seed}"
    temporary = final.with_name(f".{final.name}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        for name, tensors in parts.items():
            if tensors:
                save_tensors(tensors, temporary / f"{name}.safetensors")
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise RunError(
            f"the weights of seed {seed} could not be saved to {final}: {error}; free space and resume"
        ) from error


def load_repeat(run_folder: Path, seed: int, part: str) -> dict[str, Tensor]:
    """Return "best" or "weights" of a repeat; without a validation score its best are its last.

    Raises: RunError if it is not there, or damaged.
    """
    from safetensors import SafetensorError

    from mggcn.train.checkpoint import load_tensors

    if not is_kept(run_folder, seed):
        raise RunError(f"{run_folder} holds no weights of a complete run of seed {seed}; name another --seed")
    file = run_folder / FOLDER / f"seed-{seed}" / f"{part}.safetensors"
    try:
        weights: dict[str, Tensor] = load_tensors(file if file.exists() else file.with_name("weights.safetensors"))
        return weights
    except (OSError, ValueError, SafetensorError) as error:
        raise RunError(
            f"the weights {file} are damaged: {reason(error)}; name another --seed, or start the run again"
        ) from error


def summary(config: TrainConfig, progress: Progress, metric: str) -> dict[str, Any]:
    """Return result.json's scores: metric, best, final, epochs; of several repeats the best one's, mean, deviation."""
    finished = progress.finished
    shown = best_repeat(finished, metric)
    result: dict[str, Any] = {"metric": metric, **{name: shown[name] for name in ("best", "final", "epochs")}}
    if config.repeat > 1:
        result["runs"] = finished
        for name, function in (("mean", np.mean), ("std", np.std)):
            result[name] = {
                kind: {
                    split: float(function(known)) if (known := _known(finished, kind, split)) else None
                    for split in ("train", "val", "test")
                }
                for kind in ("best", "final")
            }
    return result


def _known(finished: list[dict[str, Any]], kind: str, split: str) -> list[float]:
    return [run[kind][split] for run in finished if run[kind][split] is not None]
