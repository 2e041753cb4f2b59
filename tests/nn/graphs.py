"""Device graphs for tests, wherever a test runs, and the primitive edge by edge in float64 by torch's own autograd."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from mggcn.nn import DeviceGraph
from tests.backend.edges import EdgeCase, reduced
from tests.devices import Where


def options(where: Where) -> dict[str, Any]:
    """What DeviceGraph takes so that its kernels run there."""
    if where.name != "emulated":
        return {"device": where.device}
    from tests.backend.emulated import emulated_backend

    return {"backend_of": lambda dtype, cols: emulated_backend(dtype, 11)}


def given_order(case: EdgeCase) -> np.ndarray:
    """Edges (2, E) in the order in which their operands lie."""
    pairs = np.empty((2, case.num_edges), np.int64)
    pairs[:, case.ids] = case.source, case.destination
    return pairs


def device_graph(case: EdgeCase, where: Where) -> DeviceGraph:
    return DeviceGraph.from_edges(given_order(case), num_vertices=case.num_vertices, **options(where))


def edge_order(case: EdgeCase) -> EdgeCase:
    """The case as DeviceGraph.from_edges sorts it: repeated edges in the order in which they were given."""
    source, destination = given_order(case)
    order = np.lexsort((np.arange(case.num_edges), source, destination))
    return EdgeCase(case.name, case.num_vertices, source[order], destination[order], order)


def expected(
    case: EdgeCase, op: str, reducer: Any, lhs: Tensor | None, rhs: Tensor | None, lhs_of: Any, rhs_of: Any
) -> Tensor:
    """The result in float64, differentiable; maxima and minima are those that NumPy names."""
    case = edge_order(case)

    def read(x: Tensor, of: Any) -> Tensor:
        return (x if x.dim() == 2 else x[:, None])[torch.from_numpy(np.ascontiguousarray(case.end(of)))]

    if op == "copylhs":
        values = read(lhs, lhs_of)  # type: ignore[arg-type]
    elif op == "copyrhs":
        values = read(rhs, rhs_of)  # type: ignore[arg-type]
    else:
        values = getattr(torch, op)(read(lhs, lhs_of), read(rhs, rhs_of))  # type: ignore[arg-type]
    z = torch.zeros(case.num_vertices, values.shape[1], dtype=values.dtype)
    if reducer == "sum":
        return z.index_add(0, torch.from_numpy(case.destination), values)
    winners = torch.from_numpy(reduced(case, reducer, values.detach().numpy())[1])
    if not case.num_edges:
        return z + values.sum()
    edges = torch.from_numpy(case.starts[:-1])[:, None] + winners.clamp(min=0)
    taken = values.gather(0, edges.clamp(max=case.num_edges - 1))
    return torch.where(winners >= 0, taken, z)


def numbers(case: EdgeCase, of: str, width: int | None, seed: int) -> Tensor:
    """Random float64 away from 0, (rows, width) or a vector."""
    rows = case.num_edges if of == "edge" else case.num_vertices
    rng = np.random.default_rng(seed)
    shape = (rows,) if width is None else (rows, width)
    return torch.from_numpy(rng.choice([-1.0, 1.0], shape) * (0.5 + rng.random(shape)))
