"""BTER: a graph with the degrees of another one, or multiples of them, and its clustering by degree.

Vertices of about one degree form blocks, within which pairs are joined at random, as densely as the clustering asks for;
the ends that their degrees leave are paired at random. Kolda et al. draw these pairs by weight (Chung and Lu), so that
degrees hold on average. Here every end is paired once, and pairs that repeat exchange ends with others, so that degrees
hold exactly: without it a vertex of degree 1 has none in a third of all cases.
N vertices, ascending by degree until they get random ids; E undirected edges; C classes. A key is u * N + v with u > v.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mggcn.errors import GraphError
from mggcn.graph.affinity import Blocks, Floats, Ints, Mixing, affinity_blocks, cells_of, densities
from mggcn.graph.build.room import IN_MEMORY, WINDOWS_BYTES, Room
from mggcn.graph.csr import Array, ArrayRows, Graph, Rows
from mggcn.graph.edges import Edges
from mggcn.graph.options import GraphOptions
from mggcn.graph.pairs import PIECE, Keys
from mggcn.graph.structure import build_adjacency
from mggcn.graph.synthetic import (
    TrainBy,
    check_extents,
    check_shares,
    drawn_features,
    meta_of,
    splits_of,
    training_order,
)
from mggcn.graph.triangles import DegreeProfile, degree_profile, is_undirected, triangle_nbytes
from mggcn.host import machine_memory

EXCHANGES, EXCHANGED, PASSES = 64, 1 << 18, 16
"""Rounds in which so many pairs at a time that repeat exchange ends, and how often what is left over tries again; what
then has no place is left out."""
VERTEX_BYTES = 160
"""Bytes a vertex at the most: degrees, clustering, places, ends, classes and their orders."""
PAIR_BYTES = 17
"""Bytes an edge while ends are paired: its key, the ends of two, and whether a pair may still exchange them."""


@dataclass(frozen=True, slots=True)
class BterPlan:
    """The extents of a graph that is to be made, and its memory by what is done, in bytes: one after the other."""

    num_vertices: int
    num_edges: int
    nbytes: Mapping[str, int]

    @property
    def peak(self) -> int:
        return max(self.nbytes.values())


def bter(
    like: Graph,
    *,
    seed: int,
    factor: float = 1.0,
    num_features: int = 0,
    num_classes: int = 0,
    homophily: float = 0.7,
    train: float = 0.1,
    val: float = 0.1,
    feature_signal: float = 2.0,
    train_by: TrainBy = "random",
    name: str | None = None,
    room: Room = IN_MEMORY,
    announce: Callable[[BterPlan], None] = lambda _: None,
) -> Graph:
    """Make an undirected graph with `factor` times the degrees of another one, and its clustering by degree.

    Of a directed graph, an edge in either direction counts; self-loops, weights and relations do not. A vertex of degree d
    becomes one of degree factor * d, rounded, at most N - 1, with the clustering of degree d. Blocks belong to one of C
    equal classes; ends outside are paired within their class as often as makes `homophily` the share of edges within
    classes; where blocks alone have more, some of their vertices get any class. Features and splits are as those of
    `community`.
    The graph depends on the arguments alone: nothing here runs on several threads.
    Cost: `degree_profile` of the other graph, then some passes over E keys, a shuffle of 2 E ends and a sort, then those of
    `build_adjacency`. Memory: `plan_bter`, which `announce` gets before anything is drawn.
    Raises: GraphError if an argument is out of range, or the memory that is free is too little; StoreError as the room.
    Source: Kolda, Pinar, Plantenga and Seshadhri, "A scalable generative graph model with community structure", 2014.
    """
    if not 1.0 <= factor < 2**31:
        raise GraphError(f"expected a factor of at least 1 (--factor), got {factor}")
    check_extents(like.num_vertices, 0, num_features, num_classes)
    check_shares(homophily=homophily, train=train, val=val, train_plus_val=train + val)
    _require(profile_nbytes(like, room), f"counting triangles of {like.name}")
    profile = degree_profile(like, room.part("like"))
    degrees = _degrees(profile, factor)
    plan = plan_bter(degrees, num_features, room)
    announce(plan)
    _require(plan.peak, f"a graph of {plan.num_edges:,} edges")
    rng = np.random.Generator(np.random.PCG64(seed))
    keys, classes, lacking = _drawn(degrees, np.repeat(profile.clustering, profile.counts), num_classes, homophily, rng)
    ids = rng.permutation(degrees.size)
    labels = np.empty(degrees.size, np.int64)
    labels[ids] = classes
    edges = Edges(_Ends(keys, ids, upper=True), _Ends(keys, ids, upper=False))
    built, _ = build_adjacency(edges, degrees.size, GraphOptions(symmetrize=True), room=room)
    del edges, keys
    splits = dict[str, Rows]()
    if num_classes:
        found = np.diff(built.adj.indptr.array())
        splits = splits_of(training_order(train_by, train, labels, found, num_classes, rng), train, val)
    options = {"kind": "bter", "like": like.name, "factor": factor, "seed": seed, "homophily": homophily}
    more = {"train": train, "val": val, "train_by": train_by, "feature_signal": feature_signal, "lacking": lacking}
    return Graph(
        name=name or f"bter_{like.name}",
        adj=built.adj,
        adj_t=built.adj,
        features=drawn_features(labels, num_features, max(num_classes, 1), feature_signal, rng),
        labels=ArrayRows(labels) if num_classes else None,
        splits=splits,
        num_classes=num_classes,
        meta=meta_of(options | more),
    )


def profile_nbytes(like: Graph, room: Room = IN_MEMORY) -> int:
    """Return the memory in which the degrees and clustering of a graph are found: edges both ways are sorted first, unless
    it has them.
    """
    if is_undirected(like):
        return triangle_nbytes(like.num_vertices, like.num_edges) + WINDOWS_BYTES
    sorting, in_memory = _sorting(like.num_edges, room)
    matrix = 8 * (like.num_vertices + like.num_edges) * in_memory
    return max(sorting, triangle_nbytes(like.num_vertices, 2 * like.num_edges) + WINDOWS_BYTES) + matrix


def _sorting(num_edges: int, room: Room) -> tuple[int, bool]:
    """Return the memory in which edges are sorted in both directions, and whether all of them are in memory."""
    in_memory = room.folder is None or 2 * num_edges * 24 <= room.memory // 2
    # A window has its edges in both directions.
    return WINDOWS_BYTES + (2 * num_edges * 12 + WINDOWS_BYTES if in_memory else room.memory), in_memory


def plan_bter(degrees: Ints, num_features: int, room: Room = IN_MEMORY) -> BterPlan:
    """Return the extents and the memory of a graph with these degrees, which are ascending."""
    vertices, edges = degrees.size, int(degrees.sum()) // 2
    # A piece of pairs, of which each takes seven numbers of 8 bytes, is as large as the largest block's last row at least.
    piece = 56 * max(PIECE, int(degrees[-1]) if vertices else 0)
    each = VERTEX_BYTES * vertices
    sorting, in_memory = _sorting(edges, room)
    nbytes = {
        "pairing ends": PAIR_BYTES * edges + each + piece,
        "sorting edges": 8 * edges + 40 * vertices + sorting,
        "features": 4 * vertices * num_features + 40 * vertices + 8 * edges * in_memory + WINDOWS_BYTES,
    }
    return BterPlan(vertices, edges, nbytes)


def _require(nbytes: int, what: str) -> None:
    memory = machine_memory()
    if memory is not None and nbytes > memory.available:
        raise GraphError(
            f"{what} needs {nbytes / 2**30:.1f} GiB, {memory.available / 2**30:.1f} GiB are free; ask for fewer edges "
            "(--factor) or features, or sort edges in less memory (--memory)"
        )


def _degrees(profile: DegreeProfile, factor: float) -> Ints:
    """Return the degree of every vertex, ascending."""
    most = max(profile.num_vertices - 1, 0)
    scaled = np.minimum(np.rint(profile.degrees * factor), most).astype(np.int64)
    return np.repeat(scaled, profile.counts)


def _drawn(
    degrees: Ints, clustering: Floats, num_classes: int, homophily: float, rng: np.random.Generator
) -> tuple[Keys, Ints, int]:
    """Return the keys of the edges, the class of each vertex, and how many edges have no place."""
    blocks = affinity_blocks(degrees, num_classes)
    density, spread = densities(cells_of(degrees, clustering, blocks), num_classes, homophily)
    classes = _classes(blocks, degrees.size, num_classes, spread, rng)
    keys: Keys = np.empty(int(degrees.sum()) // 2, np.int64)
    count, inside = 0, np.zeros(degrees.size, np.int64)
    for u, v in _within_blocks(blocks, density, degrees.size, rng):
        keys[count : count + u.size] = u * degrees.size + v
        count += u.size
        if u.size:
            first, last = int(v.min()), int(u[-1]) + 1
            for joined in (u, v):
                inside[first:last] += np.bincount(joined - first, minlength=last - first)
    filled = count
    for pairs in _paired(degrees - inside, classes, max(num_classes, 1), spread.within, rng):
        for start in range(0, pairs.shape[0], PIECE):
            ends = pairs[start : start + PIECE].astype(np.int64)
            keys[filled : filled + ends.shape[0]] = ends.max(axis=1) * degrees.size + ends.min(axis=1)
            filled += ends.shape[0]
    del pairs
    placed = _exchange(keys[count:filled], keys[:count], classes, rng)
    return keys[: count + placed], classes, keys.size - count - placed


def _classes(blocks: Blocks, num_vertices: int, num_classes: int, spread: Mixing, rng: np.random.Generator) -> Ints:
    """Return the class of every vertex: a whole block's, or its own. All classes have as many of these."""
    lowest = int(blocks.starts[0]) if blocks.starts.size else num_vertices
    first = np.ones(num_vertices, np.bool_)
    first[lowest:] = ~np.repeat(blocks.whole, blocks.sizes)
    first[blocks.starts] = True
    owner = np.cumsum(first) - 1
    classes: Ints = (rng.permutation(int(owner[-1]) + 1) % max(num_classes, 1))[owner]
    if spread.kept < 1.0:  # of blocks alone more edges are within a class than asked for
        moved = np.flatnonzero(rng.random(num_vertices) >= spread.kept)
        classes[moved] = rng.integers(num_classes, size=moved.size)
    return classes


