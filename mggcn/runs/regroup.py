"""A run that continues on another number of ranks, on another rung of run.capacity, or in other memory: what ranks share is
in its checkpoint, all else is planned again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from mggcn.assemble.ladder import space_of, with_whole_scratch
from mggcn.assemble.plan import check_available, memory_limit, plan_again, plan_graph, resolve, room_of
from mggcn.comm.rank import ranks_here, torchrun_env
from mggcn.config import Config
from mggcn.errors import ConfigError
from mggcn.graph.csr import Graph
from mggcn.memory.units import free_bytes
from mggcn.planning.advice import require_fit
from mggcn.planning.batches import without_unread
from mggcn.planning.record import to_dict
from mggcn.runs.folder import read_run, recorded_plan, require_graph, write_plan
from mggcn.runs.local import free_per_rank
from mggcn.train.log import write_json

MEMORY: Final = ("capacity", "memory_limit")
"""Settings of [run] that decide which rung a run takes."""
KEPT: Final = ("class_names", "choice")
"""Fields of plan.json that are not the plan's."""


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
    """Plan the run of a folder for the ranks that `config` names, if it was planned for others, or for its run.capacity,
    memory_limit and scratch; return its configuration.

    On other ranks the results are those of a run that never stopped, but for rounding: sums are taken in another order. On
    the same ranks they have the same bits. Memory is checked as for a new run. Cost: as planning; nothing if all is as it
    was.
    Raises: RunError if the graph has changed; PlanError, ConfigError.
    """
    before, plan_before, job = read_run(folder)
    config = with_whole_scratch(config)
    planned, ranks = job.get("assignment"), config.run.ranks
    # Ranks that have come to several machines share no memory, in which evaluation by blocks keeps rows.
    apart = plan_before.get("evaluate") == "blocks" and ranks_here(ranks) < ranks
    if not isinstance(planned, dict):
        return config
    if planned.get("ranks") == ranks and not apart:
        lacks = _lacks_memory(config, plan_before)
        if lacks or _is_other(before, config, plan_before):
            _plan_again(folder, config, graph, before, plan_before, lacks=lacks)
        return config
    require_graph(folder, graph)
    config = resolve(without_unread(config), graph)
    check_available(config)
    limit = memory_limit(config)
    plan, partition = plan_graph(config, graph, limit=limit, space=space_of(config, folder))
    require_fit(plan, limit, dataclasses.replace(room_of(config), began=True))
    write_plan(folder, plan, partition, store, graph)
    return config


def limit_now(config: Config) -> int:
    """Return the bytes that each rank of a run which goes on may use, as set, or free now; on CPUs with what this process
    has of them already.
    """
    on_host = config.run.device == "cpu" and not config.run.memory_limit
    return free_per_rank(config) if on_host else memory_limit(config)


def _is_other(before: Config, config: Config, content: Mapping[str, Any]) -> bool:
    """Return whether settings ask for another plan than was recorded: another rung, more memory or less, another disk."""
    run, rung = config.run, content.get("capacity", "memory")
    asked = (*MEMORY, "scratch") if rung == "disk" else MEMORY
    if any(getattr(run, name) != getattr(before.run, name) for name in asked):
        return True
    # config.toml was edited, or a command was killed when it had recorded the one and not yet the other.
    if run.capacity not in ("auto", rung):
        return True
    needed = max((rank["total_bytes"] for rank in content["per_rank"]), default=0)
    moves = rung in ("host", "disk")
    return needed > run.memory_limit > 0 or (moves and run.memory_limit not in (0, content.get("limit", 0)))


def _lacks_memory(config: Config, content: Mapping[str, Any]) -> bool:
    """Return whether less is free now than the run was planned to take beside what its process takes in any case."""
    if config.run.device != "cpu" or config.run.memory_limit:
        return False
    needed = [rank["total_bytes"] - rank["regions"].get("runtime", 0) for rank in content["per_rank"]]
    return max(needed, default=0) > free_bytes() // ranks_here(config.run.ranks)


def _plan_again(
    folder: Path, config: Config, graph: Graph, before: Config, content: Mapping[str, Any], *, lacks: bool
) -> None:
    """Plan the run of a folder on the rung that now fits, and record it. lacks: less is free than it was planned for.

    Raises: PlanError, ConfigError, RunError.
    """
    recorded_plan(folder, before, graph)  # refuses what is damaged, or of another graph
    # Another disk alone leaves the run in the memory for which it was planned.
    stays = config.run.capacity != "memory" and not config.run.memory_limit and not lacks
    stays = stays and all(getattr(config.run, name) == getattr(before.run, name) for name in MEMORY)
    now = free_per_rank(config) if lacks else memory_limit(config)
    limit = (content.get("limit", 0) if stays else 0) or now
    plan = plan_again(config, content, limit, space_of(config, folder))
    require_fit(plan, limit, dataclasses.replace(room_of(config), began=True))
    write_json(folder / "plan.json", to_dict(plan) | {name: content[name] for name in KEPT if name in content})
