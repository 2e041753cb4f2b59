"""Write a graph in the forms of others: edge lists, SciPy's .npz, PyG's `Data`, Parquet. Vertices are their row numbers.

Shapes: N vertices, D features, E edges.
"""

from __future__ import annotations

import contextlib
import gzip
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import scipy.sparse as sp

from mggcn.errors import ConfigError, StoreError
from mggcn.files import new_file, reason
from mggcn.graph.csr import CSR, Array, Graph, Rows, windows

SEPARATORS = {".txt": " ", ".edges": " ", ".tsv": "\t", ".csv": ","}
ROWS = 1 << 16
"""Vertices of a group of rows in Parquet."""


def export(graph: Graph, target: Path, overwrite: bool = False) -> list[Path]:
    """Write a graph in the form of the target's suffix; return the files.

    .txt .edges .tsv .csv, also .gz: a line for each edge, source, target and, where there are any, weight and type;
    .csv has a header. .npz: the adjacency for scipy.sparse.load_npz. .pt: PyG's `Data` with all arrays. .parquet: the
    edges, and beside them NAME.vertices.parquet with what vertices have. Links that are scored are in .pt alone: for each
    part, as in `val_edge_label_index` (2, M) and `val_negatives` (M, K), destinations.
    Cost: one pass over all that is written, in bounded memory; .npz and .pt hold it in memory.
    Raises: ConfigError for another suffix, or a package that is missing; StoreError if a file exists or cannot be written.
    """
    suffix = target.with_suffix("").suffix if target.suffix == ".gz" else target.suffix
    writers: dict[str, Callable[[Graph, BinaryIO, Path], None]] = {
        **dict.fromkeys(SEPARATORS, _write_text),
        **({} if target.suffix == ".gz" else {".npz": _write_npz, ".pt": _write_pyg, ".parquet": _write_edges}),
    }
    if suffix not in writers:
        raise ConfigError(f"cannot export to {target.name}: expected one of {', '.join(writers)}; text also as .gz")
    files = {target: writers[suffix]}
    if suffix == ".parquet" and (graph.features is not None or graph.labels is not None or graph.splits):
        files[target.with_name(f"{target.stem}.vertices.parquet")] = _write_vertices
    if existing := [path for path in files if path.exists() and not overwrite]:
        raise StoreError(f"{existing[0]} exists already; choose another name or pass --force")
    for path, write in files.items():
        try:
            with new_file(path) as file:
                write(graph, file, path)
        except OSError as error:
            raise StoreError(f"cannot write {path}: {reason(error)}; check the path and the disk") from error
    return list(files)


def _write_text(graph: Graph, file: BinaryIO, path: Path) -> None:
    separator = SEPARATORS[path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix]
    columns = ["source", "target"]
    columns += ["weight"] if graph.adj.values is not None else []
    columns += ["type"] if graph.adj.types is not None else []
    # A third column is a weight unless a header says otherwise.
    header = separator == "," or graph.adj.types is not None
    packed = gzip.GzipFile("", "wb", 6, file) if path.suffix == ".gz" else None
    lines = io.TextIOWrapper(packed or file, encoding="utf-8", newline="")
    if header:
        lines.write(separator.join(columns) + "\n")
    for parts in _edges(graph.adj):
        texts = [list(map(repr if part.dtype.kind == "f" else str, part.tolist())) for part in parts.values()]
        lines.writelines(f"{separator.join(line)}\n" for line in zip(*texts, strict=True))
    lines.detach()  # flushed; the file itself is its opener's to close
    if packed is not None:
        packed.close()


def _edges(adj: CSR) -> Iterator[dict[str, Array]]:
    """Windows of edges as columns: source, target, and weight and type where there are any."""
    for rows, cols, first, stop in windows(adj):
        found = {"source": rows, "target": cols}
        if adj.values is not None:
            found["weight"] = adj.values.read(first, stop)
        if adj.types is not None:
            found["type"] = adj.types.read(first, stop)
        yield found


def _write_npz(graph: Graph, file: BinaryIO, _: Path) -> None:
    adj = graph.adj
    values = np.ones(adj.nnz, np.float32) if adj.values is None else adj.values.array()
    arrays = (values, adj.indices.array(), adj.indptr.array())
    sp.save_npz(file, sp.csr_array(arrays, shape=(adj.num_rows, adj.num_cols)), compressed=False)


