"""Training from Python: plan, train, continue, score and predict.

N vertices, C classes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast

import numpy as np
import numpy.typing as npt

from mggcn import native
from mggcn.api import scoring
from mggcn.api.graphs import load, save
from mggcn.assemble.plan import check_available
from mggcn.comm.failure import Interrupted
from mggcn.config import Config, ModelConfig
from mggcn.config.files import with_model, with_named
from mggcn.errors import ConfigError, RunError
from mggcn.files import read_bytes, temporary_folder
from mggcn.graph.csr import Graph
from mggcn.graph.store import open_store, store_folder
from mggcn.html import html_table
from mggcn.interop.weights import weights_of_module
from mggcn.memory.units import human
from mggcn.planning.text import PrintedPlan, subject
from mggcn.report import write_report
from mggcn.runs import folder as run_folders
from mggcn.runs import prediction_files
from mggcn.runs import train as training
from mggcn.runs.occupied import occupied
from mggcn.runs.regroup import regrouped, with_ranks
from mggcn.runs.result import read_result
from mggcn.runs.weights import check_start, weights_of, weights_of_run
from mggcn.settings import Parts, ScheduleSettings, Settings, is_module, refusing_functions, split_parts
from mggcn.train.log import read_history

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from mggcn.assemble.rank import Rank
    from mggcn.nn.module_run import ModuleRun
    from mggcn.planning.select import Choice

History = list[dict[str, Any]]
OnEpoch = Callable[[dict[str, Any]], None]
SPLITS = ("train", "val", "test")


class Trainer:
    """Trains a model on a whole graph, or on batches of its vertices or links.

    One rank trains in this process. P ranks are processes of this machine that open the graph's store (for a graph in
    memory, a temporary one); that works from scripts, notebooks and standard input. The run is planned and checked at
    once, before anything is allocated.

    Args:
        graph: A graph from `load`, or anything that `load` takes.
        model: `GCN(...)` or another of this module's models; default `GCN()`. Or a torch module of your own, called
            with features and a rank's part of the graph: then ranks are threads by default, and `settings` also takes
            `loss`, `metric`, `optimizer` and `schedule` as functions or classes (docs/own-models.md).
        ranks: Number of ranks P that share the graph.
        out: Run folder of the first `fit`; otherwise a temporary one, deleted with the trainer.
        start_from: What to begin with instead of random weights: a run folder (its best weights), weights as `state_dict`
            returns them, or a torch module of PyG's or DGL's layers of the same model; trained on this graph or another.
        config: All settings at once; `model`, `ranks` and `settings` override it.
        **settings: Single settings by name, such as `lr=0.01`, `seed=3`, `precision="fp64"`, `transport="threads"`; for
            batches `batch=1024`, seeds of a step, and `fanout=(15, 10)`, in-neighbours drawn in each layer, that next to
            the output first (docs/batches.md).

    Raises:
        ConfigError: A setting is unknown or does not fit.
        GraphError: The graph is malformed.
        PlanError: The run does not fit into memory; the message says what would help.

    Examples:
        >>> edges = np.array([[0, 1, 2, 3], [1, 0, 3, 2]])
        >>> splits = {"train": [0, 2], "test": [1, 3]}
        >>> graph = mggcn.load(edges, features=np.eye(4, dtype=np.float32), labels=[0, 0, 1, 1], splits=splits)
        >>> trainer = mggcn.Trainer(graph, mggcn.GCN(hidden=8), lr=0.05, threads=1)
        >>> history = trainer.fit(epochs=50)
        >>> trainer.evaluate("test")
        1.0
        >>> trainer.predict().shape
        (4, 2)
    """

    def __init__(
        self,
        graph: Any,
        model: ModelConfig | Module | None = None,
        *,
        ranks: int | None = None,
        out: str | Path | None = None,
        start_from: str | Path | Mapping[str, Tensor] | Module | None = None,
        config: Config | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        native.limit_spinning()
        native.require_threads()
        self._out = None if out is None else Path(out)
        self._rank: Rank | None = None
        self._scorer = scoring.LastScorer()
        self._folder: Path | None = None
        self._choice: Choice | None = None
        self._start: Mapping[str, Tensor] | None = None
        self._module: ModuleRun | None = None
        self._graph: Graph = graph if isinstance(graph, Graph) else load(graph)
        given: dict[str, Any] = {**settings} | ({} if ranks is None else {"ranks": ranks})
        if is_module(model):
            if start_from is not None:
                raise ConfigError("start_from is for the models of mggcn; load the weights into the module before")
            self._module = self._module_run(model, given, config)
            self._config = self._module.recipe.config
            return
        asked = with_model(config, cast("ModelConfig | None", model), refusing_functions(given))
        out = self._out or Path(tempfile.gettempdir())  # as `_temporary`
        self._plan, self._partition, self._choice = training.plan_that_fits(asked, self._graph, out=out)
        self._config = self._plan.config
        if start_from is not None:
            self._start = _weights_from(start_from, self._config.model)
            check_start(self._plan, self._start)

    def _module_run(self, module: Any, settings: Mapping[str, Any], config: Config | None) -> ModuleRun:
        """Return the run of a user's own module."""
        from mggcn.nn.module_run import ModuleRun, recipe_of

        parts, named = split_parts(settings)
        return ModuleRun(self._graph, recipe_of(self._graph, module, parts, named, config))

    @classmethod
    def from_run(
        cls, folder: str | Path, graph: Any = None, module: Module | None = None, **parts: Unpack[Parts]
    ) -> Trainer:
        """Return the trainer of a run folder: to score, to predict, and to continue it with `resume`.

        Args:
            folder: Folder of a run, also of one that the command line made or that was interrupted.
            graph: The run's graph, if it was in memory; otherwise the trainer opens it from its store.
            module: Of a run that trains a user's own module: the same module, with any weights.
            **parts: Its loss, metric, optimizer and schedule, where these were not names.

        Raises:
            ConfigError: The run's graph was in memory, and no graph is given.
            RunError: The folder is not a run folder, or the graph differs from the run's.
        """
        folder = Path(folder)
        config, plan, job = run_folders.read_run(folder)
        if module is None:
            run_folders.require_planned(folder, plan)
        elif "module" not in plan:
            raise ConfigError(f"the run in {folder} trains a model of mggcn; leave module out")
        if graph is None and (job["store"] is None or not Path(job["store"]).is_dir()):
            where = f"was in the store {job['store']}, which no longer exists" if job["store"] else "was in memory"
            raise ConfigError(f"the graph of the run in {folder} {where}; give it: Trainer.from_run(folder, graph)")
        trainer = cls.__new__(cls)
        source = open_store(job["store"]) if graph is None else graph
        trainer._graph = source if isinstance(source, Graph) else load(source)
        trainer._config, trainer._choice, trainer._start, trainer._module = config, None, None, None
        trainer._out, trainer._rank, trainer._scorer, trainer._folder = None, None, scoring.LastScorer(), folder
        if module is None:
            trainer._plan, trainer._partition = run_folders.known_plan(folder, config, trainer._graph)
            return trainer
        run_folders.require_graph(folder, trainer._graph)
        sharing = {name: plan["module"][name] for name in ("norm", "self_loops")}
        trainer._module = trainer._module_run(module, {**parts, **sharing}, config)
        trainer._module.adopt(config)
        trainer._module.require_same(folder, plan)
        return trainer

    def __repr__(self) -> str:
        """Two lines: what is trained on what, and how far it is."""
        graph, network = self._subject()
        return f"<Trainer of {network}, on {graph}; {self._state()}>"

    def _repr_html_(self) -> str:
        """Return a table for notebooks."""
        graph, network = self._subject()
        if self._module is not None:
            return html_table("Trainer", {"graph": graph, "module": network, "state": self._state()})
        peak = f"{human(self._plan.largest.total_bytes)} per rank"
        return html_table("Trainer", {"graph": graph, "model": network, "predicted peak": peak, "state": self._state()})

    def _subject(self) -> tuple[str, str]:
        """Describe the graph and the network."""
        if self._module is None:
            return subject(self._plan)
        graph = self._graph
        return f"{graph.name}: {graph.num_vertices:,} vertices, {graph.num_edges:,} edges", self._module.describe()

    def _state(self) -> str:
        """Describe the progress of the last run."""
        if self._folder is None:
            return "not trained yet"
        if not run_folders.is_complete(self._folder):
            return f"not complete: {run_folders.saved_text(self._folder, self._config) or '0 epochs'} are saved"
        result = self.result()
        scores = ", ".join(f"{split} {score:.4f}" for split in SPLITS if (score := result["best"][split]) is not None)
        return f"{result['epochs']} epochs trained, best {result['metric']}: {scores}"

    @property
    def config(self) -> Config:
        """All settings, with every `auto` replaced by what was chosen, but train.evaluate's, decided for each graph."""
        return self._config

    @property
    def plan(self) -> PrintedPlan:
        """Every buffer, byte and message of the run: print it, or read `plan.run`."""
        self._refuse_module("plan: torch allocates what it needs")
        return PrintedPlan(self._plan)

    @property
    def run_folder(self) -> Path | None:
        """Folder of the last `fit` that was completed or that a signal stopped; None before."""
        return self._folder

    def fit(self, epochs: int | None = None, on_epoch: OnEpoch | None = None) -> History:
        """Train from fresh weights, or from those of `start_from`.

        After an error the weights and the result of the previous `fit` are kept. Cost: as `plan` says.

        Args:
            epochs: Overrides `train.epochs`.
            on_epoch: Called here with the row of each epoch, in order; of ranks that are processes shortly after the epoch.
                What it raises ends the training: processes save a checkpoint before.

        Returns:
            One row for each epoch: epoch, loss, train, val, test, lr, seconds.

        Raises:
            TrainError: The loss is not finite.
            CommError: A rank failed or did not answer in time; any other first error of a rank is raised as it is.
        """
        self._check(on_epoch)
        if epochs is not None:
            self._set_config(with_named(self._config, {"epochs": epochs}))
        out = self._out if self._folder is None else None
        store = self._store()
        out = out or _temporary(self) / "run"
        if self._module is None:
            planned = self._plan, self._partition, self._choice
            folder = training.prepare_run(self._config, self._graph, store, out, self._start, planned=planned).folder
        else:
            folder = run_folders.make_run_folder(self._config, self._graph.name, out)
            self._module.write(folder, store)
        before, self._folder = self._folder, folder
        try:
            with occupied(folder):
                # After an error a second fit leaves the first one's run, which is what resume() then continues.
                return self._train(folder, on_epoch, "trainer.resume()" if before is None else None)
        except BaseException as error:
            if before is not None and not isinstance(error, Interrupted):  # a signal's weights are saved
                self._folder = before
            raise

    def resume(
        self,
        epochs: int | None = None,
        on_epoch: OnEpoch | None = None,
        *,
        ranks: int | None = None,
        **schedule: Unpack[ScheduleSettings],
    ) -> History:
        """Continue the last run: one that was interrupted to its end, a complete one with more epochs.

        Without a new schedule the run ends bit for bit as if it had never stopped; with one, it begins where the run
        stands. After an error the run is in the state of its last checkpoint. Cost: set-up, and the remaining epochs.

        Args:
            epochs: Number of epochs altogether, those that are done among them.
            on_epoch: As of `fit`.
            ranks: Another number of ranks, where the strategy is exact; the results then differ by rounding.
            **schedule: lr, warmup, schedule and its settings (schedule_step, schedule_gamma, schedule_patience) of a new
                schedule; patience, to go on after an early stop; threads, bind, memory_limit, capacity, scratch, log and
                timeout_s, which belong to the machine and change no result. For other memory, or another capacity, the run
                is planned anew.

        Returns:
            As `fit`, all epochs of the run.

        Raises:
            RunError: Nothing was trained yet.
            ConfigError: Another setting is named, the run has trained as many epochs already, or its strategy depends on
                the number of ranks.
            PlanError: The other number of ranks does not fit into memory, or the run into memory_limit.
            TrainError: As of `fit`.
            CommError: As of `fit`.
        """
        self._check(on_epoch)
        if self._folder is None:
            raise RunError(
                "the trainer has no run to resume; call fit() first, or open one with Trainer.from_run(folder)"
            )
        changes: dict[str, Any] = {**schedule} | ({} if epochs is None else {"epochs": epochs})
        config = run_folders.continued(self._folder, self._config, changes)
        if run_folders.is_complete(self._folder) and config == self._config:
            return read_history(self._folder)
        if ranks is not None:
            self._refuse_module("other number of ranks than it began with")
            config = with_ranks(config, ranks)
        with occupied(self._folder):
            if self._module is None:
                planned = read_bytes(self._folder / "plan.json")
                config = regrouped(self._folder, config, self._graph, store_folder(self._graph))
                if read_bytes(self._folder / "plan.json") != planned:
                    self._plan, self._partition = run_folders.known_plan(self._folder, config, self._graph)
            self._set_config(config)
            run_folders.reopen(self._folder, config)
            if self._module is not None:
                self._module.rewrite_config(self._folder)
            if (store := self._store()) is not None:
                run_folders.move_store(self._folder, store)
            return self._train(self._folder, on_epoch)

    def _check(self, on_epoch: OnEpoch | None) -> None:
        """Refuse what cannot train here. Raises: ConfigError, BackendError."""
        if on_epoch is not None and not callable(on_epoch):
            raise ConfigError(f"on_epoch must be a function of a row, got {type(on_epoch).__name__}")
        check_available(self._config)

    def _set_config(self, config: Config) -> None:
        """Adopt new training settings that do not change the plan."""
        self._config = config
        if self._module is None:
            self._plan = dataclasses.replace(self._plan, config=config)
        else:
            self._module.adopt(config)

    def _refuse_module(self, what: str) -> None:
        """Raises: ConfigError if the model is a user's own module, which does not have what is asked for."""
        if self._module is not None:
            raise ConfigError(f"a module of your own has no {what} (docs/own-models.md)")

    def _train(self, folder: Path, on_epoch: OnEpoch | None, way: str | None = "trainer.resume()") -> History:
        """Train on ranks in this process, keeping a single one for `predict`, or on processes."""
        self._rank, self._scorer = None, scoring.LastScorer()
        with run_folders.naming_checkpoint(folder, way):
            if self._module is not None:
                self._module.train(folder, on_epoch)
            elif self._in_process:
                run = training.PlannedRun(folder, self._plan, self._partition)
                self._rank = training.train_here(run, self._graph, quiet=True, on_epoch=on_epoch)[0]
            else:
                training.train_processes(folder, self._config, quiet=True, on_epoch=on_epoch)
        return read_history(folder)

    def evaluate(self, split: str = "test", weights: str = "best") -> float:
        """Return the score of a split: accuracy, or what `train.metric` says.

        Args:
            split: "train", "val" or "test".
            weights: Those of the "best" validation score, or of the "last" epoch.

        Raises:
            RunError: Nothing was trained yet.
            ConfigError: The graph has no such split, or `split` or `weights` is unknown.
        """
        if split not in SPLITS:
            raise ConfigError(f"split must be train, val or test, got {split!r}")
        _check_weights(weights)
        result = self.result()
        chosen = result["best"] if weights == "best" else result["final"]
        if chosen is None or chosen[split] is None:
            links = self._graph.task == "links"
            if links and split == "train":
                raise ConfigError("training links have no fixed negatives to be scored against; choose val or test")
            raise ConfigError(f"{self._graph.name} has no {split} {'links' if links else 'vertices'} to score")
        return float(chosen[split])

    def result(self) -> dict[str, Any]:
        """Return the content of result.json of the last `fit`: scores, seconds, memory planned and measured, versions.

        Raises:
            RunError: Nothing was trained yet.
        """
        if self._folder is None or not (self._folder / "result.json").exists():
            raise RunError("the trainer has no result yet; call fit(), or resume() where a run was interrupted")
        return read_result(self._folder)

    def predict(
        self,
        *,
        weights: str = "best",
        probabilities: bool = False,
        classes: bool = False,
        layer: int | None = None,
        graph: Any = None,
        vertices: Any = None,
        pairs: Any = None,
    ) -> npt.NDArray[Any]:
        """Return the scores of every vertex, (N, C) in the run's precision, in the graph's own order; embeddings of links.

        On a CPU a graph that does not fit into memory as a whole is scored layer by layer, over blocks of its vertices.
        Cost: one forward pass, of `vertices` over their neighbourhood.

        Args:
            weights: Those of the "best" validation score, or of the "last" epoch; with `train.repeat`, of the best repeat.
            probabilities: Return probabilities rather than scores: softmax of classes, or of each of several labels.
            classes: Return the class of the highest score instead, (N,), or 0 and 1 for each of several labels, (N, C).
            layer: A hidden layer, from 1, whose outputs (N, model.hidden[layer - 1]) are returned instead: embeddings.
            graph: Another graph with the same features, or anything that `load` takes, instead of the trainer's own; it
                needs neither labels nor splits, and is scored in this process.
            vertices: The vertices whose rows are returned, in this order: ids as the graph has them, row numbers if it has
                none, or a mask (N,). On a CPU only their neighbourhood is read and computed; what that needs of the graph
                is kept for the next call.
            pairs: Of a run that predicts links: ids of pairs (K, 2), whose scores float64 (K,) are returned instead, logits
                of a link, or with `probabilities` those.

        Raises:
            RunError: Nothing was trained yet.
            ConfigError: `weights` is neither "best" nor "last", the other graph's features or relations differ, numbers
                were to be classes, or there is no such layer or vertex.
            PlanError: The scores of all vertices need more memory than there is.
        """
        _check_weights(weights)
        wanted = scoring.Wanted(weights=weights, probabilities=probabilities, classes=classes, layer=layer)
        if self._module is None:
            return scoring.predict(self._trained(), wanted, self._scorer, graph, vertices, pairs)
        if layer is not None:
            self._refuse_module("layers that it knows of; return their outputs from the module")
        state = self.state_dict(weights)
        return scoring.predict_module(self._module, self._graph, state, wanted, graph, vertices, pairs)

    def _trained(self) -> scoring.Trained:
        """Return what scores are made of, of a planned model."""
        return scoring.Trained(
            graph=self._graph,
            config=self._config,
            plan=self._plan,
            partition=self._partition,
            folder=self._folder,
            rank=self._rank,
            state=self.state_dict,
        )

    def state_dict(self, weights: str = "best") -> dict[str, Tensor]:
        """Return the weights as plain tensors: `layers.<l>.weight` (D, E) and `layers.<l>.bias` (E,), l from 1.

        Learned rows of vertices (`inputs="learned:D"`) are among them as `embedding.weight` (N, D), in the graph's order.

        Args:
            weights: As for `predict`.

        Raises:
            RunError: Nothing was trained yet.
            ConfigError: `weights` is neither "best" nor "last".
        """
        _check_weights(weights)
        if self._folder is None:
            raise RunError("the trainer has no weights yet; call fit() first")
        state = weights_of(self._folder, self._config, weights)
        return {name: state[name] for name in (state if self._module else sorted(state, key=_layer_order))}

    def to_pyg(self, weights: str = "best") -> Module:
        """Return the model as a torch module of PyG's layers with its weights: `module(x, edge_index)` gives the scores.

        Of a run on learned rows, x are those: `embedding.weight` of `state_dict`.

        Args:
            weights: As for `predict`.

        Raises:
            RunError: Nothing was trained yet.
            ConfigError: PyG's layers have no such model, or the graph has weights of edges that it reads.
            BackendError: PyG is not installed.
        """
        from mggcn.interop.pyg_module import pyg_module

        if self._module is not None:
            raise ConfigError(
                "the model is a module of your own: module.load_state_dict(trainer.state_dict()) fills it"
            )
        weighted = self._graph.adj.values is not None and self._graph.repeats != "counted"
        if weighted and self._config.model.kind not in ("gat", "gatv2", "mlp"):
            raise ConfigError(
                f"the graph has weights of edges, which {self._config.model.kind} reads; PyG's take them as an argument "
                "of their own or not at all; predict() scores with them"
            )
        shape, state = self._plan.shape, self.state_dict(weights)
        state.pop("embedding.weight", None)
        return pyg_module(state, self._config.model, shape.num_features, shape.num_classes, shape.num_relations)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse copies and pickles, for which ranks, folders and locks have no meaning. Raises: RunError."""
        raise RunError(
            "a Trainer cannot be copied or pickled: it owns a run folder and its ranks; keep the folder, "
            "Trainer(..., out=folder), and open it with Trainer.from_run(folder)"
        )

    def scores_of(
        self, state: Mapping[str, Tensor] | Module, *, probabilities: bool = False
    ) -> npt.NDArray[np.floating]:
        """Return the class scores (N, C) of given weights, in the precision and order of `predict`.

        Computed on one rank in this process. Cost: set-up and one forward pass.

        Args:
            state: Weights as `state_dict` returns them, or a torch module of PyG's layers, whose options are then compared
                with the model's; a mapping, such as `from_pyg(module)`, no longer says what they were.
            probabilities: As for `predict`.

        Raises:
            ConfigError: Names or shapes differ from the model's; for a module, as for `from_pyg`.
        """
        if self._module is not None:
            found = self._module.predict(state if isinstance(state, Mapping) else state.state_dict())
            return prediction_files.probabilities_of(found, self._graph.task) if probabilities else found
        return scoring.score(self._trained(), state, probabilities)

    def save_store(self, path: str | Path, *, overwrite: bool = False) -> Graph:
        """Write the trainer's graph as a store, as `mggcn.save` does."""
        return save(self._graph, path, overwrite=overwrite)

    def report(self) -> list[Path]:
        """Draw the last run as `mggcn report` does: curves, memory, tiles and one HTML file; return their paths.

        Raises:
            RunError: Nothing was trained yet.
            BackendError: matplotlib is not installed.
        """
        if self._folder is None:
            raise RunError("the trainer has no run to draw; call fit() first")
        return write_report(self._folder)

    @property
    def _in_process(self) -> bool:
        return self._config.run.transport in ("single", "threads")

    def _store(self) -> Path | None:
        """Return the graph's store, which rank processes open: a temporary one for a graph in memory, None without them."""
        folder = store_folder(self._graph)
        if folder is None and not self._in_process and self._module is None:
            folder = _temporary(self) / "graph"
            self._graph = save(self._graph, folder)
        return folder


def _layer_order(name: str) -> tuple[int, bool]:
    """Order of layers.<l>.weight and layers.<l>.bias, behind learned rows; a checkpoint sorts them as text."""
    _, *layer, kind = name.split(".")
    return int(layer[0]) if layer else 0, kind == "bias"


def _weights_from(source: Any, model: ModelConfig) -> Mapping[str, Tensor]:
    """Return the weights that a run begins with: from a run folder, a mapping or a torch module."""
    if isinstance(source, str | Path):
        return weights_of_run(Path(source))
    return source if isinstance(source, Mapping) else weights_of_module(source, model)


def _check_weights(weights: str) -> None:
    if weights not in ("best", "last"):
        raise ConfigError(f"weights must be best or last, got {weights!r}")


def _temporary(owner: Trainer) -> Path:
    """Return a new temporary folder that is deleted with its owner, but not by a forked child's copy of it."""
    kept, maker = contextlib.ExitStack(), os.getpid()
    folder = kept.enter_context(temporary_folder())
    weakref.finalize(owner, lambda: kept.close() if os.getpid() == maker else None)
    return folder
