"""Checkpoints are complete or absent."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from mggcn.errors import RunError
from mggcn.train import checkpoint
from mggcn.train.checkpoint import Progress, load_checkpoint, save_checkpoint, stage_state


def parts_of(value: float) -> dict[str, dict[str, torch.Tensor]]:
    weights = {"layers.1.weight": torch.full((3, 4), value), "layers.1.bias": torch.arange(4.0) * value}
    return {"weights": weights, "best": {}, "optimizer": {"layers.1.weight:step": torch.tensor(value)}}


def progress_of(epoch: int) -> Progress:
    scores = {"epoch": epoch, "train": 0.5, "val": None, "test": 0.25}
    finished = [{"seed": 5, "epochs": epoch, "best": scores, "final": scores}]
    return Progress(run=1, epoch=epoch, best=scores, last=scores, waited=2, history_lines=9, finished=finished)


def test_what_is_saved_returns(tmp_path: Path) -> None:
    """Fails if a figure, a tensor or its type is lost, an older checkpoint is left, or another run's state returned."""
    assert load_checkpoint(tmp_path / "none") is None
    for epoch in (3, 5):
        stage_state(tmp_path, 0, {})
        stage_state(tmp_path, 1, {"kept": torch.ones(2, 2).t()})
        stage_state(tmp_path, 2, {"kept": torch.ones(3)})  # left by an attempt on three ranks
        save_checkpoint(tmp_path, progress_of(epoch), parts_of(epoch), ranks=2)
    found = load_checkpoint(tmp_path)
    assert found is not None
    progress, parts = found
    assert progress == progress_of(5)
    assert set(parts) == {"weights", "optimizer", "rank-1"}
    for part, tensors in {"weights": parts_of(5)["weights"], "optimizer": parts_of(5)["optimizer"]}.items():
        assert set(parts[part]) == set(tensors)
        assert all(torch.equal(parts[part][n], t) and parts[part][n].dtype == t.dtype for n, t in tensors.items())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "run-001-epoch-000005"]


