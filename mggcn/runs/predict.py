"""Class scores of every vertex in the original order, from a run folder to a file (runs/score.py computes them).

N vertices, C classes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mggcn.assemble.ladder import space_elsewhere
from mggcn.assemble.plan import partition_graph, plan_again, plan_graph
from mggcn.comm.launch import run_ranks
from mggcn.config import Config
from mggcn.errors import ConfigError, PlanError, RunError
from mggcn.files import reason, remove_abandoned, temporary_folder
from mggcn.graph.class_names import recorded_names
from mggcn.graph.csr import ArrayRows, Graph
from mggcn.graph.durable import reserve
from mggcn.graph.ids import ids_of, rows_of
from mggcn.graph.store import graph_sha256, open_store
from mggcn.host import python
from mggcn.memory.device import scale_dtype
from mggcn.planning.block_evaluation import ScoringPlan
from mggcn.planning.run import RunPlan
from mggcn.planning.shape import GraphShape
from mggcn.runs import score
from mggcn.runs.folder import known_plan, read_run, require_planned, seed_of_weights
from mggcn.runs.local import in_processes, on_local_ranks
from mggcn.runs.occupied import occupied
from mggcn.runs.partial import SCORES, discard_partial, identity_of, partial_prediction, scores_identity
from mggcn.runs.prediction_files import (
    MappedScores,
    check_kind,
    check_layer,
    check_pairs,
    check_target,
    probabilities_of,
    write_predictions,
)
from mggcn.runs.weights import weights_in_place, weights_of

if TYPE_CHECKING:
    from torch import Tensor

    from mggcn.assemble.rank import Rank
    from mggcn.comm.base import Communicator


def predict(
    folder: Path,
    out: Path | None = None,
    *,
    weights: str = "best",
    seed: int | None = None,
    probabilities: bool = False,
    classes: bool = False,
    layer: int | None = None,
    store: Path | None = None,
    vertices: Any = None,
    pairs: Any = None,
) -> Path:
    """Write the scores of every vertex in the original order, (N, C) in the run's precision, as the suffix of `out` says.

    weights: "best" (validation) or "last"; scores are logits unless `probabilities` or `classes`. Runs on the run's ranks.
    seed: of a run with repeats, whose weights; by default those of the best validation score of all complete repeats.
    layer: a hidden layer, from 1, whose outputs (N, model.hidden[layer - 1]) are written instead of scores.
    store: another one with the same features; it needs neither labels nor splits. vertices: the ids of those
    that are wanted, in this order, as of `rows_of`; where `by_neighbourhood`, in this process, nothing else is computed.
    pairs: ids (K, 2) of pairs, whose scores float64 (K,) are written instead, logits of a link or probabilities.
    Returns the path.
    Raises: RunError if the run has no checkpoint; ConfigError for a seed that it does not have, if `out` cannot be written,
    or if the features differ.
    """
    config, plan, job = read_run(folder)
    require_planned(folder, plan)
    name = "pairs" if pairs is not None else "scores" if layer is None else f"layer-{layer}"
    target = out or folder / f"{name}{'' if vertices is None else '-selected'}.npy"
    trained_on = GraphShape(**plan["graph"])
    check_target(target)
    if pairs is not None:
        check_pairs(trained_on.task, target, {"layer": layer, "classes": classes, "vertices": vertices is not None})
    else:
        check_kind(trained_on.task, classes=classes, probabilities=probabilities)
    check_layer(config.model, layer, classes=classes, probabilities=probabilities)
    source, graph = _scored_graph(folder, config, job, store, trained_on)
    ends = None if pairs is None else score.rows_of_pairs(graph, pairs)
    ids, rows = graph.ids, None if vertices is None else rows_of(graph, vertices)
    repeat = seed_of_weights(folder, config, seed)
    of_run: tuple[Any, ...] = (folder, config, weights, repeat)
    arguments = {
        "limit": score.limit_of(config),
        "seed": repeat,
        "store": str(source.resolve()),
        "weights": weights,
        "probabilities": probabilities,
        "layer": layer,
        "partial": "",
    }
    rewritten = classes or target.suffix != ".npy"
    column = "feature" if layer is not None or (trained_on.task == "links" and pairs is None) else "score"
    names = recorded_names(plan.get("class_names"), trained_on.num_classes) if layer is None else ()

    def finish(scored: Path) -> None:
        if rewritten:
            write_predictions(scored, target, trained_on.task, classes=classes, ids=ids, name=column, class_names=names)
        else:
            scored.replace(target)

    own = layer is None and pairs is None and rows is None and arguments["store"] == job["store"]
    if own and plan.get("capacity") == "disk":
        with partial_prediction(target, config.run.scratch) as partial:
            identity = scores_identity(
                folder, str(config), graph_sha256(graph), weights, repeat, probabilities=probabilities
            )
            if not partial.holds(identity):
                inside = {"out": str(partial.scores.resolve()), "partial": str(partial.folder.resolve())}
                _score(config, folder, store, arguments | inside)
                if rewritten:
                    partial.keep(identity)
            finish(partial.scores)
        remove_abandoned(*_beside(target))
        return target
    with _unfinished(target) as scored:
        if ends is not None:
            settings, read, state = score.with_learned(config, graph, *weights_in_place(*of_run))
            scorer = score.scorer_of(settings, read, trained_on, state)
            _save(scored, score.pair_scores(scorer, ends, state, probabilities=probabilities))
        elif rows is not None and score.by_neighbourhood(config):
            settings, read, state = score.with_learned(config, graph, *weights_in_place(*of_run))
            some = score.scores_by(score.scorer_of(settings, read, trained_on, state, layer), rows)
            _save(scored, probabilities_of(some, trained_on.task) if probabilities else some)
        else:
            _score(config, folder, store, arguments | {"out": str(scored.resolve())})
            if rows is not None:
                _save(scored, np.load(scored, mmap_mode="r", allow_pickle=False)[rows])
        if rows is not None:
            ids = ArrayRows(ids_of(graph)[rows])
        finish(scored)
    discard_partial(target)
    return target


def _scored_graph(
    folder: Path, config: Config, job: Mapping[str, Any], store: Path | None, trained_on: GraphShape
) -> tuple[Path, Graph]:
    """Return the store to score, by default the run's own, and its graph.

    Raises: RunError without a store or a checkpoint; ConfigError if the graph is none that the run can score.
    """
    source = store or (Path(job["store"]) if job["store"] else None)
    if source is None:
        raise RunError(f"{folder} was trained on a graph in memory; name the store to predict on with --store")
    if not (folder / "checkpoints" / "latest").exists():
        raise RunError(f"{folder} holds no checkpoint to predict with; train the run to its end first")
    graph = open_store(source)
    if config.data.learned:
        score.check_own_graph(config, graph, job["graph_sha256"], str(source), f"the run in {folder}")
    else:
        score.check_alike(config, graph, trained_on, str(source), f"the run in {folder}")
    return source, graph


@contextlib.contextmanager
def _unfinished(target: Path) -> Iterator[Path]:
    """Yield the file of scores from which `target` is made, in a folder of its own beside it.

    What a killed prediction for the same file has left there is removed. Raises: RunError if the folder cannot be made.
    """
    with contextlib.ExitStack() as held:
        with _naming(target):
            folder = held.enter_context(temporary_folder(*_beside(target)))
        yield folder / SCORES


def _beside(target: Path) -> tuple[Path, str]:
    """Return the folder of a file, and how the names of folders begin in which it is made."""
    return target.absolute().parent, f".{target.name}.partial-"


def _save(target: Path, scores: npt.NDArray[Any]) -> None:
    """Write the scores of some vertices. Raises: RunError."""
    try:
        np.save(target, scores, allow_pickle=False)
    except OSError as error:
        raise _not_written(target, error) from error


def _score(config: Config, folder: Path, store: Path | None, arguments: dict[str, Any]) -> None:
    """Have the ranks of a run write their scores. Of learned rows all ranks map one file."""
    rows = Path(arguments["out"]).with_suffix(".rows.npy") if config.data.learned else None
    arguments = arguments | {"rows": "" if rows is None else str(rows)}
    of_run: tuple[Any, ...] = (folder, config, arguments["weights"], arguments["seed"])
    try:
        if not in_processes(config):
            chosen = weights_of(*of_run, file=rows)
            on_local_ranks(config, lambda comm: predict_worker(comm, folder, arguments, chosen))
            return
        if store is not None:
            partition_graph(config, open_store(store))  # once, before every rank looks for it
        command = [*python("mggcn.runs.worker"), "predict", str(folder), "--arguments", json.dumps(arguments)]
        with occupied(folder):  # ranks leave their reports and logs there
            if rows is not None:
                weights_of(*of_run, file=rows)
            run_ranks(command, config.run.ranks, folder, timeout_s=config.run.timeout_s)
    finally:
        if rows is not None:
            rows.unlink(missing_ok=True)


def predict_worker(
    comm: Communicator, folder: Path, arguments: dict[str, Any], chosen: Mapping[str, Tensor] | None = None
) -> None:
    """Score this rank's vertices into the shared file.

    chosen: the run's weights, by default read from its folder, which no other command may be at work in then: ranks would
    read those of different epochs.
    """
    from mggcn.assemble.rank import make_rank
    from mggcn.train.partial import Partial

    config, recorded, job = read_run(folder)
    # What is only evaluated needs no matrices of training epochs.
    beside = str(Path(arguments["out"]).parent)
    # What goes on where it was killed is beside its file; the folder of a training may be gone.
    scratch = beside if arguments["partial"] else config.run.scratch or beside
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, prune="off", scratch=scratch))
    graph, layer = open_store(arguments["store"]), arguments["layer"]
    trained_on = GraphShape(**recorded["graph"])
    if chosen is None:
        chosen = _chosen_weights(folder, config, arguments)
    limit, target, learned = arguments["limit"], Path(arguments["out"]), config.data.learned > 0
    config, graph, chosen = score.with_learned(config, graph, chosen)
    if layer is not None:
        config, graph, plan, partition = score.plan_layer(config, graph, trained_on, layer, limit)
        chosen = score.weights_in(plan, chosen)
    elif arguments["store"] == job["store"] and not learned:
        plan, partition = known_plan(folder, config, graph)
        plan = _in_less_memory(config, recorded, plan, limit)
    else:
        config, graph = score.for_scoring(config, graph, trained_on)
        plan, partition = plan_graph(config, graph, limit=limit)
        chosen = score.weights_in(plan, chosen) if trained_on.task == "links" else chosen
    probabilities = arguments["probabilities"]
    if score.agreed_by_blocks(comm, plan, limit):
        blocks = score.scoring_plan(graph, plan, limit, layer)
        if comm.rank == 0:
            score.say_by_blocks(plan, limit)
        write_by_blocks(comm, plan, blocks, chosen, graph, target, probabilities)
        return
    partial = None
    if arguments["partial"]:
        identity = identity_of(plan.ranks[comm.rank], str(config), job["graph_sha256"], chosen)
        partial = Partial(Path(arguments["partial"]), identity, comm)
    rank = make_rank(config, graph, plan, partition, comm, partial=partial)
    rank.trainer.runtime.weights.load_state_dict(chosen)
    write_scores(comm, rank, target, plan, probabilities)


def _in_less_memory(config: Config, recorded: Mapping[str, Any], plan: RunPlan, limit: int) -> RunPlan:
    """Return the plan of a run from disk, made again where less is free than it was made for: the bits stay."""
    if not plan.on_disk or not score.scored_by_blocks(plan, limit):
        return plan
    with contextlib.suppress(ConfigError, PlanError):
        # The space on disk is asked for when it is reserved.
        again = plan_again(config, recorded, limit, space_elsewhere(config))
        if not score.scored_by_blocks(again, limit):
            return again
    return plan


def _chosen_weights(folder: Path, config: Config, arguments: dict[str, Any]) -> Mapping[str, Tensor]:
    """Return the weights that a rank process scores with, learned rows as they lie in the file that all ranks map."""
    import torch

    from mggcn.train.learned import NAME

    rows = arguments["rows"]
    chosen = weights_of(folder, config, arguments["weights"], arguments["seed"], rows=not rows)
    if rows:
        # Private copies of pages that are written to, of which there are none: torch warns of arrays that are read-only.
        chosen[NAME] = torch.from_numpy(np.load(rows, mmap_mode="c", allow_pickle=False))
    return chosen


@contextlib.contextmanager
def written_together(
    comm: Communicator, target: Path, dtype: npt.DTypeLike, shape: tuple[int, int]
) -> Iterator[MappedScores]:
    """Yield what writes one array (N, C) of all ranks, which becomes the `.npy` file `target` once it is whole. Collective.

    Its space on the disk is reserved. Raises: RunError if the file cannot be made.
    """
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        with _naming(target):
            if comm.rank == 0:
                os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666))
                np.lib.format.open_memmap(temporary, "w+", dtype, shape).flush()
                with temporary.open("r+b") as file:  # where the disk is full, a store to memory ends the process
                    reserve(file.fileno(), temporary.stat().st_size)
            comm.barrier()
            whole = MappedScores(temporary)
        yield whole
        with _naming(target):
            whole.flush()
            comm.barrier()
            if comm.rank == 0:
                temporary.rename(target)
    finally:
        if comm.rank == 0:
            temporary.unlink(missing_ok=True)


def write_scores(comm: Communicator, rank: Rank, target: Path, plan: RunPlan, probabilities: bool) -> None:
    """Write the rows of every rank to one `.npy` by original id, as they are computed. Collective. Raises: RunError."""
    shape, real = plan.shape, scale_dtype(plan.config.run.precision)
    with written_together(comm, target, real, (shape.num_vertices, shape.num_classes)) as whole:

        def write(ids: npt.NDArray[np.int64], scores: npt.NDArray[Any]) -> None:
            whole.write(ids, probabilities_of(scores, shape.task) if probabilities else scores)

        score.score_rows(rank, write)


def write_by_blocks(
    comm: Communicator,
    plan: RunPlan,
    blocks: ScoringPlan,
    state: Mapping[str, Tensor],
    graph: Graph,
    target: Path,
    probabilities: bool,
) -> None:
    """Write the scores of all vertices to one `.npy`, as they are computed by blocks. Collective. Raises: RunError."""
    from mggcn.assemble.all_vertices import score_by_blocks

    real, shape = scale_dtype(plan.config.run.precision), (graph.num_vertices, plan.shape.num_classes)
    with written_together(comm, target, real, shape) as whole:

        def write(rows: range, scores: npt.NDArray[Any]) -> None:
            places = slice(rows.start, rows.stop)
            whole.write(places, probabilities_of(scores, graph.task) if probabilities else scores)

        score_by_blocks(plan.config, graph, blocks, state, comm, write)


@contextlib.contextmanager
def _naming(target: Path) -> Iterator[None]:
    """Raise RunError that names the file where it cannot be written."""
    try:
        yield
    except OSError as error:
        raise _not_written(target, error) from error


def _not_written(target: Path, error: OSError) -> RunError:
    return RunError(f"the scores cannot be written to {target.parent}: {reason(error)}; choose another --out")
