"""Ranks as processes of this machine that run a function of a user's script, each on its part of a graph."""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from mggcn.comm.base import Communicator
from mggcn.comm.call import call_ranks
from mggcn.errors import ConfigError
from mggcn.files import temporary_folder
from mggcn.graph.csr import Graph
from mggcn.graph.store import open_store, store_folder
from mggcn.graph.store_write import write_store
from mggcn.nn.partitioned import PartitionedGraph, on_rank
from mggcn.nn.sharing import Sharing, share

T = TypeVar("T")


def run_processes(
    body: Callable[[PartitionedGraph], T],
    graph: Graph,
    sharing: Sharing,
    ranks: int,
    transport: str,
    timeout_s: float,
    poll: Callable[[], None] | None = None,
) -> list[T]:
    """Call `body` on each of P processes with its part of the graph; see run.run.

    Cost: a graph in memory is written to a temporary store; each process imports torch, some seconds.
    Raises: as `call_ranks`, which says what poll is; Interrupted after a signal, once the ranks have ended.
    """
    with temporary_folder() as folder:
        store = store_folder(graph)
        if store is None:
            store = folder / "graph"
            write_store(graph, store)
        work = functools.partial(_work, body, store, sharing, ranks, transport)
        return [pickle.loads(result) for result in call_ranks(work, ranks, folder, transport, timeout_s, poll)]


def _work(
    body: Callable[[PartitionedGraph], Any],
    store: Path,
    sharing: Sharing,
    size: int,
    transport: str,
    comm: Communicator,
) -> bytes:
    """Do the work of a rank, and return its packed result."""
    return _packed(on_rank(body, share(open_store(store), sharing, size, transport), comm))


class _ByValue(pickle.Pickler):
    """Pickles only the visible part of a tensor that is a view of a larger one."""

    def reducer_override(self, found: Any) -> Any:
        if type(found) is torch.Tensor and found.layout == torch.strided:
            if found.untyped_storage().nbytes() > found.numel() * found.itemsize:
                return found.detach().clone().requires_grad_(found.requires_grad).__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def _packed(result: Any) -> bytes:
    """Pickle a result by value: torch would send tensors as handles to the memory of this process, which is about to
    end.
    """
    packed = io.BytesIO()
    try:
        _ByValue(packed, pickle.HIGHEST_PROTOCOL).dump(result)
        return packed.getvalue()
    except (pickle.PicklingError, AttributeError, TypeError) as error:  # pickle raises all of them
        raise ConfigError(
            f"body runs in rank processes, so it must return something picklable: tensors, arrays, numbers ({error}); or "
            "use transport='threads'"
        ) from error
