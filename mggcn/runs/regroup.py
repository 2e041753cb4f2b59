"""A run that continues on another number of ranks: what ranks share is in its checkpoint, all else is planned again."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from mggcn.assemble.ladder import space_of
from mggcn.assemble.plan import check_available, memory_limit, plan_graph, resolve, room_of
from mggcn.comm.rank import ranks_here, torchrun_env
from mggcn.config import Config
from mggcn.errors import ConfigError
from mggcn.graph.csr import Graph
from mggcn.planning.advice import require_fit
from mggcn.runs.folder import read_run, require_graph, write_plan


def with_ranks(config: Config, ranks: int) -> Config:
    """Return the configuration of a run with another number of ranks.

    Raises: ConfigError if its strategy's results or state depend on the number, or the number is impossible.
    """
    run = config.run
    if ranks == run.ranks:
        return config
    as_before = (
        f"start torchrun with {run.ranks} ranks, --nnodes and --nproc-per-node" if torchrun_env() else "remove --ranks"
    )
    if run.strategy == "delayed" and run.delay != "0":
        why = "keeps messages in flight between" if run.delay_epochs else "leaves out the edges between"
        raise ConfigError(
            f"run.delay {run.delay} {why} its {run.ranks} ranks, so the run cannot continue on {ranks}; "
            f"{as_before}, or begin a new run with these weights: --start-from"
        )
    if config.sample.batch and config.sample.halo == "history":
        raise ConfigError(
            f"sample.halo history keeps rows and messages by rank, and one rank has none, so the run of {run.ranks} cannot "
            f"continue on {ranks}; "
            f"{as_before}, or begin a new run with these weights: --start-from"
        )
    transport = "auto" if run.transport in ("single", run.process_transport) else run.transport
    return dataclasses.replace(config, run=dataclasses.replace(run, ranks=ranks, transport=transport))


def regrouped(folder: Path, config: Config, graph: Graph, store: Path | None) -> Config:
    """Plan the run of a folder for the ranks that `config` names, if it was planned for others; return its configuration.

    The results are those of a run that never stopped, but for rounding: sums are taken in another order. Memory is
    checked as for a new run. Cost: as planning; nothing if the number is the same.
    Raises: RunError if the graph has changed; PlanError, ConfigError.
    """
    _, plan_before, job = read_run(folder)
    planned, ranks = job["assignment"], config.run.ranks
    # Ranks that have come to several machines share no memory, in which evaluation by blocks keeps rows.
    apart = plan_before.get("evaluate") == "blocks" and ranks_here(ranks) < ranks
    if not isinstance(planned, dict) or (planned.get("ranks") == ranks and not apart):
        return config
    require_graph(folder, graph)
    config = resolve(config, graph)
    check_available(config)
    limit = memory_limit(config)
    plan, partition = plan_graph(config, graph, limit=limit, space=space_of(config, folder))
    require_fit(plan, limit, room_of(config))
    write_plan(folder, plan, partition, store, graph)
    return config
