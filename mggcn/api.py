"""The public Python API: load a graph, describe a model, train it on one to P ranks, score and predict.

N vertices, C classes.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mggcn.assemble import check_available, memory_limit, plan_graph
from mggcn.comm.failure import Interrupted
from mggcn.config import Config, ModelConfig, from_tables
from mggcn.config_files import with_model, with_named
from mggcn.errors import ConfigError, RunError
from mggcn.graph.convert import check_arguments, from_object
from mggcn.graph.csr import Graph
from mggcn.graph.sources import load_joined, load_source
from mggcn.graph.store import open_store, store_folder, write_store
from mggcn.jobs import folder as run_folders
from mggcn.jobs import local as local_ranks
from mggcn.jobs import predict as predicting
from mggcn.jobs import prediction_files
from mggcn.jobs import train as training
from mggcn.jobs.auto import resolve_auto
from mggcn.model.weights import from_pyg
from mggcn.planning.advice import require_fit
from mggcn.planning.text import PrintedPlan

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from mggcn.assemble_rank import Rank
    from mggcn.comm.base import Communicator

History = list[dict[str, Any]]


def load(source: Any, *, root: str | Path | None = None, **arrays: Any) -> Graph:
    """Load a graph from whatever holds one.

    Cost: a store opens lazily; everything else is read into memory.

    Args:
        source: A path (store folder, `.npz`, MatrixMarket, edge list), a name under `root`, a PyG `Data`, a DGL graph, a
            SciPy matrix, or edges (2, E), sources in row 0. A list of these is one graph of several without edges between
            them, each with its own splits; in a mapping such as `{"train": graphs, "test": graph}` whole graphs are parts.
        root: Folder in which names of stores are looked up.
        **arrays: What the source lacks: `features` (N, D), dense or sparse; `labels` (N,), -1 for none; `splits`, a mapping
            from "train", "val" and "test" to masks or ids; `weights` (E,) and `edge_types` (E,), whole numbers from 0, of
            edges; all of NumPy, SciPy or torch. Further `num_vertices`, `num_classes`, `num_relations`, `name`,
            `options=GraphOptions(...)`; for a store, `verify=True`.

    Raises:
        ConfigError: An argument is unknown or does not go with the source.
        GraphError: Arrays or files are malformed or do not fit each other.
        StoreError: The folder is no store, or is damaged.

    Examples:
        >>> edges = np.array([[0, 1, 2, 2], [1, 2, 0, 1]])
        >>> graph = mggcn.load(edges, features=np.eye(3, dtype=np.float32), labels=np.array([0, 1, -1]))
        >>> graph.num_vertices, graph.num_edges, graph.num_classes
        (3, 4, 2)
    """
    if isinstance(source, list | tuple | dict):
        if odd := sorted(arrays.keys() - {"options", "name", "verify"}):
            raise ConfigError(
                f"each of several graphs has its own {', '.join(odd)}; complete them one by one, then join them"
            )
        check_arguments(arrays, ("verify",))
        return load_joined(source, root=root, **arrays)
    if isinstance(source, str | Path):
        check_arguments(arrays, ("verify",))
        return load_source(source, root=root, **arrays)
    check_arguments(arrays)
    return from_object(source, **arrays)


def GCN(hidden: int | Sequence[int] = (128, 128), **settings: Any) -> ModelConfig:  # noqa: N802  a model, as in torch.nn
    """Describe a graph convolutional network (Kipf & Welling 2017).

    Args:
        hidden: Widths of the hidden layers; the output layer has one column for each class.
        **settings: Other fields of `ModelConfig`: dropout, input_dropout, norm, self_loops, bias.

    Raises:
        ConfigError: A setting is unknown (the known ones are listed) or its value does not fit.

    Examples:
        >>> mggcn.GCN(hidden=(64, 64), dropout=0.5).norm
        'symmetric'
    """
    return from_tables({"model": settings | {"kind": "gcn", "hidden": hidden}}).model


def MLP(hidden: int | Sequence[int] = (128, 128), **settings: Any) -> ModelConfig:  # noqa: N802  a model, as in torch.nn
    """Describe the network of `GCN` without the graph: a yardstick for what the graph adds.

    Args:
        hidden: As of `GCN`.
        **settings: As of `GCN`.

    Raises:
        ConfigError: As of `GCN`.
    """
    return from_tables({"model": settings | {"kind": "mlp", "hidden": hidden}}).model


def SAGE(hidden: int | Sequence[int] = (128, 128), **settings: Any) -> ModelConfig:  # noqa: N802  as in torch.nn
    """Describe GraphSAGE with the GCN aggregator, (sum of neighbours + self) / (degree + 1) (DistGNN, section 6.1).

    In a weighted graph the average is weighted; a vertex itself has the weight of its stored self-loop, or 1 without one.
    With `aggregator="max"` neighbours are pooled instead (Hamilton et al. 2017, eq. 3), whatever their weights.

    Args:
        hidden: As of `GCN`.
        **settings: As of `GCN`, without norm and self_loops, which this model determines.

    Raises:
        ConfigError: As of `GCN`.
    """
    return from_tables({"model": settings | {"kind": "sage", "hidden": hidden}}).model


def RGCN(hidden: int | Sequence[int] = (128, 128), **settings: Any) -> ModelConfig:  # noqa: N802  as in torch.nn
    """Describe R-GCN (Schlichtkrull et al. 2018) for a graph whose edges have types, as PyG's RGCNConv with `num_bases`.

    Args:
        hidden: As of `GCN`.
        **settings: As of `GCN`, without norm and self_loops, which this model determines, and `bases`, the matrices in each
            layer of which every relation's matrix is a weighted sum.

    Raises:
        ConfigError: As of `GCN`.
    """
    return from_tables({"model": settings | {"kind": "rgcn", "hidden": hidden}}).model


def GAT(hidden: int | Sequence[int] = (128, 128), heads: int = 4, **settings: Any) -> ModelConfig:  # noqa: N802
    """Describe a graph attention network (Velickovic et al. 2018), heads averaged in the last layer.

    Attention reads no weights of edges. Dropout of its weights is `attention_dropout`.

    Args:
        hidden: Widths of the hidden layers, of all heads together.
        heads: Heads of every layer, which must divide the widths.
        **settings: As of `GCN`, without norm.

    Raises:
        ConfigError: As of `GCN`, and for widths that are no multiples of heads.

    Examples:
        >>> mggcn.GAT(hidden=(64,), heads=8, attention_dropout=0.2).heads
        8
    """
    return from_tables({"model": settings | {"kind": "gat", "hidden": hidden, "heads": heads}}).model


def GATv2(hidden: int | Sequence[int] = (128, 128), heads: int = 4, **settings: Any) -> ModelConfig:  # noqa: N802
    """Describe GATv2 (Brody et al. 2022), whose attention ranks neighbours by vertex: as `GAT` otherwise.

    Args:
        hidden: As of `GAT`.
        heads: As of `GAT`.
        **settings: As of `GAT`.

    Raises:
        ConfigError: As of `GAT`.
    """
    return from_tables({"model": settings | {"kind": "gatv2", "hidden": hidden, "heads": heads}}).model


class Trainer:
    """Trains a model on a whole graph.

    One rank trains in this process. P ranks are processes of this machine that open the graph's store (for a graph in
    memory, a temporary one), and so a script that uses them is guarded by `if __name__ == "__main__":`. The run is planned
    and checked at once, before anything is allocated.

    Args:
        graph: A graph from `load`, or anything that `load` takes.
        model: `GCN(...)`, `SAGE(...)`, `GAT(...)`, `GATv2(...)`, `RGCN(...)` or `MLP(...)`; default `GCN()`.
        ranks: Number of ranks P that share the graph.
        out: Run folder of the first `fit`; otherwise a temporary one, deleted with the trainer.
        config: All settings at once; `model`, `ranks` and `settings` override it.
        **settings: Single settings by name, such as `lr=0.01`, `seed=3`, `precision="fp64"`, `transport="threads"`.

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
        model: ModelConfig | None = None,
        *,
        ranks: int | None = None,
        out: str | Path | None = None,
        config: Config | None = None,
        **settings: Any,
    ) -> None:
        base = with_model(config, model)
        self._graph: Graph = graph if isinstance(graph, Graph) else load(graph)
        asked = with_named(base, settings | ({} if ranks is None else {"ranks": ranks}))
        self._config, self._choice = resolve_auto(asked, self._graph)
        self._plan, self._partition = plan_graph(self._config, self._graph)
        require_fit(self._plan, memory_limit(self._config))
        self._out = None if out is None else Path(out)
        self._rank: Rank | None = None
        self._folder: Path | None = None

    @property
    def config(self) -> Config:
        """All settings, with every `auto` replaced by what was chosen."""
        return self._config

    @property
    def plan(self) -> PrintedPlan:
        """Every buffer, byte and message of the run: print it, or read `plan.run`."""
        return PrintedPlan(self._plan)

    @property
    def run_folder(self) -> Path | None:
        """Folder of the last `fit` that was completed or that a signal stopped; None before."""
        return self._folder

    def fit(self, epochs: int | None = None, on_epoch: Callable[[dict[str, Any]], None] | None = None) -> History:
        """Train from fresh weights.

        After an error the weights and the result of the previous `fit` are kept. Cost: as `plan` says.

        Args:
            epochs: Overrides `train.epochs`.
            on_epoch: Called with the row of each epoch, with one rank or threads only; what it raises ends the training.

        Returns:
            One row for each epoch: epoch, loss, train, val, test, lr, seconds.

        Raises:
            TrainError: The loss is not finite.
            CommError: A rank failed or did not answer in time; any other first error of a rank is raised as it is.
        """
        if on_epoch is not None and not callable(on_epoch):
            raise ConfigError(f"on_epoch must be a function of a row, got {type(on_epoch).__name__}")
        if on_epoch is not None and not self._in_process:
            raise ConfigError("on_epoch needs ranks=1 or transport='threads': other processes cannot call it")
        check_available(self._config)
        if epochs is not None:
            self._config = with_named(self._config, {"epochs": epochs})
            self._plan = dataclasses.replace(self._plan, config=self._config)
        out = self._out if self._folder is None else None
        store = self._store()
        temporary = None if out is not None else _temporary(self)
        folder = run_folders.make_run_folder(self._config, self._graph.name, out or temporary)
        run_folders.write_plan(folder, self._plan, self._partition, store, self._graph, self._choice)
        before, self._folder, self._rank = self._folder, folder, None
        try:
            self._train(folder, on_epoch)
        except BaseException as error:
            if before is not None and not isinstance(error, Interrupted):  # a signal's weights are saved
                self._folder = before
            raise
        return [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]

    def _train(self, folder: Path, on_epoch: Callable[[dict[str, Any]], None] | None) -> None:
        """Train on the ranks of this process, whose own one stays for `predict`, or on processes."""
        if self._in_process:
            known = (self._plan, self._partition)
            with local_ranks.signalled_stop() as stop:
                ranks = local_ranks.on_local_ranks(
                    self._config,
                    lambda comm: training.train_rank(
                        comm, self._config, self._graph, *known, folder, quiet=True, stop=stop, on_epoch=on_epoch
                    ),
                )
            self._rank = ranks[0]
        else:
            training.train_processes(folder, self._config, quiet=True)

    def evaluate(self, split: str = "test", weights: str = "best") -> float:
        """Return the score of a split: accuracy, or what `train.metric` says.

        Args:
            split: "train", "val" or "test".
            weights: Those of the "best" validation score, or of the "last" epoch.

        Raises:
            RunError: Nothing was trained yet.
            ConfigError: The graph has no such split, or `split` or `weights` is unknown.
        """
        if split not in ("train", "val", "test"):
            raise ConfigError(f"split must be train, val or test, got {split!r}")
        _check_weights(weights)
        result = self.result()
        chosen = result["best"] if weights == "best" else result["final"]
        if chosen is None or chosen[split] is None:
            raise ConfigError(f"{self._graph.name} has no {split} vertices to score")
        return float(chosen[split])

    def result(self) -> dict[str, Any]:
        """Return the content of result.json of the last `fit`: scores, seconds, memory planned and measured, versions.

        Raises:
            RunError: Nothing was trained yet.
        """
        if self._folder is None or not (self._folder / "result.json").exists():
            raise RunError("the trainer has no result yet; call fit() first")
        return training.read_result(self._folder)

    def predict(
        self, *, weights: str = "best", probabilities: bool = False, classes: bool = False, graph: Any = None
    ) -> npt.NDArray[Any]:
        """Return the scores of every vertex, (N, C) in the run's precision, in the graph's own order.

        Cost: one forward pass.

        Args:
            weights: Those of the "best" validation score, or of the "last" epoch; with `train.repeat`, of the best repeat.
            probabilities: Return probabilities rather than scores: softmax of classes, or of each of several labels.
            classes: Return the class of the highest score instead, (N,), or 0 and 1 for each of several labels, (N, C).
            graph: Another graph with the same features, or anything that `load` takes, instead of the trainer's own; it
                needs neither labels nor splits, and is scored in this process.

        Raises:
            RunError: Nothing was trained yet.
            ConfigError: `weights` is neither "best" nor "last", the other graph's features or relations differ, or numbers
                were to be classes.
        """
        _check_weights(weights)
        task = self._plan.shape.task
        prediction_files.check_kind(task, classes=classes, probabilities=probabilities)
        scores = self._predicted(weights, probabilities, graph)
        return prediction_files.classes_of(scores, task) if classes else scores

    def _predicted(self, weights: str, probabilities: bool, graph: Any) -> npt.NDArray[np.floating]:
        if self._folder is None:
            raise RunError("the trainer has no weights yet; call fit() first, or scores_of() with weights of your own")
        if graph is not None:
            return self._scores(self.state_dict(weights), probabilities, graph)
        target = Path(tempfile.mkdtemp(prefix="mggcn-")) / "scores.npy"
        try:
            if self._in_process:
                self._predict_here(target, weights, probabilities)
            else:
                predicting.predict(self._folder, target, weights=weights, probabilities=probabilities)
            return np.load(target, allow_pickle=False)  # type: ignore[no-any-return]
        finally:
            shutil.rmtree(target.parent, ignore_errors=True)

    def state_dict(self, weights: str = "best") -> dict[str, Tensor]:
        """Return the weights as plain tensors: `layers.<l>.weight` (D, E) and `layers.<l>.bias` (E,), l from 1.

        Args:
            weights: As of `predict`.

        Raises:
            RunError: Nothing was trained yet.
            ConfigError: `weights` is neither "best" nor "last".
        """
        from mggcn.train.checkpoint import load_checkpoint
        from mggcn.train.repeats import load_repeat

        _check_weights(weights)
        found = None if self._folder is None else load_checkpoint(self._folder / "checkpoints")
        if self._folder is None or found is None:
            raise RunError("the trainer has no weights yet; call fit() first")
        parts = found[1]
        state = (parts.get("best") if weights == "best" else None) or parts["weights"]
        if (seed := run_folders.seed_of_weights(self._folder, self._config)) is not None:
            state = load_repeat(self._folder, seed, "best" if weights == "best" else "weights")
        return {name: state[name] for name in sorted(state, key=_layer_order)}

    def scores_of(
        self, state: Mapping[str, Tensor] | Module, *, probabilities: bool = False
    ) -> npt.NDArray[np.floating]:
        """Return the class scores (N, C) of given weights, in the precision and order of `predict`.

        Computed on one rank in this process. Cost: set-up and one forward pass.

        Args:
            state: Weights as `state_dict` returns them, or a torch module of GCNConv layers, whose options are then
                compared with the model's; a mapping, such as `from_pyg(module)`, no longer says what they were.
            probabilities: As of `predict`.

        Raises:
            ConfigError: Names or shapes differ from the model's; for a module, as of `from_pyg`.
        """
        return self._scores(state if isinstance(state, Mapping) else from_pyg(state, self._config.model), probabilities)

    def _scores(
        self, tensors: Mapping[str, Tensor], probabilities: bool, other: Any = None
    ) -> npt.NDArray[np.floating]:
        """Score the trainer's graph, or another one, on one rank."""
        config = with_named(self._config, {"ranks": 1, "transport": "single", "strategy": "broadcast", "prune": "off"})
        graph = self._graph
        if other is not None:
            loaded = other if isinstance(other, Graph) else load(other)
            config, graph = predicting.for_scoring(config, loaded, self._plan.shape)
        plan, partition = plan_graph(config, graph)
        require_fit(plan, memory_limit(config))

        def body(comm: Communicator) -> npt.NDArray[np.floating]:
            from mggcn.assemble_rank import make_rank

            rank = make_rank(config, graph, plan, partition, comm)
            rank.trainer.runtime.weights.load_state_dict(tensors)
            rank.trainer.evaluate()
            logits = rank.trainer.scores()
            scores = np.empty_like(logits)
            scores[rank.trainer.runtime.inputs.row_ids.cpu().numpy()] = logits
            return scores

        scores = local_ranks.on_local_ranks(config, body)[0]
        return prediction_files.probabilities_of(scores, self._plan.shape.task) if probabilities else scores

    @property
    def _in_process(self) -> bool:
        return self._config.run.transport in ("single", "threads")

    def _predict_here(self, target: Path, weights: str, probabilities: bool) -> None:
        state = self.state_dict(weights)
        plan, partition = self._plan, self._partition

        def body(comm: Any) -> None:
            from mggcn.assemble_rank import make_rank

            rank = self._rank if comm.size == 1 and self._rank is not None else None
            rank = rank or make_rank(self._config, self._graph, plan, partition, comm)
            rank.trainer.runtime.backend.activate()
            before = rank.trainer.runtime.weights.state_dict()
            rank.trainer.runtime.weights.load_state_dict(state)
            predicting.write_scores(comm, rank, target, self._graph, probabilities)
            rank.trainer.runtime.weights.load_state_dict(before)

        local_ranks.on_local_ranks(self._config, body)

    def _store(self) -> Path | None:
        """Return the store that rank processes open: the graph's own, or a temporary one for a graph in memory."""
        if self._in_process:
            return None
        folder = store_folder(self._graph)
        if folder is None:
            folder = _temporary(self) / "graph"
            write_store(self._graph, folder)
            self._graph = open_store(folder)
        return folder


def _layer_order(name: str) -> tuple[int, bool]:
    """Order of layers.<l>.weight and layers.<l>.bias; a checkpoint sorts them as text."""
    _, layer, kind = name.split(".")
    return int(layer), kind == "bias"


def _check_weights(weights: str) -> None:
    if weights not in ("best", "last"):
        raise ConfigError(f"weights must be best or last, got {weights!r}")


def _temporary(owner: Trainer) -> Path:
    """Return a new temporary folder that is deleted with its owner."""
    folder = Path(tempfile.mkdtemp(prefix="mggcn-"))
    weakref.finalize(owner, shutil.rmtree, folder, ignore_errors=True)
    return folder
