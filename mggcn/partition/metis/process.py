"""METIS in a subprocess, because it replaces signal handlers, prints, ignores Ctrl-C and never frees its memory.

The graph and the result lie in memory that both processes share. N vertices, M entries.
"""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mggcn.errors import PlanError
from mggcn.host import die_with_parent, python

UFACTOR = 10
"""No part should weigh more than this many thousandths above the average, as Libra's parts do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Input and output of METIS, all int64 in shared memory; pages that are not touched cost nothing.

    indptr (N + 1,), indices (M,): an undirected graph without self-loops, M being at most `max_entries`; vertex_weights
    (N,); edge_weights (M,), None for ones; part (N,): the result.
    """

    descriptor: int
    num_vertices: int
    max_entries: int
    indptr: npt.NDArray[np.int64]
    vertex_weights: npt.NDArray[np.int64]
    part: npt.NDArray[np.int64]
    indices: npt.NDArray[np.int64]
    edge_weights: npt.NDArray[np.int64] | None


def new_problem(num_vertices: int, max_entries: int, *, weighted: bool) -> Problem:
    """Return an empty problem; its memory lives as long as its arrays and the descriptor, which the caller closes."""
    descriptor = os.memfd_create("mggcn-metis")
    os.ftruncate(descriptor, 8 * (3 * num_vertices + 1 + max_entries * (1 + weighted)))
    return _mapped(descriptor, num_vertices, max_entries, weighted)


def _mapped(descriptor: int, num_vertices: int, max_entries: int, weighted: bool) -> Problem:
    memory = np.frombuffer(mmap.mmap(descriptor, 0), np.int64)
    bounds = np.cumsum([num_vertices + 1, num_vertices, num_vertices, max_entries])
    indptr, vertex_weights, part, indices, rest = np.split(memory, bounds)
    edge_weights = rest if weighted else None
    return Problem(
        descriptor=descriptor,
        num_vertices=num_vertices,
        max_entries=max_entries,
        indptr=indptr,
        vertex_weights=vertex_weights,
        part=part,
        indices=indices,
        edge_weights=edge_weights,
    )


def solve(problem: Problem, parts: int, seed: int) -> None:
    """Fill in problem.part, by k-way partitioning that cuts few edges; P is 2 or more and below N.

    Raises: PlanError if METIS fails or is killed; the only known reason is a lack of memory.
    """
    numbers = (problem.descriptor, problem.num_vertices, problem.max_entries, problem.edge_weights is not None)
    command = [*python(__name__), *(str(int(number)) for number in (*numbers, parts, seed))]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, pass_fds=(problem.descriptor,)
    )
    if done.returncode:
        said = " ".join(" ".join([done.stdout, *done.stderr.splitlines()[-1:]]).split())[:400]
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"code {done.returncode}"
        raise PlanError(
            f"METIS exited with {how} and no partition, usually because it ran out of memory; use a larger machine or "
            f"--kind libra. Output: {said or 'nothing'}"
        )


def _solve_here(problem: Problem, parts: int, seed: int) -> None:
    import pymetis

    indices = problem.indices[: problem.indptr[-1]]
    weights = None if problem.edge_weights is None else problem.edge_weights[: indices.shape[0]]
    limit = np.iinfo(pymetis.zero_copy_dtype()).max
    if max(indices.shape[0], int(problem.vertex_weights.sum())) > limit:
        sys.exit(
            f"this build of METIS can count to {limit:,} only, which is too few for the graph; pip install -U pymetis"
        )
    found = pymetis.part_graph(
        parts,
        pymetis.CSRAdjacency(problem.indptr, indices),
        vweights=problem.vertex_weights,
        eweights=weights,
        recursive=False,
        options=pymetis.Options(seed=seed, ufactor=UFACTOR),
    )
    problem.part[:] = np.frombuffer(found.vertex_part, pymetis.zero_copy_dtype())


def _solve_told(fd: int, n: int, entries: int, has_weights: int, num_parts: int, seed: int) -> None:
    """As the parent's command line says."""
    _solve_here(_mapped(fd, n, entries, bool(has_weights)), num_parts, seed)


if __name__ == "__main__":
    die_with_parent(os.getppid())  # nobody needs the result any more
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to both; the parent ends this one
    _solve_told(*map(int, sys.argv[1:]))
