"""`mggcn tune --store`: epochs of a run, without a folder, that find out the fastest way of each of its sparse products."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from mggcn.assemble import memory_limit, plan_graph
from mggcn.assemble_rank import gpu_of_rank, make_rank
from mggcn.backend.cpu.explore import Exploration
from mggcn.backend.cpu.findings import Findings
from mggcn.config import Config
from mggcn.errors import ConfigError
from mggcn.graph.csr import Graph
from mggcn.jobs.local import on_local_ranks
from mggcn.planning.advice import require_fit

if TYPE_CHECKING:
    from mggcn.backend.cuda.base import Device
    from mggcn.comm.base import Communicator
    from mggcn.train.trainer import Stop

MOST_EPOCHS = 60
"""Twelve ways three times each, and some: products that are called seldom may be left undecided."""
TOLD_EVERY = 10
"""Epochs between two lines that tell how far it is."""


def tune_products(
    config: Config,
    graph: Graph,
    budget: float,
    say: Callable[[str], None],
    stop: Stop,
    device_of: Callable[[Config, Communicator], Device] = gpu_of_rank,
) -> Findings:
    """Train until the ways of all products are known, or trying them has cost `budget` epochs; ranks are threads.

    say: told now and then how far it is. stop: ends it after an epoch, with what is known.
    device_of: which device serves a rank under run.device cuda.
    Cost: set-up, then at most MOST_EPOCHS epochs, with evaluations if they have products of their own; memory as planned.
    Raises: ConfigError for cuSPARSE's products; PlanError if it does not fit; GraphError; TrainError.
    """
    import torch

    from mggcn.train.tuning import Tuning

    if config.run.spmm != "own":
        raise ConfigError(f"mggcn tune --store times mggcn's own products, got run.spmm {config.run.spmm}; use own")
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, epochs=MOST_EPOCHS))
    plan, partition = plan_graph(config, graph)
    require_fit(plan, memory_limit(config))
    found: list[Findings] = []

    def body(comm: Communicator) -> None:
        tuning = Tuning(comm, Exploration(budget), found.append)
        rank = make_rank(config, graph, plan, partition, comm, device_of=device_of, tuning=tuning)
        runtime = rank.trainer.runtime
        for epoch in range(MOST_EPOCHS):
            rank.trainer.step(epoch)
            # Each rank sees a signal at its own time; all must end after the same epoch.
            stopped = torch.tensor([stop.signal])
            comm.all_reduce(stopped).wait()
            if tuning.finished or stopped.item():
                break
            if comm.rank == 0 and (epoch + 1) % TOLD_EVERY == 0:
                say(progress(epoch + 1, tuning.exploration))
            if runtime.exact is not runtime.training:
                rank.trainer.evaluate()
        rank.watch.close()

    on_local_ranks(config, body)
    return found[0]


def progress(epochs: int, exploration: Exploration) -> str:
    """Return how far a rank is, in words."""
    trials = [trial for trial in exploration.trials if len(trial.ways) > 1]
    cost = exploration.cost_s / exploration.epoch_s
    return (
        f"epoch {epochs} of at most {MOST_EPOCHS}: {sum(trial.over for trial in trials)} of {len(trials)} sparse products "
        f"are known, at a cost of {cost:.1f} epochs so far (rank 0)"
    )
