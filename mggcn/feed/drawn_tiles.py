"""Tiles of drawn in-edges, a layer and some vertices at a time, for scores that are sampled (train.evaluate sampled).

T vertices of a tile, E edges. Source: BatchGNN evaluates over drawn in-neighbours, 20 in each layer.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mggcn.blocks.drawn_rows import RowDraws
from mggcn.blocks.sampler import DrawnHop, Sampler
from mggcn.blocks.slot import SlotPlan
from mggcn.feed.edge_values import EdgeValues
from mggcn.partition.rows.tiles import Tile

STEP: Final = 2**32 - 1
"""The step by which these draws are named, which no training reaches: every evaluation of a run has the same draws."""


class DrawnTiles:
    """Draws in-edges of vertices by layer. Memory: `row_slots`, and a tile with what it is put together from."""

    def __init__(self, sampler: Sampler, slots: SlotPlan, values: EdgeValues) -> None:
        self._rows, self._values = RowDraws(sampler, slots), values
        self._layers = len(sampler.draws.fanouts)

    def tile(self, seed: int, layer: int, span: range, required: npt.NDArray[np.bool_] | None) -> Tile:
        """Return drawn in-edges of a span's vertices in a layer, from 1, that of the input; columns are vertices.

        required (N,): the vertices around which is drawn; None: all. Draws are named by seed, layer and vertex, so that
        they are the same on any number of ranks. Raises: as Sampler.draw_rows.
        """
        ids = np.arange(span.start, span.stop)
        ids = ids if required is None else ids[required[span.start : span.stop]]
        lengths, columns, counted, kinds = np.zeros(len(span), np.int64), list[Any](), list[Any](), list[Any]()
        for some, drawn in self._rows.pieces(self._layers - layer, ids, seed, STEP, None):
            lengths[some - span.start] = np.diff(drawn.indptr)
            columns.append(drawn.indices.copy())
            values, types = self._counted(some, drawn)
            counted.append(values)
            kinds.append(types)
        needed, typed = self._values.needed, self._values.relations is not None
        return Tile(
            np.append(0, np.cumsum(lengths)),
            np.concatenate(columns),
            np.concatenate(counted) if needed else None,
            np.concatenate(kinds) if typed else None,
        )

    def _counted(self, ids: npt.NDArray[np.int64], drawn: DrawnHop) -> tuple[Any, Any]:
        """Return what the edges (E,) of some vertices count, and their types; None of each that nobody reads."""
        if not self._values.needed:
            return None, None
        # A vertex's own entry is known by its number: a target's is its place.
        targets = np.repeat(np.arange(ids.size, dtype=np.int32), np.diff(drawn.indptr))
        numbered = np.where(drawn.indices == ids[targets], targets, np.int32(-1))
        drawn = dataclasses.replace(drawn, indices=numbered)
        values = np.empty(numbered.size, self._values.real)
        self._values.write(ids, drawn, values)
        if (means := self._values.relations) is None:
            return values, None
        types = np.empty(values.size, means.dtype)
        means.write(ids, drawn, values, types, np.zeros(means.num_relations))
        return values, types
