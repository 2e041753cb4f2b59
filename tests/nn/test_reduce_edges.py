"""The aggregation primitive and its gradients against float64, wherever kernels run."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mggcn.nn import DeviceGraph, reduce_edges
from mggcn.nn.reduce_edges import OPS
from tests.backend.edges import BY_NAME, EDGE_CASES, EdgeCase
from tests.devices import CPU, WHERE, Where
from tests.nn.graphs import device_graph, expected, numbers, options

REDUCERS = ("sum", "max", "min")
OFS = ("source", "destination", "edge")
SHUFFLED = EDGE_CASES[5]
"""Repeated edges in an order of the user's."""
TYPES = [torch.float64, torch.float32]


def check(
    graph: DeviceGraph,
    case: EdgeCase,
    call: dict[str, Any],
    tables: dict[str, Tensor],
    dtype: torch.dtype = torch.float64,
    rtol: float | None = None,
) -> None:
    """Compare result and gradients of one call with the reference on the numbers as rounded to the type."""
    ours = {name: x.to(graph.device, dtype, copy=True).requires_grad_() for name, x in tables.items()}
    theirs = {name: x.detach().cpu().double().requires_grad_() for name, x in ours.items()}
    z = reduce_edges(graph, call["op"], call["reducer"], **ours, lhs_of=call["lhs_of"], rhs_of=call["rhs_of"])
    wanted = expected(
        case, call["op"], call["reducer"], theirs.get("lhs"), theirs.get("rhs"), call["lhs_of"], call["rhs_of"]
    )
    assert z.dtype == dtype
    exact = rtol or {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2.0**-7}[dtype]
    close = {"rtol": exact, "atol": 20 * exact}
    torch.testing.assert_close(z.detach().cpu().double(), wanted.detach().reshape(z.shape), **close)
    g = torch.from_numpy(np.random.default_rng(3).normal(size=wanted.shape))
    rounded = g.to(graph.device, dtype)
    z.backward(rounded.reshape(z.shape))
    wanted.backward(rounded.cpu().double())
    for name, x in ours.items():
        if x.grad is None:
            assert theirs[name].grad is None, name
            continue
        assert x.grad.shape == x.shape
        grad = theirs[name].grad
        torch.testing.assert_close(
            x.grad.cpu().double(), torch.zeros_like(theirs[name]) if grad is None else grad, **close
        )


def calls(op: str, reducer: str) -> list[dict[str, Any]]:
    """A call for every pair of targets that the op reads."""
    found = []
    for lhs_of, rhs_of in itertools.product(OFS, OFS):
        if (op == "copylhs" and rhs_of != "edge") or (op == "copyrhs" and lhs_of != "source"):
            continue
        found.append({"op": op, "reducer": reducer, "lhs_of": lhs_of, "rhs_of": rhs_of})
    return found


def tables_of(case: EdgeCase, call: dict[str, Any], widths: tuple[int | None, int | None]) -> dict[str, Tensor]:
    sides = {"copylhs": ("lhs",), "copyrhs": ("rhs",)}.get(call["op"], ("lhs", "rhs"))
    both = zip(("lhs", "rhs"), widths, strict=True)
    return {side: numbers(case, call[f"{side}_of"], w, 17 + i) for i, (side, w) in enumerate(both) if side in sides}


@pytest.mark.covering(1)
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("reducer", REDUCERS)
@pytest.mark.parametrize("op", OPS)
def test_every_op_reducer_target_and_width(where: Where, op: str, reducer: str) -> None:
    """Fails if a result or a gradient of any of the 18 pairs is wrong, for any targets, or broadcast in any way."""
    graph = device_graph(SHUFFLED, where)
    for number, call in enumerate(calls(op, reducer)):
        every = [(3, 3), (17, 1), (1, 17), (None, 5), (5, None), (None, None), (1, 1)]
        # Each pair of targets with three of the pairs of widths; under the emulator, which is slow, with one.
        for offset in (0, 2, 4) if where is CPU else (0,):
            widths = every[(number + offset) % len(every)]
            check(graph, SHUFFLED, call, tables_of(SHUFFLED, call, widths))


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("case", EDGE_CASES, **BY_NAME)
def test_every_graph(where: Where, case: EdgeCase) -> None:
    """Fails if a hub, an isolated vertex, a self-loop, a repeated edge or a graph without edges breaks a gradient."""
    graph = device_graph(case, where)
    for op, reducer in (("mul", "sum"), ("sub", "max"), ("copylhs", "min"), ("copylhs", "sum")):
        call = {"op": op, "reducer": reducer, "lhs_of": "source", "rhs_of": "edge"}
        for widths in ((9, 1), (9, 9)):
            check(graph, case, call, tables_of(case, call, widths))


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("dtype", TYPES)
def test_types(where: Where, dtype: torch.dtype) -> None:
    """Fails if a storage type takes another's kernels or loses its precision."""
    case = EDGE_CASES[1]
    graph = device_graph(case, where)
    for op, reducer in itertools.product(("mul", "div", "copyrhs"), REDUCERS):
        call = {"op": op, "reducer": reducer, "lhs_of": "source", "rhs_of": "edge"}
        check(graph, case, call, tables_of(case, call, (8, 8)), dtype)


