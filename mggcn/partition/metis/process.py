"""METIS in a subprocess, because it replaces signal handlers, prints, ignores Ctrl-C and never frees its memory.

It is called in the library that pymetis brings, whose own function knows one weight a vertex. The graph and the result lie
in memory that both processes share. N vertices, M entries, C constraints.
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

CUTS = 4
"""Partitions of which METIS takes the best if there are several constraints: the only one may cut twice the edges of
another (docs/notes/0010-metis.md)."""
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


def solve(problem: Problem, parts: int, seed: int) -> None:
    """Fill in problem.part, by k-way partitioning that cuts few edges; P is 2 or more and below N.

    Raises: PlanError if METIS fails or is killed; the only known reason is a lack of memory. BackendError if the library
    that pymetis brings cannot be called.
    """
    weighted = problem.edge_weights is not None
    numbers = (problem.descriptor, problem.num_vertices, problem.max_entries, weighted, parts, seed, *problem.slack)
    command = [*python(__name__), *(str(int(number)) for number in numbers)]
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


def _solve_here(problem: Problem, parts: int, seed: int) -> None:
    import pymetis

    integer = np.dtype(pymetis.zero_copy_dtype())
    indices = problem.indices[: problem.indptr[-1]]
    limit = np.iinfo(integer).max
    if max(indices.shape[0], int(problem.vertex_weights.sum(0).max())) > limit:
        sys.exit(
            f"this build of METIS can count to {limit:,} only, which is too few for the graph; pip install -U pymetis"
        )
    set_defaults, partition, places = _functions()
    options = np.empty(40, integer)  # METIS_NOPTIONS; METIS's versions number them differently, pymetis knows its own
    set_defaults(_address(options))
    options[places[0]] = seed
    if len(problem.slack) > 1:
        options[places[1]] = CUTS
    most = np.array([1 + thousandths / 1000 for thousandths in problem.slack], np.float32)
    edges = None if problem.edge_weights is None else problem.edge_weights[: indices.shape[0]]
    given = (problem.indptr, indices, problem.vertex_weights, None, edges)  # None: what a vertex weighs when it is sent
    arrays = [None if array is None else array.astype(integer, copy=False) for array in given]
    sizes = np.array([problem.num_vertices, len(problem.slack), parts, 0], integer)
    vertices, constraints, num_parts, cut_edges = (_address(sizes[k:]) for k in range(4))
    part = np.empty(problem.num_vertices, integer)
    rest = (num_parts, None, _address(most), _address(options), cut_edges, _address(part))  # None: parts weigh alike
    code = partition(vertices, constraints, *map(_address, arrays), *rest)
    if code != 1:  # METIS_OK
        sys.exit(f"METIS returned {code}")
    problem.part[:] = part


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


def _solve_told(fd: int, n: int, entries: int, has_weights: int, num_parts: int, seed: int, *slack: int) -> None:
    """As the parent's command line says."""
    _solve_here(_mapped(fd, n, entries, bool(has_weights), slack), num_parts, seed)


if __name__ == "__main__":
    die_with_parent(os.getppid())  # nobody needs the result any more
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to both; the parent ends this one
    _solve_told(*map(int, sys.argv[1:]))
