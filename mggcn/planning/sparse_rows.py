"""Whether batches have sparse rows of X, and the memory of these; and whether X may be read where it is stored. Needs no
torch.
"""

from __future__ import annotations

import dataclasses
import math

from mggcn.blocks.block import Stack
from mggcn.blocks.capacities import SPARE
from mggcn.blocks.sparse_rows import SparseRowsPlan
from mggcn.config import Config
from mggcn.memory.device import DEVICES, STORAGE, scale_dtype
from mggcn.model.network import Values
from mggcn.planning.shape import GraphShape


def sparse_rows(config: Config, shape: GraphShape, stack: Stack, values: Values) -> SparseRowsPlan | None:
    """Return what the memory of a batch's sparse features depends on; None where its rows of X are dense."""
    if not values.sparse_sets:
        return None
    inputs = stack.blocks[0].sources
    sizes = zip(stack.rows.items(), stack.nonzeros, strict=True)
    return SparseRowsPlan(
        sizes=tuple((name, rows, most) for (name, rows), most in sizes if name == inputs or name in values.sparse_sets),
        cols=shape.num_features,
        real=scale_dtype(config.run.precision),
        dropped=config.model.input_dropout > 0,
        scaled=values.input_scaled,
    )


def most_sparse_rows(config: Config, shape: GraphShape, stack: Stack) -> SparseRowsPlan | None:
    """Return the most that sparse features of a batch take, of every row set; None where rows of X are or are set dense."""
    if dense_rows(config, stack) or config.run.features == "dense":
        return None
    sizes = zip(stack.rows.items(), stack.nonzeros, strict=True)
    return SparseRowsPlan(
        sizes=tuple((name, rows, most) for (name, rows), most in sizes),
        cols=shape.num_features,
        real=scale_dtype(config.run.precision),
        dropped=config.model.input_dropout > 0,
        scaled=False,
    )


def rows_stay_dense(config: Config) -> str:
    """Say why batches have dense rows of X, also of a sparse one; "" if they may be sparse."""
    if not DEVICES[config.run.device].is_host:
        return "on a GPU a batch is filled up to one size"
    if config.shares_batches:
        return "ranks share a batch"
    if config.reads_history:
        return "rows of other ranks come from a cache"
    if config.fetches_rows:
        return "rows come from their owners"
    if config.data.learned:
        return "they are learned"
    return "the first layer reads A X" if config.sample.first == "full" else ""


def is_stored(config: Config, shape: GraphShape) -> bool:
    """Return whether the features are stored as activations are, as dense rows of float32 in one file or array."""
    in_place = shape.feature_nnz is None if shape.in_place is None else shape.in_place
    return in_place and STORAGE[config.run.precision] == "fp32" and not config.data.row_normalize


def may_read_stored(config: Config, shape: GraphShape) -> bool:
    """Return whether a step may read X where it is stored, instead of rows that its feed gathers.

    What the model must be like says `read_stored` of model/rewrite/storage.py.
    """
    return bool(config.sample.batch) and not rows_stay_dense(config) and is_stored(config, shape)


def dense_rows(config: Config, stack: Stack) -> str:
    """Say why the batches of a stack have dense rows of X, also of a sparse one; "" if they may be sparse."""
    return rows_stay_dense(config) or ("" if stack.nonzeros else "they are stored so")


def expected_nonzeros(shape: GraphShape, stack: Stack) -> Stack:
    """Return the stack with the nonzeros of sparse features that so many rows have on average, and a share more."""
    if shape.feature_nnz is None:
        return stack
    length = (1 + SPARE) * shape.feature_nnz / max(shape.num_vertices, 1)
    most = (min(shape.feature_nnz, math.ceil(rows * min(length, shape.num_features))) for rows in stack.rows.values())
    return dataclasses.replace(stack, nonzeros=tuple(most))
