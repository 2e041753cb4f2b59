"""Sizes as text, and what a machine or control group leaves free."""

from __future__ import annotations

from pathlib import Path

import pytest

from mggcn.plan import machine
from mggcn.plan.machine import GIB, MIB, free_bytes, human, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("1000000", 10**6),
        ("1_000_000", 10**6),
        ("512B", 512),
        ("512MiB", 512 * MIB),
        (" 80 GiB ", 80 * GIB),
        ("32GB", 32 * 10**9),
        ("1.5g", 1.5 * GIB),
        ("2k", 2048),
        ("3TB", 3 * 10**12),
        (".5 kib", 512),
    ],
)
def test_parse_bytes(text: str, expected: int) -> None:
    """Fails if a unit is taken for another, powers of 1000 for those of 1024, or spaces and case matter."""
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "12 parsecs", "-5", "1e3", "nan", "inf", "1.2.3", "0x10", "5 GiB 3"])
def test_parse_bytes_refuses(text: str) -> None:
    """Fails if nonsense becomes a number, or the message does not show what is expected."""
    with pytest.raises(ValueError, match="expected bytes such as 512MiB"):
        parse_bytes(text)


def test_human() -> None:
    """Fails if a size is shown with a wrong unit."""
    sizes = (0, 512, 2048, 20.1 * MIB, 1.5 * GIB, 3 * 2**40)
    assert [human(s) for s in sizes] == ["0 B", "512 B", "2.00 KiB", "20.10 MiB", "1.50 GiB", "3.00 TiB"]


def fake_group(folder: Path, limit: str, usage: str, stat: str = "") -> tuple[tuple[str, str, str], ...]:
    for name, text in (("limit", limit), ("usage", usage), ("stat", stat)):
        (folder / name).write_text(text)
    return ((str(folder / "limit"), str(folder / "usage"), str(folder / "stat")),)


def test_free_memory_within_a_control_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the limit of a container is not seen, file pages count as used, or an exceeded limit turns negative."""
    monkeypatch.setattr(machine, "_CGROUPS", ())
    machine_free = free_bytes()
    assert machine_free > 0
    for limit, usage, stat, expected in (
        ("1000000", "600000", "inactive_file 100000\nactive_file 50000\nanon 7\n", 550000),
        ("1000000\n", "600000\n", "", 400000),
        ("1000000", "1200000", "", 0),
        ("max", "600000", "", None),
        ("damaged", "?", "a b c", None),
        (str(2**63 - 4096), "600000", "", None),
    ):
        monkeypatch.setattr(machine, "_CGROUPS", fake_group(tmp_path, limit, usage, stat))
        free = free_bytes()
        assert free > 10**7 if expected is None else free == expected
    monkeypatch.setattr(machine, "_CGROUPS", (("/nowhere/a", "/nowhere/b", "/nowhere/c"),))
    assert free_bytes() > 10**7
