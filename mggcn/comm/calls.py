"""One collective call of a rank, in a form that ranks can exchange and compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Final

import torch
from torch import Tensor

from mggcn.errors import CommError

OPS: Final = ("broadcast", "all_reduce", "all_to_all", "barrier")
DTYPES: Final = (torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One collective as one rank sees it; `count` is elements in all, for an all_to_all elements per row."""

    op: str
    dtype: torch.dtype = torch.int64
    count: int = 0
    root: int = 0
    sends: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.op == "barrier":
            return "barrier"
        origin = f" from rank {self.root}" if self.op == "broadcast" else ""
        rows = "rows of " if self.op == "all_to_all" else ""
        return f"{self.op} of {rows}{self.count} x {str(self.dtype).removeprefix('torch.')}{origin}"

    def encode(self, size: int) -> list[int]:
        """The call as 4 + 2 `size` integers."""
        none = (0,) * size
        head = [OPS.index(self.op), DTYPES.index(self.dtype), self.count, self.root]
        return [*head, *(self.sends or none), *(self.receives or none)]

    @staticmethod
    def decode(code: Sequence[int]) -> Call:
        """Invert `encode`."""
        op, dtype, count, root, *rows = code
        half = len(rows) // 2
        if OPS[op] != "all_to_all":
            rows, half = [], 0
        return Call(
            op=OPS[op],
            dtype=DTYPES[dtype],
            count=count,
            root=root,
            sends=tuple(rows[:half]),
            receives=tuple(rows[half:]),
        )


def broadcast_call(buf: Tensor, root: int, size: int) -> Call:
    """Describe a broadcast of `buf`. Raises: CommError if no transport can carry it or no rank has the number `root`."""
    _check_buffer(buf)
    if not 0 <= root < size:
        raise CommError(f"broadcast from rank {root}: expected a rank in [0, {size})")
    return Call(op="broadcast", dtype=buf.dtype, count=buf.numel(), root=root)


def all_reduce_call(buf: Tensor) -> Call:
    """Describe an all_reduce of `buf`. Raises: CommError if no transport can carry it."""
    _check_buffer(buf)
    return Call(op="all_reduce", dtype=buf.dtype, count=buf.numel())


def all_to_all_call(out: Tensor, buf: Tensor, out_rows: Sequence[int], buf_rows: Sequence[int], size: int) -> Call:
    """Describe an all_to_all. Raises: CommError if the row counts do not cover `out` and `buf`, or the two differ in
    dtype, device or row length.
    """
    for name, tensor, rows in (("out", out, out_rows), ("buf", buf, buf_rows)):
        _check_buffer(tensor)
        if len(rows) != size or min(rows) < 0 or tensor.dim() == 0 or sum(rows) != tensor.shape[0]:
            raise CommError(
                f"all_to_all: expected {size} counts that sum to the rows of {name} {tuple(tensor.shape)}, "
                f"got {list(rows)}"
            )
    if (out.dtype, out.device, out.shape[1:]) != (buf.dtype, buf.device, buf.shape[1:]):
        raise CommError(
            f"all_to_all: out is {tuple(out.shape)} {out.dtype} on {out.device}, buf is {tuple(buf.shape)} {buf.dtype} "
            f"on {buf.device}; expected one device, one dtype and one shape after the rows"
        )
    return Call(
        op="all_to_all",
        dtype=buf.dtype,
        count=prod(buf.shape[1:]),
        root=0,
        sends=tuple(buf_rows),
        receives=tuple(out_rows),
    )


def disagreement(calls: Mapping[int, Call]) -> str | None:
    """Describe the ranks' calls if they do not fit each other, else None. Cost: O(P^2), P of an all_to_all.

    `calls` maps ranks to calls; it may still lack some.
    """
    wanted: dict[tuple[object, ...], list[int]] = {}
    for rank, call in sorted(calls.items()):
        wanted.setdefault((call.op, call.dtype, call.count, call.root), []).append(rank)
    if len(wanted) > 1:
        return "; ".join(f"{name_ranks(ranks)} asked for {calls[ranks[0]]}" for ranks in wanted.values())
    senders = [(rank, call) for rank, call in calls.items() if call.sends]
    for (rank, call), (peer, other) in product(senders, calls.items()):
        if call.sends[peer] != other.receives[rank]:
            return (
                f"rank {rank} sends {call.sends[peer]} rows to rank {peer}, "
                f"which expects {other.receives[rank]} ({call})"
            )
    return None


def name_ranks(ranks: Sequence[int]) -> str:
    """Return the ranks in words: `rank 3` or `ranks 1, 2`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _check_buffer(tensor: Tensor) -> None:
    if tensor.dtype not in DTYPES:
        raise CommError(f"cannot send {tensor.dtype}; use one of {', '.join(map(str, DTYPES))}")
    if not tensor.is_contiguous():
        raise CommError(f"cannot send a tensor of shape {tuple(tensor.shape)} that is not contiguous")
