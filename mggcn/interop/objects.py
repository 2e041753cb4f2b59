"""Graphs from objects of graph libraries: PyTorch Geometric, DGL, networkx, and the items of OGB's data sets.

None of these libraries is imported: their objects are read through the few attributes named here.
Shapes: N vertices, E edges, S splits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from mggcn.errors import GraphError
from mggcn.graph.class_names import with_class_names
from mggcn.graph.convert import from_arrays, from_scipy, with_features, with_options, with_task
from mggcn.graph.csr import Array, Graph
from mggcn.graph.edges import Edges
from mggcn.graph.ids import numbered
from mggcn.graph.options import DEFAULT_OPTIONS
from mggcn.graph.sources.edge_data import Beside
from mggcn.graph.sources.ogb import class_names_of
from mggcn.graph.vertex_data import as_array, is_sparse, to_numpy

PARTS = ("train", "val", "test")
VALID = "valid"
"""What OGB calls val."""
MASKS = frozenset(f"{part}_mask" for part in (*PARTS, VALID))
PYG = frozenset({"edge_index", "adj_t", "edge_type", "x", "y", "num_nodes", "batch", "ptr", "class_names"}) | MASKS
DGL_EDGES = frozenset({"etype", "_TYPE", "_ID"})
DGL_VERTICES = frozenset({"feat", "label", "_TYPE", "_ID"}) | MASKS
OGB = frozenset({"edge_index", "node_feat", "num_nodes"})
HETERO = (
    "graphs of one type of vertices and edges are read; {} makes one of it, whose edges have types (give features of equal "
    "width)"
)


def from_object(source: Any, **arrays: Any) -> Graph:
    """Make a graph from whatever is passed to the public API, except a path (see `load_source`).

    Accepted: a Graph, a PyG Data, a DGLGraph, a networkx graph, a data set of these or of OGB that holds one graph, an item
    of OGB's, a SciPy matrix or an edge list [2, E], these two also as torch tensors (sparse and dense); `arrays`: see
    `from_arrays`. Raises: GraphError if it is none of these, or is malformed.
    """
    source = to_numpy(source)
    if isinstance(source, Graph):
        if arrays.keys() - {"options", "features", "task", "class_names"}:
            raise GraphError(f"a Graph is complete: {sorted(arrays)} cannot be added; use dataclasses.replace")
        source = with_task(with_features(source, arrays.get("features")), arrays.get("task"))
        return with_options(with_class_names(source, arrays.get("class_names")), arrays.get("options", DEFAULT_OPTIONS))
    if is_sparse(source):
        return from_scipy(source, **arrays)
    if isinstance(source, np.ndarray):
        return from_arrays(**numbered(source, to_numpy(arrays.pop("ids", None)), arrays))
    if is_item(source):
        return _from_item(source, arrays)
    if _is_networkx(source):
        return from_networkx(source, **arrays)
    if callable(getattr(source, "metadata", None)) and hasattr(source, "node_types"):
        raise GraphError(f"{type(source).__name__} has several types: {HETERO.format('data.to_homogeneous()')}")
    if _is_data_set(source):
        return _from_data_set(source, arrays)
    if getattr(source, "edge_index", None) is not None or getattr(source, "adj_t", None) is not None:
        return from_pyg(source, **arrays)
    if getattr(source, "ndata", None) is not None:
        return from_dgl(source, **arrays)
    raise GraphError(
        f"cannot read a graph from {type(source).__name__}; expected a path, a PyTorch Geometric Data, a homogeneous "
        "DGLGraph, a networkx graph, a data set of one of these, a SciPy sparse matrix or edges of shape [2, E]"
    )


def from_pyg(data: Any, **arrays: Any) -> Graph:
    """Make a graph from a PyTorch Geometric `Data`; `arrays` (see `from_arrays`) override what it holds.

    Read are edge_index [2, E] (source -> target) or adj_t, weights (edge_weight [E], also under the names of
    edge_data.py), edge_type [E], x (dense or sparse), y, num_nodes, train_mask, val_mask (or valid_mask), test_mask, [N] or
    [N, S], and class_names, a list. Repeated edges count as often as they are there, as in PyG, unless `options` say
    otherwise. Other attributes are named by `describe`.
    Raises: GraphError as `from_arrays`; for data of edges that may be weights, without a word on `weights`; and for
    repeated self-loops, which PyG counts once or each, depending on the layer.
    """
    edges, weights = _pyg_edges(data)
    options, types = arrays.get("options", DEFAULT_OPTIONS), to_numpy(getattr(data, "edge_type", None))
    if types is None and options.duplicates == "auto" and options.self_loops != "drop" and not options.symmetrize:
        _refuse_repeated_loops(edges)
    held = data.to_dict() if callable(getattr(data, "to_dict", None)) else vars(data)
    beside = Beside({key: value for key, value in held.items() if key not in PYG}, "data.{}")
    masks = {part: getattr(data, f"{part}_mask", None) for part in (*PARTS, VALID)}
    found = {
        "edges": edges,
        "weights": weights,
        "edge_types": types,
        "num_vertices": data.num_nodes,
        "features": to_numpy(getattr(data, "x", None)),
        "labels": to_numpy(getattr(data, "y", None)),
        "class_names": names if isinstance(names := getattr(data, "class_names", None), list | tuple) else None,
        "splits": {part: _mask(mask, data.num_nodes).T for part, mask in masks.items() if mask is not None},
        "meta": {"source": "PyTorch Geometric Data"},
    }
    found = with_weights(found, arrays, beside)
    meta = {**found["meta"], **arrays.get("meta", {})}
    return from_arrays(**(found | arrays | {"options": options.resolved(counted=True), "meta": meta}))


def from_dgl(graph: Any, **arrays: Any) -> Graph:
    """Make a graph from a homogeneous `DGLGraph`; `arrays` (see `from_arrays`) override what it holds.

    Read are edges(), num_nodes() and, as in DGL's data sets, ndata: feat, label, train_mask, val_mask, test_mask. Weights
    are those of edata under the names of edge_data.py; types are edata's etype, or _TYPE (dgl.ETYPE, of
    dgl.to_homogeneous) if there are several. Repeated edges count as often as they are there, as in DGL, unless `options`
    say otherwise. Other data is named by `describe`.
    Raises: GraphError as `from_arrays`; for several types of vertices or edges, and for edge data that may be weights,
    without a word on `weights`.
    """
    several = any(len(getattr(graph, types, ())) > 1 for types in ("ntypes", "canonical_etypes"))
    ndata = {name: graph.ndata[name] for name in DGL_VERTICES if name in graph.ndata}
    if several or any(isinstance(value, Mapping) for value in ndata.values()):
        raise GraphError(f"the DGLGraph is not homogeneous: {HETERO.format('dgl.to_homogeneous(graph, ndata=[...])')}")
    src, dst = graph.edges()
    edata = dict(getattr(graph, "edata", {}))
    types = to_numpy(edata.get("etype", edata.get("_TYPE")))
    options = arrays.get("options", DEFAULT_OPTIONS)
    found = {
        "edges": np.stack([to_numpy(src), to_numpy(dst)]),
        # Every graph of dgl.to_homogeneous has types, also of one relation.
        "edge_types": types if types is not None and np.any(types) else None,
        "num_vertices": graph.num_nodes(),
        "features": to_numpy(ndata.get("feat")),
        "labels": to_numpy(ndata.get("label")),
        "splits": {name.removesuffix("_mask"): _mask(ndata[name], graph.num_nodes()) for name in MASKS & ndata.keys()},
        "meta": {"source": "DGLGraph"},
    }
    columns = {key: value for key, value in edata.items() if key not in DGL_EDGES}
    found = with_weights(found, arrays, Beside(columns, 'graph.edata["{}"]', of_edges=True))
    others = [f'graph.ndata["{name}"]' for name in graph.ndata if name not in DGL_VERTICES]
    found = with_notes(found, unread=others)
    return from_arrays(**(found | arrays | {"options": options.resolved(counted=True)}))


def from_networkx(graph: Any, **arrays: Any) -> Graph:
    """Make a graph from a networkx graph of any kind; `arrays` (see `from_arrays`) complete it, edges as in graph.edges.

    Edges of an undirected graph lead both ways; the attribute weight is read as networkx does, 1 where it is missing.
    Parallel edges of a multigraph count each. Nodes that are the numbers 0 .. N - 1 are rows by their number, others by
    their order in graph.nodes, and `graph.ids` keeps them. Attributes of nodes and others of edges are named by
    `describe`.
    Raises: GraphError as `from_arrays`; for nodes that are neither strings nor whole numbers, and for attributes of edges
    that may be weights.
    """
    nodes, links = list(graph.nodes), list(graph.edges(data=True))
    kind = _kind_of_nodes(nodes)
    mirrored = [at for at, (u, v, _) in enumerate(links) if u != v and not graph.is_directed()]
    every = [*range(len(links)), *mirrored]
    names = list(dict.fromkeys(name for *_, held in links for name in held))
    columns = {name: np.asarray(_attribute(links, name))[every] for name in names}
    for name in ("weights", "edge_types"):
        if arrays.get(name) is not None:
            arrays[name] = as_array(to_numpy(arrays[name]), name)[every]
    ends = np.array([[link[side] for link in links] for side in (0, 1)], kind).reshape(2, -1)
    ends = np.concatenate([ends, ends[::-1, mirrored]], axis=1)
    own = kind is np.int64 and sorted(nodes) == list(range(len(nodes)))
    ids = to_numpy(arrays.pop("ids", None if own else np.array(nodes, kind)))
    found = numbered(ends, ids, {"num_vertices": len(nodes), "meta": {"source": "networkx graph"}})
    access = '[held["{}"] for *_, held in graph.edges(data=True)]'
    found = with_weights(found, arrays, Beside(columns, "the edges' {}", of_edges=True, as_argument=access))
    of_nodes = sorted({f"the nodes' {name}" for _, held in graph.nodes(data=True) for name in held})
    found = with_notes(found, unread=of_nodes)
    if own and nodes != sorted(nodes):
        found = with_notes(found, notes=["rows are the numbers of the nodes, not their order in graph.nodes"])
    options = arrays.pop("options", DEFAULT_OPTIONS).resolved(counted=True)
    if ids is not None:
        arrays = numbered(ends, ids, arrays)
        del arrays["edges"]
    return from_arrays(**(found | arrays | {"options": options}))


def _kind_of_nodes(nodes: list[Any]) -> type[np.generic]:
    if all(
        isinstance(node, int | np.integer) and not isinstance(node, bool) and abs(int(node)) < 2**63 for node in nodes
    ):
        return np.int64
    if all(isinstance(node, str) for node in nodes):
        return np.str_
    raise GraphError(
        "nodes of a networkx graph must all be strings or all be whole numbers of 64 bits; "
        "networkx.convert_node_labels_to_integers(graph) numbers them in the order of graph.nodes"
    )


def _attribute(links: list[Any], name: str) -> list[Any] | Array:
    """Return an attribute of all edges; where it is missing 1 of weight, as in networkx, and NaN of others."""
    values = [held.get(name, 1 if name == "weight" else np.nan) for *_, held in links]
    plain = all(isinstance(value, int | float | np.number | bool) for value in values)
    return values if plain else np.array([str(value) for value in values])


def is_item(source: Any) -> bool:
    """Return whether this is an item of an OGB data set: a dictionary of arrays or a DGL graph, perhaps with labels."""
    if isinstance(source, tuple) and len(source) == 2:
        return is_item(source[0]) or getattr(source[0], "ndata", None) is not None
    return isinstance(source, Mapping) and bool({"edge_index", "edge_index_dict"} & source.keys())


def _from_item(source: Any, arrays: dict[str, Any]) -> Graph:
    """Make a graph of an item; repeated edges count, as they do in PyG and DGL, unless `options` say otherwise."""
    item, labels = source if isinstance(source, tuple) else (source, None)
    if not isinstance(item, Mapping):
        return from_dgl(item, **({"labels": labels} | arrays))
    if "edge_index_dict" in item:
        raise GraphError(
            "the item of OGB's has vertices and edges of several kinds; mggcn reads one kind: give one relation"
        )
    edges = as_array(to_numpy(item["edge_index"]), "edge_index")
    found = {
        "edges": edges,
        "num_vertices": _number_of_nodes(item),
        "features": to_numpy(item.get("node_feat")),
        "labels": labels,
        "meta": {"source": "item of an OGB data set"},
    }
    found = with_weights(found, arrays, Beside({key: item[key] for key in item if key not in OGB}, 'graph["{}"]'))
    options = arrays.get("options", DEFAULT_OPTIONS).resolved(counted=True)
    return from_arrays(**(found | arrays | {"options": options}))


def _number_of_nodes(item: Mapping[str, Any]) -> int | None:
    """Return an item's count of vertices, a number or an array of one. Raises: GraphError for anything else."""
    counts = as_array([] if item.get("num_nodes") is None else to_numpy(item["num_nodes"]), "num_nodes").reshape(-1)
    if counts.size > 1 or (counts.size and (counts.dtype.kind not in "iuf" or counts[0] != np.rint(counts[0]))):
        raise GraphError(f'graph["num_nodes"] must be one whole number, got {counts.dtype} of shape {counts.shape}')
    return int(counts[0]) if counts.size else None