@pytest.mark.parametrize("where", WHERE[1:])
def test_bfloat16_on_a_gpu(where: Where) -> None:
    """Fails if bfloat16 is summed in bfloat16, or its weighted product reads weights of another type."""
    case = EDGE_CASES[1]
    graph = device_graph(case, where)
    for op, reducer, width in (("mul", "sum", 1), ("copylhs", "sum", 8), ("add", "max", 8)):
        call = {"op": op, "reducer": reducer, "lhs_of": "source", "rhs_of": "edge"}
        # The gradient of a weight sums products of all columns: rounded once, at its end.
        check(graph, case, call, tables_of(case, call, (8, width)), torch.bfloat16)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("width", [1, 8, 41])
def test_sums_of_copied_rows_in_bfloat16(where: Where, width: int) -> None:
    """Fails if a plain sum over neighbours, or its gradient, is refused in bfloat16 or rounded more than once."""
    case = EDGE_CASES[1]
    call = {"op": "copylhs", "reducer": "sum", "lhs_of": "source", "rhs_of": "edge"}
    check(device_graph(case, where), case, call, tables_of(case, call, (width, width)), torch.bfloat16)


@pytest.mark.parametrize("reducer", REDUCERS)
@pytest.mark.parametrize("op", OPS)
def test_gradients_are_those_of_finite_differences(op: str, reducer: str) -> None:
    """Fails if a gradient is not the derivative of what the forward pass computes."""
    source, destination = np.array([[1, 2, 2, 5, 0, 1, 4, 4], [0, 0, 0, 0, 1, 3, 3, 4]])
    case = EdgeCase("tiny", 6, source, destination)
    graph = device_graph(case, CPU)
    for call in calls(op, reducer)[:3]:
        tables = {name: x.requires_grad_() for name, x in tables_of(case, call, (2, 1)).items()}

        def function(*values: Tensor, call: dict[str, Any] = call, names: tuple[str, ...] = tuple(tables)) -> Tensor:
            given = dict(zip(names, values, strict=True))
            return reduce_edges(graph, **call, **given)

        assert torch.autograd.gradcheck(function, tuple(tables.values()), eps=1e-7, atol=1e-6)


@pytest.mark.parametrize("where", WHERE)
def test_operands_that_are_views(where: Where) -> None:
    """Fails if strides are taken for granted: transposed, sliced, expanded, and a gradient that is a single number."""
    case = SHUFFLED
    graph = device_graph(case, where)
    n, e = case.num_vertices, case.num_edges
    x, w = numbers(case, "source", 12, 1).to(graph.device), numbers(case, "edge", 12, 2).to(graph.device)
    views = {
        "sliced": (x[:, 3:10], w[:, 5:12]),
        "transposed": (x.t().contiguous().t(), w.t().contiguous().t()),
        "every other": (x[:, ::2], w[:, ::2]),
        "expanded": (x[:1].expand(n, 12), w[:, :1].expand(e, 12)),
        "one column": (x[:, 4:5], w[:, 7:8]),
    }
    for name, (lhs, rhs) in views.items():
        for op, reducer in (("mul", "sum"), ("add", "max"), ("copylhs", "sum"), ("copyrhs", "min")):
            call = {"op": op, "reducer": reducer, "lhs_of": "source", "rhs_of": "edge"}
            ours = [t.detach().requires_grad_() for t in (lhs, rhs)]
            theirs = [t.detach().cpu().requires_grad_() for t in (lhs, rhs)]
            z = reduce_edges(graph, op, reducer, *ours)  # type: ignore[arg-type]
            wanted = expected(case, **call, lhs=theirs[0], rhs=theirs[1])
            torch.testing.assert_close(z.detach().cpu(), wanted.detach(), msg=name)
            z.sum().backward()  # its gradient is one number, expanded
            wanted.sum().backward()
            for a, b in zip(ours, theirs, strict=True):
                assert (a.grad is None) == (b.grad is None)
                if a.grad is not None and b.grad is not None:
                    torch.testing.assert_close(a.grad.cpu(), b.grad, msg=name)


