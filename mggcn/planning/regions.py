"""Bytes of one rank by purpose: features, graph, vertex data, weights, kernels, the process itself; and of set-up.

N vertices, V rows of this rank. Needs no torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from mggcn import native
from mggcn.aggregate.base import Matrix
from mggcn.aggregate.relations import BLOCK_ROWS
from mggcn.backend.cpu import sizes as cpu_sizes
from mggcn.backend.cpu.figures import Figures
from mggcn.backend.cpu.machine import dense_kernels
from mggcn.backend.cpu.variants import GemmVariant, gemm_variant
from mggcn.backend.cuda.dense_blocks import dense_bytes
from mggcn.backend.cuda.sizes import cusparse_bytes, even_schedule_bytes, schedule_bytes, workspace_bytes
from mggcn.config import Config
from mggcn.errors import BackendError
from mggcn.memory.arena import ALIGNMENT, ITEM_BYTES, BufferSpec, operand_nbytes
from mggcn.memory.device import DEVICES, REAL, STORAGE, runtime_bytes, threads_of
from mggcn.memory.units import MIB
from mggcn.model.choices import InputChoice, InputShape, sparse_bytes
from mggcn.model.kinds.aggregate import Aggregate
from mggcn.model.network import Values
from mggcn.model.values import Value
from mggcn.partition.locality.clusters import locality_nbytes
from mggcn.planning.batches import pads_batches
from mggcn.planning.shape import GraphShape
from mggcn.planning.task import COUNTED

CHUNK_BYTES = 24 * MIB
"""Bytes that set-up reads and converts at a time from a large graph (partition/sweep.py, feed/features.py)."""
OPTIMIZER_STATES = {"adam": 2, "adamw": 2, "sgd": 1}
COMPARED = 1 << 16
"""Entries of two gradients that are compared at a time, in float64."""


@dataclass(frozen=True, slots=True)
class RelationBlocks:
    """Upper bounds on the rows and matrices of the relations of a tile (aggregate/relations.py).

    grouped: whether small relations may share launches.
    """

    rows: int
    blocks: int
    grouped: bool

    @property
    def index_bytes(self) -> int:
        """Bytes beside the entries: row pointers, the number of each row, and of groups the next place of each row, and
        what rows a relation has.
        """
        return (16 if self.grouped else 12) * self.rows + (20 if self.grouped else 8) * self.blocks

    def matrices(self, tile: Matrix, count: int) -> list[tuple[int, int, bool, int]]:
        """Matrices in the form of RankSizes._matrices: the averages, and, not counted, the largest size of one."""
        rows = min(self.rows, BLOCK_ROWS)
        return [(rows, -(-tile.nnz // max(self.blocks, 1)), True, count * self.blocks), (rows, tile.nnz, True, 0)]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSizes:
    """The sizes that determine a rank's bytes.

    rows: V; input: how this rank's is kept.
    forward, backward: the number of matrices of every size for A^T, and for A if those differ.
    drawn: those among them that each step draws, which on the host, and on a GPU where batches are filled up, lie in the
    memory of its batch.
    gathered: rows and nonzeros of matrices of sparse features that a batch brings, in the memory of the batch, too.
    pairs: of a step that predicts links, whose matrix is made anew in every step, on a GPU in place.
    index_bytes: lists of rows that are sent and received; assignment_bytes: of each vertex of the graph, in set-up.
    """

    config: Config
    shape: GraphShape
    values: Values
    rows: int
    input: InputChoice
    inputs: InputShape
    forward: Mapping[Matrix, int]
    backward: Mapping[Matrix, int]
    drawn: Mapping[Matrix, int]
    pairs: Matrix | None
    index_bytes: int
    assignment_bytes: int
    figures: Figures
    gathered: tuple[tuple[int, int], ...] = ()
    panel: int = 0
    """Columns that ops by columns have in memory at a time, where values lie on disk; 0: all."""

    @property
    def item(self) -> int:
        """Bytes of a sum, scale, edge value or weight."""
        return ITEM_BYTES[REAL[self.config.run.precision]]

    @property
    def weight_bytes(self) -> int:
        """One copy of all weights, every matrix and vector aligned."""
        return sum(_padded(math.prod(p.shape) * self.item) for p in self.values.parameters.values())

    @property
    def gradient_bytes(self) -> int:
        """The same as weight_bytes for trained parameters only."""
        trained = (p for p in self.values.parameters.values() if p.trained)
        return sum(_padded(math.prod(p.shape) * self.item) for p in trained)

    @property
    def operand_bytes(self) -> int:
        """Copies of the matrices in the type of activations, where that differs from the weights'."""
        stored = ITEM_BYTES[STORAGE[self.config.run.precision]]
        matrices = (p.shape for p in self.values.parameters.values() if len(p.shape) == 2)
        return sum(operand_nbytes(d_in, d_out, stored) for d_in, d_out in matrices) if stored != self.item else 0

    @property
    def compared_bytes(self) -> int:
        """Bytes to compare gradients in: the exact one, the statistics of norms, and a piece of both gradients."""
        return self.weight_bytes + 2 * 8 * min(COMPARED, self.gradient_bytes // self.item)

    def regions(self, panel: int) -> dict[str, int]:
        """Return bytes by purpose, without the arena; panel: columns that set-up aggregates at a time, 0 for none."""
        stats, rows = DEVICES[self.config.run.device], self.rows
        graph = self.config.model.aggregates
        labels = (
            4 if self.shape.task == "classes" else self.item * self.shape.num_classes * (self.shape.task != "links")
        )
        regions = {
            "features": self.input.nbytes,
            "graph": self._graph_bytes() if graph else 0,
            "vertex data": rows * (8 + labels + 1 + (self.item if graph else 0))
            + _metric_bytes(self.config, self.shape),
            "weights and optimiser": self._all_weight_bytes(),
            "runtime": runtime_bytes(self.config.run.device),
        }
        if stats.rank_bytes:  # apart from the rest of the runtime: torch's allocator holds it
            regions["cuBLAS work space"] = stats.rank_bytes
        if stats.is_host:
            regions["copies for a checkpoint"] = self._saved_bytes()
        return regions | (self._host_kernel_regions(panel) if stats.is_host else self._kernel_regions(panel))

    def setup_bytes(self, regions: Mapping[str, int]) -> int:
        """Peak of set-up: the assignment of all vertices (20 bytes each while drawn, some 70 for an order by locality), the
        shard, chunks of files.

        On a device with memory of its own: the data already copied to it.
        """
        run, num_vertices = self.config.run, self.shape.num_vertices
        shard = regions["features"] + regions["graph"] + regions["vertex data"]
        if not DEVICES[run.device].is_host:
            return shard + sum(regions.get(name, 0) for name in ("runtime", "cuBLAS work space", "NCCL"))
        sorting = 16 * (self.inputs.nnz or 0) if self.input.sparse else 0
        if self.input.sparse and self.input.aggregated:
            sorting += 16 * (self.shape.feature_nnz or 0) + 32 * self.inputs.aggregated_nnz
        if self.values.typed:  # a tile's entries are put in order of their relations
            sorting += 25 * max((m.nnz for m in (*self.forward, *self.backward)), default=0)
        drawn = run.order != "none" and (run.ranks > 1 or run.order == "permute")
        drawing = (8 * 5 if run.order == "ranges" else 20) * num_vertices * drawn
        if run.order == "locality":
            drawing = sum(locality_nbytes(num_vertices, self.shape.num_edges, self.shape.symmetric).values())
        return regions["runtime"] + max(
            drawing, self.assignment_bytes * num_vertices + shard + sorting + min(CHUNK_BYTES, shard)
        )

    def _all_weight_bytes(self) -> int:
        """Weights, gradients, best weights, optimiser states; and `operand_bytes`."""
        return self.weight_bytes * (3 + OPTIMIZER_STATES[self.config.train.optimizer]) + self.operand_bytes

    def _saved_bytes(self) -> int:
        """Weights, the best ones and states of the optimiser, which a checkpoint copies before it writes them."""
        train = self.config.train
        return self.weight_bytes * (1 + bool(train.eval_every) + OPTIMIZER_STATES[train.optimizer])

    @property
    def entry_bytes(self) -> int:
        """Bytes of the entries of the matrices, which may be in mapped files: 0 where relations put them in order."""
        if self.values.typed:
            return 0
        matrices = (Counter(self.forward) + Counter(self.backward)).items()
        return sum(count * m.nnz for m, count in matrices) * (4 + (self.item if self.shape.weighted else 0))

    def _graph_bytes(self) -> int:
        """Bytes of the matrices: 64-bit row pointers, 32-bit columns, values if edges have weights; and of the lists."""
        weighted, typed = self.shape.weighted or self.values.typed, self.values.typed
        # On a device, entries of a batch by relation are counted as matrices of their own.
        host = DEVICES[self.config.run.device].is_host
        entry, drawn = 4 + (self.item if weighted else 0), Counter({} if typed and not host else self.drawn)
        matrices = (Counter(self.forward) + Counter(self.backward) - drawn).items()
        total = self.index_bytes + sum(count * (m.nnz * entry + (m.rows + 1) * 8) for m, count in matrices)
        if not DEVICES[self.config.run.device].is_host and not pads_batches(self.config):
            total += sum(count * (m.nnz * (4 + self.item) + (m.rows + 1) * 8) for m, count in drawn.items())
        return total + (sum(count * self._by_relation(m).index_bytes for m, count in matrices) if typed else 0)

    def _by_relation(self, matrix: Matrix) -> RelationBlocks:
        """The matrices of a tile's relations: every row may have every relation, as far as there are entries."""
        rows = min(matrix.nnz, matrix.rows * self.shape.num_relations)
        grouped = not DEVICES[self.config.run.device].is_host
        return RelationBlocks(rows, self.shape.num_relations + rows // BLOCK_ROWS, grouped)

    def _matrices(self, left_out: Mapping[Matrix, int]) -> list[tuple[int, int, bool, int]]:
        """Rows, nonzeros, whether there are values, and how many such there are, of the sparse matrices.

        Tiles but for those left out, then sparse features both ways.
        """
        matrices = (Counter(self.forward) + Counter(self.backward) - Counter(left_out)).items()
        tiles = [(m.rows, m.nnz, self.shape.weighted, count) for m, count in matrices]
        if self.values.typed:
            tiles = [one for m, count in matrices for one in self._by_relation(m).matrices(m, count)]
        if self.pairs is not None and DEVICES[self.config.run.device].is_host:
            tiles.append((self.pairs.rows, self.pairs.nnz, True, 1))
        tiles += [(rows, nnz, True, 1) for rows, nnz in self.gathered]
        if not self.input.sparse:
            return tiles
        nnz = self.inputs.aggregated_nnz if self.input.aggregated else self.inputs.nnz or 0
        back = [(self.inputs.cols, nnz, True, 1)] if self.values.trains_whole else []
        return [*tiles, (self.rows, nnz, True, 1), *back]

    def _widest(self, panel: int) -> int:
        """Columns of the widest operand of a sparse product."""
        if self.panel:
            return max(self.panel, *(_operand_columns(v, self.panel) for v in self.values.training.values()))
        sparse = self.values.sparse_layers
        return max(
            panel,
            *(max(c.d_out, 0 if c.layer in sparse else c.d_in) for c in self.values.layers),
            *(
                max(v.cols, v.kind.op.columns(v.cols).operand)
                for v in self.values.training.values()
                if isinstance(v.kind, Aggregate)
            ),
        )

    def _compositions(self) -> list[tuple[int, int, int]]:
        """Relations, bases, and elements of a matrix, of each layer that composes the matrices of relations."""
        kinds = (value.kind for value in self.values.evaluation.values())
        shapes = self.values.parameters
        found = (kind.relations for kind in kinds if isinstance(kind, Aggregate) and kind.relations)
        return [(w.num_relations, w.num_bases, math.prod(shapes[w.bases].shape[1:])) for w in found]

    def _host_kernel_regions(self, panel: int) -> dict[str, int]:
        """What the CPU's kernels keep beside matrices; products share work space, since they follow each other."""
        matrices, width = self._matrices({}), self._widest(panel)
        stored, threads = ITEM_BYTES[STORAGE[self.config.run.precision]], threads_of(self.config.run)
        variants, tiles = _gemm_variants(), has_tiles()
        pairs = 0 if self.pairs is None else self.pairs.nnz
        columns = max(self.shape.num_vertices, self.inputs.cols, pairs)
        # Of batches whose edges name vertices any row of X may be packed.
        packed = columns if self.values.reads_stored else 0
        products = [
            cpu_sizes.spmm_bytes(rows, max(packed, min(columns, nnz)), nnz, width, stored, self.item, self.figures)
            for rows, nnz, *_ in matrices
        ]
        dense = [
            cpu_sizes.gemm_bytes(
                max(self.rows, pairs // 2), c.d_in, c.d_out, stored, self.item, threads, variant, tiles=tiles
            )
            for variant in variants
            for c in self.values.layers
            if c.layer not in self.values.sparse_layers
        ]
        dense += [
            cpu_sizes.gemm_bytes(*sizes, stored, self.item, threads, variant, tiles=tiles)
            for variant in variants
            for sizes in self._compositions()
        ]
        return {
            "kernel schedules": sum(count * cpu_sizes.schedule_bytes(rows, nnz) for rows, nnz, _, count in matrices),
            "kernel work space": max([*products, *dense], default=0),
        }

    def _kernel_regions(self, panel: int) -> dict[str, int]:
        """Bytes that a GPU's kernels keep beside its matrices; products share work space, since they follow each other."""
        # Those of batches that are filled up have no long rows in their schedules, and no hubs; nor have those of pairs.
        even = Counter(self.drawn if pads_batches(self.config) else {})
        matrices, width = self._matrices(even), self._widest(panel)
        even.update([] if self.pairs is None else [self.pairs])
        sparse = [workspace_bytes(nnz, width, self.item) for _, nnz, *_ in matrices]
        layers = [c for c in self.values.layers if c.layer not in self.values.sparse_layers]
        stored = ITEM_BYTES[STORAGE[self.config.run.precision]]
        dense = [dense_bytes(c.d_in, c.d_out, stored) for c in layers if stored < 8]
        schedules = sum(count * schedule_bytes(rows, nnz) for rows, nnz, _, count in matrices)
        regions = {
            "kernel schedules": schedules + sum(count * even_schedule_bytes(m.rows) for m, count in even.items()),
            "kernel work space": max([*sparse, *dense], default=0),
        }
        if self.config.run.spmm == "cusparse":
            regions["cuSPARSE, but for its work space"] = sum(
                count * cusparse_bytes(rows, nnz, weighted, self.item) for rows, nnz, weighted, count in matrices
            )
        return regions


def _operand_columns(value: Value, panel: int) -> int:
    """Return the columns of the operand of a sparse product that a value is, which may go by panels; 0 if it is none."""
    if not isinstance(value.kind, Aggregate):
        return 0
    most = max(value.cols, value.kind.op.columns(value.cols).operand)
    return min(panel, most) if value.kind.by_columns else most


def _gemm_variants() -> tuple[GemmVariant, ...]:
    """The candidate dense-product variants; without compiled kernels, all of them, so a plan takes the larger."""
    try:
        return (gemm_variant(native.dense_isa()),)
    except BackendError:
        return get_args(GemmVariant)


def has_tiles() -> bool:
    """Whether bfloat16 may be multiplied by AMX here."""
    try:
        return "amx" in dense_kernels()
    except BackendError:
        return False


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def input_bytes(config: Config, chosen: InputChoice, inputs: InputShape, *, transposed: bool = True) -> int:
    """Return the bytes of the chosen input on this rank. transposed: as for `sparse_bytes`."""
    if not chosen.sparse:
        return BufferSpec("", inputs.rows, inputs.cols, STORAGE[config.run.precision]).nbytes
    nnz = inputs.aggregated_nnz if chosen.aggregated else inputs.nnz or 0
    return sparse_bytes(inputs, nnz, config.run.precision, config.model.input_dropout > 0, transposed)


def score_bytes(config: Config, shape: GraphShape) -> int:
    """Return the bytes of all vertices' scores, if a metric needs them in one place; two classes take one column."""
    columns = 1 if shape.num_classes == 2 and shape.task == "classes" else shape.num_classes
    gathered = config.train.metric not in ("auto", *COUNTED) and shape.task != "links"
    return 8 * shape.num_vertices * columns if gathered else 0


def _metric_bytes(config: Config, shape: GraphShape) -> int:
    """The gathered scores, labels and mask, and the copies that ranking them takes (train/ranking.py)."""
    scores = score_bytes(config, shape)
    return (4 if shape.task == "classes" else 7) * scores + 64 * shape.num_vertices if scores else 0
