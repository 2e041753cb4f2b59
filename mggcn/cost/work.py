"""A rank's work in a program for the cost model, and its seconds without messages. Needs no torch.

P ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from mggcn.aggregate.edge_op import Arithmetic
from mggcn.aggregate.relations import GROUPED_FLOPS
from mggcn.aggregate.steps import Await, Send, Stages
from mggcn.backend.cpu.figures import DenseShape
from mggcn.backend.gather_rates import SLICE_ROW, gathered_row_s
from mggcn.cost.machine import DeviceRates
from mggcn.errors import PlanError

Kind = Literal["sparse", "dense", "elementwise", "messages", "sums", "overhead"]
KINDS: Final[Mapping[Kind, str]] = {
    "sparse": "sparse products",
    "dense": "dense products",
    "elementwise": "passes and row copies",
    "messages": "waiting for others",
    "sums": "sums of gradients",
    "overhead": "calls, optimiser",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Work of a rank between messages. Its seconds: those of its bytes, of its FLOP or the least of its calls, whichever is
    more, at the device's pace, plus its calls.
    """

    kind: Kind
    rows: int = 0
    """Rows gathered at random."""
    row_bytes: int = 0
    footprint: int = 0
    """Bytes of the matrix that they are gathered from."""
    streamed: int = 0
    """Bytes read and written in order."""
    span: int = 0
    """Bytes of the matrices that are streamed, where a pass is cut into blocks; 0: `streamed`."""
    swept: int = 0
    """Bytes that a step passes over until it comes back to the memory of this result: a processor fetches what it writes,
    half of what is streamed, from among them. 0, and on a GPU: `span`."""
    in_place: bool = False
    """Whether what is streamed is written where it was read."""
    flop: int = 0
    precision: str = "fp32"
    fused: Literal["", "rows", "gradient"] = ""
    """Of dense products: which kernel does what follows, too; "": none does."""
    shape: Literal["", DenseShape] = ""
    """Of dense products: whether rows or sums over them are the results; "": neither is known."""
    width: float = 0.0
    """The harmonic mean of a dense product's two widths."""
    grouped: bool = False
    """Of dense products: whether one launch does those of several relations, by kernels that have a rate of their own."""
    calls: int = 1
    begins: int = 0
    """How many of its calls begin an op, or follow a wait for others: threads sleep before these."""
    reuse: tuple[tuple[int, float], ...] = ()
    """Locality of the gathers: (most bytes of other rows since the last use of the same one; share of the gathers), rising;
    (): at random over the footprint."""
    results: int = 0
    """Rows of the result of a sparse product, which may gather in slices of the columns; 0: of no product."""

    gain: float = 1.0
    """How many times as fast the kernel of a sparse product is as one that reads whole rows."""
    along: Arithmetic | None = None
    """What is computed for each gathered row beside a sum; that takes its time beside the row's bytes."""

    @property
    def long_rows(self) -> bool:
        return self.rows >= SLICE_ROW * self.results > 0


@dataclass(frozen=True, slots=True)
class Sum:
    """A buffer of `nbytes` is summed over all ranks, and all ranks wait for the sum."""

    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Staged:
    """The stages of a broadcast. first: its first message's number in the program; edge: bytes of an edge of the tiles;
    reuse: as Work's.
    """

    stages: Stages
    first: int
    edge: int
    reuse: tuple[tuple[int, float], ...] = ()
    result: int = 0
    """Bytes of a row of the result; 0: as many as of the operand."""
    along: Arithmetic | None = None
    """As Work's."""

    def plain(self) -> Iterator[Work | Send | Await]:
        """Yield the items one by one."""
        for step in self.stages.plain():
            match step:
                case Await():
                    yield Await(self.first + step.message)
                case Send():
                    yield step
                case _:
                    row = self.stages.row_bytes
                    work = product(step.rows, step.columns, step.nnz, row, self.edge, self.reuse, self.result)
                    yield dataclasses.replace(work, along=self.along, begins=1)


Item = Work | Send | Await | Sum | Staged
Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]
Count = TypeVar("Count", int, npt.NDArray[np.int64])


def product(
    rows: int, columns: int, nnz: int, row: int, edge: int, reuse: tuple[tuple[int, float], ...] = (), result: int = 0
) -> Work:
    """Return the work of a sparse product, (rows, columns) with nnz nonzeros.

    row, edge, result: as for `product_bytes`; result = 0: as many bytes as `row`.
    """
    # No more rows of the operand are touched than there are nonzeros.
    footprint, streamed = product_bytes(rows, min(columns, nnz), nnz, row, edge, result or row)
    return Work(
        kind="sparse", rows=nnz, row_bytes=row, footprint=footprint, streamed=streamed, reuse=reuse, results=rows
    )


def product_bytes(rows: Count, touched: Count, nnz: Count, row: int, edge: int, result: int) -> tuple[Count, Count]:
    """Return the bytes that a sparse product gathers from, and those that it streams.

    touched: rows of the operand; row: bytes of one; result: of a row of the result; edge: of a nonzero. For one product or
    many.
    """
    return touched * row, nnz * edge + rows * (8 + 2 * result)


def ring_bytes(nbytes: int, ranks: int) -> int:
    """Bytes that one rank of a ring sends to sum a buffer over the ranks."""
    return 2 * nbytes * (ranks - 1) // ranks