@pytest.mark.parametrize("where", WHERE)
def test_one_tensor_as_both_operands(where: Where) -> None:
    """Fails if the gradients by source and destination of one tensor are not added, as in attention or distances."""
    case = EDGE_CASES[4]
    graph = device_graph(case, where)
    x = numbers(case, "source", 6, 8)
    ours, theirs = x.to(graph.device, copy=True).requires_grad_(), x.clone().requires_grad_()
    (reduce_edges(graph, "sub", "max", ours, ours, rhs_of="destination") ** 2).sum().backward()
    (expected(case, "sub", "max", theirs, theirs, "source", "destination") ** 2).sum().backward()
    torch.testing.assert_close(ours.grad.cpu(), theirs.grad)  # type: ignore[union-attr]


@pytest.mark.parametrize("where", WHERE)
def test_edge_softmax_of_primitives(where: Where) -> None:
    """Fails if primitives do not compose: attention over in-edges, with vectors of scores, sums to one."""
    case = SHUFFLED
    graph = device_graph(case, where)
    _, destination = graph.edges()
    score = numbers(case, "edge", None, 4).to(graph.device).requires_grad_()
    top = reduce_edges(graph, "copyrhs", "max", rhs=score)
    weight = torch.exp(score - top[destination])
    total = reduce_edges(graph, "copyrhs", "sum", rhs=weight)
    attention = weight / total[destination]
    sums = reduce_edges(graph, "copyrhs", "sum", rhs=attention)
    degree = torch.bincount(destination, minlength=case.num_vertices)
    torch.testing.assert_close(sums, (degree > 0).to(sums.dtype))
    x = numbers(case, "source", 5, 6).to(graph.device)
    (reduce_edges(graph, "mul", "sum", x, attention) ** 2).sum().backward()
    # A softmax does not change if all scores of a vertex move together.
    grad = reduce_edges(graph, "copyrhs", "sum", rhs=score.grad)
    torch.testing.assert_close(grad, torch.zeros_like(grad), atol=1e-10, rtol=0)


@pytest.mark.parametrize("where", WHERE)
def test_ties_and_not_finite_values(where: Where) -> None:
    """Fails if the gradient of a tie is not the first edge's, NaN is lost, or 0 * inf reaches the gradient of a loser."""
    # Vertex 0: two equal edges; 1: NaN behind a number; 2: -inf alone; 3: nothing; 4: -inf loses.
    edges = np.array([[1, 2, 3, 2, 3, 0, 2], [0, 0, 1, 1, 2, 4, 4]])
    graph = DeviceGraph.from_edges(edges, num_vertices=5, **options(where))
    nan, inf = float("nan"), float("inf")
    w = torch.tensor([[5.0], [5.0], [nan], [9.0], [-inf], [-inf], [1.0]], dtype=torch.float64)
    w = w.to(graph.device).requires_grad_()
    z = reduce_edges(graph, "copyrhs", "max", rhs=w)
    assert torch.equal(z.cpu().nan_to_num(nan=77.0, neginf=-88.0), torch.tensor([[5], [77], [-88], [0], [1]]).double())
    z.backward(torch.ones_like(z))
    assert w.grad is not None
    assert w.grad.flatten().tolist() == [1, 0, 1, 0, 1, 0, 1]
    x = torch.ones(5, 1, dtype=torch.float64, device=graph.device).requires_grad_()
    reduce_edges(graph, "mul", "max", x, torch.where(w.isnan(), 2.0, w).detach()).sum().backward()
    assert x.grad is not None
    assert x.grad.flatten().tolist() == [0, 5, 10, -inf, 0]
    broken = x.detach().clone()
    broken[3] = nan
    assert reduce_edges(graph, "copylhs", "sum", broken).isnan().flatten().tolist() == [False, True, True, False, False]
