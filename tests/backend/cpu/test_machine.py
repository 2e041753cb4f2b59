"""What the choice of CPU kernels reads from Linux: caches and who shares them, tiles of bfloat16."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from mggcn.backend.cpu import machine as cpu_machine
from mggcn.backend.cpu.machine import USUAL, Caches, amx_granted, caches_of, has_amx, has_slow_pairs, processor_name

MIB = 2**20


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Another machine's files, and nothing remembered before or after."""
    monkeypatch.setattr(cpu_machine, "CACHES", tmp_path)
    monkeypatch.setattr(cpu_machine, "CPUINFO", tmp_path / "cpuinfo")
    for remembered in (cpu_machine._levels, has_amx):
        remembered.cache_clear()
    yield tmp_path
    for remembered in (cpu_machine._levels, has_amx):
        remembered.cache_clear()


def cache(folder: Path, index: int, level: int, kind: str, size: str, cpus: str) -> None:
    place = folder / f"index{index}"
    place.mkdir()
    for name, text in (("level", str(level)), ("type", kind), ("size", size), ("shared_cpu_list", cpus)):
        (place / name).write_text(text + "\n")


def test_threads_have_their_share_of_the_last_cache(elsewhere: Path) -> None:
    """Fails if a rank counts on the cache of the others, an instruction cache counts, or a unit is misread."""
    cache(elsewhere, 0, 1, "Data", "32K", "0")
    cache(elsewhere, 1, 1, "Instruction", "64K", "0")
    cache(elsewhere, 2, 2, "Unified", "512K", "0,64")
    cache(elsewhere, 3, 3, "Unified", "32M", "0-3,64-67")
    assert caches_of(8) == caches_of(16) == Caches(MIB // 2, 32 * MIB)
    assert caches_of(2) == Caches(MIB // 2, 8 * MIB)
    assert caches_of(1) == Caches(MIB // 2, 4 * MIB)


def test_a_machine_without_a_third_level_shares_its_second(elsewhere: Path) -> None:
    """Fails if such a machine is taken for one that tells nothing, or gives a thread less than its own cache."""
    cache(elsewhere, 0, 2, "Unified", "1024K", "0-3")
    assert caches_of(4) == caches_of(1) == Caches(MIB, MIB)


def test_a_machine_that_tells_nothing_is_a_usual_one(elsewhere: Path) -> None:
    """Fails if missing or odd files are a traceback."""
    assert caches_of(2) == USUAL
    cpu_machine._levels.cache_clear()
    cache(elsewhere, 0, 2, "Unified", "unknown", "0")
    assert caches_of(2) == USUAL
    assert not has_amx()
    assert not amx_granted()
    assert isinstance(processor_name(), str)


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ("flags : fpu avx2 fma", False),
        ("flags : fpu avx512_bf16", False),
        ("flags : avx512_bf16 amx_tile amx_bf16", True),
        ("Features : fp asimd bf16", False),
    ],
)
def test_tiles_of_bfloat16(elsewhere: Path, flags: str, found: bool) -> None:
    """Fails if AMX is taken for absent, or seen where it is not."""
    (elsewhere / "cpuinfo").write_text(f"processor : 0\nmodel name : A Processor\n{flags}\n")
    assert has_amx() == found
    assert processor_name() == "A Processor"


def test_pairs_of_bfloat16_are_slow_on_intel(elsewhere: Path) -> None:
    """Fails if a Xeon, with AMX or without, multiplies bfloat16 in pairs, or a Zen does not."""
    (elsewhere / "cpuinfo").write_text("processor : 0\nvendor_id\t: GenuineIntel\nflags : avx512_bf16\n")
    assert has_slow_pairs()
    (elsewhere / "cpuinfo").write_text("processor : 0\nvendor_id\t: AuthenticAMD\nflags : avx512_bf16\n")
    assert not has_slow_pairs()


def test_tiles_are_asked_for_where_the_processor_has_them(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if Linux is asked for something else than AMX's tiles, or its answer is turned round."""
    asked: list[tuple[int, ...]] = []
    answers = iter((0, -1))
    (elsewhere / "cpuinfo").write_text("processor : 0\nflags : amx_bf16\n")
    library = types.SimpleNamespace(syscall=lambda *args: asked.append(args) or next(answers))
    monkeypatch.setattr(cpu_machine.ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(cpu_machine.platform, "machine", lambda: "x86_64")
    assert amx_granted()
    assert not amx_granted()
    assert asked == [(158, 0x1023, 18)] * 2


def test_a_processor_without_a_name_goes_by_its_numbers(elsewhere: Path) -> None:
    """Fails if ways of products that were measured on one ARM processor are taken on another."""
    cores = "processor\t: {}\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x1\n"
    (elsewhere / "cpuinfo").write_text("\n".join(cores.format(n) + "CPU part\t: 0xd40\n" for n in range(2)))
    assert processor_name() == "CPU implementer 0x41, part 0xd40, variant 0x1"