def work_seconds(work: Work, device: DeviceRates, sharing: int) -> tuple[float, float]:
    """Return the seconds of a rank's work, and of its calls, where `sharing` ranks have the device.

    Each rank gets its part of the rates, and all their operands share the cache.
    A pass whose arithmetic the machine's file has no rate for counts by its bytes.
    Raises: PlanError if the machine's file has no rate of dense products in this precision.
    """
    moving = 0.0
    if work.rows:
        each = _row_s(work.row_bytes, work.reuse, device, sharing, work.long_rows)(work.footprint)
        moving += float(sharing * _edges_s(each, work.along, device, work.rows, work.results) / work.gain)
    if work.streamed and work.in_place and device.in_place:
        moving += work.streamed * sharing / device.in_place.at((work.span or work.streamed) * sharing)
    elif work.streamed:
        near = work.span or work.streamed
        rates = (device.copy.at(span * sharing) for span in (near, max(near, work.swept)))
        moving += sum(0.5 * work.streamed * sharing / rate for rate in rates)
    counted = work.flop and (work.kind == "dense" or work.precision in device.gemm)
    computing = work.flop * sharing / _flop_s(work, device) if counted else 0.0
    seconds = device.pace * max(moving, computing, work.calls * device.least_s)
    return seconds, call_seconds(work.calls, device, sharing, work.begins)


def call_seconds(calls: int, device: DeviceRates, sharing: int, begins: int = 0) -> float:
    """Return the total overhead of `calls` calls, in seconds; begins: as Work's."""
    beginning_s = begins * (device.op_s - device.call_s) if device.op_s else 0.0
    return (calls * device.call_s + beginning_s) * max(1.0, sharing / device.cores)


def staged_seconds(ranks: Sequence[Staged], device: DeviceRates, sharing: int) -> npt.NDArray[np.float64]:
    """Return the seconds of the products of every stage but the last (P - 1, P), without their calls; 0 for own tiles.

    ranks: the same stages of all ranks, in rank order. Entry (j, i): as `work_seconds` of rank i's in stage j, to the bit.
    Cost: a sort of P^2 numbers.
    """
    row, reuse = ranks[0].stages.row_bytes, ranks[0].reuse
    counts = np.array(ranks[0].stages.counts, np.int64)
    nnz = np.array([rank.stages.nnz[:-1] for rank in ranks], np.int64).T.copy()
    touched = np.minimum(counts[:-1, None], nnz)
    footprint, streamed = product_bytes(counts, touched, nnz, row, ranks[0].edge, ranks[0].result or row)
    long_rows = (counts > 0) & (nnz >= SLICE_ROW * counts)
    each = np.where(
        long_rows, *(_of_distinct(footprint, _row_s(row, reuse, device, sharing, long)) for long in (True, False))
    )
    rate = _of_distinct(streamed * sharing, device.copy.at)
    gathering = sharing * _edges_s(each, ranks[0].along, device, nnz, counts)
    moving = device.pace * np.maximum(gathering + streamed * sharing / rate, device.least_s)
    np.fill_diagonal(moving, 0.0)
    return moving


def _edges_s(
    row_s: float | Floats, along: Arithmetic | None, device: DeviceRates, edges: int | Ints, results: int | Ints
) -> Floats:
    """Return the seconds of edges of which a row takes `row_s` to read, with what is computed along them for so many rows.

    Of a row's edges the last ones take as long as `lanes`: of a row of many, half as many more on average.
    """
    at_once, columns = device.along_edge_s(along)
    if along is None or not at_once + columns:
        return np.asarray(edges * (row_s + device.row_s))
    groups = np.maximum(results, edges / along.lanes + results * 0.5 * (1 - 1 / along.lanes))
    groups = np.minimum(groups, edges)
    computing = groups * along.lanes * at_once + edges * columns
    reading = edges * (along.read * row_s + device.row_s)
    return np.asarray(np.maximum(reading, computing) if along.beside else reading + computing)


def _row_s(
    row: int, reuse: tuple[tuple[int, float], ...], device: DeviceRates, sharing: int, long_rows: bool
) -> Callable[[int], float]:
    return lambda nbytes: gathered_row_s(device.gather, row, nbytes, reuse, sharing=sharing, long_rows=long_rows)


def _of_distinct(numbers: npt.NDArray[np.int64], function: Callable[[int], float]) -> npt.NDArray[np.float64]:
    """Apply a function to every number, calling it once for all equal ones."""
    distinct, which = np.unique(numbers, return_inverse=True)
    values = np.array([function(number) for number in distinct.tolist()])
    return values[which].reshape(numbers.shape)


def _flop_s(work: Work, device: DeviceRates) -> float:
    if work.grouped:
        return GROUPED_FLOPS
    by_width = {"rows": device.gemm_rows, "sums": device.gemm_sums}.get(work.shape, {})
    if not work.fused and work.precision in by_width:
        return by_width[work.precision].at(work.width)
    rates = {"": device.gemm, "rows": device.fused, "gradient": device.fused_grad}[work.fused]
    if work.precision not in rates:
        raise PlanError(
            f"the machine's file has rates of dense products in {', '.join(rates)}, none in {work.precision}; "
            "choose another --precision, measure this machine again with mggcn tune, or add the rate to the file"
        )
    return rates[work.precision]
