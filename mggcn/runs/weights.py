"""Weights of runs: those that a run is scored with, and those that another one begins with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mggcn.config import Config
from mggcn.errors import ConfigError, RunError
from mggcn.files import reason
from mggcn.graph.csr import Rows
from mggcn.model.runtime import check_state
from mggcn.planning.run import RunPlan
from mggcn.runs.folder import read_run, seed_of_weights

if TYPE_CHECKING:
    from torch import Tensor

START = "start.safetensors"
"""File of a run folder with the weights that the run begins with, if they are not random."""


def weights_of(
    folder: Path,
    config: Config,
    weights: str = "best",
    seed: int | None = None,
    *,
    rows: bool = True,
    file: Path | None = None,
) -> dict[str, Tensor]:
    """Return the weights of a run: "best" (validation) or "last".

    seed: of a run with repeats; by default the one of the best validation score of all complete repeats. rows: whether
    learned rows of all vertices (N, D) are among them, if the run has any; file: in which these are then to lie, mapped,
    instead of in memory. Raises: RunError if it has none yet, or the file cannot be written; ConfigError for a seed that it
    does not have.
    """
    from mggcn.train.checkpoint import load_checkpoint, shared_parts
    from mggcn.train.learned import NAME, all_rows
    from mggcn.train.repeats import load_repeat

    part = "best" if weights == "best" else "weights"
    if (repeat := seed_of_weights(folder, config, seed)) is not None:
        return load_repeat(folder, repeat, part)
    learned = rows and config.data.learned > 0
    if (found := load_checkpoint(folder / "checkpoints", list if learned else shared_parts)) is None:
        raise _untrained(folder)
    state = found[1].get(part) or found[1]["weights"]
    if not learned:
        return state
    try:
        whole = all_rows(found[1], best=weights == "best", file=file)
    except OSError as error:
        raise RunError(
            f"learned rows of all vertices cannot be written to {file}: {reason(error)}; free space or choose another --out"
        ) from error
    return state if whole is None else {NAME: whole, **state}


def weights_in_place(
    folder: Path, config: Config, weights: str = "best", seed: int | None = None
) -> tuple[dict[str, Tensor], Rows | None]:
    """Return the weights of a run as `weights_of`, but for its learned rows, which come as they lie in the checkpoint, so
    that a call reads those that it needs; None of a run on features. Raises: as `weights_of`.
    """
    from mggcn.train.checkpoint import load_checkpoint
    from mggcn.train.learned import saved_rows

    if not config.data.learned:
        return weights_of(folder, config, weights, seed), None
    part = "best" if weights == "best" else "weights"
    if (found := load_checkpoint(folder / "checkpoints", list, mapped=True)) is None:
        raise _untrained(folder)
    return found[1].get(part) or found[1]["weights"], saved_rows(found[1], best=weights == "best")


def _untrained(folder: Path) -> RunError:
    return RunError(
        f"{folder} holds no checkpoint, and so no weights; train the run, in Python: call fit() or resume()"
    )


def weights_of_run(folder: Path) -> dict[str, Tensor]:
    """Return the best weights of a run folder. Raises: as `weights_of`; RunError if it is not one."""
    return weights_of(folder, read_run(folder)[0])


def check_start(plan: RunPlan, state: Mapping[str, Tensor]) -> None:
    """Refuse weights that a run cannot begin with. Raises: ConfigError that names what differs from the model's."""
    from mggcn.train.learned import NAME

    check_state(state)
    shape = plan.shape
    expected = {name: tuple(p.shape) for name, p in plan.ranks[0].values.parameters.items()}
    expected |= {NAME: (shape.num_vertices, shape.num_features)} if plan.config.data.learned else {}
    came = {name: tuple(value.shape) for name, value in state.items()}
    names = sorted(expected.keys() | came.keys())
    if differ := [name for name in names if expected.get(name) != came.get(name)]:
        texts = [f"{name} is {came.get(name, 'absent')}, the model's {expected.get(name, 'absent')}" for name in differ]
        raise ConfigError(
            f"a run cannot start from weights of another model: {'; '.join(texts[:4])}; give it the model that they were "
            "trained with, on a graph of as many features and classes"
            + ", of learned rows on the same graph"
            * (NAME in expected or NAME in came)
        )


def keep_start(folder: Path, state: Mapping[str, Tensor]) -> None:
    """Save the weights that a run begins with in its folder, for its ranks and for resuming."""
    from mggcn.train.checkpoint import save_tensors

    save_tensors({name: tensor.detach().cpu().clone() for name, tensor in state.items()}, folder / START)


def start_of(folder: Path) -> dict[str, Tensor] | None:
    """Return the weights that a run begins with, None if they are random. Raises: RunError if they are damaged."""
    from safetensors import SafetensorError

    from mggcn.train.checkpoint import load_tensors

    if not (folder / START).exists():
        return None
    try:
        state: dict[str, Tensor] = load_tensors(folder / START)
    except (OSError, ValueError, SafetensorError) as error:
        raise RunError(f"{folder / START} is damaged: {reason(error)}; start the run again") from error
    return state
