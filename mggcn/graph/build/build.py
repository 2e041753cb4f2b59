"""From edges of any number to sorted adjacencies, in memory or in a folder within a fixed buffer: docs/notes/0028.

1. deal   every edge, and its reverse where that is added, to the bucket of its target's row.
2. merge  each bucket: sort, make one edge of equal ones, write its rows of the transpose, deal its edges by source.
3. turn   each of those buckets: sort, write its rows of the adjacency.

Shapes: N vertices, E edges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mggcn.errors import GraphError
from mggcn.graph.build.buckets import Buckets, Records, cut, group_shift, sort_records
from mggcn.graph.build.staging import Staging
from mggcn.graph.csr import CSR, WINDOW, Array, mix
from mggcn.graph.edges import Block, Edges
from mggcn.graph.options import GraphOptions

SAVE_EVERY = 32
"""Windows of edges dealt between two states from which work can continue."""
Tell = Callable[[str, int, int], None]
"""Takes what is done, how much of it is done, and how much there is."""


def silent(*_: object) -> None:
    """Report no progress."""


class Adjacency(NamedTuple):
    """Both directions of a graph, one object if pattern and values are symmetric."""

    adj: CSR
    adj_t: CSR
    num_merged: int
    """Listed edges that became one with an equal edge; with `symmetrize`, with its reverse, too."""


class Job(NamedTuple):
    """The edges and options to build from, all of them checked."""

    edges: Edges
    num_vertices: int
    options: GraphOptions
    type_dtype: npt.DTypeLike | None = None
    """Type in which relations are stored, None for edges without."""
    entries: bool = False
    """Whether edges are entries of a matrix with values: equal ones add up, and then are compared with reverses."""

    @property
    def weighted(self) -> bool:
        """Whether weights other than 1 are possible."""
        return self.edges.weights is not None or self.options.duplicates == "sum"

    @property
    def one_direction(self) -> bool:
        """Whether the adjacency is its own transpose by construction."""
        return self.options.symmetrize and self.type_dtype is None

    @property
    def marks_reverses(self) -> bool:
        """Whether reverses must be told from edges: only these may not repeat, or add up."""
        return self.one_direction and (self.options.duplicates == "error" or self.entries)

    def record_bytes(self) -> int:
        """Return the bytes of a record of an edge, both of merged and of listed ones at most."""
        return 8 + 8 * self.weighted + (0 if self.type_dtype is None else np.dtype(self.type_dtype).itemsize + 4)

    def vertex_bytes(self) -> int:
        """Return the bytes of what is of the size of the vertices while a graph is built in memory: rows are counted."""
        return (16 if self.one_direction else 24) * self.num_vertices


def build(job: Job, staging: Staging, capacity: int | None = None, tell: Tell = silent) -> Adjacency:
    """Build both adjacencies, whose arrays `staging` holds; the result does not depend on `capacity`.

    capacity: records of edges that are sorted at once, at least those of 2^s vertices with N <= 2^(s + 20); None: all.
    Interrupted at any place and called again with the same job and folder, it continues where it was.
    Raises: GraphError for repeated edges as the options say, and weights beyond float32.
    """
    return _Build(job, staging, tell).run(capacity)


class _Build:
    """One job's way through its stages; `state` is all that must outlive an interruption."""

    def __init__(self, job: Job, staging: Staging, tell: Tell) -> None:
        self.job, self.staging, self.tell = job, staging, tell
        self.state: dict[str, Any] = {
            "stage": "deal",
            "cuts": [],
            "next": 0,
            "listed": 0,
            "unique": 0,
            "loops": 0,
            "repeats": 0,
            "repeat": None,
            "differing": None,
            "largest": 0.0,
            "ones": True,
            "forward": 0,
            "backward": 0,
            "written": [0, 0],
            "filled": [],
            "filled_t": [],
        } | staging.load()

    def run(self, capacity: int | None) -> Adjacency:
        targets, sources = self._buckets(capacity)
        if self.state["stage"] == "deal":
            self._deal(targets)
        transpose = _Matrix(self.job, self.staging, "_t", self._room(targets))
        if self.state["stage"] == "merge":
            for bucket in range(self.state["next"], targets.filled.size):
                self._merge(bucket, targets, sources, transpose)
                self._save("merge", bucket + 1, targets, sources)
                self.tell("sorting by target", bucket + 1, targets.filled.size)
            self._refuse()
            self._save("turn", 0, targets, sources)
        targets.drop()
        state = self.state
        symmetric = self.job.one_direction or (
            self.job.type_dtype is None and state["forward"] % 2**64 == state["backward"] % 2**64
        )
        matrix = transpose if symmetric else _Matrix(self.job, self.staging, "", self._room(sources))
        if not symmetric:
            for bucket in range(state["next"], sources.filled.size):
                self._turn(bucket, sources, matrix)
                self._save("turn", bucket + 1, targets, sources)
                self.tell("sorting by source", bucket + 1, sources.filled.size)
        sources.drop()
        adj_t = transpose.csr(state["written"][0], not state["ones"])
        adj = adj_t if symmetric else matrix.csr(state["written"][1], not state["ones"])
        num_unique = state["unique"]
        if self.job.options.symmetrize:
            num_unique = (state["unique"] + state["loops"]) // 2
        return Adjacency(adj, adj_t, state["listed"] - num_unique)

    def _buckets(self, capacity: int | None) -> tuple[Buckets, Buckets]:
        """Make the buckets by target and by source, with room for all that may come."""
        job, n = self.job, self.job.num_vertices
        added = n if job.options.self_loops == "add" else 0
        if capacity is None:
            whole, most = np.array([0, n], np.int64), job.edges.count * (1 + job.options.symmetrize)
            cuts = [(whole, np.array([most], np.int64)), (whole, np.array([most + added], np.int64))]
        elif self.state["cuts"]:
            cuts = [(np.array(bounds), np.array(sizes)) for bounds, sizes in self.state["cuts"]]
        else:
            shift = group_shift(n)
            counts = self._counts(shift)
            if added:
                counts += np.diff(np.minimum(np.arange(counts.shape[1] + 1, dtype=np.int64) << shift, n))
            cuts = [cut(direction, shift, n, capacity) for direction in counts]
            self.state["cuts"] = [[bounds.tolist(), sizes.tolist()] for bounds, sizes in cuts]
        fields: dict[str, npt.DTypeLike] = {"key": np.int64}
        listed = fields | ({"value": np.float64} if job.edges.weights is not None else {})
        merged = fields | ({"value": np.float64} if job.weighted else {})
        if job.type_dtype is not None:
            listed = listed | {"type": job.type_dtype}
            merged = merged | {"type": job.type_dtype, "degree": np.float32}
        targets = Buckets(self.staging, "target", *cuts[0], listed, self.state["filled_t"])
        return targets, Buckets(self.staging, "source", *cuts[1], merged, self.state["filled"])

    def _counts(self, shift: int) -> Array:
        """Count the edges, with reverses that are added, of each group of targets and of sources."""
        edges, groups = self.job.edges, (self.job.num_vertices - 1 >> shift) + 1
        counts = np.zeros((2, groups), np.int64)
        for start in range(0, edges.count, WINDOW):
            for row, column in enumerate((edges.dst, edges.src)):
                ids = column.read(start, start + WINDOW).astype(np.int64, copy=False) >> shift
                counts[row] += np.bincount(ids, minlength=groups)
            self.tell("counting edges", min(start + WINDOW, edges.count), edges.count)
        if self.job.options.symmetrize:
            counts[:] = counts.sum(0)
        return counts

    def _room(self, buckets: Buckets) -> int:
        added = self.job.num_vertices if self.job.options.self_loops == "add" else 0
        return int(buckets.filled.sum()) + added

    def _deal(self, targets: Buckets) -> None:
        """Stage 1: whole windows of edges, so that an interrupted one is dealt again to the same places."""
        edges, n = self.job.edges, self.job.num_vertices
        windows = range(0, edges.count, WINDOW)
        for number in range(self.state["next"], len(windows)):
            if number % SAVE_EVERY == 0 and number:
                self._save("deal", number, targets, None)
            block = edges.block(windows[number], windows[number] + WINDOW)
            if self.job.options.self_loops == "drop":
                block = _chosen(block, block.src != block.dst)
            self.state["listed"] += block.src.size
            rows, columns, place = _directions(block, self.job.options.symmetrize)
            keys = rows * n + columns
            if self.job.marks_reverses:
                keys = keys * 2 + place % 2
            which = place // 2 if self.job.options.symmetrize else slice(None)
            records = {"key": keys}
            if block.values is not None:
                records["value"] = block.values[which]
            if block.types is not None:
                records["type"] = block.types[which]
            targets.put(rows, records)
            self.tell("dealing edges to buckets", min(windows[number] + WINDOW, edges.count), edges.count)
        self._save("merge", 0, targets, None)

    def _merge(self, bucket: int, targets: Buckets, sources: Buckets, transpose: _Matrix) -> None:
        """Stage 2 for one bucket."""
        n, first, last = self.job.num_vertices, int(targets.bounds[bucket]), int(targets.bounds[bucket + 1])
        records = targets.take(bucket)
        if self.job.marks_reverses:
            if self.job.entries:
                records = _added_up(records)
            else:
                self._count_repeats(records["key"])
            records["key"] >>= 1
        if self.job.options.self_loops == "add":
            records = _with_loops(records, first, last, n)
        rows = _RowCounts(first, last)
        for part in _windows(sort_records(records), n):
            merged = self._merged(part)
            row, column = np.divmod(merged["key"], n)
            if "type" in merged:
                merged["degree"] = _type_degrees(row, merged)
            if "value" in merged:
                self.state["largest"] = max(self.state["largest"], float(np.abs(merged["value"]).max(initial=0)))
                self.state["ones"] = self.state["ones"] and bool((merged["value"] == 1.0).all())
            rows.add(row)
            transpose.write(self.state["written"][0] + rows.total - row.size, column, merged)
            if not self.job.one_direction:
                backward = column * n + row
                self._compare(merged, backward)
                sources.put(column, merged | {"key": backward})
        transpose.write_pointers(first, rows, self.state["written"][0])
        self.state["written"][0] += rows.total

    def _merged(self, part: Records) -> Records:
        """Make one edge of equal ones of a sorted part, and note those that may not be equal."""
        keys, values, types = part["key"], part.get("value"), part.get("type")
        fresh = np.ones(keys.size, np.bool_)
        fresh[1:] = keys[1:] != keys[:-1]
        if types is not None:
            fresh[1:] |= types[1:] != types[:-1]
        starts, again = np.flatnonzero(fresh), np.flatnonzero(~fresh)
        loop = part.pop("added", None)
        duplicates = self.job.options.duplicates
        if duplicates == "error" and not self.job.marks_reverses and again.size:
            self.state["repeats"] += again.size
            self._note("repeat", keys[again], None if types is None else types[again])
        elif duplicates != "sum" and values is not None:
            differing = again[values[again] != values[again - 1]]
            if differing.size:
                pairs = np.stack([values[differing - 1], values[differing]], 1)
                self._note("differing", keys[differing], None if types is None else types[differing], pairs)
        if duplicates == "sum":
            counts = np.diff(starts, append=keys.size).astype(np.float64)
            values = counts if values is None else np.add.reduceat(values, starts)
        elif values is not None:
            values = values[starts]
        keys = keys[starts]
        num_added = 0 if loop is None else int(np.count_nonzero(loop))
        self.state["unique"] += keys.size - num_added
        self.state["loops"] += int(np.count_nonzero(keys % (self.job.num_vertices + 1) == 0)) - num_added
        found = {"key": keys}
        found |= {} if values is None else {"value": values}
        return found | ({} if types is None else {"type": types[starts]})

    def _count_repeats(self, keys: Array) -> None:
        """Note edges that are listed twice, reverses apart, of keys in any order whose last bit marks a reverse."""
        listed = np.sort(keys[keys % 2 == 0] // 2)
        again = listed[1:][listed[1:] == listed[:-1]]
        self.state["repeats"] += again.size
        if again.size:
            self._note("repeat", again, None)

    def _note(self, what: str, keys: Array, types: Array | None, weights: Array | None = None) -> None:
        """Keep the first edge, by source, target and type, of those that may not be there, and its two weights."""
        target, source = np.divmod(keys, self.job.num_vertices)
        if self.job.options.symmetrize and not (self.job.marks_reverses and what == "repeat"):
            source, target = np.minimum(source, target), np.maximum(source, target)
        kinds = np.zeros(keys.size, np.int64) if types is None else types
        at = int(np.lexsort((kinds, target, source))[0])
        found = [int(source[at]), int(target[at]), int(kinds[at])]
        known = self.state[what]
        if known is None or found < known[:3]:
            self.state[what] = found + ([] if weights is None else weights[at].tolist())

    def _refuse(self) -> None:
        """Refuse what was noted, with the first edge of all buckets. Raises: GraphError."""
        repeat, differing = self.state["repeat"], self.state["differing"]
        if self.job.type_dtype is not None and (repeat or differing):
            u, v, kind = (repeat or differing)[:3]
            raise GraphError(
                f"edge {u} -> {v} of type {kind} {'repeats' if repeat else 'is listed with different weights'}; "
                'choose duplicates="sum" (--duplicates sum), which adds up weights, or list it once'
            )
        if repeat:
            raise GraphError(
                f"expected every edge once, {self.state['repeats']} repeat, the first is {repeat[0]} -> {repeat[1]}; "
                'choose duplicates="merge" or "sum" (--duplicates) to allow that'
            )
        if differing:
            raise GraphError(
                f"edge {differing[0]} -> {differing[1]} is listed with different weights ({differing[3]}, "
                f'{differing[4]}); choose duplicates="sum" (--duplicates sum) or give each edge one weight'
            )
        with np.errstate(over="ignore"):
            single = np.float32(self.state["largest"])
        if not np.isfinite(single):
            raise GraphError(f"edge weights up to {self.state['largest']:g} overflow float32 (3.4e38); scale them down")

    def _compare(self, merged: Records, backward: Array) -> None:
        """Add up hashes of the edges and of their reverses: equal sums mean equal matrices, but for 2^-60."""
        if self.job.type_dtype is not None:
            return
        # Adding 0.0 turns -0.0 into 0.0, which compares equal but has other bits.
        weight = mix((merged["value"] + 0.0).view(np.uint64), 3) if "value" in merged else np.uint64(1)
        for name, keys in (("forward", merged["key"]), ("backward", backward)):
            self.state[name] = (self.state[name] + int(np.sum(mix(keys, 1) * weight))) % 2**64

    def _turn(self, bucket: int, sources: Buckets, matrix: _Matrix) -> None:
        """Stage 3 for one bucket."""
        n, first, last = self.job.num_vertices, int(sources.bounds[bucket]), int(sources.bounds[bucket + 1])
        rows = _RowCounts(first, last)
        for part in _windows(sort_records(sources.take(bucket)), n):
            row, column = np.divmod(part["key"], n)
            rows.add(row)
            matrix.write(self.state["written"][1] + rows.total - row.size, column, part)
        matrix.write_pointers(first, rows, self.state["written"][1])
        self.state["written"][1] += rows.total

    def _save(self, stage: str, following: int, targets: Buckets, sources: Buckets | None) -> None:
        self.state |= {"stage": stage, "next": following, "filled_t": targets.filled.tolist()}
        self.state["filled"] = [] if sources is None else sources.filled.tolist()
        self.staging.save(self.state)


class _Matrix:
    """The arrays of a CSR as columns that are written bucket after bucket."""

    def __init__(self, job: Job, staging: Staging, suffix: str, room: int) -> None:
        self.num_vertices = job.num_vertices
        dtypes: dict[str, npt.DTypeLike] = {"indices": np.int32}
        dtypes |= {"values": np.float32} if job.weighted else {}
        dtypes |= {} if job.type_dtype is None else {"types": job.type_dtype, "type_degrees": np.float32}
        self.columns = {name: staging.column(f"{name}{suffix}", dtype, room) for name, dtype in dtypes.items()}
        self.pointers = staging.column(f"indptr{suffix}", np.int64, job.num_vertices + 1)

    def write(self, position: int, column: Array, records: Records) -> None:
        """Append sorted entries."""
        entries = {"indices": column.astype(np.int32)}
        if "types" in self.columns:
            entries |= {"types": records["type"], "type_degrees": records["degree"]}
        if "values" in self.columns:
            with np.errstate(over="ignore"):
                entries["values"] = records["value"].astype(np.float32)
        for name, target in self.columns.items():
            target.write(position, entries[name])

    def write_pointers(self, first: int, rows: _RowCounts, position: int) -> None:
        """Write the ends of rows from `first` on, whose entries begin at `position`."""
        if first == 0:
            self.pointers.write(0, np.zeros(1, np.int64))
        np.cumsum(rows.counts, out=rows.counts)
        rows.counts += position
        self.pointers.write(first + 1, rows.counts)

    def csr(self, nnz: int, weighted: bool) -> CSR:
        """Return the matrix, all of which has been written."""
        found = {name: column.rows(nnz) for name, column in self.columns.items() if weighted or name != "values"}
        return CSR(
            self.pointers.rows(self.num_vertices + 1),
            found["indices"],
            found.get("values"),
            self.num_vertices,
            types=found.get("types"),
            type_degrees=found.get("type_degrees"),
        )


class _RowCounts:
    """How many entries the rows of a bucket have."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.total = first, 0
        self.counts: npt.NDArray[np.int64] = np.zeros(last - first, np.int64)

    def add(self, row: Array) -> None:
        """Count entries of ascending rows."""
        if row.size:
            low, high = int(row[0]) - self.first, int(row[-1]) - self.first
            self.counts[low : high + 1] += np.bincount(row - int(row[0]))
            self.total += row.size


def _chosen(block: Block, keep: Array) -> Block:
    return Block(*(None if column is None else column[keep] for column in block))  # type: ignore[arg-type]


def _directions(block: Block, both: bool) -> tuple[Array, Array, Array]:
    """Return rows, columns, and twice the place in the block, one more for a reverse; edge by edge, so that sums agree."""
    if not both:
        return block.dst, block.src, np.zeros(1, np.int64)
    rows = np.stack([block.dst, block.src], 1).ravel()
    columns = np.stack([block.src, block.dst], 1).ravel()
    keep = np.flatnonzero((rows != columns) | (np.arange(rows.size) % 2 == 0))
    return rows[keep], columns[keep], keep


def _added_up(records: Records) -> Records:
    """Make one record of those with equal keys, with the sum of their values in the order in which they came."""
    order = np.argsort(records["key"], kind="stable")
    keys = records["key"][order]
    starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]])[: keys.size])
    values = np.add.reduceat(records["value"][order], starts) if keys.size else records["value"]
    return {"key": keys[starts], "value": values}


def _with_loops(records: Records, first: int, last: int, n: int) -> Records:
    """Add the self-loops that rows [first, last) lack, with weight 1; "added" marks them."""
    keys = records["key"]
    present = keys[keys % (n + 1) == 0] // (n + 1)
    lacking = np.ones(last - first, np.bool_)
    lacking[present - first] = False
    loops = (np.flatnonzero(lacking) + first) * (n + 1)
    found = {"key": np.concatenate([keys, loops]), "added": np.zeros(keys.size + loops.size, np.bool_)}
    found["added"][keys.size :] = True
    if "value" in records:
        found["value"] = np.concatenate([records["value"], np.ones(loops.size)])
    return found


def _windows(records: Records, n: int) -> Iterator[Records]:
    """Yield parts of sorted records, about WINDOW of them; with types whole rows, else whole runs of equal keys."""
    keys, start = records["key"], 0
    while start < keys.size:
        stop = min(start + WINDOW, keys.size)
        last = int(keys[stop - 1])
        end = (last // n + 1) * n if "type" in records else last + 1
        stop = start + int(np.searchsorted(keys[start:], end))
        yield {field: column[start:stop] for field, column in records.items()}
        start = stop


def _type_degrees(target: Array, merged: Records) -> npt.NDArray[np.float32]:
    """For every edge the weights of its target's in-edges of its type, summed; all of a target's edges are there."""
    types = merged["type"]
    order = np.lexsort((types, target))
    v, t = target[order], types[order]
    fresh = np.ones(v.size, np.bool_)
    fresh[1:] = (v[1:] != v[:-1]) | (t[1:] != t[:-1])
    group = np.cumsum(fresh) - 1
    sums = np.bincount(group, merged["value"][order] if "value" in merged else None)
    degrees = np.empty(v.size, np.float32)
    degrees[order] = sums[group]
    return degrees
