"""Figures of a machine: what is measured, kept and read again, and what follows from them."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mggcn import native
from mggcn.backend.cpu import kept_figures, measure
from mggcn.backend.cpu.figures import ASSUMED, Figures, figures_from_dict
from mggcn.backend.cpu.kept_figures import figures_of, figures_path
from mggcn.backend.cpu.machine import Host, dense_kernels, this_host
from tests.machines import XEON, ZEN3

HERE = Host("a processor", "avx2 baseline avx2", 2, "0-1")
FREE = 2**33


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "mggcn"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is asked to be measured; the answer is XEON."""
    asked: list[Any] = []
    monkeypatch.setattr(kept_figures, "measure", lambda *args: asked.append(args) or XEON)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.1, 0.1, 0.1))
    return asked


def test_entries_between_the_measured_ones() -> None:
    """Fails if rates are read off the wrong row, or are not those that were measured where they were."""
    assert ZEN3.entry_s(256, 2**22) == ZEN3.plain_s[1][2]
    assert ZEN3.entry_s(1024, 2**22, ahead=True) == ZEN3.ahead_s[2][2]
    assert ZEN3.entry_s(256, 2**22, 2) == ZEN3.plain_s[1][2] * ZEN3.bf16[2]
    assert ZEN3.entry_s(4, 2**10) == ZEN3.plain_s[0][0]
    assert ZEN3.entry_s(64, 2**40) == ZEN3.plain_s[0][-1]
    assert ZEN3.entry_s(640, 2**21) == pytest.approx((ZEN3.entry_s(256, 2**21) + ZEN3.entry_s(1024, 2**21)) / 2)
    assert 1.8 < ZEN3.entry_s(2048, 2**22) / ZEN3.entry_s(1024, 2**22) < 2.0
    assert 512 / XEON.entry_s(512, 2**22) == pytest.approx(46e9, rel=0.02)


def test_what_is_near() -> None:
    """Fails if what is near is not where gathers begin to come from afar: far below what /sys says of the Xeon."""
    assert 2**24 < ZEN3.near_bytes < 2**25
    assert 2**23 < XEON.near_bytes < 2**24
    level = dataclasses.replace(ZEN3, plain_s=tuple((row[0],) * len(row) for row in ZEN3.plain_s))
    assert level.near_bytes == level.footprints[-1]


def test_ranks_share_a_machine() -> None:
    """Fails if a rank of several chooses kernels as if it had the caches and the memory for itself."""
    assert ZEN3.shared(1) is ZEN3
    half = ZEN3.shared(2)
    assert figures_from_dict(json.loads(json.dumps(half.to_dict()))) == half
    assert half.entry_s(256, 2**22) == pytest.approx(2 * ZEN3.entry_s(256, 2**23))
    assert half.near_bytes == pytest.approx(ZEN3.near_bytes / 2, rel=1e-6)
    assert half.dense_rate(4, "rows", half.kernels).flop_s == ZEN3.dense_rate(4, "rows", ZEN3.kernels).flop_s / 2  # type: ignore[union-attr]
    assert half.copy_rate == ZEN3.copy_rate / 2


def test_this_machine_is_measured_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a figure is none of a computer, falls where it must rise, or is of kernels that do not run here."""
    monkeypatch.setattr(measure, "ENTRIES", 2**12)
    monkeypatch.setattr(measure, "GATHERED", 2**19)
    monkeypatch.setattr(measure, "PACKED", 2**18)
    monkeypatch.setattr(measure, "DENSE", (256, 32, 32))
    monkeypatch.setattr(measure, "ENOUGH_SHARE", 0.0)
    found = measure.measure(2, native.isa(), dense_kernels(), 2**23)
    assert found.footprints == measure.FOOTPRINTS[:2]
    assert figures_from_dict(json.loads(json.dumps(found.to_dict()))) == found
    for table in (found.plain_s, found.ahead_s):
        assert (np.diff(table, axis=0) >= 0).all()
        assert (np.diff(table, axis=1) >= 0).all()
        assert (np.array(table) < 1e-4).all()
    assert {rate.kernel for rate in found.dense} == set(dense_kernels()) - {"baseline"}
    assert all(1e6 < rate.flop_s < 1e15 for rate in found.dense)


def test_little_memory_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if operands of dense products reach beyond the memory that little free memory leaves for gathers."""
    monkeypatch.setattr(measure, "ENOUGH_S", -1.0)
    monkeypatch.setattr(measure, "ENOUGH_SHARE", 0.0)
    found = measure.measure(1, native.isa(), dense_kernels(), 2**23)
    assert found.footprints == measure.FOOTPRINTS[:2]
    assert {rate.dtype for rate in found.dense} == {"fp32", "bf16", "fp64"}


