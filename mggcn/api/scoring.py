"""Scores of a trainer's run: of every vertex, of some, of pairs, of another graph, and of given weights.

N vertices, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mggcn.api.graphs import load
from mggcn.assemble.ladder import in_memory
from mggcn.assemble.plan import memory_limit, plan_graph
from mggcn.config import Config
from mggcn.config.files import with_named
from mggcn.errors import RunError
from mggcn.files import require_file, temporary_folder
from mggcn.graph.csr import Graph
from mggcn.graph.ids import rows_of
from mggcn.graph.store import graph_sha256
from mggcn.interop.weights import weights_of_module
from mggcn.partition.base import Partition
from mggcn.planning.advice import require_fit
from mggcn.planning.run import RunPlan
from mggcn.runs import predict as predicting
from mggcn.runs import prediction_files
from mggcn.runs import score as scoring
from mggcn.runs.weights import weights_in_place

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from mggcn.assemble.rank import Rank
    from mggcn.assemble.vertices import VertexScorer
    from mggcn.nn.module_run import ModuleRun

Scores = npt.NDArray[np.floating]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """A planned model's run whose weights score. folder: None before it was trained; state: its weights, best or last."""

    graph: Graph
    config: Config
    plan: RunPlan
    partition: Partition
    folder: Path | None
    rank: Rank | None
    """A single rank of this process, which may score."""
    state: Callable[[str], dict[str, Tensor]]

    @property
    def in_process(self) -> bool:
        """Whether ranks are threads of this process."""
        return self.config.run.transport in ("single", "threads")


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """Which scores `Trainer.predict` is asked for. weights: best or last; layer: a hidden one, None for the scores."""

    weights: str
    probabilities: bool
    classes: bool
    layer: int | None


class LastScorer:
    """Keeps what the last call for some vertices, or for pairs, needs of the graph."""

    def __init__(self) -> None:
        self._kept: tuple[Any, Graph, tuple[VertexScorer, Mapping[str, Tensor]]] | None = None

    def of(
        self, run: Trained, weights: str, layer: int | None, other: Graph | None
    ) -> tuple[VertexScorer, Mapping[str, Tensor]]:
        """Return what scores some vertices, and its weights: those of the last call, if it asked for the same.

        Raises: RunError.
        """
        from mggcn.train.checkpoint import newest

        graph = run.graph if other is None else other
        # Another process may train the run of a folder.
        asked = (weights, layer, newest(_folder(run) / "checkpoints"))
        if self._kept is None or self._kept[0] != asked or self._kept[1] is not graph:
            given = weights_in_place(_folder(run), run.config, weights)
            config, read, state = scoring.with_learned(run.config, graph, *given)
            self._kept = asked, graph, (scoring.scorer_of(config, read, run.plan.shape, state, layer), state)
        return self._kept[2]


def predict(
    run: Trained, wanted: Wanted, last: LastScorer, graph: Any = None, vertices: Any = None, pairs: Any = None
) -> npt.NDArray[Any]:
    """Return what `Trainer.predict` does, of a planned model. Raises: as it."""
    task, shown = run.plan.shape.task, wanted.probabilities
    other = graph if graph is None or isinstance(graph, Graph) else load(graph)
    if other is not None and run.config.data.learned:
        scoring.check_own_graph(run.config, other, graph_sha256(run.graph), other.name, "the run")
        other = None
    if pairs is not None:
        alone = {"layer": wanted.layer, "classes": wanted.classes, "vertices": vertices is not None}
        prediction_files.check_pairs(task, None, alone)
        ends = scoring.rows_of_pairs(run.graph if other is None else other, pairs)
        scorer, state = last.of(run, wanted.weights, None, other)
        return scoring.pair_scores(scorer, ends, state, probabilities=shown)
    prediction_files.check_kind(task, classes=wanted.classes, probabilities=shown)
    prediction_files.check_layer(run.config.model, wanted.layer, classes=wanted.classes, probabilities=shown)
    rows = None if vertices is None else rows_of(run.graph if other is None else other, vertices)
    if rows is not None and scoring.by_neighbourhood(run.config):
        scores = scoring.scores_by(last.of(run, wanted.weights, wanted.layer, other)[0], rows)
        scores = prediction_files.probabilities_of(scores, task) if shown else scores
    else:
        scores = _of_all(run, wanted, other)[slice(None) if rows is None else rows]
    return prediction_files.classes_of(scores, task) if wanted.classes else scores


