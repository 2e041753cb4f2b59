"""Rows 2 GiB apart, for every kernel of the emulated GPU: other tests, over memory of which the rows alone exist."""

from __future__ import annotations

import functools
import mmap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from mggcn.backend.base import KernelBackend
from mggcn.backend.cuda import backend as cuda_backend
from mggcn.backend.cuda.backend import CudaBackend
from mggcn.backend.cuda.kernels import folder, parameters
from mggcn.backend.cuda.spmm import make_schedule
from tests.backend import (
    test_edges,
    test_loss,
    test_move_rows,
    test_neighbours,
    test_norms,
    test_product_grad,
    test_relations,
    test_rows,
)
from tests.backend.cases import BATTERY, GUARD, host
from tests.backend.cuda import test_spmm
from tests.backend.emulated import WORKSPACE_BYTES
from tests.emulator.device import EmulatedDevice
from tests.emulator.test_emulator import run

APART = 2**31
STAR = BATTERY[3]
NO_RESERVE = 0x4000
"""MAP_NORESERVE: mmap has it from Python 3.13 on."""
WITHOUT_ROWS = {"clip_factor", "end_epoch", "dropout_values"}
"""Kernels of weights, and of the entries of a sparse matrix."""


def far(
    backend: KernelBackend, rows: int, cols: int, dtype: torch.dtype | None = None, fill: float = GUARD
) -> tuple[torch.Tensor, torch.Tensor]:
    """A (rows, cols) view of rows 2 GiB apart, as `padded` makes views; twice, as there is no buffer to look around in."""
    dtype = dtype or backend.dtype
    memory = mmap.mmap(-1, max(rows, 1) * APART, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    memory.madvise(mmap.MADV_NOHUGEPAGE)  # a page for each row
    view = torch.frombuffer(memory, dtype=dtype).as_strided((rows, cols), (APART // dtype.itemsize, 1))
    return view.fill_(fill), view


class Noting:
    """An emulated device that notes which kernels were launched."""

    def __init__(self, launched: set[str]) -> None:
        self._inner, self._launched = EmulatedDevice(5), launched

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def compile(self, path: Path, options: tuple[str, ...]) -> Any:
        return _NotingModule(self._inner.compile(path, options), self._launched)


class _NotingModule:
    def __init__(self, module: Any, launched: set[str]) -> None:
        self._module, self._launched = module, launched

    def get_function(self, name: str) -> Callable[..., None]:
        function = self._module.get_function(name)

        def launch(*args: Any, **rest: Any) -> None:
            self._launched.add(name)
            function(*args, **rest)

        return launch


MODULES: tuple[ModuleType, ...] = (
    *(test_edges, test_loss, test_move_rows, test_neighbours, test_norms, test_product_grad, test_relations, test_rows),
    test_spmm,
)


def combined(backend: KernelBackend) -> None:
    """Maxima of two ranks: the copies of a split vertex have the first and the last sources each."""
    pattern, rng = STAR.adj.toarray() != 0, np.random.default_rng(6)
    (v, n), cols = pattern.shape, 20
    rows = test_neighbours.device_rows(
        backend, rng.normal(size=(n, cols)), rng.permutation(n).astype(np.int64)[:, None]
    )
    parts = []
    for columns in (range(n // 4), range(n // 4, n), range(n)):
        out, winners = (far(backend, v, cols)[0] for _ in range(2))
        found = test_neighbours.matrix_of(backend, pattern[:, columns])
        some = rows[columns[0] : columns[-1] + 1]
        backend.neighbours.maximum(found, some, out, winners, begins=True, ends=len(columns) == n)
        parts.append((out, winners))
    (out, winners), (other, of_other), whole = parts
    index = rng.permutation(v).astype(np.int32)
    who = test_neighbours.numbers(of_other)[index].astype(np.int64)
    message = test_neighbours.device_rows(backend, host(other)[index], who)
    backend.neighbours.maximum_combine(message, backend.upload(index), out, winners)
    backend.neighbours.maximum(None, rows, out, winners, begins=False, ends=True)
    assert torch.equal(out, whole[0])
    assert np.array_equal(test_neighbours.numbers(winners), test_neighbours.numbers(whole[1]))


def products(backend: KernelBackend, launched: set[str]) -> None:
    """Every sparse kernel, with long rows."""
    bench = test_spmm.Bench(backend, Noting(launched).compile)
    for shape in ("simple", "groups", "three pieces", "one column per lane"):
        out, expected = bench.run(41, test_spmm.SHAPES[shape], weighted=True, make=far)
        torch.testing.assert_close(out.double(), torch.from_numpy(expected), rtol=5e-5, atol=1e-4)


@pytest.mark.emulated
def test_offsets_of_rows_have_64_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a kernel multiplies a row by a stride in 32 bits, or a kernel is added that is not launched here."""
    launched: set[str] = set()
    backend = CudaBackend(torch.float32, Noting(launched), WORKSPACE_BYTES)
    for module in MODULES:
        monkeypatch.setattr(module, "padded", far, raising=False)
        monkeypatch.setattr(module, "guards_hold", lambda *args: True, raising=False)
    # A star's rows are long in a third of it and hubs in the whole, so that blocks share rows, too.
    monkeypatch.setattr(cuda_backend, "make_schedule", functools.partial(make_schedule, shortest=2, segment=8))
    monkeypatch.setattr(test_norms, "SHAPES", [(37, 20)])
    monkeypatch.setattr(test_edges, "MAKES", (far,) * 3)
    monkeypatch.setattr(test_edges, "COLS", (20,))
    monkeypatch.setattr(test_relations, "MAKES", {"far": far})
    monkeypatch.setattr(test_relations, "SIZES", (1, 9, 5))
    monkeypatch.setattr(test_relations, "skewed", far)
    hubs = {case.name: case for case in test_edges.EDGE_CASES}
    checks: tuple[Callable[[KernelBackend], object], ...] = (
        functools.partial(test_norms.test_layer_norm, make=far),
        functools.partial(test_norms.test_layer_norm_gradient, make=far),
        functools.partial(test_norms.test_column_moments, make=far),
        functools.partial(test_norms.test_batch_norm_with_its_gradient, make=far),
        functools.partial(test_loss.test_cross_entropy_equals_autograd, classes=7, spread=1.0, make=far),
        functools.partial(
            test_loss.test_weights_and_smoothing_equal_autograd, weighted=True, smoothing=0.1, classes=7, spread=1.0
        ),
        functools.partial(test_loss.test_confusion_equals_numpy, rows=60, classes=5),
        functools.partial(test_loss.test_losses_of_entries_equal_autograd, kind="bce", columns=7, spread=1.0, make=far),
        functools.partial(test_loss.test_counts_of_entries_equal_numpy, rows=60, columns=7),
        functools.partial(test_rows.test_finish_in_place_and_not, make=far),
        functools.partial(test_rows.test_activation_grad, rows=37, make=far),
        functools.partial(test_product_grad.check, rows=37, inner=7, cols=20),
        test_move_rows.test_gather_and_scatter,
        *(
            functools.partial(test_relations.test_products_of_relations, inner=7, cols=5, transposed=t, make="far")
            for t in (0, 1)
        ),
        functools.partial(test_relations.test_gradients_of_relations, d=7, e=5, make="far"),
        functools.partial(test_relations.test_rows_are_added_in_the_order_of_relations, cols=7),
        functools.partial(test_neighbours.test_maximum, case=STAR, order="forwards", ties=False),
        combined,
        test_neighbours.test_head_dots,
        functools.partial(test_neighbours.test_triples_combine, dynamic=False),
        *(
            functools.partial(test_neighbours.test_attention, case=STAR, order=order, shape=(4, 16), dynamic=d, p=0.4)
            for d, order in ((False, "forwards"), (True, "whole"))
        ),
        *(
            functools.partial(test_edges.test_every_graph, case=hubs[f"hub with many {way}-edges"])
            for way in ("in", "out")
        ),
        functools.partial(test_edges.test_gradients_of_every_graph, case=hubs["hub with many in-edges"]),
        functools.partial(products, launched=launched),
    )
    for check in checks:
        check(backend)
    kernels = {name for path in folder().glob("*.cu") for name in parameters(path.read_text())}
    assert kernels - launched == WITHOUT_ROWS


@pytest.mark.emulated
def test_an_offset_of_32_bits_is_seen() -> None:
    """Fails if rows so far apart do not show that a kernel multiplies a row by a stride in 32 bits."""
    backend = CudaBackend(torch.float32, EmulatedDevice(5), WORKSPACE_BYTES)
    for broken in (False, True):
        view = far(backend, 9, 1, fill=0.0)[0]
        memory = torch.as_strided(view, (8 * APART // 4 + 1,), (1,)).numpy()
        run("rows_apart", 1, 9, memory, np.int64(APART // 4), np.int32(broken))
        assert view[:, 0].tolist() == ([2.0] + [1.0] * 7 + [0.0] if broken else [1.0] * 9)
