"""The aggregation primitive as a torch function: which kernels it takes, what it keeps, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mggcn.errors import BackendError, ConfigError, GraphError, MggcnError
from mggcn.nn import DeviceGraph, reduce_edges
from tests.backend.edges import EDGE_CASES
from tests.devices import CPU
from tests.nn.graphs import device_graph, numbers

REDUCERS = ("sum", "max", "min")


def test_sums_are_products_and_equal_the_kernel() -> None:
    """Fails if the fast path of a sum differs from the pass over edges, or is not taken."""
    case = EDGE_CASES[2]
    graph = device_graph(case, CPU)
    x, w = numbers(case, "source", 33, 1), numbers(case, "edge", 1, 2)
    kernels = graph.backend(torch.float64, 33)
    taken: list[str] = []

    class Watched:
        def __getattr__(self, name: str) -> Any:
            taken.append(name)
            return getattr(kernels, name)

    watched = device_graph(case, CPU)
    watched._backend_of = lambda dtype, cols: Watched()  # type: ignore[assignment,return-value]
    wide = w.expand(-1, 33).contiguous()
    for fast, slow in (
        (reduce_edges(watched, "copylhs", "sum", x), reduce_edges(graph, "mul", "sum", x, torch.ones_like(wide))),
        (reduce_edges(watched, "mul", "sum", x, w), reduce_edges(graph, "mul", "sum", x, wide)),
        (
            reduce_edges(watched, "mul", "sum", w, x, lhs_of="edge", rhs_of="source"),
            reduce_edges(graph, "mul", "sum", wide, x, lhs_of="edge", rhs_of="source"),
        ),
    ):
        torch.testing.assert_close(fast, slow)
    assert taken.count("spmm") == 3
    assert "edges" not in taken


def test_second_derivatives_are_refused() -> None:
    """Fails if a second derivative is silently wrong: also where the first gradient does not depend on g alone."""
    graph = device_graph(EDGE_CASES[0], CPU)
    x, w = (numbers(EDGE_CASES[0], of, 3, 5).requires_grad_() for of in ("source", "edge"))
    z = reduce_edges(graph, "mul", "sum", x, w)
    (grad,) = torch.autograd.grad(z.sum(), x, create_graph=True)
    with pytest.raises(BackendError, match="second derivative"):
        grad.sum().backward()
    (again,) = torch.autograd.grad(reduce_edges(graph, "mul", "sum", x, w).sum(), x)
    assert torch.equal(grad.detach(), again)


def test_only_what_is_needed_is_kept() -> None:
    """Fails if operands or winners are kept for gradients that nobody asks for."""
    graph = device_graph(EDGE_CASES[0], CPU)
    x, w = (numbers(EDGE_CASES[0], of, 3, 5) for of in ("source", "edge"))
    kept: list[tuple[int, ...]] = []

    def keep(t: Tensor) -> Tensor:
        kept.append(tuple(t.shape))
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        for op, needs, expected_shapes in (
            ("mul", (True, False), [w.shape]),
            ("add", (True, True), []),
            ("div", (True, False), [w.shape]),
            ("div", (False, True), [x.shape, w.shape]),
        ):
            kept.clear()
            reduce_edges(graph, op, "sum", x.requires_grad_(needs[0]), w.requires_grad_(needs[1]))  # type: ignore[arg-type]
            assert kept == [tuple(s) for s in expected_shapes]
        kept.clear()
        assert not reduce_edges(graph, "add", "max", x.detach(), w.detach()).requires_grad
        assert kept == []


def test_operands_changed_in_between_are_seen() -> None:
    """Fails if the gradient is silently computed from an operand that was overwritten after the forward pass."""
    graph = device_graph(EDGE_CASES[0], CPU)
    x, w = (numbers(EDGE_CASES[0], of, 3, 5) for of in ("source", "edge"))
    z = reduce_edges(graph, "mul", "sum", x.requires_grad_(), w)
    w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_the_same_bits_for_any_number_of_threads() -> None:
    """Fails if results or gradients depend on the number of threads."""
    case = EDGE_CASES[2]
    found = []
    for threads in (1, 2, 2):
        graph = DeviceGraph.from_edges(np.stack([case.source, case.destination]), num_vertices=29, threads=threads)
        x, w = (numbers(case, of, 19, 5).float().requires_grad_() for of in ("source", "edge"))
        for reducer in REDUCERS:
            reduce_edges(graph, "mul", reducer, x, w).pow(2).sum().backward()  # type: ignore[arg-type]
        found.append((x.grad, w.grad))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))  # type: ignore[arg-type]


def test_no_columns() -> None:
    """Fails if tables without columns crash, or their gradients are garbage."""
    graph = device_graph(EDGE_CASES[0], CPU)
    x, w = numbers(EDGE_CASES[0], "source", 0, 5), numbers(EDGE_CASES[0], "edge", 1, 5)
    z = reduce_edges(graph, "mul", "max", x.requires_grad_(), w.requires_grad_())
    z.sum().backward()
    assert z.shape == (29, 0)
    assert w.grad is not None
    assert not w.grad.any()


X, W = torch.ones(29, 4), torch.ones(150, 4)
REFUSED: dict[str, tuple[type[MggcnError], str, dict[str, Any]]] = {
    "op": (ConfigError, "op must be one of add, sub.*'dot'", {"op": "dot"}),
    "reducer": (ConfigError, "reducer must be one of sum, max, min, got 'mean'", {"reducer": "mean"}),
    "target": (ConfigError, "lhs_of must be one of source", {"lhs_of": "u"}),
    "missing": (GraphError, "mul reads rhs, which must be a dense tensor, got NoneType", {"rhs": None}),
    "array": (GraphError, "dense tensor, got ndarray", {"lhs": X.numpy()}),
    "sparse": (GraphError, "dense tensor, got torch.sparse", {"lhs": X.to_sparse()}),
    "rows": (GraphError, r"rhs is of the edge: expected \(150,\) or \(150, D\), got \(29, 4\)", {"rhs": X}),
    "rows of a target": (GraphError, r"rhs is of the source: expected \(29,\)", {"rhs_of": "source"}),
    "three dimensions": (GraphError, r"lhs is of the source: expected .* got \(29, 2, 2\)", {"lhs": X.view(29, 2, 2)}),
    "number": (GraphError, r"expected .* got \(\)", {"lhs": torch.tensor(1.0)}),
    "widths": (GraphError, "lhs has 4 columns, rhs 3; expected equal widths, or 1", {"rhs": W[:, :3]}),
    "types": (GraphError, "lhs is torch.float32, rhs torch.float64; convert", {"rhs": W.double()}),
    "half": (BackendError, "float32, float64, bfloat16, got float16", {"lhs": X.half(), "rhs": W.half()}),
    "bfloat16 on a CPU": (BackendError, "got bfloat16; convert", {"lhs": X.bfloat16(), "rhs": W.bfloat16()}),
    "integers": (BackendError, "got int64; convert", {"lhs": X.long(), "rhs": W.long()}),
    "complex": (BackendError, "got complex64", {"lhs": X.cfloat(), "rhs": W.cfloat()}),
    "device": (GraphError, "lhs is on meta, the graph on cpu", {"lhs": X.to("meta")}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name: str) -> None:
    """Fails if bad input gets through to a kernel, or its message does not say what was expected and what came."""
    error, message, change = REFUSED[name]
    graph = device_graph(EDGE_CASES[0], CPU)
    call: dict[str, Any] = {"op": "mul", "reducer": "sum", "lhs": X, "rhs": W} | change
    with pytest.raises(error, match=message):
        reduce_edges(graph, call.pop("op"), call.pop("reducer"), **call)