def _of_all(run: Trained, wanted: Wanted, other: Graph | None) -> Scores:
    """Return the scores of every vertex."""
    layer = wanted.layer
    if other is not None or (run.config.data.learned and run.in_process):
        return score(run, run.state(wanted.weights), wanted.probabilities, other, layer)
    folder = _folder(run)
    if run.in_process:
        state = run.state(wanted.weights)
        if layer is not None:
            limit = scoring.limit_of(run.config)
            planned = scoring.plan_layer(run.config, run.graph, run.plan.shape, layer, limit)
            return scoring.scores_here(*planned, scoring.weights_in(planned[2], state), layer=layer)
        kept = run.rank if run.config.run.ranks == 1 else None
        config = run.config if kept is not None else _with_scratch(run, folder)
        scores = scoring.scores_here(config, run.graph, run.plan, run.partition, state, kept)
        return prediction_files.probabilities_of(scores, run.plan.shape.task) if wanted.probabilities else scores
    place = _place(run, folder)
    with temporary_folder(place) as temporary:
        target = temporary / "scores.npy"
        predicting.predict(folder, target, weights=wanted.weights, probabilities=wanted.probabilities, layer=layer)
        return np.load(require_file(target), allow_pickle=False)  # type: ignore[no-any-return]  # NumPy returns Any


def _place(run: Trained, folder: Path) -> Path | None:
    """Return where rows on disk are to lie: in run.scratch, or the run's folder; None if rows are in memory.

    Raises: RunError if files of the run's folder are in memory.
    """
    if not run.plan.on_disk:
        return None
    if (scratch := run.config.run.scratch) and Path(scratch).is_dir():  # that of a training may be gone
        return Path(scratch)
    if in_memory(folder.absolute()):
        raise RunError(
            f"rows on disk would lie in {folder}, where files are in memory; move the run's folder to a disk, or name a "
            "folder on one: run.scratch in its config.toml"
        )
    return folder


def _with_scratch(run: Trained, folder: Path) -> Config:
    """Return the run's settings with the folder in which its rows are to lie. Raises: as `_place`."""
    place = _place(run, folder)
    return run.config if place is None else with_named(run.config, {"scratch": str(place)})


def _folder(run: Trained) -> Path:
    if run.folder is None:
        raise RunError("the trainer has no weights yet; call fit() first, or scores_of() with weights of your own")
    return run.folder


def score(
    run: Trained,
    state: Mapping[str, Tensor] | Module,
    probabilities: bool,
    other: Graph | None = None,
    layer: int | None = None,
) -> Scores:
    """Score the run's graph, or another one, on one rank of this process, with given weights.

    Raises: ConfigError; PlanError if that needs more memory than there is.
    """
    tensors = state if isinstance(state, Mapping) else weights_of_module(state, run.config.model)
    config = with_named(run.config, {"ranks": 1, "transport": "single", "strategy": "broadcast", "prune": "off"})
    graph, limit = run.graph if other is None else other, scoring.limit_of(config)
    config, graph, tensors = scoring.with_learned(config, graph, tensors)
    if layer is None:
        config, graph = scoring.for_scoring(config, graph, run.plan.shape)
        plan, partition = plan_graph(config, graph, limit=limit)
        if run.plan.shape.task == "links":  # embeddings need no decoder
            tensors = scoring.weights_in(plan, tensors)
    else:
        config, graph, plan, partition = scoring.plan_layer(config, graph, run.plan.shape, layer, limit)
        tensors = scoring.weights_in(plan, tensors)
    if config.run.device != "cpu":  # on CPUs what does not fit is scored by blocks
        require_fit(plan, memory_limit(config))
    scores = scoring.scores_here(config, graph, plan, partition, tensors, layer=layer)
    return prediction_files.probabilities_of(scores, run.plan.shape.task) if probabilities else scores


def predict_module(
    module: ModuleRun,
    graph: Graph,
    state: Mapping[str, Tensor],
    wanted: Wanted,
    other: Any = None,
    vertices: Any = None,
    pairs: Any = None,
) -> npt.NDArray[Any]:
    """Return what `Trainer.predict` does, of a user's own module that was trained on `graph`. Raises: as it."""
    task, shown = graph.task, wanted.probabilities
    other = other if other is None or isinstance(other, Graph) else load(other)
    if pairs is not None:
        prediction_files.check_pairs(task, None, {"classes": wanted.classes, "vertices": vertices is not None})
        ends = scoring.rows_of_pairs(graph if other is None else other, pairs)
        return module.score_pairs(state, ends, other, probabilities=shown)
    prediction_files.check_kind(task, classes=wanted.classes, probabilities=shown)
    rows = None if vertices is None else rows_of(graph if other is None else other, vertices)
    found = module.predict(state, other)
    scores = prediction_files.probabilities_of(found, task) if shown else found
    scores = scores[slice(None) if rows is None else rows]
    return prediction_files.classes_of(scores, task) if wanted.classes else scores
