"""Class scores of given weights on the ranks of this process, in memory.

N vertices, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mggcn.config import Config
from mggcn.graph.csr import Graph
from mggcn.jobs.local import on_local_ranks
from mggcn.partition.base import Partition
from mggcn.planning.run import RunPlan

if TYPE_CHECKING:
    from torch import Tensor

    from mggcn.assemble_rank import Rank
    from mggcn.comm.base import Communicator


def scores_here(
    config: Config,
    graph: Graph,
    plan: RunPlan,
    partition: Partition,
    state: Mapping[str, Tensor],
    kept: Rank | None = None,
) -> npt.NDArray[np.floating]:
    """Return the logits (N, C) of all vertices in the graph's order, in the run's precision.

    kept: the only rank of a run, which needs no set-up and has its own weights back at the end. Cost: set-up of the
    ranks, and one forward pass. Raises: ConfigError if the weights are those of another model.
    """

    def body(comm: Communicator) -> tuple[npt.NDArray[np.integer], npt.NDArray[Any]]:
        from mggcn.assemble_rank import make_rank

        rank = kept or make_rank(config, graph, plan, partition, comm)
        runtime = rank.trainer.runtime
        runtime.backend.activate()
        before = runtime.weights.state_dict()
        runtime.weights.load_state_dict(state)
        rank.trainer.evaluate()
        scores, rows = rank.trainer.scores(), runtime.inputs.owned
        runtime.weights.load_state_dict(before)
        mine = slice(None) if rows.owned is None else rows.owned.cpu().numpy()
        return rows.ids.cpu().numpy()[mine], scores[mine]

    parts = on_local_ranks(config, body)
    whole = np.empty((graph.num_vertices, parts[0][1].shape[1]), parts[0][1].dtype)
    for ids, scores in parts:
        whole[ids] = scores
    return whole
