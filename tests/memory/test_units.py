"""Sizes as text, and what a machine or control group leaves free."""

from __future__ import annotations

from pathlib import Path

import pytest

from mggcn.config.values import parse_bytes
from mggcn.memory.units import GIB, MIB, duration, free_bytes, human


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


def test_free_memory_within_a_control_group(tmp_path: Path) -> None:
    """Fails if the limit of a container or of a group around it is not seen, or an exceeded limit turns negative."""
    assert free_bytes() > 10**7
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 4000 kB\nMemFree: 1000 kB\nMemAvailable: 2000 kB\n")
    assert free_bytes(tmp_path) == 2000 * 1024
    (tmp_path / "proc/self/cgroup").write_text("0::/outer/inner\n")
    group = tmp_path / "sys/fs/cgroup/outer"
    (group / "inner").mkdir(parents=True)
    (group / "inner/memory.max").write_text("max\n")
    (group / "inner/memory.current").write_text("600000\n")
    assert free_bytes(tmp_path) == 2000 * 1024
    (group / "memory.max").write_text("1000000\n")
    for used, expected in ((600000, 400000), (1200000, 0)):
        (group / "memory.current").write_text(f"{used}\n")
        assert free_bytes(tmp_path) == expected


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (61, "1 min 1 s"), (3600, "1 h"), (7500, "2 h 5 min"), (273700, "3 d 4 h")]
)
def test_durations(seconds: float, text: str) -> None:
    """Fails if a time left is told in the wrong unit."""
    assert duration(seconds) == text
