"""A run of a user's own module: its settings checked, its folder written, its ranks trained, its scores computed.

N vertices, C columns of scores.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tomli_w
import torch
from torch import Tensor
from torch.nn import Module

from mggcn.comm.failure import Interrupted
from mggcn.comm.rank import torchrun_env
from mggcn.config import PARTS, Config, from_tables
from mggcn.config.files import by_table, setting_name, to_tables
from mggcn.config.values import setting
from mggcn.errors import ConfigError, RunError
from mggcn.files import write_text
from mggcn.graph.csr import Graph
from mggcn.graph.splits import check_split
from mggcn.nn.link_goal import scores_of_pairs
from mggcn.nn.module_engine import ModuleEngine, predicted
from mggcn.nn.module_parts import Recipe, check_module, check_parts
from mggcn.nn.pairs import PairModule
from mggcn.nn.partitioned import PartitionedGraph
from mggcn.nn.processes import run_processes
from mggcn.nn.run import run
from mggcn.nn.sharing import Sharing, share
from mggcn.planning.links import check_links
from mggcn.planning.task import METRICS, resolve_task
from mggcn.runs.began import beginnings
from mggcn.runs.local import signalled_stop
from mggcn.runs.train import follower_of, logged, versions_of
from mggcn.runs.weights import weights_of
from mggcn.train.checkpoint import Progress
from mggcn.train.engine import Stop
from mggcn.train.heartbeat import Heartbeat
from mggcn.train.log import RunLog, read_record, write_json
from mggcn.train.loop import Loop, OnEpoch
from mggcn.train.repeats import summary
from mggcn.train.runtime import DTYPES
from mggcn.train.samples import EpochSeconds

SHARING = ("norm", "self_loops")
"""Settings of `Sharing` that are no settings of a run."""
TAKEN = (
    *("splits", "split", "epochs", "lr", "optimizer", "momentum", "weight_decay", "clip_norm", "schedule"),
    *("schedule_step", "schedule_gamma", "schedule_patience", "schedule_start", "warmup", "patience", "eval_every"),
    *("loss", "metric", "seed", "checkpoint_every", "checkpoint_minutes", "ranks", "threads", "transport", "device"),
    *("precision", "order", "strategy", "timeout_s", "log"),
    *("negatives", "negatives_from", "decoder", "embedding"),
)
"""Settings that a user's own module has; others belong to the models of mggcn."""


def recipe_of(
    graph: Graph, module: Module, parts: Mapping[str, Any], settings: Mapping[str, Any], base: Config | None = None
) -> Recipe:
    """Check a module, the parts that train it and its settings.

    parts: loss, metric, optimizer and schedule where they are not names, else None. Raises: ConfigError, GraphError.
    """
    sharing = {name: settings[name] for name in SHARING if name in settings}
    named = {setting_name(key): value for key, value in settings.items() if key not in SHARING}
    config = base or Config()
    if torchrun_env() is not None:
        raise ConfigError("under torchrun a module of your own trains with mggcn.nn.run, as docs/own-models.md shows")
    if strange := [key for key in named if key.partition(".")[2] not in TAKEN]:
        raise _not_taken(strange)
    for part, belonging in (("optimizer", ["lr", "momentum", "weight_decay"]), ("schedule", ["warmup"])):
        given = parts.get(part)
        if part == "optimizer" and isinstance(given, type):
            belonging = ["momentum"]
        if given is not None and (odd := [name for name in belonging if f"train.{name}" in named]):
            raise ConfigError(
                f"{part}= takes the place of {', '.join(odd)}; leave {'it' if len(odd) == 1 else 'them'} out"
            )
    config = _resolved(from_tables(by_table(named), config), graph)
    sharing_of_run = _sharing(config, sharing)
    if graph.links:
        if parts.get("metric") is not None:
            raise ConfigError(
                "metric= is a function of the scores and labels of vertices, and links are scored against their negatives; "
                f"choose one of {', '.join(METRICS['links'])}"
            )
        module = _with_decoder(module, config)
    return _checked(Recipe(module=module, config=config, sharing=sharing_of_run, task=graph.task, **parts), graph)


def _with_decoder(module: Module, config: Config) -> Module:
    """Return a module with the network that scores pairs of its embeddings, if the run has one."""
    links = config.links
    if not links.decoder:
        return module
    return PairModule(module, links.embedding, links.decoder, DTYPES[config.run.precision], config.train.seed)


def _not_taken(names: list[str]) -> ConfigError:
    return ConfigError(
        f"{', '.join(names)} belong{'s' * (len(names) == 1)} to the models of mggcn, and the model is a module of your "
        f"own: write it into the module or the loss; its settings are {', '.join((*SHARING, *TAKEN))}"
    )


