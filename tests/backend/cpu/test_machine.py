"""What the choice of CPU kernels reads from Linux: the processor's name, its cores, tiles of bfloat16."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from mggcn.backend.cpu import cores
from mggcn.backend.cpu import machine as cpu_machine
from mggcn.backend.cpu.machine import amx_granted, has_amx, machine_digest, processor_name, this_host


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Another machine's files, and nothing remembered before or after."""
    monkeypatch.setattr(cpu_machine, "CPUINFO", tmp_path / "cpuinfo")
    for remembered in (amx_granted, has_amx):
        remembered.cache_clear()
    yield tmp_path
    for remembered in (amx_granted, has_amx):
        remembered.cache_clear()


def test_a_machine_that_tells_nothing_has_no_tiles() -> None:
    """Fails if missing files are a traceback."""
    assert not has_amx()
    assert not amx_granted()
    assert isinstance(processor_name(), str)


def test_a_host_is_named_by_cores_threads_and_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if figures of other cores, threads or kernels would be taken for this machine's."""
    monkeypatch.setattr(cpu_machine.native, "isa", lambda: "avx2")
    monkeypatch.setattr(cpu_machine.native, "dense_isa", lambda: "avx512_bf16")
    monkeypatch.setattr(cpu_machine.native, "dense_isas", lambda: ("baseline", "avx2", "avx512", "avx512_bf16"))
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda process: {9, 1, 2, 3, 6})
    found = this_host(2)
    assert (found.cores, found.threads, found.kernels) == ("1-3,6,9", 2, "avx2 baseline avx2 avx512 avx512_bf16")
    monkeypatch.setattr(cpu_machine, "amx_granted", lambda: True)
    assert this_host(2).kernels.endswith(" avx512_bf16 amx")
    monkeypatch.setattr(cpu_machine.native, "dense_isa", lambda: "avx2")
    assert this_host(2).kernels == "avx2 baseline avx2"


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


def test_tiles_are_asked_for_where_the_processor_has_them(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if Linux is asked for something else than AMX's tiles, or its answer is turned round."""
    asked: list[tuple[int, ...]] = []
    answers = iter((0, -1))
    (elsewhere / "cpuinfo").write_text("processor : 0\nflags : amx_bf16\n")
    library = types.SimpleNamespace(syscall=lambda *args: asked.append(args) or next(answers))
    monkeypatch.setattr(cpu_machine.ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(cpu_machine.platform, "machine", lambda: "x86_64")
    assert amx_granted()
    assert amx_granted(), "asked once"
    amx_granted.cache_clear()
    assert not amx_granted()
    assert asked == [(158, 0x1023, 18)] * 2


def test_generations_of_one_name_are_told_apart(elsewhere: Path) -> None:
    """Fails if what was measured on one of a vendor's generations is taken on another of the same name."""
    (elsewhere / "cpuinfo").write_text("cpu family : 25\nmodel : 1\nmodel name : AMD EPYC\nstepping : 1\n")
    assert processor_name() == "AMD EPYC (family 25, model 1, stepping 1)"


def test_machines_of_one_kind_are_told_apart(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if machines that share a home folder take each other's figures, or one machine is two."""
    monkeypatch.setattr(cpu_machine, "MACHINE_ID", elsewhere / "machine-id")
    monkeypatch.setattr(cpu_machine.platform, "node", lambda: "node-1")
    by_name = machine_digest()
    (elsewhere / "machine-id").write_text("0123456789abcdef\n")
    assert by_name != machine_digest() == machine_digest()
    (elsewhere / "machine-id").write_text("\n")
    assert machine_digest() == by_name


def test_a_processor_without_a_name_goes_by_its_numbers(elsewhere: Path) -> None:
    """Fails if ways of products that were measured on one ARM processor are taken on another."""
    cores = "processor\t: {}\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x1\n"
    (elsewhere / "cpuinfo").write_text("\n".join(cores.format(n) + "CPU part\t: 0xd40\n" for n in range(2)))
    assert processor_name() == "CPU implementer 0x41, part 0xd40, variant 0x1"
