"""The sparse product of a graph and a dense matrix: every variant of our kernel, cuSPARSE, torch and PyG.

Bytes are those of the algorithm: a column id and a row of the dense operand per nonzero, a pointer and a row of the
result per vertex. The edges have no weights; contenders that cannot do without have ones. All results are
checked against float64.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.gpu.graphs import find_store, structure
from bench.gpu.lab import Lab, attempt
from bench.peers.worker_pyg import with_loops
from mggcn.backend.base import Epilogue, Sparse
from mggcn.backend.cuda.cusparse import Algorithm, CusparseSpmm
from mggcn.backend.cuda.kernels import Kernels
from mggcn.backend.cuda.sizes import workspace_bytes
from mggcn.backend.cuda.spmm import OwnSpmm, make_schedule
from mggcn.backend.cuda.variants import Variant, choose, choose_slices

WIDTHS = (16, 41, 64, 128, 256, 512)
QUICK_WIDTHS = (41,)
LONG_ROWS = (128, 512)
"""What else than LONG_ROW, in nonzeros for the least unroll, a row must have to get a block of its own."""
LANES, PIECES, UNROLL = (4, 8, 16, 32), (1, 2, 3), (2, 4, 8)
MAX_TILES = 8
ALGORITHMS: dict[str, Algorithm] = {"cuSPARSE ALG2": "alg2", "cuSPARSE ALG3": "alg3"}
"""Its row-major ones, the second prepared before."""
SAMPLE = 48
"""Rows whose result is compared: the longest ones and some at random."""
Product = Callable[[Tensor, Tensor], object]
Contender = tuple[str, Callable[[], Product], dict[str, Any]]
"""Name, maker, facts for the report."""


@dataclasses.dataclass(frozen=True)
class Matrix:
    """The adjacency with self-loops: on the host, and on the device with what our kernels need."""

    indptr: np.ndarray[Any, np.dtype[np.int64]]
    own: Sparse

    @property
    def rows(self) -> int:
        return self.own.num_rows

    @property
    def lengths(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.diff(self.indptr)


def load(lab: Lab, store: Path) -> Matrix:
    """Read a store's structure, add self-loops on the device, make the schedule."""
    device = lab.device.torch_device
    with torch.device(device):
        indptr, indices = with_loops(*(torch.from_numpy(a).to(device) for a in structure(store)))
    host = indptr.cpu().numpy()
    schedule = make_schedule(host, lambda array: torch.from_numpy(array).to(device))
    return Matrix(host, Sparse(indptr, indices, None, schedule))


def measure(lab: Lab, case: str) -> None:
    """Write a row per width and contender."""
    measure_contenders(lab, case, compared)


def measure_variants(lab: Lab, case: str) -> None:
    """Write a row per width and other variant of our kernel."""
    measure_contenders(lab, case, variants)


def measure_contenders(lab: Lab, case: str, contenders: Callable[..., Iterator[Contender]]) -> None:
    settings = lab.settings
    matrix = load(lab, find_store(case, settings.scale, settings.cache, settings.data))
    lab.write(kind="graph", rows=matrix.rows, nnz=matrix.own.nnz, longest=int(matrix.lengths.max()))
    sample = sample_rows(matrix.lengths)
    widths = QUICK_WIDTHS if settings.quick else WIDTHS
    for width, dtype in itertools.product(widths, (torch.float32, torch.bfloat16)):
        trial = Trial(lab, matrix, width, dtype, sample)
        for name, make, more in contenders(lab, matrix, width, dtype):
            what = {"kind": "spmm", "width": width, "type": str(dtype)[6:], "contender": name, **more}
            attempt(lab, what, trial.one, make)