def _is_networkx(source: Any) -> bool:
    return all(callable(getattr(source, name, None)) for name in ("is_directed", "is_multigraph", "edges", "nodes"))


def _is_data_set(source: Any) -> bool:
    """Tell whether this is a data set of PyG, DGL or OGB: graphs by number, which it makes itself."""
    methods = ("__len__", "__getitem__")
    made = any(callable(getattr(source, name, None)) for name in ("get_idx_split", "process", "download"))
    return made and all(callable(getattr(source, name, None)) for name in methods)


def _from_data_set(source: Any, arrays: dict[str, Any]) -> Graph:
    """Make a graph of a data set of one, with the split and the score that OGB's data sets name."""
    if len(source) != 1:
        raise GraphError(
            f"{type(source).__name__} holds {len(source)} graphs: mggcn.load(dataset[0]) takes one of them, "
            "mggcn.load(list(dataset)) all of them as one graph without edges between them"
        )
    found: dict[str, Any] = {}
    if isinstance(name := getattr(source, "name", None), str):
        found["name"] = name
    if callable(getattr(source, "get_idx_split", None)):
        found["splits"] = {part: to_numpy(ids) for part, ids in source.get_idx_split().items()}
    item = source[0]
    if is_item(item) and isinstance(item, tuple) and isinstance(root := getattr(source, "root", None), str):
        found |= class_names_of(Path(root), as_array(to_numpy(item[1]), "labels"))
    graph = from_object(item, **(found | arrays))
    metric = getattr(source, "eval_metric", None)
    return replace(graph, meta={**graph.meta, "metric": metric}) if isinstance(metric, str) else graph