def _resolved(config: Config, graph: Graph) -> Config:
    """Fill in `auto`, and refuse what a module does not have."""
    for table, kind in PARTS.items():
        for item in dataclasses.fields(kind):
            default = getattr(getattr(Config(), table), item.name)
            if item.name not in TAKEN and getattr(getattr(config, table), item.name) != default:
                raise _not_taken([setting(table, item.name)])
    check_links(config, graph)
    check_split(graph, config.data.splits, config.data.split)
    transport = config.run.transport
    if config.run.ranks == 1:
        transport = "single"
    elif transport == "auto":
        transport = "threads"  # as of mggcn.nn.run
    run_config = dataclasses.replace(config.run, transport=transport)
    return dataclasses.replace(config, train=resolve_task(config.train, graph), run=run_config)


def _sharing(config: Config, given: Mapping[str, Any]) -> Sharing:
    shared = ("strategy", "order", "precision", "device", "threads")
    return Sharing(**{name: getattr(config.run, name) for name in shared}, seed=config.train.seed, **given)


def _checked(recipe: Recipe, graph: Graph) -> Recipe:
    check_module(recipe.module, recipe.config, DTYPES[recipe.config.run.precision])
    largest = check_parts(recipe)
    if recipe.optimizer is None or isinstance(recipe.optimizer, type):
        return recipe
    train = dataclasses.replace(recipe.config.train, lr=largest)  # what its function says
    return dataclasses.replace(recipe, config=dataclasses.replace(recipe.config, train=train))


class ModuleRun:
    """Trains and scores a module on a graph, in run folders as of the planned models."""

    def __init__(self, graph: Graph, recipe: Recipe) -> None:
        self._graph = graph
        self.recipe: Recipe = recipe

    def adopt(self, config: Config) -> None:
        """Replace the settings of training."""
        self.recipe = dataclasses.replace(self.recipe, config=config)

    def describe(self) -> str:
        """Describe module, ranks and strategy in words."""
        module, run_config = self.recipe.module, self.recipe.config.run
        count = sum(p.numel() for p in module.parameters())
        ranks = f"{run_config.ranks} rank{'s' * (run_config.ranks > 1)} on {run_config.device}"
        return (
            f"{self.recipe.names()['module']} of {count:,} parameters, {run_config.precision}, {ranks}, "
            f"strategy {run_config.strategy}"
        )

    def write(self, folder: Path, store: Path | None) -> None:
        """Record the run in its new folder, as `runs.folder.write_plan` does for a planned model."""
        config, graph = self.recipe.config, self._graph
        self.rewrite_config(folder)
        shared = share(graph, self.recipe.sharing, config.run.ranks, self._transport)
        sizes = (
            "name",
            "num_vertices",
            "num_edges",
            "num_features",
            "num_classes",
            "symmetric",
            "num_relations",
            "task",
        )
        stats = shared.stats.to_dict()
        nothing: dict[str, Any] = {"arena_bytes": 0, "regions": {"runtime": 0}, "total_bytes": 0, "buffers": []}
        ranks = [
            {"rank": rank, "rows": rows, "nnz": int(np.sum(nnz))} | nothing
            for rank, (rows, nnz) in enumerate(zip(shared.stats.counts, stats["nnz"], strict=True))
        ]
        plan = {
            "module": self.recipe.names() | {name: getattr(self.recipe.sharing, name) for name in SHARING},
            **{name: getattr(config.run, name) for name in ("ranks", "device", "precision", "strategy", "order")},
            # A shape has a column at least; links have no classes, and a module says itself how wide embeddings are.
            "graph": {name: getattr(graph, name) for name in sizes} | {"num_classes": max(graph.num_classes, 1)},
            "reasons": ["The model is a user's own module: torch allocates its memory, which is not planned."],
            "programs": {"train": []},
            "per_rank": ranks,
            "partition": stats,
        }
        write_json(folder / "plan.json", plan)
        job = {"store": None if store is None else str(store.resolve()), "owners_sha256": shared.partition.digest()}
        write_json(folder / "job.json", job | beginnings(folder, config, graph))

    def rewrite_config(self, folder: Path) -> None:
        """Remove the table [model], which describes mggcn's own models, from config.toml."""
        tables = {name: table for name, table in to_tables(self.recipe.config).items() if name != "model"}
        write_text(folder / "config.toml", tomli_w.dumps(tables))

    def require_same(self, folder: Path, plan: Mapping[str, Any]) -> None:
        """Refuse to continue with another module, loss, optimiser or schedule than the run began with. Raises: RunError."""
        began = plan["module"]
        for what, now in (self.recipe.names() | {name: getattr(self.recipe.sharing, name) for name in SHARING}).items():
            if began.get(what) != now:
                raise RunError(
                    f"the run in {folder} began with the {what} {began.get(what)}, got {now}; give the same, or start "
                    "a new run"
                )

    @property
    def _transport(self) -> str:
        return self.recipe.config.run.transport

    def train(self, folder: Path, on_epoch: OnEpoch | None) -> None:
        """Train in a run folder, from its checkpoint if it has one. Raises: as Trainer.fit."""
        if self._transport in ("single", "threads"):
            with signalled_stop(saves=False) as stop, torch.random.fork_rng(devices=[]):
                self._run(functools.partial(_train_rank, self.recipe, folder, stop=stop, on_epoch=on_epoch))
            return
        poll = None if on_epoch is None else follower_of(folder, on_epoch)
        self._run(functools.partial(_train_rank, self.recipe, folder), poll)

    def _run(self, body: Any, poll: Callable[[], None] | None = None) -> list[Any]:
        settings, sharing = self.recipe.config.run, self.recipe.sharing
        if self._transport in ("gloo", "nccl"):
            return run_processes(
                body, self._graph, sharing, settings.ranks, self._transport, settings.timeout_s, poll=poll
            )
        given = {f.name: getattr(sharing, f.name) for f in dataclasses.fields(Sharing)}
        return run(
            body, self._graph, ranks=settings.ranks, transport=self._transport, timeout_s=settings.timeout_s, **given
        )

    def predict(self, state: Mapping[str, Tensor], graph: Graph | None = None) -> npt.NDArray[Any]:
        """Return the scores (N, C) of given weights, in the graph's order. Raises: ConfigError for weights of another."""
        module = self._module_with(state)
        if graph is not None:
            own = ModuleRun(graph, dataclasses.replace(self.recipe, module=module))
            return np.asarray(own._run(functools.partial(_scores, module))[0])
        return np.asarray(self._run(functools.partial(_scores, module))[0])

    def score_pairs(
        self, state: Mapping[str, Tensor], pairs: npt.NDArray[np.int64], graph: Graph | None, *, probabilities: bool
    ) -> npt.NDArray[np.float64]:
        """Return the scores (K,) of pairs of rows (K, 2), logits of a link or probabilities. Cost, raises: as `predict`."""
        found = scores_of_pairs(self._module_with(state), self.predict(state, graph), pairs)
        return torch.from_numpy(found).sigmoid().numpy() if probabilities else found

    def _module_with(self, state: Mapping[str, Tensor]) -> Module:
        module = copy.deepcopy(self.recipe.module)
        try:
            module.load_state_dict(dict(state))
        except RuntimeError as error:
            raise ConfigError(f"the weights are not those of the module: {error}") from error
        return module


