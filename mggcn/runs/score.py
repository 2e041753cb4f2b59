"""Class scores of weights in memory, whatever run or file they come from: what is planned, and who computes.

N vertices, C classes.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mggcn.assemble.plan import plan_graph
from mggcn.config import CLASS_SETTINGS, Config, LinksConfig
from mggcn.config.files import with_named
from mggcn.errors import ConfigError, PlanError
from mggcn.graph.csr import ArrayRows, Graph, Rows
from mggcn.graph.ids import rows_of
from mggcn.graph.store import graph_sha256
from mggcn.memory.device import scale_dtype
from mggcn.memory.units import human
from mggcn.model.network import NETWORKS
from mggcn.model.stack import HiddenLayer
from mggcn.partition.base import Partition
from mggcn.planning.block_evaluation import ScoringPlan, plan_scoring
from mggcn.planning.run import RunPlan
from mggcn.planning.shape import GraphShape, in_blocks
from mggcn.runs.local import free_per_rank, on_local_ranks

if TYPE_CHECKING:
    from torch import Tensor

    from mggcn.assemble.rank import Rank
    from mggcn.assemble.vertices import VertexScorer
    from mggcn.comm.base import Communicator

log: logging.Logger = logging.getLogger(__name__)


def check_alike(
    config: Config, graph: Graph, trained_on: GraphShape, what: str = "the graph", run: str = "the run"
) -> None:
    """Raise an error if the weights cannot be applied to a graph.

    Raises: ConfigError for another number of features, or more relations than the run was trained on.
    """
    width, expected = graph.num_features, trained_on.num_features
    if width != expected:
        raise ConfigError(f"{what} has {width} features, {run} was trained on {expected}")
    if config.model.kind == "rgcn" and graph.num_relations > trained_on.num_relations:
        raise ConfigError(
            f"{what} has {graph.num_relations} relations, {run} was trained on {trained_on.num_relations}; the model "
            "has no weights for the others: give edges only the types that it was trained on, with the same numbers"
        )


def check_own_graph(config: Config, graph: Graph, sha256: str, what: str, run: str) -> None:
    """Refuse a graph other than the one whose vertices have the learned rows of a run. Raises: ConfigError."""
    if graph_sha256(graph) != sha256:
        raise ConfigError(
            f"{run} learned rows for the vertices of its own graph (data.inputs {config.data.inputs}), and {what} is "
            "another, or has changed: its vertices have none; a run on features scores other graphs"
        )


def with_learned(
    config: Config, graph: Graph, state: Mapping[str, Tensor], rows: Rows | None = None
) -> tuple[Config, Graph, Mapping[str, Tensor]]:
    """Return settings and graph of a run that is only scored, its learned rows as features, and the other weights.

    rows: those of all vertices (N, D), if they are not among the weights. Those of a run on features are returned as they
    are. Raises: ConfigError for weights without the rows of the graph.
    """
    if not config.data.learned:
        return config, graph, state
    from mggcn.train.learned import NAME

    expected = (graph.num_vertices, config.data.learned)
    if rows is None and NAME in state:
        rows = ArrayRows(state[NAME].detach().cpu().numpy())
    came = "none" if rows is None else rows.shape
    if rows is None or came != expected:
        raise ConfigError(
            f"the run has learned rows {expected} of the graph's vertices, {NAME}, and the weights have {came}; give those "
            "of a run on this graph"
        )
    others = {name: tensor for name, tensor in state.items() if name != NAME}
    data = dataclasses.replace(config.data, inputs="stored")
    config = dataclasses.replace(config, data=data, train=dataclasses.replace(config.train, row_optimizer="adam"))
    return config, dataclasses.replace(graph, features=rows), others


def for_scoring(config: Config, graph: Graph, trained_on: GraphShape) -> tuple[Config, Graph]:
    """Return a graph that is only scored, with placeholders for labels and splits, which ranks read, and without links.

    trained_on: the graph that the weights come from. Raises: ConfigError as `check_alike`.
    """
    check_alike(config, graph, trained_on)
    relations = max(graph.num_relations, trained_on.num_relations) if graph.num_relations else 0
    types = {"labels": np.int8, "numbers": np.float32}
    shape = (graph.num_vertices, trained_on.num_classes) if trained_on.task in types else (graph.num_vertices,)
    labels = ArrayRows(np.zeros(shape, types.get(trained_on.task, np.int64)))
    everything = ArrayRows(np.ones((1, graph.num_vertices), np.bool_))
    graph = dataclasses.replace(
        graph,
        labels=labels,
        splits={"train": everything},
        num_classes=trained_on.num_classes,
        num_relations=relations,
        links={},
    )
    settings: dict[str, Any] = {
        "schedule": "constant",
        "metric": "mae" if trained_on.task == "numbers" else "accuracy",
        **CLASS_SETTINGS,
    }
    train = dataclasses.replace(config.train, patience=0, **settings)
    data = dataclasses.replace(config.data, splits="main", split=0)
    # What does not fit is scored by blocks, which read rows from the store.
    config = config.on_rung("memory")
    return dataclasses.replace(config, train=train, data=data, links=LinksConfig()), graph


def plan_layer(
    config: Config, graph: Graph, trained_on: GraphShape, layer: int, limit: int
) -> tuple[Config, Graph, RunPlan, Partition]:
    """Plan a model whose scores are the outputs of a hidden layer, from 1. limit: as of `plan_graph`.

    Raises: as `for_scoring`, `plan_graph`.
    """
    width = config.model.hidden[layer - 1]
    config, graph = for_scoring(config, graph, dataclasses.replace(trained_on, num_classes=width))
    return config, graph, *plan_graph(config, graph, network=HiddenLayer(layer), limit=limit)


def limit_of(config: Config) -> int:
    """Return the bytes that each rank may use to score all vertices, by which all of them decide how: what is free now, and
    no more than the run's own limit; on a GPU 0.
    """
    if config.run.device != "cpu":
        return 0
    free = free_per_rank(config)
    return min(config.run.memory_limit or free, free)


def scored_by_blocks(plan: RunPlan, limit: int) -> bool:
    """Return whether all vertices are scored by blocks: as evaluations are, or because the whole graph's program needs
    more than `limit` bytes; on a GPU never.
    """
    needed = max(rank.scoring_bytes for rank in plan.ranks)
    return plan.by_blocks or (plan.config.run.device == "cpu" and needed > limit)


def say_by_blocks(plan: RunPlan, limit: int) -> None:
    """Warn that scores are computed by blocks because the way that was planned does not fit; nothing if blocks were."""
    if plan.by_blocks:
        return
    needed, how = max(rank.scoring_bytes for rank in plan.ranks), ", with rows on disk," if plan.on_disk else ""
    log.warning(
        "scores of all vertices%s need %s a rank, and %s may be used: they are computed by blocks, layer by layer%s",
        how,
        human(needed),
        human(limit),
        ", and begin anew if they are interrupted" if plan.on_disk else "",
    )


def agreed_by_blocks(comm: Communicator, plan: RunPlan, limit: int) -> bool:
    """Return `scored_by_blocks` of the first rank: what ranks plan may differ, as the figures that they measure do.

    Collective.
    """
    from mggcn.comm.gather import gather_texts

    if plan.config.run.device != "cpu":
        return False
    return gather_texts(comm, str(scored_by_blocks(plan, limit)))[0] == str(True)


def scoring_plan(graph: Graph, plan: RunPlan, limit: int, layer: int | None = None) -> ScoringPlan:
    """Plan the scores of all vertices by blocks; plan: of the whole graph. layer: as of `predict`.

    Raises: PlanError if that needs more than `limit` bytes, too.
    """
    config, network = plan.config, None if layer is None else HiddenLayer(layer)
    found = plan_scoring(config, in_blocks(plan.shape, graph, config), plan.figures, network)
    if found.total_bytes > limit:
        why = ", as the run's memory_limit says" if limit == config.run.memory_limit else ""
        raise PlanError(
            f"scores of all {graph.num_vertices:,} vertices need {human(found.total_bytes)} a rank, computed layer "
            f"by layer, and {human(limit)} may be used{why}; free memory, take a machine with more, or "
            "score some vertices, of which only the neighbourhood is read: --vertices, in Python vertices="
        )
    return found


def weights_in(plan: RunPlan, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a run that a plan's model has."""
    return {name: state[name] for name in plan.ranks[0].values.parameters}