def _write_pyg(graph: Graph, file: BinaryIO, path: Path) -> None:
    try:
        import torch
        from torch_geometric.data import Data
    except ImportError as error:
        raise ConfigError(f'{path.suffix} needs PyG: pip install "mggcn[pyg]" ({error})') from error
    parts: dict[str, list[Array]] = {}
    for window in _edges(graph.adj):
        for name, column in window.items():
            parts.setdefault(name, []).append(column)
    columns = {name: torch.from_numpy(np.concatenate(found)) for name, found in parts.items()}
    if graph.repeats == "counted" and columns:
        counts = columns.pop("weight").long()
        columns = {name: column.repeat_interleave(counts) for name, column in columns.items()}
    none = torch.empty(0, dtype=torch.int64)
    data = Data(edge_index=torch.stack([columns.get("source", none), columns.get("target", none)]))
    data.num_nodes = graph.num_vertices
    if "weight" in columns:
        data.edge_weight = columns["weight"]
    if "type" in columns:
        data.edge_type = columns["type"].long()
    if isinstance(graph.features, CSR):
        data.x = torch.from_numpy(_densified(graph.features, 0, graph.num_vertices))
    elif graph.features is not None:
        data.x = torch.from_numpy(graph.features.read(0, graph.num_vertices))
    if graph.labels is not None:
        data.y = torch.from_numpy(graph.labels.read(0, graph.num_vertices))
    if graph.class_names:
        data.class_names = list(graph.class_names)
    for name, masks in graph.splits.items():
        found = masks.read(0, masks.shape[0])
        data[f"{name}_mask"] = torch.from_numpy(found[0] if len(found) == 1 else np.ascontiguousarray(found.T))
    for name, rows in graph.links.items():
        found = rows.read(0, rows.shape[0]).astype(np.int64)
        data[f"{name}_edge_label_index"] = torch.from_numpy(np.ascontiguousarray(found[:, :2].T))
        if name != "train":
            data[f"{name}_negatives"] = torch.from_numpy(np.ascontiguousarray(found[:, 2:]))
    torch.save(data, file)


def _densified(matrix: CSR, start: int, stop: int) -> Array:
    """Return rows [start, stop) of a sparse matrix as float32."""
    indptr = matrix.read_pointers(start, stop + 1)
    first, last = int(indptr[0]), int(indptr[-1])
    values = np.ones(last - first, np.float32) if matrix.values is None else matrix.values.read(first, last)
    arrays = (values, matrix.read_columns(first, last), indptr - first)
    dense: Array = sp.csr_array(arrays, shape=(stop - start, matrix.num_cols)).toarray()
    return dense


def _write_edges(graph: Graph, file: BinaryIO, _: Path) -> None:
    _write_tables(file, _edges(graph.adj))


def _write_vertices(graph: Graph, file: BinaryIO, _: Path) -> None:
    _write_tables(file, _vertices(graph))


def _vertices(graph: Graph) -> Iterator[dict[str, Array]]:
    """Groups of vertices as columns: vertex, id, label, a column for each split, features as lists."""
    for start in range(0, graph.num_vertices, ROWS):
        stop = min(start + ROWS, graph.num_vertices)
        found: dict[str, Array] = {"vertex": np.arange(start, stop)}
        if graph.ids is not None:
            found["id"] = graph.ids.read(start, stop)
        if graph.labels is not None:
            found["label"] = graph.labels.read(start, stop)
        for name, masks in graph.splits.items():
            found |= _split_columns(name, masks, start, stop)
        if isinstance(graph.features, CSR):
            found["features"] = _densified(graph.features, start, stop)
        elif graph.features is not None:
            found["features"] = graph.features.read(start, stop)
        yield found


def _split_columns(name: str, masks: Rows, start: int, stop: int) -> dict[str, Array]:
    count = masks.shape[0]
    return {
        name if count == 1 else f"{name}_{split}": masks.read(split, split + 1)[0, start:stop] for split in range(count)
    }


def _write_tables(file: BinaryIO, tables: Iterator[dict[str, Array]]) -> None:
    """Write one table after the other as groups of rows; a matrix becomes a column of lists of one length."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ConfigError(f'.parquet needs pyarrow: pip install "mggcn[parquet]" ({error})') from error

    def column(array: Array) -> Any:
        if array.ndim == 1:
            return pa.array(array)
        return pa.FixedSizeListArray.from_arrays(pa.array(array.reshape(-1)), array.shape[1])

    with contextlib.ExitStack() as stack:
        writer: Any = None
        for found in tables:
            table = pa.table({name: column(array) for name, array in found.items()})
            if writer is None:
                writer = stack.enter_context(pq.ParquetWriter(file, table.schema))
            writer.write_table(table)
        if writer is None:  # no edges
            none = np.empty(0, np.int64)
            pq.write_table(pa.table({"source": pa.array(none), "target": pa.array(none)}), file)