class Trial:
    """One width and type: operands that contenders share, and what their results must be; made for the first of them."""

    def __init__(self, lab: Lab, matrix: Matrix, width: int, dtype: torch.dtype, sample: Tensor) -> None:
        self._lab, self._matrix, self._width, self._dtype, self._sample = lab, matrix, width, dtype, sample

    @functools.cached_property
    def _operands(self) -> list[tuple[Tensor, Tensor]]:
        lab, rows, width, dtype = self._lab, self._matrix.rows, self._width, self._dtype
        count = 2 if lab.settings.quick else lab.copies(2 * rows * width * dtype.itemsize)
        return [(lab.random(rows, width, dtype), lab.random(rows, width, dtype)) for _ in range(count)]

    @functools.cached_property
    def _expected(self) -> Tensor:
        return reference(self._matrix, self._operands[0][0], self._sample)

    def one(self, make: Callable[[], Product]) -> dict[str, Any]:
        """Check one contender and time it. Raises: ValueError if it computes something else."""
        product, matrix = make(), self._matrix
        h, out = self._operands[0]
        out.zero_()
        returned = product(h, out)
        got = (returned if isinstance(returned, Tensor) else out)[self._sample.to(out.device)].double()
        del returned
        error = float(((got - self._expected).norm(dim=1) / self._expected.norm(dim=1).clamp_min(1e-9)).max())
        if not error < (2e-2 if h.dtype == torch.bfloat16 else 1e-4):
            raise ValueError(f"wrong by {error:.1e}")
        found = self._lab.time_calls([functools.partial(product, *pair) for pair in self._operands])
        width, nnz = h.shape[1], matrix.own.nnz
        nbytes = nnz * (4 + width * h.itemsize) + matrix.rows * (8 + width * h.itemsize)
        return {**found, "bytes": nbytes, "gb_per_s": nbytes / found["median"] / 1e9, "relative_error": error}


