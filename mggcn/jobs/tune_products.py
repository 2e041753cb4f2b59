"""`mggcn tune --store`: epochs of a run, without a folder, that find out the fastest way of each of its sparse products."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from mggcn.assemble import make_rank, memory_limit, plan_graph
from mggcn.backend.cpu_explore import Exploration
from mggcn.backend.cpu_findings import Findings
from mggcn.config import Config
from mggcn.errors import ConfigError
from mggcn.graph.csr import Graph
from mggcn.jobs.local import on_local_ranks

if TYPE_CHECKING:
    from mggcn.comm.base import Communicator

MOST_EPOCHS = 60
"""Twelve ways three times each, and some: products that are called seldom may be left undecided."""


def tune_products(config: Config, graph: Graph, budget: float) -> Findings:
    """Train until the ways of all products are known, or trying them has cost `budget` epochs; ranks are threads.

    Cost: set-up, then at most MOST_EPOCHS epochs, with evaluations if they have products of its own; memory as planned.
    Raises: ConfigError for a run on a GPU; PlanError if it does not fit; GraphError; TrainError.
    """
    from mggcn.train.tuning import Tuning

    if config.run.device != "cpu":
        raise ConfigError("mggcn tune --store times the CPU's kernels; set run.device = cpu")
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, epochs=MOST_EPOCHS))
    plan, partition = plan_graph(config, graph)
    plan.check(memory_limit(config))
    found: list[Findings] = []

    def body(comm: Communicator) -> None:
        tuning = Tuning(comm, Exploration(budget), found.append)
        rank = make_rank(config, graph, plan, partition, comm, tuning=tuning)
        runtime = rank.trainer.runtime
        for epoch in range(MOST_EPOCHS):
            rank.trainer.step(epoch)
            if tuning.finished:
                break
            if runtime.exact is not runtime.training:
                rank.trainer.evaluate()
        rank.watch.close()

    on_local_ranks(config, body)
    return found[0]
