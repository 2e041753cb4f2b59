"""Print the memory, messages, order of products and predicted seconds of a run, and whether it fits, without running it.

From a store, or from a bare shape: --vertices N --edges E --features D --classes C.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from mggcn.assemble.ladder import space_elsewhere, space_of
from mggcn.assemble.plan import in_float32, memory_limit, plan_graph, plan_shape, room_of, this_machine
from mggcn.assemble.stack import read_rows
from mggcn.cli.answer import add_json
from mggcn.cli.colour import painted
from mggcn.cli.settings import add_settings, read_settings, whole
from mggcn.config import Config
from mggcn.cost.machine import Machine, find_machine, shipped_machines
from mggcn.errors import BackendError, ConfigError, shown
from mggcn.graph.csr import Graph
from mggcn.partition.base import Partition
from mggcn.partition.rows.partition import row_owners
from mggcn.planning.advice import fits
from mggcn.planning.batch_rows import ReadRows, read_lines, row_bytes_of
from mggcn.planning.batches import answer_plan
from mggcn.planning.cost_text import cost_dict, cost_lines, memory_alone, narrow_messages, whole_graph
from mggcn.planning.decisions import could_read_sums
from mggcn.planning.disk_text import disk_dict, disk_lines
from mggcn.planning.record import to_dict
from mggcn.planning.run import RunPlan, Space
from mggcn.planning.select import Choice, choice_dict, choice_lines
from mggcn.planning.shape import GraphShape
from mggcn.planning.task import check_shape_task
from mggcn.planning.text import render
from mggcn.runs.auto import NoChoiceError, resolve_auto, resolve_auto_shape

SHAPE = ("vertices", "edges", "features", "classes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("store", nargs="?", help="store folder, or its name under --root")
    parser.add_argument("--root", type=Path, metavar="DIR", help="folder in which names of stores are looked up")
    for name in SHAPE:
        of, learned = f"number of {name} of a bare shape", ", or learned:D, also of a STORE" * (name == "features")
        kind = _features if learned else whole
        parser.add_argument(f"--{name}", type=kind, metavar="NUMBER", help=f"{of}{learned}")
    parser.add_argument("--symmetric", action="store_true", help="bare shape: every edge is stored in both directions")
    parser.add_argument(
        "--feature-nonzeros", type=whole, metavar="NUMBER", help="bare shape: nonzeros of sparse features"
    )
    parser.add_argument("--relations", type=whole, metavar="NUMBER", help="bare shape: relations of typed edges")
    parser.add_argument(
        "--training",
        type=whole,
        metavar="NUMBER",
        help="bare shape: number of training vertices, to plan which rows are computed",
    )
    parser.add_argument(
        "--replication",
        type=float,
        metavar="R",
        help="bare shape: average number of ranks that hold a vertex, for a vertex cut",
    )
    parser.add_argument(
        "--machine",
        metavar="FILE|NAME",
        help=f"machine to plan seconds and memory for: a file that mggcn tune wrote, or one of "
        f"{', '.join(shipped_machines())} (default: the tuned file of this machine, one with GPUs like its own, or assumed "
        "rates)",
    )
    parser.add_argument(
        "--explain",
        action="store_true",
        help="also say what each rewrite of the model did, its ops, and which rows drawn batches read of other ranks",
    )
    add_json(parser)
    add_settings(parser, without="--features")


def _features(text: str) -> int | str:
    """Return a number of features, or the text that names learned rows."""
    return text if ":" in text else whole(text)


_features.__name__ = whole.__name__


def run(arguments: argparse.Namespace) -> int:
    """Print the plan; exit code 2 if it does not fit."""
    if isinstance(arguments.features, str):
        arguments.setting_inputs, arguments.features = arguments.features, None
    config = read_settings(arguments)
    if arguments.store is None and config.data.learned:
        arguments.features = config.data.learned
    machine = _machine(arguments, config)
    named = arguments.machine is not None
    limit = _machine_limit(config, machine) if named else memory_limit(config)
    space = space_elsewhere(config) if named else space_of(config)
    from_ = _from_shape if arguments.store is None else _from_store
    try:
        config, plan, choice, rows = from_(arguments, config, machine, limit, space)
    except NoChoiceError as error:
        if not arguments.json:
            print(shown("\n".join(choice_lines(error.choice)[:-1])))
        raise
    if arguments.json:
        fit = {"fits": fits(plan, limit), "limit_bytes": limit}
        found = to_dict(plan) | {"predicted": cost_dict(plan, machine, arguments.replication)} | fit
        found |= disk_dict(plan, machine)
        found |= {"choice": None if choice is None else choice_dict(choice)}
        arguments.answer = found | (_rows_dict(plan, rows) if arguments.explain else {})
    else:
        chosen = [] if choice is None else [*choice_lines(choice), ""]
        wide = machine if arguments.machine is not None else this_machine(in_float32(config))
        notes = [*chosen, *cost_lines(plan, machine, arguments.replication), *memory_alone(plan, machine, wide)]
        notes += disk_lines(plan, machine, explain=arguments.explain)
        notes += narrow_messages(plan, machine) + whole_graph(plan, machine) + _rows_lines(plan, rows)
        room = room_of(config, None if arguments.machine is None else machine)
        verdict, _, rest = shown(render(plan, limit, notes, arguments.explain, room)).partition("\n")
        print(painted(verdict, "green" if fits(plan, limit) else "red", sys.stdout), rest, sep="\n")
    return 0 if fits(plan, limit) else 2


def _machine(arguments: argparse.Namespace, config: Config) -> Machine:
    """Return the machine to plan for. Raises: ConfigError if it has other devices than the run."""
    device, replication = config.run.device, arguments.replication
    if replication is not None and not 1 <= replication <= config.run.ranks:
        raise ConfigError(
            f"--replication must lie in 1 .. {config.run.ranks}, the number of ranks, got {replication:g}"
        )
    if arguments.machine is None:
        try:
            memory_limit(config)
        except BackendError as error:
            gpus = [name for name in shipped_machines() if find_machine(name).device.kind == device]
            raise ConfigError(f"{error}, or --machine NAME, which is one of {', '.join(gpus)}") from error
        return this_machine(config)
    machine = find_machine(arguments.machine)
    if machine.device.kind != device:
        raise ConfigError(
            f"machine {machine.name} has devices of kind {machine.device.kind}, the run is planned for {device}; "
            f"add --device {machine.device.kind}"
        )
    return machine


def _machine_limit(config: Config, machine: Machine) -> int:
    """Bytes that one rank may use on a named machine: as set, or what the machine has."""
    return config.run.memory_limit or machine.memory_per_rank(config.run.ranks)


def _from_store(
    arguments: argparse.Namespace, config: Config, machine: Machine, limit: int, space: Space
) -> tuple[Config, RunPlan, Choice | None, ReadRows | None]:
    from mggcn.cli.train import store_path
    from mggcn.graph.store import open_store

    if any(getattr(arguments, name) is not None for name in (*SHAPE, "training")):
        raise ConfigError("give a STORE or the sizes of a bare shape, not both")
    graph = open_store(store_path(arguments.store, arguments.root))
    config, choice = resolve_auto(config, graph, machine, limit, space)
    plan, partition = plan_graph(config, graph, machine, limit=limit, space=space)
    rows = _read_rows(config, graph, plan, partition) if arguments.explain else None
    return config, dataclasses.replace(plan, read=rows), choice, rows


def _read_rows(config: Config, graph: Graph, plan: RunPlan, partition: Partition) -> ReadRows | None:
    """Count the rows that drawn batches read of other ranks; None on one rank, or without batches."""
    if not config.sample.batch or config.run.ranks == 1 or config.reads_history:
        return None
    macros = (0,) if config.sample.macro == 1 else (0, config.sample.macro)
    return read_rows(config, graph, plan.shape, row_owners(partition).owner_of(slice(None)), macros)


def _rows_lines(plan: RunPlan, rows: ReadRows | None) -> list[str]:
    """Say which rows batches read of other ranks."""
    if rows is None:
        return []
    answers = answer_plan(plan.config, plan.shape) if plan.config.draws_at_owners else None
    width = row_bytes_of(plan.config, plan.shape.num_features)
    return read_lines(rows, width, sums=_could_read_sums(plan), answers=answers)


def _rows_dict(plan: RunPlan, rows: ReadRows | None) -> dict[str, Any]:
    """Return the same for JSON."""
    row_bytes = row_bytes_of(plan.config, plan.shape.num_features)
    return {"batch_rows": None if rows is None else rows.to_dict(row_bytes, sums=_could_read_sums(plan))}


def _could_read_sums(plan: RunPlan) -> bool:
    return could_read_sums(plan.config, plan.shape, plan.stats, plan.strategy)


def _from_shape(
    arguments: argparse.Namespace, config: Config, machine: Machine, limit: int, space: Space
) -> tuple[Config, RunPlan, Choice | None, ReadRows | None]:
    missing = [f"--{name}" for name in SHAPE if getattr(arguments, name) is None]
    if missing:
        raise ConfigError(f"mggcn plan needs a STORE or a bare shape; {', '.join(missing)} missing")
    if min(getattr(arguments, name) for name in SHAPE) < 1:
        raise ConfigError("--vertices, --edges, --features and --classes must be 1 or more")
    check_shape_task(config.train, arguments.classes)
    shape = GraphShape(
        name="shape",
        num_vertices=arguments.vertices,
        num_edges=arguments.edges,
        num_features=arguments.features,
        num_classes=arguments.classes,
        symmetric=arguments.symmetric,
        feature_nnz=arguments.feature_nonzeros,
        aggregated_nnz=_upper_aggregated(arguments),
        num_training=arguments.training,
        num_relations=arguments.relations or 0,
    )
    replication = arguments.replication or 0.0
    config, choice = resolve_auto_shape(config, shape, replication, machine, limit, space)
    return config, plan_shape(config, shape, replication, machine, limit, space), choice, None


def _upper_aggregated(arguments: argparse.Namespace) -> int:
    """Return an upper bound on the nonzeros of A_hat X: every edge adds a row of X, and no row has more than D
    entries.
    """
    nonzeros = arguments.feature_nonzeros or 0
    per_edge = nonzeros * (arguments.edges / arguments.vertices + 1)
    return int(min(per_edge, arguments.vertices * arguments.features))