def sample_rows(lengths: np.ndarray[Any, Any]) -> Tensor:
    """The longest rows and some others."""
    longest = np.argsort(lengths)[-SAMPLE // 4 :]
    others = np.random.default_rng(90217).integers(lengths.size, size=SAMPLE)
    return torch.from_numpy(np.concatenate([longest, others]))


def reference(matrix: Matrix, h: Tensor, sample: Tensor) -> Tensor:
    """The sampled rows of the product in float64."""
    pairs = [(int(matrix.indptr[v]), int(matrix.indptr[v + 1])) for v in sample.tolist()]
    return torch.stack([h[matrix.own.indices[a:b].long()].double().sum(0) for a, b in pairs])


def compared(lab: Lab, matrix: Matrix, width: int, dtype: torch.dtype) -> Iterator[Contender]:
    """Our kernel as it chooses, and the others; nothing is made before it is asked for."""
    adj = matrix.own
    yield (
        "own",
        functools.partial(own_product, lab, matrix, width, dtype, None),
        dataclasses.asdict(chosen_variant(lab, matrix, width, dtype)),
    )
    for name, algorithm in () if lab.emulated else ALGORITHMS.items():
        yield name, functools.partial(cusparse_product, lab, adj, algorithm), {}
    if dtype == torch.float32:
        yield "own weighted", functools.partial(own_product, lab, matrix, width, dtype, None, weighted=True), {}
        yield "torch CSR", functools.partial(torch_product, adj), {}
        yield "PyG EdgeIndex", functools.partial(pyg_product, adj), {}


def variants(lab: Lab, matrix: Matrix, width: int, dtype: torch.dtype) -> Iterator[Contender]:
    """The ladder below the chosen variant, then all shapes: found, not predicted, what cuda/variants.py should choose."""
    chosen = chosen_variant(lab, matrix, width, dtype)
    ladder = [(f"own {kernel}", dataclasses.replace(chosen, kernel=kernel)) for kernel in ("simple", "groups")]
    others = [*ladder, *(("own shape", shape) for shape in shapes(width, dtype.itemsize))]
    for name, variant in others[: 3 if lab.settings.quick else None]:
        yield name, functools.partial(own_product, lab, matrix, width, dtype, variant), dataclasses.asdict(variant)
    for limit in () if lab.settings.quick else LONG_ROWS:
        make = functools.partial(with_long_rows, lab, matrix, limit, width, dtype)
        yield f"own, long rows over {limit}", make, dataclasses.asdict(chosen)


def with_long_rows(lab: Lab, matrix: Matrix, limit: int, width: int, dtype: torch.dtype) -> Product:
    """Our kernel as it chooses, where rows of more than `limit` nonzeros get blocks of their own."""
    device = lab.device.torch_device
    schedule = make_schedule(matrix.indptr, lambda array: torch.from_numpy(array).to(device), shortest=limit)
    own = dataclasses.replace(matrix.own, schedule=schedule)
    return own_product(lab, dataclasses.replace(matrix, own=own), width, dtype, None)


def chosen_variant(lab: Lab, matrix: Matrix, width: int, dtype: torch.dtype) -> Variant:
    sizes = (matrix.rows, matrix.own.nnz, matrix.rows, width, dtype.itemsize)
    return choose(width, dtype.itemsize, True, choose_slices(*sizes, lab.device.traits).panel)


def shapes(width: int, itemsize: int) -> list[Variant]:
    """Shapes that waste at most half of their lanes and need few tiles."""
    found = []
    for lanes, pieces, unroll in itertools.product(LANES, PIECES, UNROLL):
        variant = Variant("balanced", lanes, pieces, unroll, True)
        tile = variant.tile(itemsize)
        tiles = -(-width // tile)
        if unroll <= lanes and tiles <= MAX_TILES and (tile * tiles <= 2 * width or lanes * pieces == LANES[0]):
            found.append(variant)
    return found


def own_product(
    lab: Lab, matrix: Matrix, width: int, dtype: torch.dtype, variant: Variant | None, *, weighted: bool = False
) -> Product:
    """Our kernel in one variant, None: as it chooses."""
    device = lab.device.torch_device
    adj = matrix.own
    if weighted:
        adj = dataclasses.replace(adj, values=torch.ones(adj.nnz, device=device))
    workspace = torch.empty(workspace_bytes(adj.nnz, width, 4) // 4, device=device)
    spmm = OwnSpmm(Kernels(lab.device.compile, dtype), lab.device.traits, workspace)
    return lambda h, out: spmm.multiply(adj, h, out, accumulate=False, epilogue=None, variant=variant)


def cusparse_product(lab: Lab, adj: Sparse, algorithm: Algorithm) -> Product:
    def allocate(nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=lab.device.torch_device)

    def finish(z: Tensor, out: Tensor, epilogue: Epilogue) -> None:
        raise ValueError("products are timed without an epilogue")

    spmm = CusparseSpmm(lab.device.cusparse, allocate, finish, algorithm)
    return lambda h, out: spmm.multiply(adj, h, out, accumulate=False, epilogue=None)


def torch_product(adj: Sparse) -> Product:
    """torch.sparse CSR with ones; 32-bit row pointers, as cuSPARSE's faster path wants them."""
    ones = torch.ones(adj.nnz, device=adj.indices.device)
    csr = (adj.indptr.int(), adj.indices, ones, (adj.num_rows, adj.num_rows))
    matrix = torch.sparse_csr_tensor(*csr, check_invariants=False)
    return lambda h, out: torch.mm(matrix, h, out=out)


def pyg_product(adj: Sparse) -> Product:
    """EdgeIndex.matmul of the transposed edges, as PyG's convolutions aggregate; a new result at each call."""
    from torch_geometric import EdgeIndex

    n = adj.num_rows
    rows = torch.repeat_interleave(torch.arange(n, dtype=torch.int32, device=adj.indices.device), adj.indptr.diff())
    edges: Any = EdgeIndex(torch.stack([adj.indices, rows]), sparse_size=(n, n), sort_order="col")
    edges.fill_cache_()
    return lambda h, out: edges.matmul(h, transpose=True)
