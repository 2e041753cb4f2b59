"""Runs your own function on ranks: one rank, P threads of this process, P processes, or the processes of torchrun."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable
from typing import Any, TypeVar

from mggcn.assemble.rank import gpu_of_rank
from mggcn.comm.base import Communicator
from mggcn.comm.failure import Interrupted
from mggcn.comm.rank import torchrun_env, torchrun_main
from mggcn.errors import ConfigError, GraphError, MggcnError
from mggcn.graph.csr import Graph
from mggcn.nn.partitioned import DeviceOf, PartitionedGraph, on_rank
from mggcn.nn.processes import run_processes
from mggcn.nn.sharing import Sharing, share
from mggcn.runs.local import on_threads

T = TypeVar("T")
TRANSPORTS = ("auto", "single", "threads", "gloo", "nccl")


def run(
    body: Callable[[PartitionedGraph], T],
    graph: Graph,
    *,
    ranks: int = 1,
    transport: str = "auto",
    timeout_s: float = 600.0,
    device_of: DeviceOf = gpu_of_rank,
    **sharing: Any,
) -> list[T]:
    """Share out a graph, call `body` on every rank with its part, and return what the calls returned, in rank order.

    Under torchrun each of its processes makes this call and is one of its ranks, whatever `ranks` says; the list then
    holds that rank's result alone. The first error of any rank is raised, and the others stop within seconds.

    Args:
        body: Function of a `PartitionedGraph`.
        graph: A graph from `mggcn.load`.
        ranks: Number of ranks P.
        transport: "auto" and "threads" take threads of this process; "gloo" (CPUs) and "nccl" (a GPU each) start processes,
            for which body and what it returns must be picklable, and a calling script guarded by
            `if __name__ == "__main__":`; from a notebook or standard input they need the package cloudpickle.
        timeout_s: Seconds that a rank waits for the others in a call.
        device_of: Device that serves a rank on a GPU, for tests.
        **sharing: Fields of `Sharing`: strategy, order, norm, self_loops, precision, device, threads, seed.

    Raises:
        ConfigError: A setting is unknown or does not fit.
        GraphError: `graph` is not a graph, or is malformed.

    Examples:
        >>> graph = mggcn.load(np.array([[0, 1, 2], [1, 2, 0]]))
        >>> mggcn.nn.run(lambda part: part.num_rows, graph, ranks=3)
        [1, 1, 1]
    """
    if not isinstance(graph, Graph):
        raise GraphError(f"expected a graph from mggcn.load(...), got {type(graph).__name__}")
    if transport not in TRANSPORTS:
        raise ConfigError(f"transport must be one of {', '.join(TRANSPORTS)}, got {transport!r}")
    settings = _settings(sharing)
    if (found := torchrun_env()) is not None:
        return [_under_torchrun(body, graph, settings, found[1], transport, timeout_s, device_of)]
    if ranks > 1 and transport in ("gloo", "nccl"):
        try:
            return run_processes(body, graph, settings, ranks, transport, timeout_s)
        except Interrupted as stop:
            signal.raise_signal(stop.signum)  # now that no rank is left, it does here what it did before
            raise
    local = "single" if ranks == 1 else "threads"
    shared = share(graph, settings, ranks, local if transport == "auto" else transport)
    config = dataclasses.replace(shared.config, run=dataclasses.replace(shared.config.run, timeout_s=timeout_s))
    return on_threads(config, lambda comm: on_rank(body, shared, comm, device_of))


def _settings(sharing: dict[str, Any]) -> Sharing:
    known = Sharing.__dataclass_fields__
    if unknown := sorted(sharing.keys() - known.keys()):
        raise ConfigError(f"unknown setting {unknown[0]!r}; known are {', '.join(known)}")
    return Sharing(**sharing)


def _under_torchrun(
    body: Callable[[PartitionedGraph], T],
    graph: Graph,
    settings: Sharing,
    size: int,
    transport: str,
    timeout_s: float,
    device_of: DeviceOf,
) -> T:
    """Join the ranks of this torchrun. If any rank fails, this call reports the failure and ends the process."""
    if transport in ("auto", "threads", "single"):
        transport = settings.config(size, "auto").run.process_transport
    results: list[T] = []

    def work(comm: Communicator) -> None:
        results.append(on_rank(body, share(graph, settings, size, transport), comm, device_of))

    code = torchrun_main(timeout_s, work, transport)
    if code or not results:
        raise MggcnError(f"the ranks of torchrun exited with code {code}")
    return results[0]
