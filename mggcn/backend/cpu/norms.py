"""Layer norm and batch norm on the CPU: arguments of cpu/norms.cpp."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from mggcn import native
from mggcn.backend.cpu.args import NAMES, address
from mggcn.backend.cpu.windows import Windows
from mggcn.backend.norms import BatchTerms
from mggcn.backend.team import Team

_P, _L, _I, _D = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_double


class NormArgs(ctypes.Structure):
    """`Norm<S>` of cpu/norms.cpp."""

    _fields_ = (
        ("g", _P),
        ("ld_g", _L),
        ("z", _P),
        ("ld_z", _L),
        ("out", _P),
        ("ld_out", _L),
        ("gain", _P),
        ("bias", _P),
        ("mean", _P),
        ("factor", _P),
        ("slope", _P),
        ("shift", _P),
        ("once", _P),
        ("partials", _P),
        ("eps", _D),
        ("rows", _L),
        ("cols", _L),
        ("window_first", _L),
        ("total", _L),
        ("threads", _I),
    )


class CpuNorms:
    """The kernels for one storage type on a team of threads. windows: those that calls with sums are on."""

    def __init__(self, dtype: torch.dtype, team: Team, isa: str, windows: Windows) -> None:
        self._kind, self._team, self._isa, self._windows = NAMES[dtype], team, isa, windows

    def layer_norm(self, z: Tensor, gain: Tensor, bias: Tensor, eps: float, out: Tensor) -> None:
        self._run("layer_norm", z, out=out, eps=eps, gain=gain, bias=bias)

    def layer_norm_grad(self, g: Tensor, z: Tensor, gain: Tensor, eps: float, out: Tensor, partials: Tensor) -> None:
        self._run("layer_norm_grad", z, g=g, out=out, eps=eps, gain=gain, partials=partials)

    def column_moments(self, z: Tensor, mean: Tensor | None, once: Tensor, partials: Tensor) -> None:
        self._run("column_moments", z, mean=mean, once=once, partials=partials)

    def batch_norm(self, z: Tensor, mean: Tensor, factor: Tensor, shift: Tensor, out: Tensor) -> None:
        self._run("batch_norm", z, out=out, mean=mean, factor=factor, shift=shift)

    def column_products(self, g: Tensor, z: Tensor, mean: Tensor | None, partials: Tensor) -> None:
        self._run("column_products", z, g=g, mean=mean, partials=partials)

    def batch_norm_grad(self, g: Tensor, z: Tensor, terms: BatchTerms, out: Tensor) -> None:
        self._run("batch_norm_grad", z, g=g, out=out, **terms._asdict())

    def _run(
        self,
        name: str,
        z: Tensor,
        *,
        g: Tensor | None = None,
        out: Tensor | None = None,
        eps: float = 0.0,
        **vectors: Tensor | None,
    ) -> None:
        rows, cols = z.shape
        args = NormArgs(eps=eps, rows=rows, cols=cols, total=rows, threads=self._team.running)
        if "partials" in vectors:
            window = self._windows.of(rows)
            args.window_first, args.total = window.first, window.total
        for matrix, tensor in (("g", g), ("z", z), ("out", out)):
            setattr(args, matrix, address(tensor))
            setattr(args, f"ld_{matrix}", 0 if tensor is None else tensor.stride(0))
        for vector, tensor in vectors.items():
            setattr(args, vector, address(tensor))
        native.kernel(f"mggcn_{name}_", self._kind, self._isa)(ctypes.byref(args))
