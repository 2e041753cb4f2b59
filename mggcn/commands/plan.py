"""Print the memory, messages and order of products of a run, and whether it fits, without running it.

From a store, or from a bare shape: --vertices N --edges E --features D --classes C.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from mggcn.assemble import memory_limit, plan_graph, plan_shape, resolve
from mggcn.commands.settings import add_settings, read_settings, whole
from mggcn.config import Config
from mggcn.errors import ConfigError
from mggcn.train.planjson import to_dict
from mggcn.train.plantext import render
from mggcn.train.runplan import RunPlan
from mggcn.train.shape import GraphShape

SHAPE = ("vertices", "edges", "features", "classes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("store", nargs="?", help="store folder, or its name under --root")
    parser.add_argument("--root", type=Path, metavar="DIR", help="folder in which names of stores are looked up")
    for name in SHAPE:
        parser.add_argument(f"--{name}", type=whole, metavar="NUMBER", help=f"number of {name} of a bare shape")
    parser.add_argument("--symmetric", action="store_true", help="bare shape: every edge is stored in both directions")
    parser.add_argument("--feature-nonzeros", type=whole, metavar="NUMBER", help="bare shape: the features are sparse")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    add_settings(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan; exit code 2 if it does not fit."""
    config = read_settings(arguments)
    config, plan = _from_shape(arguments, config) if arguments.store is None else _from_store(arguments, config)
    limit = memory_limit(config)
    print(json.dumps(to_dict(plan), indent=1) if arguments.json else render(plan, limit))
    return 0 if plan.largest.total_bytes <= limit else 2


def _from_store(arguments: argparse.Namespace, config: Config) -> tuple[Config, RunPlan]:
    from mggcn.commands.train import store_path
    from mggcn.graph.store import open_store

    if any(getattr(arguments, name) is not None for name in SHAPE):
        raise ConfigError("give a STORE or the sizes of a bare shape, not both")
    graph = open_store(store_path(arguments.store, arguments.root))
    config = resolve(config, graph)
    return config, plan_graph(config, graph)[0]


def _from_shape(arguments: argparse.Namespace, config: Config) -> tuple[Config, RunPlan]:
    missing = [f"--{name}" for name in SHAPE if getattr(arguments, name) is None]
    if missing:
        raise ConfigError(f"mggcn plan needs a STORE or a bare shape; {', '.join(missing)} missing")
    if min(getattr(arguments, name) for name in SHAPE) < 1:
        raise ConfigError("--vertices, --edges, --features and --classes must be 1 or more")
    shape = GraphShape(
        "shape",
        arguments.vertices,
        arguments.edges,
        arguments.features,
        arguments.classes,
        arguments.symmetric,
        feature_nnz=arguments.feature_nonzeros,
        aggregated_nnz=_upper_aggregated(arguments),
    )
    return config, plan_shape(config, shape)


def _upper_aggregated(arguments: argparse.Namespace) -> int:
    """Nonzeros of A_hat X at most: every edge brings a row of X, and no row has more than D entries."""
    nonzeros = arguments.feature_nonzeros or 0
    per_edge = nonzeros * (arguments.edges / arguments.vertices + 1)
    return int(min(per_edge, arguments.vertices * arguments.features))