def by_neighbourhood(config: Config) -> bool:
    """Return whether scores of some vertices are computed from their neighbourhood alone: on CPUs; elsewhere of all."""
    return config.run.device == "cpu"


def scorer_of(
    config: Config, graph: Graph, trained_on: GraphShape, state: Mapping[str, Tensor], layer: int | None = None
) -> VertexScorer:
    """Return what scores some vertices of a graph with the weights of a run, of whatever device and number of ranks.

    Cost: as VertexScorer, on the CPU. Raises: ConfigError as `check_alike`.
    """
    from mggcn.assemble.vertices import VertexScorer

    check_alike(config, graph, trained_on)
    run, model = config.run, config.model
    one: dict[str, Any] = {"ranks": 1, "transport": "single", "strategy": "broadcast", "prune": "off"}
    if not by_neighbourhood(config):
        precision = "fp32" if run.precision == "tf32" else run.precision
        one |= {"device": "cpu", "precision": precision, "memory_limit": 0}
    network, columns = NETWORKS[model.kind], trained_on.num_classes
    if layer is not None:
        network, columns = HiddenLayer(layer), model.hidden[layer - 1]
    return VertexScorer(with_named(config, one), graph, columns, network, state)


def scores_by(scorer: VertexScorer, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.floating]:
    """Return the scores (K, C) of vertices in this order, in the run's precision. Raises: as VertexScorer.scores."""
    scores: npt.NDArray[np.floating] = on_local_ranks(scorer.config, lambda comm: scorer.scores(rows, comm))[0]
    return scores