def _within_blocks(
    blocks: Blocks, density: Floats, num_vertices: int, rng: np.random.Generator
) -> Iterator[tuple[Ints, Ints]]:
    """Yield the pairs u > v within blocks that are joined, ascending by u and v, each with its block's density.

    Cost: a draw for each pair of a block; those are half as many as the degrees of its vertices at most.
    """
    if not blocks.starts.size:
        return
    lowest = int(blocks.starts[0])
    earlier = np.arange(lowest, num_vertices) - np.repeat(blocks.starts, blocks.sizes)
    ends = np.cumsum(earlier)
    dense = np.repeat(density[blocks.kind].astype(np.float32), blocks.sizes)
    low = 0
    while low < earlier.size:
        before = int(ends[low] - earlier[low])
        high = max(int(np.searchsorted(ends, before + PIECE, side="right")), low + 1)
        counts = earlier[low:high]
        u = np.repeat(np.arange(low, high), counts)
        joined = np.flatnonzero(rng.random(u.size, dtype=np.float32) < dense[u])
        u = u[joined]
        # The first vertex of the block, and the place among those before u.
        v = u - earlier[u] + joined - (ends[u] - earlier[u] - before)
        yield u + lowest, v + lowest
        low = high


def _paired(
    ends: Ints, classes: Ints, num_classes: int, within: float, rng: np.random.Generator
) -> Iterator[npt.NDArray[np.int32]]:
    """Pair ends at random, (pairs, 2): a share `within` among those of a class, all others whatever their classes.

    ends, classes int64 (N,): of each vertex. Ends of an odd number are left out of a class, and the last of all.
    """
    if within > 0.0:
        order = np.argsort(classes, kind="stable")
        kept = rng.binomial(ends, within)
        ends = ends - kept
        for vertices in np.split(order, np.searchsorted(classes[order], np.arange(1, num_classes))):
            mine = np.repeat(vertices.astype(np.int32), kept[vertices])
            rng.shuffle(mine)
            if mine.size % 2:
                ends[mine[-1]] += 1
            yield mine[: mine.size // 2 * 2].reshape(-1, 2)
    rest = np.repeat(np.arange(ends.size, dtype=np.int32), ends)
    rng.shuffle(rest)
    yield rest[: rest.size // 2 * 2].reshape(-1, 2)


def _exchange(keys: Keys, inside: Keys, classes: Ints, rng: np.random.Generator) -> int:
    """Let pairs that join a vertex to itself, or repeat, exchange ends with others; return how many pairs are proper now.

    keys: sorted and changed in place; the proper ones are the first. inside: further keys, sorted and distinct. classes
    (N,): as many pairs as before are within one, as far as 3 of 4 rounds find such.
    Cost: a sort and a pass, as often as pairs are left over, twice in most graphs, and some searches for each of those.
    """
    wrong, stuck = np.empty(0, np.int64), False
    for attempt in range(PASSES + 1):
        keys.sort()
        wrong = _improper(keys, inside, classes.size)
        if not wrong.size or stuck or attempt == PASSES:
            break
        # What is noted of an exchange takes as much as seven keys.
        some = wrong[: keys.size // 8 + 1000]
        # The rest hardly has a place, as of vertices that are joined to nearly all.
        stuck = 50 * _exchanged(keys, some, inside, classes, rng) < some.size
    # What is left without a place is overwritten by the last pairs.
    placed = keys.size - wrong.size
    last = np.setdiff1d(np.arange(placed, keys.size), wrong, assume_unique=True)
    keys[wrong[wrong < placed]] = keys[last]
    return placed


def _exchanged(keys: Keys, wrong: Ints, inside: Keys, classes: Ints, rng: np.random.Generator) -> int:
    """Exchange the ends of pairs at these places of sorted keys with those of others; return how many found a place.

    A pair (u, v) and one drawn at random, (x, y), become (u, x) and (v, y) if both are new.
    """
    closed = np.zeros(keys.size, np.bool_)
    closed[wrong] = True
    places, values, fresh, found = list[Ints](), list[Keys](), np.empty(0, np.int64), 0
    for start in range(0, wrong.size, EXCHANGED):
        left, recent = wrong[start : start + EXCHANGED], np.empty(0, np.int64)
        for attempt in range(EXCHANGES):
            if not left.size:
                break
            other = rng.integers(keys.size, size=left.size)
            one, two, new = _crossed(keys[left], keys[other], classes, rng, alike=attempt % 4 < 3)
            new &= ~closed[other] & _once(other) & _once(np.concatenate([one, two])).reshape(2, -1).all(axis=0)
            some = np.flatnonzero(new)
            for known in (inside, keys, fresh, recent):
                some = some[~(_among(one[some], known) | _among(two[some], known))]
            places += [left[some], other[some]]
            values += [one[some], two[some]]
            closed[other[some]] = True
            recent = np.sort(np.concatenate([recent, one[some], two[some]]))
            left = np.delete(left, some)
        found += recent.size // 2
        fresh = np.sort(np.concatenate([fresh, recent]))
    for place, value in zip(places, values, strict=True):
        keys[place] = value
    return found


def _crossed(
    pairs: Keys, others: Keys, classes: Ints, rng: np.random.Generator, *, alike: bool
) -> tuple[Keys, Keys, npt.NDArray[np.bool_]]:
    """Return the keys (u, x) and (v, y) for pairs (u, v) and others (x, y), and which join no vertex to itself.

    alike: and leave as many of the two within a class as were.
    """
    size = classes.size
    (u, v), (x, y) = np.divmod(pairs, size), np.divmod(others, size)
    turned = rng.random(pairs.size) < 0.5
    x, y = np.where(turned, y, x), np.where(turned, x, y)
    proper = (u != x) & (v != y)
    if alike:
        a, b, c, d = (classes[ends] for ends in (u, v, x, y))
        proper &= (a == b).astype(np.int8) + (c == d) == (a == c).astype(np.int8) + (b == d)
    return _key(u, x, size), _key(v, y, size), proper


def _improper(keys: Keys, inside: Keys, num_vertices: int) -> Ints:
    """Return the places of sorted keys that join a vertex to itself, equal the one before, or are inside."""
    found = [np.empty(0, np.int64)]
    for start in range(0, keys.size, PIECE):
        part = keys[start : start + PIECE]
        wrong = (part % (num_vertices + 1) == 0) | _among(part, inside)
        wrong |= np.diff(part, prepend=keys[start - 1] if start else -1) == 0
        found.append(np.flatnonzero(wrong) + start)
    return np.concatenate(found)


def _among(keys: Keys, known: Keys) -> npt.NDArray[np.bool_]:
    """Return which keys are among sorted ones."""
    if not known.size:
        return np.zeros(keys.size, np.bool_)
    found: npt.NDArray[np.bool_] = known[np.minimum(np.searchsorted(known, keys), known.size - 1)] == keys
    return found


def _once(numbers: Ints) -> npt.NDArray[np.bool_]:
    """Return which numbers occur once."""
    order = np.argsort(numbers, kind="stable")
    again = np.diff(numbers[order]) == 0
    single = np.ones(numbers.size, np.bool_)
    single[order[1:][again]] = single[order[:-1][again]] = False
    return single


def _key(u: Ints, v: Ints, num_vertices: int) -> Keys:
    return np.maximum(u, v) * num_vertices + np.minimum(u, v)


@dataclass(frozen=True, slots=True)
class _Ends:
    """The ids of the upper or lower ends of keys, worked out as they are read (`Rows`)."""

    keys: Keys
    ids: Ints
    upper: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return self.keys.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.ids.dtype

    def read(self, start: int, stop: int) -> Array:
        return self._of(self.keys[start:stop])

    def array(self) -> Array:
        return self._of(self.keys)

    copied = True

    def take(self, ids: Ints) -> Array:
        return self._of(self.keys[ids])

    def in_place(self) -> _Ends:
        return self

    def _of(self, keys: Keys) -> Array:
        place = keys // self.ids.size if self.upper else keys % self.ids.size
        found: Array = self.ids[place]
        return found
