"""Cuts the types of edges into tiles by the same function that cuts their weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from mggcn.graph.csr import CSR
from mggcn.graph.vertex_data import MappedRows
from mggcn.partition.rows.tiles import Tile


def typed_tiles(cut: Callable[[CSR], tuple[Tile, ...]], matrix: CSR) -> tuple[Tile, ...]:
    """Return `cut(matrix)`, with the types of the entries and values that average over the neighbours of a relation if it
    has types: the weight of an edge over `type_degrees`.

    Cost: with types two cuts more, one value of an edge at a time beside the tiles.
    Source: Schlichtkrull et al. 2018, eq. 2, with c_{i,r} the number of neighbours, or the sum of their weights.
    """
    plain = matrix.untyped()
    tiles = cut(plain)
    if matrix.types is None:
        return tiles
    as_weights = MappedRows(matrix.types, lambda types: types.astype(np.float32))  # every uint16 is exact
    types = [_values(tile).astype(matrix.types.dtype) for tile in cut(replace(plain, values=as_weights))]
    degrees = [_values(tile) for tile in cut(replace(plain, values=matrix.type_degrees))]
    return tuple(
        replace(tile, types=of, values=_means(1.0 if tile.values is None else tile.values, degree))
        for tile, of, degree in zip(tiles, types, degrees, strict=True)
    )


def _values(tile: Tile) -> npt.NDArray[np.floating]:
    return tile.values if tile.values is not None else np.ones(tile.nnz)


def _means(weights: npt.NDArray[np.floating] | float, degrees: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
    """Weights of a mean; 0 where those of a relation add up to 0."""
    means = np.zeros_like(degrees)
    np.divide(weights, degrees, out=means, where=degrees != 0)
    return means