def rows_of_pairs(graph: Graph, pairs: Any) -> npt.NDArray[np.int64]:
    """Return the rows of pairs of ids (K, 2), as `rows_of`. Raises: ConfigError for other shapes, and as there."""
    wanted = np.asarray(pairs)
    if wanted.ndim != 2 or wanted.shape[1] != 2 or not wanted.size:
        raise ConfigError(f"pairs must be a list of two ids each, (K, 2), one at least, got shape {wanted.shape}")
    return rows_of(graph, wanted.ravel(), "pairs").reshape(-1, 2)


def pair_scores(
    scorer: VertexScorer, pairs: npt.NDArray[np.int64], state: Mapping[str, Tensor], *, probabilities: bool
) -> npt.NDArray[np.float64]:
    """Return the scores (K,) of pairs of rows (K, 2), logits of a link, or probabilities, with the weights of a run.

    Cost: the neighbourhoods of all their vertices, as `scores_by`. Raises: as there.
    """
    import torch

    from mggcn.train.link_scores import PairDecoder, decoder_layers

    vertices, places = np.unique(pairs, return_inverse=True)
    x = torch.from_numpy(scores_by(scorer, vertices))
    heads, tails = places.reshape(-1, 2).T.copy()
    layers = decoder_layers(state, scorer.config.links.decoder)
    found = PairDecoder(layers).scores(x, heads, tails[:, None])[:, 0]
    return torch.from_numpy(found).sigmoid().numpy() if probabilities else found


def score_rows(rank: Rank, write: Callable[[npt.NDArray[np.int64], npt.NDArray[Any]], None]) -> None:
    """Evaluate, and hand the scores of the rows that a rank counts to `write`, as they are computed. Collective.

    write: gets the ids (rows,) of some vertices and their scores (rows, C) in the type of the weights, valid while it runs.
    """
    runtime = rank.trainer.runtime
    rows, exact = runtime.inputs.owned, runtime.weights.flat.dtype
    ids = rows.ids.cpu().numpy()
    mine = np.ones(ids.size, np.bool_)
    if rows.owned is not None:
        mine[:] = False
        mine[rows.owned.cpu().numpy()] = True

    def take(first: int, logits: Tensor) -> None:
        some = slice(first, first + len(logits))
        write(ids[some][mine[some]], logits.to(exact).cpu().numpy()[mine[some]])

    rank.trainer.each_scores(take)


def scores_here(
    config: Config,
    graph: Graph,
    plan: RunPlan,
    partition: Partition,
    state: Mapping[str, Tensor],
    kept: Rank | None = None,
    layer: int | None = None,
) -> npt.NDArray[np.floating]:
    """Return the logits (N, C) of all vertices in the graph's order, in the run's precision, computed by the plan, or by
    blocks where that does not fit.

    kept: the only rank of a run, which needs no set-up and has its own weights back at the end. layer: of which the plan's
    network is. Cost: set-up of the ranks, and one forward pass. Raises: ConfigError if the weights are those of another
    model; PlanError if neither fits.
    """
    if (kept is None or plan.by_blocks) and scored_by_blocks(plan, free := limit_of(config)):
        returned = graph.num_vertices * plan.shape.num_classes * np.dtype(scale_dtype(config.run.precision)).itemsize
        limit = free - -(-returned // config.run.ranks)  # of all ranks, which are threads here
        blocks = scoring_plan(graph, plan, limit, layer)
        say_by_blocks(plan, free)
        return _by_blocks_here(plan, blocks, graph, state)

    shape, real = (graph.num_vertices, plan.shape.num_classes), scale_dtype(config.run.precision)
    whole: npt.NDArray[np.floating] = np.empty(shape, real)

    def write(ids: npt.NDArray[np.int64], scores: npt.NDArray[Any]) -> None:
        whole[ids] = scores  # the rows of each rank, which are threads here, are others

    def body(comm: Communicator) -> None:
        from mggcn.assemble.rank import make_rank

        rank = kept or make_rank(config, graph, plan, partition, comm)
        runtime = rank.trainer.runtime
        runtime.backend.activate()
        before = runtime.weights.state_dict()
        runtime.weights.load_state_dict(state)
        score_rows(rank, write)
        runtime.weights.load_state_dict(before)

    on_local_ranks(config, body)
    return whole


def _by_blocks_here(
    plan: RunPlan, blocks: ScoringPlan, graph: Graph, state: Mapping[str, Tensor]
) -> npt.NDArray[np.floating]:
    """As `scores_here`, by blocks."""
    from mggcn.assemble.all_vertices import score_by_blocks

    config, shape = plan.config, (graph.num_vertices, plan.shape.num_classes)
    whole: npt.NDArray[np.floating] = np.empty(shape, scale_dtype(config.run.precision))

    def write(rows: range, scores: npt.NDArray[Any]) -> None:
        whole[rows.start : rows.stop] = scores

    on_local_ranks(config, lambda comm: score_by_blocks(config, graph, blocks, state, comm, write))
    return whole
