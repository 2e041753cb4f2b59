"""Slots: the planned memory of one sampled batch in flight.

Hops count from the seeds outwards. N vertices of the graph, T targets, S sources, E edges of a hop.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from mggcn.blocks.block import Capacity
from mggcn.blocks.draws import Draws
from mggcn.errors import PlanError

Table = Literal["auto", "direct", "hashed"]
CACHED: Final = 32 << 20
"""Bytes of a direct table that stay in a processor's last cache."""
DIRECT_SHARE: Final = 16
"""A direct table is faster up to so many times the bytes of a hashed one (docs/notes/0034-sampler.md)."""


NOTHING: Final[Mapping[str, npt.NDArray[Any]]] = {}


class FrontierArgs(ctypes.Structure):
    """`Frontier` of cpu/frontier.h."""

    _fields_ = (
        ("ids", ctypes.c_void_p),
        ("direct", ctypes.c_void_p),
        ("hashed", ctypes.c_void_p),
        ("num_vertices", ctypes.c_int64),
        ("capacity", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("at", ctypes.c_int64),
        ("base", ctypes.c_uint32),
        ("hash_bits", ctypes.c_int32),
        ("status", ctypes.c_int32),
    )


class SampleArgs(ctypes.Structure):
    """`Sample` of cpu/sample_rows.h."""

    _fields_ = (
        ("indptr", ctypes.c_void_p),
        ("indices", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("types8", ctypes.c_void_p),
        ("types16", ctypes.c_void_p),
        ("left_out", ctypes.c_void_p),
        ("frontier", ctypes.POINTER(FrontierArgs)),
        ("picks", ctypes.c_void_p),
        ("seen", ctypes.c_void_p),
        ("types", ctypes.c_void_p),
        ("indptr_out", ctypes.c_void_p),
        ("columns", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("indptr_t", ctypes.c_void_p),
        ("indices_t", ctypes.c_void_p),
        ("order", ctypes.c_void_p),
        ("degrees", ctypes.c_void_p),
        ("owner", ctypes.c_void_p),
        ("num_edges", ctypes.c_int64),
        ("num_left_out", ctypes.c_int64),
        ("max_sources", ctypes.c_int64),
        ("max_edges", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("sources", ctypes.c_int64),
        ("edges", ctypes.c_int64),
        ("at", ctypes.c_int64),
        ("first_leaf", ctypes.c_int64),
        ("seed", ctypes.c_uint32),
        ("step", ctypes.c_uint32),
        ("hop", ctypes.c_uint32),
        ("num_types", ctypes.c_int32),
        ("mode", ctypes.c_int32),
        ("self_loops", ctypes.c_int32),
        ("status", ctypes.c_int32),
        ("rank", ctypes.c_int32),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotPlan:
    """What the memory of a batch depends on.

    Raises: PlanError for capacities that do not follow from each other, or pass 2^31.
    """

    draws: Draws
    capacities: tuple[Capacity, ...]
    """Of each hop, the one at the seeds first; its sources are the targets of the next."""
    num_vertices: int
    places: bool = False
    """Keep the place of each drawn edge among those of the graph, by which weights and types are found."""
    transposed: int | None = None
    """Number of hops, from the seeds on, that are transposed as well; None: all."""
    table: Table = "auto"
    """How a vertex's number is found: direct takes 4 N bytes, hashed 16 to 32 a vertex of the batch. Either gives the same
    bits; auto takes the one that should be faster."""

    def __post_init__(self) -> None:
        if len(self.capacities) != len(self.draws.fanouts):
            hops, given = len(self.draws.fanouts), len(self.capacities)
            raise PlanError(f"a batch needs a capacity for each of its {hops} hops, got {given}")
        if any(size.sources < size.targets for size in self.capacities):
            raise PlanError(f"the sources of a hop are its targets and more, planned are {self.capacities}")
        for hop, (near, far) in enumerate(pairwise(self.capacities)):
            if near.sources != far.targets:
                raise PlanError(
                    f"hop {hop} has up to {near.sources} sources and hop {hop + 1} {far.targets} targets: give as many"
                )
        most = max(max(c.targets, c.sources, c.edges) for c in self.capacities)
        if max(most, self.num_vertices) >= 2**31:
            raise PlanError(
                f"a hop has fewer than 2^31 rows and edges, planned are {most}; take fewer seeds or neighbours"
            )

    @property
    def hash_bits(self) -> int:
        """Return b if the table is hashed, to 2^b entries, else 0."""
        bits = max(4, (2 * self.capacities[-1].sources - 1).bit_length())
        direct = 4 * self.num_vertices <= max(CACHED, DIRECT_SHARE * (8 << bits))
        return 0 if self.table == "direct" or (self.table == "auto" and direct) else bits

    def is_transposed(self, hop: int) -> bool:
        """Return whether a hop is transposed as well."""
        return self.transposed is None or hop < self.transposed

    def arrays(self) -> Iterator[tuple[str, npt.DTypeLike, int]]:
        """Yield the name, type and length of every array; those of a hop end with its number."""
        if self.hash_bits:
            yield "table", np.uint64, 1 << self.hash_bits
        else:
            yield "table", np.uint32, self.num_vertices
        yield "ids", np.int64, self.capacities[-1].sources
        fanouts = [self.draws.of_types(hop) for hop in range(len(self.capacities))]
        most = max(max(max(counts) for counts in fanouts), 1)
        yield "seen", np.uint32, 1 << (2 * most - 1).bit_length()
        yield "picks", np.uint64, 2 * max(sum(max(count, 0) for count in counts) for counts in fanouts)
        for hop, (size, counts) in enumerate(zip(self.capacities, fanouts, strict=True)):
            yield f"types{hop}", np.int64, 4 * len(counts)
            yield f"indptr{hop}", np.int64, size.targets + 1
            yield f"indices{hop}", np.int32, size.edges
            yield f"degrees{hop}", np.int32, size.targets
            if self.places:
                yield f"places{hop}", np.int64, size.edges
            if self.draws.has_values:
                yield f"values{hop}", np.float32, size.edges
            if self.is_transposed(hop):
                yield f"indptr_t{hop}", np.int64, size.sources + 1
                yield f"indices_t{hop}", np.int32, size.edges
                yield f"order{hop}", np.int32, size.edges

    @property
    def nbytes(self) -> int:
        """The bytes of a slot. Cost: none of memory."""
        return sum(np.dtype(dtype).itemsize * count for _, dtype, count in self.arrays())


class Slot:
    """The memory of one batch, which the next one in it overwrites. given: arrays that lie elsewhere, by their names."""

    def __init__(self, plan: SlotPlan, given: Mapping[str, npt.NDArray[Any]] = NOTHING) -> None:
        self.plan: SlotPlan = plan
        self.arrays: dict[str, npt.NDArray[Any]] = {
            name: given[name]
            if name in given
            else np.zeros(count, dtype)
            if name == "table"
            else np.empty(count, dtype)
            for name, dtype, count in plan.arrays()
        }
        table = self.address("table")
        direct, hashed = (None, table) if plan.hash_bits else (table, None)
        sizes = (plan.num_vertices, plan.capacities[-1].sources)
        self.frontier: FrontierArgs = FrontierArgs(
            self.address("ids"), direct, hashed, *sizes, 0, 0, 1, plan.hash_bits, 0
        )
        self.hops: ctypes.Array[SampleArgs] = (SampleArgs * len(plan.capacities))(
            *(self._hop(hop, size) for hop, size in enumerate(plan.capacities))
        )
        self.aimed_by: Any = None
        """The sampler whose graph the hops read."""

    def address(self, name: str) -> int | None:
        """Return where an array is, None if the plan has none of this name."""
        return self.arrays[name].ctypes.data if name in self.arrays else None

    def _hop(self, hop: int, size: Capacity) -> SampleArgs:
        """Return the arguments of a hop that do not change."""
        counts = self.plan.draws.of_types(hop)
        types = self.arrays[f"types{hop}"].reshape(-1, 4)
        types[:, 2] = counts
        types[:, 3] = np.cumsum([0, *(max(count, 0) for count in counts[:-1])])
        args = SampleArgs(frontier=ctypes.pointer(self.frontier), hop=hop, num_types=len(counts))
        args.picks, args.seen, args.types = (self.address(name) for name in ("picks", "seen", f"types{hop}"))
        args.indptr_out, args.columns = self.address(f"indptr{hop}"), self.address(f"indices{hop}")
        for name in ("places", "values", "indptr_t", "indices_t", "order", "degrees"):
            setattr(args, name, self.address(f"{name}{hop}"))
        args.max_sources, args.max_edges = size.sources, size.edges
        return args
