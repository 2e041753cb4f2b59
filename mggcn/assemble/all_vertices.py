"""Scores of all vertices by blocks: layer by layer on the ranks of a machine, with nothing of training.

N vertices, T of a range, C columns of scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from mggcn.assemble.batches import mapped_once, norm_of, shard_options
from mggcn.assemble.plan import threads_per_rank
from mggcn.backend.cpu.backend import CpuBackend
from mggcn.comm.base import Communicator
from mggcn.config import Config
from mggcn.feed.features import VertexFeatures
from mggcn.graph.csr import Graph
from mggcn.memory.device import REAL, STORAGE
from mggcn.model.runtime import Inputs
from mggcn.partition.order import whole_graph
from mggcn.planning.block_evaluation import ScoringPlan
from mggcn.train.block_evaluator import BlockEvaluator, EvaluatedGraph
from mggcn.train.runtime import DTYPES, RankRuntime, Weights

WriteScores = Callable[[range, npt.NDArray[Any]], object]
"""Takes the scores (T, C) of a range of vertices, in the type of the weights."""


def score_by_blocks(
    config: Config,
    graph: Graph,
    plan: ScoringPlan,
    state: Mapping[str, Tensor],
    comm: Communicator,
    write: WriteScores,
) -> None:
    """Compute this rank's share of the scores, a range of the vertices, and give them to `write` some at a time.

    Collective. state: weights by name, those of the model among them. Cost: every edge and every row once a layer, over
    all ranks.
    Raises: ConfigError if the weights are those of another model; CommError if ranks are on several machines.
    """
    run, values, evaluation = config.run, plan.evaluation.values, plan.evaluation
    threads, real = threads_per_rank(config), DTYPES[REAL[run.precision]]
    torch.set_num_threads(threads)
    backend = CpuBackend(DTYPES[STORAGE[run.precision]], threads, figures=plan.figures)
    backend.activate()
    graph = mapped_once(graph if values.typed else graph.untyped())
    weights = Weights(values.parameters, real, backend)
    weights.load_state_dict({name: state[name] for name in values.parameters if name in state})
    runtime = RankRuntime(
        backend=backend,
        programs={},
        inputs=Inputs(rows={}),
        weights=weights,
        signals=backend.allocate(0),
        counts=backend.allocate(0),
        clock=backend.allocate(16).view(torch.int64),
        comm=comm,
    )
    read = EvaluatedGraph(
        adj_t=graph.adj_t,
        features=VertexFeatures(graph, config.data.row_normalize),
        norm=norm_of(config, graph),
        options=shard_options(config),
        everyone=whole_graph(graph.num_vertices),
        required=(None,) * (len(evaluation.blocks) + 1),
    )
    evaluator = BlockEvaluator(evaluation, read, runtime, backend.allocate(evaluation.arena_bytes))
    evaluator.run(lambda span, rows: write(span, rows.to(real).numpy()))