def test_measuring_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a machine whose memory comes slowly is measured for seconds, or has no figures in the end."""
    monkeypatch.setattr(measure, "ENOUGH_S", -1.0)
    monkeypatch.setattr(measure, "ENOUGH_SHARE", 0.0)
    calls: list[int] = []
    original = measure._Measuring._product

    def product(self: Any, *args: Any, **settings: Any) -> float:
        calls.append(1)
        return original(self, *args, **settings)

    monkeypatch.setattr(measure._Measuring, "_product", product)
    found = measure.measure(1, native.isa(), (), FREE)
    assert found.footprints == measure.FOOTPRINTS[: measure.NEEDED]
    assert [size for size, _ in found.copy] == [size for size in measure.COPIED if size <= 2**25]
    assert len(calls) < 8 * measure.NEEDED + 12, "each figure by one call"
    assert figures_from_dict(found.to_dict()) == found
    calls.clear()
    monkeypatch.setattr(measure, "ENOUGH_SHARE", 2.0)
    assert measure.measure(1, native.isa(), (), 2**23) == ASSUMED, "others have the cores"
    assert len(calls) <= 2, "nothing more is measured: it would be thrown away"


@pytest.mark.parametrize("threads", [1, 3, 8, 48, 200])
def test_every_thread_has_work(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a server's rates are those of the few threads that got a chunk, or a call writes beyond its result."""
    calls: list[tuple[int, int, int]] = []

    def kernel(name: str, kind: str, isa: str) -> Any:
        def run(args: Any, *_: Any) -> None:
            if name == "mggcn_spmm_":
                p = args._obj
                calls.append((p.num_chunks, p.inner, p.cols * (2 if kind == "bf16" else 4) * (last(p) + 1)))

        return run

    def last(product: Any) -> int:
        chunks = ctypes.cast(product.chunks, ctypes.POINTER(ctypes.c_int64))
        return int(chunks[product.num_chunks]) - 1

    monkeypatch.setattr(measure.native, "kernel", kernel)
    monkeypatch.setattr(measure, "ENOUGH_SHARE", 0.0)
    measuring = measure._Measuring(threads, native.isa(), list(measure.FOOTPRINTS[:5]))
    measuring.figures(())
    gathers = [chunks for chunks, inner, _ in calls if not inner]
    assert len(gathers) > 40
    assert sum(chunks >= 4 * min(threads, 32) for chunks in gathers) >= len(gathers) - 5, "but for passes over operands"
    assert max(nbytes for *_, nbytes in calls) <= measuring._out.size