def _scores(module: Module, part: PartitionedGraph) -> npt.NDArray[Any] | None:
    """Return the scores of all vertices on rank 0."""
    scores = predicted(module, part)
    if part.rank:
        return None
    found: npt.NDArray[Any] = (scores.float() if scores.dtype == torch.bfloat16 else scores).cpu().numpy()
    return found


def _train_rank(
    recipe: Recipe, folder: Path, part: PartitionedGraph, *, stop: Stop | None = None, on_epoch: OnEpoch | None = None
) -> None:
    """Set up, train and record on one rank. stop: of ranks that are threads; a process catches its own signals.

    Raises: Interrupted after a signal, once everything is saved.
    """
    started, config, progress, seconds = time.perf_counter(), recipe.config, Progress(), EpochSeconds()
    with contextlib.ExitStack() as held:
        heartbeat = held.enter_context(Heartbeat(folder, part.rank, config.train.epochs, config.train.repeat))
        flag = held.enter_context(signalled_stop(saves=False)) if stop is None else stop
        engine = ModuleEngine(recipe, part)
        engine.barrier()
        flag.saves = True
        setup_seconds = time.perf_counter() - started
        log = RunLog(folder if part.rank == 0 else None, True, config.train.epochs)
        with logged(config, folder, on_epoch, part.rank) as follow:
            complete = Loop(config.train, engine, progress, seconds, flag).fit(log, folder, follow, heartbeat)
        peaks = torch.zeros(part.num_ranks, dtype=torch.float64, device=part.device)
        peaks[part.rank] = part.peak_bytes()
        peak = int(part.sum_over_ranks(peaks).max())
        if not complete:
            raise Interrupted(flag.signal or signal.SIGTERM)
        links = engine.links(weights_of(folder, config))
        if part.rank == 0:
            result = summary(config.train, progress, engine.metric) | {
                "seconds_per_epoch": seconds.median(),
                "setup_seconds": setup_seconds,
                "measured_peak_bytes": peak,
                "versions": versions_of(config, str(part.device)),
            }
            result |= {"links": links} if links else {}
            write_json(folder / "result.json", result | {"graph_sha256": graph_digest(folder)})


def graph_digest(folder: Path) -> str:
    """Return the digest of the graph that a run was made for."""
    return str(read_record(folder / "job.json", "graph_sha256")["graph_sha256"])