def test_a_checkpoint_that_is_replaced_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a run that goes on beside a reader is told to be damaged, or a damaged one is not."""
    save_checkpoint(tmp_path, progress_of(3), parts_of(3.0))
    original, later = checkpoint.load_tensors, iter((5, 7))

    def load(path: Path) -> dict[str, torch.Tensor]:
        if (epoch := next(later, None)) is not None:
            save_checkpoint(tmp_path, progress_of(epoch), parts_of(epoch))
        return original(path)

    monkeypatch.setattr(checkpoint, "load_tensors", load)
    found = load_checkpoint(tmp_path)
    assert found is not None
    assert found[0] == progress_of(7)
    assert torch.equal(found[1]["weights"]["layers.1.weight"], torch.full((3, 4), 7.0))
    (tmp_path / "run-001-epoch-000007" / "weights.safetensors").unlink()
    with pytest.raises(RunError, match="is damaged"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_files_have_the_permissions_of_the_umask(tmp_path: Path, umask: int) -> None:
    """Fails if weights are private to their writer where the rest of the run is not, or open where it is not."""
    before = os.umask(umask)
    try:
        stage_state(tmp_path, 1, {"kept": torch.ones(2)})
        save_checkpoint(tmp_path, progress_of(3), parts_of(1.0), ranks=2)
    finally:
        os.umask(before)
    files = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*") if path.is_file()}
    assert {"weights.safetensors", "rank-1.safetensors", "progress.json", "latest"} < files.keys()
    assert set(files.values()) == {0o666 & ~umask}


@pytest.mark.parametrize("fails_at", range(12))
def test_a_failing_write_leaves_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    """Fails if a full disk, at any step and also for a checkpoint of the same epoch, costs the good copy."""
    for old, new in ((4, 5), (5, 5)):
        folder = tmp_path / str(new - old)
        save_checkpoint(folder, progress_of(old), parts_of(1.0))
        calls = iter(range(100))

        def step(original):  # type: ignore[no-untyped-def]
            def run(*args, **options):  # type: ignore[no-untyped-def]
                if next(calls) == fails_at:  # noqa: B023
                    raise OSError(28, "No space left on device")
                return original(*args, **options)

            return run

        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "save_file", step(checkpoint.save_file))
            patch.setattr(checkpoint, "_sync", step(checkpoint._sync))
            patch.setattr(Path, "write_text", step(Path.write_text))
            patch.setattr(Path, "rename", step(Path.rename))
            with pytest.raises(RunError, match=r"could not be written.*No space left"):
                save_checkpoint(folder, progress_of(new), parts_of(2.0))
        found = load_checkpoint(folder)
        assert found is not None
        # The last step syncs the folder: the new checkpoint is complete by then.
        whole = 1.0 if fails_at < 11 else 2.0
        assert found[1]["weights"]["layers.1.weight"][0, 0] == whole
        assert found[0].epoch == (old if whole == 1.0 else new)
        save_checkpoint(folder, progress_of(9), parts_of(3.0))
        assert load_checkpoint(folder)[1]["weights"]["layers.1.weight"][0, 0] == 3.0  # type: ignore[index]
        assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize(
    "damage", ["cut", "empty", "no progress", "no optimizer", "no folder", "not json", "unknown field", "empty marker"]
)
def test_damage_is_refused(tmp_path: Path, damage: str) -> None:
    """Fails if a damaged checkpoint is taken for none, or half of one is loaded."""
    save_checkpoint(tmp_path, progress_of(4), parts_of(1.0))
    folder = tmp_path / "run-001-epoch-000004"
    weights, progress = folder / "weights.safetensors", folder / "progress.json"
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-7])
    elif damage == "empty":
        weights.write_bytes(b"")
    elif damage == "no progress":
        progress.unlink()
    elif damage == "no optimizer":
        (folder / "optimizer.safetensors").unlink()
    elif damage == "no folder":
        folder.rename(tmp_path / "elsewhere")
    elif damage == "not json":
        progress.write_text("[1, 2")
    elif damage == "unknown field":
        progress.write_text('{"parts": [], "surprise": 1}')
    else:
        (tmp_path / "latest").write_text("")
    with pytest.raises(RunError, match=r"is damaged.*delete it and start the run again"):
        load_checkpoint(tmp_path)


def test_no_changed_bit_is_taken(tmp_path: Path) -> None:
    """Fails if a run goes on from a checkpoint of which a bit changed, in numbers, headers, progress or `latest`."""
    save_checkpoint(tmp_path, progress_of(4), parts_of(1.0))
    rng = np.random.default_rng(5)
    for file in sorted(path for path in tmp_path.rglob("*") if path.is_file()):
        whole = file.read_bytes()
        for place in rng.permutation(len(whole))[:60]:
            bit = 1 << int(rng.integers(8))
            file.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
            with contextlib.suppress(RunError):
                found = load_checkpoint(tmp_path)
                # White space between the words of `latest` may change.
                assert found is not None
                assert file.name == "latest", (file.name, place)
        file.write_bytes(whole)
    assert load_checkpoint(tmp_path) is not None


ODD_PROGRESS: dict[str, dict[str, object]] = {
    "text as a count": {"epoch": "4"},
    "fraction as a count": {"run": 0.5},
    "negative count": {"history_lines": -1},
    "truth as a count": {"waited": True},
    "text as a rate": {"rate": "0.1"},
    "list as scores": {"best": [1]},
    "text as a score": {"last": {"epoch": 3, "val": "high"}},
    "number as results": {"finished": 3},
    "result without a seed": {"finished": [{"epochs": 3}]},
    "result that is text": {"finished": ["seed"]},
    "number as parts": {"parts": 3},
    "path as a part": {"parts": ["../../weights"]},
    "no weights": {"parts": ["optimizer"]},
    "part that is no text": {"parts": [3]},
}


def save_older(folder: Path, **more: object) -> None:
    """Save a checkpoint as versions did that wrote no digests, with other fields of its progress."""
    save_checkpoint(folder, progress_of(4), parts_of(1.0))
    progress = folder / "run-001-epoch-000004" / "progress.json"
    fields = json.loads(progress.read_text())
    progress.write_text(json.dumps(fields | {"parts": sorted(fields["parts"])} | more))
    (folder / "latest").write_text("run-001-epoch-000004")


@pytest.mark.parametrize("odd", ODD_PROGRESS)
def test_odd_progress_of_older_versions_is_refused(tmp_path: Path, odd: str) -> None:
    """Fails if progress.json with values of other types, which no digest protects, ends in a traceback or is taken."""
    save_older(tmp_path, **ODD_PROGRESS[odd])
    with pytest.raises(RunError, match="is damaged"):
        load_checkpoint(tmp_path)


def test_tensors_are_compared_with_their_own_digest(tmp_path: Path) -> None:
    """Fails if weights that lie outside of a checkpoint, such as those a run starts from, can change in a bit."""
    path, tensors = tmp_path / "start.safetensors", parts_of(0.3)["weights"] | {"half": torch.ones(3).bfloat16()}
    checkpoint.save_tensors(tensors, path)
    whole = path.read_bytes()
    taken = 0
    for place in range(8, len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 2]) + whole[place + 1 :])
        with contextlib.suppress(ValueError, SafetensorError):
            found = checkpoint.load_tensors(path)
            taken += 1
            assert found.keys() == tensors.keys()
            assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert taken <= len('"sha256"'), "only the name of the digest may change"


def test_checkpoints_of_older_versions_load(tmp_path: Path) -> None:
    """Fails if a run of a version that wrote no digests cannot go on."""
    save_older(tmp_path)
    found = load_checkpoint(tmp_path)
    assert found is not None
    assert found[0] == progress_of(4)
    assert set(found[1]) == {"weights", "optimizer"}
