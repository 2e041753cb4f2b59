"""Records of edges, dealt to buckets by row: each bucket is later sorted alone, within a fixed memory.

A record is a key, row * N + column, and what belongs to it. N vertices, K buckets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from mggcn.graph.build.staging import Column, Staging
from mggcn.graph.csr import Array

GROUPS = 1 << 20
"""Most groups of rows by which records are counted before they are dealt."""
Records = dict[str, Array]


def group_shift(num_rows: int) -> int:
    """Return s for groups of 2^s rows, at most GROUPS of them."""
    return max(0, (num_rows - 1).bit_length() - (GROUPS - 1).bit_length())


def cut(counts: Array, shift: int, num_rows: int, capacity: int) -> tuple[Array, Array]:
    """Cut rows into buckets of at most `capacity` records, a single group of rows excepted.

    counts: records of each group of 2^shift rows. Returns: the rows at which buckets begin, and N, [K + 1]; the records of
    each [K]. Source: the bucket sort of external sorting (Knuth, volume 3, section 5.4.9, distribution sorting).
    """
    firsts, total = [0], 0
    for group, count in enumerate(counts.tolist()):
        if total and total + count > capacity:
            firsts.append(group)
            total = 0
        total += count
    sizes = np.add.reduceat(counts, firsts) if counts.size else np.zeros(1, np.int64)
    return np.array([*(first << shift for first in firsts), num_rows], np.int64), sizes


class Buckets:
    """K buckets of records, each a region of one column for every field; records keep their order within a bucket."""

    def __init__(
        self,
        staging: Staging,
        name: str,
        bounds: Array,
        sizes: Array,
        dtypes: Mapping[str, npt.DTypeLike],
        filled: list[int] | None = None,
    ) -> None:
        self.bounds = bounds
        self.starts: npt.NDArray[np.int64] = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self.filled: npt.NDArray[np.int64] = np.array(filled or [0] * sizes.size, np.int64)
        """Records that each bucket holds."""
        capacity = int(self.starts[-1])
        self.columns: dict[str, Column] = {
            field: staging.column(f"{name}_{field}", dtype, capacity) for field, dtype in dtypes.items()
        }

    def put(self, rows: Array, records: Mapping[str, Any]) -> None:
        """Deal records to the buckets of their rows. Cost: a stable sort by bucket, one write for each bucket and field."""
        if self.filled.size == 1:
            for field, column in self.columns.items():
                column.write(int(self.filled[0]), records[field])
            self.filled[0] += rows.size
            return
        bucket = (np.searchsorted(self.bounds, rows, side="right") - 1).astype(np.min_scalar_type(self.filled.size))
        order = np.argsort(bucket, kind="stable")
        counts = np.bincount(bucket, minlength=self.filled.size)
        ends = np.cumsum(counts)
        for field, column in self.columns.items():
            dealt = records[field][order]
            for k in np.flatnonzero(counts).tolist():
                column.write(int(self.starts[k] + self.filled[k]), dealt[ends[k] - counts[k] : ends[k]])
        self.filled += counts

    def take(self, bucket: int) -> Records:
        """Return the records of a bucket, which the caller may change."""
        start = int(self.starts[bucket])
        stop = start + int(self.filled[bucket])
        return {field: column.take(start, stop) for field, column in self.columns.items()}

    def drop(self) -> None:
        """Release memory and disk space."""
        for column in self.columns.values():
            column.drop()


def sort_records(records: Records) -> Records:
    """Sort by key, then type; equal ones keep their order. Arrays are changed, or replaced by sorted ones."""
    keys = records["key"]
    if len(records) == 1:
        keys.sort()
        return records
    if "type" in records:
        order = np.lexsort((records["type"], keys))
    else:
        order = np.argsort(keys)
        _stabilise(order, keys)
    for field in list(records):
        records[field] = records[field][order]
    return records


def _stabilise(order: Array, keys: Array) -> None:
    """Put equal keys of an unstable order back in theirs: a stable sort takes several times as long."""
    ordered = keys[order]
    again = ordered[1:] == ordered[:-1]
    if not again.any():
        return
    member = np.zeros(ordered.size, np.bool_)
    member[1:] |= again
    member[:-1] |= again
    places = np.flatnonzero(member)
    order[places] = order[places][np.lexsort((order[places], ordered[places]))]
