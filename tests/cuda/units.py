"""What the launchers ask a compiler for: each .cu file under each set of options, heard by a compiler that only listens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from mggcn.backend.base import Dropout, Sparse
from mggcn.backend.cuda.kernels import TYPE_OPTIONS, Kernels, folder
from mggcn.backend.cuda.neighbours import CudaNeighbours
from mggcn.backend.cuda.sizes import H100
from mggcn.backend.cuda.spmm import OwnSpmm, make_schedule
from mggcn.backend.cuda.variants import Variant, sliced
from mggcn.backend.gather_rates import SLICES
from mggcn.backend.neighbours import Heads

WIDTHS = (16, 41, 64, 128, 256, 512)
"""The widths that are measured (bench/)."""
LADDER_WIDTH = 64
"""Where the slower kernels of the ladder are asked for, too."""
TWO_TYPES = {torch.float32: "-DMGGCN_OUT_BF16", torch.bfloat16: "-DMGGCN_OUT_REAL"}
"""Options for results of another type than storage (cuda/out.cuh)."""
LADDER: tuple[Literal["simple", "groups"], ...] = ("simple", "groups")
HEADS = (1, 4)
ROWS, NNZ = 4, 64


@dataclass(frozen=True, slots=True, order=True)
class Unit:
    """One file under one set of options."""

    path: Path
    options: tuple[str, ...]

    @property
    def kind(self) -> tuple[Path, str]:
        """The file and the storage type, which is the first option."""
        return self.path, self.options[0]

    def __str__(self) -> str:
        return " ".join([self.path.name, *(option.removeprefix("-DMGGCN_") for option in self.options)])


class Listener:
    """A compiler whose kernels do nothing; it keeps what it was asked for."""

    def __init__(self) -> None:
        self.heard: set[Unit] = set()

    def __call__(self, path: Path, options: tuple[str, ...]) -> Listener:
        self.heard.add(Unit(path, tuple(o for o in options if not o.startswith("-DMGGCN_HEADERS="))))
        return self

    def get_function(self, name: str) -> Any:
        return lambda grid, block, args, shared_mem=0: None


def all_units(widths: Iterable[int] = WIDTHS) -> list[Unit]:
    """Return what runs of these widths ask for, in every storage type."""
    return sorted({*_plain_units(), *_spmm_units(widths), *_neighbour_units(widths)})


def samples(units: Iterable[Unit]) -> list[Unit]:
    """Return one unit for every file and type: that with the most options, which leave the least of the file out."""
    chosen: dict[tuple[Path, str], Unit] = {}
    for unit in units:
        known = chosen.get(unit.kind, unit)
        chosen[unit.kind] = max(known, unit, key=lambda u: len(u.options))
    return sorted(chosen.values())


def _plain_units() -> Iterator[Unit]:
    """Files whose launchers have no further options but the type of results."""
    for path in sorted(folder().glob("*.cu")):
        if not path.name.startswith(("spmm", "attention", "maximum", "neighbour")):
            yield from (Unit(path, (option,)) for option in TYPE_OPTIONS.values())
    yield from (Unit(folder() / "rows.cu", (TYPE_OPTIONS[dtype], option)) for dtype, option in TWO_TYPES.items())
    yield Unit(folder() / "columns.cu", (TYPE_OPTIONS[torch.float32], TWO_TYPES[torch.float32]))


def _spmm_units(widths: Iterable[int]) -> set[Unit]:
    """What products ask for: by type, alignment, edge values and slices, and by every kernel."""
    listener = Listener()
    kinds = [*((t, t) for t in TYPE_OPTIONS), (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
    for (dtype, out_dtype), weighted in product(kinds, (False, True)):
        own = OwnSpmm(Kernels(listener, dtype), H100, torch.empty(1 << 16))
        adj = _matrix(weighted)
        for width, aligned in product(widths, (True, False)):
            h = torch.empty(ROWS, _stride(width, dtype, aligned), dtype=dtype)[:, :width]
            out = torch.empty(ROWS, width, dtype=out_dtype)
            for size in (0, *SLICES):
                way = sliced(size if size < width * dtype.itemsize else 0, dtype.itemsize)
                own.multiply(adj, h, out, accumulate=False, epilogue=None, choice=way)
            for kernel in LADDER if width == LADDER_WIDTH else ():
                variant = Variant(kernel, 8, 1, 4, aligned)
                own.multiply(adj, h, out, accumulate=False, epilogue=None, variant=variant)
    return listener.heard


def _neighbour_units(widths: Iterable[int]) -> set[Unit]:
    """What attention and the maximum ask for: by type, heads, scores, dropout and alignment, and rows without edges."""
    listener = Listener()
    for dtype, width, aligned in product(TYPE_OPTIONS, widths, (True, False)):
        kernels, matrix = CudaNeighbours(Kernels(listener, dtype)), _matrix(weighted=False)
        wide = torch.empty(ROWS, _stride(4 * width, dtype, aligned), dtype=dtype)
        rows = wide[:, :width]
        kernels.maximum(matrix, rows, rows, rows, begins=True, ends=True)
        kernels.maximum_grad(matrix, rows, torch.empty(ROWS), rows, begins=True)
        kernels.maximum_combine(rows, torch.empty(ROWS), rows, rows)
        for heads, dynamic, drops in product(HEADS, (False, True), (False, True)):
            if dynamic != drops and dtype != torch.float32:
                continue
            a = torch.empty(width) if dynamic else None
            drop = Dropout(0.5, torch.empty(2), 0) if drops else None
            how = Heads(heads, -(-width // heads), 0.2, a, drop, torch.empty(ROWS))
            kernels.attend(how, matrix, wide, rows, rows, rows, begins=True, ends=True)
            kernels.attend_sources(how, matrix, wide, rows, rows, begins=True)
            kernels.attend_destinations(how, matrix, wide, rows, rows, rows if dynamic else None, begins=True)
            kernels.attend_combine(how, rows, torch.empty(ROWS), rows, rows)
        kernels.head_dots(rows, rows, rows[:, :1])
    return listener.heard


def _stride(width: int, dtype: torch.dtype, aligned: bool) -> int:
    """Elements from row to row: padded to 64 bytes, or tight and off 16 bytes."""
    step = 64 // dtype.itemsize
    return -(-width // step) * step if aligned else width + (width * dtype.itemsize % 16 == 0)


def _matrix(weighted: bool) -> Sparse:
    """A matrix with a hub, so that hubs' kernels are asked for as well."""
    indptr = np.array([0, NNZ - 3, NNZ - 2, NNZ - 1, NNZ])
    schedule = make_schedule(indptr, torch.from_numpy, shortest=4, segment=8)
    values = torch.ones(NNZ) if weighted else None
    return Sparse(torch.from_numpy(indptr), torch.zeros(NNZ, dtype=torch.int32), values, schedule)