def with_weights(found: dict[str, Any], arrays: Mapping[str, Any], beside: Beside) -> dict[str, Any]:
    """Return the arguments of a graph with the weights that its source holds, and the names of data that is not read.

    arrays: those that the caller gives; weights among them are taken, and None means that there are none.
    """
    adj = found.get("adj")
    known = found.get("weights") is not None or (len(adj) > 2 if isinstance(adj, tuple) else adj is not None)
    count, num_vertices = _extents(found, arrays)
    weights, unread = beside.weights(count, num_vertices, chosen=known or "weights" in arrays)
    return with_notes(found if weights is None else found | {"weights": weights}, unread=unread)


def _extents(found: Mapping[str, Any], arrays: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of edges and, if it is known without reading many edges, of vertices; else -1."""
    edges, adj = found.get("edges"), found.get("adj")
    if edges is None:
        return (np.size(adj[1]), np.size(adj[0]) - 1) if isinstance(adj, tuple) else (-1, -1)
    count = edges.count if isinstance(edges, Edges) else edges.shape[-1] if np.ndim(edges) else 0
    told = [held["num_vertices"] for held in (arrays, found) if held.get("num_vertices") is not None]
    rows: list[tuple[int, ...]] = [
        getattr(held.get(name), "shape", ()) for held in (arrays, found) for name in ("features", "labels")
    ]
    told += [shape[0] for shape in rows if len(shape)]
    if not told and isinstance(edges, np.ndarray) and edges.dtype.kind in "iu" and edges.size:
        told = [int(edges.max()) + 1]
    return count, told[0] if told else -1


def with_notes(found: dict[str, Any], **lists: list[str]) -> dict[str, Any]:
    """Return the arguments of a graph with lines that `describe` gives: unread, names of data, and notes."""
    meta = dict(found.get("meta", {}))
    told = dict(meta.get("input", {}))
    told |= {name: [*told.get(name, []), *lines] for name, lines in lists.items() if lines}
    return found | {"meta": meta | ({"input": told} if told else {})}


def _mask(mask: Any, num_vertices: int) -> Any:
    """Return a mask as bool also where it holds 0 and 1, as old versions of the libraries write it."""
    array = as_array(to_numpy(mask), "mask")
    numbers = array.dtype.kind in "iuf" and array.shape[:1] == (num_vertices,)
    return array.astype(np.bool_) if numbers and bool(np.isin(array, (0, 1)).all()) else array


def _pyg_edges(data: Any) -> tuple[Any, Any]:
    """Return edges [2, E], and weights [E] of adj_t or None; adj_t is what the ToSparseTensor transform leaves."""
    if getattr(data, "edge_index", None) is not None:
        return to_numpy(data.edge_index), None
    adj_t: Any = getattr(data, "adj_t", None)
    matrix = to_numpy(adj_t)
    if is_sparse(matrix):
        coo = sp.coo_array(matrix)
        return np.stack([coo.col, coo.row]), coo.data
    if not hasattr(adj_t, "coo"):
        raise GraphError("the Data has no edges: expected edge_index [2, E], or adj_t of the ToSparseTensor transform")
    row, col, value = adj_t.coo()
    return np.stack([to_numpy(col), to_numpy(row)]), to_numpy(value)


def _refuse_repeated_loops(edges: Any) -> None:
    """Refuse self-loops that are listed twice, in edges that nobody has checked yet."""
    if np.shape(edges)[:1] != (2,):
        return
    loops, counts = np.unique(edges[0][edges[0] == edges[1]], return_counts=True)
    if (counts > 1).any():
        raise GraphError(
            f"the self-loop of vertex {loops[counts > 1][0]} repeats: PyG's GCNConv makes one of them, with "
            "add_self_loops=False it counts each; leave one of them in the data (PyG takes the last, with its weight), or "
            'count each with options=GraphOptions(duplicates="sum")'
        )
