"""Complete repeats of a run: which one is shown, and the weights that are kept of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mggcn.errors import RunError
from mggcn.train.repeats import best_repeat, keep_repeat, load_repeat


def test_the_best_repeat_speaks_for_the_run() -> None:
    """Fails if another repeat than the first of the best validated ones is shown, or none where nothing was validated."""

    def repeats(*scores: float | None) -> list[dict[str, Any]]:
        return [{"seed": seed, "best": {"val": score}} for seed, score in enumerate(scores)]

    assert best_repeat(repeats(0.25, 0.5, 0.5, None), "accuracy")["seed"] == 1
    assert best_repeat(repeats(0.0, None), "accuracy")["seed"] == 0
    assert best_repeat(repeats(None, None), "accuracy")["seed"] == 1


def readable(folder: Path) -> int:
    """Who may read a new file."""
    (folder / "new").touch()
    return (folder / "new").stat().st_mode & 0o444


def test_the_weights_of_a_repeat_are_complete_or_refused(tmp_path: Path) -> None:
    """Fails if half a file is loaded, a repeat without validation has no weights, or what is kept blocks a second try."""
    first, second = {"w": torch.ones(3)}, {"w": torch.zeros(3)}
    keep_repeat(tmp_path, 7, {"weights": first, "best": second})
    keep_repeat(tmp_path, 7, {"weights": second, "best": {}})
    assert torch.equal(load_repeat(tmp_path, 7, "best")["w"], second["w"])
    assert (tmp_path / "repeats" / "seed-7" / "weights.safetensors").stat().st_mode & 0o444 == readable(tmp_path)
    with pytest.raises(RunError, match=r"no weights of a complete run of seed 8; name another --seed"):
        load_repeat(tmp_path, 8, "best")
    (tmp_path / "repeats" / "seed-7" / "weights.safetensors").write_bytes(b"\x00" * 11)
    with pytest.raises(RunError, match="damaged"):
        load_repeat(tmp_path, 7, "weights")
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(RunError, match="weights of seed 1 could not be saved"):
        keep_repeat(tmp_path / "file", 1, {"weights": first})
