"""A_hat X of all vertices, which the first layer of sampled training reads under sample.first = full.

It lies in a temporary file of each machine that all of its ranks map: of M ranks each computes the rows of one M-th of the
vertices, from the store's edges and features, so that nothing but the file's name is sent, and no rank holds X. N
vertices, D features; E edges of a piece.
"""

from __future__ import annotations

import hashlib
import os
import platform
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mggcn.backend.cpu.backend import CpuBackend
from mggcn.config import Config
from mggcn.errors import PlanError
from mggcn.feed.features import VertexFeatures
from mggcn.feed.gather import GatheredRows
from mggcn.feed.norm_scales import NormScales
from mggcn.graph.csr import CSR, ArrayRows, Rows
from mggcn.memory.arena import BufferSpec
from mggcn.memory.device import REAL, scale_dtype, threads_of
from mggcn.memory.units import MIB, human
from mggcn.model.rewrite.first_sums import FirstSums
from mggcn.planning.batches import reads_weights
from mggcn.train.heartbeat import boot_id
from mggcn.train.runtime import DTYPES, RankRuntime

PIECE_BYTES = 4 * MIB
"""Bytes of the features of neighbours that are gathered and summed at a time: they stay in a cache of the last level."""
PATH_BYTES = 4096


def compute_first_sums(
    config: Config, x: VertexFeatures, norm: NormScales | None, of: FirstSums, runtime: RankRuntime
) -> Rows:
    """Compute S_r A^T S_c X once; return its rows (N, D), float32 or in runs of float64 that.

    x: of a graph that is mapped. norm: the scales, of which `of` says which are read. Collective. Cost: each edge gathers
    a row of X. Memory: some MiB, and the file. Raises: PlanError if there is no room for the file.
    """
    graph, comm = x.graph, runtime.comm
    firsts = _first_ranks(runtime)
    rows = _shared_file((graph.num_vertices, x.num_features), scale_dtype(config.run.precision), runtime, firsts)
    weights = graph.adj_t.values if reads_weights(config, graph.adj_t.values is not None, graph.repeats) else None
    sums = _Sums(config, x, norm, of, None if weights is None else weights.array())
    mates = [rank for rank in range(comm.size) if firsts[rank] == firsts[comm.rank]]
    place = mates.index(comm.rank)
    first, last = (graph.num_vertices * number // len(mates) for number in (place, place + 1))
    for start in range(first, last, sums.piece):
        sums.add(start, min(start + sums.piece, last), rows)
    comm.barrier()
    return ArrayRows(rows)


def _first_ranks(runtime: RankRuntime) -> list[int]:
    """Return, for each rank, the first one on its machine. Collective."""
    comm, name = runtime.comm, f"{platform.node()} {boot_id()}"
    found = runtime.backend.allocate(8 * comm.size).view(torch.float64)
    found[comm.rank] = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6])  # as many as float64 holds
    runtime.sum_over_ranks(found)
    machines = found.tolist()
    return [machines.index(machine) for machine in machines]


def _shared_file(
    shape: tuple[int, int], dtype: npt.DTypeLike, runtime: RankRuntime, firsts: Sequence[int]
) -> npt.NDArray[Any]:
    """Return zeros in a temporary file that every rank of a machine maps, and that has no name once all do. Collective.

    firsts: the ranks that make the files, by rank. Raises: PlanError if one cannot, or another rank cannot open it.
    """
    comm, nbytes = runtime.comm, int(np.prod(shape)) * np.dtype(dtype).itemsize
    mine = firsts[comm.rank]
    made = _made_file(nbytes) if comm.rank == mine else b""
    try:
        paths = {first: _told(made if comm.rank == first else b"", runtime) for first in sorted(set(firsts))}
        path = os.fsdecode(paths[mine])
        try:
            rows: npt.NDArray[Any] = np.memmap(path, dtype, "r+", shape=shape)
        except OSError as error:
            raise PlanError(
                f"rank {comm.rank} cannot open {path}, where rank {mine} keeps A X ({error.strerror}); sample.first full "
                "needs one TMPDIR for all ranks of a machine: set it, or choose drawn"
            ) from error
        comm.barrier()
        return rows
    finally:  # also where a rank fails or a signal comes
        if made:
            Path(os.fsdecode(made)).unlink()


