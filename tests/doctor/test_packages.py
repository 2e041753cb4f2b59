"""packages.py with planted faults."""

from __future__ import annotations

import importlib
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from mggcn.doctor import packages


def test_extras_are_those_of_pyproject() -> None:
    """Fails if a line of the doctor names an extra that does not exist, or no package of one."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert set(packages.PURPOSES) <= set(project["optional-dependencies"])


def test_all_that_the_metadata_asks_for_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a package is passed over, or one of another extra is asked for."""
    asked = ["numpy>=1.26", "no-such>=2", 'matplotlib>=3.8; extra == "report"', 'absent>=1; extra == "cuda12"']
    monkeypatch.setattr(metadata, "requires", lambda name: asked)
    needed, optional = packages.check_packages()
    assert [(f.name, f.state) for f in needed] == [("Python", "ok"), ("numpy", "ok"), ("no-such", "broken")]
    assert needed[2].remedy == 'pip install "no-such>=2"'
    assert [(f.name, f.state) for f in optional] == [("matplotlib", "ok")]


def test_old_absent_and_unloadable_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    numpy, drawing = Requirement("numpy>=1.26"), Requirement("matplotlib>=3.8")
    monkeypatch.setattr(metadata, "version", lambda name: "1.9.5")
    finding = packages.check_required(numpy)
    assert (finding.state, finding.detail) == ("broken", "1.9.5, expected >=1.26")
    assert finding.remedy == 'pip install "numpy>=1.26"'
    finding = packages.check_optional(drawing, "report")
    assert (finding.state, finding.detail) == ("missing", "1.9.5, expected >=3.8")

    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    assert packages.check_required(numpy).state == "broken"
    assert packages.check_optional(drawing, "report").remedy == 'for mggcn report: pip install "mggcn[report]"'

    def unloadable(name: str) -> None:
        raise OSError("libopenblas.so.0: cannot open shared object file")

    monkeypatch.setattr(importlib, "import_module", unloadable)
    assert "libopenblas" in packages.check_required(numpy).detail


@pytest.mark.parametrize(
    ("version", "least", "enough"),
    [("2.13.0+cpu", "2.6", True), ("2.5.1", "2.6", False), ("10.0rc1", "9.1", True), ("2.6.0a0+git12", "2.6", True)],
)
def test_version_order(version: str, least: str, enough: bool) -> None:
    assert packages.suffices(version, Requirement(f"torch>={least}")) is enough
