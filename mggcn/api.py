"""The public Python API without training: load and save graphs, describe models.

N vertices, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mggcn.config import ModelConfig, from_tables
from mggcn.graph.convert import check_arguments, from_object
from mggcn.graph.csr import Graph
from mggcn.graph.sources import load_source
from mggcn.graph.store import open_store
from mggcn.graph.store_write import write_store


def load(source: Any, *, root: str | Path | None = None, **arrays: Any) -> Graph:
    """Load a graph from whatever holds one.

    Cost: a store opens lazily; everything else is read into memory.

    Args:
        source: A path (store folder, `.npz`, MatrixMarket, edge list), a name under `root`, a PyG `Data`, a DGL graph, a
            SciPy matrix, or edges (2, E), sources in row 0.
        root: Folder in which names of stores are looked up.
        **arrays: What the source lacks: `features` (N, D), dense or sparse; `labels` (N,), -1 for none; `splits`, a mapping
            from "train", "val" and "test" to masks or ids; `weights` (E,) of edges; all of NumPy, SciPy or torch. Further
            `num_vertices`, `num_classes`, `name`, `options=GraphOptions(...)`; for a store, `verify=True`.

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
    if isinstance(source, str | Path):
        check_arguments(arrays, ("verify",))
        return load_source(source, root=root, **arrays)
    check_arguments(arrays)
    return from_object(source, **arrays)


def save(graph: Any, path: str | Path, *, overwrite: bool = False) -> Graph:
    """Write a graph as a store, and open it from there: for the command line, for ranks, or to open it at once next time.

    Cost: checks and one pass over all arrays. After an error nothing is left behind.

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
    write_store(graph if isinstance(graph, Graph) else load(graph), path, overwrite)
    return open_store(path)


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

    Args:
        hidden: As of `GCN`.
        **settings: As of `GCN`, without norm and self_loops, which this model determines.

    Raises:
        ConfigError: As of `GCN`.
    """
    return from_tables({"model": settings | {"kind": "sage", "hidden": hidden}}).model