def _told(path: bytes, runtime: RankRuntime) -> bytes:
    """Return the path that one rank gives; the others give none. Collective."""
    name = runtime.backend.allocate(8 * PATH_BYTES).view(torch.float64)
    name[: len(path)] = torch.from_numpy(np.array([*path], np.float64)).to(name.device)
    runtime.sum_over_ranks(name)
    return bytes(int(byte) for byte in name.tolist() if byte)


def _made_file(nbytes: int) -> bytes:
    """Return the path of a new temporary file of zeros."""
    # Where TMPDIR cannot be written, Python takes another folder in silence, maybe one in memory.
    folder = os.environ.get("TMPDIR")
    try:
        folder = folder or tempfile.gettempdir()
        # measured_peak_bytes leaves out what is mapped from .npy files.
        file, path = tempfile.mkstemp(prefix="mggcn-sums-", suffix=".npy", dir=folder)
        try:
            os.posix_fallocate(file, 0, max(nbytes, 1))
        except BaseException:
            Path(path).unlink()
            raise
        finally:
            os.close(file)
    except OSError as error:
        raise PlanError(
            f"sample.first full needs {human(nbytes)} in {folder or 'a temporary folder'} for A X ({error.strerror}); set "
            "TMPDIR to a folder with more room, or sample.first = drawn"
        ) from error
    return os.fsencode(path)


class _Sums:
    """Adds up rows of A_hat X, some rows and a piece of their edges at a time. piece: edges, and rows."""

    def __init__(
        self, config: Config, x: VertexFeatures, norm: NormScales | None, of: FirstSums, weights: Any | None
    ) -> None:
        real = REAL[config.run.precision]
        self._norm, self._of, self._weights = norm, of, weights
        self._loops, self._adj_t = config.model.self_loops, x.graph.adj_t
        self.piece: int = max(PIECE_BYTES // (8 * max(x.num_features, 1)), 1)
        spec = BufferSpec("", self.piece, x.num_features, real)
        self._x = GatheredRows(x, spec, DTYPES[real])
        self._backend = CpuBackend(DTYPES[real], threads_of(config.run))

    def add(self, start: int, stop: int, rows: npt.NDArray[Any]) -> None:
        """Add what rows start .. stop - 1 sum to `rows`, which are zero."""
        indices, lacking = self._adj_t.indices.array(), np.ones(stop - start, bool)
        for first, indptr, begin, end in _pieces(self._adj_t, start, stop, self.piece):
            ids = indices[begin:end].astype(np.int64)
            targets = np.repeat(np.arange(first, first + indptr.size - 1), np.diff(indptr))
            lacking[targets[targets == ids] - start] = False
            values = np.ones(ids.size) if self._weights is None else self._weights[begin:end].astype(np.float64)
            self._add(rows, np.arange(first, first + indptr.size - 1), indptr, ids, values)
        if self._loops:
            alone = start + np.flatnonzero(lacking)
            self._add(rows, alone, np.arange(alone.size + 1), alone, np.ones(alone.size))

    def _add(self, rows: Any, targets: Any, indptr: Any, ids: Any, values: Any) -> None:
        """Add the sums over some entries to the rows of their targets."""
        if not ids.size:
            return
        row, col = (None, None) if self._norm is None else self._norm.of(np.append(targets, ids).astype(np.int64))
        if col is not None and self._of.col:
            values = values * col[targets.size :]
        x = self._x.gather(ids)
        out = torch.empty((targets.size, x.shape[1]), dtype=x.dtype)
        places = np.arange(ids.size, dtype=np.int32)
        matrix = self._backend.sparse(indptr.astype(np.int64), places, values.astype(rows.dtype))
        self._backend.spmm(matrix, x, out, accumulate=False, epilogue=None)
        found = out.numpy()
        rows[targets] += found * row[: targets.size, None] if row is not None and self._of.row else found


def _pieces(adj_t: CSR, start: int, stop: int, most: int) -> Iterator[tuple[int, npt.NDArray[np.int64], int, int]]:
    """Yield the first of some rows, their row pointers from 0, and which edges of the matrix they are, at most `most`.

    A row may come in several pieces. Raises: GraphError for damaged row pointers.
    """
    pointers = adj_t.read_pointers(start, stop + 1)
    for begin in range(int(pointers[0]), int(pointers[-1]), most):
        end = min(begin + most, int(pointers[-1]))
        low = int(np.searchsorted(pointers, begin, side="right")) - 1
        high = int(np.searchsorted(pointers, end, side="left"))
        yield start + low, np.clip(pointers[low : high + 1], begin, end) - begin, begin, end