def test_calls_that_take_alike_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a quiet machine is measured three times where two calls agree, or a disturbed one is not."""
    monkeypatch.setattr(measure, "ENOUGH_S", 1e9)
    monkeypatch.setattr(measure, "ENOUGH_SHARE", 0.0)
    measuring = measure._Measuring(1, native.isa(), [2**18])
    for taken, least, left in (([1.0, 1.01, 0.5], 1.0, 1), ([1.0, 0.9, 0.5], 0.5, 0)):
        times = iter(taken)
        assert measuring._least(lambda times=times: next(times)) == least
        assert len(list(times)) == left


def test_figures_are_measured_once(cache: Path, measured: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a known machine is measured again, another one's figures are taken, or `mggcn tune` cannot ask anew."""
    assert figures_of(HERE, FREE) == figures_of(HERE, FREE) == XEON
    assert measured == [(2, "avx2", ("baseline", "avx2"), FREE)]
    others = [{"processor": "b"}, {"kernels": "avx2 baseline avx2 avx512"}, {"threads": 1}, {"cores": "0-2"}]
    for count, change in enumerate(others, start=2):
        figures_of(dataclasses.replace(HERE, **change), FREE)  # type: ignore[arg-type]
        assert len(measured) == count
    assert figures_of(HERE, FREE, anew=True) == XEON
    assert len(measured) == 6
    assert len(list(cache.iterdir())) == 5
    monkeypatch.setattr(kept_figures, "machine_digest", lambda: "another machine that shares the folder")
    figures_of(HERE, FREE)
    assert len(measured) == 7
    # A file that was copied from elsewhere is another machine's, whatever its name.
    moved = dataclasses.replace(HERE, processor="c")
    figures_path(moved).write_text(figures_path(HERE).read_text())
    figures_of(moved, FREE)
    assert len(measured) == 8


def test_what_was_measured_beside_other_load_is_measured_again(
    cache: Path, measured: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a busy minute decides for ever, or a machine that is always busy measures before every run."""
    monkeypatch.setattr(os, "getloadavg", lambda: (5.0, 5.0, 5.0))
    figures_of(HERE, FREE), figures_of(HERE, FREE)
    assert len(measured) == 1
    monkeypatch.setattr(os, "getloadavg", lambda: (0.2, 5.0, 5.0))
    figures_of(HERE, FREE), figures_of(HERE, FREE)
    assert len(measured) == 2


def test_figures_that_could_not_be_measured_are_not_for_good(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a machine whose cores others had is taken to be measured once they have ended."""
    answers = iter((ASSUMED, XEON))
    monkeypatch.setattr(kept_figures, "measure", lambda *args: next(answers))
    monkeypatch.setattr(os, "getloadavg", lambda: (0.1, 0.1, 0.1))
    assert [figures_of(HERE, FREE) for _ in range(3)] == [ASSUMED, XEON, XEON]
    monkeypatch.setattr(kept_figures, "measure", lambda *args: ASSUMED)
    assert figures_of(HERE, FREE, anew=True) == XEON, "a busy minute costs no good figures"
    assert figures_of(HERE, FREE) == XEON


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace('"format_version": 2', '"format_version": 1'),
        lambda text: text.replace('"row_s"', '"rows"'),
        lambda text: text.replace('"row_s": ', '"row_s": -'),
        lambda text: text.replace('"rows"', '"columns"'),
        lambda text: text.replace("262144", "2621440000", 1),
    ],
    ids=["cut", "a list", "version", "name", "negative", "shape", "falling"],
)
def test_damaged_figures_are_measured_again(cache: Path, measured: list[Any], damage: Any) -> None:
    """Fails if a damaged file is a traceback, or is believed."""
    figures_of(HERE, FREE)
    path = figures_path(HERE)
    path.write_text(damage(path.read_text()))
    assert figures_of(HERE, FREE) == XEON
    assert len(measured) == 2
    assert figures_of(HERE, FREE) == XEON
    assert len(measured) == 2


def test_a_folder_that_cannot_be_written_is_no_error(
    tmp_path: Path, measured: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if a run needs the cache."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert figures_of(HERE, FREE) == XEON
    assert figures_of(HERE, FREE) == XEON
    assert len(measured) == 2


def test_assumed_figures_are_figures() -> None:
    """Fails if plans without kernels count with nonsense."""
    assert figures_from_dict(json.loads(json.dumps(ASSUMED.to_dict()))) == ASSUMED
    assert not ASSUMED.measured
    assert math.isfinite(ASSUMED.entry_s(100, 2**20))


def test_tests_take_recorded_figures() -> None:
    """Fails if this run of the tests would measure the machine it runs on."""
    assert isinstance(ZEN3, Figures)
    assert kept_figures.kept_figures(this_host(2)) == ZEN3
