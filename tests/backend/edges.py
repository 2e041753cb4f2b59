"""Graphs for passes over edges, repeated edges and self-loops among them, and what the passes must give, in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mggcn.backend.base import KernelBackend
from mggcn.backend.edges import EdgeRows, Of, Op, Partial, Reducer

Array = np.ndarray


@dataclass(frozen=True)
class EdgeCase:
    """Edges sorted by destination; edge_ids permutes the rows of their operands, or is None."""

    name: str
    num_vertices: int
    source: Array
    destination: Array
    edge_ids: Array | None = None

    @property
    def num_edges(self) -> int:
        return len(self.source)

    @property
    def ids(self) -> Array:
        """The row of an edge operand that each edge reads."""
        return np.arange(self.num_edges) if self.edge_ids is None else self.edge_ids

    def end(self, of: Of) -> Array:
        """The row of an operand of `of` that each edge reads."""
        return {"source": self.source, "destination": self.destination, "edge": self.ids}[of]

    def num_rows(self, of: Of) -> int:
        return self.num_edges if of == "edge" else self.num_vertices

    @property
    def starts(self) -> Array:
        return np.searchsorted(self.destination, np.arange(self.num_vertices + 1)).astype(np.int64)

    @property
    def places(self) -> Array:
        """Place of each edge in its destination's row."""
        return np.arange(self.num_edges) - self.starts[self.destination] if self.num_edges else np.zeros(0, np.int64)

    def by_destination(self, backend: KernelBackend) -> EdgeRows:
        matrix = backend.sparse(self.starts, self.source.astype(np.int32), None)
        return EdgeRows(matrix, edge_ids=self._ids(backend))

    def by_source(self, backend: KernelBackend) -> EdgeRows:
        order = np.argsort(self.source, kind="stable")
        indptr = np.searchsorted(self.source[order], np.arange(self.num_vertices + 1)).astype(np.int64)
        matrix = backend.sparse(indptr, self.destination[order].astype(np.int32), None)
        place = backend.upload(self.places[order].astype(np.int32))
        return EdgeRows(matrix, place, backend.upload(self.starts), self._ids(backend))

    def _ids(self, backend: KernelBackend) -> Any:
        return None if self.edge_ids is None else backend.upload(self.edge_ids.astype(np.int32))


def _sorted(name: str, n: int, source: Any, destination: Any, *, seed: int | None = None) -> EdgeCase:
    source, destination = np.asarray(source, np.int64), np.asarray(destination, np.int64)
    order = np.lexsort((source, destination))
    ids = None if seed is None else np.random.default_rng(seed).permutation(len(source))
    return EdgeCase(name, n, source[order], destination[order], ids)


def _battery() -> list[EdgeCase]:
    rng = np.random.default_rng(31907)
    n = 29
    some = rng.integers(0, n, (2, 150))
    loops = np.stack([np.arange(n), np.arange(n)])
    # Vertices 25 .. 28 are isolated; 24 has in-edges alone, 23 out-edges alone.
    sparse = np.stack([rng.integers(0, 24, 90), rng.choice(np.r_[0:23, 24], 90)])
    hub_in = np.concatenate([sparse, np.stack([rng.integers(0, n, 400), np.full(400, 7)])], axis=1)
    hub_out = hub_in[::-1]
    repeats = np.concatenate([some[:, :40]] * 3, axis=1)
    return [
        _sorted("random", n, *some),
        _sorted("isolated, user's order", n, *sparse, seed=5),
        _sorted("hub with many in-edges", n, *hub_in, seed=6),
        _sorted("hub with many out-edges", n, *hub_out),
        _sorted("self-loops", n, *np.concatenate([some, loops], axis=1)),
        _sorted("repeated edges, user's order", n, *repeats, seed=7),
        _sorted("path", n, np.arange(n - 1), np.arange(1, n)),
        _sorted("no edges", n, [], []),
        _sorted("one vertex", 1, [0, 0], [0, 0]),
    ]


EDGE_CASES = _battery()
BY_NAME = {"ids": lambda case: case.name.replace(" ", "-")}
PARALLEL = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}


def messages(op: Op, left: Array, right: Array | None) -> Array:
    """(E, D) from the rows that edges read."""
    with np.errstate(all="ignore"):
        return left if op == "copy" else PARALLEL[op](left, right)


def reduced(case: EdgeCase, reducer: Reducer, values: Array) -> tuple[Array, Array]:
    """Reduce messages at destinations; return the result and the winners' places, -1 without in-edges."""
    out = np.zeros((case.num_vertices, values.shape[1]))
    winners = np.full(out.shape, -1)
    with np.errstate(all="ignore"):
        for v in range(case.num_vertices):
            of_v = values[case.starts[v] : case.starts[v + 1]]
            if not len(of_v):
                continue
            if reducer == "sum":
                out[v] = of_v.sum(0)
            else:
                # NumPy's argmax and argmin name the first of equal values, and the first NaN.
                winners[v] = of_v.argmax(0) if reducer == "max" else of_v.argmin(0)
                out[v] = np.take_along_axis(of_v, winners[v][None], 0)[0]
    return out, winners


def gradient(
    case: EdgeCase,
    of: Of,
    partial: Partial,
    scale: float,
    g: Array,
    winners: Array | None,
    a: Array | None,
    b: Array | None,
) -> Array:
    """Gradient (rows of `of`, D); a and b are the rows (E, D) that edges read."""
    with np.errstate(all="ignore"):
        d = g[case.destination]
        if partial == "times":
            d = d * a
        elif partial == "over":
            d = d / a
        elif partial == "ratio":
            d = d * (a / b) / b  # type: ignore[operator]
    if winners is not None:
        d = np.where(winners[case.destination] == case.places[:, None], d, 0.0)
    out = np.zeros((case.num_rows(of), g.shape[1]))
    np.add.at(out, case.end(of), d)
    return scale * out
