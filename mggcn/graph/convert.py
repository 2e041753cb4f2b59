"""Graphs from objects in memory: arrays, SciPy matrices, PyTorch Geometric and DGL graphs.

Neither torch nor the graph libraries are imported: their objects are read through the few attributes named here.
Shapes: N vertices, E edges, D features, S splits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import scipy.sparse as sp

from mggcn.errors import GraphError
from mggcn.graph.check import check_graph
from mggcn.graph.csr import Array, Graph
from mggcn.graph.structure import DEFAULT_OPTIONS, GraphOptions, build_adjacency, edge_list
from mggcn.graph.vertex_data import as_features, as_labels, as_splits, is_sparse, normalized_rows

PARTS = ("train", "val", "test")


def from_arrays(
    *,
    edges: Any = None,
    weights: Any = None,
    adj: Any = None,
    num_vertices: int | None = None,
    features: Any = None,
    labels: Any = None,
    splits: Mapping[str, Any] | None = None,
    num_classes: int | None = None,
    options: GraphOptions = DEFAULT_OPTIONS,
    name: str = "graph",
    meta: Mapping[str, Any] | None = None,
) -> Graph:
    """Make a graph from arrays. Give either `edges` (and `weights`) or `adj`.

    Shapes: edges integers [2, E], row 0 sources, row 1 targets; weights [E]; adj a square SciPy matrix or array, or a
    tuple (indptr, indices[, values]), with adj[u, v] for the edge u -> v; features dense or SciPy sparse [N, D]; labels
    [N], -1 or NaN for unlabelled; splits: name -> bool [N] or [S, N], or a list of vertex ids. `num_vertices` is
    inferred where it is not given: from adj, features or labels, else the largest id + 1.
    Cost: some sorts of E 8-byte keys, then the checks of `check_graph`.
    Raises: GraphError on anything malformed: ids, lengths, NaN, labels, splits that overlap or cannot be trained on.
    """
    if (edges is None) == (adj is None):
        raise GraphError("give either edges of shape [2, E] or adj, a square SciPy matrix; exactly one of them")
    if adj is not None:
        edges, weights, num_vertices = _from_matrix(adj, num_vertices)
    edges = np.asarray(edges) if np.size(edges) else np.empty((2, 0), dtype=np.int64)
    origin = ""
    if num_vertices is None:
        num_vertices, origin = _infer_num_vertices(edges, features, labels)
    weights = None if weights is None else np.asarray(weights)
    both = build_adjacency(edges, weights, num_vertices, options, origin)
    label_rows, num_classes = as_labels(labels, num_vertices, num_classes)
    graph = Graph(
        name=name,
        adj=both.adj,
        adj_t=both.adj_t,
        features=as_features(features, num_vertices, options.row_normalize),
        labels=label_rows,
        splits=as_splits(splits, num_vertices),
        num_classes=num_classes,
        meta=_meta(meta, options, both.num_merged),
    )
    check_graph(graph)
    return graph


def from_scipy(adj: Any, **arrays: Any) -> Graph:
    """Make a graph from a square SciPy matrix; `arrays` are the other arguments of `from_arrays`."""
    if not is_sparse(adj):
        raise GraphError(
            f"expected a SciPy sparse matrix, got {type(adj).__name__}; scipy.sparse.csr_array(...) makes one"
        )
    return from_arrays(adj=adj, **({"meta": {"source": "SciPy matrix"}} | arrays))


def from_pyg(data: Any, **arrays: Any) -> Graph:
    """Make a graph from a PyTorch Geometric `Data`; `arrays` (see `from_arrays`) override what it holds.

    Read are edge_index [2, E] (source -> target) or adj_t, edge_weight [E], x (dense or sparse), y, num_nodes and
    train_mask, val_mask, test_mask, [N] or [N, S]. Every other attribute is ignored, edge_attr included.
    """
    edges, weights = _pyg_edges(data)
    masks = {part: getattr(data, f"{part}_mask", None) for part in PARTS}
    found = {
        "edges": edges,
        "weights": weights,
        "num_vertices": data.num_nodes,
        "features": to_numpy(getattr(data, "x", None)),
        "labels": to_numpy(getattr(data, "y", None)),
        "splits": {part: to_numpy(mask).T for part, mask in masks.items() if mask is not None},
        "meta": {"source": "PyTorch Geometric Data"},
    }
    return from_arrays(**(found | arrays))


def from_dgl(graph: Any, **arrays: Any) -> Graph:
    """Make a graph from a homogeneous `DGLGraph`; `arrays` (see `from_arrays`) override what it holds.

    Read are edges(), num_nodes() and, as in DGL's data sets, ndata: feat, label, train_mask, val_mask, test_mask.
    """
    src, dst = graph.edges()
    masks = {part: graph.ndata[f"{part}_mask"] for part in PARTS if f"{part}_mask" in graph.ndata}
    found = {
        "edges": np.stack([to_numpy(src), to_numpy(dst)]),
        "num_vertices": graph.num_nodes(),
        "features": to_numpy(graph.ndata["feat"]) if "feat" in graph.ndata else None,
        "labels": to_numpy(graph.ndata["label"]) if "label" in graph.ndata else None,
        "splits": {part: to_numpy(mask).astype(np.bool_) for part, mask in masks.items()},
        "meta": {"source": "DGLGraph"},
    }
    return from_arrays(**(found | arrays))


def from_object(source: Any, **arrays: Any) -> Graph:
    """Make a graph from whatever is passed to the public API, except a path (see `load_source`).

    Accepted: a Graph, a PyG Data, a DGLGraph, a SciPy matrix or a NumPy edge list [2, E]; `arrays`: see `from_arrays`.
    Raises: GraphError if it is none of these, or is malformed.
    """
    if isinstance(source, Graph):
        if arrays.keys() - {"options"}:
            raise GraphError(f"a Graph is complete, {sorted(arrays)} cannot be added; use dataclasses.replace")
        return with_options(source, arrays.get("options", DEFAULT_OPTIONS))
    if is_sparse(source):
        return from_scipy(source, **arrays)
    if isinstance(source, np.ndarray):
        return from_arrays(edges=source, **arrays)
    if getattr(source, "edge_index", None) is not None or getattr(source, "adj_t", None) is not None:
        return from_pyg(source, **arrays)
    if getattr(source, "ndata", None) is not None:
        return from_dgl(source, **arrays)
    raise GraphError(
        f"cannot read a graph from {type(source).__name__}; expected a path, a PyTorch Geometric Data (dataset[0], not "
        "the dataset), a homogeneous DGLGraph, a SciPy sparse matrix or edges of shape [2, E]"
    )


def with_options(graph: Graph, options: GraphOptions) -> Graph:
    """Return the graph as `options` ask for it; what they do not touch stays where it is (in files, say)."""
    changes: dict[str, Any] = {}
    if (options.symmetrize and not graph.symmetric) or options.self_loops != "keep":
        edges, weights = edge_list(graph.adj)
        changes["adj"], changes["adj_t"], _ = build_adjacency(edges, weights, graph.num_vertices, options)
    if options.row_normalize and graph.features is not None:
        changes["features"] = normalized_rows(graph.features)
    if not changes:
        return graph
    stale = {"format_version", "sha256", "symmetric"}
    meta = {key: value for key, value in graph.meta.items() if key not in stale} | {"options": asdict(options)}
    return replace(graph, **changes, meta=meta)


def to_numpy(tensor: Any) -> Any:
    """Convert a torch tensor (dense, COO or CSR, on any device) to NumPy or SciPy; anything else passes through."""
    if not callable(getattr(tensor, "detach", None)):
        return tensor
    tensor = tensor.detach().cpu()
    if str(tensor.dtype) in ("torch.bfloat16", "torch.float16"):
        tensor = tensor.float()
    if str(tensor.layout) == "torch.strided":
        return tensor.numpy()
    coo = tensor.to_sparse_coo().coalesce()
    indices = coo.indices().numpy()
    return sp.coo_array((coo.values().numpy(), (indices[0], indices[1])), shape=tuple(tensor.shape))


def _pyg_edges(data: Any) -> tuple[Any, Any]:
    """Return edges [2, E] and weights [E] or None; adj_t is what the ToSparseTensor transform leaves."""
    if getattr(data, "edge_index", None) is not None:
        return to_numpy(data.edge_index), to_numpy(getattr(data, "edge_weight", None))
    matrix = to_numpy(data.adj_t)
    if is_sparse(matrix):
        coo = sp.coo_array(matrix)
        return np.stack([coo.col, coo.row]), coo.data
    row, col, value = data.adj_t.coo()
    return np.stack([to_numpy(col), to_numpy(row)]), to_numpy(value)


def _from_matrix(adj: Any, num_vertices: int | None) -> tuple[Array, Array | None, int]:
    if isinstance(adj, tuple):
        adj = _matrix_from_triple(adj)
    if not is_sparse(adj) or adj.ndim != 2 or adj.shape[0] != adj.shape[1]:
        raise GraphError(
            f"adj must be a square SciPy matrix or (indptr, indices[, values]), got {type(adj).__name__} "
            f"of shape {np.shape(adj)}; adj[u, v] stands for the edge u -> v"
        )
    if num_vertices not in (None, adj.shape[0]):
        raise GraphError(
            f"num_vertices is {num_vertices}, adj has {adj.shape[0]} rows; leave num_vertices (--vertices) out"
        )
    coo = sp.coo_array(adj)
    return np.stack([coo.row, coo.col]), coo.data, int(adj.shape[0])


def _matrix_from_triple(triple: tuple[Any, ...]) -> Any:
    indptr, indices = np.asarray(triple[0]), np.asarray(triple[1])
    values = np.asarray(triple[2]) if len(triple) > 2 else np.ones(indices.size, dtype=np.float32)
    num_vertices = indptr.size - 1
    try:
        matrix = sp.csr_array((values, indices, indptr), shape=(num_vertices, num_vertices))
        matrix.check_format(full_check=True)
    except (ValueError, TypeError) as error:
        raise GraphError(
            f"(indptr, indices[, values]) is no CSR matrix: {error}; see scipy.sparse.csr_array"
        ) from error
    return matrix


def _infer_num_vertices(edges: Array, features: Any, labels: Any) -> tuple[int, str]:
    """Return the number of vertices and, for a message, what it comes from if not from the edges."""
    for rows, what in ((features, "the features have"), (labels, "the labels have")):
        if rows is not None:
            return int(np.shape(rows)[0]), f", since {what} {np.shape(rows)[0]} rows"
    if edges.dtype.kind not in "iu":
        return 1, ""  # check_edges names what is wrong
    return int(edges.max()) + 1 if edges.size else 0, ""


def _meta(given: Mapping[str, Any] | None, options: GraphOptions, num_merged: int) -> dict[str, Any]:
    """Say where a graph came from; `input` holds what its files cannot tell later, and is absent if that is nothing."""
    meta = {"source": "arrays"} | dict(given or {}) | {"options": asdict(options)}
    told = dict(meta.get("input", {}))
    if num_merged:
        told |= {"num_merged": num_merged} | ({"symmetrized": True} if options.symmetrize else {})
    return meta | ({"input": told} if told else {})
