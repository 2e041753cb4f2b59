"""The public Python API without training: load and save graphs, describe models.

N vertices, C classes.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from mggcn import native
from mggcn.api.load import load_joined, load_source
from mggcn.config import ModelConfig, from_tables
from mggcn.errors import ConfigError, GraphWarning
from mggcn.graph.convert import check_arguments
from mggcn.graph.csr import Graph
from mggcn.graph.facts import ONE_WAY, is_one_way, several_metrics
from mggcn.graph.store import open_store, store_folder
from mggcn.graph.store_write import write_store
from mggcn.interop.objects import from_object, is_item
from mggcn.settings import LoadArguments, ModelSettings


def load(source: Any, *, root: str | Path | None = None, **arrays: Unpack[LoadArguments]) -> Graph:
    """Load a graph from whatever holds one.

    Cost: a store opens lazily; everything else is read into memory.

    Args:
        source: A path (store folder, unpacked folder of OGB's, `.npz`, MatrixMarket, edge list), a name under `root`
            or of a data set (`mggcn datasets`), a PyG `Data`, a DGL or networkx graph, a data set of PyG, DGL or OGB that
            holds one graph, an item of OGB's, a SciPy matrix, or edges (2, E), sources in row 0. A list of these is one
            graph of several without edges between them, each with its own splits; in a mapping such as
            `{"train": graphs, "test": graph}` whole graphs are parts.
        root: Folder in which names of stores are looked up.
        **arrays: What the source lacks: `features` (N, D), dense or sparse, or the names "identity" or "degree";
            `labels` (N,), or (N, T) of several labels or numbers a vertex, -1 or NaN where unknown; `task`, "classes",
            "labels" or "numbers", where labels do not look like what they are; `class_names`, a list in the order of
            classes or the path of a text file with a line each (labels may also be the names themselves); `splits`, a
            mapping from "train", "val" and "test" to masks or ids; `weights` (E,) and `edge_types` (E,), whole numbers
            from 0, of edges; all of NumPy, SciPy or torch. Further `num_vertices`, `num_classes`, `num_relations`, `name`,
            `options=GraphOptions(...)`; for a store, `verify=True`. For what is in memory also `ids` (N,): strings, or
            numbers with gaps, that name the rows in order. Edges that are an array, and splits that are lists, then
            hold ids, not row numbers. Without features and labels `ids="edges"` numbers what occurs in the edges,
            ascending, as is done with strings anyway. `graph.ids` keeps them, in stores too.

    Warns:
        GraphWarning: No edge has its reverse, as if undirected edges had been listed once; or several graphs name different
            scores.

    Raises:
        ConfigError: An argument is unknown or does not go with the source.
        GraphError: Arrays or files are malformed or do not fit each other.
        StoreError: The folder is no store, or is damaged.

    Examples:
        >>> edges = np.array([[0, 1, 2, 2], [1, 2, 0, 1]])
        >>> graph = mggcn.load(edges, features=np.eye(3, dtype=np.float32), labels=np.array([0, 1, -1]))
        >>> graph.num_vertices, graph.num_edges, graph.num_classes
        (3, 4, 2)

        >>> graph = mggcn.load(np.array([["ann", "bob"], ["bob", "eve"]]))
        >>> graph.ids.array().tolist()
        ['ann', 'bob', 'eve']
    """
    native.limit_spinning()  # of no effect once the caller has loaded torch
    if arrays.get("task") == "links":
        raise ConfigError(
            "links are edges of a graph that is loaded: mggcn.split_links(graph, (0.8, 0.1, 0.1)) splits them"
        )
    if isinstance(source, list | tuple | dict) and not is_item(source):
        if odd := sorted(arrays.keys() - {"options", "name", "verify"}):
            raise ConfigError(
                f"{', '.join(odd)} cannot be given for several graphs at once; load each graph with its own, then load "
                "the list of graphs"
            )
        check_arguments(arrays, ("verify",))
        given: Any = arrays
        joined = load_joined(source, root=root, **given)
        if metrics := joined.meta.get("joined_metrics"):
            warnings.warn(several_metrics(metrics), GraphWarning, stacklevel=2)
        return joined
    if isinstance(source, str | Path):
        check_arguments(arrays, ("verify", "ids"))
        graph = load_source(source, root=root, **arrays)
    else:
        check_arguments(arrays, ("ids",))
        graph = from_object(source, **arrays)
    if store_folder(graph) is None and not isinstance(source, Graph) and is_one_way(graph):
        warnings.warn(ONE_WAY, GraphWarning, stacklevel=2)
    return graph


def save(graph: Any, path: str | Path, *, overwrite: bool = False) -> Graph:
    """Write a graph as a store, and open it from there: for the command line, for ranks, or to open it at once next time.

    A graph that is named after its source file gets the name of the folder, as with `mggcn prepare`. Cost: checks and one
    pass over all arrays. After an error nothing is left behind.

    Args:
        graph: A graph from `load`, or anything that `load` takes.
        path: Folder to write.
        overwrite: Replace a store that is there.

    Raises:
        GraphError: The graph is malformed.
        StoreError: The folder exists, or cannot be written.

    Examples:
        >>> graph = mggcn.load(np.array([[0, 1, 2], [1, 2, 0]]))
        >>> mggcn.save(graph, "ring").num_edges
        3
    """
    graph = graph if isinstance(graph, Graph) else load(graph)
    source = Path(str(graph.meta.get("source", "")))
    if graph.name == source.name.split(".")[0] and source.is_file():
        graph = replace(graph, name=Path(path).resolve().name)
    write_store(graph, path, overwrite)
    return open_store(path)


def GCN(hidden: int | Sequence[int] = (128, 128), **settings: Unpack[ModelSettings]) -> ModelConfig:  # noqa: N802  a model, as in torch.nn
    """Describe a graph convolutional network (Kipf & Welling 2017).

    Args:
        hidden: Widths of the hidden layers; the output layer has one column for each class.
        **settings: Other fields of `ModelConfig`: dropout, input_dropout, norm, self_loops, bias, and what surrounds a
            convolution: norm_layer, residual, activation, jumping, head, dense_before, dense_between, dense_after.

    Raises:
        ConfigError: A setting is unknown (the known ones are listed) or its value does not fit.

    Examples:
        >>> mggcn.GCN(hidden=(64, 64), dropout=0.5).norm
        'symmetric'
    """
    return _model(settings, kind="gcn", hidden=hidden)


def MLP(hidden: int | Sequence[int] = (128, 128), **settings: Unpack[ModelSettings]) -> ModelConfig:  # noqa: N802  a model, as in torch.nn
    """Describe the network of `GCN` without the graph: a yardstick for what the graph adds.

    Args:
        hidden: As for `GCN`.
        **settings: As for `GCN`.

    Raises:
        ConfigError: As for `GCN`.
    """
    return _model(settings, kind="mlp", hidden=hidden)


def SAGE(hidden: int | Sequence[int] = (128, 128), **settings: Unpack[ModelSettings]) -> ModelConfig:  # noqa: N802  as in torch.nn
    """Describe GraphSAGE, by default with the GCN aggregator, (sum of neighbours + self) / (degree + 1) (DistGNN, 6.1).

    In a weighted graph the average is weighted; a vertex itself has the weight of its stored self-loop, or 1 without one.
    With `aggregator="mean"` the vertex has a weight matrix of its own beside the neighbours' mean; with `aggregator="max"`
    neighbours are pooled (Hamilton et al. 2017, eq. 3), whatever their weights.

    Args:
        hidden: As for `GCN`.
        **settings: As for `GCN`, without norm, which this model determines. PyG's SAGEConv is `aggregator="mean",
            self_loops=False`.

    Raises:
        ConfigError: As for `GCN`.
    """
    return _model(settings, kind="sage", hidden=hidden)


def RGCN(hidden: int | Sequence[int] = (128, 128), **settings: Unpack[ModelSettings]) -> ModelConfig:  # noqa: N802  as in torch.nn
    """Describe R-GCN (Schlichtkrull et al. 2018) for a graph whose edges have types, as PyG's RGCNConv with `num_bases`.

    Args:
        hidden: As for `GCN`.
        **settings: As for `GCN`, without norm and self_loops, which this model determines, and `bases`, the number of
            basis matrices in each layer; every relation's matrix is a weighted sum of them.

    Raises:
        ConfigError: As for `GCN`.
    """
    return _model(settings, kind="rgcn", hidden=hidden)


def GAT(hidden: int | Sequence[int] = (128, 128), heads: int = 1, **settings: Unpack[ModelSettings]) -> ModelConfig:  # noqa: N802
    """Describe a graph attention network (Velickovic et al. 2018), heads averaged in the last layer.

    Attention reads no weights of edges; edges that repeat in a PyG or DGL graph count each, as in the layers there. Dropout
    of its weights is `attention_dropout`.

    Args:
        hidden: Widths of the hidden layers, of all heads together.
        heads: Heads of every layer, which must divide the widths; `out_heads` of the last, if it has others. With
            `concat_heads=False` each head has the whole width, and they are averaged.
        **settings: As for `GCN`, without norm.

    Raises:
        ConfigError: As for `GCN`, and for widths that are no multiples of heads.

    Examples:
        >>> mggcn.GAT(hidden=(64,), heads=8, attention_dropout=0.2).heads
        8
    """
    return _model(settings, kind="gat", hidden=hidden, heads=heads)


def GATv2(hidden: int | Sequence[int] = (128, 128), heads: int = 1, **settings: Unpack[ModelSettings]) -> ModelConfig:  # noqa: N802
    """Describe GATv2 (Brody et al. 2022), whose attention ranks neighbours by vertex: as `GAT` otherwise.

    Args:
        hidden: As for `GAT`.
        heads: As for `GAT`.
        **settings: As for `GAT`.

    Raises:
        ConfigError: As for `GAT`.
    """
    return _model(settings, kind="gatv2", hidden=hidden, heads=heads)


def GIN(hidden: int | Sequence[int] = (128, 128), **settings: Unpack[ModelSettings]) -> ModelConfig:  # noqa: N802  as in torch.nn
    """Describe GIN (Xu et al. 2019, eq. 4.1): sums of neighbours and (1 + eps) x through two dense layers, eps learnt.

    Args:
        hidden: As for `GCN`.
        **settings: As for `GCN`, without norm and self_loops, which this model determines.

    Raises:
        ConfigError: As for `GCN`.
    """
    return _model(settings, kind="gin", hidden=hidden)


def SGC(hops: int = 2, **settings: Unpack[ModelSettings]) -> ModelConfig:  # noqa: N802  as in torch.nn
    """Describe SGC (Wu et al. 2019): A_hat^K X W + b, a linear model of features that were averaged K times.

    Args:
        hops: K.
        **settings: input_dropout, norm, self_loops and bias of `ModelConfig`.

    Raises:
        ConfigError: As for `GCN`.
    """
    return _model(settings, kind="sgc", hops=hops)


def APPNP(  # noqa: N802  as in torch.nn
    hidden: int | Sequence[int] = (128, 128), hops: int = 10, teleport: float = 0.1, **settings: Unpack[ModelSettings]
) -> ModelConfig:
    """Describe APPNP (Klicpera et al. 2019, eq. 5): dense layers, then K steps Z = (1 - a) A_hat Z + a Z_0.

    Args:
        hidden: Widths of the hidden dense layers.
        hops: K.
        teleport: a, in (0, 1].
        **settings: As for `GCN`, without what surrounds a convolution but norm_layer, activation and dense_before.

    Raises:
        ConfigError: As for `GCN`.
    """
    return _model(settings, kind="appnp", hidden=hidden, hops=hops, teleport=teleport)


def _model(settings: ModelSettings, **given: Any) -> ModelConfig:
    """Return the model of some settings. Raises: ConfigError."""
    return from_tables({"model": {**settings, **given}}).model
