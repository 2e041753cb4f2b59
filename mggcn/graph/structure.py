"""Edges from outside: checks of their numbers and extents, then both sorted adjacencies (build.py).

Shapes: N vertices, E edges, R relations.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mggcn.errors import GraphError
from mggcn.graph.build.build import Adjacency, Job, build
from mggcn.graph.build.room import IN_MEMORY, Room
from mggcn.graph.check import MAX_VERTICES
from mggcn.graph.csr import Array
from mggcn.graph.edges import Edges, Survey, from_array
from mggcn.graph.options import GraphOptions
from mggcn.host import machine_memory

NAMED = '; in Python, ids= names the rows, and ids="edges" numbers ids with gaps'


MAX_RELATIONS = 1 << 16


def edges_of(edges: Array, weights: Array | None = None, types: Array | None = None) -> Edges:
    """Return the columns of arrays [2, E], [E] and [E] from outside. Raises: GraphError on other shapes and types."""
    if edges.ndim != 2 or edges.shape[0] != 2 or edges.dtype.kind not in "iu":
        raise GraphError(
            f"edges must be integers of shape [2, E] (row 0 sources, row 1 targets), got {edges.dtype} "
            f"of shape {edges.shape}; transpose or convert them"
        )
    return from_array(edges, weights, types)


def check_columns(edges: Edges) -> None:
    """Compare lengths and types of columns, which costs nothing; raises GraphError."""
    weights, types = edges.weights, edges.types
    if types is not None and (types.shape != (edges.count,) or types.dtype.kind not in "iu"):
        raise GraphError(
            f"edge types must be whole numbers of shape [{edges.count}], one for each edge, got {types.dtype} of shape "
            f"{types.shape}; number relations first (numpy.unique(names, return_inverse=True) does)"
        )
    if weights is not None and (weights.shape != (edges.count,) or weights.dtype.kind not in "iufb"):
        raise GraphError(
            f"expected one real weight for each of {edges.count} edges, got {weights.dtype} "
            f"of shape {weights.shape}; leave weights out for an unweighted graph"
        )


def check_job(
    edges: Edges,
    survey: Survey,
    num_vertices: int,
    num_relations: int | None,
    options: GraphOptions,
    origin: str = "",
    *,
    entries: bool = False,
) -> tuple[Job, int]:
    """Check edges from outside; return the job that builds the graph, and R, 0 without types.

    origin: what set the number of vertices, for the message. entries: as `build_adjacency`.
    Raises: GraphError for ids outside [0, N), weights that are not finite, types outside [0, R), and loops that would be
    added without a type.
    """
    relations, dtype = (0, None) if edges.types is None else _check_types(survey, num_relations)
    if not 1 <= num_vertices <= MAX_VERTICES:
        todo = (
            f"number them from 0 without gaps{NAMED}"
            if num_vertices > 1
            else "give num_vertices (--vertices) or an edge"
        )
        raise GraphError(f"expected 1 to {MAX_VERTICES} vertices, got {num_vertices}; {todo}")
    if edges.count:
        _check_range(survey.lowest, survey.highest, num_vertices, origin)
    if survey.not_finite:
        raise GraphError(f"edge weights must be finite, {survey.not_finite} are NaN or infinite; drop them")
    if dtype is not None and options.self_loops == "add":
        raise GraphError(
            "self-loops that are added to typed edges would have no type; leave them out (a model of relations has a "
            "weight for the vertex itself), or list them with a type of their own"
        )
    return Job(edges, num_vertices, options, dtype, entries), relations


def build_adjacency(
    edges: Edges,
    num_vertices: int,
    options: GraphOptions,
    num_relations: int | None = None,
    origin: str = "",
    room: Room = IN_MEMORY,
    survey: Survey | None = None,
    *,
    entries: bool = False,
) -> tuple[Adjacency, int]:
    """Sort edges into both adjacencies; return them and the number of relations, 0 for edges without types.

    All weights 1 is the same as no weights. With types both directions are stored, an edge is (source, target, type), and
    the reverse that `symmetrize` adds has the edge's type. origin: what set N, for a message, if not the caller.
    survey: that of the edges, if it was made before. entries: edges are entries of a matrix with values, of which equal
    ones add up before reverses are added.
    Cost: one pass over the edges and two sorts of E keys of 8 bytes; weights double that. Memory: as `room` says.
    Raises: GraphError as `check_job`, for repeated edges as `options` say, and for vertices that do not fit the memory.
    """
    check_columns(edges)
    survey = survey or edges.survey()
    job, relations = check_job(edges, survey, num_vertices, num_relations, options.resolved(), origin, entries=entries)
    staging, capacity = room.for_build(job)
    memory = machine_memory()
    if capacity is None and memory and job.vertex_bytes() > memory.available:
        needed, free = (nbytes / 2**30 for nbytes in (job.vertex_bytes(), memory.available))
        raise _beyond_memory(job, f"need {needed:.1f} GiB, {free:.1f} GiB are free")
    try:
        return build(job, staging, capacity, room.tell), relations
    except MemoryError as error:  # a limit of this process
        if num_vertices <= edges.count:
            raise
        raise _beyond_memory(job, str(error)) from error


def _beyond_memory(job: Job, why: str) -> GraphError:
    vertices, edges = job.num_vertices, job.edges.count
    few, todo = "", "free some memory, or use a machine that has more"
    if vertices > edges:
        few, todo = f", of which {edges:,} edges reach few,", f"number them from 0 without gaps{NAMED}"
    return GraphError(f"{vertices:,} vertices{few} do not fit the memory: {why}; {todo}")


def _check_types(survey: Survey, num_relations: int | None) -> tuple[int, npt.DTypeLike]:
    """Return R and the least unsigned integers that hold the types."""
    lowest, highest = survey.lowest_type, survey.highest_type
    relations = highest + 1 if num_relations is None else num_relations
    if lowest < 0 or highest >= relations or not 1 <= relations <= MAX_RELATIONS:
        raise GraphError(
            f"edge types must lie in 0 .. num_relations - 1, at most {MAX_RELATIONS:,} of them, got {lowest} to {highest} "
            f"for {relations} relations; number them from 0 without gaps"
        )
    return relations, np.uint8 if relations <= 256 else np.uint16


def _check_range(lowest: int, highest: int, num_vertices: int, origin: str) -> None:
    if 0 <= lowest and highest < num_vertices:
        return
    todo = (
        f"{'give one row for each vertex' if origin else 'check num_vertices (--vertices)'} and start ids at 0{NAMED}"
    )
    if lowest == 1 and highest == num_vertices:
        todo = "ids seem to start at 1: subtract 1 from each"
    raise GraphError(f"vertex ids must lie in [0, {num_vertices}){origin}, got {lowest} to {highest}; {todo}")
