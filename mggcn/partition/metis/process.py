"""METIS in a subprocess, because it replaces signal handlers, prints, ignores Ctrl-C and never frees its memory.

It is called in the library that pymetis brings, whose own function knows one weight a vertex. The graph and the result lie
in memory that both processes share. N vertices, M entries, C constraints, P parts, L leaves.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mggcn.errors import BackendError, PlanError
from mggcn.host import die_with_parent, python

Numbers = npt.NDArray[np.int64]
CUTS = 4
"""Partitions of which METIS takes the best if there are several constraints: the only one may cut twice the edges of
another (docs/notes/0010-metis.md)."""
MOST_OF_HALVES = 20
"""Most thousandths above the average that a half may have of a constraint, unless one more vertex is more."""
UNUSABLE = 3
"""Exit code where pymetis's library cannot be called."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Input and output of METIS, all int64 in shared memory; pages that are not touched cost nothing.

    indptr (N + 1,), indices (M,): an undirected graph without self-loops, M being at most `max_entries`; vertex_weights
    (N, C); edge_weights (M,), None for ones; part (N,): the result.
    slack (C,): thousandths above the average that a part may have of each constraint.
    """

    descriptor: int
    num_vertices: int
    max_entries: int
    slack: tuple[int, ...]
    indptr: npt.NDArray[np.int64]
    vertex_weights: npt.NDArray[np.int64]
    part: npt.NDArray[np.int64]
    indices: npt.NDArray[np.int64]
    edge_weights: npt.NDArray[np.int64] | None


def new_problem(num_vertices: int, max_entries: int, slack: tuple[int, ...], *, weighted: bool) -> Problem:
    """Return an empty problem; its memory lives as long as its arrays and the descriptor, which the caller closes."""
    descriptor = os.memfd_create("mggcn-metis")
    os.ftruncate(descriptor, 8 * ((2 + len(slack)) * num_vertices + 1 + max_entries * (1 + weighted)))
    return _mapped(descriptor, num_vertices, max_entries, weighted, slack)


def _mapped(descriptor: int, num_vertices: int, max_entries: int, weighted: bool, slack: tuple[int, ...]) -> Problem:
    memory = np.frombuffer(mmap.mmap(descriptor, 0), np.int64)
    bounds = np.cumsum([num_vertices + 1, num_vertices * len(slack), num_vertices, max_entries])
    indptr, vertex_weights, part, indices, rest = np.split(memory, bounds)
    edge_weights = rest if weighted else None
    return Problem(
        descriptor=descriptor,
        num_vertices=num_vertices,
        max_entries=max_entries,
        slack=slack,
        indptr=indptr,
        vertex_weights=vertex_weights.reshape(num_vertices, len(slack)),
        part=part,
        indices=indices,
        edge_weights=edge_weights,
    )


def solve(problem: Problem, parts: int, seed: int, halvings: int = 0) -> None:
    """Fill in problem.part, by k-way partitioning that cuts few edges; P is 2 or more and below N, or 1 with halvings.

    halvings: how often every part is cut into halves; vertices with consecutive numbers of parts are near each other then.
    Raises: PlanError if METIS fails or is killed; the only known reason is a lack of memory. BackendError if the library
    that pymetis brings cannot be called.
    """
    weighted = problem.edge_weights is not None
    arrays = (problem.descriptor, problem.num_vertices, problem.max_entries, weighted)
    command = [*python(__name__), *(str(int(number)) for number in (*arrays, parts, seed, halvings, *problem.slack))]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, pass_fds=(problem.descriptor,)
    )
    said = " ".join(" ".join([done.stdout, *done.stderr.splitlines()[-1:]]).split())[:400]
    if done.returncode == UNUSABLE:
        raise BackendError(said)
    if done.returncode:
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"code {done.returncode}"
        raise PlanError(
            f"METIS exited with {how} and no partition, usually because it ran out of memory; use a larger machine or "
            f"--kind libra. Output: {said or 'nothing'}"
        )


@dataclass(frozen=True, slots=True)
class _Subgraph:
    """Some of the vertices, V of them, with the edges among these: arrays as those of a Problem."""

    indptr: Numbers
    indices: Numbers
    vertex_weights: Numbers
    edge_weights: Numbers | None

    def among(self, chosen: Numbers, place: npt.NDArray[np.int32]) -> _Subgraph:
        """Return that of some of its vertices, ascending. place (V,): scratch, -1 before and after."""
        place[chosen] = np.arange(chosen.size)
        lengths = np.diff(self.indptr)[chosen]
        ends = np.cumsum(lengths)
        entries = np.arange(ends[-1] if ends.size else 0) + np.repeat(self.indptr[chosen] - (ends - lengths), lengths)
        columns = place[self.indices[entries]]
        kept = columns >= 0
        place[chosen] = -1
        # Entries that are left before each row.
        before = np.concatenate([np.zeros(1, np.int64), np.cumsum(kept)])
        weights = None if self.edge_weights is None else self.edge_weights[entries[kept]]
        indptr = before[np.concatenate([np.zeros(1, np.int64), ends])]
        return _Subgraph(indptr, columns[kept].astype(np.int64), self.vertex_weights[chosen], weights)


def _solve_here(problem: Problem, parts: int, seed: int, halvings: int) -> None:
    entries = int(problem.indptr[-1])
    edges = None if problem.edge_weights is None else problem.edge_weights[:entries]
    whole = _Subgraph(problem.indptr, problem.indices[:entries], problem.vertex_weights, edges)
    found = _parts(whole, parts, problem.slack, seed) if parts != 1 else np.zeros(problem.num_vertices, np.int64)
    problem.part[:] = found << halvings
    if halvings:
        place = np.full(problem.num_vertices, -1, np.int32)
        for part in range(parts):
            members = np.flatnonzero(found == part)
            of = whole if parts == 1 else whole.among(members, place)
            problem.part[members] += _halved(of, halvings, problem.slack, seed)


def _halved(graph: _Subgraph, times: int, slack: tuple[int, ...], seed: int) -> Numbers:
    """Return to which of 2^times parts each vertex belongs, halves of halves with few edges between them (V,)."""
    size = graph.vertex_weights.shape[0]
    if size <= 1 << times or not graph.indices.size:
        even: Numbers = (np.arange(size) << times) // max(size, 1)
        return even
    half = _parts(graph, 2, _slack_of_halves(graph.vertex_weights.sum(0), slack), seed)
    place, found = np.full(size, -1, np.int32), np.zeros(size, np.int64)
    for side in (0, 1):
        members = np.flatnonzero(half == side)
        below = _halved(graph.among(members, place), times - 1, slack, seed) if times > 1 else 0
        found[members] = (side << times - 1) + below
    return found


def _slack_of_halves(totals: Numbers, slack: tuple[int, ...]) -> tuple[int, ...]:
    """Return the slack of halves. It adds up over the levels, so it is little; of a few a half may have one more."""
    least = [0 if total <= 0 else -(-2000 * (1 - total // -2) // total) - 1000 for total in totals.tolist()]
    return tuple(max(min(of, MOST_OF_HALVES), one) for of, one in zip(slack, least, strict=True))


def _parts(graph: _Subgraph, parts: int, slack: tuple[int, ...], seed: int) -> Numbers:
    """Return the part of each vertex (V,), as METIS cuts the graph. Ends the process if METIS cannot."""
    import pymetis

    integer = np.dtype(pymetis.zero_copy_dtype())
    limit, size = np.iinfo(integer).max, graph.vertex_weights.shape[0]
    if max(graph.indices.size, int(graph.vertex_weights.sum(0).max())) > limit:
        sys.exit(
            f"this build of METIS can count to {limit:,} only, which is too few for the graph; pip install -U pymetis"
        )
    set_defaults, partition, places = _functions()
    options = np.empty(40, integer)  # METIS_NOPTIONS; METIS's versions number them differently, pymetis knows its own
    set_defaults(_address(options))
    options[places[0]] = seed
    if len(slack) > 1:
        options[places[1]] = CUTS
    most = np.array([1 + thousandths / 1000 for thousandths in slack], np.float32)
    # None: what a vertex weighs when it is sent
    given = (graph.indptr, graph.indices, graph.vertex_weights, None, graph.edge_weights)
    arrays = [None if array is None else array.astype(integer, copy=False) for array in given]
    sizes = np.array([size, len(slack), parts, 0], integer)
    vertices, constraints, num_parts, cut_edges = (_address(sizes[k:]) for k in range(4))
    part = np.empty(size, integer)
    rest = (num_parts, None, _address(most), _address(options), cut_edges, _address(part))  # None: parts weigh alike
    code = partition(vertices, constraints, *map(_address, arrays), *rest)
    if code != 1:  # METIS_OK
        sys.exit(f"METIS returned {code}")
    return part.astype(np.int64, copy=False)


def _functions() -> tuple[Callable[..., int], Callable[..., int], tuple[int, int]]:
    """Return METIS_SetDefaultOptions and METIS_PartGraphKway of the library that pymetis brings, and where options hold the
    seed and the number of cuts.
    """
    import pymetis

    try:
        from pymetis import _internal as extension
        from pymetis._internal import options_indices  # type: ignore[attr-defined]  # pymetis's stubs lack it

        library = ctypes.CDLL(extension.__file__)
        places = int(options_indices.SEED), int(options_indices.NCUTS)
        return library.METIS_SetDefaultOptions, library.METIS_PartGraphKway, places
    except (ImportError, OSError, AttributeError) as error:
        print(f"METIS in pymetis {pymetis.version} cannot be called ({error}); pip install -U pymetis")
        sys.exit(UNUSABLE)


def _address(array: npt.NDArray[Any] | None) -> ctypes.c_void_p:
    """Return where an array begins, for C; NULL for none."""
    return ctypes.c_void_p(None if array is None else array.ctypes.data)


def _solve_told(
    fd: int, n: int, entries: int, has_weights: int, num_parts: int, seed: int, halvings: int, *slack: int
) -> None:
    """As the parent's command line says."""
    _solve_here(_mapped(fd, n, entries, bool(has_weights), slack), num_parts, seed, halvings)


if __name__ == "__main__":
    die_with_parent(os.getppid())  # nobody needs the result any more
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to both; the parent ends this one
    _solve_told(*map(int, sys.argv[1:]))
